from contextlib import ExitStack

import numpy as np
import pytest
import torch
from tnetcli.looking import Looker

from tests.images import noise, write_geotiff
from tests.small_model import SmallModel
from tnetcli.errors import ImageError
from tnetcli.normalisation import Normalisation
from tnetcli.readers.open import open_image
from tnetcli.traversal import Plan
from tnetcli.workflows.attention_check import check_attention, closest

UNIT = Normalisation.to_unit_range("uint8", 3)
CLASSES = ("bright", "dark")
PLAN = Plan(2, (2,))


def bright_is_first():
    """The first class is as probable as what is seen is bright."""
    model = SmallModel(classes=2)
    with torch.no_grad():
        model.classifier.weight[0] = 0.2
        model.classifier.weight[1] = -0.2
    return model


@pytest.fixture
def opened():
    with ExitStack() as closing:
        yield lambda path: closing.enter_context(open_image(path))


@pytest.fixture
def looker():
    with Looker(bright_is_first(), UNIT, device="cpu", threads=1) as looker:
        yield looker


def scene(path, hidden=(), **options):
    """Two bright places on dark ground; what is hidden has no data."""
    image = np.full((3, 256, 256), 40, np.uint8)
    image[:, 16:112, 144:240] = 250
    image[:, 150:250, 10:110] = 220
    for x0, y0, x1, y1 in hidden:
        image[:, int(y0) : int(y1), int(x0) : int(x1)] = 0
    write_geotiff(path, image, nodata=0, **options)
    return path


def check(looker, readers, plan=PLAN, **options):
    seeds = options.pop("seeds", range(len(readers)))
    sights = looker.look(readers, plan, seeds=seeds)
    return check_attention(
        looker, readers, sights, plan, classes=CLASSES, seeds=list(seeds), **options
    )


def softmax(scores):
    return np.exp(scores) / np.exp(scores).sum()


def test_without_its_windows_an_image_is_what_a_file_without_them_is(looker, opened, tmp_path):
    reader = opened(scene(tmp_path / "a.tif"))
    (sight,) = looker.look([reader], PLAN)
    windows = [window.box for window in closest(sight)]
    assert len(windows) == 2
    assert (128.0, 0.0, 256.0, 128.0) in windows  # the brightest cell
    (found,) = check(looker, [reader])
    # Windows and views lie on one grid here, so that a file with gaps is the very same to see.
    (other,) = looker.look([opened(scene(tmp_path / "b.tif", windows))], PLAN, seeds=[0])
    assert found.masked == pytest.approx(softmax(other.scores)[0], rel=1e-5)
    assert found.masked_label == CLASSES[int(other.scores.argmax())]


def test_what_was_looked_at_matters_where_it_decides(looker, opened, tmp_path):
    reader = opened(scene(tmp_path / "a.tif"))
    (sight,) = looker.look([reader], PLAN)
    (found,) = check(looker, [reader])
    own = softmax(sight.scores)[0]
    assert own > 0.7
    assert found.masked < own
    assert found.random < own
    assert found.draws == 3


def test_it_does_not_depend_on_the_batch(looker, opened, tmp_path):
    readers = [opened(scene(tmp_path / "a.tif"))]
    for number in range(3):
        write_geotiff(tmp_path / f"{number}.tif", noise((300, 260), seed=number), overviews=[2])
        readers.append(opened(tmp_path / f"{number}.tif"))
    seeds = [7, 8, 9, 10]
    together = check(looker, readers, Plan(3, (2, 1)), seeds=seeds)
    for reader, seed, expected in zip(readers, seeds, together, strict=True):
        (alone,) = check(looker, [reader], Plan(3, (2, 1)), seeds=[seed])
        assert alone.masked == pytest.approx(expected.masked, rel=1e-5)
        assert alone.random == pytest.approx(expected.random, rel=1e-5)
        assert alone.random_same == expected.random_same
    assert len({each.random for each in together}) == 4


def test_only_the_closest_windows_are_hidden(looker, opened, tmp_path):
    (sight,) = looker.look([opened(scene(tmp_path / "a.tif"))], Plan(3, (2, 1)))
    boxes = {window.box for window in closest(sight)}
    levels = [visit.place.region.level for visit in sight.visits]
    assert levels.count(3) == len(boxes) == 2
    assert all(x1 - x0 == 64 for x0, _, x1, _ in boxes)


def test_where_nothing_was_chosen_there_is_nothing_to_check(looker, opened, tmp_path):
    reader = opened(scene(tmp_path / "a.tif"))
    (sight,) = looker.look([reader], Plan(1, ()))
    failed = ImageError("damaged")
    found = check_attention(
        looker, [reader] * 2, [sight, failed], Plan(1, ()), classes=CLASSES, seeds=[0, 0]
    )
    assert found == [None, None]


def test_where_nothing_is_left_to_see_that_is_told(looker, opened, tmp_path):
    reader = opened(scene(tmp_path / "a.tif"))
    (found,) = check(looker, [reader], Plan(2, (9,)))
    assert (found.masked, found.masked_label) == (None, "")
    assert 0 < found.random < 1
