import math
from dataclasses import replace

import pytest
import torch

from tests.training.test_reinforce import Losses, random_episodes
from tnetcli.models import anchornet, dram, saccader, two_stream
from tnetcli.models.base import Episodes
from tnetcli.models.configs import (
    AnchorNetObjective,
    DramObjective,
    SaccaderObjective,
    TwoStreamObjective,
)
from tnetcli.models.two_stream import ranking_loss
from tnetcli.tasks import Classification
from tnetcli.training.recipe import LossConfig
from tnetcli.training.reinforce import Baselines, policy_terms, total_loss

LN3, LN9 = math.log(3), math.log(9)


def learn(episodes, config=TwoStreamObjective(), class_weights=None, label_smoothing=0.0):  # noqa: B008
    task = Classification("ab", label_smoothing=label_smoothing)
    if class_weights is not None:
        task.state = {"class_weights": class_weights}
    return Losses(*total_loss(two_stream.objective(episodes, task, config)))


def episodes_of(region_logits, image, level, labels):
    logits = torch.as_tensor(region_logits)
    images, classes = len(labels), logits.shape[1]
    return Episodes(
        targets=torch.tensor(labels),
        logits=torch.zeros(images, classes),
        level_logits=torch.zeros(2, images, classes),
        embedding=torch.zeros(images, 3),
        region_logits=logits,
        image=torch.tensor(image),
        level=torch.tensor(level),
        log_p=torch.zeros(len(image)),
        entropy=torch.ones(images),
    )


def worked_example():
    """Return two images: 0.75 against patches of 0.5 and 0.9, and 0.25 against one of 0.9."""
    return episodes_of(
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
    losses = learn(worked_example())
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
    plain = learn(worked_example()).parts
    losses = learn(worked_example(), TwoStreamObjective(local=0.25, ranking=2.0))
    expected = plain["ce_global"] + 0.25 * plain["ce_local"] + 2 * plain["ranking"]
    assert losses.parts == plain
    assert losses.total.item() == pytest.approx(expected)


def test_the_ranking_loss_pushes_the_streams_apart():
    scores = torch.tensor([[LN3, 0.0], [0.0, 0.0]], requires_grad=True)
    episodes = episodes_of(scores, [0, 0], [1, 2], [0])
    (gradient,) = torch.autograd.grad(learn(episodes, TwoStreamObjective()).total, scores)
    none = learn(episodes, TwoStreamObjective(ranking=0.0)).total
    (labels_only,) = torch.autograd.grad(none, scores)
    extra = gradient - labels_only
    # d p / d z = p (1 - p) of the true class
    whole = 0.5 * 0.75 * 0.25
    assert extra[0].tolist() == pytest.approx([whole, -whole], abs=1e-6)
    assert extra[1].tolist() == pytest.approx([-0.5 * 0.25, 0.5 * 0.25], abs=1e-6)


def test_without_any_regions_the_whole_is_learned():
    scores = torch.tensor([[LN3, 0.0]], requires_grad=True)
    losses = learn(episodes_of(scores, [0], [1], [0]))
    assert losses.total.item() == pytest.approx(-math.log(0.75))
    losses.total.backward()
    assert scores.grad.isfinite().all()


def test_class_weights_and_smoothed_labels_count():
    p, q = math.log(0.75), math.log(0.25)
    parts = learn(worked_example(), class_weights=[2.0, 0.5]).parts
    assert parts["ce_global"] == pytest.approx(-(2 * p + 0.5 * q) / 2)
    assert parts["ranking"] == pytest.approx(2 * 0.55 / 2)
    parts = learn(worked_example(), label_smoothing=0.2).parts
    assert parts["ce_global"] == pytest.approx(-((0.9 * p + 0.1 * q) + (0.9 * q + 0.1 * p)) / 2)


def test_half_precision_is_summed_in_single():
    episodes = worked_example()
    losses = learn(replace(episodes, region_logits=episodes.region_logits.bfloat16()))
    assert losses.total.dtype == torch.float32
    assert losses.parts == pytest.approx(learn(episodes).parts, rel=0.01)


def test_an_image_without_regions_learns_only_as_a_whole():
    episodes = episodes_of([[LN3, 0.0], [0.0, 0.0], [LN3, 0.0]], [0, 0, 1], [1, 2, 1], [0, 0])
    parts = learn(episodes).parts
    assert parts["ce_global"] == pytest.approx(-math.log(0.75))
    assert parts["ce_local"] == pytest.approx(-math.log(0.5) / 2)
    assert parts["ranking"] == pytest.approx(0.75 / 2)


def test_each_step_has_its_own_loss_where_steps_have_logits():
    episodes = worked_example()
    of_steps = torch.tensor([[0.0, 0.0], [LN3, 0.0], [LN9, 0.0]])
    patches = (episodes.level > 1).nonzero().flatten()
    aux = {"step_logits": (patches, of_steps.expand(3, 3, 2))}
    losses = learn(replace(episodes, aux=aux))
    right = -(math.log(0.5) + math.log(0.75) + math.log(0.9)) / 3
    wrong = -(math.log(0.5) + math.log(0.25) + math.log(0.1)) / 3
    assert losses.parts["ce_local"] == pytest.approx((right + wrong) / 2)
    plain = learn(episodes)
    assert losses.parts["ranking"] == plain.parts["ranking"]


@pytest.mark.parametrize("level", [[2, 1, 2, 2, 2], [1, 1, 1, 2, 2]])
def test_an_image_needs_exactly_one_view_of_the_whole(level):
    episodes = replace(worked_example(), level=torch.tensor(level))
    with pytest.raises(ValueError, match="exactly one view of the whole"):
        learn(episodes)


# Terms that families share.

IMAGES = 4


def family_terms(objective, episodes, config, loss=None, baselines=None, **task):
    """Return the terms of a family beside those of rewards, which give the advantage."""
    loss = loss or LossConfig()
    own = Classification(range(3), reward=loss.reward)
    own.state = task
    _, episodes = policy_terms(episodes, own, loss, baselines or Baselines(loss.baseline, 3))
    return objective(episodes, own, config)


def with_aux(episodes, image, **aux):
    """Return episodes with auxiliary outputs of regions of some images."""
    first = {int(each): row for row, each in reversed([*enumerate(episodes.image)])}
    rows = torch.tensor([first[each] for each in image])
    return replace(episodes, aux={name: (rows, value) for name, value in aux.items()})


def test_side_logits_of_a_view_add_up_and_views_of_an_image_share_its_part():
    episodes = random_episodes()
    logits = torch.randn(3, 2, 3, dtype=torch.float64)
    image = [0, 2, 2]  # two views of one image, none of two others
    found = with_aux(episodes, image, side_logits=logits)
    logs = logits.log_softmax(dim=-1)
    of_view = [
        -sum(logs[row, each, episodes.targets[image[row]]].item() for each in range(2))
        for row in range(3)
    ]
    expected = (of_view[0] + (of_view[1] + of_view[2]) / 2) / IMAGES
    for objective, config in (
        (anchornet.objective, AnchorNetObjective(side=0.5)),
        (dram.objective, DramObjective(side=0.5)),
    ):
        weight, side = family_terms(objective, found, config)["side"]
        assert (weight, side.item()) == (0.5, pytest.approx(expected))


def test_classes_count_by_their_weight_in_side_logits():
    episodes = random_episodes()
    logits, weights = torch.randn(4, 1, 3, dtype=torch.float64), [0.5, 2.0, 0.0]
    found = with_aux(episodes, range(4), side_logits=logits)
    terms = family_terms(anchornet.objective, found, AnchorNetObjective(), class_weights=weights)
    logs = logits.log_softmax(dim=-1)
    expected = sum(-weights[t] * logs[i, 0, t].item() for i, t in enumerate(episodes.targets))
    assert terms["side"][1].item() == pytest.approx(expected / IMAGES, rel=1e-5)


@pytest.mark.parametrize(
    ("objective", "config"),
    [
        (dram.objective, DramObjective(glimpses=2.0)),
        (saccader.objective, SaccaderObjective(glimpses=2.0)),
    ],
)
def test_glimpses_are_rewarded_by_the_advantage_of_their_image(objective, config):
    episodes, image = random_episodes(), [0, 1, 2, 3, 3]
    log_p = torch.randn(5, dtype=torch.float64, requires_grad=True)
    baselines = Baselines("per_class", 3, classes=3)
    baselines.values = torch.rand(4, 3)
    usual, loss = baselines.values[0].clone(), LossConfig(baseline="per_class")
    found = with_aux(
        episodes, image, log_p=log_p, side_logits=torch.zeros(5, 1, 3), imitation=torch.zeros(5)
    )
    weight, term = family_terms(objective, found, config, loss, baselines)["glimpses"]
    (weight * term).backward()
    worth = Classification(range(3)).reward(episodes.logits, episodes.targets)
    expected = [-2.0 * (worth[i] - usual[episodes.targets[i]]).item() / IMAGES for i in image]
    assert log_p.grad.tolist() == pytest.approx(expected, rel=1e-5)


def test_the_other_samples_are_what_glimpses_are_compared_with():
    episodes = random_episodes(samples=2)
    log_p = torch.zeros(IMAGES, dtype=torch.float64, requires_grad=True)
    found = with_aux(episodes, range(IMAGES), log_p=log_p, imitation=torch.zeros(IMAGES))
    loss = LossConfig(baseline="leave_one_out", samples=2)
    family_terms(saccader.objective, found, SaccaderObjective(), loss)["glimpses"][1].backward()
    worth = Classification(range(3)).reward(episodes.logits, episodes.targets).tolist()
    expected = [-(worth[i] - worth[i ^ 1]) / IMAGES for i in range(IMAGES)]  # side by side
    assert log_p.grad.tolist() == pytest.approx(expected, rel=1e-5)


def test_imitation_is_a_mean_over_images_and_off_by_default():
    own = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    found = with_aux(random_episodes(), [0, 1, 1], imitation=own, log_p=torch.zeros(3))
    weight, term = family_terms(saccader.objective, found, SaccaderObjective())["imitation"]
    assert (weight, term.item()) == (0, pytest.approx((1 + 3) / IMAGES))


@pytest.mark.parametrize(
    ("objective", "config"),
    [(anchornet.objective, AnchorNetObjective()), (saccader.objective, SaccaderObjective())],
)
def test_without_auxiliary_outputs_there_are_no_terms(objective, config):
    assert family_terms(objective, random_episodes(), config) == {}
