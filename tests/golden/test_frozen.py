"""Frozen results can fail: every kind of difference is found."""

import copy

import pytest

from tests.golden.frozen import Golden, differences, rounded

STORED = {"stop": "levels", "logits": [0.25, -1.5], "regions": [{"rank": 1, "path": "root"}]}


@pytest.mark.parametrize(
    "change",
    [
        {"stop": "pixels"},
        {"logits": [0.25, -1.500003]},
        {"logits": [0.25]},
        {"logits": [0.25, float("nan")]},
        {"regions": [{"rank": 2, "path": "root"}]},
        {"regions": [{"rank": 1.0, "path": "root"}]},
        {"regions": [{"rank": 1}]},
        {"regions": None},
        {"more": 1},
    ],
)
def test_a_difference_is_found(change):
    assert differences(STORED, STORED | change, atol=1e-6) != []


def test_numbers_within_the_tolerance_are_equal():
    near = copy.deepcopy(STORED) | {"logits": [0.2500009, -1.4999992]}
    assert differences(STORED, near, atol=1e-6) == []


def test_a_stored_result_is_read_again_and_compared(tmp_path):
    (golden, update) = (Golden("x", update=each) for each in (False, True))
    golden.path = update.path = tmp_path / "x.json"
    update.check("case", {"value": 1 / 3})
    golden.check("case", {"value": 1 / 3})
    with pytest.raises(AssertionError, match=r"0\.34 found"):
        golden.check("case", {"value": 0.34})
    with pytest.raises(AssertionError, match="--update-goldens"):
        golden.check("other", {"value": 1 / 3})


def test_numbers_have_nine_digits():
    assert rounded({"a": (1 / 3, 2, True, None)}) == {"a": [0.333333333, 2, True, None]}
