from dataclasses import replace

import pytest
import torch

from tnetcli.training.reinforce import Baselines, Rewards

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


def test_one_running_mean_is_expected_of_everything():
    sequence, alone = Baselines("ema", 3, start=0.4).expected(STEP)
    assert sequence.tolist() == pytest.approx([0.4] * 5)
    assert alone.tolist() == pytest.approx([0.4] * 5)


@pytest.mark.parametrize(
    ("cap", "cells"), [(None, (1.0 + 0.0 + 0.5 + 1.0 + 0.5) / 5), (2, 0.75), (1, None)]
)
def test_one_running_mean_follows_sequences_and_cells_down_to_the_cap(cap, cells):
    baselines = Baselines("ema", 3, decay=0.8, start=0.4)
    baselines.update(STEP, sequence=0.3, cap=cap)
    target = 0.5 if cells is None else 0.3 * 0.5 + 0.7 * cells
    assert baselines.values.tolist() == pytest.approx([0.8 * 0.4 + 0.2 * target] * 4)
    assert baselines.mean == pytest.approx(0.8 * 0.4 + 0.2 * target)


def test_every_level_has_its_own_running_mean():
    baselines = Baselines("per_level", 4, decay=0.8, start=0.4)
    baselines.update(STEP, sequence=0.3)
    means = [0.32 + 0.2 * mean for mean in (0.5, 0.75, 0.5)]
    assert baselines.values[[0, 2, 3]].tolist() == pytest.approx(means)
    assert baselines.values[4].item() == pytest.approx(0.4)  # no cell, no change
    assert baselines.mean == pytest.approx((sum(means) + 0.4) / 4)
    sequence, alone = baselines.expected(STEP)
    assert sequence.tolist() == pytest.approx([means[0]] * 5)
    assert alone.tolist() == pytest.approx([means[level - 1] for level in (2, 3, 2, 3, 3)])


def test_other_samples_are_what_a_sample_is_compared_with():
    step = rewards_of(
        [0.1, 0.4, 0.7, 0.2, 0.3, 0.9],  # three samples of two images
        [(0, 2, 0.5), (0, 2, 0.3), (1, 2, 0.9), (2, 2, 0.6), (2, 3, 0.8), (3, 2, 0.2), (4, 3, 0.1)],
        samples=3,
    )
    baselines = Baselines("leave_one_out", 3)
    baselines.values = torch.tensor([9.0, 9.0, 0.22, 0.33])
    sequence, alone = baselines.expected(step)
    expected = [0.55, 0.55, 0.4, 0.25, 0.25, 0.6, 0.55]
    assert sequence.tolist() == pytest.approx(expected)
    # Where no other sample has a cell at the level, the running mean stands in.
    expected = [0.75, 0.75, 1.4 / 3, 1.7 / 3, 0.33, 0.22, 0.33]
    assert alone.tolist() == pytest.approx(expected)


def test_a_lone_sample_is_compared_with_the_running_means():
    baselines = Baselines("leave_one_out", 3)
    baselines.values = torch.tensor([0.11, 9.0, 0.22, 0.33])
    sequence, alone = baselines.expected(STEP)
    assert sequence.tolist() == pytest.approx([0.11] * 5)
    assert alone.tolist() == pytest.approx([0.22, 0.33, 0.22, 0.33, 0.33])


@pytest.mark.parametrize("kind", KINDS)
def test_without_cells_the_sequences_are_still_followed(kind):
    baselines, step = Baselines(kind, 1, start=0.0), rewards_of([1.0, 0.0], [])
    assert [len(each) for each in baselines.expected(step)] == [0, 0]
    baselines.update(step, sequence=0.3)
    assert baselines.mean == pytest.approx(0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_state_goes_on_where_it_was(kind):
    one, other = Baselines(kind, 3), Baselines(kind, 3, start=0.9)
    one.update(STEP, sequence=0.3)
    state = one.state_dict()
    other.load_state_dict(state)
    one.update(STEP, sequence=0.3)
    assert not torch.equal(state["values"], one.values)
    other.update(STEP, sequence=0.3)
    assert torch.equal(one.values, other.values)


def test_a_state_of_other_levels_is_refused():
    with pytest.raises(ValueError, match="shape \\(3,\\) instead of \\(4,\\)"):
        Baselines("ema", 3).load_state_dict(Baselines("ema", 2).state_dict())


def test_there_is_a_level():
    with pytest.raises(ValueError, match="levels is below 1"):
        Baselines("ema", 0)


@pytest.mark.parametrize("kind", KINDS)
def test_all_start_from_what_a_model_has_stored(kind):
    baselines = Baselines(kind, 3)
    assert baselines.mean == 0.5
    baselines.start(0.7)
    assert baselines.mean == pytest.approx(0.7)


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
    assert torch.allclose(sequence, torch.tensor([0.7, 0.7, 0.2, 0.2, 0.2]))
    assert torch.allclose(alone, torch.tensor([0.7, 0.2, 0.45, 0.575, 0.575]))
