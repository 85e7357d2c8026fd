import math
from contextlib import ExitStack

import numpy as np
import pytest
import torch

from tests.runs import MODEL, UNIT, Ears, Hands, recipe_of
from tests.synth.test_landscape import BACKGROUND, RULES, tile_files
from tests.synth.test_tiles import write_zip
from tnetcli.geometry import Grid, Region, Size
from tnetcli.models.registry import build_model
from tnetcli.synth.landscape import LandscapeMaker
from tnetcli.synth.tiles import read_tiles
from tnetcli.training.data import LandscapeSource
from tnetcli.training.recipe import StageConfig, TilesConfig
from tnetcli.training.run_dir import Run, RunFolder
from tnetcli.training.stages import TileStage

CPU = torch.device("cpu")
GRID = Grid(3, 3, 0.5)
SOME = TilesConfig(views=(5, 4, 3))


@pytest.fixture(scope="module")
def maker(tmp_path_factory):
    tiles = read_tiles(write_zip(tmp_path_factory.mktemp("tiles") / "tiles.zip", tile_files()))
    rules = RULES.model_copy(update={"size": 256})
    return LandscapeMaker(tiles, "train", rules)


@pytest.fixture
def model():
    torch.manual_seed(1)
    arguments = {key: value for key, value in MODEL.items() if key != "classes"}
    return build_model("tnet", arguments, classes=len(RULES.classes))


@pytest.fixture
def pretraining(model, maker, tmp_path):
    """Return a function that makes the pre-training on some tiles."""
    with ExitStack() as stack:

        def make(tiles=SOME, seed=0):
            source = LandscapeSource({"train": maker}, seed)
            recipe, folder = recipe_of(None, seed=seed), RunFolder(tmp_path)
            run = Run(recipe, source, UNIT, model, folder, Ears(), Hands())
            stage = TileStage(run, StageConfig(learn="tiles", steps=1, tiles=tiles), CPU)
            stack.enter_context(stage.views)
            return stage

        yield make


class Scenes:
    """Notes the scenes that a batch is made of."""

    def __init__(self, monkeypatch):
        self.made, scene = [], LandscapeMaker.scene

        def note(maker, seed, *, training, crowd=None):
            self.made.append(scene(maker, seed, training=training, crowd=crowd))
            assert training
            return self.made[-1]

        monkeypatch.setattr(LandscapeMaker, "scene", note)


def test_a_batch_has_the_views_of_each_level_that_were_asked_for(pretraining):
    made = pretraining()
    batch = made._prepare(0)
    assert batch.level.tolist() == [1] * 5 + [2] * 4 + [3] * 3
    assert batch.values.shape == (12, 3, 32, 32)
    assert batch.shares.shape == (12, 4, 4, 6)
    for region, level in zip(batch.regions, batch.level.tolist(), strict=True):
        assert region.level == level
        assert region.window.width == 256 * 0.5 ** (level - 1)


def test_values_shares_and_labels_are_those_of_the_scene_under_the_view(pretraining, monkeypatch):
    scenes = Scenes(monkeypatch)
    batch = pretraining()._prepare(4)
    assert len(scenes.made) == 5
    for number, region in enumerate(batch.regions):
        values = batch.values[number].numpy()
        mine = [
            scene
            for scene in scenes.made
            if np.array_equal(UNIT.apply(scene.read(region.window, Size(32, 32)))[0], values)
        ]
        (scene,) = mine
        assert np.allclose(batch.shares[number], scene.fractions(region.window, 4))
        assert batch.labels[number] == scene.shown(region.window)


def test_a_step_is_always_the_same_and_no_other_is(pretraining):
    one, same = (pretraining()._prepare(3).values for _ in range(2))
    assert torch.equal(one, same)
    assert not torch.equal(one, pretraining()._prepare(4).values)
    assert not torch.equal(one, pretraining(seed=1)._prepare(3).values)


def touches(window, boxes):
    return any(
        min(window.right, box.right) > max(window.left, box.left)
        and min(window.bottom, box.bottom) > max(window.top, box.top)
        for box in boxes
    )


def test_closer_views_are_over_sites_where_they_are_to_be(pretraining, monkeypatch):
    scenes = Scenes(monkeypatch)
    batch = pretraining(TilesConfig(views=(1, 0, 20), crowded=1.0, near=1.0))._prepare(0)
    (scene,) = scenes.made
    assert all(touches(region.window, scene.boxes) for region in batch.regions)
    middles = [(r.window.left, r.window.top) for r in batch.regions[1:]]
    assert len(set(middles)) > 1


def test_closer_views_are_anywhere_if_not_near_a_site(pretraining):
    batch = pretraining(TilesConfig(views=(1, 60), near=0.0))._prepare(0)
    assert len({region.window for region in batch.regions[1:]}) == 9  # all cells


def test_doubt_skips_levels_without_views(pretraining):
    batch = pretraining(TilesConfig(views=(2, 0, 5), doubt=1.0))._prepare(0)
    assert batch.level.tolist() == [1] * 2 + [3] * 5


class Seer(torch.nn.Module):
    """Takes one pixel of the map, and nothing else, for a site."""

    def __init__(self, classes, first_site, row, column):
        super().__init__()
        self.classes, self.first_site, self.pixel = classes, first_site, (row, column)

    def forward(self, seen):
        scores = torch.zeros(len(seen), self.classes, *seen.shape[2:])
        scores[:, self.first_site :] = -40.0
        scores[:, self.first_site, *self.pixel] = 40.0
        return scores


@pytest.mark.parametrize(("row", "column", "cells"), [
    (0, 0, {(0, 0)}),
    (3, 0, {(2, 0)}),
    (0, 1, {(0, 0), (0, 1)}),
    (1, 2, {(0, 1), (0, 2), (1, 1), (1, 2)}),
])  # fmt: skip
def test_doubted_views_are_where_the_map_sees_a_site(pretraining, model, row, column, cells):
    made = pretraining(TilesConfig(views=(3, 40, 40), doubt=1.0))
    made.dense = Seer(6, made._first_site, row, column)
    batch = made._prepare(0)
    paths = [region.path for region in batch.regions]
    # A map of 4 x 4 pixels under 3 x 3 cells of half the side: neighbours share two rows of it.
    whole = Region(batch.regions[0].window)
    first = {whole.child(GRID, *cell).path for cell in cells}
    assert set(paths[3:43]) == first
    closer = {
        whole.child(GRID, *cell).child(GRID, *below).path for cell in cells for below in cells
    }
    assert set(paths[43:]) <= closer
    assert len(set(paths[43:])) > len(closer) / 2


def test_reading_where_the_map_errs_leaves_no_trace(pretraining, model):
    made = pretraining(TilesConfig(views=(3, 4), doubt=1.0))
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made._prepare(0)
    assert model.backbone.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_loss_is_that_of_a_slow_sum_over_pixels_and_views(pretraining, model):
    made = pretraining(SOME.model_copy(update={"dense": 0.7, "window": 0.4}))
    batch = made._prepare(2)
    model.eval()
    with torch.no_grad():
        total, parts, _ = made.loss(2)
        seen, features = model.backbone(batch.values)
        logits = made.dense(seen).double()  # (views, classes, side, side)
        positions = torch.tensor([region.position for region in batch.regions])
        scores = model.classify(model.embed(features, positions), batch.level).double()
    dense = []
    for view, level in enumerate(batch.level.tolist()):
        extra = 6.0 if level == 1 else 2.0
        above, below = 0.0, 0.0
        for row in range(4):
            for column in range(4):
                shares = batch.shares[view, row, column].double()
                logs = logits[view, :, row, column].log_softmax(dim=0)
                weight = 1 + extra * shares[len(BACKGROUND) :].sum()
                above -= float(weight * (shares * logs).sum())
                below += float(weight)
        dense.append(above / below)
    known = [i for i, label in enumerate(batch.labels.tolist()) if label >= 0]
    labels = batch.labels.tolist()
    window = [-float(scores[i].log_softmax(dim=0)[labels[i]]) for i in known]
    right = [scores[i].argmax() == labels[i] for i in known]
    assert 0 < len(known) < 12
    assert parts["dense"] == pytest.approx(np.mean(dense), rel=1e-4)
    assert parts["window"] == pytest.approx(np.mean(window), rel=1e-4)
    assert parts["window_accuracy"] == pytest.approx(np.mean(right))
    assert float(total) == pytest.approx(0.7 * np.mean(dense) + 0.4 * np.mean(window), rel=1e-4)


def test_tiles_do_not_teach_the_location_module(pretraining, model):
    made = pretraining()
    total, _, _ = made.loss(0)
    total.backward()
    taught = {
        name.split(".")[0]
        for name, weight in model.named_parameters()
        if weight.grad is not None and weight.grad.any()
    }
    assert taught == {"backbone", "position", "head"}
    assert made.dense.weight.grad.any()


def test_a_batch_in_which_no_view_has_a_label_teaches_what_is_under_it(pretraining, monkeypatch):
    made = pretraining(TilesConfig(views=(1,)))
    batch = made._prepare(0)
    monkeypatch.setattr(made, "_prepare", lambda step: batch._replace(labels=torch.full((1,), -1)))
    total, parts, _ = made.loss(0)
    assert total.isfinite()
    assert parts["window"] == 0
    assert math.isfinite(parts["window_accuracy"])
    total.backward()
    assert made.dense.weight.grad.isfinite().all()
