import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tnetcli.errors import ImageError
from tnetcli.prediction import (
    Prediction,
    PredictionCost,
    Problem,
    SeenLevel,
    SeenWindow,
)

numbers = st.floats(allow_nan=False, allow_infinity=False)
words = st.text(max_size=12)
counts = st.integers(0, 10**12)
windows = st.builds(
    SeenWindow, words, counts, st.tuples(numbers, numbers, numbers, numbers), numbers, counts,
    numbers, words, numbers, numbers,
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
