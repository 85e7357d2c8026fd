import logging
import os
import pickle
import signal

import numpy as np
import pytest
import torch
from tnetcli.looking import Looker, Sight

from tests.checkpoints import tiny
from tests.images import area_average, noise, write_geotiff, write_pyramid_tiff
from tests.readers.contract import area_mean
from tests.small_model import SmallModel
from tnetcli.checkpoint import load_model, save_checkpoint
from tnetcli.errors import ImageError, ModelError
from tnetcli.geometry import Grid, Region, Size, Window
from tnetcli.models.registry import build_model
from tnetcli.normalisation import Normalisation
from tnetcli.readers.open import open_image
from tnetcli.traversal import Plan

UNIT = Normalisation.to_unit_range("uint8", 3)
FLOAT = Normalisation(dtype="float32", mean=(100.0, 110.0, 90.0), std=(40.0, 50.0, 60.0))


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    """Eight scenes of different shapes, with overviews."""
    folder = tmp_path_factory.mktemp("scenes")
    paths = []
    for number in range(8):
        size = (400 + 37 * number, 520 - 29 * number)
        image = noise(size, seed=number)
        paths.append(write_geotiff(folder / f"{number}.tif", image, overviews=[2, 4, 8]))
    return paths


@pytest.fixture
def readers(scenes):
    opened = [open_image(path) for path in scenes]
    yield opened
    for reader in opened:
        reader.close()


def sight_of(found):
    assert isinstance(found, Sight), found
    return found


def paths_of(sight):
    return [visit.place.region.path for visit in sight.visits]


def decoded_walk(model, image, keep, normalisation, dtype):
    """Do what the reference does: decode everything, crop from the array, follow the best."""
    mean = np.array(normalisation.mean)[:, None, None]
    std = np.array(normalisation.std)[:, None, None]
    size = Size(image.shape[2], image.shape[1])
    view = Size(model.view_size, model.view_size)
    frontier, features = [Region(Window.whole(size))], []
    for level in range(len(keep) + 1):
        crops = [area_mean(image, region.window, view) for region in frontier]
        if np.issubdtype(dtype, np.integer):
            crops = [np.rint(crop) for crop in crops]
        views = torch.tensor(np.stack([(crop - mean) / std for crop in crops]), dtype=torch.float32)
        with torch.no_grad():
            looked = model.look(views, frontier)
        features.append(looked.features)
        if level < len(keep):
            following = []
            for region, scores in zip(frontier, looked.attention.flatten(1), strict=True):
                best = sorted(torch.topk(scores, keep[level]).indices.tolist())
                cells = [divmod(cell, model.grid.columns) for cell in best]
                following += [region.child(model.grid, *cell) for cell in cells]
            frontier = following
    together = torch.cat(features).unsqueeze(0)
    with torch.no_grad():
        present = torch.ones(together.shape[:2], dtype=torch.bool)
        return model.conclude(together, present).scores[0].numpy()


class TestEqualToFullyDecoded:
    """A lazy walk gives the scores of a walk through the decoded array."""

    def model(self):
        torch.manual_seed(3)
        arguments = {"backbone": "resnet10t", "view_size": 64, "location": "squeeze"}
        return build_model("tnet", arguments, classes=4).eval()

    def test_through_exact_overviews_of_floats(self, tmp_path):
        image = noise((512, 512), seed=5).astype(np.float32)
        path = write_pyramid_tiff(tmp_path / "scene.tif", image, factors=(2, 4))
        model, plan = self.model(), Plan(3, (2, 1), once=False)
        with open_image(path) as reader, Looker(model, FLOAT, device="cpu") as looker:
            sight = sight_of(looker.look([reader], plan)[0])
            used = reader.cost.pixels_decoded
        expected = decoded_walk(model, image, (2, 1), FLOAT, np.float32)
        assert sight.scores == pytest.approx(expected, abs=1e-4)
        assert len(sight.visits) == 1 + 2 + 2
        assert used < image[0].size  # the overviews served: it never saw all of it

    def test_at_full_resolution_of_bytes(self, tmp_path):
        image = noise((300, 240), seed=6)
        path = write_geotiff(tmp_path / "scene.tif", image)
        model, plan = self.model(), Plan(3, (3, 1), once=False, least_side=1)
        with open_image(path) as reader, Looker(model, UNIT, device="cpu") as looker:
            sight = sight_of(looker.look([reader], plan)[0])
        expected = decoded_walk(model, image, (3, 1), UNIT, np.uint8)
        assert sight.scores == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("policy", ["topk", "sample", "best_first"])
def test_a_batch_of_eight_equals_eight_single_runs(readers, policy):
    plan = Plan(3, (2, 2), policy=policy, budget=6)
    seeds = list(range(8))
    with Looker(SmallModel(), UNIT, device="cpu") as looker:
        together = looker.look(readers, plan, seeds=seeds)
        for number, reader in enumerate(readers):
            alone = sight_of(looker.look([reader], plan, seeds=[seeds[number]])[0])
            assert paths_of(alone) == paths_of(together[number])
            assert alone.scores == pytest.approx(together[number].scores, abs=1e-5)
            assert alone.stop == together[number].stop


def test_a_batch_of_eight_equals_eight_single_runs_of_a_real_model(readers):
    torch.manual_seed(0)
    model = build_model("tnet", {"backbone": "resnet10t", "view_size": 64}, classes=4)
    plan = Plan(3, (2, 1))
    with Looker(model, UNIT, device="cpu") as looker:
        together = looker.look(readers, plan)
        for number, reader in enumerate(readers):
            alone = sight_of(looker.look([reader], plan)[0])
            assert paths_of(alone) == paths_of(together[number])
            assert alone.scores == pytest.approx(together[number].scores, abs=1e-4)


@pytest.mark.parametrize("threads", [2, 8])
def test_more_reading_threads_see_the_same(readers, threads):
    plan = Plan(3, (3, 2))
    with Looker(SmallModel(), UNIT, device="cpu", threads=1) as one:
        expected = one.look(readers, plan)
    with Looker(SmallModel(), UNIT, device="cpu", threads=threads) as many:
        found = many.look(readers, plan)
    for one_sight, other in zip(expected, found, strict=True):
        assert paths_of(one_sight) == paths_of(other)
        assert np.array_equal(one_sight.scores, other.scores)
        assert np.array_equal(one_sight.features, other.features)


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_the_size_of_a_chunk_changes_nothing(readers, chunk):
    plan = Plan(2, (4,))
    with Looker(SmallModel(), UNIT, device="cpu") as whole:
        expected = whole.look(readers, plan)
    model = SmallModel()
    with Looker(model, UNIT, device="cpu", chunk=chunk) as parts:
        found = parts.look(readers, plan)
    assert max(model.batches) <= chunk
    for one, other in zip(expected, found, strict=True):
        assert paths_of(one) == paths_of(other)
        assert other.scores == pytest.approx(one.scores, abs=1e-5)


def test_a_level_is_one_batch_for_all_images(readers):
    model = SmallModel()
    with Looker(model, UNIT, device="cpu", chunk=1000) as looker:
        looker.look(readers, Plan(3, (2, 1), once=False))
    assert model.batches == [8, 16, 16]


def test_conclusions_are_given_for_every_level(readers):
    model = SmallModel()
    with Looker(model, UNIT, device="cpu") as looker:
        sight = sight_of(looker.look(readers[:1], Plan(3, (2, 1)))[0])
        for level in (1, 2, 3):
            shallow = sight_of(looker.look(readers[:1], Plan(level, (2, 1)))[0])
            assert sight.level_scores[level - 1] == pytest.approx(shallow.scores, abs=1e-5)
    assert sight.scores == pytest.approx(sight.level_scores[-1])
    assert sight.weights.sum() == pytest.approx(1)
    assert sight.window_scores.shape == (len(sight.visits), 3)


def test_an_image_that_fails_does_not_stop_the_others(readers, tmp_path):
    broken = write_geotiff(tmp_path / "broken.tif", noise((300, 300), bands=1))
    with Looker(SmallModel(), UNIT, device="cpu") as looker, open_image(broken) as wrong:
        found = looker.look([readers[0], wrong, readers[1]], Plan(2, (2,)))
        alone = sight_of(looker.look([readers[1]], Plan(2, (2,)))[0])
    assert isinstance(found[1], ImageError)
    assert "needs 3 bands" in str(found[1])
    assert np.array_equal(sight_of(found[2]).scores, alone.scores)


class Breaking:
    """A reader that fails below level 1."""

    def __init__(self, reader):
        self._reader = reader

    def __getattr__(self, name):
        return getattr(self._reader, name)

    def read(self, window, out_size):
        if window.width < self._reader.size.width:
            raise ImageError("a tile is damaged", hint="copy it again")
        return self._reader.read(window, out_size)


def test_an_image_that_breaks_while_looked_at_fails_alone(readers):
    with Looker(SmallModel(), UNIT, device="cpu", chunk=3) as looker:
        found = looker.look([Breaking(readers[0]), readers[1]], Plan(3, (3, 1)))
        alone = sight_of(looker.look([readers[1]], Plan(3, (3, 1)))[0])
    assert isinstance(found[0], ImageError)
    assert found[0].hint == "copy it again"
    assert np.array_equal(sight_of(found[1]).scores, alone.scores)


def test_an_image_without_a_valid_pixel_fails(tmp_path):
    path = write_geotiff(tmp_path / "empty.tif", np.zeros((3, 300, 300), np.uint8), nodata=0)
    with Looker(SmallModel(), UNIT, device="cpu") as looker, open_image(path) as reader:
        (found,) = looker.look([reader], Plan(2, (2,)))
    assert isinstance(found, ImageError)
    assert "no valid pixel" in str(found)


def test_cells_without_a_valid_pixel_are_never_chosen(tmp_path):
    image = noise((600, 600)) // 2 + 10
    image[:, :, :300] = 0  # the left half, and dark cells attract this model the least
    path = write_geotiff(tmp_path / "half.tif", 255 - image, nodata=255)
    grid = Grid(2, 2, 0.5)
    with Looker(SmallModel(grid=grid), UNIT, device="cpu") as looker, open_image(path) as reader:
        sight = sight_of(looker.look([reader], Plan(2, (4,)))[0])
    assert paths_of(sight) == ["root", "root/0-1", "root/1-1"]


def test_cells_of_nothing_but_background_are_never_chosen(tmp_path):
    image = noise((600, 600)) // 2
    image[:, 300:] = 240  # glass
    path = write_geotiff(tmp_path / "slide.tif", image)
    model = SmallModel(grid=Grid(2, 2, 0.5))
    with open_image(path) as reader:
        with Looker(model, UNIT, device="cpu", background=(230, 255)) as looker:
            sight = sight_of(looker.look([reader], Plan(2, (2,)))[0])
        assert paths_of(sight) == ["root", "root/0-0", "root/0-1"]
        with Looker(model, UNIT, device="cpu") as looker:
            sight = sight_of(looker.look([reader], Plan(2, (2,)))[0])
        assert paths_of(sight) == ["root", "root/1-0", "root/1-1"]


def test_levels_end_where_a_view_would_be_finer_than_the_pixels(tmp_path):
    path = write_geotiff(tmp_path / "small.tif", noise((130, 130)))
    with Looker(SmallModel(view_size=32), UNIT, device="cpu") as looker, open_image(path) as reader:
        sight = sight_of(looker.look([reader], Plan(9, (1,)))[0])
        deeper = sight_of(looker.look([reader], Plan(9, (1,), least_side=8))[0])
    assert [visit.place.region.level for visit in sight.visits] == [1, 2, 3]  # 130, 65, 32.5
    assert sight.stop == "pixels"
    assert len(deeper.visits) == 5


def test_confidence_ends_the_looking(readers):
    model = SmallModel()
    with Looker(model, UNIT, device="cpu") as looker:
        sure = sight_of(looker.look(readers[:1], Plan(3, (2, 1)), confidence=0.01)[0])
        unsure = sight_of(looker.look(readers[:1], Plan(3, (2, 1)), confidence=1.0)[0])
    assert (sure.stop, len(sure.visits)) == ("confidence", 1)
    assert unsure.stop == "levels"


def test_padding_keeps_the_shape_of_an_image(tmp_path):
    path = write_geotiff(tmp_path / "wide.tif", noise((600, 300)))
    with (
        Looker(SmallModel(), UNIT, device="cpu", fit="pad") as looker,
        open_image(path) as reader,
    ):
        sight = sight_of(looker.look([reader], Plan(2, (9,)))[0])
    assert sight.visits[0].place.region.window.box == (0.0, -150.0, 600.0, 450.0)
    assert sight.valid[0] == pytest.approx(0.5)
    assert all(visit.place.region.window.width == 300 for visit in sight.visits[1:])


def test_a_whole_model_looks_once(readers):
    torch.manual_seed(0)
    model = build_model("whole", {"backbone": "resnet10t", "view_size": 64}, classes=4)
    with Looker(model, UNIT, device="cpu") as looker:
        sight = sight_of(looker.look(readers[:1], Plan(3, (2, 1)))[0])
    assert (len(sight.visits), sight.stop) == (1, "levels")


class Hungry(SmallModel):
    """A model that cannot take more than `most` views."""

    most = 4

    def look(self, views, regions, *, score_cells=True):
        if len(views) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().look(views, regions, score_cells=score_cells)


def test_out_of_memory_halves_the_chunk_once_and_says_so(readers, caplog):
    model, plain = Hungry(), SmallModel()
    with (
        caplog.at_level(logging.WARNING, "tnetcli"),
        Looker(model, UNIT, device="cpu", chunk=8) as looker,
    ):
        found = looker.look(readers, Plan(2, (2,)))
    with Looker(plain, UNIT, device="cpu") as looker:
        expected = looker.look(readers, Plan(2, (2,)))
    assert max(model.batches) == 4
    assert [record.message for record in caplog.records] == [
        "out of memory: going on with 4 views at a time"
    ]
    for one, other in zip(found, expected, strict=True):
        assert np.array_equal(one.scores, other.scores)


def test_out_of_memory_after_halving_is_an_error(readers):
    model = Hungry()
    model.most = 1
    with (
        Looker(model, UNIT, device="cpu", chunk=8) as looker,
        pytest.raises(ModelError, match="not enough memory"),
    ):
        looker.look(readers, Plan(2, (2,)))


def test_other_errors_of_the_model_stay_bugs(readers):
    class Wrong(SmallModel):
        def look(self, views, regions, *, score_cells=True):
            raise RuntimeError("shapes do not match")

    with Looker(Wrong(), UNIT, device="cpu") as looker, pytest.raises(RuntimeError, match="shapes"):
        looker.look(readers, Plan(1, ()))


def test_bf16_is_close_to_fp32(readers):
    with Looker(SmallModel(), UNIT, device="cpu") as looker:
        full = sight_of(looker.look(readers[:1], Plan(1, ()))[0])
    with Looker(SmallModel(), UNIT, device="cpu", precision="bf16") as looker:
        half = sight_of(looker.look(readers[:1], Plan(1, ()))[0])
    assert half.scores == pytest.approx(full.scores, abs=0.1)


def test_no_gradient_is_kept(readers):
    model = SmallModel()
    with Looker(model, UNIT, device="cpu") as looker:
        looker.look(readers[:1], Plan(2, (1,)))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training


def test_the_cost_is_that_of_this_walk_alone(readers):
    from tnetcli.readers.blocks import BLOCKS

    with Looker(SmallModel(), UNIT, device="cpu") as looker:
        BLOCKS.clear()
        first = sight_of(looker.look(readers[:1], Plan(2, (2,)))[0])
        BLOCKS.clear()
        second = sight_of(looker.look(readers[:1], Plan(2, (2,)))[0])
    assert first.cost == second.cost
    assert 0 < first.cost.pixels_decoded < readers[0].size.pixels


def test_what_a_visit_followed_is_numbered_among_its_own_image(readers):
    with Looker(SmallModel(), UNIT, device="cpu") as looker:
        together = looker.look(readers, Plan(3, (2, 1)))
        alone = [sight_of(looker.look([reader], Plan(3, (2, 1)))[0]) for reader in readers]
    for one, other in zip(together, alone, strict=True):
        assert [visit.followed for visit in one.visits] == [v.followed for v in other.visits]
        assert [visit.place for visit in one.visits] == [v.place for v in other.visits]
        for visit in one.visits:
            for cell in visit.followed:
                shown = one.visits[cell.visit].place.region
                child = visit.place.region.child(Grid(3, 3, 0.5), cell.row, cell.column)
                assert shown.window.box == pytest.approx(child.window.box)


def test_the_last_level_is_never_scored_whatever_else_is_in_the_batch(readers):
    plan = Plan(2, (), policy="best_first", budget=4)
    with Looker(SmallModel(), UNIT, device="cpu") as looker:
        for sight in looker.look(readers, plan):
            last = [visit for visit in sight.visits if visit.place.region.level == 2]
            assert last
            assert not any(visit.seen.attention.any() for visit in last)


@pytest.mark.parametrize("confidence", [-0.1, 1.1, float("nan")])
def test_a_confidence_that_is_no_probability_is_refused(readers, confidence):
    with (
        Looker(SmallModel(), UNIT, device="cpu") as looker,
        pytest.raises(ValueError, match="confidence"),
    ):
        looker.look(readers[:1], Plan(2, (2,)), confidence=confidence)


def test_no_confidence_needed_is_enough_at_once(readers):
    with Looker(SmallModel(), UNIT, device="cpu") as looker:
        sight = sight_of(looker.look(readers[:1], Plan(3, (2, 1)), confidence=0.0)[0])
    assert (sight.stop, len(sight.visits)) == ("confidence", 1)


def test_a_forked_worker_can_go_on_looking(readers):
    with Looker(SmallModel(), UNIT, device="cpu", threads=2) as looker:
        expected = sight_of(looker.look(readers[:1], Plan(2, (2,)))[0])
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # ends a child that waits for threads it does not have
            found = sight_of(looker.look(readers[:1], Plan(2, (2,)))[0])
            os._exit(0 if np.array_equal(found.scores, expected.scores) else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_a_looker_can_be_sent_to_another_process(readers):
    with Looker(SmallModel(), UNIT, device="cpu") as looker:
        expected = sight_of(looker.look(readers[:1], Plan(2, (2,)))[0])
        with pickle.loads(pickle.dumps(looker)) as copy:
            found = sight_of(copy.look(readers[:1], Plan(2, (2,)))[0])
    assert np.array_equal(found.scores, expected.scores)


def test_a_trained_model_sees_as_it_was_trained_to(tmp_path):
    model, description = tiny(
        bands=["red", "green", "blue"],
        normalisation={"dtype": "uint8", "mean": [90.0] * 3, "std": [50.0] * 3},
        traversal={
            "levels": 2,
            "keep": [2],
            "fit": "pad",
            "background": [230, 255],
            "confidence": 0.01,
        },
    )
    save_checkpoint(tmp_path / "a.safetensors", model, description)
    image = noise((600, 300)) // 2
    image[:, :, 300:] = 240  # glass
    scene = write_geotiff(tmp_path / "scene.tif", image)
    plain = write_geotiff(tmp_path / "plain.tif", image[:1])
    with (
        Looker.of(load_model(tmp_path / "a.safetensors"), device="cpu") as looker,
        open_image(scene) as reader,
        open_image(plain) as grey,
    ):
        found = looker.look([reader, grey], description.plan(), confidence=1.0)
        hasty = sight_of(looker.look([reader], description.plan())[0])
    assert hasty.stop == "confidence"
    sight = sight_of(found[0])
    assert sight.visits[0].place.region.window.box == (0.0, -150.0, 600.0, 450.0)
    assert len(sight.visits) == 3
    assert all(visit.place.region.window.left < 300 for visit in sight.visits)
    assert "3 bands (red, green, blue)" in str(found[1])


def test_no_images_is_no_work():
    with Looker(SmallModel(), UNIT, device="cpu") as looker:
        assert looker.look([], Plan(2, (2,))) == []


def test_float_overviews_are_averages_of_the_truth():
    image = noise((8, 8)).astype(np.float32)
    expected = image.reshape(3, 4, 2, 4, 2).mean(axis=(2, 4))
    assert area_average(image, 2) == pytest.approx(expected)


def test_attention_that_is_no_number_is_a_model_error(readers):
    model = SmallModel()
    look = model.look
    model.look = lambda *given, **options: look(*given, **options)._replace(
        attention=torch.full((len(given[1]), 3, 3), float("nan"))
    )
    with (
        Looker(model, UNIT, device="cpu") as looker,
        pytest.raises(ModelError, match="not a number") as caught,
    ):
        looker.look(readers[:2], Plan(levels=2, keep=(1,)))
    assert caught.value.hint
