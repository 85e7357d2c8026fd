import numpy as np
import pytest

from tests.images import noise, write_geotiff
from tests.small_model import SmallModel
from tnetcli.errors import ImageError
from tnetcli.looking import Looker
from tnetcli.normalisation import Normalisation
from tnetcli.prediction import Prediction
from tnetcli.readers.open import open_image
from tnetcli.recording import Maker, _windows, record_failure, record_sight
from tnetcli.traversal import Plan

CLASSES = ("river", "forest", "sea")


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    path = tmp_path_factory.mktemp("scene") / "scene.tif"
    write_geotiff(path, noise((600, 500)), overviews=[2, 4])
    normalisation = Normalisation.to_unit_range("uint8", 3)
    with Looker(SmallModel(), normalisation, device="cpu") as looker, open_image(path) as reader:
        (sight,) = looker.look([reader], Plan(9, (2, 1)))
        record = record_sight(
            sight,
            reader,
            id="a/scene.tif",
            maker=Maker("small", "ab12", CLASSES, {"levels": 9}),
            fingerprint="cd34",
        )
    return sight, record


def test_probabilities_are_the_softmax_of_the_scores(seen):
    sight, record = seen
    expected = np.exp(sight.scores) / np.exp(sight.scores).sum()
    assert list(record.probabilities) == list(CLASSES)
    assert list(record.probabilities.values()) == pytest.approx(expected.tolist(), rel=1e-5)
    assert sum(record.probabilities.values()) == pytest.approx(1)
    assert record.label == CLASSES[int(expected.argmax())]
    assert record.probability == record.probabilities[record.label]


def test_every_window_looked_at_is_recorded(seen):
    sight, record = seen
    assert [window.path for window in record.windows][:2] == ["root", record.windows[1].path]
    assert record.windows[0].box == (0.0, 0.0, 600.0, 500.0)
    assert record.windows[0].attention == 1.0
    assert sum(window.weight for window in record.windows) == pytest.approx(1)
    assert len(record.windows) == len(sight.visits) == record.cost.windows
    assert sum(level.windows for level in record.levels) == len(record.windows)


def test_what_every_window_would_say_alone_is_recorded_for_all_classes(seen):
    sight, record = seen
    powers = np.exp(sight.window_scores)
    for window, expected in zip(record.windows, powers / powers.sum(1, keepdims=True), strict=True):
        assert window.probabilities == pytest.approx(expected.tolist(), abs=1e-6)
        assert window.probability == pytest.approx(max(window.probabilities), abs=1e-6)
        assert window.label == CLASSES[int(np.argmax(window.probabilities))]


def test_the_classes_of_windows_are_left_out_where_they_are_many(seen, monkeypatch):
    monkeypatch.setattr("tnetcli.recording.MOST_CLASSES", 2)
    sight, _ = seen
    assert {each.probabilities for each in _windows(sight, CLASSES)} == {()}


def test_the_last_level_agrees_with_the_conclusion(seen):
    _, record = seen
    assert record.levels[-1].label == record.label
    assert record.levels[-1].probability == pytest.approx(record.probability)


def test_the_record_says_why_the_looking_ended(seen):
    _, record = seen
    assert record.stopped == "pixels"
    assert record.levels[-1].level < 9


def test_place_model_and_cost_are_recorded(seen):
    _, record = seen
    assert (record.width, record.height, record.bands) == (600, 500, 3)
    assert (record.crs, record.georeference) == ("EPSG:32633", "transform")
    assert (record.model, record.model_sha256) == ("small", "ab12")
    assert (record.settings, record.fingerprint) == ({"levels": 9}, "cd34")
    assert record.cost.pixels_total == 300_000
    assert record.cost.fraction_decoded == record.cost.pixels_decoded / 300_000
    assert record.cost.seconds == record.cost.read_seconds + record.cost.model_seconds


def test_the_record_survives_its_line(seen):
    _, record = seen
    assert Prediction.from_json(record.to_json()) == record


def test_a_failure_keeps_what_the_user_would_read():
    record = record_failure(
        ImageError("torn", hint="again"),
        image="b.tif",
        id="b",
        maker=Maker("small", "ab12", CLASSES, {"levels": 9}),
    )
    assert Prediction.from_json(record.to_json()) == record
    assert (record.model_sha256, record.settings) == ("ab12", {"levels": 9})
    assert (record.status, record.error.message, record.error.hint) == ("failed", "torn", "again")
