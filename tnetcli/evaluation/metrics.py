"""Accuracy, F1, calibration and hit rate with confidence intervals."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tnetcli.geometry import Window, box_coverage, window_coverage

Labels = NDArray[np.integer]  # (images,), numbers of classes
NORMAL_95 = 1.959963984540054  # standard deviations that hold 95 % of a normal distribution
BINS = 15
RESAMPLES = 1000
MAX_K = 5
# A window hits if it shows this much of a box, or if boxes fill this much of it.
MIN_COVERED, MIN_FILLED = 0.5, 0.25
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its 95 % confidence interval."""

    value: float
    low: float
    high: float


class Outcomes(NamedTuple):
    """Outcomes of predictions: a few numbers per image, whatever the number of classes."""

    labels: Labels
    predicted: Labels
    rank: NDArray[np.int64]  # number of classes that are more probable than the true one
    confidence: NDArray[np.float64]  # the probability of the predicted class
    log_loss: NDArray[np.float64]  # -log of the probability of the true class
    brier: NDArray[np.float64]  # squared distance from the one-hot truth, 0 to 2

    @classmethod
    def of(cls, scores: NDArray[np.floating], labels: Labels) -> "Outcomes":
        """Return the outcomes of logits (images, classes); of equal classes the first counts."""
        true = np.arange(len(labels)), labels
        shifted = scores.astype(np.float64) - scores.max(axis=1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        probabilities = np.exp(logs)  # (images, classes)
        own = shifted[true][:, None]
        before = np.arange(scores.shape[1]) < labels[:, None]
        truth = probabilities[true]
        return cls(
            labels=labels,
            predicted=scores.argmax(axis=1),
            rank=((shifted > own) | (shifted == own) & before).sum(axis=1),
            confidence=probabilities.max(axis=1),
            log_loss=-logs[true],
            brier=(probabilities**2).sum(axis=1) - 2 * truth + 1,
        )


@dataclass(frozen=True, slots=True)
class Scores:
    """Summary of many predictions."""

    images: int
    accuracy: Interval
    top_k: Interval
    k: int  # of top_k: 5, or one less than there are classes
    macro_f1: float
    calibration_error: float
    brier: float
    log_loss: float


def summarise(outcomes: Outcomes, classes: int) -> Scores:
    """Return the reported metrics of at least one image."""
    images, k = len(outcomes.labels), max(1, min(MAX_K, classes - 1))
    correct = outcomes.predicted == outcomes.labels
    return Scores(
        images=images,
        accuracy=wilson(int(correct.sum()), images),
        top_k=wilson(int((outcomes.rank < k).sum()), images),
        k=k,
        macro_f1=macro_f1(outcomes.labels, outcomes.predicted, classes),
        calibration_error=calibration_error(outcomes.confidence, correct),
        brier=float(outcomes.brier.mean()),
        log_loss=float(outcomes.log_loss.mean()),
    )


def wilson(hits: int, trials: int) -> Interval:
    """Return a proportion with the 95 % interval of Wilson's score."""
    if not 0 <= hits <= trials or not trials:
        raise ValueError(f"not a proportion: {hits} of {trials}")
    value, z2 = hits / trials, NORMAL_95**2
    middle = (value + z2 / (2 * trials)) / (1 + z2 / trials)
    spread = value * (1 - value) / trials + z2 / (4 * trials**2)
    reach = NORMAL_95 * spread**0.5 / (1 + z2 / trials)
    # Rounding must not exclude a perfect score from its interval.
    return Interval(
        value, max(0.0, min(middle - reach, value)), min(1.0, max(middle + reach, value))
    )


def confusion_matrix(labels: Labels, predicted: Labels, classes: int) -> NDArray[np.int64]:
    """Count images by true class (rows) and predicted class (columns)."""
    pairs = labels.astype(np.int64) * classes + predicted
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def macro_f1(labels: Labels, predicted: Labels, classes: int) -> float:
    """Return the mean F1 of the classes that are true or predicted somewhere."""
    right = np.bincount(labels[labels == predicted], minlength=classes)
    total = np.bincount(labels, minlength=classes) + np.bincount(predicted, minlength=classes)
    return float(np.mean(2 * right[total > 0] / total[total > 0]))


def calibration_error(
    confidence: NDArray[np.floating], correct: NDArray[np.bool_], bins: int = BINS
) -> float:
    """Return the expected calibration error over bins of equal width, closed on the right."""
    edges = np.arange(1, bins) / bins
    places = np.searchsorted(edges, confidence)  # bin 0 is [0, 1/bins], the next (1/bins, 2/bins]
    gaps = np.bincount(places, weights=correct - confidence.astype(np.float64), minlength=bins)
    return float(np.abs(gaps).sum() / len(confidence))


def bootstrap(
    statistic: Callable[..., float],
    *columns: NDArray[Any],
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Interval:
    """Return a statistic with its bootstrap interval over images drawn with replacement."""
    rng, images = np.random.default_rng(seed), len(columns[0])
    drawn = [
        statistic(*(column[chosen] for column in columns))
        for chosen in (rng.integers(images, size=images) for _ in range(resamples))
    ]
    low, high = np.percentile(drawn, (2.5, 97.5))
    return Interval(float(statistic(*columns)), float(low), float(high))


def hits(window: Window, boxes: Sequence[Window]) -> bool:
    """Return True if a window shows half of a box, or if boxes fill a quarter of it."""
    return (
        box_coverage(window, boxes) >= MIN_COVERED - ROUNDING
        or window_coverage(window, boxes) >= MIN_FILLED - ROUNDING
    )


def hit_levels(windows: Iterable[tuple[int, Window]], boxes: Sequence[Window]) -> dict[int, bool]:
    """Return for each level whether a window hits a box; empty for an image without boxes."""
    found: dict[int, bool] = {}
    for level, window in windows if boxes else ():
        found[level] = found.get(level, False) or hits(window, boxes)
    return found


def hit_rate(images: Iterable[dict[int, bool]]) -> dict[int, Interval]:
    """Return by level the fraction of images with a hit, from the `hit_levels` of each image."""
    levels: defaultdict[int, list[bool]] = defaultdict(list)
    for found in images:
        for level, hit in found.items():
            levels[level].append(hit)
    return {level: wilson(sum(hit), len(hit)) for level, hit in sorted(levels.items())}
