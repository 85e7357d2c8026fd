import json
import math
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.exporters.records import UTM, failed, record, window
from tests.exporters.records import replace as changed
from tnetcli.errors import ImageError
from tnetcli.geometry import Georeference
from tnetcli.prediction.record import (
    SCHEMA,
    STOP_REASONS,
    GlimpseRecord,
    LevelRecord,
    Prediction,
    PredictionCost,
    Problem,
    Provenance,
    RegionRecord,
    StopReason,
)

STORED = Path(__file__).parents[2] / "docs" / "prediction.schema.json"
COST = PredictionCost(2, 100, 10_000, 0.01, 2000, 30_000, 0.5, 0.25, 0.75)
LEVELS = (LevelRecord(1, 1, "forest", 0.5), LevelRecord(2, 1, "river", 0.97))
GLIMPSE = GlimpseRecord((1.0, 2.0, 3.5, 4.5), "forest", 0.75)
WHOLE = record(
    window(probabilities=(0.5, 0.5)),
    window("root/1-1", (0.0, 0.0, 9.5, 7.25), glimpses=(GLIMPSE,), steps=(0.25, 0.75)),
    levels=LEVELS,
    cost=COST,
    stop_reason="max_level",
    mpp=(0.5, 0.5),
    config={"view_size": 224, "keep": [2, 1]},
    warnings=("blurred",),
    **UTM,
)
ABSTAINED = record(*WHOLE.windows, status="abstained", levels=LEVELS, cost=COST, **UTM)
FAILED = failed()

shares = st.floats(0, 1)
words = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
counts = st.integers(0, 10**12)
boxes = st.tuples(*[st.floats(-1e8, 1e8)] * 2, *[st.floats(1.1e8, 1e9)] * 2)
glimpses = st.lists(st.builds(GlimpseRecord, boxes, words, shares), max_size=2).map(tuple)
paths = st.lists(st.from_regex("[0-9]+-[0-9]+|w[0-9]+", fullmatch=True), max_size=3)
windows = st.builds(
    lambda path, *rest, **more: RegionRecord(
        "/".join(["root", *path]), len(path) + 1, *rest, **more
    ),
    paths, boxes, shares, st.integers(1, 10**9), shares, words, shares, st.none() | shares,
    steps=st.lists(st.floats(-9, 9), max_size=3).map(tuple), glimpses=glimpses,
)  # fmt: skip
predictions = st.builds(
    Prediction,
    schema=st.just(SCHEMA),
    image=words,
    id=words,
    status=st.just("ok"),
    label=words,
    probability=shares,
    width=st.integers(1, 10**9),
    height=st.integers(1, 10**9),
    georeference=st.none()
    | st.builds(
        Georeference,
        st.none() | words,
        st.tuples(*map(st.just, (2.0, 0.5)), shares, st.just(0.1), st.just(-2.0), shares),
    ),
    mpp=st.none() | st.tuples(*[st.floats(1e-3, 1e3)] * 2),
    offset=st.tuples(*[st.integers(-(10**9), 10**9)] * 2),
    provenance=st.builds(Provenance, model=words, config=st.dictionaries(words, words | counts)),
    windows=st.lists(windows, max_size=2, unique_by=lambda each: each.path).map(tuple),
    cost=st.builds(PredictionCost, *[counts] * 3, shares, counts, counts, *[shares] * 3),
)


@given(predictions)
def test_a_record_is_equal_after_writing_and_reading(prediction):
    line = prediction.model_dump_json()
    assert "\n" not in line
    assert Prediction.model_validate_json(line) == prediction


@pytest.mark.parametrize("prediction", [WHOLE, ABSTAINED, FAILED])
def test_every_record_has_every_key_and_starts_with_its_schema(prediction):
    line = prediction.model_dump_json()
    assert line.startswith('{"schema":"tnet.prediction/2","id":')
    assert len(json.loads(line)) == len(Prediction.model_fields)
    assert Prediction.model_validate_json(line) == prediction


def test_the_stored_json_schema_is_that_of_the_model():
    assert json.loads(STORED.read_text()) == Prediction.model_json_schema()


def test_evidence_steps_and_glimpses_are_written_only_if_known():
    plain, full = json.loads(WHOLE.model_dump_json())["windows"]
    assert not {"evidence", "steps", "glimpses"} & plain.keys()
    assert full["steps"] == [0.25, 0.75]
    assert full["glimpses"] == [
        {"box": [1.0, 2.0, 3.5, 4.5], "label": "forest", "probability": 0.75}
    ]
    scored = record(replace(window(), evidence=-0.5))
    assert json.loads(scored.model_dump_json())["windows"][0]["evidence"] == -0.5
    assert Prediction.model_validate_json(scored.model_dump_json()) == scored


def test_an_abstained_record_has_everything_but_a_label():
    data = json.loads(ABSTAINED.model_dump_json())
    assert (data["status"], data["label"]) == ("abstained", None)
    assert data["reason"] == "the classes are too close"
    assert data["probabilities"] == {"forest": 0.03, "river": 0.97}
    assert len(data["windows"]) == 2
    assert ABSTAINED.is_done
    assert not FAILED.is_done


WRONG = {
    "no schema": ("schema", "Field required"),
    "another schema": ({"schema": "tnet.prediction/1"}, "schema"),
    "a status": ({"status": "done"}, "status"),
    "an unknown key": ({"colour": 1}, "colour"),
    "no label": ({"label": None}, "needs `label` and `probability`"),
    "a label although failed": ({"status": "failed"}, "`label` has to be null"),
    "a label although abstained": ({"status": "abstained", "reason": "x"}, "has to be null"),
    "no reason": ({"status": "abstained", "label": None}, "`reason` is for"),
    "a reason": ({"reason": "x"}, "`reason` is for"),
    "an error": ({"error": {"type": "E", "message": "m"}}, "`error` is for"),
    "no error": ({"status": "failed", "label": None}, "`error` is for"),
    "no width": ({"width": 0}, "0 x 3000 pixels"),
    "a width as text": ({"width": "9"}, "width"),
    "half an offset": ({"offset": [0.5, 0]}, "offset"),
    "no map": ({"georeference": {"crs": None, "transform": [0.0] * 6}}, "degenerate"),
    "a map too far": ({"georeference": {"crs": None, "transform": [1, 0, 1e13, 0, 1, 0]}}, "degen"),
    "no microns": ({"mpp": [0.0, 0.5]}, "mpp"),
    "a digest": ({"provenance": {"sha256": "F" * 64}}, "sha256"),
    "a runtime": ({"provenance": {"runtime": "abacus"}}, "runtime"),
    "a view size as text": ({"provenance": {"config": {"view_size": "224"}}}, "view_size"),
    "a probability": ({"probability": 1.5}, "probability"),
    "a class above 1": ({"probabilities": {"forest": 2.0, "river": 0.0}}, "forest"),
    "a sum": ({"probabilities": {"forest": 0.5, "river": 0.6}}, "add up to 1.1, not 1"),
    "another class": ({"label": "sea"}, "`sea` is not among the classes"),
    "a level": (
        {"levels": [{"level": 2, "windows": 1, "label": "river", "probability": 1}]}, "from 1",
    ),
    "a level's class": (
        {"levels": [{"level": 1, "windows": 1, "label": "sea", "probability": 1}]}, "`sea` is not",
    ),
    "a level's label": (
        {"levels": [{"level": 1, "windows": 1, "label": 5, "probability": 1}]}, "label",
    ),
    "a cost": ({"cost": {"bytes_read": 10**30}}, "bytes_read"),
    "a warning": ({"warnings": [5]}, "warnings"),
    "a window that is a number": ({"windows": [1]}, "windows"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_record_is_refused(name):
    change, says = WRONG[name]
    data = json.loads(WHOLE.model_dump_json())
    if isinstance(change, str):
        del data[change]
    else:
        data |= change
    with pytest.raises(ValidationError) as caught:
        Prediction.model_validate_json(json.dumps(data))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"box": [9.0, 9.0, 1.0, 1.0]}, "`box` is thinner than 0.02 pixels"),
        ({"box": [0.0, 0.0, 0.01, 9.0]}, "thinner"),
        ({"box": [0.0, 0.0, 1e10, 9.0]}, "less than or equal"),
        ({"box": [0.0, 0.0, 9.0]}, "box"),
        ({"box": ["a", "b", "c", "d"]}, "valid number"),
        ({"attention": 2}, "less than or equal"),
        ({"attention": -0.1}, "greater than or equal"),
        ({"attention": "0.5"}, "valid number"),
        ({"probabilities": [0.5]}, "1 probabilities of 2 classes"),
        ({"probabilities": [0.5, 0.75]}, "add up to 1.25"),
        ({"path": "lost/0-0"}, "path"),
        ({"path": "root/0-0\n"}, "path"),
        ({"path": "root/g1"}, "does not fit the path"),
        ({"level": 3}, "`level` 3 does not fit the path"),
        ({"path": "root", "level": 1}, "`root` is there twice"),
        ({"rank": 0}, "rank"),
        ({"rank": 10**400}, "rank"),
        ({"label": "sea"}, "`sea` is not a class"),
        ({"steps": ["a"]}, "steps"),
        ({"colour": "red"}, "colour"),
        ({"glimpses": [{"box": [9, 9, 1, 1], "label": "river", "probability": 1}]}, "glimpse 1: "),
        ({"glimpses": [{"box": [0, 0, 1, 1], "label": "sea", "probability": 1}]}, "`sea` is not"),
        ({"glimpses": [{"box": [0, 0, 1, 1], "label": "river", "probability": 2}]}, "probability"),
        ({"glimpses": [{"box": [0, 0, 1, 1], "label": "river"}]}, "probability"),
    ],
)
def test_a_wrong_window_is_refused(change, says):
    data = json.loads(WHOLE.model_dump_json())
    data["windows"][1] |= change
    with pytest.raises(ValidationError) as caught:
        Prediction.model_validate_json(json.dumps(data))
    assert says in str(caught.value)


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e400"])
@pytest.mark.parametrize(
    "key", ["probability", "config", "outcome", "box", "attention", "mpp", "transform"]
)
def test_a_number_that_is_not_finite_is_refused_everywhere(key, number):
    data = json.loads(WHOLE.model_dump_json())
    if key == "config":
        data["provenance"]["config"]["temperature"] = ["HERE"]
    elif key == "outcome":
        data["outcome"] = {"hazard": {"a": "HERE"}}
    elif key == "box":
        data["windows"][0]["box"][2] = "HERE"
    elif key == "attention":
        data["windows"][0]["attention"] = "HERE"
    elif key == "mpp":
        data["mpp"][1] = "HERE"
    elif key == "transform":
        data["georeference"]["transform"][4] = "HERE"
    else:
        data[key] = "HERE"
    with pytest.raises(ValidationError):
        Prediction.model_validate_json(json.dumps(data).replace('"HERE"', number))


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_number_that_is_not_finite_cannot_be_recorded(value):
    with pytest.raises(ValidationError):
        WHOLE.replace(probability=value)


@pytest.mark.parametrize("key", ["outcome", "reading", "provenance"])
@pytest.mark.parametrize("depth", [70, 100_000])
def test_nesting_is_bounded(key, depth):
    data = json.loads(WHOLE.model_dump_json())
    data[key] = {"config": {"a": "HERE"}} if key == "provenance" else {"a": "HERE"}
    nested = json.dumps(data).replace('"HERE"', "[" * depth + "]" * depth)
    with pytest.raises(ValidationError, match=r"nested too deeply|recursion limit"):
        Prediction.model_validate_json(nested)


def test_a_change_is_checked_and_a_record_is_frozen():
    assert WHOLE.replace(id="b").id == "b"
    with pytest.raises(ValidationError):
        WHOLE.replace(width=0)
    with pytest.raises(ValidationError):
        WHOLE.width = 5


def test_no_text_holds_the_secrets_of_a_url():
    url = "https://alice:hunter2@host/a.tif?sig=c0ffee"
    error = Problem.of(ImageError(f"cannot read `{url}`", hint=f"try {url}"))
    lines = [
        failed(url, error=error).model_dump_json(),
        FAILED.replace(image=url).model_dump_json(),
        changed(WHOLE, id=url, image=url, warnings=(url,)).model_dump_json(),
    ]
    assert not any(secret in line for line in lines for secret in ("hunter2", "c0ffee"))


def test_bytes_of_names_that_are_not_utf_8_are_spelled_out():
    odd = record(image="a\udcff.tif")
    assert odd.image == odd.id == "a\\xff.tif"
    assert Prediction.model_validate_json(odd.model_dump_json()) == odd


def test_ten_thousand_windows_take_little_memory():
    many = record(*(window(f"root/{n}-0", probabilities=(0.5, 0.5)) for n in range(10_000)))
    line = many.model_dump_json()
    tracemalloc.start()
    read = Prediction.model_validate_json(line)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert read == many
    assert held < 10_000 * 1000


def test_every_stop_reason_has_words():
    assert set(get_args(StopReason)) == set(STOP_REASONS)
    for reason, words in STOP_REASONS.items():
        assert record(stop_reason=reason).stopped_in_words() == words
    assert record().stopped_in_words() == ""
