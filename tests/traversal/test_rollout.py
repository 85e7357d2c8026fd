import numpy as np
import pytest
import torch

from tests.images import noise, write_geotiff
from tests.runs import UNIT
from tests.small_model import SmallModel
from tests.training.explore import (
    CPU,
    THREE,
    TWO,
    Torn,
    explore,
    tiny_model,
    views_of,
    write_readers,
)
from tnetcli.errors import ImageError
from tnetcli.prediction.inference import Inference
from tnetcli.readers.detect import open_image
from tnetcli.training.recipe import LossConfig
from tnetcli.traversal.policies import Random, TopK, build_policy
from tnetcli.traversal.rollout import by_image, effective, rollout
from tnetcli.traversal.runner import TorchRunner

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
DRAWN = LossConfig(selection="sample")


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    opened = write_readers(tmp_path_factory.mktemp("rollout"))
    yield opened
    for reader in opened:
        reader.close()


@pytest.fixture
def model():
    return tiny_model()


@pytest.fixture
def views(model):
    with views_of(model) as made:
        yield made


def windows(explored, level=2):
    return [node.region.window for node in explored.found.nodes if node.region.level == level]


def test_training_reads_the_regions_of_a_prediction_and_finds_its_logits(model, views, readers):
    explored = explore(model, views, readers)
    episodes = explored.episodes()
    with Inference(model, UNIT, device="cpu", threads=1) as inference:
        results = inference.run(readers, THREE, [build_policy(THREE)] * 4)
    for image, result in enumerate(results):
        own = (episodes.image == image).nonzero().flatten().tolist()
        assert explored.regions(image) == [node.region for node in result.nodes]
        assert episodes.level[own].tolist() == result.levels
        assert np.allclose(episodes.logits[image].detach(), result.logits, **CLOSE)
        level_logits = episodes.level_logits[:, image].detach()
        assert np.allclose(level_logits, result.level_logits, **CLOSE)
        assert np.allclose(episodes.region_logits[own].detach(), result.region_logits, **CLOSE)


def test_arrays_are_aligned_with_the_nodes(model, views, readers):
    found = explore(model, views, readers).found
    assert found.image.tolist() == [node.image for node in found.nodes]
    assert found.level.tolist() == [node.region.level for node in found.nodes]
    assert len(found.features) == len(found.valid) == len(found.nodes) == 4 * (1 + 2 + 2)
    numbers, pooled = found.aux["pooled"]
    positions = torch.tensor([found.nodes[number].region.position for number in numbers])
    assert torch.allclose(model.embed(pooled, positions), found.features[numbers], atol=1e-5)
    assert found.waiting > 0


def test_a_draw_depends_on_the_seeds_alone(model, views, readers):
    one, same, other = (
        windows(explore(model, views, readers, TWO, DRAWN, seeds=seeds))
        for seeds in ([1, 2, 3, 4], [1, 2, 3, 4], [5, 6, 7, 8])
    )
    assert one == same
    assert one != other


def test_cells_without_data_are_never_drawn(model, views, tmp_path):
    image = noise((200, 200))
    image[:, :, 90:] = 0
    path = write_geotiff(tmp_path / "half.tif", image, nodata=0)
    with open_image(path) as reader:
        loss = LossConfig(selection="sample", uniform=0.9)
        explored = explore(model, views, [reader] * 4, TWO, loss)
    assert {window.left for window in windows(explored)} <= {0.0, 50.0}


@pytest.mark.parametrize(
    ("scale", "side", "levels"), [(1.0, 128, 3), (1.0, 127, 2), (0.5, 64, 3), (0.5, 63, 2)]
)
def test_levels_end_at_the_view_size_by_default(model, views, tmp_path, scale, side, levels):
    # Cells of the second level have a quarter of the side; views have 32 pixels.
    with open_image(write_geotiff(tmp_path / "a.tif", noise((side, side)))) as reader:
        found = explore(model, views, [reader], effective(THREE, model, scale=scale)).found
    assert found.level.max() == levels
    assert effective(THREE.changed(min_size=3), model).min_size == 3


def test_a_family_limits_the_levels(model):
    model.max_levels = 2
    assert effective(THREE, model).levels == 2
    assert effective(THREE.changed(levels=1), model).levels == 1


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("width", [200, 50])
def test_images_that_cannot_be_read_are_in_errors_at_whatever_level(
    model, views, readers, samples, width
):
    given = [readers[0], Torn(readers[1], width), readers[2], Torn(readers[3], width)]
    found = explore(
        model, views, given, THREE, LossConfig(selection="sample", samples=samples)
    ).found
    assert {image // samples for image in found.errors} == {1, 3}
    assert all("is torn" in str(each) for each in found.errors.values())
    assert {node.image // samples for node in found.nodes} == {0, 2}
    assert [found.stops[image] == "failed" for image in (0, samples)] == [False, True]


def test_an_image_that_fails_late_in_a_round_is_left_out_whole(readers):
    class TornAt:
        """Fails at the last region of level 2."""

        def __init__(self, reader):
            self._reader, self.path, self.size = reader, reader.path, reader.size

        def read(self, window, out_size):
            if window.top > 0:
                raise ImageError("torn")
            return self._reader.read(window, out_size)

    model = SmallModel()

    def run(images):
        runner = TorchRunner(model, CPU, max_batch=1)
        with views_of(model) as views:
            return rollout(images, runner, views, TWO.changed(keep=(9,)), [TopK() for _ in images])

    both, alone = run([TornAt(readers[1]), readers[0]]), run([readers[0]])
    assert model.batches == [1] * (2 + 3 + 9 + 1 + 9)  # the first row of cells was encoded
    assert set(both.errors) == {0}
    assert [node.region for node in both.nodes] == [node.region for node in alone.nodes]
    assert torch.allclose(both.features, alone.features)


def test_images_known_to_fail_are_not_read(readers):
    model = SmallModel()
    given = {1: ImageError("known")}
    with views_of(model) as views:
        runner = TorchRunner(model, CPU)
        found = rollout(readers[:2], runner, views, TWO, [TopK(), TopK()], errors=given)
    assert (found.errors, {node.image for node in found.nodes}) == (given, {0})
    assert sum(model.batches) == 3


def test_all_images_may_fail(readers):
    model = SmallModel()
    with views_of(model) as views:
        torn = [Torn(readers[0], 1e9)]
        found = rollout(torn, TorchRunner(model, CPU), views, TWO, [TopK()])
    assert (found.nodes, list(found.errors), model.batches) == ((), [0], [])


@pytest.mark.parametrize("max_batch", [1, 5])
def test_inference_streams_at_most_max_batch_views(readers, max_batch):
    class Counted(SmallModel):
        def propose(self, cell_logits, aux):
            assert len(cell_logits) <= max_batch
            return cell_logits

    model = Counted()
    config = THREE.changed(keep=(9, 2))
    policies = [Random(TopK(), model.grid, seed) for seed in range(4)]
    with views_of(model) as views:
        runner = TorchRunner(model, CPU, max_batch=max_batch)
        found = rollout(readers, runner, views, config, policies)
    assert max(model.batches) == max_batch
    assert sum(model.batches) == len(found.nodes) == 4 * (1 + 9 + 18)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_episodes_are_in_single_precision_and_have_gradients(model, views, readers, precision):
    episodes = explore(model, views, readers, precision=precision).episodes()
    for name in ("logits", "region_logits", "embedding", "log_p", "entropy"):
        each = getattr(episodes, name)
        assert each.dtype == torch.float32, name
        assert each.requires_grad, name
        assert each.isfinite().all(), name


def test_features_are_padded_image_by_image():
    features = torch.arange(8.0).view(4, 2)
    padded, levels = by_image(features, torch.tensor([1, 0, 1, 1]), torch.tensor([1, 1, 2, 3]), 3)
    assert levels.tolist() == [[1, 0, 0], [1, 2, 3], [0, 0, 0]]
    assert padded[1].tolist() == [[0, 1], [4, 5], [6, 7]]
    assert padded[0].tolist() == [[2, 3], [0, 0], [0, 0]]
