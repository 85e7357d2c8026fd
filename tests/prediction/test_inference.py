import os
import pickle
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from tests.checkpoints import tiny
from tests.images import noise, write_geotiff, write_pyramid_tiff
from tests.small_model import SmallModel
from tnetcli.data.normalize import Normalisation
from tnetcli.errors import ImageError, ModelError
from tnetcli.geometry import Grid, Region, Size, Window
from tnetcli.models.checkpoint import load_model, save_checkpoint
from tnetcli.models.registry import build_model
from tnetcli.prediction.inference import ImageResult, Inference, _windows, record_result
from tnetcli.prediction.record import Prediction, Provenance
from tnetcli.readers.detect import open_image
from tnetcli.testing.reader import area_mean
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import build_policy

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


def config(levels, keep, **more):
    return TraversalConfig(levels=levels, keep=keep, **more)


def run(inference, readers, config, seeds=None):
    seeds = range(len(readers)) if seeds is None else seeds
    return inference.run(readers, config, [build_policy(config, seed) for seed in seeds])


def result_of(inference, reader, config, seed=0):
    (found,) = run(inference, [reader], config, [seed])
    assert isinstance(found, ImageResult), found
    return found


def paths_of(result):
    return [node.region.path for node in result.nodes]


def decoded_logits(model, image, keep, normalisation, dtype):
    """Do what the reference does: decode everything, crop from the array, follow the best."""
    mean = np.array(normalisation.mean)[:, None, None]
    std = np.array(normalisation.std)[:, None, None]
    size = Size(image.shape[2], image.shape[1])
    view = Size(model.view_size, model.view_size)
    frontier, features, levels = [Region(Window.whole(size))], [], []
    for level in range(len(keep) + 1):
        crops = [area_mean(image, region.window, view) for region in frontier]
        if np.issubdtype(dtype, np.integer):
            crops = [np.rint(crop) for crop in crops]
        views = torch.tensor(np.stack([(crop - mean) / std for crop in crops]), dtype=torch.float32)
        with torch.no_grad():
            positions = torch.tensor([region.position for region in frontier])
            out = model.encoder(level + 1)(views, positions)
        features.append(out.features)
        levels += [level + 1] * len(frontier)
        if level < len(keep):
            following = []
            for region, scores in zip(frontier, out.cell_logits.squeeze(2), strict=True):
                best = sorted(torch.topk(scores, keep[level]).indices.tolist())
                cells = [divmod(cell, model.grid.columns) for cell in best]
                following += [region.child(model.grid, *cell) for cell in cells]
            frontier = following
    together = torch.cat(features).unsqueeze(0)
    with torch.no_grad():
        mask = torch.ones(together.shape[:2], dtype=torch.bool)
        return model.aggregate(together, mask, torch.tensor([levels])).logits[0].numpy()


class TestEqualToFullyDecoded:
    """A lazy traversal gives the logits of a traversal of the decoded array."""

    def model(self):
        torch.manual_seed(3)
        arguments = {"backbone": "resnet10t", "view_size": 64, "location": "squeeze"}
        return build_model("tnet", arguments, classes=4).eval()

    def test_through_exact_overviews_of_floats(self, tmp_path):
        image = noise((512, 512), seed=5).astype(np.float32)
        path = write_pyramid_tiff(tmp_path / "scene.tif", image, factors=(2, 4))
        model, own = self.model(), config(3, (2, 1), deduplicate=False)
        with open_image(path) as reader, Inference(model, FLOAT, device="cpu") as inference:
            result = result_of(inference, reader, own)
            used = reader.cost.pixels_decoded
        expected = decoded_logits(model, image, (2, 1), FLOAT, np.float32)
        assert result.logits == pytest.approx(expected, abs=1e-4)
        assert len(result.nodes) == 1 + 2 + 2
        assert used < image[0].size  # the overviews served: it never saw all of it

    def test_at_full_resolution_of_bytes(self, tmp_path):
        image = noise((300, 240), seed=6)
        path = write_geotiff(tmp_path / "scene.tif", image)
        model, own = self.model(), config(3, (3, 1), deduplicate=False, min_size=1)
        with open_image(path) as reader, Inference(model, UNIT, device="cpu") as inference:
            result = result_of(inference, reader, own)
        expected = decoded_logits(model, image, (3, 1), UNIT, np.uint8)
        assert result.logits == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("policy", ["top_k", "sample", "best_first"])
def test_a_batch_of_eight_equals_eight_single_runs(readers, policy):
    own = config(3, (2, 2), policy=policy, budget=6)
    seeds = list(range(8))
    with Inference(SmallModel(), UNIT, device="cpu") as inference:
        together = run(inference, readers, own, seeds)
        for number, reader in enumerate(readers):
            alone = result_of(inference, reader, own, seeds[number])
            assert paths_of(alone) == paths_of(together[number])
            assert alone.logits == pytest.approx(together[number].logits, abs=1e-5)
            assert alone.stop == together[number].stop


@pytest.mark.parametrize("threads", [8])
def test_reading_threads_change_nothing(readers, threads):
    own = config(3, (3, 2))
    with Inference(SmallModel(), UNIT, device="cpu", threads=1) as one:
        expected = run(one, readers, own)
    with Inference(SmallModel(), UNIT, device="cpu", threads=threads) as many:
        found = run(many, readers, own)
    for one_result, other in zip(expected, found, strict=True):
        assert paths_of(one_result) == paths_of(other)
        assert np.array_equal(one_result.logits, other.logits)
        assert np.array_equal(one_result.features, other.features)


@pytest.mark.parametrize("max_batch", [1, 1000])
def test_the_size_of_a_chunk_changes_nothing(readers, max_batch):
    own = config(2, (4,))
    with Inference(SmallModel(), UNIT, device="cpu") as whole:
        expected = run(whole, readers, own)
    model = SmallModel()
    with Inference(model, UNIT, device="cpu", max_batch=max_batch) as parts:
        found = run(parts, readers, own)
    assert max(model.batches) <= max_batch
    for one, other in zip(expected, found, strict=True):
        assert paths_of(one) == paths_of(other)
        assert other.logits == pytest.approx(one.logits, abs=1e-5)


def test_a_level_is_one_batch_for_all_images(readers):
    model = SmallModel()
    with Inference(model, UNIT, device="cpu", max_batch=1000) as inference:
        run(inference, readers, config(3, (2, 1), deduplicate=False))
    assert model.batches == [8, 16, 16]


def test_logits_are_given_for_every_level(readers):
    model = SmallModel()
    with Inference(model, UNIT, device="cpu") as inference:
        result = result_of(inference, readers[0], config(3, (2, 1)))
        for level in (1, 2, 3):
            shallow = result_of(inference, readers[0], config(level, (2, 1)))
            assert result.level_logits[level - 1] == pytest.approx(shallow.logits, abs=1e-5)
    assert result.logits == pytest.approx(result.level_logits[-1])
    assert result.weights.sum() == pytest.approx(1)
    assert result.region_logits.shape == (len(result.nodes), 3)


def test_an_image_that_fails_does_not_stop_the_others(readers, tmp_path):
    broken = write_geotiff(tmp_path / "broken.tif", noise((300, 300), bands=1))
    with Inference(SmallModel(), UNIT, device="cpu") as inference, open_image(broken) as wrong:
        found = run(inference, [readers[0], wrong, readers[1]], config(2, (2,)))
        alone = result_of(inference, readers[1], config(2, (2,)))
    assert isinstance(found[1], ImageError)
    assert "needs 3 bands" in str(found[1])
    assert np.array_equal(found[2].logits, alone.logits)


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


def test_an_image_that_fails_at_level_2_fails_alone(readers):
    with Inference(SmallModel(), UNIT, device="cpu", max_batch=3) as inference:
        found = run(inference, [Breaking(readers[0]), readers[1]], config(3, (3, 1)))
        alone = result_of(inference, readers[1], config(3, (3, 1)))
    assert isinstance(found[0], ImageError)
    assert found[0].hint == "copy it again"
    assert np.array_equal(found[1].logits, alone.logits)


def test_an_image_without_a_valid_pixel_fails(tmp_path):
    path = write_geotiff(tmp_path / "empty.tif", np.zeros((3, 300, 300), np.uint8), nodata=0)
    with Inference(SmallModel(), UNIT, device="cpu") as inference, open_image(path) as reader:
        (found,) = run(inference, [reader], config(2, (2,)))
    assert isinstance(found, ImageError)
    assert "no valid pixel" in str(found)


def test_cells_without_a_valid_pixel_are_never_chosen(tmp_path):
    image = noise((600, 600)) // 2 + 10
    image[:, :, :300] = 0  # the left half, and dark cells attract this model the least
    path = write_geotiff(tmp_path / "half.tif", 255 - image, nodata=255)
    grid = Grid(2, 2, 0.5)
    with (
        Inference(SmallModel(grid=grid), UNIT, device="cpu") as inference,
        open_image(path) as reader,
    ):
        result = result_of(inference, reader, config(2, (4,)))
    assert paths_of(result) == ["root", "root/0-1", "root/1-1"]


def test_cells_of_nothing_but_background_are_never_chosen(tmp_path):
    image = noise((600, 600)) // 2
    image[:, 300:] = 240  # glass
    path = write_geotiff(tmp_path / "slide.tif", image)
    model = SmallModel(grid=Grid(2, 2, 0.5))
    with open_image(path) as reader:
        with Inference(model, UNIT, device="cpu", background=(230, 255)) as inference:
            result = result_of(inference, reader, config(2, (2,)))
        assert paths_of(result) == ["root", "root/0-0", "root/0-1"]
        with Inference(model, UNIT, device="cpu") as inference:
            result = result_of(inference, reader, config(2, (2,)))
        assert paths_of(result) == ["root", "root/1-0", "root/1-1"]


def test_levels_end_where_a_view_would_be_finer_than_the_pixels(tmp_path):
    path = write_geotiff(tmp_path / "small.tif", noise((130, 130)))
    with (
        Inference(SmallModel(view_size=32), UNIT, device="cpu") as inference,
        open_image(path) as reader,
    ):
        result = result_of(inference, reader, config(9, (1,)))
        deeper = result_of(inference, reader, config(9, (1,), min_size=8))
    assert [node.region.level for node in result.nodes] == [1, 2, 3]  # 130, 65, 32.5
    assert result.stop == "native_resolution"
    assert len(deeper.nodes) == 5


def test_confidence_ends_the_traversal(readers):
    model = SmallModel()
    with Inference(model, UNIT, device="cpu") as inference:
        sure = result_of(inference, readers[0], config(3, (2, 1), confidence=0.01))
        unsure = result_of(inference, readers[0], config(3, (2, 1), confidence=1.0))
    assert (sure.stop, len(sure.nodes)) == ("confidence", 1)
    assert unsure.stop == "max_level"


def test_padding_keeps_the_shape_of_an_image(tmp_path):
    path = write_geotiff(tmp_path / "wide.tif", noise((600, 300)))
    with (
        Inference(SmallModel(), UNIT, device="cpu") as inference,
        open_image(path) as reader,
    ):
        result = result_of(inference, reader, config(2, (9,), fit="pad"))
    assert result.nodes[0].region.window.box == (0.0, -150.0, 600.0, 450.0)
    assert result.valid[0] == pytest.approx(0.5)
    assert all(node.region.window.width == 300 for node in result.nodes[1:])


def test_no_gradient_is_kept(readers):
    model = SmallModel()
    with Inference(model, UNIT, device="cpu") as inference:
        run(inference, readers[:1], config(2, (1,)))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training


def test_the_cost_is_that_of_this_traversal_alone(readers):
    from tnetcli.readers.pyramid import BLOCKS

    with Inference(SmallModel(), UNIT, device="cpu") as inference:
        BLOCKS.clear()
        first = result_of(inference, readers[0], config(2, (2,)))
        BLOCKS.clear()
        second = result_of(inference, readers[0], config(2, (2,)))
    assert first.cost == second.cost
    assert 0 < first.cost.pixels_decoded < readers[0].size.pixels


def test_cells_of_the_last_level_are_neither_scored_nor_proposed(readers):
    proposed, scored = [], []

    class Noted(SmallModel):
        def forward(self, views, positions, score_cells=True):
            scored.append((len(views), score_cells))
            return super().forward(views, positions)

        def propose(self, cell_logits, aux):
            proposed.append(len(cell_logits))
            return cell_logits

    with Inference(Noted(), UNIT, device="cpu") as inference:
        for result in run(inference, readers, config(2, (2,))):
            assert result.levels == [1, 2, 2]
    assert proposed == [8]
    assert scored == [(8, True), (16, False)]


def test_a_forked_worker_can_continue(readers):
    with Inference(SmallModel(), UNIT, device="cpu", threads=2) as inference:
        expected = result_of(inference, readers[0], config(2, (2,)))
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # ends a child that waits for threads it does not have
            found = result_of(inference, readers[0], config(2, (2,)))
            os._exit(0 if np.array_equal(found.logits, expected.logits) else 1)
        assert os.waitpid(child, 0)[1] == 0


def test_inference_can_be_sent_to_another_process(readers):
    with Inference(SmallModel(), UNIT, device="cpu") as inference:
        expected = result_of(inference, readers[0], config(2, (2,)))
        with pickle.loads(pickle.dumps(inference)) as copy:
            found = result_of(copy, readers[0], config(2, (2,)))
    assert np.array_equal(found.logits, expected.logits)


def test_a_checkpoint_reads_images_as_in_training(tmp_path):
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
        Inference.of(load_model(tmp_path / "a.safetensors"), device="cpu") as inference,
        open_image(scene) as reader,
        open_image(plain) as grey,
    ):
        own = description.traversal_config()
        found = run(inference, [reader, grey], own.changed(confidence=1.0))
        hasty = result_of(inference, reader, own)
    assert hasty.stop == "confidence"
    result = found[0]
    assert result.nodes[0].region.window.box == (0.0, -150.0, 600.0, 450.0)
    assert len(result.nodes) == 3
    assert all(node.region.window.left < 300 for node in result.nodes)
    assert "3 bands (red, green, blue)" in str(found[1])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_attention_that_is_no_number_is_a_model_error(readers, poison):
    class Poisoned(SmallModel):
        def propose(self, cell_logits, aux):
            return cell_logits + poison

    with (
        Inference(Poisoned(), UNIT, device="cpu") as inference,
        pytest.raises(ModelError, match="not a number") as caught,
    ):
        run(inference, readers[:2], config(2, (1,)))
    assert caught.value.hint


class BySize(SmallModel):
    """Level 2 is read at 48 pixels, and deeper at 64, except in the left column."""

    def __init__(self):
        super().__init__(grid=Grid(2, 2, 0.5))
        self.shapes = []

    def view_size_of(self, region):
        return {1: 32, 2: 48}.get(region.level, 64 if region.window.left else 24)

    def forward(self, views, positions, score_cells=True):
        self.shapes.append((int(positions[0, 2]) + 1, tuple(views.shape)))
        return super().forward(nn.functional.adaptive_avg_pool2d(views, 32), positions)


@pytest.mark.parametrize("max_batch", [2, 1000])
def test_views_of_a_size_per_region_are_encoded_by_size(readers, max_batch):
    model, own = BySize(), config(3, (4, 4), min_size=1)
    with Inference(model, UNIT, device="cpu", max_batch=max_batch) as inference:
        together = run(inference, readers[:3], own)
        assert {shape for _, shape in model.shapes if shape[0] > max_batch} == set()
        if max_batch == 1000:
            assert model.shapes == [
                (1, (3, 3, 32, 32)),
                (2, (12, 3, 48, 48)),
                (3, (12, 3, 24, 24)),
                (3, (36, 3, 64, 64)),
            ]
        alone = [result_of(inference, reader, own) for reader in readers[:3]]
    for one, other in zip(together, alone, strict=True):
        assert paths_of(one) == paths_of(other)
        assert one.features == pytest.approx(other.features, abs=1e-6)
        assert one.logits == pytest.approx(other.logits, abs=1e-5)


CLASSES = ("river", "forest", "sea")
SHA256 = "ab12" * 16
MADE = Provenance(model="small", sha256=SHA256, version="1", config={"levels": 9})


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("scene") / "scene.tif"
    write_geotiff(path, noise((600, 500)), overviews=[2, 4])
    normalisation = Normalisation.to_unit_range("uint8", 3)
    config = TraversalConfig(levels=9, keep=(2, 1))
    inference = Inference(SmallModel(), normalisation, device="cpu")
    with inference, open_image(path) as reader:
        (result,) = inference.run([reader], config, [build_policy(config)])
        record = record_result(
            result,
            reader,
            image="a/scene.tif",
            id="a/scene.tif",
            classes=CLASSES,
            provenance=MADE,
            fingerprint="cd34",
            warnings=["dark"],
            reading={"z": "3"},
        )
    return result, record


def test_probabilities_are_the_softmax_of_the_scores(found):
    result, record = found
    expected = np.exp(result.logits) / np.exp(result.logits).sum()
    assert list(record.probabilities) == list(CLASSES)
    assert list(record.probabilities.values()) == pytest.approx(expected.tolist(), rel=1e-5)
    assert sum(record.probabilities.values()) == pytest.approx(1)
    assert record.label == CLASSES[int(expected.argmax())]
    assert record.probability == record.probabilities[record.label]


def test_every_region_is_recorded(found):
    result, record = found
    assert [window.path for window in record.windows][:2] == ["root", record.windows[1].path]
    assert record.windows[0].box == (0.0, 0.0, 600.0, 500.0)
    assert record.windows[0].attention == 1.0
    assert sum(window.share for window in record.windows) == pytest.approx(1)
    assert len(record.windows) == len(result.nodes) == record.cost.windows
    assert sum(level.windows for level in record.levels) == len(record.windows)


def test_what_every_window_would_say_alone_is_recorded_for_all_classes(found):
    result, record = found
    powers = np.exp(result.region_logits)
    for window, expected in zip(record.windows, powers / powers.sum(1, keepdims=True), strict=True):
        assert window.probabilities == pytest.approx(expected.tolist(), abs=1e-6)
        assert window.probability == pytest.approx(max(window.probabilities), abs=1e-6)
        assert window.label == CLASSES[int(np.argmax(window.probabilities))]


def test_the_classes_of_windows_are_left_out_where_they_are_many(found, monkeypatch):
    monkeypatch.setattr("tnetcli.prediction.inference.MAX_CLASSES", 2)
    result, _ = found
    assert {each.probabilities for each in _windows(result, CLASSES)} == {()}


def test_the_last_level_agrees_with_the_prediction(found):
    _, record = found
    assert record.levels[-1].label == record.label
    assert record.levels[-1].probability == pytest.approx(record.probability)


def test_the_record_has_the_stop_reason(found):
    _, record = found
    assert record.stop_reason == "native_resolution"
    assert record.levels[-1].level < 9


def test_place_model_and_cost_are_recorded(found):
    _, record = found
    assert (record.width, record.height, record.bands) == (600, 500, 3)
    assert (record.georeference.crs, record.georeference.source) == ("EPSG:32633", "transform")
    assert (record.provenance.model, record.provenance.sha256) == ("small", SHA256)
    assert (record.provenance.version, record.provenance.runtime) == ("1", "torch")
    assert (record.provenance.config, record.fingerprint) == ({"levels": 9}, "cd34")
    assert (record.warnings, record.reading) == (("dark",), {"z": "3"})
    assert record.cost.pixels_total == 300_000
    assert record.cost.fraction_decoded == record.cost.pixels_decoded / 300_000
    assert record.cost.seconds == record.cost.read_seconds + record.cost.model_seconds


def test_the_record_survives_its_line(found):
    _, record = found
    assert Prediction.model_validate_json(record.model_dump_json()) == record


def test_glimpses_are_recorded_in_pixels_of_the_image(found):
    result, _ = found
    assert result.glimpses.shape == (len(result.nodes), 0, 4)
    boxes = np.tile(np.float32([[0.25, 0.5, 0.5, 1.0], [0, 0, 1, 1]]), (len(result.nodes), 1, 1))
    scores = np.zeros((len(result.nodes), 2, len(CLASSES)), np.float32)
    scores[:, 0, 1] = np.log(2)
    found = _windows(replace(result, glimpses=boxes, glimpse_logits=scores), CLASSES)
    for window in found:
        x0, y0, x1, y1 = window.box
        width, height = x1 - x0, y1 - y0
        first, second = window.glimpses
        expected = (x0 + width / 4, y0 + height / 2, x0 + width / 2, y1)
        assert first.box == pytest.approx(expected, abs=0.006)
        assert second.box == pytest.approx(window.box, abs=0.006)
        assert (first.label, first.probability) == ("forest", 0.5)
