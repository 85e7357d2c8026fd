import re
import runpy
import tomllib

import pytest
import yaml
from pydantic import BaseModel

import tnetcli
from tests.commands import ROOT
from tnetcli import errors
from tnetcli.models.registry import FAMILIES
from tnetcli.training.recipe import read_recipe


def test_the_command_line_reference_is_up_to_date():
    made = made_by("make_cli.py")["cli_page"]()
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


@pytest.mark.parametrize(
    "page",
    [*sorted(ROOT.glob("docs/**/*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_between_pages_are_valid(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#:]*)(#[^)]*)?\)", text) + re.findall(r'src="([^":]+)()"', text)
    for target, heading in links:
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name} links to {target}"
        assert not heading or heading[1:] in anchors(path), f"{page.name} links to {heading}"


def anchors(page):
    """Return the link targets of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


def made_by(script):
    """Return the names that a script of docs/ defines."""
    return runpy.run_path(str(ROOT / "docs" / script))


def test_the_reference_of_recipes_is_up_to_date():
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    assert page == made_by("make_recipes.py")["recipes_page"](), "run `make docs`"


def test_the_reference_of_recipes_has_every_key():
    page = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert keys_of(read_recipe(ROOT / "recipes" / "default.yaml").as_data()) <= listed


def keys_of(table):
    """Return the keys of a recipe and its sections, except for grids and tables of names."""
    found = set(table)
    for key, value in table.items():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, dict) and key not in ("grid", "weights"):
                found |= keys_of(each)
    return found


def test_a_key_without_a_description_is_an_error():
    class Bare(BaseModel):
        bare: int = 0

    with pytest.raises(ValueError, match="bare"):
        list(made_by("make_recipes.py")["_table"](Bare.model_fields))


def test_the_figure_of_the_readme_is_up_to_date():
    made = made_by("make_how_it_works.py")
    assert made["PICTURE"].read_text(encoding="utf-8") == made["picture"](), "run `make docs`"


def test_the_figures_of_the_readme_are_those_of_the_results():
    made = made_by("make_readme.py")
    page, results = (made[each].read_text(encoding="utf-8") for each in ("PAGE", "RESULTS"))
    assert page == made["readme_page"](page, results), "run `make docs`"


def test_the_readme_shows_the_accuracy_of_families():
    row = "| {} | 64 px | 71.5 | 70.0 to 73.0 | 3.0 | 65536 | 12 | 1.0 | 2.0 | 4.1 to 4.3 |"
    heading = "| model | views | accuracy, % | seeds | regions | pixels decoded "
    heading += "| multiplications, M | ms reading | ms in the model | training, CPU min |"
    text = "\n".join(("<!-- families -->", heading, row.format("dram"), "<!-- /families -->"))
    made = made_by("make_readme.py")
    table = made["families"](made["read_results"](text)).splitlines()
    (dram,) = (line for line in table if "`dram`" in line)
    assert "71.5 (70.0 to 73.0) | 12 | 4.1 to 4.3" in dram
    assert made["UNKNOWN"] not in dram
    assert made["UNKNOWN"] in table[2]  # of another family


def test_every_family_is_in_the_table_of_the_readme():
    rows = made_by("make_readme.py")["FAMILIES"]
    assert {row[0].split(",")[0] for row in rows} == set(FAMILIES)
    named = {name for _, _, small, published in rows for name in (small, *published.split(", "))}
    assert {name for name in named if name} <= {path.stem for path in ROOT.glob("recipes/*.yaml")}


def test_pictures_are_small():
    for path in (ROOT / "docs" / "pictures").iterdir():
        assert path.stat().st_size < 400_000, path.name


def test_the_architecture_page_names_every_package():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    tree = re.search(r"```\ntnetcli/\n(.*?)```", page, re.DOTALL)[1]
    named = set(re.findall(r"(\w+)(?:\.py|/)", tree))
    package = ROOT / "tnetcli"
    modules = {path.stem for path in package.glob("*.py")} - {"__init__", "__main__"}
    assert named == modules | {path.parent.name for path in package.glob("*/__init__.py")}


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_paths_in_the_text_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    for path in re.findall(r"`((?:tnetcli|tests|benchmarks|recipes)/[\w/.-]+)`", text):
        assert "NAME" in path or (ROOT / path).exists(), path


def test_the_pages_are_short():
    for page, most in (("README.md", 140), ("docs/architecture.md", 150)):
        assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= most


def test_every_decision_is_listed():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for path in (ROOT / "docs" / "decisions").glob("*.md"):
        title = path.read_text(encoding="utf-8").split("\n", 1)[0].removeprefix("# ")
        assert f"[{title}](decisions/{path.name})" in page


def test_the_citation_names_the_newest_release_and_all_papers():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors", "license"} <= set(cited)
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[(.+?)\] - (.+)$", changelog, re.MULTILINE)
    assert newest.groups() == (cited["version"], cited["date-released"])
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for paper in cited["references"]:
        assert {"type", "title", "authors"} <= set(paper)
        assert paper["url"].split("/")[-1] in readme, paper["title"]
