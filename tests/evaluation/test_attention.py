from contextlib import ExitStack

import numpy as np
import pytest
import torch

from tests.evaluation.conftest import LabelledFile
from tests.images import noise, write_geotiff
from tests.small_model import SmallModel
from tnetcli.data.normalize import Normalisation
from tnetcli.evaluation.evaluate import Evaluator, deepest_windows
from tnetcli.prediction.inference import Inference
from tnetcli.readers.detect import open_image
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import build_policy

UNIT = Normalisation.to_unit_range("uint8", 3)
TWO = TraversalConfig(levels=2, keep=(2,))
THREE = TraversalConfig(levels=3, keep=(2, 1))


def bright_is_first():
    """Return a model whose first class is more probable for brighter pixels."""
    model = SmallModel(classes=2)
    with torch.no_grad():
        model.head.weight[0] = 0.2
        model.head.weight[1] = -0.2
    return model


@pytest.fixture(autouse=True)
def _count_nothing(monkeypatch):
    """The cost of a model that no family builds is not counted."""
    monkeypatch.setattr("tnetcli.evaluation.evaluate.Counter", lambda *_, **__: None)
    monkeypatch.setattr(Evaluator, "multiply", lambda *_: 0)


@pytest.fixture
def opened():
    with ExitStack() as closing:
        yield lambda path: closing.enter_context(open_image(path))


@pytest.fixture
def inference():
    with Inference(bright_is_first(), UNIT, device="cpu", threads=1) as inference:
        yield inference


def scene(path, hidden=()):
    """Write two bright squares on dark ground; hidden boxes have no data."""
    image = np.full((3, 256, 256), 40, np.uint8)
    image[:, 16:112, 144:240] = 250
    image[:, 150:250, 10:110] = 220
    for x0, y0, x1, y1 in hidden:
        image[:, int(y0) : int(y1), int(x0) : int(x1)] = 0
    write_geotiff(path, image, nodata=0)
    return path


def run(inference, reader, config=TWO):
    (result,) = inference.run([reader], config, [build_policy(config)])
    return result


def checks(inference, paths, config=TWO, seeds=None):
    """Return the check of each image: own, masked, masked_changed, random, random_changed."""
    evaluator = Evaluator(inference, config, ["attention"], [0], check_attention=True)
    images = [LabelledFile(str(path)) for path in paths]
    return [each.check for each in evaluator.predict(images, seeds or [0] * len(images))]


def softmax(scores):
    return np.exp(scores) / np.exp(scores).sum()


def test_a_masked_image_is_predicted_as_a_file_with_gaps(inference, opened, tmp_path):
    path = scene(tmp_path / "a.tif")
    windows = [window.box for window in deepest_windows(run(inference, opened(path)))]
    assert len(windows) == 2
    assert (128.0, 0.0, 256.0, 128.0) in windows  # the brightest cell
    ((_, masked, changed, _, _),) = checks(inference, [path])
    # Windows and views share a grid here, so that a file with gaps has the same views.
    other = run(inference, opened(scene(tmp_path / "b.tif", windows)))
    assert masked == pytest.approx(softmax(other.logits)[0], rel=1e-5)
    assert changed == (int(other.logits.argmax()) != 0)


def test_the_probability_falls_without_the_chosen_regions(inference, opened, tmp_path):
    path = scene(tmp_path / "a.tif")
    expected = softmax(run(inference, opened(path)).logits)[0]
    ((own, masked, _, random, _),) = checks(inference, [path])
    assert own == pytest.approx(expected)
    assert own > max(0.7, masked, random)


def test_the_check_does_not_depend_on_the_batch(inference, tmp_path):
    paths = [scene(tmp_path / "a.tif")]
    for number in range(2):
        paths.append(tmp_path / f"{number}.tif")
        write_geotiff(paths[-1], noise((300, 260), seed=number), overviews=[2])
    together = checks(inference, paths, THREE, [7, 8, 9])
    for path, seed, expected in zip(paths, [7, 8, 9], together, strict=True):
        assert checks(inference, [path], THREE, [seed])[0] == pytest.approx(expected, rel=1e-5)
    assert len({random for _, _, _, random, _ in together}) == 3


def test_only_the_deepest_regions_are_hidden(inference, opened, tmp_path):
    result = run(inference, opened(scene(tmp_path / "a.tif")), THREE)
    boxes = {window.box for window in deepest_windows(result)}
    assert result.levels.count(3) == len(boxes) == 2
    assert all(x1 - x0 == 64 for x0, _, x1, _ in boxes)


def test_images_without_chosen_regions_are_not_checked(inference, tmp_path):
    one = TraversalConfig(levels=1, keep=())
    assert checks(inference, [scene(tmp_path / "a.tif")], one) == [None]


def test_without_visible_pixels_the_class_counts_as_changed(inference, tmp_path):
    path = scene(tmp_path / "a.tif")
    ((_, masked, changed, random, _),) = checks(inference, [path], TWO.changed(keep=(9,)))
    assert (masked, changed) == (0.0, 1.0)
    assert 0 < random < 1
