import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tnetcli.models.anchor_decision import Decision, decide, share_out

from tnetcli.models.lsp import LOOSE, STRICT


def branches(*named, classes=4):
    """Return probabilities of branches that each name a class, as sure as given."""
    rows = []
    for label, sure in named:
        row = np.full(classes, (1 - sure) / (classes - 1))
        row[label] = sure
        rows.append(row)
    return np.array(rows)


@pytest.mark.parametrize(
    ("named", "decision"),
    [
        # Two agree, though the third is the surest; of the two, the surer shows why.
        ([(1, 0.5), (1, 0.6), (2, 0.9)], Decision(1, 1)),
        ([(1, 0.7), (2, 0.9), (1, 0.6)], Decision(1, 0)),
        ([(3, 0.99), (0, 0.4), (0, 0.5)], Decision(0, 2)),
        # All agree.
        ([(2, 0.5), (2, 0.8), (2, 0.7)], Decision(2, 1)),
        # None agree: the surest names the class, and shows why.
        ([(0, 0.5), (1, 0.6), (2, 0.7)], Decision(2, 2)),
        ([(3, 0.8), (1, 0.6), (2, 0.7)], Decision(3, 0)),
        # Ties: the smallest receptive field.
        ([(2, 0.7), (1, 0.7), (3, 0.7)], Decision(2, 0)),
        ([(3, 0.6), (1, 0.7), (0, 0.7)], Decision(1, 1)),
        ([(3, 0.9), (1, 0.7), (1, 0.7)], Decision(1, 1)),
    ],
)
def test_class_and_branch(named, decision):
    assert decide(branches(*named)) == decision
    assert decide(np.log(branches(*named))) == decision


def test_of_classes_that_are_equally_probable_the_first_is_named():
    even = [0.3, 0.3, 0.3, 0.1]
    assert decide(np.array([even, even, even])) == Decision(0, 0)
    # Each branch names its first: 1, 0 and 0.
    rows = [[0.1, 0.4, 0.4, 0.1], even, even]
    assert decide(np.array(rows)) == Decision(0, 1)


@given(st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=3, max_size=3))
def test_the_branch_names_the_class_and_no_other_that_does_is_surer(rows):
    sureness = np.array(rows, float)
    label, branch = (decision := decide(sureness)).label, decision.branch
    named = [row.index(max(row)) for row in rows]
    assert named[branch] == label
    assert max(rows[branch]) == max(max(row) for j, row in enumerate(rows) if named[j] == label)
    votes = [named.count(each) for each in named]
    if max(votes) >= 2:
        assert named.count(label) == max(votes)
    else:
        assert max(rows[branch]) == max(map(max, rows))


@given(st.integers(0, 10_000), st.sampled_from([STRICT, LOOSE]), st.sampled_from([1e-30, 1, 1e6]))
def test_attention_keeps_the_order_of_what_was_taken_and_vanishes_nowhere(seed, setting, scale):
    heat = scale * np.random.default_rng(seed).normal(size=(21, 21))
    shares = share_out(heat, setting.localise(heat, 0))
    assert (shares > 0).all()
    assert shares.sum() == pytest.approx(1)
    assert (np.diff(shares) < 0).all()


def test_attention_is_how_far_a_patch_stands_above_the_lowest():
    heat = np.array([[5.0, -1.0], [2.0, 0.0]])
    shares = share_out(heat, np.array([[0, 0], [1, 0]]))
    assert shares == pytest.approx([6 / 9, 3 / 9])


def test_on_a_flat_map_all_count_alike():
    shares = share_out(np.full((3, 3), -7.0), np.array([[0, 0], [1, 1]]))
    assert shares.tolist() == [0.5, 0.5]


def test_what_was_taken_at_the_lowest_value_still_has_some_attention():
    heat = np.zeros((3, 3))
    heat[0, 0] = 1
    shares = share_out(heat, np.array([[0, 0], [2, 2]]))
    assert 0 < shares[1] < 1e-5


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_broken_maps_give_no_attention_that_could_be_used(broken):
    heat = np.zeros((3, 3))
    heat[1, 1] = broken
    assert np.isnan(share_out(heat, np.array([[1, 1], [0, 0]]))).any()
