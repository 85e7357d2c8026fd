"""The wheel and the source archive are complete and work outside the repository."""

import json
import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.commands import ROOT
from tests.images import noise, write_geotiff

# Every test builds or installs an archive.
pytestmark = pytest.mark.slow
BUILD = "from hatchling.build import {0} as build; print(build({1!r}))"


def build(kind, source, folder):
    """Build an archive with the installed tools, without downloads."""
    done = subprocess.run(
        [sys.executable, "-c", BUILD.format(f"build_{kind}", str(folder))],
        cwd=source, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return folder / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    return build("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """Return the folder of the source archive."""
    folder = tmp_path_factory.mktemp("sdist")
    with tarfile.open(build("sdist", ROOT, folder)) as archive:
        archive.extractall(folder, filter="data")
    (source,) = (path for path in folder.iterdir() if path.is_dir())
    return source


def names_in(wheel):
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def kept(folder):
    """Return the files of a folder without bytecode."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_the_wheel_contains_the_package_and_the_recipes_only(wheel):
    recipes = {f"tnetcli/recipes/{path.name}" for path in (ROOT / "recipes").glob("*.yaml")}
    assert len(recipes) > 20
    assert names_in(wheel) == kept("tnetcli") | recipes


@pytest.mark.parametrize("name", ["default.safetensors", "page.css", "page.html", "page.js"])
def test_the_wheel_contains_the_assets(wheel, name):
    stored = zipfile.ZipFile(wheel).read(f"tnetcli/assets/{name}")
    assert stored == (ROOT / "tnetcli" / "assets" / name).read_bytes()


def test_the_wheel_is_small_and_platform_independent(wheel):
    assert wheel.name.endswith("-py3-none-any.whl")
    assert wheel.stat().st_size < 4_000_000


def test_the_wheel_has_the_extras(wheel):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    metadata = Parser().parsestr(archive.read(name).decode())
    assert {"slides", "zarr", "tables", "dask", "tensorboard", "all"} <= {
        *metadata.get_all("Provides-Extra")
    }
    assert metadata["License-Expression"] == "Apache-2.0"


def test_the_source_archive_builds_the_same_wheel(wheel, unpacked, tmp_path):
    assert names_in(build("wheel", unpacked, tmp_path)) == names_in(wheel)


@pytest.mark.parametrize(
    "name", ["README.md", "CHANGELOG.md", "LICENSE", "Makefile", "pyproject.toml",
             "recipes/default.yaml", "tests/commands.py", "docs/cli.md", "examples/make_scene.py"]
)  # fmt: skip
def test_the_source_archive_is_complete(unpacked, name):
    assert (unpacked / name).is_file()


def test_files_beside_recipes_are_not_packed(unpacked, tmp_path):
    images = unpacked / "recipes" / "digits"
    images.mkdir()
    (images / "0.png").write_bytes(b"a picture")
    (unpacked / "recipes" / "digits.csv").write_text("path,label\n")
    try:
        names = names_in(build("wheel", unpacked, tmp_path))
    finally:
        (images / "0.png").unlink()
        images.rmdir()
        (unpacked / "recipes" / "digits.csv").unlink()
    assert not [name for name in names if "digits/" in name or name.endswith(".csv")]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """Return a function that runs `tnet` installed from the wheel, outside the repository."""
    home = tmp_path_factory.mktemp("installed")
    venv = home / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps",
         "--no-index", "--disable-pip-version-check", str(wheel)],
        check=True,
    )  # fmt: skip
    # Use the dependencies of this environment. Its own tnet is not found: an editable install is a
    # .pth file, and these are not followed twice.
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    away = home / "away"
    away.mkdir()
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("TNET_", "GDAL_", "PYTHON", "COVERAGE"))
    }

    def run(*command, program="tnet"):
        return subprocess.run(
            [venv / "bin" / program, *map(str, command)],
            cwd=away,
            env={**clean, "TNET_CACHE": str(home / "cache"), "COLUMNS": "100"},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )

    where = run("-c", "import tnetcli; print(tnetcli.__file__)", program="python").stdout.strip()
    assert Path(where).is_relative_to(venv), where
    return run


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    path = tmp_path_factory.mktemp("scenes") / "scene.tif"
    return write_geotiff(path, noise((1024, 1024)), overviews=(2, 4))


def good(done):
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_an_installed_tnet_shows_help_and_recipes(installed):
    assert "predict" in good(installed("--help"))
    listed = good(installed("recipes", "list")).splitlines()
    assert len(listed) == len(list((ROOT / "recipes").glob("*.yaml")))
    assert good(installed("recipes", "copy", "own-images")) == "own-images.yaml\n"
    assert "family: tnet" in good(installed("train", "own-images.yaml", "--print-recipe"))
    assert "default" in good(installed("models"))


@pytest.mark.timeout(900)
def test_an_installed_tnet_predicts_and_exports(installed, scene, tmp_path):
    report = json.loads(good(installed("doctor", "--json")))
    assert report["libraries"]["torch"]
    assert "1024 x 1024" in good(installed("info", scene))
    records = tmp_path / "out.jsonl"
    good(installed("predict", scene, "-o", records, "--levels", "2"))
    assert json.loads(records.read_text())["status"] == "ok"
    for name in ("a.geojson", "a.png", "a.html", "a.csv", "a.tif"):
        good(installed("export", records, "-o", tmp_path / name))
        assert (tmp_path / name).stat().st_size > 100
