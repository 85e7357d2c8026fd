import json
import sys

import numpy as np
import pytest
from matplotlib import colormaps, rc_context, rcParams
from PIL import Image

from tests.checkpoints import write_tiny
from tests.evaluation.conftest import CLASSES, RGB
from tnetcli.evaluation.evaluate import evaluate
from tnetcli.evaluation.report import as_json, as_text, draw_confusion

STRANGE = ["$\\frac{a}{b}$", "a\x1b[2J\nb", "漢字", "x" * 300, "", "$"]


def test_json_has_everything(found):
    record = json.loads(as_json(found))
    assert record["schema"] == "tnet.evaluation/1"
    assert (record["images"], record["images_with_boxes"], record["failed"]) == (6, 3, [])
    assert record["confusion"] == found.confusion.tolist()
    assert record["scores"]["accuracy"]["value"] == np.trace(found.confusion) / 6
    assert record["scores"]["macro_f1"]["low"] <= record["scores"]["macro_f1"]["value"]
    assert record["traversal"]["keep"] == [2, 1]
    assert {(row["choice"], row["context"], row["windows"]) for row in record["rows"]} == {
        (choice, context, count)
        for choice in ("attention", "random", "oracle")
        for context in (True, False)
        for count in range(5)
        if context or count
    }
    assert {(rate["choice"], rate["level"]) for rate in record["hit_rates"]} == {
        (choice, level) for choice in ("attention", "random", "oracle") for level in (2, 3)
    }


def test_metrics_by_class_are_those_of_the_confusion(found):
    matrix = found.confusion
    for number, each in enumerate(json.loads(as_json(found))["per_class"]):
        right, predicted = matrix[number, number], matrix[:, number].sum()
        assert each["class"] == CLASSES[number]
        assert each["images"] == 2
        assert each["recall"] == right / 2
        assert each["precision"] == (right / predicted if predicted else None)
        assert each["f1"] == 2 * right / (2 + predicted)


def test_text_shows_the_metrics(found):
    text = as_text(found)
    accuracy = found.scores.accuracy
    assert f"{100 * accuracy.value:.1f} %" in text
    for title in ("attention", "without whole image", "random", "oracle", "level", "river"):
        assert title in text
    assert max(map(len, text.splitlines())) <= 120
    assert "…" not in text  # no column was cut


def test_names_cannot_control_the_terminal(folder, tmp_path):
    classes = ["a\x1b[2J", "b\nc", "d" * 300]
    write_tiny(
        tmp_path / "m.safetensors",
        **{**RGB, "classes": classes},
        traversal={"levels": 2, "keep": [1]},
    )
    rows = f"path,label\n{folder / '0.tif'},{classes[2]}\n"
    (tmp_path / "a.csv").write_text(rows)
    found = evaluate(tmp_path / "m.safetensors", tmp_path / "a.csv", device="cpu")
    assert "\x1b" not in as_text(found)


def pixels(path):
    with Image.open(path) as picture:
        assert picture.format == "PNG"
        return np.asarray(picture.convert("RGB"))


@pytest.mark.parametrize(
    ("matrix", "dark_by_bright"), [([[9, 0, 0], [0, 2, 0], [0, 0, 70]], 2), ([[9, 0], [0, 0]], 3)]
)
def test_a_cell_is_bright_where_the_images_of_a_row_are(matrix, dark_by_bright, tmp_path):
    draw_confusion(np.array(matrix), [f"c{i}" for i in range(len(matrix))], tmp_path / "a.png")
    picture = pixels(tmp_path / "a.png")
    picture = picture[:, : int(picture.shape[1] * 0.8)].astype(int)  # without the colour bar
    ends = [np.array(colormaps["cividis"](x)[:3]) * 255 for x in (1.0, 0.0)]
    bright, dark = ((np.abs(picture - end).max(axis=2) <= 2).sum() for end in ends)
    assert dark / bright == pytest.approx(dark_by_bright, rel=0.15)


@pytest.mark.parametrize("names", [["a"], [f"class {i}" for i in range(400)], STRANGE])
def test_any_number_of_classes_and_any_name_is_drawn(names, tmp_path):
    draw_confusion(np.eye(len(names), dtype=int), names, tmp_path / "a.png")
    picture = pixels(tmp_path / "a.png")
    assert max(picture.shape) <= 1600
    assert picture.std() > 0


def test_drawing_needs_no_display_and_leaves_settings_alone(tmp_path, monkeypatch):
    draw_confusion(np.eye(2, dtype=int), ["a", "b"], tmp_path / "b.png")
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it fails
    with rc_context({"font.size": 33}):
        draw_confusion(np.eye(2, dtype=int), ["a", "b"], tmp_path / "a.png")
        assert rcParams["font.size"] == 33
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
