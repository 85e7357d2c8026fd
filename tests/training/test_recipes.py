"""Every recipe that is shipped: it says what was published, and it trains."""

import csv
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.paper_tables import PAPERS
from tests.commands import ROOT
from tests.images import noise
from tests.runs import Ears
from tnetcli.config import apply_overrides
from tnetcli.data.colour import AMOUNTS
from tnetcli.models.checkpoint import load_checkpoint
from tnetcli.models.registry import build_model, read_model_config
from tnetcli.training.recipe import Recipe, StageConfig, check_recipe, read_recipe
from tnetcli.training.run import run_recipe

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
DROPPED = {"dropout", "feature_dropout", "drop_path"}  # matters in training only


def comments_of(path: Path) -> list[str]:
    """Return what stands in the comment at the head of a recipe, line by line."""
    lines = path.read_text(encoding="utf-8").splitlines()
    head = lines[: next(i for i, line in enumerate(lines) if not line.startswith("#"))]
    return [line.removeprefix("#") for line in head]


def variants_of(path: Path) -> dict[str, list[str]]:
    """Return the settings that the head of a recipe names for its other runs, by name."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in comments_of(path):
        start = re.match(r" {3}(.+?): --set ", line)
        name = start[1] if start else name
        settings = re.findall(r"--set (\S+)", line)
        assert not settings or name, f"{path.name}: --set of what? {line}"
        if settings:
            found.setdefault(name, []).extend(settings)
    return found


RUNS = [(path, "", []) for path in RECIPES] + [
    (path, name, settings) for path in RECIPES for name, settings in variants_of(path).items()
]
NAMES = [" ".join(filter(None, (path.stem, name))) for path, name, _ in RUNS]


# What the papers' runs were: SPEC 2.6, row by row.
@dataclass(frozen=True)
class Run:
    """One published run; `whole` has no windows, so no sequence and no locations."""

    model: str  # in PAPERS
    epochs: tuple[int, ...]
    rate: float
    drop_at: float
    batch: int
    dropout: float = 0.0
    feature_dropout: float = 0.0
    drop_path: tuple[float, ...] = (0.0,)
    keep: tuple[tuple[int, ...], ...] = ((),)
    sequence: tuple[float, ...] = (1.0,)
    cap: tuple[int | None, ...] = (None,)
    backbone_rate: float | None = None
    l2: float = 0.0
    l2_of: str = "all"
    contrastive: float = 0.0
    augmentation: str = "colour"


def birds(model: str, epochs: int, contrastive: float, keep: tuple[int, ...]) -> Run:
    """Return a run on CUB or NABirds: of a TNet, or of the whole image where nothing is kept."""
    return Run(
        model,
        (epochs,),
        1e-3,
        0.9,
        64,
        dropout=0.75,
        drop_path=(0.5,),
        keep=(keep,),
        sequence=(0.3 if keep else 1.0,),
        backbone_rate=1e-4 if keep else 5e-5,
        l2=1e-4,
        l2_of="new",
        contrastive=contrastive,
        augmentation="geometry",
    )


def fmow(model: str, epochs: int, batch: int, dropout: float, drop_path: float) -> Run:
    """Return a run of the whole image on fMoW."""
    return Run(model, (epochs,), 1e-3, 0.8, batch, dropout=dropout, drop_path=(drop_path,), l2=1e-5)


PUBLISHED = {
    "tnet-imagenet": Run(
        "tnet-imagenet", (200,), 1e-4, 0.8, 64, feature_dropout=0.5, keep=((3,),), sequence=(0.3,)
    ),
    # 200 epochs with a drop at 80 %, of which 175 were run.
    "whole-bagnet77": Run("bagnet-77", (175,), 1e-4, 160 / 175, 64, feature_dropout=0.625),
    "tnet-fmow": Run(
        "tnet-fmow",
        (40, 10),
        1e-3,
        0.8,
        64,
        dropout=0.5,
        drop_path=(0.3, 0.5),
        keep=((2,), (2, 1)),
        sequence=(0.2, 0.05),
        cap=(None, 2),
    ),
    "whole-b0": fmow("en-b0-fmow-448", 30, 32, 0.75, 0.3),
    "whole-b0 224 pixels": fmow("en-b0-fmow-224", 60, 64, 0.75, 0.5),
    "whole-b0 896 pixels": fmow("en-b0-fmow-896", 30, 32, 0.3, 0.2),
    "whole-b0 boxes": fmow("en-b0-fmow-224", 65, 64, 0.75, 0.5),
    "tnet-cub-b0": birds("tnet-cub-b0", 200, 100, (5,)),
    "tnet-cub-b0 B1": birds("tnet-cub-b1", 200, 100, (5,)),
    "tnet-cub-b0 B2": birds("tnet-cub-b2", 200, 100, (5,)),
    "tnet-cub-b0 B3": birds("tnet-cub-b3", 200, 100, (5,)),
    "tnet-cub-b0 B4": birds("tnet-cub-b4", 125, 100, (5,)),
    "tnet-nabirds-b0": birds("tnet-nabirds-b0", 100, 50, (5,)),
    "tnet-nabirds-b0 B1": birds("tnet-nabirds-b1", 100, 50, (5,)),
    "tnet-nabirds-b0 B2": birds("tnet-nabirds-b2", 100, 50, (5,)),
    "tnet-nabirds-b0 B3": birds("tnet-nabirds-b3", 100, 50, (3,)),
    "tnet-nabirds-b0 B4": birds("tnet-nabirds-b4", 100, 50, (3,)),
    "whole-cub-b0": birds("en-cub-b0", 200, 100, ()),
    "whole-cub-b0 B1": birds("en-cub-b1", 200, 100, ()),
    "whole-cub-b0 B2": birds("en-cub-b2", 200, 100, ()),
    "whole-cub-b0 B3": birds("en-cub-b3", 200, 100, ()),
    "whole-cub-b0 B4": birds("en-cub-b4", 200, 100, ()),
    "whole-nabirds-b0": birds("en-nabirds-b0", 100, 50, ()),
    "whole-nabirds-b0 B1": birds("en-nabirds-b1", 100, 50, ()),
    "whole-nabirds-b0 B2": birds("en-nabirds-b2", 100, 50, ()),
    "whole-nabirds-b0 B3": birds("en-nabirds-b3", 100, 50, ()),
    "whole-nabirds-b0 B4": birds("en-nabirds-b4", 100, 50, ()),
}
OURS = {"default", "own-images", "tnet-digits", "tnet-megapixel-mnist"}
# Baselines of which too little is published to be a row of SPEC 2.6, and their small ones.
OURS |= {"en-cub-crops", "en-crops-digits"}
OURS |= {"two-stream-cub", "two-stream-digits"}
OURS |= {"anchornet-imagenet", "anchornet-imagenet patches", "anchornet-digits"}
OURS |= {"whole-digits", "whole-digits 64 pixels"}
OURS |= {"saccader-imagenet", "saccader-digits", "dram-imagenet", "dram-digits"}
PRINTED = [run for run, name in zip(RUNS, NAMES, strict=True) if name in PUBLISHED]
PRINTED_NAMES = [name for name in NAMES if name in PUBLISHED]


def test_every_recipe_is_a_published_run_or_ours():
    assert set(NAMES) == {*PUBLISHED, *OURS}


@pytest.mark.parametrize(("path", "name", "settings"), PRINTED, ids=PRINTED_NAMES)
def test_a_recipe_builds_the_published_model(path, name, settings):
    recipe = read_recipe(path, settings)
    published = PAPERS[PUBLISHED[" ".join(filter(None, (path.stem, name)))].model]
    expected = read_model_config(published.family, published.arguments).model_dump()
    reported = recipe.model.arguments.model_dump()
    assert recipe.model.family == published.family
    assert recipe.model.class_count == published.classes
    assert {k: reported[k] for k in reported.keys() - DROPPED} == {
        k: expected[k] for k in expected.keys() - DROPPED
    }


@pytest.mark.parametrize(("path", "name", "settings"), PRINTED, ids=PRINTED_NAMES)
def test_a_recipe_trains_as_published(path, name, settings):
    recipe = read_recipe(path, settings)
    run = PUBLISHED[" ".join(filter(None, (path.stem, name)))]
    stages = recipe.stages
    dropped = recipe.model.arguments
    assert tuple(stage.epochs for stage in stages) == run.epochs
    assert {stage.batch_size or recipe.training.batch_size for stage in stages} == {run.batch}
    assert (dropped.dropout, dropped.feature_dropout) == (run.dropout, run.feature_dropout)
    rates = tuple(
        dropped.drop_path if stage.drop_path is None else stage.drop_path for stage in stages
    )
    assert rates == run.drop_path
    assert tuple(_kept(recipe, stage) for stage in stages) == run.keep
    for stage, sequence, cap in zip(stages, run.sequence, run.cap, strict=True):
        _check_optimizer(stage, run)
        _check_loss(stage, run, sequence, cap)
        _check_augmentation(stage, run)
    assert recipe.data is not None
    assert recipe.data.statistics == "unit"  # from -1 to 1


def _kept(recipe: Recipe, stage: StageConfig) -> tuple[int, ...]:
    """Return what is kept at each level of a stage that has cells."""
    levels = stage.levels or recipe.traversal.levels
    keep = stage.keep or recipe.traversal.keep
    return keep[: levels - 1]


def _check_optimizer(stage: StageConfig, run: Run) -> None:
    optimizer, schedule = stage.optimizer, stage.schedule
    assert (optimizer.kind, optimizer.betas, optimizer.epsilon) == ("adam", (0.9, 0.999), 1e-7)
    assert (optimizer.lr, optimizer.backbone_lr) == (run.rate, run.backbone_rate)
    assert (optimizer.weight_decay, optimizer.clip, optimizer.accumulate) == (0, None, 1)
    assert (schedule.kind, schedule.warmup, schedule.factor) == ("step", 0, 0.1)
    assert schedule.drops == pytest.approx((run.drop_at,), abs=1e-6)


def _check_loss(stage: StageConfig, run: Run, sequence: float, cap: int | None) -> None:
    loss = stage.loss
    assert (loss.sequence, loss.cap) == (sequence, cap)
    if run.keep != ((),):
        assert loss.rule == "paper"
        assert (loss.reinforce, loss.decay, loss.samples) == (0.1, 0.9, 1)
        assert loss.reinforce_sequence == sequence
    assert (loss.l2, loss.contrastive) == (run.l2, run.contrastive)
    assert not run.l2 or loss.l2_of == run.l2_of
    assert not run.contrastive or loss.margin == 0.4
    assert loss.label_smoothing == 0


def _check_augmentation(stage: StageConfig, run: Run) -> None:
    changed = stage.augmentation
    assert (changed.crop, changed.aspect, changed.flip) == ((0.85, 1.0), (0.5, 2.0), "horizontal")
    coloured = run.augmentation == "colour"
    assert (changed.colour, changed.shift, changed.rotate) == (
        (True, 0, 0) if coloured else (False, 0.1, 20)
    )
    reaches = [reach for _, reach in AMOUNTS.values()]  # brightness, saturation, hue, contrast
    assert reaches == [32 / 255, 0.5, 0.2, 0.5]
    assert (changed.turns, changed.blur) == (False, 0)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_key_says_what_it_does(path):
    reported = False
    for line in path.read_text(encoding="utf-8").splitlines():
        is_key = line.startswith(" ") and ":" in line.split("#")[0]
        reported = "#" in line or (
            reported and line.startswith("    ")
        )  # a table tells for its keys
        assert reported or not is_key, line


@pytest.mark.parametrize(("path", "name", "settings"), RUNS, ids=NAMES)
def test_what_is_printed_reads_back_the_same(path, name, settings, tmp_path):
    recipe = read_recipe(path, settings)
    (tmp_path / "printed.yaml").write_text(recipe.as_yaml(), encoding="utf-8")
    data = read_recipe(tmp_path / "printed.yaml").as_data()
    expected = recipe.as_data()
    for each in (data, expected):  # paths are relative to the recipe
        each["data"]["path"] = Path(each["data"]["path"]).name
    assert data == expected


# What a run is made small by: whatever a recipe says, these say last.
SIDE = 160  # of the images: a cell of a cell of a crop has 32 pixels
LABELS = ("blue", "green", "red")
TILES = 16  # of each class
TINY = [
    *("training.threads=1", "training.device=cpu", "training.batch_size=2"),
    *("training.validate_every=2", "training.validation_images=1", "model.pretrained=false"),
]
OF_FILES = ["model.classes=3", "data.statistics_images=2"]
ONE_WINDOW = ["traversal.keep=1"]
SMALL_VIEWS = ["model.view_size=64"]  # of whole images
SMALLER_VIEWS = ["model.view_size=32", "traversal.min_size=4"]  # where cells may be anywhere
# 512 pixels are to 32 what 2048 are to 128: all three levels are there.
OF_TILES = [
    *("model.view_size=32", "data.landscape.size=512", "data.landscape.neighbours=2"),
    *("data.landscape.training=4", "data.landscape.validation=1", "data.landscape.test=1"),
    "data.statistics_images=1",
]
# Of families that take glimpses inside of a view: four places, glimpses of a third.
GLIMPSES = {
    "saccader": ["model.view_size=85", "model.width=0.0625", "model.glimpses=2"],
    "dram": [
        *("model.backbone=compact", "model.view_size=48", "model.glimpse_size=16"),
        *("model.glimpses=2", "model.state_size=16"),
    ],
}
STREAMS = [  # of two_stream: two networks, and one that thinks in steps
    *("model.backbone=compact", "model.view_size=32", "model.local_size=16"),
    *("model.state_size=16", "traversal.min_size=4"),
]
ONE_IMAGE = ["training.batch_size=1"]  # where views are as large as the papers'
# Larger models on NABirds are those of CUB once more.
SECOND_TIME = ["model.alignment=pool", "model.view_size=96", "traversal.min_size=4"]


@pytest.fixture(scope="module")
def manifests(tmp_path_factory) -> dict[int, Path]:
    """Write a list of images for each number of bands: one of a class to train on, one more."""
    found = {}
    for bands in (1, 3):
        folder = tmp_path_factory.mktemp(f"bands-{bands}")
        rows = [("path", "label", "split", "box")]
        for number, (label, split) in enumerate(
            [*((label, "train") for label in LABELS), (LABELS[0], "validation")]
        ):
            pixels = noise((SIDE, SIDE), bands, seed=number).transpose(1, 2, 0)
            Image.fromarray(pixels.squeeze()).save(folder / f"{number}.png")
            rows.append((f"{number}.png", label, split, f"0 0 {SIDE} {SIDE}"))
        with (folder / "images.csv").open("w", newline="") as file:
            csv.writer(file).writerows(rows)
        found[bands] = folder / "images.csv"
    return found


@pytest.fixture(scope="module")
def tiles(tmp_path_factory) -> Path:
    """Write tiles of the classes that the recipe of the bundled model is about."""
    landscape = read_recipe(ROOT / "recipes" / "default.yaml").data.landscape
    folder = tmp_path_factory.mktemp("tiles")
    random = np.random.default_rng(0)
    for name in (*landscape.sites, *landscape.background):
        (folder / name).mkdir()
        for number in range(TILES):
            pixels = random.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{name}_{number}.png")
    return folder


def small(
    path: Path, name: str, settings: list[str], manifests: Mapping[int, Path], tiles: Path
) -> Recipe:
    """Return a recipe that takes two small steps in each stage, and is otherwise as it was."""
    recipe = read_recipe(path, settings)
    assert recipe.data is not None
    changes = [*settings, *TINY]
    for number, stage in enumerate(recipe.stages):
        changes += [f"stages.{number}.epochs=null", f"stages.{number}.steps=2"]
        changes += [f"stages.{number}.batch_size=2"] if stage.batch_size else []
        changes += [f"stages.{number}.keep=1"] if stage.keep else []
        if stage.learn == "tiles":
            views = [1] * len(stage.tiles.views)
            changes.append(f"stages.{number}.tiles.views={views}")
    if recipe.data.kind == "mosaic":
        return read_recipe(path, [*changes, *OF_TILES, *ONE_WINDOW, f"data.path={tiles}"])
    changes += [*OF_FILES, f"data.path={manifests[recipe.model.band_count]}"]
    if recipe.model.grid is None:
        return read_recipe(path, [*changes, *SMALL_VIEWS])
    changes += ONE_WINDOW
    if recipe.model.family in GLIMPSES:
        return read_recipe(path, [*changes, *GLIMPSES[recipe.model.family]])
    if recipe.model.family == "anchornet":
        return read_recipe(path, [*changes, "model.view_size=128", "traversal.min_size=4"])
    if recipe.model.family == "two_stream":
        return read_recipe(path, [*changes, *STREAMS])
    if recipe.model.arguments.model_dump()["alignment"] != "reference":
        changes += SMALLER_VIEWS
    else:
        changes += SECOND_TIME if name and "nabirds" in path.stem else ONE_IMAGE
    return read_recipe(path, changes)


def compact(path: Path, manifests: Mapping[int, Path], tiles: Path) -> Recipe:
    """Return a recipe that takes one step in each stage with a network of 0.4 M parameters."""
    recipe = small(path, "", [], manifests, tiles)
    arguments, changes = recipe.model.arguments.model_dump(), ["training.validate_every=1"]
    changes += [f"stages.{number}.steps=1" for number in range(len(recipe.stages))]
    if recipe.model.family != "saccader":
        changes.append("model.backbone=compact")
    if arguments["drop_path"]:
        changes.append("model.drop_path=0")
        changes += [f"stages.{n}.drop_path=null" for n in range(len(recipe.stages))]
    if recipe.model.family in ("tnet", "whole"):
        changes += SMALLER_VIEWS
    if "alignment" in arguments:
        changes.append("model.alignment=pool")
    return check_recipe(apply_overrides(recipe.as_data(), changes))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_trains_a_compact_network(path, manifests, tiles, tmp_path, monkeypatch):
    check_training(compact(path, manifests, tiles), tmp_path / "run", 1, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "name", "settings"), RUNS, ids=NAMES)
def test_a_recipe_trains(path, name, settings, manifests, tiles, tmp_path, monkeypatch):
    recipe = small(path, name, settings, manifests, tiles)
    check_training(recipe, tmp_path / "run", 2, monkeypatch)


def check_training(recipe: Recipe, folder: Path, steps: int, monkeypatch) -> None:
    """Train a recipe of some steps per stage; check the metrics and the model that is stored."""
    for name in ("draw_curves", "draw_samples"):  # slow
        monkeypatch.setattr(f"tnetcli.training.run_dir.{name}", lambda *_: None)
    heard = Ears()
    files = run_recipe(recipe, folder, heard)
    assert [row["stage"] for row in heard.rows] == [stage.name for stage in recipe.stages]
    assert [row["step"] for row in heard.rows] == [
        steps * (i + 1) for i in range(len(recipe.stages))
    ]
    for row, stage in zip(heard.rows, recipe.stages, strict=True):
        assert np.isfinite(row["loss"])
        if stage.learn == "scenes":  # one accuracy per level
            assert len(row["accuracy"]) == (stage.levels or recipe.traversal.levels)
    loaded = load_checkpoint(files.model)
    with torch.device("meta"):
        built = build_model(
            recipe.model.family,
            recipe.model.arguments,
            classes=recipe.model.class_count,
            bands=recipe.model.band_count,
        )
    shapes = {key: value.shape for key, value in built.state_dict().items()}
    assert {key: value.shape for key, value in loaded.model.state_dict().items()} == shapes
    assert read_recipe(files.recipe) == recipe
    shutil.rmtree(files.path)  # a gigabyte in all
