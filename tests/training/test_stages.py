from collections import Counter
from dataclasses import fields, replace
from importlib import import_module

import numpy as np
import pytest
import torch

from tests.runs import SIDE, UNIT, prepare, recipe_of, write_images
from tests.small_model import SmallModel
from tests.synth.test_landscape import BACKGROUND, RULES, SITES, tile_files
from tests.synth.test_tiles import write_zip
from tests.training.explore import CPU, Torn
from tnetcli.errors import ImageError
from tnetcli.geometry import Size, Window
from tnetcli.models.base import EncoderOutput, Episodes
from tnetcli.models.configs import Objective
from tnetcli.models.registry import FAMILIES
from tnetcli.training import stages
from tnetcli.training.data import Batch, open_source
from tnetcli.training.distributed import ProcessGroup
from tnetcli.training.stages import SceneStage, TileStage, build_stage
from tnetcli.training.trainer import train
from tnetcli.traversal.policies import ScoredRegion

pytestmark = pytest.mark.usefixtures("small_family")
SGD = {"kind": "sgd", "lr": 0.05, "momentum": 0.0, "weight_decay": 0.0}
PLAIN = {"schedule": {"kind": "constant", "warmup": 0.0}, "loss": {"rule": "paper"}}


class Attends(SmallModel):
    """Learns how much brightness counts, beside the labels; it has no batch norm."""

    def __init__(self):
        super().__init__(classes=2)
        self.location = torch.nn.Linear(1, 1)
        torch.nn.init.constant_(self.location.weight, 2.0)

    def forward(self, views, positions, score_cells=True):
        features, logits, _ = super().forward(views, positions)
        return EncoderOutput(features, self.location(logits), {})


def small_run(images, folder, **sections):
    """Return a run of a model without batch norm."""
    recipe = recipe_of(images, **{"optimizer": SGD, **PLAIN, **sections})
    return prepare(recipe, folder, model=Attends())


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"))


class Wrapped:
    """The images of a list; `wrap` changes some of the training items."""

    classes = ("dark", "light")

    def __init__(self, images, wrap):
        recipe = recipe_of(images)
        self._files, self._wrap = open_source(recipe, recipe.data), wrap

    def count(self, split):
        return self._files.count(split)

    def labels(self):
        return self._files.labels()

    def item(self, split, number, epoch=0):
        item = self._files.item(split, number)
        return self._wrap[number](item) if split == "train" and number in self._wrap else item


def torn_at(width):
    return lambda item: replace(item, reader=Torn(item.reader, width))


def scene_stage(run):
    return SceneStage(run, run.recipe.stages[0], CPU)


def read_by(stage, monkeypatch):
    """Return the rollouts of a stage, as they are made."""
    found, usual = [], stages.rollout

    def noted(*given, **options):
        found.append(usual(*given, **options))
        return found[-1]

    monkeypatch.setattr(stages, "rollout", noted)
    with stage.views:
        stage.loss(0)
    return found[0]


def test_the_recipe_names_the_stage(images, tmp_path):
    run = small_run(images, tmp_path)
    stage = build_stage(run, run.recipe.stages[0], CPU)
    assert isinstance(stage, SceneStage)
    assert stage.validates
    assert [*stage.modules] == [run.model]


def test_one_step_of_sgd_is_the_gradient_of_the_cross_entropy(images, tmp_path):
    run = small_run(images, tmp_path, stages=[{"steps": 1, "levels": 1, "batch_size": 8}])
    start = run.model.head.weight.detach().clone()
    train(run)
    features, labels = [], []
    for number in range(8):
        item = run.source.item("train", number)
        values = UNIT.apply(item.reader.read(Window(0, 0, SIDE, SIDE), Size(32, 32)))[0]
        pooled = values.reshape(3, 4, 8, 4, 8).mean((2, 4)).reshape(-1)
        features.append(pooled.astype(np.float64))
        labels.append(item.label)
    seen = np.stack(features)
    logits = seen @ start.numpy().T
    chances = np.exp(logits - logits.max(1, keepdims=True))
    chances /= chances.sum(1, keepdims=True)
    chances[np.arange(8), labels] -= 1
    expected = start.numpy() - 0.05 * chances.T @ seen / 8
    found = run.checkpointer.stages["train"]["head.weight"].numpy()
    assert np.allclose(found, expected, atol=1e-5)


def test_classes_count_as_the_recipe_weighs_them(images, tmp_path):
    rows = {}
    for weights in ("none", "dark", "light"):
        given = weights if weights == "none" else {"dark": 0.0, "light": 0.0, weights: 1.0}
        run = small_run(
            images,
            tmp_path / weights,
            stages=[{"steps": 1, "levels": 1, "batch_size": 8}],
            data={"class_weights": given},
        )
        train(run)
        rows[weights] = run.callback.rows[0]["ce_sequence"]
    # Half of the images are of each class, and the mean weight is 1.
    assert rows["none"] == pytest.approx((rows["dark"] + rows["light"]) / 2, rel=1e-5)
    assert rows["dark"] != pytest.approx(rows["light"], rel=1e-3)


def test_every_choice_is_followed_whatever_a_prediction_spares(images, tmp_path, monkeypatch):
    traversal = {"levels": 3, "keep": [4, 4], "budget": 3, "confidence": 0.01, "min_size": 1}
    run = small_run(images, tmp_path, traversal=traversal, stages=[{"steps": 1, "batch_size": 2}])
    found = read_by(scene_stage(run), monkeypatch)
    assert torch.bincount(found.level).tolist() == [0, 2, 8, 32]


@pytest.mark.parametrize(
    ("crops", "side", "levels"), [(False, 128, 3), (False, 127, 2), (True, 64, 3), (True, 63, 2)]
)
def test_cells_end_where_they_do_in_prediction_but_for_crops(
    tmp_path, monkeypatch, crops, side, levels
):
    # Cells of the second level have a quarter of the side; views have 32 pixels.
    listed = write_images(tmp_path / "images", train=2, validation=1, size=side)
    run = small_run(
        listed,
        tmp_path / "run",
        traversal={"levels": 3},
        augmentation={"crop": [1.0, 1.0]} if crops else {},
    )
    assert read_by(scene_stage(run), monkeypatch).level.max() == levels


def test_fixed_regions_take_the_place_of_cells(images, tmp_path, monkeypatch):
    region = ScoredRegion(Window(3, 5, 20, 20), 0.5)
    given = {n: lambda item: replace(item, fixed=(region,)) for n in range(8)}
    run = small_run(images, tmp_path, stages=[{"steps": 1, "batch_size": 8}])
    stage = scene_stage(replace(run, source=Wrapped(images, given)))
    found = read_by(stage, monkeypatch)
    assert Counter(node.region.path for node in found.nodes) == {"root": 8, "root/w1": 8}
    assert {node.region.window for node in found.nodes[8:]} == {region.window}


def torn_run(images, folder, wrap, **sections):
    sections = {"stages": [{"steps": 2, "batch_size": 8}], **sections}
    return prepare(recipe_of(images, **sections), folder, source=Wrapped(images, wrap))


def test_images_that_cannot_be_read_are_left_out_with_a_warning_at_whatever_level(images, tmp_path):
    run = torn_run(images, tmp_path, {2: torn_at(SIDE), 5: torn_at(SIDE / 2)})
    train(run)
    named = [text.split(" is ")[0] for text in run.callback.warnings if "torn" in text]
    assert sorted(named) == [
        "`2.png`", "`2.png`", "`5.png`", "`5.png`",
    ]  # fmt: skip
    assert [row["windows"] for row in run.callback.rows] == [6 * 3] * 2


@pytest.mark.parametrize("samples", [1, 2])
def test_the_loss_is_that_of_the_batch_without_images_that_fail_at_level_2(
    images, tmp_path, samples
):
    loss = {"samples": samples, "reinforce": 1.0, "selection": "sample", "rule": "free"}
    torn = {number: torn_at(SIDE / 2) for number in (2, 5)}
    losses, gradients, rows = [], [], []
    for name in ("torn", "without"):
        run = small_run(images, tmp_path / name, loss=loss, stages=[{"steps": 1, "batch_size": 8}])
        stage = scene_stage(replace(run, source=Wrapped(images, torn)))
        batch = stage._next(0)
        if name == "without":
            kept = [i for i, each in enumerate(batch.items) if each.name not in ("2.png", "5.png")]
            columns = [getattr(batch, field.name) for field in fields(batch)]
            batch = Batch(*([column[i] for i in kept] for column in columns))
        stage._batches = iter([batch])
        with stage.views:
            total, row, count = stage.loss(0)
        total.backward()
        assert (count, len(run.callback.warnings)) == (6 * samples, 2 if name == "torn" else 0)
        losses.append(total.item())
        gradients.append([weight.grad for weight in run.model.parameters()])
        rows.append({key: each for key, each in row.items() if key != "waiting"})
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert any(each.any() for each in gradients[0][2:])  # the location module
    for one, other in zip(*gradients, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    # Regions of an image that failed are not counted.
    assert rows[0]["accuracy"] == pytest.approx(rows[1].pop("accuracy"))
    assert {key: rows[0][key] for key in rows[1]} == pytest.approx(rows[1], rel=1e-4)


@pytest.mark.parametrize("width", [SIDE, SIDE / 2])
def test_a_batch_of_which_nothing_can_be_read_ends_the_run_with_that_error(images, tmp_path, width):
    run = torn_run(images, tmp_path, {number: torn_at(width) for number in range(8)})
    with pytest.raises(ImageError, match="torn"):
        train(run)


class OneOfTwo(ProcessGroup):
    """The first of two processes, whose other one says nothing."""

    def __init__(self):
        super().__init__(0, 2)

    def sum(self, values):
        return values

    def shard(self, count):
        return slice(0, count)


def test_where_other_processes_continue_a_batch_of_nothing_counts_nothing(images, tmp_path):
    run = small_run(images, tmp_path, stages=[{"steps": 1, "batch_size": 8}])
    source = Wrapped(images, {number: torn_at(SIDE) for number in range(8)})
    stage = scene_stage(replace(run, source=source, group=OneOfTwo()))
    with stage.views:
        total, row, count = stage.loss(0)
    assert (total.item(), total.requires_grad, row, count) == (0.0, False, {}, 0)
    assert len(run.callback.warnings) == 8


class OwnObjective(Objective):
    """No settings; a family with an objective of its own has loss terms."""


def own_terms(episodes, task, config):
    assert isinstance(episodes, Episodes)
    return {"own": (0.5, episodes.logits.square().sum()), "seen": (None, torch.ones(()) * 3)}


@pytest.mark.parametrize("replaces", [False, True])
def test_a_family_adds_its_own_terms_or_replaces_the_others(
    images, tmp_path, monkeypatch, small_family, replaces
):
    module = import_module(small_family.model.partition(":")[0])
    monkeypatch.setattr(module, "objective", own_terms, raising=False)
    family = replace(small_family, objective=OwnObjective, replaces_loss=replaces)
    monkeypatch.setitem(FAMILIES._loaded, "small", family)
    run = small_run(images, tmp_path, stages=[{"steps": 1, "levels": 1}])
    stage = scene_stage(run)
    with stage.views:
        total, row, _ = stage.loss(0)
    assert row["seen"] == 3
    assert ("ce_sequence" in row) == (not replaces)
    expected = 0.5 * row["own"]
    if not replaces:
        expected += 0.3 * row["ce_sequence"] + 0.7 * row["ce_windows"]
    assert total.item() == pytest.approx(expected, rel=1e-5)


def test_a_stage_resumes_from_its_state(images, tmp_path):
    sections = {"loss": {"baseline": "per_level"}, "stages": [{"steps": 2}]}
    one = scene_stage(small_run(images, tmp_path / "one", **sections))
    other = scene_stage(small_run(images, tmp_path / "other", **sections))
    with one.views, other.views:
        one.loss(0)
        other.memory.load_state_dict(one.memory.state_dict())
        one_loss, other_loss = one.loss(1)[0], other.loss(1)[0]
    assert torch.equal(one_loss, other_loss)


def test_a_stage_of_tiles_has_a_head_of_its_own(tmp_path):
    tiles = write_zip(tmp_path / "tiles.zip", tile_files())
    recipe = recipe_of(
        None,
        model={**recipe_of(None).as_data()["model"], "classes": list(RULES.classes)},
        data={
            "kind": "mosaic",
            "path": str(tiles),
            "landscape": {"size": 128, "background": BACKGROUND, "sites": SITES, "validation": 2},
        },
        stages=[{"name": "tiles", "learn": "tiles", "steps": 2, "tiles": {"views": [3, 2]}}],
        loss={"l2": 0.1},
    )
    run = prepare(recipe, tmp_path / "run")
    stage = build_stage(run, recipe.stages[0], CPU)
    assert isinstance(stage, TileStage)
    assert not stage.validates
    assert len(stage.modules) == 2
    assert [*stage.replays(0)] == []
    with stage.views:
        total, row, count = stage.loss(0)
    assert count == row["windows"] == 5
    assert total.item() == pytest.approx(row["loss"])
    assert row["loss"] > row["dense"] + 0.5 * row["window"]  # and the penalty
