import math
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.training.test_episodes import NEIGHBOURS, all_draws, chain, padded
from tnetcli.models.base import Episodes
from tnetcli.tasks import Classification
from tnetcli.training.recipe import LossConfig
from tnetcli.training.reinforce import (
    Baselines,
    Rewards,
    contrastive,
    contrastive_term,
    draw_log_probability,
    independent_log_probability,
    l2_penalty,
    label_terms,
    mix,
    policy_terms,
    total_loss,
)

KINDS = ("ema", "per_level", "leave_one_out")
PARTS = {
    "ce_sequence",
    "reinforce_sequence",
    "ce_windows",
    "reinforce_windows",
    "entropy",
    "contrastive",
    "rewards",
    "advantage",
}


class Losses(NamedTuple):
    total: Tensor
    parts: dict[str, float]


def learn(episodes, loss, baselines, class_weights=None):
    """Return the total loss and its terms, as a stage adds them up."""
    task = Classification(
        range(episodes.logits.shape[-1]), label_smoothing=loss.label_smoothing, reward=loss.reward
    )
    if class_weights is not None:
        task.state = {"class_weights": class_weights}
    terms = label_terms(episodes, task, loss)
    by_rewards, episodes = policy_terms(episodes, task, loss, baselines)
    return Losses(*total_loss(terms | by_rewards | contrastive_term(episodes, loss)))


def worked_example():
    """Return the example of Papadopoulos et al. 2021, sec. 3.3, worked out by hand."""
    attention = torch.tensor([[0.06, 0.05], [0.07, 0.04]])
    log_p = independent_log_probability(attention, torch.tensor([[0, 1], [0, 1]]))
    return Episodes(
        targets=torch.tensor([0, 1]),
        logits=torch.tensor([[2.0, 0.0], [1.0, 0.0]]),
        level_logits=torch.tensor([[[0.0, 0.5], [0.0, 1.0]], [[2.0, 0.0], [1.0, 0.0]]]),
        embedding=torch.zeros(2, 3),
        region_logits=torch.tensor(
            [[0, 0.5], [0, 1.0], [3.0, 0.0], [0.0, 1.0], [0.0, 2.0], [0.0, 0.5]]
        ),
        image=torch.tensor([0, 1, 0, 0, 1, 1]),
        level=torch.tensor([1, 1, 2, 2, 2, 2]),
        log_p=torch.cat([torch.zeros(2), log_p.flatten()]),
        entropy=torch.ones(2),
    )


def paper(**more):
    return LossConfig(rule="paper", reinforce=0.1, sequence=0.3, reinforce_sequence=0.3, **more)


def test_the_worked_example_of_the_papers_rule_is_met():
    baselines = Baselines("ema", 2, decay=0.9, start=0.4)
    losses = learn(worked_example(), paper(), baselines)
    assert losses.parts["ce_sequence"] == pytest.approx(0.720095, abs=5e-7)
    assert losses.parts["reinforce_sequence"] == pytest.approx(0.567116, abs=5e-7)
    assert losses.parts["ce_windows"] == pytest.approx(0.541699, abs=5e-7)
    assert losses.parts["reinforce_windows"] == pytest.approx(1.004159, abs=5e-7)
    assert losses.total.item() == pytest.approx(0.682522, abs=5e-7)
    assert baselines.mean == pytest.approx(0.4275, abs=5e-7)


def test_the_worked_example_of_the_contrastive_term_is_met():
    vectors = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
    found = contrastive(vectors, torch.tensor([0, 0, 1]), margin=0.4)
    assert found.item() == pytest.approx(0.177778, abs=5e-7)


def random_episodes(*, seed=0, samples=1, images=4, dtype=torch.float64):
    """Return episodes of three levels in which images have different numbers of regions."""
    random = torch.Generator().manual_seed(seed)
    windows = [(image, 1) for image in range(images)]
    for image in range(images):
        windows += [(image, 2)] * (image % 3) + [(image, 3)] * (image % 3 and image)
    image, level = torch.tensor(windows).T

    def leaf(*shape):
        return torch.randn(shape, generator=random, dtype=dtype).requires_grad_()

    labels = torch.randint(0, 3, (images // samples,), generator=random)
    return Episodes(
        targets=labels.repeat_interleave(samples),
        logits=leaf(images, 3),
        level_logits=leaf(3, images, 3),
        embedding=leaf(images, 5),
        region_logits=leaf(len(windows), 3),
        image=image,
        level=level,
        log_p=leaf(len(windows)),
        entropy=leaf(7),
        samples=samples,
    )


def probability(scores, label):
    return math.exp(scores[label]) / sum(map(math.exp, scores))


def cross_entropy(scores, label, smoothing=0.0):
    """Return the cross-entropy against a label that is smoothed over all classes."""
    targets = [smoothing / 3 + (1 - smoothing) * (i == label) for i in range(3)]
    return -sum(t * math.log(probability(scores, i)) for i, t in enumerate(targets))


def by_hand(episodes, loss, weights, baselines):
    """Return the four terms, image by image and window by window."""
    values, labels = baselines.values.flatten().tolist(), episodes.targets.tolist()
    sums = dict.fromkeys(
        ("ce_sequence", "reinforce_sequence", "ce_windows", "reinforce_windows"), 0.0
    )
    windows = list(
        zip(
            episodes.image.tolist(),
            episodes.level.tolist(),
            episodes.region_logits.tolist(),
            episodes.log_p.tolist(),
            strict=True,
        )
    )
    level_weights = loss.level_weights or (1.0,)
    for i, (label, scores) in enumerate(zip(labels, episodes.logits.tolist(), strict=True)):
        own = [
            (level, s, log_p, level_weights[min(level, len(level_weights)) - 1])
            for image, level, s, log_p in windows
            if image == i
        ]
        alone = [each for each in own if loss.cap is None or each[0] <= loss.cap]
        sums["ce_sequence"] += weights[label] * cross_entropy(scores, label, loss.label_smoothing)
        for level, _, log_p, _ in own:
            if level > 1:
                sums["reinforce_sequence"] += (probability(scores, label) - values[0]) * -log_p
        if total := sum(each[3] for each in alone):
            if loss.per_feature == "each":
                each_loss = [
                    w * cross_entropy(s, label, loss.label_smoothing) for _, s, _, w in alone
                ]
                value = sum(each_loss) / total
            else:
                mean = [
                    math.log(sum(w * probability(s, c) for _, s, _, w in alone) / total)
                    for c in range(3)
                ]
                value = cross_entropy(mean, label, loss.label_smoothing)
            sums["ce_windows"] += weights[label] * value
        cells = [each for each in alone if each[0] > 1]
        if total := sum(each[3] for each in cells):
            terms = [w * (probability(s, label) - values[level]) * -p for level, s, p, w in cells]
            sums["reinforce_windows"] += sum(terms) / total
    return {name: value / len(labels) for name, value in sums.items()}


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cap": 2},
        {"cap": 1},
        {"level_weights": (0.5, 2.0)},
        {"level_weights": (0.0, 1.0, 3.0)},
        {"level_weights": (0.0, 1.0, 3.0), "per_feature": "mixture"},
        {"per_feature": "mixture"},
        {"per_feature": "mixture", "cap": 2, "label_smoothing": 0.2},
        {"label_smoothing": 0.3},
    ],
    ids=str,
)
@pytest.mark.parametrize("weights", [[0.5, 2.0, 1.5]])
def test_each_term_is_what_counting_by_hand_gives(settings, weights):
    episodes, loss, baselines = random_episodes(), LossConfig(**settings), Baselines("per_level", 3)
    baselines.values = torch.tensor([[0.2], [9.0], [0.3], [0.6]])
    expected = by_hand(episodes, loss, weights or [1.0] * 3, baselines)
    parts = learn(episodes, loss, baselines, class_weights=weights).parts
    assert {name: parts[name] for name in expected} == pytest.approx(expected, rel=1e-5)


def test_the_total_is_the_weighted_sum_of_its_parts():
    loss = LossConfig(
        sequence=0.2,
        reinforce_sequence=0.6,
        reinforce=0.4,
        entropy=0.7,
        contrastive=3.0,
        margin=0.1,
    )
    losses = learn(random_episodes(), loss, Baselines("per_level", 3))
    parts = losses.parts
    assert set(parts) == PARTS
    assert losses.total.item() == pytest.approx(
        0.2 * parts["ce_sequence"]
        + 0.8 * parts["ce_windows"]
        + 0.4 * (0.6 * parts["reinforce_sequence"] + 0.4 * parts["reinforce_windows"])
        + 0.7 * parts["entropy"]
        + 3.0 * parts["contrastive"],
        rel=1e-5,
    )


def test_entropy_counts_only_below_half_of_a_uniform_choice():
    episodes = replace(
        random_episodes(), entropy=torch.tensor([0.1, 0.9, 0.5, 0.4], requires_grad=True)
    )
    losses = learn(episodes, LossConfig(entropy=2.0), Baselines("per_level", 3))
    assert losses.parts["entropy"] == pytest.approx((0.4 + 0.1) / 4)
    losses.total.backward()
    assert episodes.entropy.grad.tolist() == pytest.approx([-0.5, 0, 0, -0.5])


def test_the_baseline_before_the_step_is_used_and_then_moved():
    episodes, loss = random_episodes(), LossConfig(baseline="ema", reinforce=1.0)
    baselines = Baselines("ema", 3, start=0.3)
    first = learn(episodes, loss, baselines).total.item()
    assert baselines.mean != pytest.approx(0.3)
    again = Baselines("ema", 3, start=0.3)
    assert learn(episodes, loss, again).total.item() == first
    assert again.mean == baselines.mean
    assert learn(episodes, loss, again).total.item() != first


def gradients(episodes, loss, kind, **more):
    leaves = [episodes.logits, episodes.level_logits, episodes.embedding, episodes.region_logits]
    leaves += [episodes.log_p, episodes.entropy]
    total = learn(episodes, loss, Baselines(kind, 3), **more).total
    found = torch.autograd.grad(total, leaves, allow_unused=True)
    return [torch.zeros_like(a) if g is None else g for a, g in zip(leaves, found, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reward", ["correct", "probability"])
def test_rewards_teach_nothing_but_the_choice(kind, reward):
    episodes = random_episodes(samples=2)
    *without, without_p, _ = gradients(episodes, LossConfig(reward=reward, reinforce=0.0), kind)
    *with_rewards, log_p, entropy = gradients(
        episodes, LossConfig(reward=reward, reinforce=50.0), kind
    )
    assert all(torch.equal(a, b) for a, b in zip(without, with_rewards, strict=True))
    assert not without_p.any()
    assert log_p[episodes.level > 1].any()
    assert not log_p[episodes.level == 1].any()
    assert not entropy.any()


def test_rewards_and_advantage_are_reported_as_means():
    parts = learn(
        worked_example(), LossConfig(reward="correct"), Baselines("per_level", 2, start=0.4)
    ).parts
    assert parts["rewards"] == pytest.approx(0.5)
    assert parts["advantage"] == pytest.approx(0.75 - 0.4)


@pytest.mark.parametrize("per_feature", ["each", "mixture"])
def test_labels_teach_nothing_about_the_choice(per_feature):
    once, more = (
        gradients(
            random_episodes(), LossConfig(per_feature=per_feature), "ema", class_weights=weights
        )
        for weights in ([1.0, 2.0, 3.0], [100.0, 200.0, 300.0])
    )
    assert not torch.allclose(once[0], more[0])
    assert torch.equal(once[4], more[4])
    assert torch.equal(once[5], more[5])


def test_half_precision_is_summed_in_single():
    episodes = worked_example()
    half = {
        name: getattr(episodes, name).to(torch.bfloat16)
        for name in ("logits", "level_logits", "region_logits", "embedding")
    }
    losses = learn(replace(episodes, **half), paper(contrastive=1.0), Baselines("ema", 2))
    assert losses.total.dtype == torch.float32
    assert losses.parts["ce_windows"] == pytest.approx(0.541699, abs=5e-7)


@pytest.mark.parametrize("kind", ["ema", "per_level"])
@pytest.mark.parametrize("per_feature", ["each", "mixture"])
def test_samples_count_as_the_mean_of_single_ones(kind, per_feature):
    loss = LossConfig(
        contrastive=2.0, entropy=0.0, reinforce=1.0, per_feature=per_feature, label_smoothing=0.1
    )
    episodes = random_episodes(samples=3, images=12)
    together = learn(episodes, loss, Baselines(kind, 3))
    single = []
    for sample in range(3):
        images = torch.arange(sample, 12, 3)
        mine = torch.isin(episodes.image, images)
        alone = Episodes(
            targets=episodes.targets[images],
            logits=episodes.logits[images],
            level_logits=episodes.level_logits[:, images],
            embedding=episodes.embedding[images],
            region_logits=episodes.region_logits[mine],
            image=episodes.image[mine] // 3,
            level=episodes.level[mine],
            log_p=episodes.log_p[mine],
            entropy=episodes.entropy,
        )
        single.append(learn(alone, loss, Baselines(kind, 3)))
    mean = torch.stack([each.total for each in single]).mean()
    assert together.total.item() == pytest.approx(mean.item())
    found, expected = (torch.autograd.grad(t, episodes.log_p)[0] for t in (together.total, mean))
    assert torch.allclose(found, expected)
    for part in PARTS - {"advantage"}:
        assert together.parts[part] == pytest.approx(
            sum(each.parts[part] for each in single) / 3, rel=1e-4
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("per_feature", ["each", "mixture"])
def test_a_whole_image_alone_is_cross_entropy(kind, per_feature):
    scores = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    labels = torch.tensor([0, 1, 2, 0])
    episodes = Episodes(
        targets=labels,
        logits=scores,
        level_logits=scores[None],
        embedding=scores,
        region_logits=scores,
        image=torch.arange(4),
        level=torch.ones(4, dtype=torch.long),
        log_p=torch.zeros(4),
        entropy=torch.zeros(0),
    )
    losses = learn(episodes, LossConfig(entropy=1.0, per_feature=per_feature), Baselines(kind, 1))
    expected = nn.functional.cross_entropy(scores, labels)
    assert losses.total.item() == pytest.approx(expected.item())
    found = torch.autograd.grad(losses.total, scores, retain_graph=True)[0]
    assert torch.allclose(found, torch.autograd.grad(expected, scores)[0])


def test_a_mixture_learns_even_from_hopeless_logits():
    episodes = worked_example()
    scores = torch.tensor([[0.0, 300.0]] * 6, requires_grad=True)
    episodes = replace(episodes, region_logits=scores, targets=torch.tensor([0, 0]))
    losses = learn(
        episodes, LossConfig(per_feature="mixture", sequence=0.0), Baselines("per_level", 2)
    )
    assert losses.parts["ce_windows"] == pytest.approx(300)
    losses.total.backward()
    assert scores.grad[:, 0].tolist() == pytest.approx([-1 / 6] * 6)


class Parts(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2))
        self.backbone_head = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.again = self.backbone_head
        self.tied = nn.Linear(2, 2, bias=False)
        self.tied.weight = self.backbone_head.weight
        self.frozen = nn.Linear(2, 2).requires_grad_(False)


@pytest.mark.parametrize("of", ["all", "new"])
def test_l2_is_the_sum_of_squares_without_norms_and_frozen_parts(of):
    torch.manual_seed(0)
    model = Parts()
    counted = [model.backbone_head.weight, model.backbone_head.bias]
    counted += [*model.backbone[0].parameters()] if of == "all" else []
    found = l2_penalty(model, LossConfig(l2=0.01, l2_of=of))
    assert found.item() == pytest.approx(
        0.01 * sum(value**2 for weight in counted for value in weight.flatten().tolist())
    )
    found.backward()
    for name, weight in model.named_parameters():
        mine = any(weight is each for each in counted)
        assert (weight.grad is not None) == mine, name
        assert not mine or torch.allclose(weight.grad, 0.02 * weight)


# A toy whose draws can be counted: what is expected of the estimator is what autograd says of the
# expected reward, written out.

CELLS, CLASSES, LABEL = 5, 3, 1
FINE = [True, True, True, False, True]
UNIFORM, TEMPERATURE = 0.1, 0.7


class Toy:
    """One image of two levels: `count` cells are drawn, and their set decides the scores."""

    def __init__(self, count, blocked):
        random = torch.Generator().manual_seed(3)
        self.count, self.blocked = count, blocked
        self.draws = all_draws(count, FINE, blocked)
        self.first = torch.randn(CLASSES, generator=random, dtype=torch.float64)
        self.alone = torch.randn(CELLS, CLASSES, generator=random, dtype=torch.float64)
        self.logits = torch.randn(CELLS, generator=random, dtype=torch.float64).requires_grad_()

    def chances(self):
        fine = torch.tensor([FINE])
        return mix(self.logits.softmax(dim=0)[None], UNIFORM, fine)[0]

    def chain(self, draw):
        """Return the probability of each draw, with gradient, by the book."""
        weights = list(self.chances() ** (1 / TEMPERATURE))
        return chain(weights, draw, FINE, self.blocked)

    def scores(self, draw):
        """Return scores that are not a mean over the cells: which come together matters."""
        return self.first + 2 * torch.stack([self.alone[cell] for cell in draw]).prod(dim=0).sin()

    def reward(self, draw):
        return self.scores(draw).softmax(dim=0)[LABEL]

    def reward_alone(self, cell):
        return self.alone[cell].softmax(dim=0)[LABEL]

    def episodes(self, draws):
        """Return the episodes that have the draws for samples."""
        samples = len(draws)
        cells = [(sample, cell) for sample, draw in enumerate(draws) for cell in draw]
        rows = self.chances().expand(samples, -1)
        chosen = padded(draws, self.count)
        log_p = draw_log_probability(
            rows,
            chosen,
            torch.tensor([FINE] * samples),
            temperature=TEMPERATURE,
            blocked=self.blocked,
        )
        scores = torch.stack([self.scores(draw) for draw in draws])
        first = self.first.expand(samples, -1)
        return Episodes(
            targets=torch.full((samples,), LABEL),
            logits=scores,
            level_logits=torch.stack([first, scores]),
            embedding=scores,
            region_logits=torch.cat([first, self.alone[[cell for _, cell in cells]]]),
            image=torch.tensor([*range(samples), *(sample for sample, _ in cells)]),
            level=torch.tensor([1] * samples + [2] * len(cells)),
            log_p=torch.cat([torch.zeros(samples), log_p[chosen >= 0]]),
            entropy=torch.zeros(0),
            samples=samples,
        )

    def expected_gradient(self, loss):
        """Return the mean of the gradient of the loss over all that can be drawn."""
        samples = 2 if loss.baseline == "leave_one_out" else 1
        chances = {draw: math.prod(values_of(self.chain(draw))) for draw in self.draws}
        mean = 0.0
        for draws in product(self.draws, repeat=samples):
            chance = math.prod(chances[draw] for draw in draws)
            total = learn(self.episodes(draws), loss, Baselines(loss.baseline, 2, start=0.3)).total
            mean = mean + chance * torch.autograd.grad(total, self.logits)[0]
        return mean


def values_of(numbers):
    return [number.item() for number in numbers]


def rewards_only(kind, sequence):
    samples = 2 if kind == "leave_one_out" else 1
    return LossConfig(baseline=kind, samples=samples, reinforce=1.0, reinforce_sequence=sequence)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("blocked", [None, NEIGHBOURS], ids=["free", "blocked"])
def test_the_expected_gradient_is_that_of_the_expected_reward(kind, count, blocked):
    toy = Toy(count, blocked)
    expected_reward = sum(math.prod(toy.chain(draw)) * toy.reward(draw) for draw in toy.draws)
    exact = torch.autograd.grad(expected_reward, toy.logits)[0]
    found = toy.expected_gradient(rewards_only(kind, 1.0))
    assert exact.abs().max() > 1e-3
    assert torch.allclose(-found, exact, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("blocked", [None, NEIGHBOURS], ids=["free", "blocked"])
def test_the_expected_gradient_of_cells_alone_takes_those_before_as_given(kind, blocked):
    toy = Toy(2, blocked)
    expected_reward = 0.0
    for draw in toy.draws:
        chances = toy.chain(draw)
        for i, cell in enumerate(draw):
            others = math.prod(values_of(chances[:i])) * math.prod(values_of(chances[i + 1 :]))
            expected_reward += others * chances[i] * toy.reward_alone(cell) / len(draw)
    exact = torch.autograd.grad(expected_reward, toy.logits)[0]
    assert exact.abs().max() > 1e-3
    assert torch.allclose(-toy.expected_gradient(rewards_only(kind, 0.0)), exact, atol=1e-12)


KINDS = ("ema", "per_level", "per_class", "leave_one_out")


def rewards_of(sequence, cells, samples=1):
    """Return rewards; cells are (image, level, reward)."""
    image, level, value = zip(*cells, strict=True) if cells else ((), (), ())
    return Rewards(
        sequence=torch.tensor(sequence),
        cells=torch.tensor(value, dtype=torch.float32),
        image=torch.tensor(image, dtype=torch.long),
        level=torch.tensor(level, dtype=torch.long),
        labels=torch.zeros(len(sequence), dtype=torch.long),
        samples=samples,
    )


STEP = rewards_of(
    [1.0, 0.0],
    [(0, 2, 1.0), (0, 3, 0.0), (1, 2, 0.5), (1, 3, 1.0), (1, 3, 0.5)],
)


@pytest.mark.parametrize(
    ("cap", "cells"), [(None, (1.0 + 0.0 + 0.5 + 1.0 + 0.5) / 5), (2, 0.75), (1, None)]
)
def test_one_running_mean_follows_sequences_and_cells_down_to_the_cap(cap, cells):
    baselines = Baselines("ema", 3, decay=0.8, start=0.4)
    baselines.update(STEP, sequence=0.3, cap=cap)
    target = 0.5 if cells is None else 0.3 * 0.5 + 0.7 * cells
    assert baselines.values.flatten().tolist() == pytest.approx([0.8 * 0.4 + 0.2 * target] * 4)
    assert baselines.mean == pytest.approx(0.8 * 0.4 + 0.2 * target)


def test_every_level_has_its_own_running_mean():
    baselines = Baselines("per_level", 4, decay=0.8, start=0.4)
    baselines.update(STEP, sequence=0.3)
    means = [0.32 + 0.2 * mean for mean in (0.5, 0.75, 0.5)]
    assert baselines.values[[0, 2, 3], 0].tolist() == pytest.approx(means)
    assert baselines.values[4].item() == pytest.approx(0.4)  # no cell, no change
    assert baselines.mean == pytest.approx((sum(means) + 0.4) / 4)
    sequence, alone = baselines.expected(STEP)
    assert sequence.tolist() == pytest.approx([means[0]] * 2)
    assert alone.tolist() == pytest.approx([means[level - 1] for level in (2, 3, 2, 3, 3)])


def test_other_samples_are_what_a_sample_is_compared_with():
    step = rewards_of(
        [0.1, 0.4, 0.7, 0.2, 0.3, 0.9],  # three samples of two images
        [(0, 2, 0.5), (0, 2, 0.3), (1, 2, 0.9), (2, 2, 0.6), (2, 3, 0.8), (3, 2, 0.2), (4, 3, 0.1)],
        samples=3,
    )
    baselines = Baselines("leave_one_out", 3)
    baselines.values = torch.tensor([[9.0], [9.0], [0.22], [0.33]])
    sequence, alone = baselines.expected(step)
    expected = [0.55, 0.4, 0.25, 0.6, 0.55, 0.25]
    assert sequence.tolist() == pytest.approx(expected)
    # Where no other sample has a cell at the level, the running mean stands in.
    expected = [0.75, 0.75, 1.4 / 3, 1.7 / 3, 0.33, 0.22, 0.33]
    assert alone.tolist() == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_without_cells_the_sequences_are_still_followed(kind):
    baselines, step = Baselines(kind, 1, start=0.0), rewards_of([1.0, 0.0], [])
    assert [len(each) for each in baselines.expected(step)] == [2, 0]
    baselines.update(step, sequence=0.3)
    assert baselines.mean == pytest.approx(0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_state_goes_on_where_it_was(kind):
    one, other = Baselines(kind, 3), Baselines(kind, 3, start=0.9)
    one.update(STEP, sequence=0.3)
    other.load_state_dict(one.state_dict())
    one.update(STEP, sequence=0.3)
    assert not torch.equal(other.values, one.values)
    other.update(STEP, sequence=0.3)
    assert torch.equal(one.values, other.values)


def test_every_class_has_a_mean_of_its_own_at_every_level():
    baselines = Baselines("per_class", 3, classes=3, decay=0.5, start=0.4)
    step = replace(STEP, labels=torch.tensor([2, 0]))
    before = baselines.expected(step)
    baselines.update(step, sequence=0.3)
    assert torch.equal(before[1], torch.full((5,), 0.4))
    expected = torch.full((4, 3), 0.4)
    expected[0, 2], expected[0, 0] = 0.7, 0.2  # of the sequences
    expected[2, 2], expected[2, 0] = 0.7, 0.45  # cells of level 2: 1.0, and 0.5
    expected[3, 2], expected[3, 0] = 0.2, 0.575  # of level 3: 0.0, and the mean of 1.0 and 0.5
    assert torch.allclose(baselines.values, expected)
    sequence, alone = baselines.expected(step)
    assert torch.allclose(sequence, torch.tensor([0.7, 0.2]))
    assert torch.allclose(alone, torch.tensor([0.7, 0.2, 0.45, 0.575, 0.575]))
