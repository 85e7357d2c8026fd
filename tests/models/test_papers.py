import subprocess
import sys

import pytest

from tnetcli.models.papers import PAPERS
from tnetcli.models.registry import FAMILIES, read_arguments

SIZES = range(5)
NAMES = {
    "tnet-imagenet",
    "bagnet-77",
    "tnet-fmow",
    "anchornet",
    "saccader",
    *(f"dram-{glimpses}" for glimpses in (2, 4, 8, 20)),
    "two-stream-cub-vgg19",
    *(f"en-b0-fmow-{side}" for side in (224, 448, 896)),
    *(f"{kind}-{data}-b{n}" for kind in ("tnet", "en") for data in ("cub", "nabirds")
      for n in SIZES),
}  # fmt: skip


def test_every_published_model_is_there():
    assert set(PAPERS) == NAMES


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_a_published_model_can_be_described(name):
    model = PAPERS[name]
    arguments = read_arguments(model.family, model.arguments)
    assert model.trainable or model.total
    assert () in model.multiplications
    if model.family == "tnet":
        assert arguments.view_size < model.image_size
    else:
        assert arguments.view_size == model.image_size
    if model.family not in ("tnet", "two_stream"):
        assert set(model.multiplications) == {()}


@pytest.mark.parametrize("name", sorted(PAPERS))
def test_more_windows_cost_more(name):
    costs = list(PAPERS[name].multiplications.values())
    assert costs == sorted(costs)


def test_a_cell_of_a_bird_is_157_pixels_enlarged_to_224():
    for name in ("tnet-cub-b0", "tnet-nabirds-b4"):
        grid = PAPERS[name].arguments["grid"]
        assert round(grid["cell_fraction"] * PAPERS[name].image_size) == 157
        assert PAPERS[name].arguments["view_size"] == 224


def test_only_what_a_paper_prints_is_called_published():
    derived = {name for name, model in PAPERS.items() if model.source == "derived"}
    assert derived == {name for name in PAPERS if "-cub-" in name or "-nabirds-" in name}


def test_the_figures_load_no_torch():
    code = "import sys, tnetcli.models.papers; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_family_has_something_published():
    assert {model.family for model in PAPERS.values()} == set(FAMILIES)


def test_glimpses_are_those_of_the_name():
    for glimpses in (2, 4, 8, 20):
        assert PAPERS[f"dram-{glimpses}"].arguments == {"glimpses": glimpses}


def test_patches_are_where_maps_end():
    model = PAPERS["anchornet"]
    sides = [model.maps[f"anchor.branches.{branch}.blocks.1"][0] for branch in range(3)]
    assert model.positions == tuple(side**2 for side in sides)
