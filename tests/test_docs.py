import re
import runpy
import tomllib
from pathlib import Path

import pytest

import tnetcli
from tests.commands import tnet
from tnetcli import errors

ROOT = Path(__file__).parents[1]


def test_the_command_line_reference_is_up_to_date():
    made = runpy.run_path(str(ROOT / "docs" / "make_cli.py"))["cli_page"]()
    assert (ROOT / "docs" / "cli.md").read_text(encoding="utf-8") == made, "run `make docs`"


def test_the_changelog_names_the_version_of_the_package():
    newest = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    expected = "Unreleased" if ".dev" in tnetcli.__version__ else tnetcli.__version__
    assert newest.group(1) == expected


@pytest.mark.parametrize(
    "kind",
    [each for each in vars(errors).values()
     if isinstance(each, type) and issubclass(each, errors.TnetError)],
)  # fmt: skip
def test_every_error_and_its_exit_code_is_documented(kind):
    page = (ROOT / "docs" / "errors.md").read_text()
    if kind is not errors.TnetError:
        assert re.search(rf"\| {kind.exit_code} \|.*`{kind.__name__}`", page)


def test_every_dependency_floor_has_a_reason():
    text = (ROOT / "pyproject.toml").read_text()
    parsed = tomllib.loads(text)["project"]
    extras = parsed["optional-dependencies"]
    for requirement in [*parsed["dependencies"], *extras["slides"], *extras["zarr"]]:
        line = next(line for line in text.splitlines() if f'"{requirement}"' in line)
        assert re.search(r"# \w+", line), requirement


@pytest.mark.parametrize("page", [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md"])
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("command", ["profile", "models"])
def test_the_readme_shows_what_a_command_prints(command):
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(rf"^\$ tnet ({command} .*)\n((?:.*\n)*?)```", page, re.MULTILINE)
    for arguments, output in shown:
        assert tnet(*arguments.split(), cwd=ROOT).stdout == output
    assert shown or command != "profile"
