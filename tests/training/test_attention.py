import pytest

from tnetcli.training.config import StageConfig
from tnetcli.training.validate import judge

HEALTHY = {"entropy": 0.6, "distinct": 0.5, "accuracy": [0.5, 0.7]}


def warnings(stage=None, **row):
    return list(judge({**HEALTHY, **row}, stage or StageConfig(steps=1)))


def test_healthy_attention_is_not_talked_about():
    assert warnings() == []


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


def test_attention_that_is_stuck_and_sharp_is_told_once():
    (text,) = warnings(entropy=0.01, distinct=0.0)
    assert "stuck" in text


def test_where_nothing_was_chosen_nothing_is_judged():
    assert warnings(entropy=1.0, accuracy=[0.5]) == []


@pytest.mark.parametrize(
    "stage", [StageConfig(steps=1, learn="tiles"), StageConfig(steps=1, freeze=["location"])]
)
def test_a_stage_in_which_attention_does_not_learn_is_not_judged(stage):
    assert warnings(stage, entropy=1.0, distinct=0.0) == []


def test_a_row_without_attention_is_not_judged():
    assert list(judge({"accuracy": [0.1, 0.2]}, StageConfig(steps=1))) == []
