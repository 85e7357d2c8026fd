from dataclasses import replace

import numpy as np
import pytest

from tests.images import noise, write_geotiff
from tests.small_model import SmallModel
from tnetcli.data.normalize import Normalisation
from tnetcli.prediction.inference import Inference, _windows, record_result
from tnetcli.prediction.record import Prediction, Provenance
from tnetcli.readers.detect import open_image
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import build_policy

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
