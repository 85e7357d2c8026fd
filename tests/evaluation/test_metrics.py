import itertools
import math
import statistics

import numpy as np
import pytest

from tnetcli.evaluation.metrics import (
    Interval,
    Outcomes,
    bootstrap,
    calibration_error,
    confusion_matrix,
    hit_levels,
    hit_rate,
    hits,
    macro_f1,
    summarise,
    wilson,
)
from tnetcli.geometry import Window, box_coverage, window_coverage


def logits(*probabilities):
    return np.log(np.array(probabilities))


# Three classes, six images: probabilities, then the truth.
PROBABILITIES = (
    (0.7, 0.2, 0.1),
    (0.5, 0.3, 0.2),
    (0.1, 0.6, 0.3),
    (0.2, 0.7, 0.1),
    (0.1, 0.1, 0.8),
    (0.2, 0.3, 0.5),
)
LABELS = np.array([0, 1, 1, 2, 2, 0])


@pytest.fixture
def outcomes():
    return Outcomes.of(logits(*PROBABILITIES), LABELS)


def test_outcomes_agree_with_a_computation_by_hand(outcomes):
    assert outcomes.predicted.tolist() == [0, 0, 1, 1, 2, 2]
    assert outcomes.rank.tolist() == [0, 1, 0, 2, 0, 2]
    assert outcomes.confidence == pytest.approx([0.7, 0.5, 0.6, 0.7, 0.8, 0.5])
    expected = [-math.log(p) for p in (0.7, 0.3, 0.6, 0.1, 0.8, 0.2)]
    assert outcomes.log_loss == pytest.approx(expected)
    # 0.09+0.04+0.01; 0.25+0.49+0.04; 0.01+0.16+0.09; 0.04+0.49+0.81; ...
    assert outcomes.brier == pytest.approx([0.14, 0.78, 0.26, 1.34, 0.06, 0.98])


def test_large_logits_do_not_overflow():
    found = Outcomes.of(
        np.array([[2000.0, 1000.0], [-2000.0, 2000.0]], np.float32), np.array([0, 0])
    )
    assert found.log_loss.tolist() == [0.0, 4000.0]
    assert found.brier.tolist() == [0.0, 2.0]


def test_of_equally_probable_classes_only_the_first_is_right():
    found = Outcomes.of(np.zeros((3, 3)), np.array([0, 1, 2]))
    assert found.predicted.tolist() == [0, 0, 0]
    assert found.rank.tolist() == [0, 1, 2]


def test_the_summary_agrees_with_a_computation_by_hand(outcomes):
    found = summarise(outcomes, 3)
    assert found.images == 6
    assert found.accuracy.value == pytest.approx(3 / 6)
    assert (found.k, found.top_k.value) == (2, pytest.approx(4 / 6))
    # Each class is right once, predicted twice and true twice.
    assert found.macro_f1 == pytest.approx(0.5)
    assert found.brier == pytest.approx((0.14 + 0.78 + 0.26 + 1.34 + 0.06 + 0.98) / 6)


@pytest.mark.parametrize(("classes", "k"), [(1, 1), (2, 1), (5, 4), (6, 5), (1000, 5)])
def test_top_k_never_counts_every_class(classes, k):
    found = summarise(Outcomes.of(np.zeros((1, classes)), np.array([0])), classes)
    assert found.k == k


# Newcombe (1998), Statistics in Medicine 17, table I, method 3.
@pytest.mark.parametrize(
    ("hits_", "trials", "low", "high"),
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_intervals_are_the_published_ones(hits_, trials, low, high):
    found = wilson(hits_, trials)
    assert found.value == hits_ / trials
    assert (found.low, found.high) == (pytest.approx(low, abs=5e-5), pytest.approx(high, abs=5e-5))


@pytest.mark.parametrize("trials", [1, 2, 59])
def test_wilson_intervals_hold_the_proportion_and_stay_within_0_and_1(trials):
    for count in range(trials + 1):
        found = wilson(count, trials)
        assert 0 <= found.low <= found.value <= found.high <= 1


@pytest.mark.parametrize(("hits_", "trials"), [(0, 0), (2, 1), (-1, 3)])
def test_an_invalid_proportion_is_an_error(hits_, trials):
    with pytest.raises(ValueError, match="not a proportion"):
        wilson(hits_, trials)


def random_labels(seed, images=200, classes=7):
    random = np.random.default_rng(seed)
    return random.integers(classes, size=images), random.integers(classes, size=images)


def test_confusion_counts_true_by_predicted():
    labels, predicted = random_labels(0)
    expected = np.zeros((7, 7), int)
    for true, guess in zip(labels, predicted, strict=True):
        expected[true, guess] += 1
    assert np.array_equal(confusion_matrix(labels, predicted, 7), expected)


def test_macro_f1_is_the_mean_harmonic_mean_of_precision_and_recall():
    labels, predicted = random_labels(0)
    found = []
    for each in range(7):
        right = sum((labels == each) & (predicted == each))
        precision, recall = right / sum(predicted == each), right / sum(labels == each)
        found.append(statistics.harmonic_mean([precision, recall]))
    assert macro_f1(labels, predicted, 7) == pytest.approx(np.mean(found))


def test_macro_f1_is_of_classes_that_are_true_or_predicted_somewhere():
    # Class 0: right twice of 3 predicted and 2 true (0.8); 1: never true; 2: never predicted;
    # 3: neither.
    labels, predicted = np.array([0, 0, 2, 2]), np.array([0, 0, 0, 1])
    assert macro_f1(labels, predicted, 4) == pytest.approx((0.8 + 0 + 0) / 3)


def test_the_calibration_error_is_that_of_a_brute_force():
    random = np.random.default_rng(0)
    confidence = random.uniform(size=500)
    correct = random.uniform(size=500) < confidence**2
    expected = 0.0
    for low, high in itertools.pairwise(np.linspace(0, 1, 16)):
        own = (confidence > low) & (confidence <= high)
        if own.any():
            expected += own.mean() * abs(correct[own].mean() - confidence[own].mean())
    assert calibration_error(confidence, correct) == pytest.approx(expected)


def test_confidence_equal_to_accuracy_has_no_calibration_error():
    confidence = np.array([0.75] * 4 + [0.5] * 2)
    correct = np.array([True, True, True, False, True, False])
    assert calibration_error(confidence, correct) == pytest.approx(0)


def test_confident_errors_have_a_calibration_error_of_one():
    assert calibration_error(np.ones(3), np.zeros(3, bool)) == 1


def test_bootstrap_depends_on_the_seed_alone():
    values = np.random.default_rng(0).normal(size=50)
    assert bootstrap(np.mean, values, seed=1) == bootstrap(np.mean, values, seed=1)
    assert bootstrap(np.mean, values, seed=1) != bootstrap(np.mean, values, seed=2)


def test_the_bootstrap_interval_of_a_mean_is_the_known_one():
    values = np.random.default_rng(0).normal(size=400)
    found = bootstrap(np.mean, values, resamples=4000)
    reach = 1.96 * values.std() / math.sqrt(400)
    assert found.value == values.mean()
    assert found.low == pytest.approx(values.mean() - reach, abs=0.1 * reach)
    assert found.high == pytest.approx(values.mean() + reach, abs=0.1 * reach)


def test_bootstrap_keeps_the_columns_of_an_image_together():
    labels, _ = random_labels(0)
    found = bootstrap(lambda a, b: float((a == b).mean()), labels, labels)
    assert found == Interval(1, 1, 1)


class TestHits:
    WINDOW = Window(100, 100, 100, 100)

    @pytest.mark.parametrize(
        ("box", "expected"),
        [
            (Window(110, 110, 10, 10), True),  # all of a small box
            (Window(195, 110, 10, 10), True),  # exactly half of it
            (Window(195.1, 110, 10, 10), False),
            (Window(0, 0, 150, 150), True),  # a ninth of a large box, a quarter of the window
            (Window(0, 0, 149, 150), False),
            (Window(0, 0, 1000, 1000), True),  # nothing else in the window
            (Window(200, 100, 50, 50), False),  # beside it
        ],
    )
    def test_half_of_a_box_or_a_quarter_of_the_window(self, box, expected):
        assert hits(self.WINDOW, [box]) is expected

    def test_boxes_fill_a_window_together(self):
        halves = [Window(0, 100, 120, 100), Window(180, 100, 120, 100)]
        assert not any(hits(self.WINDOW, [half]) for half in halves)
        assert hits(self.WINDOW, halves)

    def test_overlapping_boxes_count_once(self):
        same = [Window(0, 100, 120, 100)] * 2
        assert window_coverage(self.WINDOW, same) == pytest.approx(0.2)
        assert not hits(self.WINDOW, same)

    def test_halves_of_fractional_windows_are_halves(self):
        for step in range(1, 200):
            side = 2048 * 0.25 / step
            assert hits(
                Window(0.1 * step, 0.3, side, side), [Window(0.1 * step, 0.3, 2 * side, side)]
            )


@pytest.mark.parametrize("seed", range(7))
def test_filled_and_covered_are_what_counting_pixels_gives(seed):
    random = np.random.default_rng(seed)
    boxes = [
        Window(*random.integers(0, 40, 2).tolist(), *random.integers(1, 20, 2).tolist())
        for _ in range(seed % 7)
    ]
    window = Window(*random.integers(0, 30, 2).tolist(), 20, 15)
    page = np.zeros((len(boxes) + 1, 80, 80), bool)
    for layer, box in zip(page, [window, *boxes], strict=True):
        layer[box.top : box.bottom, box.left : box.right] = True
    inside = page[1:] & page[0]
    assert window_coverage(window, boxes) == pytest.approx(inside.any(axis=0).sum() / page[0].sum())
    shares = [a.sum() / b.sum() for a, b in zip(inside, page[1:], strict=True)]
    assert box_coverage(window, boxes) == pytest.approx(max(shares, default=0))


class TestHitRate:
    BOX = (Window(0, 0, 10, 10),)
    NEAR, FAR = Window(0, 0, 20, 20), Window(500, 500, 20, 20)

    def test_any_window_of_a_level_is_enough(self):
        found = hit_levels([(2, self.FAR), (2, self.NEAR), (3, self.FAR)], self.BOX)
        assert found == {2: True, 3: False}

    def test_an_image_without_boxes_has_no_hits(self):
        assert hit_levels([(2, self.NEAR)], ()) == {}

    def test_images_count_on_the_levels_that_were_read(self):
        found = hit_rate([{2: True, 3: False}, {2: False, 3: True}, {2: True}, {}])
        assert found == {2: wilson(2, 3), 3: wilson(1, 2)}
