"""The toy plug-in, installed by its entry points for the tests of this folder."""

import tomllib
from pathlib import Path

import pytest

TOY = Path(__file__).parent / "toy"


@pytest.fixture(scope="session")
def toy_distribution(tmp_path_factory):
    """Return a folder with the metadata that `pip install` would write."""
    project = tomllib.loads((TOY / "pyproject.toml").read_text())["project"]
    folder = tmp_path_factory.mktemp("site-packages")
    metadata = folder / "tnet_toy-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tnet-toy\nVersion: 1.0\n")
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())])
        for group, entries in project["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n\n".join(groups) + "\n")
    return folder


@pytest.fixture(autouse=True, scope="module")
def _installed(toy_distribution):
    """Install the toy package for the tests of a module."""
    with pytest.MonkeyPatch.context() as patch:
        for folder in (TOY, toy_distribution):
            patch.syspath_prepend(str(folder))
        yield
