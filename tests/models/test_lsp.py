import dataclasses
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models.places import patch_at
from tests.strategies import numbers
from tnetcli.geometry import Window
from tnetcli.models.lsp import (
    FIELDS,
    LOCALISATIONS,
    LOOSE,
    STRICT,
    count_candidates,
    count_positions,
    localise,
    overlap_of,
)


def taken(heat, field=63, *, most=5, overlap=0.3, share=1.0):
    return [
        tuple(at) for at in localise(np.asarray(heat, float), field, most=most, overlap=overlap,
                                     share=share).tolist()
    ]  # fmt: skip


def pixels(row, column, field):
    return {(8 * row + y, 8 * column + x) for y in range(field) for x in range(field)}


def iou(one, other):
    return len(one & other) / len(one | other)


def by_brute_force(heat, field, most, overlap, share):
    """SPEC 4.5, word by word, with patches as sets of pixels."""
    height, width = heat.shape
    order = sorted(
        ((row, column) for row in range(height) for column in range(width)),
        key=lambda at: (-heat[at], at),
    )
    chosen = [order[0]]
    for i in range(1, int(height * width * share + 1e-9)):
        if len(chosen) == most:
            break
        patch = pixels(*order[i], field)
        if all(iou(patch, pixels(*other, field)) < overlap for other in chosen):
            chosen.append(order[i])
    return chosen


@pytest.mark.parametrize(("setting", "candidates"), [(STRICT, (22, 11, 6)), (LOOSE, (132, 86, 67))])
def test_as_many_candidates_are_tried_as_published(setting, candidates):
    maps = [21 * 21, 17 * 17, 15 * 15]
    found = [count_candidates(n, share) for n, share in zip(maps, setting.shares, strict=True)]
    assert tuple(found) == candidates


def test_a_share_of_whole_positions_is_not_rounded_down():
    assert 0.29 * 100 < 29  # as floats
    assert count_candidates(100, 0.29) == 29


def test_the_published_settings_cannot_be_changed():
    assert (STRICT.most, STRICT.overlap) == ((5, 3, 2), 0.3)
    assert (LOOSE.most, LOOSE.overlap) == ((24, 10, 8), 0.8)
    assert dict(LOCALISATIONS) == {"strict": STRICT, "loose": LOOSE}
    with pytest.raises(dataclasses.FrozenInstanceError):
        STRICT.overlap = 0.5
    with pytest.raises(TypeError):
        LOCALISATIONS["strict"] = LOOSE


def test_only_candidates_are_taken():
    heat = np.zeros((21, 21))
    heat[0, :20] = np.arange(20, 0, -1)  # 22 candidates: these, and the first two of the rest
    found = STRICT.localise(heat, 0).tolist()
    # The rest is tied, so that its first in reading order come: 0-20 and 1-0.
    assert found == [[0, 0], [0, 5], [0, 10], [0, 15], [0, 20]]


@pytest.mark.parametrize(
    ("field", "down", "across", "common", "union"),
    [
        (63, 0, 0, 63 * 63, 63 * 63),
        (63, 0, 1, 63 * 55, 4473),
        (63, 1, 1, 55 * 55, 4913),
        (63, 0, 4, 63 * 31, 5985),  # 0.326: too much for strict
        (63, 0, 5, 63 * 23, 6489),  # 0.223
        (63, -7, 2, 7 * 47, 7609),
        (63, 8, 0, 0, 7938),  # 64 pixels apart: they do not touch
        (95, 0, -1, 95 * 87, 9785),  # 0.845: too much for loose
        (95, 1, 1, 87 * 87, 10481),  # 0.722
        (111, 1, 0, 111 * 103, 13209),  # 0.866
        (111, 13, 13, 7 * 7, 24593),
        (111, 14, 0, 0, 24642),
    ],
)
def test_overlap_of_hand_worked_cases(field, down, across, common, union):
    found = overlap_of(np.array([down]), np.array([across]), field)
    assert found == pytest.approx(np.array([common / union]), rel=1e-12)


@given(st.sampled_from(FIELDS), st.integers(-15, 15), st.integers(-15, 15))
def test_overlap_is_that_of_the_pixels(field, down, across):
    one, other = pixels(20, 20, field), pixels(20 + down, 20 + across, field)
    found = overlap_of(np.array([down]), np.array([across]), field)
    assert found[0] == pytest.approx(iou(one, other), rel=1e-12)


def test_neighbours_on_a_row_stand_apart_by_five_positions_where_strict():
    assert taken([np.arange(21, 0, -1)], most=9) == [(0, 0), (0, 5), (0, 10), (0, 15), (0, 20)]


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        (63, [(1, 1), (0, 1), (1, 0), (0, 0)]),  # 0.775 beside, 0.616 across
        (95, [(1, 1), (0, 0)]),  # 0.845 beside, 0.722 across
        (111, [(1, 1), (0, 0)]),  # 0.866 beside, 0.756 across
    ],
)
def test_neighbours_where_loose(field, expected):
    assert taken([[1, 3], [2, 4]], field, overlap=0.8) == expected


def test_an_overlap_of_just_the_limit_is_too_much():
    limit = 63 * 23 / 6489  # five positions apart
    heat = [[2, 0, 0, 0, 0, 1]]
    assert taken(heat, most=2, overlap=limit, share=0.4) == [(0, 0)]
    assert taken(heat, most=2, overlap=np.nextafter(limit, 1), share=0.4) == [(0, 0), (0, 5)]


def test_ties_are_taken_in_reading_order():
    assert taken(np.ones((21, 21)), most=3) == [(0, 0), (0, 5), (0, 10)]


def test_the_highest_is_taken_even_if_the_share_holds_no_position():
    assert taken([[0, 1], [0, 0]], share=0.05) == [(0, 1)]


def test_a_patch_is_taken_once_even_if_overlap_is_no_limit():
    assert taken([[0, 1], [3, 2]], overlap=2.0) == [(1, 0), (1, 1), (0, 1), (0, 0)]


@pytest.mark.parametrize("heat", [np.zeros(4), np.zeros((0, 3)), np.zeros((1, 2, 2))])
def test_what_is_no_map_is_refused(heat):
    with pytest.raises(ValueError, match="not a map"):
        taken(heat)


def test_nothing_to_take_is_refused():
    with pytest.raises(ValueError, match="most is below 1"):
        taken([[1.0]], most=0)


@pytest.mark.parametrize(("branch", "field", "last"), [(0, 63, 160), (1, 95, 128), (2, 111, 112)])
def test_patches_lie_where_published(branch, field, last):
    side = count_positions(224, field)
    assert side == (21, 17, 15)[branch]
    assert patch_at(0, 0, field) == Window(0, 0, field, field)
    corner = patch_at(side - 1, side - 1, field)
    assert (corner.left, corner.top) == (last, last)
    assert corner.right == corner.bottom == 223  # pixel 223 is never covered
    assert patch_at(2, 5, field) == Window(40, 16, field, field)


@st.composite
def maps(draw):
    height, width = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    values = draw(
        st.lists(st.integers(-3, 3), min_size=height * width, max_size=height * width)
    )  # few values: many ties
    return np.array(values, float).reshape(height, width)


@given(
    maps(),
    st.sampled_from(FIELDS),
    st.integers(1, 6),
    st.one_of(st.sampled_from([0.3, 0.8]), numbers(0.01, 0.99)),
    st.sampled_from([0.03, 0.05, 0.3, 0.6, 1.0]),
)
def test_lsp_is_what_brute_force_finds(heat, field, most, overlap, share):
    found = taken(heat, field, most=most, overlap=overlap, share=share)
    assert found == by_brute_force(heat, field, most, overlap, share)


@given(st.integers(0, 10_000), st.sampled_from([0, 1, 2]), st.sampled_from([STRICT, LOOSE]))
def test_there_are_never_too_many_and_none_are_too_alike(seed, branch, setting):
    side = (21, 17, 15)[branch]
    heat = np.random.default_rng(seed).normal(size=(side, side)).cumsum(0).cumsum(1)
    found = setting.localise(heat, branch)
    assert 1 <= len(found) <= setting.most[branch]
    assert heat[tuple(found[0])] == heat.max()
    values = [heat[tuple(at)] for at in found]
    assert values == sorted(values, reverse=True)
    for one, other in combinations(found, 2):
        shared = overlap_of(*(one - other)[:, None], FIELDS[branch])
        assert shared[0] < setting.overlap


@pytest.mark.parametrize(
    ("setting", "view_size", "most"),
    # 119 pixels: maps of 8, 4 and 2 a side, of which 3, 0 and 0, or 19, 4 and 1 are tried.
    [(STRICT, 224, 5), (LOOSE, 224, 24), (STRICT, 119, 3), (LOOSE, 119, 19)],
)
def test_the_most_patches_of_a_view_are_those_that_are_tried(setting, view_size, most):
    assert setting.most_of(view_size) == most
