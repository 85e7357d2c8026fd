from contextlib import ExitStack

import numpy as np
import pytest
import torch

from tests.images import noise, write_geotiff
from tests.small_model import SmallModel
from tnetcli.data.normalize import Normalisation
from tnetcli.errors import ImageError
from tnetcli.evaluation.attention import check_attention, deepest_windows
from tnetcli.prediction.inference import Inference
from tnetcli.readers.detect import open_image
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import build_policy

UNIT = Normalisation.to_unit_range("uint8", 3)
CLASSES = ("bright", "dark")
TWO = TraversalConfig(levels=2, keep=(2,))
THREE = TraversalConfig(levels=3, keep=(2, 1))


def bright_is_first():
    """Return a model whose first class is more probable for brighter pixels."""
    model = SmallModel(classes=2)
    with torch.no_grad():
        model.head.weight[0] = 0.2
        model.head.weight[1] = -0.2
    return model


@pytest.fixture
def opened():
    with ExitStack() as closing:
        yield lambda path: closing.enter_context(open_image(path))


@pytest.fixture
def inference():
    with Inference(bright_is_first(), UNIT, device="cpu", threads=1) as inference:
        yield inference


def scene(path, hidden=(), **options):
    """Write two bright squares on dark ground; hidden boxes have no data."""
    image = np.full((3, 256, 256), 40, np.uint8)
    image[:, 16:112, 144:240] = 250
    image[:, 150:250, 10:110] = 220
    for x0, y0, x1, y1 in hidden:
        image[:, int(y0) : int(y1), int(x0) : int(x1)] = 0
    write_geotiff(path, image, nodata=0, **options)
    return path


def run(inference, readers, config=TWO, seeds=None):
    seeds = seeds or range(len(readers))
    return inference.run(readers, config, [build_policy(config, seed) for seed in seeds])


def check(inference, readers, config=TWO, seeds=None):
    seeds = seeds or list(range(len(readers)))
    return check_attention(
        inference,
        readers,
        run(inference, readers, config, seeds),
        config,
        [build_policy(config, seed) for seed in seeds],
        seeds=seeds,
    )


def softmax(scores):
    return np.exp(scores) / np.exp(scores).sum()


def test_a_masked_image_is_predicted_as_a_file_with_gaps(inference, opened, tmp_path):
    reader = opened(scene(tmp_path / "a.tif"))
    (result,) = run(inference, [reader])
    windows = [window.box for window in deepest_windows(result)]
    assert len(windows) == 2
    assert (128.0, 0.0, 256.0, 128.0) in windows  # the brightest cell
    (found,) = check(inference, [reader])
    # Windows and views share a grid here, so that a file with gaps has the same views.
    (other,) = run(inference, [opened(scene(tmp_path / "b.tif", windows))])
    assert found.masked == pytest.approx(softmax(other.logits)[0], rel=1e-5)
    assert found.masked_changed == (int(other.logits.argmax()) != 0)


def test_the_probability_falls_without_the_chosen_regions(inference, opened, tmp_path):
    reader = opened(scene(tmp_path / "a.tif"))
    (result,) = run(inference, [reader])
    (found,) = check(inference, [reader])
    own = softmax(result.logits)[0]
    assert own > 0.7
    assert found.masked < own
    assert found.random < own
    assert found.own == pytest.approx(own)


def test_the_check_does_not_depend_on_the_batch(inference, opened, tmp_path):
    readers = [opened(scene(tmp_path / "a.tif"))]
    for number in range(3):
        write_geotiff(tmp_path / f"{number}.tif", noise((300, 260), seed=number), overviews=[2])
        readers.append(opened(tmp_path / f"{number}.tif"))
    seeds = [7, 8, 9, 10]
    together = check(inference, readers, THREE, seeds=seeds)
    for reader, seed, expected in zip(readers, seeds, together, strict=True):
        (alone,) = check(inference, [reader], THREE, seeds=[seed])
        assert alone.masked == pytest.approx(expected.masked, rel=1e-5)
        assert alone.random == pytest.approx(expected.random, rel=1e-5)
        assert alone.random_changed == expected.random_changed
    assert len({each.random for each in together}) == 4


def test_only_the_deepest_regions_are_hidden(inference, opened, tmp_path):
    (result,) = run(inference, [opened(scene(tmp_path / "a.tif"))], THREE)
    boxes = {window.box for window in deepest_windows(result)}
    levels = [node.region.level for node in result.nodes]
    assert levels.count(3) == len(boxes) == 2
    assert all(x1 - x0 == 64 for x0, _, x1, _ in boxes)


def test_images_without_chosen_regions_are_not_checked(inference, opened, tmp_path):
    one = TraversalConfig(levels=1, keep=())
    reader = opened(scene(tmp_path / "a.tif"))
    (result,) = run(inference, [reader], one)
    failed = ImageError("damaged")
    policies = [build_policy(one)] * 2
    found = check_attention(inference, [reader] * 2, [result, failed], one, policies, seeds=[0, 0])
    assert found == [None, None]


def test_without_visible_pixels_the_class_counts_as_changed(inference, opened, tmp_path):
    reader = opened(scene(tmp_path / "a.tif"))
    (found,) = check(inference, [reader], TWO.changed(keep=(9,)))
    assert (found.masked, found.masked_changed) == (0.0, 1.0)
    assert 0 < found.random < 1
