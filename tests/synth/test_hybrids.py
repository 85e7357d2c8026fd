import numpy as np
import pytest

from tnetcli.synth.digits import GROUND, STRENGTH, clutter_details, digit_details, glows
from tnetcli.synth.glyphs import draw_glyphs


def block_sums(details, block):
    count, side, _ = details.shape
    return details.reshape(count, side // block, block, -1, block).sum((2, 4))


@pytest.mark.parametrize("block", [4, 8])
def test_nothing_is_left_of_details_in_the_mean_of_a_block(block):
    glyphs = draw_glyphs("train")
    assert not block_sums(digit_details(glyphs.of(3), block).astype(int), block).any()
    assert not block_sums(clutter_details(glyphs.images, block).astype(int), block).any()


@pytest.mark.parametrize("block", [4, 8])
def test_digits_can_be_told_apart_by_their_details(block):
    train, test = draw_glyphs("train"), draw_glyphs("test")
    known = [digit_details(train.of(digit), block).astype(float) for digit in range(10)]
    asked = [digit_details(test.of(digit)[:12], block).astype(float) for digit in range(10)]
    right = []
    for digit in range(10):  # the nearest neighbour knows
        nearest = [np.square(asked[digit][:, None] - each).sum((2, 3)).min(1) for each in known]
        right.append((np.argmin(nearest, 0) == digit).mean())
    assert np.mean(right) > 0.7  # by chance 0.1


def test_neither_glow_nor_detail_leaves_the_range():
    details = clutter_details(draw_glyphs("train").images, 4)
    glow = glows(16, 128)
    assert np.abs(details).max() <= STRENGTH + 1
    assert GROUND - STRENGTH - 1 >= 0
    assert GROUND + glow.max() + STRENGTH + 1 <= 255


def test_the_glows_of_a_site_are_as_bright_as_all_others():
    clutter, site = np.split(glows(16, 2000).astype(float), 2)
    assert abs(clutter.mean() - site.mean()) < 0.03 * site.mean()
    assert clutter.mean((1, 2)).std() > 3 * site.mean((1, 2)).std()


def test_the_glows_of_a_site_are_in_the_middle_and_others_anywhere():
    clutter, site = np.split(glows(16, 500).astype(float), 2)
    assert site.mean(0)[6:10, 6:10].mean() > 3 * site.mean()
    assert clutter.mean(0).std() < 0.15 * clutter.mean()
