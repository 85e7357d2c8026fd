"""Pictures whose meaning is in their details alone: a little further away nothing is left of it.

The sum over each aligned block of `hidden_from` by `hidden_from` pixels is exactly zero, so that
in area means of that scale and coarser a 3 and a 7 are the same. Glows are the opposite: they can
be seen from afar, and have nothing to do with what is written in them.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tnetcli.scenes.glyphs import SIDE

STRENGTH = 70  # the largest detail, in grey levels
MOST_OF_A_CLASS, CLUTTER = 1000, 1500
# Waves longer than half of a picture are taken away before its blocks are levelled.
LONGEST_WAVES, SOFTNESS = 2.0, 0.3
GLOW, GLOW_WIDTH = 55, 0.18  # grey levels at the peak; the width is a part of the side
# The peak varies by this part, up and down; a site's glows stray a little from the centre.
SITE_VARIES, CLUTTER_VARIES, STRAY = 0.1, 0.9, 0.06
GROUND = 80  # neither glow nor detail leads from here out of the range of 8 bits


def digit_details(glyphs: NDArray[np.uint8], hidden_from: int) -> NDArray[np.int16]:
    """Return details of glyphs, (glyphs, side, side) of four blocks a side."""
    random = np.random.default_rng((hidden_from, 0))
    glyphs = random.permutation(glyphs)[:MOST_OF_A_CLASS]
    return _details(_placed(random, glyphs, hidden_from), hidden_from)


def clutter_details(glyphs: NDArray[np.uint8], hidden_from: int) -> NDArray[np.int16]:
    """Return details of scribbles, each of four quarters of different glyphs, mirrored or not."""
    random = np.random.default_rng((hidden_from, 1))
    half = 2 * hidden_from
    scribbles = np.empty((CLUTTER, 2 * half, 2 * half), np.float32)
    for row in (slice(0, half), slice(half, None)):
        for column in (slice(0, half), slice(half, None)):
            some = _placed(random, glyphs[random.integers(0, len(glyphs), CLUTTER)], hidden_from)
            some[: CLUTTER // 2] = some[: CLUTTER // 2, ::-1]
            some = random.permutation(some)
            some[: CLUTTER // 2] = some[: CLUTTER // 2, :, ::-1]
            scribbles[:, row, column] = random.permutation(some)[:, row, column]
    return _details(scribbles, hidden_from)


def _placed(
    random: np.random.Generator, glyphs: NDArray[np.uint8], hidden_from: int
) -> NDArray[np.float32]:
    """Return glyphs of seven blocks in a box of eight half blocks, each somewhere in it."""
    shrink = SIDE // (7 * hidden_from // 2)
    side, box = SIDE // shrink, 4 * hidden_from
    small = glyphs.reshape(-1, side, shrink, side, shrink).mean((2, 4), dtype=np.float32)
    places = np.zeros((len(small), box, box), np.float32)
    across, down = random.integers(0, box - side + 1, (2, len(small)))
    for y in range(box - side + 1):
        for x in range(box - side + 1):
            here = (across == x) & (down == y)
            places[here, y : y + side, x : x + side] = small[here]
    return places


def _details(pictures: NDArray[np.float32], block: int) -> NDArray[np.int16]:
    """Take away long waves, level every block, and make all equally strong, in whole numbers."""
    count, side, _ = pictures.shape
    waves = np.hypot(np.fft.fftfreq(side)[:, None], np.fft.rfftfreq(side)) * side
    passed = 1 / (1 + np.exp((LONGEST_WAVES - waves) / SOFTNESS))
    sharp = np.fft.irfft2(np.fft.rfft2(pictures) * passed, (side, side))
    blocks = sharp.reshape(count, side // block, block, -1, block).transpose(0, 1, 3, 2, 4)
    blocks = blocks.reshape(count, -1, block * block)  # (pictures, blocks, pixels)
    blocks = blocks - blocks.mean(2, keepdims=True)
    blocks *= STRENGTH / np.maximum(np.abs(blocks).max((1, 2), keepdims=True), 1e-6)
    level = _round_to_zero_sum(blocks)
    level = level.reshape(count, side // block, -1, block, block).transpose(0, 1, 3, 2, 4)
    return np.asarray(level.reshape(count, side, side), np.int16)


def _round_to_zero_sum(values: NDArray[Any]) -> NDArray[np.int16]:
    """Round (..., values) whose sums are zero so that they stay zero: largest remainders first."""
    whole = np.floor(values)
    missing = np.rint(-whole.sum(-1, keepdims=True))
    order = np.argsort(np.argsort(whole - values, -1, "stable"), -1, "stable")
    return np.asarray(whole + (order < missing), np.int16)


def glows(side: int, count: int) -> NDArray[np.int16]:
    """Return (2 * count, side, side): first for clutter, strewn about, then for a site, centred.

    They are equally bright on average; those of clutter differ more from one another.
    """
    random = np.random.default_rng((side, 2))
    centre = side / 2 + random.normal(0, STRAY * side, (2, count))
    centre = np.concatenate([random.uniform(0, side, (2, count)), centre], 1)  # (y and x, glows)
    varies = np.repeat([CLUTTER_VARIES, SITE_VARIES], count)
    peak = GLOW * (1 + varies * random.uniform(-1, 1, 2 * count))
    away = np.abs(np.arange(side) + 0.5 - centre[..., None])
    away = np.minimum(away, side - away)  # what leaves the box on one side enters on the other
    bell = np.exp(-((away / (GLOW_WIDTH * side)) ** 2) / 2)  # (y and x, glows, side)
    bright = peak[:, None, None] * bell[0, :, :, None] * bell[1, :, None, :]
    return np.asarray(np.rint(bright), np.int16)
