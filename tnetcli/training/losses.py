"""What a step's walk is blamed for: classes are learned from labels, attention from rewards."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from tnetcli.models.base import Lessons
from tnetcli.sections import Loss
from tnetcli.training.baselines import Baselines, Rewards, reward
from tnetcli.training.draws import at_least_single
from tnetcli.training.parts import is_of_backbone

ROW_EPSILON = 1e-10  # SPEC 2.2, before rows are normalised


@dataclass(frozen=True, slots=True, eq=False)
class Taught:
    """What else some views of a walk teach, and the images they are of."""

    lessons: Lessons
    image: Tensor  # (views,), rows of the lessons


@dataclass(frozen=True, slots=True, eq=False)
class Walked:
    """What one step's walk has seen, chosen and concluded."""

    labels: Tensor  # (images,), class numbers; the samples of an image side by side
    scores: Tensor  # (images, classes), logits of the conclusion
    level_scores: Tensor  # (levels, images, classes), had the looking ended at each level
    concluded: Tensor  # (images, features), what was classified in the end
    window_scores: Tensor  # (windows, classes), of each window alone
    image: Tensor  # (windows,), the image each belongs to
    level: Tensor  # (windows,), from 1
    log_p: Tensor  # (windows,), log-probability that its cell was chosen, with gradient
    entropy: Tensor  # (grids,), of each choice, as a part of the largest possible; with gradient
    taught: tuple[Taught, ...] = ()
    samples: int = 1

    def __post_init__(self) -> None:
        if self.samples < 1 or len(self.labels) % self.samples:
            raise ValueError(f"{len(self.labels)} images are not {self.samples} samples of each")


@dataclass(frozen=True, slots=True, eq=False)
class Losses:
    """The loss of a step, and what it consists of.

    `parts` are before weighting: ce_sequence, reinforce_sequence, ce_windows, reinforce_windows,
    entropy (how far below the floor), contrastive; where a model has such lessons, side (scores
    that learn the label by themselves), glimpses (rewards of what is drawn inside of views) and
    imitation; and, not part of the total, rewards (the mean of the sequences) and advantage (the
    mean of the cells over what was expected of them; far from 0 means that the baseline pushes all
    choices one way).
    """

    total: Tensor  # (), with gradient
    parts: dict[str, float]


def learn(
    walked: Walked, loss: Loss, baselines: Baselines, *, class_weights: Tensor | None = None
) -> Losses:
    """Return the loss of a step by SPEC 2.2, and move the baselines on afterwards.

    Every image counts alike (times its `class_weights` (classes,) where labels are learned from):
    terms of windows alone are the mean over images of the mean over its windows, which is
    SPEC's sum where all images have as many. Images without such windows add nothing.
    """
    labels, images = walked.labels, len(walked.labels)
    by_labels, ce_sequence, ce_windows = label_loss(walked, loss, class_weights=class_weights)
    alone = _weights_alone(walked.level, loss)  # (windows,)

    below = walked.level > 1  # (windows,)
    rewards = _rewards(walked, below, loss)
    expected_sequence, expected_alone = baselines.expected(rewards)  # (cells,)
    surprise = rewards.sequence - baselines.expected_of_images(rewards)  # (images,)
    baselines.update(rewards, sequence=loss.reinforce_sequence, cap=loss.cap)
    unlikely = -walked.log_p[below]  # (cells,)
    gain = rewards.sequence[rewards.image] - expected_sequence  # (cells,)
    reinforce_sequence = (gain * unlikely).sum() / images
    advantage = rewards.cells - expected_alone  # (cells,)
    reinforce_windows = mean_by_image(
        advantage * unlikely, rewards.image, images, alone[below]
    ).mean()

    nothing = ce_sequence.new_zeros(())
    lacking = (loss.entropy_floor - walked.entropy).clamp(min=0)  # (grids,)
    entropy = lacking.mean() if len(lacking) else nothing
    apart = nothing
    if loss.contrastive:
        apart = contrastive(walked.concluded, labels, margin=loss.margin, samples=walked.samples)

    share = loss.reinforce_sequence
    by_rewards = share * reinforce_sequence + (1 - share) * reinforce_windows
    total = by_labels + loss.reinforce * by_rewards
    total = total + loss.entropy * entropy + loss.contrastive * apart
    more = _teach(walked, loss, surprise, class_weights) if walked.taught else {}
    for name, weight in (
        ("side", loss.side),
        ("glimpses", loss.glimpses),
        ("imitation", loss.imitation),
    ):
        if name in more:
            total = total + weight * more[name]
    parts = {
        "ce_sequence": ce_sequence,
        "reinforce_sequence": reinforce_sequence,
        "ce_windows": ce_windows,
        "reinforce_windows": reinforce_windows,
        "entropy": entropy,
        "contrastive": apart,
        **more,
        "rewards": rewards.sequence.mean(),
        "advantage": advantage.mean() if len(advantage) else nothing,
    }
    numbers = torch.stack([part.detach().float() for part in parts.values()]).tolist()
    return Losses(total, dict(zip(parts, numbers, strict=True)))


def label_loss(
    walked: Walked, loss: Loss, *, class_weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what labels teach: the loss, and its parts of all windows together and each alone."""
    labels, image, images = walked.labels, walked.image, len(walked.labels)
    importance = importance_of(labels, class_weights)  # (images,)
    alone = _weights_alone(walked.level, loss)  # (windows,)
    together = (_cross_entropy(walked.scores, labels, loss) * importance).mean()
    if loss.per_feature == "mixture":
        each_image = _mixture_cross_entropy(walked, alone, loss)  # (images,)
    else:
        each = _cross_entropy(walked.window_scores, labels[image], loss)  # (windows,)
        each_image = mean_by_image(each, image, images, alone)  # (images,)
    windows = (each_image * importance).mean()
    return loss.sequence * together + (1 - loss.sequence) * windows, together, windows


def importance_of(labels: Tensor, class_weights: Tensor | None) -> Tensor:
    """Return how much each image counts by its label (images,), of `class_weights` (classes,)."""
    if class_weights is None:
        return torch.ones_like(labels, dtype=torch.float32)
    return class_weights.to(labels.device)[labels]


def _teach(
    walked: Walked, loss: Loss, surprise: Tensor, class_weights: Tensor | None
) -> dict[str, Tensor]:
    """Return what lessons beside the walk teach: by labels, by rewards, and by themselves.

    The first and the last are means over images of the mean over its views, each the sum over what
    it has several of. Draws inside of views are all answered for by their image's `surprise`
    (images,), what its conclusion was worth beyond the usual.
    """
    labels, images = walked.labels, len(walked.labels)
    importance = importance_of(labels, class_weights)
    found: dict[str, Tensor] = {}

    def add(name: str, value: Tensor) -> None:
        found[name] = found[name] + value if name in found else value

    for lessons, image in ((each.lessons, each.image) for each in walked.taught):
        if lessons.scores is not None:
            views, several, _ = lessons.scores.shape
            each = _cross_entropy(
                lessons.scores.flatten(0, 1), labels[image].repeat_interleave(several), loss
            )
            each = each.view(views, several).sum(dim=1)
            add("side", (mean_by_image(each, image, images) * importance).mean())
        if lessons.log_p is not None:
            add("glimpses", -(surprise[image] * lessons.log_p).sum() / images)
        if lessons.own is not None:
            add("imitation", mean_by_image(lessons.own, image, images).mean())
    return found


def _rewards(walked: Walked, below: Tensor, loss: Loss) -> Rewards:
    labels, levels = walked.labels, len(walked.level_scores)
    image = walked.image[below]  # (cells,)
    return Rewards(
        sequence=reward(loss.reward, walked.scores, labels),
        concluded=reward(loss.reward, walked.level_scores, labels.expand(levels, -1)),
        cells=reward(loss.reward, walked.window_scores[below], labels[image]),
        image=image,
        level=walked.level[below],
        labels=labels,
        samples=walked.samples,
    )


def contrastive(concluded: Tensor, labels: Tensor, *, margin: float, samples: int = 1) -> Tensor:
    """Return how unlike rows (images, features) of a class are, and how alike those of others.

    The mean over all pairs, each with itself included; every sample of the images by itself.
    """
    rows = functional.normalize(at_least_single(concluded) + ROW_EPSILON, dim=1)
    rows = rows.view(-1, samples, rows.shape[1]).transpose(0, 1)  # (samples, images, features)
    alike = rows @ rows.mT  # (samples, images, images)
    once = labels[::samples]
    same = once[:, None] == once  # (images, images)
    return torch.where(same, 1 - alike, (alike - margin).clamp(min=0)).mean()


def l2_penalty(model: nn.Module, loss: Loss) -> Tensor:
    """Return the weighted sum of squares of what is trained, biases too but not batch norms."""
    learned: dict[int, Tensor] = {}  # by id: a weight that two modules share counts once
    for name, module in model.named_modules():
        for full_name, weight in module.named_parameters(name, recurse=False):
            skipped = loss.l2_of == "new" and is_of_backbone(full_name)
            if weight.requires_grad and not skipped and not isinstance(module, _BatchNorm):
                learned[id(weight)] = weight
    if not loss.l2 or not learned:
        return next(model.parameters()).new_zeros(())
    return loss.l2 * torch.stack([weight.square().sum() for weight in learned.values()]).sum()


def _cross_entropy(scores: Tensor, labels: Tensor, loss: Loss) -> Tensor:
    return functional.cross_entropy(
        at_least_single(scores), labels, reduction="none", label_smoothing=loss.label_smoothing
    )


def _mixture_cross_entropy(walked: Walked, weights: Tensor, loss: Loss) -> Tensor:
    """Return the loss (images,) of the weighted mean of the windows' probabilities."""
    counted = weights > 0  # (windows,)
    image, weights = walked.image[counted], weights[counted]
    logs = at_least_single(walked.window_scores[counted]).log_softmax(dim=1)  # (windows, classes)
    logs = logs + weights.to(logs.dtype).log()[:, None]
    shape = (len(walked.labels), logs.shape[1])
    lowest = torch.full(shape, torch.finfo(logs.dtype).min, dtype=logs.dtype, device=logs.device)
    top = lowest.scatter_reduce(0, image[:, None].expand_as(logs), logs.detach(), "amax")
    total = logs.new_zeros(shape).index_add(0, image, (logs - top[image]).exp())
    weight = weights.new_zeros(shape[0]).index_add(0, image, weights)  # (images,)
    some = weight > 0
    mixture = top + torch.where(some[:, None], total, 1).log()  # (images, classes)
    mixture = mixture - torch.where(some, weight, 1).to(logs.dtype).log()[:, None]
    mixture = torch.where(some[:, None], mixture, 0)
    chosen = mixture.gather(1, walked.labels[:, None]).squeeze(1)  # (images,)
    smoothing = loss.label_smoothing
    return -(1 - smoothing) * chosen - smoothing * mixture.mean(dim=1)


def _weights_alone(level: Tensor, loss: Loss) -> Tensor:
    """Return how much each window counts alone (windows,); 0 if it is deeper than the cap."""
    by_level = torch.tensor(loss.level_weights or (1.0,), device=level.device)
    weights = by_level[(level - 1).clamp(max=len(by_level) - 1)]
    return weights if loss.cap is None else weights * (level <= loss.cap)


def mean_by_image(
    values: Tensor, image: Tensor, images: int, weights: Tensor | None = None
) -> Tensor:
    """Return the mean, or by weights, of each image's values (images,); 0 where it has none."""
    shares = torch.ones_like(values) if weights is None else weights.to(values.dtype)
    total = values.new_zeros(images).index_add(0, image, values * shares)
    weight = values.new_zeros(images).index_add(0, image, shares)
    return total / torch.where(weight > 0, weight, 1)
