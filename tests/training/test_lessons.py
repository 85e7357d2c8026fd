from dataclasses import replace

import pytest
import torch
from tnetcli.training.baselines import Baselines, reward
from tnetcli.training.losses import Taught, learn

from tests.training.test_losses import random_walk
from tnetcli.models.base import Lessons
from tnetcli.sections import Loss

IMAGES, CLASSES = 4, 3
PLAIN = {"reinforce": 0.0, "sequence": 1.0}


def taught(image, **lessons):
    rows = tuple(range(len(image)))
    return Taught(Lessons(rows, **lessons), torch.tensor(image))


def beyond(walked, *several, **settings):
    """What lessons add to the loss of a walk, and the parts."""
    loss = Loss(**PLAIN, **settings)
    without = learn(walked, loss, Baselines("per_level", 3)).total
    losses = learn(replace(walked, taught=several), loss, Baselines("per_level", 3))
    return (losses.total - without).item(), losses.parts


def test_scores_with_a_label_of_their_own_add_up_within_a_view():
    walked = random_walk()
    scores = torch.randn(3, 2, CLASSES, dtype=torch.float64)
    image = [0, 2, 2]  # two views of one image, none of two others
    added, parts = beyond(walked, taught(image, scores=scores), side=0.5)
    logs = scores.log_softmax(dim=-1)
    of_view = [
        -sum(logs[row, each, walked.labels[image[row]]].item() for each in range(2))
        for row in range(3)
    ]
    expected = (of_view[0] + (of_view[1] + of_view[2]) / 2) / IMAGES
    assert parts["side"] == pytest.approx(expected)
    assert added == pytest.approx(0.5 * expected, rel=1e-4)


def test_lessons_of_several_levels_add_up():
    walked = random_walk()
    one, two = (torch.randn(4, 1, CLASSES, dtype=torch.float64) for _ in range(2))
    image = [0, 1, 2, 3]
    apart = [beyond(walked, taught(image, scores=each))[1]["side"] for each in (one, two)]
    both = beyond(walked, taught(image, scores=one), taught(image, scores=two))[1]["side"]
    assert both == pytest.approx(sum(apart))


def test_draws_inside_of_views_are_rewarded_by_what_their_image_was_worth():
    walked = random_walk()
    log_p = torch.randn(5, dtype=torch.float64, requires_grad=True)
    image = [0, 1, 2, 3, 3]
    loss = Loss(**PLAIN, glimpses=2.0, baseline="per_class")
    baselines = Baselines("per_class", 3, classes=CLASSES)
    baselines.values = torch.rand(4, CLASSES)
    usual = baselines.values[0].clone()
    with_draws = replace(walked, taught=(taught(image, log_p=log_p),))
    losses = learn(with_draws, loss, baselines)
    losses.total.backward()
    worth = reward(loss.reward, walked.scores, walked.labels)
    expected = [-2.0 * (worth[i] - usual[walked.labels[i]]).item() / IMAGES for i in image]
    assert log_p.grad.tolist() == pytest.approx(expected, rel=1e-5)


def test_the_other_samples_are_what_draws_are_compared_with():
    walked = random_walk(samples=2)
    log_p = torch.zeros(IMAGES, dtype=torch.float64, requires_grad=True)
    loss = Loss(**PLAIN, baseline="leave_one_out", samples=2)
    losses = learn(
        replace(walked, taught=(taught(list(range(IMAGES)), log_p=log_p),)),
        loss,
        Baselines("leave_one_out", 3),
    )
    losses.total.backward()
    worth = reward(loss.reward, walked.scores, walked.labels).tolist()
    other = [worth[i ^ 1] for i in range(IMAGES)]  # samples are side by side
    expected = [-(mine - its) / IMAGES for mine, its in zip(worth, other, strict=True)]
    assert log_p.grad.tolist() == pytest.approx(expected, rel=1e-5)


def test_a_loss_that_needs_no_label_is_a_mean_over_images():
    own = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    added, parts = beyond(random_walk(), taught([0, 1, 1], own=own), imitation=3.0)
    assert parts["imitation"] == pytest.approx((1 + 3) / IMAGES)
    assert added == pytest.approx(3 * parts["imitation"], rel=1e-4)


def test_by_itself_imitation_is_off():
    added, _ = beyond(random_walk(), taught([0], own=torch.ones(1)))
    assert added == 0


def test_classes_count_by_their_weight_in_side_scores():
    walked = random_walk()
    scores = torch.randn(4, 1, CLASSES, dtype=torch.float64)
    weights = torch.tensor([0.5, 2.0, 0.0])
    lessons = replace(walked, taught=(taught([0, 1, 2, 3], scores=scores),))
    parts = learn(lessons, Loss(), Baselines("per_level", 3), class_weights=weights).parts
    logs = scores.log_softmax(dim=-1)
    expected = sum(
        -weights[label].item() * logs[i, 0, label].item() for i, label in enumerate(walked.labels)
    )
    assert parts["side"] == pytest.approx(expected / IMAGES, rel=1e-5)
