import json
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tnetcli.visits import Stop

from tnetcli.errors import ImageError
from tnetcli.prediction import (
    STOPS,
    AttentionCheck,
    Prediction,
    PredictionCost,
    Problem,
    SeenGlimpse,
    SeenLevel,
    SeenWindow,
)

numbers = st.floats(allow_nan=False, allow_infinity=False)
words = st.text(max_size=12)
counts = st.integers(0, 10**12)
boxes = st.tuples(numbers, numbers, numbers, numbers)
windows = st.builds(
    SeenWindow, words, counts, boxes, numbers, counts,
    numbers, words, numbers, numbers, steps=st.lists(numbers, max_size=3).map(tuple),
    glimpses=st.lists(st.builds(SeenGlimpse, boxes, words, numbers), max_size=2).map(tuple),
)  # fmt: skip
predictions = st.builds(
    Prediction,
    image=words,
    id=words,
    status=st.just("ok"),
    width=counts,
    height=counts,
    crs=st.none() | words,
    transform=st.none() | st.tuples(*[numbers] * 6),
    microns_per_pixel=st.none() | st.tuples(numbers, numbers),
    offset=st.tuples(counts, counts),
    probabilities=st.dictionaries(words, numbers, max_size=3),
    levels=st.lists(st.builds(SeenLevel, counts, counts, words, numbers), max_size=2).map(tuple),
    windows=st.lists(windows, max_size=2).map(tuple),
    cost=st.builds(PredictionCost, *[counts] * 3, numbers, counts, counts, *[numbers] * 3),
)


@given(predictions)
def test_a_record_comes_back_from_its_line(prediction):
    line = prediction.to_json()
    assert "\n" not in line
    assert Prediction.from_json(line) == prediction


def test_windows_without_steps_do_not_mention_them():
    told = {"rank": 1, "weight": 0.5, "label": "a", "probability": 1.0, "valid": 1.0}
    plain = SeenWindow("root", 1, (0.0, 0.0, 1.0, 1.0), 1.0, **told)
    thought = SeenWindow("root/w1", 2, (0.0, 0.0, 1.0, 1.0), 1.0, **told, steps=(0.25, 0.75))
    record = Prediction("a", "a", "ok", windows=(plain, thought))
    first, second = json.loads(record.to_json())["windows"]
    assert "steps" not in first
    assert second["steps"] == [0.25, 0.75]


def test_the_schema_comes_first():
    assert Prediction("a.tif", "a", "ok").to_json().startswith('{"schema": "tnet.prediction/1", ')


def test_a_failed_image_is_a_record_with_its_problem_and_nothing_else():
    error = ImageError("no such file: `ä.tif`", hint="check the path")
    prediction = Prediction("ä.tif", "ä", "failed", error=Problem.of(error))
    assert json.loads(prediction.to_json()) == {
        "schema": "tnet.prediction/1",
        "image": "ä.tif",
        "id": "ä",
        "status": "failed",
        "error": {
            "type": "ImageError",
            "message": "no such file: `ä.tif`",
            "hint": "check the path",
        },
    }
    assert Prediction.from_json(prediction.to_json()) == prediction


@pytest.mark.parametrize(
    "line",
    ["", "{", "[]", "3", "{}", '{"schema": "tnet.prediction/2"}',
     '{"schema": "tnet.prediction/1"}',
     '{"schema": "tnet.prediction/1", "image": "a", "id": "a", "status": "ok", "colour": 1}',
     '{"schema": "tnet.prediction/1", "image": "a", "id": "a", "status": "ok", "windows": [{}]}'],
)  # fmt: skip
def test_another_line_is_no_record(line):
    with pytest.raises(ValueError, match=r"not JSON|not a tnet\.prediction/1 record"):
        Prediction.from_json(line)


def test_a_number_that_is_none_cannot_be_written():
    with pytest.raises(ValueError, match="JSON"):
        Prediction("a", "a", "ok", probability=float("nan")).to_json()


@pytest.mark.parametrize(
    ("key", "value"),
    [("crs", 5), ("width", "9"), ("probabilities", [1, 2]), ("label", None), ("windows", "x")],
)
def test_a_record_with_values_of_another_kind_is_refused(key, value):
    data = json.loads(Prediction("a", "a", "ok").to_json()) | {key: value}
    with pytest.raises(ValueError, match=f"`{key}` is no"):
        Prediction.from_json(json.dumps(data))


def test_glimpses_are_told_only_where_there_are_any():
    plain = SeenWindow("root", 1, (0.0, 0.0, 9.0, 9.0), 1.0, 1, 1.0, "a", 1.0, 1.0)
    glimpse = SeenGlimpse((1.0, 2.0, 3.5, 4.5), "b", 0.75)
    record = Prediction("a", "a", "ok", windows=(plain, replace(plain, glimpses=(glimpse,))))
    told = json.loads(record.to_json())["windows"]
    assert "glimpses" not in told[0]
    assert told[1]["glimpses"] == [{"box": [1.0, 2.0, 3.5, 4.5], "label": "b", "probability": 0.75}]
    assert Prediction.from_json(record.to_json()) == record


def test_steps_are_told_only_where_there_are_any():
    plain = SeenWindow("root", 1, (0.0, 0.0, 1.0, 1.0), 1.0, 1, 1.0, "a", 1.0, 1.0)
    stepped = replace(plain, path="root/0-0", level=2, steps=(0.25, 0.75))
    record = Prediction("a", "a", "ok", windows=(plain, stepped))
    told = json.loads(record.to_json())["windows"]
    assert "steps" not in told[0]
    assert told[1]["steps"] == [0.25, 0.75]
    assert Prediction.from_json(record.to_json()) == record


@pytest.mark.parametrize(
    ("check", "sentence"),
    [
        (None, ""),
        (
            AttentionCheck(0.25, "b", 0.5, 0.5, 4, 0),
            "a is 90.0% probable as it looked, 25.0% with its closest windows hidden (then b), "
            "50.0% with random windows",
        ),
        (
            AttentionCheck(0.8, "a", 0.7, 1.0, 4, 0),
            "a is 90.0% probable as it looked, 80.0% with its closest windows hidden, "
            "70.0% with random windows",
        ),
        (
            AttentionCheck(None, "", 0.7, 1.0, 4, 0),
            "a is 90.0% probable as it looked, nothing is left to see with its closest windows "
            "hidden, 70.0% with random windows",
        ),
    ],
)
def test_one_sentence_says_whether_it_mattered_where_was_looked(check, sentence):
    record = Prediction("a", "a", "ok", label="a", probability=0.9, attention_check=check)
    assert record.attention_in_words() == sentence


def test_why_it_stopped_is_told_in_words_for_every_reason_there_is():
    reasons = set(get_args(Stop)) - {"failed"}
    assert reasons == set(STOPS)
    for reason in reasons:
        assert Prediction("a", "a", "ok", stopped=reason).stopped_in_words() == STOPS[reason]
    assert Prediction("a", "a", "failed", stopped="failed").stopped_in_words() == "failed"
