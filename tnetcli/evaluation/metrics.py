"""Accuracy, F1, calibration and hit rate with confidence intervals."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tnetcli.geometry import Window, box_coverage, window_coverage

Labels = NDArray[np.integer]  # (images,), numbers of classes
NORMAL_95 = 1.959963984540054  # 95 % of a normal distribution lie within this many deviations
BINS = 15
RESAMPLES = 1000
MOST_RANKED = 5
# A window hits if it shows this much of a box, or is filled this much by boxes.
LEAST_COVERED, LEAST_FILLED = 0.5, 0.25
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure, and between which it lies in 95 % of such samples."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, eq=False)
class Outcomes:
    """What is kept of conclusions, a few numbers an image however many classes there are."""

    labels: Labels
    predicted: Labels
    rank: NDArray[np.int64]  # classes that are held for more probable than the true one
    confidence: NDArray[np.float64]  # the probability of the predicted class
    log_loss: NDArray[np.float64]  # -log of the probability of the true class
    brier: NDArray[np.float64]  # squared distance from certainty of the truth, 0 to 2

    @classmethod
    def of(cls, scores: NDArray[np.floating], labels: Labels) -> "Outcomes":
        """Judge `scores` (images, classes), which are logits; of equals the first class counts."""
        true = np.arange(len(labels)), labels
        shifted = scores.astype(np.float64) - scores.max(axis=1, keepdims=True)
        logs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
        shares = np.exp(logs)  # (images, classes)
        own = shifted[true][:, None]
        before = np.arange(scores.shape[1]) < labels[:, None]
        truth = shares[true]
        return cls(
            labels=labels,
            predicted=scores.argmax(axis=1),
            rank=((shifted > own) | (shifted == own) & before).sum(axis=1),
            confidence=shares.max(axis=1),
            log_loss=-logs[true],
            brier=(shares**2).sum(axis=1) - 2 * truth + 1,
        )

    @classmethod
    def join(cls, parts: Iterable["Outcomes"]) -> "Outcomes":
        """Return those of all images together."""
        columns = zip(*(part.columns for part in parts), strict=True)
        return cls(*(np.concatenate(column) for column in columns))

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        """Return the arrays in the order in which they are declared."""
        return tuple(getattr(self, name) for name in self.__slots__)


@dataclass(frozen=True, slots=True)
class Scores:
    """What many conclusions come to."""

    images: int
    accuracy: Interval
    top_k: Interval
    k: int  # of top_k: 5, or one less than there are classes
    macro_f1: float
    calibration_error: float
    brier: float
    log_loss: float


def summarise(outcomes: Outcomes, classes: int) -> Scores:
    """Return the figures that are reported; at least one image is needed."""
    images, k = len(outcomes.labels), max(1, min(MOST_RANKED, classes - 1))
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
    share, z2 = hits / trials, NORMAL_95**2
    middle = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    spread = share * (1 - share) / trials + z2 / (4 * trials**2)
    reach = NORMAL_95 * spread**0.5 / (1 + z2 / trials)
    # Rounding must not part a perfect score from its own interval.
    return Interval(
        share, max(0.0, min(middle - reach, share)), min(1.0, max(middle + reach, share))
    )


def confusion_matrix(labels: Labels, predicted: Labels, classes: int) -> NDArray[np.int64]:
    """Count images by true class (rows) and predicted class (columns)."""
    pairs = labels.astype(np.int64) * classes + predicted
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def f1_scores(labels: Labels, predicted: Labels, classes: int) -> NDArray[np.float64]:
    """Return F1 of each class; NaN where a class is neither true nor predicted anywhere."""
    right = np.bincount(labels[labels == predicted], minlength=classes)
    told = np.bincount(labels, minlength=classes) + np.bincount(predicted, minlength=classes)
    with np.errstate(invalid="ignore"):
        return 2 * right / told


def macro_f1(labels: Labels, predicted: Labels, classes: int) -> float:
    """Return the mean F1 of the classes that are true or predicted somewhere."""
    return float(np.nanmean(f1_scores(labels, predicted, classes)))


def calibration_error(
    confidence: NDArray[np.floating], correct: NDArray[np.bool_], bins: int = BINS
) -> float:
    """Return how far confidence and accuracy are apart, in bins of equal width that end closed."""
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
    """Return a statistic with the middle 95 % of what it is on images drawn with replacement."""
    random, images = np.random.default_rng(seed), len(columns[0])
    drawn = [
        statistic(*(column[chosen] for column in columns))
        for chosen in (random.integers(images, size=images) for _ in range(resamples))
    ]
    low, high = np.percentile(drawn, (2.5, 97.5))
    return Interval(float(statistic(*columns)), float(low), float(high))


def hits(window: Window, boxes: Sequence[Window]) -> bool:
    """Say whether a window shows half of a box, or is filled to a quarter by boxes."""
    return (
        box_coverage(window, boxes) >= LEAST_COVERED - ROUNDING
        or window_coverage(window, boxes) >= LEAST_FILLED - ROUNDING
    )


def hit_levels(windows: Iterable[tuple[int, Window]], boxes: Sequence[Window]) -> dict[int, bool]:
    """Say of each level of an image whether a window hits; nothing of an image without boxes."""
    found: defaultdict[int, bool] = defaultdict(bool)
    for level, window in windows if boxes else ():
        found[level] = found[level] or hits(window, boxes)
    return dict(found)


def hit_rate(images: Iterable[dict[int, bool]]) -> dict[int, Interval]:
    """Return by level the share of images that are hit, among those that were looked at there.

    Each image is told by `hit_levels`.
    """
    levels: defaultdict[int, list[bool]] = defaultdict(list)
    for found in images:
        for level, hit in found.items():
            levels[level].append(hit)
    return {level: wilson(sum(hit), len(hit)) for level, hit in sorted(levels.items())}
