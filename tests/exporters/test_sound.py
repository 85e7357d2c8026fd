import copy
import math
from dataclasses import asdict, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.exporters.conformance import ODD, check_overlay, put, records
from tests.exporters.records import UTM, record, window
from tnetcli.errors import ImageError, OutputError
from tnetcli.exporters.geojson import collection_text, sequence_text
from tnetcli.exporters.looked import Looked
from tnetcli.exporters.page import page_text
from tnetcli.exporters.sound import sound
from tnetcli.exporters.table import csv_text
from tnetcli.prediction import AttentionCheck, Prediction, PredictionCost, Problem, SeenLevel

CHECK = AttentionCheck(None, "", 0.5, 1 / 3, 3, 0)
COST = PredictionCost(2, 100, 10_000, 0.01, 2000, 30_000, 0.5, 0.25, 0.75)
LEVELS = (SeenLevel(1, 1, "forest", 0.5), SeenLevel(2, 1, "river", 0.97))
WHOLE = record(
    window(probabilities=(0.5, 0.5)),
    window("root/1-1", (0.0, 0.0, 9.5, 7.25)),
    levels=LEVELS,
    cost=COST,
    attention_check=CHECK,
    microns_per_pixel=(0.5, 0.5),
    settings={"view_size": 224},
    warnings=("blurred",),
    **UTM,
)
FAILED = Prediction("c.tif", "c.tif", "failed", error=Problem.of(ImageError("damaged")))


def walked(prediction):
    return list(sound(Looked.of(prediction)).windows)


def test_what_predict_writes_is_sound():
    assert walked(WHOLE) == list(WHOLE.windows)
    assert sound(Looked.of(FAILED)).prediction is FAILED


@pytest.mark.parametrize("unknown", ["attention", "weight", "probability", "valid"])
def test_a_share_may_be_unknown(unknown):
    assert walked(record(replace(window(), **{unknown: math.nan})))


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"box": (9.0, 9.0, 1.0, 1.0)}, "not a rectangle"),
        ({"box": (0.0, 0.0, math.nan, 1.0)}, "not a rectangle"),
        ({"box": (0.0, 0.0, math.inf, 1.0)}, "not a rectangle"),
        ({"box": (5.0, 5.0, 5.0, 9.0)}, "not a rectangle"),
        ({"box": (0.0, 0.0, 0.01, 9.0)}, "thinner than 0.02"),
        ({"box": (0.0, 0.0, 1e10, 9.0)}, "too far out"),
        ({"box": (0, 0, 10**400, 9)}, "too far out"),
        ({"box": (0.0, 0.0, 9.0)}, "not four numbers"),
        ({"box": ("a", "b", "c", "d")}, "not four numbers"),
        ({"attention": 2}, "`attention` is 2, not between 0 and 1"),
        ({"attention": -0.1}, "`attention` is -0.1"),
        ({"attention": math.inf}, "`attention` is inf"),
        ({"attention": "0.5"}, "`attention` is 0.5, not a number"),
        ({"attention": True}, "`attention` is True, not a number"),
        ({"probability": 1.5}, "`probability` is 1.5"),
        ({"probabilities": (0.5, 1.5)}, "`probabilities` is 1.5"),
        ({"probabilities": (0.5,)}, "tells 1 probabilities of 2 classes"),
        ({"path": "lost/0-0", "level": 2}, "no way down from the root"),
        ({"path": "root\n"}, "no way down from the root"),
        ({"path": 5}, "no way down from the root"),
        ({"level": 3}, "`level` 3 does not fit"),
        ({"rank": 0}, "`rank` is 0"),
        ({"rank": 10**400}, "`rank` is a number of"),
        ({"rank": 1.5}, "`rank` is 1.5, not a whole number"),
        ({"label": None}, "`label` is None, not text"),
        ({"steps": ("a",)}, "not numbers"),
    ],
)
def test_a_window_that_cannot_be_is_refused(told, says):
    with pytest.raises(OutputError, match=r"`scenes/a\.tif` cannot be shown: window `") as caught:
        walked(record(window(), replace(window("root/0-0"), **({"path": "root/0-0"} | told))))
    assert says in str(caught.value)
    assert "predict it again" in caught.value.hint


@pytest.mark.parametrize(
    ("told", "says"),
    [
        ({"status": "done"}, "`status` is done, not ok or failed"),
        ({"width": 0}, "`width` is 0"),
        ({"height": 10**12}, "`height` is 10"),
        ({"offset": (0, 0, 0)}, "`offset` has 3 values, not 2"),
        ({"offset": (0.5, 0)}, "`offset[0]` is 0.5, not a whole number"),
        ({"transform": (0.0,) * 6}, "`transform` leads nowhere"),
        ({"transform": (1.0, 2.0, 0.0, 2.0, 4.0, 0.0)}, "`transform` leads nowhere"),
        ({"transform": (math.nan, 0.0, 0.0, 0.0, 1.0, 0.0)}, "`transform` leads nowhere"),
        ({"transform": (1.0, 0.0, math.inf, 0.0, 1.0, 0.0)}, "`transform` leads nowhere"),
        ({"transform": (10**400, 0, 0, 0, 1, 0)}, "`transform` leads nowhere"),
        ({"transform": (1.0, 0.0)}, "`transform` leads nowhere"),
        ({"transform": (1.0, 0.0, math.inf, 0.0, 1.0, 0.0), "crs": None}, "leads nowhere"),
        ({"microns_per_pixel": (0.0, 0.5)}, "`microns_per_pixel[0]` is 0.0"),
        ({"microns_per_pixel": (0.5, math.nan)}, "`microns_per_pixel[1]` is nan"),
        ({"model_sha256": "F" * 64}, "`model_sha256` is none"),
        ({"settings": {"view_size": "224"}}, "`settings.view_size` is 224"),
        ({"settings": {"view_size": 0}}, "`settings.view_size` is 0"),
        ({"probability": 1.5}, "`probability` is 1.5"),
        ({"probabilities": {"forest": 2.0, "river": 0.0}}, "`probabilities.forest` is 2.0"),
        ({"probabilities": {"forest": None, "river": 0.0}}, "`probabilities.forest` is None"),
        ({"levels": (SeenLevel(1, 1, "a", 7.0),)}, "`levels[0].probability` is 7.0"),
        ({"levels": (SeenLevel(1, 1, 5, 0.5),)}, "`levels[0].label` is 5, not text"),
        ({"attention_check": replace(CHECK, masked=-1.0)}, "`attention_check.masked` is -1.0"),
        ({"attention_check": replace(CHECK, random=math.nan)}, "`attention_check.random` is nan"),
        ({"attention_check": replace(CHECK, draws=0)}, "`attention_check.draws` is 0"),
        ({"cost": replace(COST, bytes_read=10**400)}, "`cost.bytes_read` is a number of"),
        ({"cost": replace(COST, seconds="long")}, "`cost.seconds` is long, not a number"),
        ({"warnings": (5,)}, "`warnings[0]` is 5, not text"),
        ({"georeference": 5}, "`georeference` is 5, not text"),
    ],
)
def test_a_record_that_cannot_be_is_refused(told, says):
    with pytest.raises(OutputError, match=r"`scenes/a\.tif` cannot be shown: ") as caught:
        sound(Looked.of(replace(WHOLE, **told)))
    assert says in str(caught.value)


def test_a_failure_that_cannot_be_told_is_refused():
    with pytest.raises(OutputError, match=r"`error\.message` is 5, not text"):
        sound(Looked.of(replace(FAILED, error=Problem("ImageError", 5))))


def test_a_window_that_was_told_is_sound_and_passes_the_check(tmp_path):
    for place in ({}, UTM):
        told = record(window(), window("root/w1"), window("root/w1/0-1"), **place)
        text = "".join(collection_text([sound(Looked.of(told))]))
        assert check_overlay(put(tmp_path, text)).features == 3


def test_a_window_is_there_once():
    twice = record(
        window(), window("root/0-0"), window("root/0-1"), window("root/0-0", attention=0)
    )
    with pytest.raises(OutputError, match="window `root/0-0` is there twice"):
        walked(twice)


def test_windows_are_looked_at_as_they_are_walked_and_each_time():
    looked = sound(Looked.of(record(window(), window("root/0-0", (9, 9, 1, 1)))))
    for _ in range(2):
        windows = iter(looked.windows)
        assert next(windows).path == "root"
        with pytest.raises(OutputError):
            next(windows)


def changed(value, data):
    """A record as JSON has it, with up to three of its parts replaced by something odd."""
    holder = {"it": copy.deepcopy(value)}
    for _ in range(data.draw(st.integers(0, 3))):
        above, step = holder, "it"
        while isinstance(above[step], dict | list) and above[step] and data.draw(st.booleans()):
            above = above[step]
            step = data.draw(
                st.sampled_from(sorted(above) if isinstance(above, dict) else [*range(len(above))])
            )
        if step != "it":
            odd = ODD | st.floats() | st.sampled_from(["root/0-0", [math.nan] * 6, [0, 0, 5, 5]])
            above[step] = copy.deepcopy(data.draw(odd))
    return holder["it"]


def as_lists(value):
    if isinstance(value, dict):
        return {key: as_lists(each) for key, each in value.items()}
    return [as_lists(each) for each in value] if isinstance(value, list | tuple) else value


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(prediction=records | st.just(WHOLE), data=st.data())
def test_whatever_is_let_through_passes_its_own_check(prediction, data, tmp_path_factory):
    try:
        hostile = Prediction.from_data(changed(as_lists(asdict(prediction)), data))
    except ValueError:
        return  # no record at all
    folder = tmp_path_factory.mktemp("hostile")
    try:
        text = "".join(collection_text([sound(Looked.of(hostile))]))
    except OutputError:
        return
    assert check_overlay(put(folder, text)).features == len(hostile.windows) * (
        hostile.status == "ok"
    )
    lines = "".join(sequence_text([sound(Looked.of(hostile))]))
    check_overlay(put(folder, lines, "a.geojsonl"))
    for per_image in (False, True):
        assert "".join(csv_text([sound(Looked.of(hostile))], per_image=per_image))
    assert "".join(page_text([sound(Looked.of(hostile))], None))
