import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from tnetcli.errors import RecipeError
from tnetcli.tasks import TASKS, Classification, class_weights, softmax

CLASSES = ("a", "b", "c")
LN3, LN9 = math.log(3), math.log(9)


def task(**more):
    return Classification(CLASSES, **more)


def test_a_task_needs_no_torch_until_a_loss_is_computed():
    program = (
        "import sys, numpy as np; from tnetcli.tasks import Classification;"
        "task = Classification(('a', 'b'), class_weights='balanced'); task.fit([0, 1, 1]);"
        "task.decide(np.zeros(2)); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_the_loss_is_the_cross_entropy_in_closed_form(smoothing):
    # Probabilities 3/5, 1/5, 1/5 and 1/11, 1/11, 9/11.
    logits = torch.tensor([[LN3, 0.0, 0.0], [0.0, 0.0, LN9]])
    targets = torch.tensor([0, 1])
    keep, rest = 1 - smoothing * 2 / 3, smoothing / 3
    first = -(keep * math.log(3 / 5) + 2 * rest * math.log(1 / 5))
    second = -((keep + rest) * math.log(1 / 11) + rest * math.log(9 / 11))
    own = task(label_smoothing=smoothing)
    assert own.loss(logits, targets).item() == pytest.approx((first + second) / 2)
    weighted = own.loss(logits, targets, torch.tensor([2.0, 0.5]))
    assert weighted.item() == pytest.approx(2 * first + 0.5 * second)


def test_the_gradient_of_the_loss_is_probability_minus_label():
    logits = torch.tensor([[LN3, 0.0, 0.0]], requires_grad=True)
    task().loss(logits, torch.tensor([1])).backward()
    assert logits.grad.tolist()[0] == pytest.approx([3 / 5, 1 / 5 - 1, 1 / 5])


def test_half_precision_is_summed_in_single():
    logits = torch.tensor([[LN3, 0.0, 0.0]], dtype=torch.bfloat16)
    assert task().loss(logits, torch.tensor([0])).dtype == torch.float32


def test_fitted_weights_are_the_importance_of_a_target():
    own = task(class_weights="balanced")
    own.fit([0, 0, 0, 1, 2, 2])
    assert json.loads(json.dumps(own.state)) == own.state
    expected = [6 / (3 * count) for count in (3, 1, 2)]
    assert own.state["class_weights"] == pytest.approx(expected)
    assert own.importance(torch.tensor([2, 0, 1])).tolist() == pytest.approx([1.0, 2 / 3, 2.0])


def test_without_weights_all_targets_count_alike():
    own = task()
    own.fit([0, 0, 1])
    assert own.state == {}
    assert own.importance(torch.tensor([0, 1])).tolist() == [1.0, 1.0]
    balanced = task(class_weights="balanced")
    balanced.fit([])
    assert balanced.state == {}


def test_a_label_is_correct_if_nothing_scores_higher():
    logits = torch.tensor([[1.0, 0, -9], [0, 1.0, -9], [2.0, 2.0, -9], [math.nan, 1.0, -9]])
    found = task(reward="correct").reward(logits, torch.tensor([0, 0, 1, 1]))
    assert found.tolist() == [1, 0, 1, 0]


def test_a_reward_is_the_probability_of_the_label():
    logits = torch.log(torch.tensor([[0.2, 0.7, 0.1], [0.7, 0.2, 0.1]]))
    found = task().reward(logits, torch.tensor([0, 0]))
    assert found.tolist() == pytest.approx([0.2, 0.7])


def test_logits_that_are_no_numbers_are_worth_nothing():
    assert task().reward(torch.full((1, 3), math.nan), torch.tensor([0])).tolist() == [0]


@pytest.mark.parametrize("kind", ["correct", "probability"])
def test_rewards_have_no_gradient_and_at_least_single_precision(kind):
    logits = torch.randn(3, 2, 3, dtype=torch.float16, requires_grad=True)
    found = task(reward=kind).reward(logits, torch.zeros(3, 2, dtype=torch.long))
    assert (found.shape, found.dtype) == ((3, 2), torch.float32)
    assert not found.requires_grad
    assert ((found >= 0) & (found <= 1)).all()


def test_the_most_probable_class_is_the_decision():
    found = task().decide(np.array([0.0, LN3, 0.0], np.float32))
    assert (found.label, found.probability) == ("b", pytest.approx(3 / 5))
    assert found.probabilities == pytest.approx({"a": 1 / 5, "b": 3 / 5, "c": 1 / 5})


def test_softmax_does_not_overflow():
    found = softmax(np.array([[1e30, 0.0], [-1e30, -1e30]], np.float32))
    assert found.tolist() == [[1.0, 0.0], [0.5, 0.5]]


def test_no_weights_are_none():
    assert class_weights("none", [0, 1], ["a", "b"]) is None


def test_balanced_classes_count_the_same_in_all():
    labels = [0] * 30 + [1] * 5 + [2] * 15
    weights = class_weights("balanced", labels, CLASSES)
    assert weights.dtype == np.float32
    assert np.allclose(np.bincount(labels, weights=weights[labels]), 50 / 3)
    assert weights[labels].mean() == pytest.approx(1)


def test_given_weights_keep_their_proportions_and_average_to_one():
    labels = [0] * 10 + [1] * 30
    weights = class_weights({"a": 4.0}, labels, ["a", "b"])
    assert weights[0] / weights[1] == pytest.approx(4)
    assert weights[labels].mean() == pytest.approx(1)


@pytest.mark.parametrize(
    ("choice", "says"), [({"rivr": 2.0}, "rivr"), ({"river": 0, "sea": 0}, "weight 0")]
)
def test_class_weights_without_meaning_are_an_error(choice, says):
    with pytest.raises(RecipeError, match=says) as caught:
        class_weights(choice, [0, 1], ["river", "sea"])
    assert caught.value.hint


def test_tasks_are_found_by_name():
    assert TASKS.load("classification") is Classification
    assert "classification" in TASKS
