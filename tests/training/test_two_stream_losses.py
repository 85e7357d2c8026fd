import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tnetcli.training.losses import Taught, Walked
from tnetcli.training.two_stream_losses import learn_two_streams, ranking_loss

from tnetcli.models.base import Lessons
from tnetcli.sections import Streams

LN3, LN9 = math.log(3), math.log(9)


def walk(window_scores, image, level, labels):
    scores = torch.as_tensor(window_scores)
    images, classes = len(labels), scores.shape[1]
    return Walked(
        labels=torch.tensor(labels),
        scores=torch.zeros(images, classes),
        level_scores=torch.zeros(2, images, classes),
        concluded=torch.zeros(images, 3),
        window_scores=scores,
        image=torch.tensor(image),
        level=torch.tensor(level),
        log_p=torch.zeros(len(image)),
        entropy=torch.ones(images),
    )


def worked_example():
    """Return two images: 0.75 against patches of 0.5 and 0.9, and 0.25 against one of 0.9."""
    return walk(
        [[LN3, 0.0], [LN3, 0.0], [0.0, 0.0], [LN9, 0.0], [0.0, LN9]],
        image=[0, 1, 0, 0, 1],
        level=[1, 1, 2, 2, 2],
        labels=[0, 1],
    )


@pytest.mark.parametrize(
    ("of_all", "of_patch", "margin", "expected"),
    [
        ([LN3, 0.0], [0.0, 0.0], 0.5, 0.75),  # 0.75 - 0.5 + 0.5
        ([LN3, 0.0], [LN9, 0.0], 0.5, 0.35),  # 0.75 - 0.9 + 0.5
        ([LN3, 0.0], [LN9, 0.0], 0.1, 0.0),  # exceeds by more than the margin
        ([0.0, LN3], [LN9, 0.0], 0.5, 0.0),  # 0.25 - 0.9 + 0.5
        ([0.0, 0.0], [0.0, 0.0], 0.0, 0.0),
        ([50.0, 0.0], [0.0, 50.0], 0.5, 1.5),  # the most there can be
    ],
)
def test_the_ranking_loss_by_hand(of_all, of_patch, margin, expected):
    found = ranking_loss(
        torch.tensor([of_all]), torch.tensor([of_patch]), torch.tensor([0]), margin=margin
    )
    assert found.tolist() == pytest.approx([expected], abs=1e-6)


def test_the_loss_by_hand():
    losses = learn_two_streams(worked_example(), Streams())
    ce_global = -(math.log(0.75) + math.log(0.25)) / 2
    ce_local = -((math.log(0.5) + math.log(0.9)) / 2 + math.log(0.9)) / 2
    ranking = ((0.75 + 0.35) / 2 + 0.0) / 2
    assert losses.parts == pytest.approx(
        {
            "ce_global": ce_global,
            "ce_local": ce_local,
            "ranking": ranking,
            "p_global": 0.5,
            "p_local": (0.5 + 0.9 + 0.9) / 3,
        }
    )
    assert losses.total.item() == pytest.approx(ce_global + ce_local + 0.5 * ranking)


def test_weights_count():
    plain = learn_two_streams(worked_example(), Streams()).parts
    losses = learn_two_streams(worked_example(), Streams(local=0.25, ranking=2.0))
    expected = plain["ce_global"] + 0.25 * plain["ce_local"] + 2 * plain["ranking"]
    assert losses.parts == plain
    assert losses.total.item() == pytest.approx(expected)


def test_the_ranking_loss_pushes_the_streams_apart_unless_the_global_one_is_held():
    for held in (False, True):
        scores = torch.tensor([[LN3, 0.0], [0.0, 0.0]], requires_grad=True)
        walked = walk(scores, [0, 0], [1, 2], [0])
        both = learn_two_streams(walked, Streams(hold_global=held)).total
        (gradient,) = torch.autograd.grad(both, scores)
        none = learn_two_streams(walked, Streams(ranking=0.0)).total
        (labels_only,) = torch.autograd.grad(none, scores)
        extra = gradient - labels_only
        # d p / d z = p (1 - p) of the true class
        whole = 0.0 if held else 0.5 * 0.75 * 0.25
        assert extra[0].tolist() == pytest.approx([whole, -whole], abs=1e-6)
        assert extra[1].tolist() == pytest.approx([-0.5 * 0.25, 0.5 * 0.25], abs=1e-6)


def test_past_the_margin_the_ranking_loss_teaches_nothing():
    scores = torch.tensor([[0.0, LN3], [LN9, 0.0]], requires_grad=True)
    found = ranking_loss(scores[:1], scores[1:], torch.tensor([0]), margin=0.5).sum()
    (gradient,) = torch.autograd.grad(found, scores)
    assert not gradient.any()


def test_an_image_without_windows_learns_only_as_a_whole():
    walked = walk([[LN3, 0.0], [0.0, 0.0], [LN3, 0.0]], [0, 0, 1], [1, 2, 1], [0, 0])
    parts = learn_two_streams(walked, Streams()).parts
    assert parts["ce_global"] == pytest.approx(-math.log(0.75))
    assert parts["ce_local"] == pytest.approx(-math.log(0.5) / 2)
    assert parts["ranking"] == pytest.approx(0.75 / 2)


def test_without_any_windows_the_whole_is_learned():
    scores = torch.tensor([[LN3, 0.0]], requires_grad=True)
    losses = learn_two_streams(walk(scores, [0], [1], [0]), Streams())
    assert losses.total.item() == pytest.approx(-math.log(0.75))
    assert losses.parts["p_local"] == 0
    losses.total.backward()
    assert scores.grad.isfinite().all()


def test_each_step_learns_by_itself_where_steps_have_scores():
    walked = worked_example()
    of_steps = torch.tensor([[0.0, 0.0], [LN3, 0.0], [LN9, 0.0]])
    lessons = Lessons((0, 1, 2), scores=of_steps.expand(3, 3, 2))  # of the three patches
    taught = (Taught(lessons, walked.image[walked.level > 1]),)
    losses = learn_two_streams(replace(walked, taught=taught), Streams())
    right = -(math.log(0.5) + math.log(0.75) + math.log(0.9)) / 3
    wrong = -(math.log(0.5) + math.log(0.25) + math.log(0.1)) / 3
    assert losses.parts["ce_local"] == pytest.approx((right + wrong) / 2)
    plain = learn_two_streams(walked, Streams())
    assert losses.parts["ranking"] == plain.parts["ranking"]


def test_classes_count_by_their_weights():
    walked = worked_example()
    parts = learn_two_streams(walked, Streams(), class_weights=torch.tensor([2.0, 0.5])).parts
    assert parts["ce_global"] == pytest.approx(-(2 * math.log(0.75) + 0.5 * math.log(0.25)) / 2)
    assert parts["ranking"] == pytest.approx(2 * 0.55 / 2)


def test_labels_are_smoothed():
    parts = learn_two_streams(worked_example(), Streams(), label_smoothing=0.2).parts
    p, q = math.log(0.75), math.log(0.25)
    expected = -((0.9 * p + 0.1 * q) + (0.9 * q + 0.1 * p)) / 2
    assert parts["ce_global"] == pytest.approx(expected)


@given(st.permutations(range(5)))
def test_the_order_of_windows_does_not_matter(order):
    walked = worked_example()
    other = replace(
        walked,
        window_scores=walked.window_scores[list(order)],
        image=walked.image[list(order)],
        level=walked.level[list(order)],
    )
    one, two = (learn_two_streams(each, Streams()).parts for each in (walked, other))
    assert one == pytest.approx(two)


def test_half_precision_is_learned_from_in_single():
    walked = worked_example()
    half = replace(walked, window_scores=walked.window_scores.bfloat16())
    losses = learn_two_streams(half, Streams())
    assert losses.total.dtype == torch.float32
    assert losses.parts == pytest.approx(learn_two_streams(walked, Streams()).parts, rel=0.01)


@pytest.mark.parametrize("level", [[2, 1, 2, 2, 2], [1, 1, 1, 2, 2]])
def test_an_image_needs_exactly_one_view_of_the_whole(level):
    walked = replace(worked_example(), level=torch.tensor(level))
    with pytest.raises(ValueError, match="exactly one view of the whole"):
        learn_two_streams(walked, Streams())
