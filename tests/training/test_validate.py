import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.images import noise, write_geotiff
from tests.runs import CLASSES, SIDE, UNIT, Ears, Hands, recipe_of, write_images
from tests.small_model import SmallModel
from tnetcli.data.manifest import read_examples
from tnetcli.errors import ManifestError
from tnetcli.geometry import Size
from tnetcli.prediction.inference import Inference
from tnetcli.training import validate as validating
from tnetcli.training.data import FileSource, Item, open_source
from tnetcli.training.recipe import StageConfig
from tnetcli.training.run_dir import Run, RunFolder
from tnetcli.training.validate import attention_warnings, validate
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import build_policy

TWO = TraversalConfig(levels=2, keep=(2,))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = write_images(tmp_path_factory.mktemp("images"), train=2, validation=7)
    recipe = recipe_of(path)
    return open_source(recipe, recipe.data)


def run(source, config=TWO, model=None, images=None, normalisation=UNIT):
    model = model or SmallModel(classes=len(CLASSES))
    recipe = recipe_of(None, training={"validation_images": images})
    folder = RunFolder(Path("unused"))
    prepared = Run(recipe, source, normalisation, model, folder, Ears(), Hands())
    return validate(prepared, model, config, "cpu")


def results_of(source):
    items = [source.item("validation", number) for number in range(7)]
    with Inference(SmallModel(classes=2), UNIT, device="cpu", threads=1) as inference:
        policies = [build_policy(TWO) for _ in items]
        return items, inference.run([item.reader for item in items], TWO, policies)


def test_accuracy_and_loss_are_those_of_a_prediction(source):
    found = run(source)
    items, results = results_of(source)
    assert found.row["images"] == 7
    for level in (0, 1):
        pairs = zip(items, results, strict=True)
        right = [result.level_logits[level].argmax() == item.label for item, result in pairs]
        assert found.row["accuracy"][level] == pytest.approx(np.mean(right))
    losses = [
        -torch.from_numpy(s.logits).double().log_softmax(dim=0)[i.label].item()
        for i, s in zip(items, results, strict=True)
    ]
    assert found.loss == pytest.approx(np.mean(losses), rel=1e-6)
    assert found.accuracy == found.row["accuracy"][-1]
    assert found.row["windows"] == 2.0


def test_batches_make_no_difference(source, monkeypatch):
    whole = run(source)
    monkeypatch.setattr(validating, "BATCH", 2)
    parts = run(source)
    for key in ("loss", "accuracy", "windows", "hit", "images"):
        assert parts.row[key] == pytest.approx(whole.row[key])


def test_hits_are_counted_below_level_1_where_the_list_has_boxes(source):
    found = run(source)
    items, results = results_of(source)
    hits = []
    for item, result in zip(items, results, strict=True):
        (box,) = item.boxes
        centres = (box.left + box.width / 2, box.top + box.height / 2)
        windows = [n.region.window for n in result.nodes if n.region.level == 2]
        inside = [
            w.left <= centres[0] <= w.right and w.top <= centres[1] <= w.bottom for w in windows
        ]
        hits.append(any(inside))
    # Cells of 48 pixels begin at 0, 24 and 48: those that hold the middle of the box, at 24, hold
    # half of the box at least.
    assert found.row["hit"] == [pytest.approx(np.mean(hits))]


def test_random_choices_are_compared_on_the_same_images(source, monkeypatch):
    monkeypatch.setattr(validating, "COMPARED", 4)
    found = run(source)
    items, results = results_of(source)
    learned = np.mean(
        [s.logits.argmax() == i.label for i, s in zip(items[:4], results[:4], strict=True)]
    )
    assert found.row["gain_over_random"] == pytest.approx(learned - found.row["random_accuracy"])
    assert found.row["random_accuracy"] * 4 == pytest.approx(
        round(found.row["random_accuracy"] * 4)
    )


def test_one_level_has_nothing_to_compare_with(source):
    found = run(source, TWO.changed(levels=1))
    assert len(found.row["accuracy"]) == 1
    assert found.row["windows"] == 0
    assert "random_accuracy" not in found.row
    assert not found.row.get("hit")


def test_a_model_is_left_as_it_was_but_for_its_mode(source):
    model = SmallModel(classes=2).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    run(source, model=model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_few_images_are_shown_with_their_windows(source):
    found = run(source)
    items, results = results_of(source)
    assert len(found.samples) == 7
    for sample, item, result in zip(found.samples, items, results, strict=True):
        assert sample.size == Size(SIDE, SIDE)
        assert sample.label == CLASSES[item.label]
        assert sample.predicted == CLASSES[int(result.logits.argmax())]
        chances = torch.from_numpy(result.logits).softmax(dim=0)
        assert sample.probability == pytest.approx(chances.max().item(), rel=1e-5)
        assert [w for w, _, _ in sample.windows] == [
            node.region.window for node in result.nodes[1:]
        ]
        assert sample.boxes == item.boxes


def test_no_more_images_are_validated_than_configured(source):
    assert run(source, images=3).row["images"] == 3
    assert run(source, images=100).row["images"] == 7


def test_only_a_few_samples_are_drawn_with_8_bit_pixels_as_they_are(source, monkeypatch):
    monkeypatch.setattr(validating, "SAMPLES", 2)
    sample, _ = run(source).samples
    with Image.open(source.item("validation", 0).reader.path) as image:
        assert np.array_equal(sample.thumbnail[..., :3], np.array(image))


def test_samples_are_drawn_before_their_images_are_closed(tmp_path, monkeypatch):
    monkeypatch.setattr(validating, "BATCH", 2)
    recipe = recipe_of(write_images(tmp_path / "images", train=2, validation=7))
    source = FileSource(read_examples(recipe.data, CLASSES), max_open=2)
    assert len(run(source).samples) == 7


class Listed:
    """A source of readers for validation."""

    classes = CLASSES

    def __init__(self, *readers):
        self._readers = readers

    def count(self, split):
        return len(self._readers)

    def item(self, split, number, epoch=0):
        return Item(self._readers[number], number % 2, (), str(number))


def test_images_that_cannot_be_read_are_left_out(tmp_path, source):
    from tnetcli.readers.detect import open_image

    path = write_geotiff(tmp_path / "deep.tif", noise((80, 60), 3, "uint16"))  # not 8 bits
    with open_image(path) as deep:
        good = source.item("validation", 0).reader
        found = run(Listed(good, deep, good))
        assert found.row["images"] == 2
        with pytest.raises(ManifestError, match="no validation image"):
            run(Listed(deep))


def test_small_images_that_end_early_count_at_every_level(tmp_path, source):
    from tnetcli.readers.detect import open_image

    path = write_geotiff(tmp_path / "small.tif", noise((40, 40)))
    with open_image(path) as small:
        found = run(Listed(small, source.item("validation", 0).reader))
    assert found.row["windows"] == 1.0  # 0 and 2
    assert len(found.row["accuracy"]) == 2
    assert math.isfinite(found.loss)


def test_images_are_traversed_as_configured_and_always_alike(source):
    drawing = TWO.changed(policy="sample")
    assert run(source, drawing).row == run(source, drawing).row != run(source).row


HEALTHY = {"entropy": 0.6, "distinct": 0.5, "accuracy": [0.5, 0.7]}


def warnings(stage=None, **row):
    return list(attention_warnings({**HEALTHY, **row}, stage or StageConfig(steps=1)))


@pytest.mark.parametrize(
    ("row", "word", "advice"),
    [
        ({"entropy": 0.999}, "flat", "temperature"),
        ({"distinct": 0.02}, "stuck", "sample"),
        ({"entropy": 0.01}, "collapsed", "uniform"),
    ],
)
def test_what_is_wrong_is_said_in_words_with_the_figure_and_what_to_try(row, word, advice):
    (text,) = warnings(**row)
    assert f"attention is {word}" in text or f"attention has {word}" in text
    assert advice in text
    assert any(character.isdigit() for character in text)


def test_attention_that_is_stuck_and_sharp_is_reported_once():
    (text,) = warnings(entropy=0.01, distinct=0.0)
    assert "stuck" in text


@pytest.mark.parametrize("row", [{}, {"entropy": 1.0, "accuracy": [0.5]}])
def test_healthy_attention_and_a_single_level_give_no_warning(row):
    assert warnings(**row) == []
    assert list(attention_warnings({"accuracy": [0.1, 0.2]}, StageConfig(steps=1))) == []


@pytest.mark.parametrize(
    "stage", [StageConfig(steps=1, learn="tiles"), StageConfig(steps=1, freeze=["location"])]
)
def test_a_stage_in_which_attention_does_not_learn_is_not_judged(stage):
    assert warnings(stage, entropy=1.0, distinct=0.0) == []
