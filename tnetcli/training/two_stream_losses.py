"""What two streams learn from: labels, and that the closer look has to know better; SPEC 5.4."""

import torch
from torch import Tensor
from torch.nn import functional

from tnetcli.sections import Streams
from tnetcli.training.draws import at_least_single
from tnetcli.training.losses import Losses, Walked, importance_of, mean_by_image


def ranking_loss(
    global_scores: Tensor, local_scores: Tensor, labels: Tensor, *, margin: float
) -> Tensor:
    """Return by how much the local probability fails to exceed the global one by the margin.

    Scores (regions, classes) are logits, probabilities those of the true class; (regions,).
    """
    return (
        (true_probability(global_scores, labels) + margin)
        .sub(true_probability(local_scores, labels))
        .clamp(min=0)
    )


def true_probability(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the probability (regions,) that logits (regions, classes) give to the labels."""
    chances = at_least_single(scores).softmax(dim=1)
    return chances.gather(1, labels.unsqueeze(1)).squeeze(1)


def learn_two_streams(
    walked: Walked,
    streams: Streams,
    *,
    label_smoothing: float = 0.0,
    class_weights: Tensor | None = None,
) -> Losses:
    """Return the loss of a step by SPEC 5.4, as the mean over images.

    Every image counts alike (times its `class_weights` (classes,)), whatever the number of its
    windows: their losses are averaged first. An image without windows learns only as a whole.
    Where lessons have the scores of each step, each learns the labels by itself.

    `parts` are before weighting: ce_global, ce_local, ranking; and, not part of the total,
    p_global and p_local, the mean probabilities of the true class.
    """
    labels, images = walked.labels, len(walked.labels)
    whole, near = walked.level == 1, walked.level > 1  # (windows,)
    if not torch.equal(
        walked.image[whole].sort().values, torch.arange(images, device=labels.device)
    ):
        raise ValueError("not every image has exactly one view of the whole")
    order = walked.image[whole].argsort()
    overall = walked.window_scores[whole][order]  # (images, classes)
    closer, image = walked.window_scores[near], walked.image[near]  # (patches, ...)
    truth = labels[image]  # (patches,)

    def cross_entropy(scores: Tensor, labels: Tensor) -> Tensor:
        return functional.cross_entropy(
            at_least_single(scores), labels, reduction="none", label_smoothing=label_smoothing
        )

    each = cross_entropy(closer, truth)  # (patches,)
    told = [taught.lessons.scores for taught in walked.taught if taught.lessons.scores is not None]
    if told:
        of_steps = torch.cat(told)  # (patches, steps, classes)
        repeated = truth.unsqueeze(1).expand(of_steps.shape[:2]).flatten()
        each = cross_entropy(of_steps.flatten(0, 1), repeated)
        each = each.view(of_steps.shape[:2]).mean(dim=1)
    beside = overall[image].detach() if streams.hold_global else overall[image]
    behind = ranking_loss(beside, closer, truth, margin=streams.margin)  # (patches,)

    importance = importance_of(labels, class_weights)  # (images,)
    ce_global = (cross_entropy(overall, labels) * importance).mean()
    ce_local = (mean_by_image(each, image, images) * importance).mean()
    ranking = (mean_by_image(behind, image, images) * importance).mean()
    total = ce_global + streams.local * ce_local + streams.ranking * ranking
    parts = {
        "ce_global": ce_global,
        "ce_local": ce_local,
        "ranking": ranking,
        "p_global": true_probability(overall, labels).mean(),
        "p_local": true_probability(closer, truth).sum() / max(len(truth), 1),
    }
    numbers = torch.stack([part.detach().float() for part in parts.values()]).tolist()
    return Losses(total, dict(zip(parts, numbers, strict=True)))
