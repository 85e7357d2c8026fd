"""Imagery made for tests, and ways to find things in a figure again."""

import numpy as np

from tnetcli.errors import ImageError

MEADOW = (10, 200, 60)  # no colour of ours


class Meadow:
    """An image of one colour."""

    def show(self, box, width, height):
        shown = np.full((height, width, 4), 255, np.uint8)
        shown[..., :3] = MEADOW
        return shown


class Coordinates:
    """An image whose pixels tell where they are: 256 shades of x and y, and which read it was."""

    def __init__(self, size):
        self.size = size
        self.shown = []

    def show(self, box, width, height):
        shown = np.full((height, width, 4), 255, np.uint8)
        x = box[0] + (np.arange(width) + 0.5) * (box[2] - box[0]) / width
        y = box[1] + (np.arange(height) + 0.5) * (box[3] - box[1]) / height
        shown[..., 0] = 255 * x[None] / self.size[0]
        shown[..., 1] = 255 * y[:, None] / self.size[1]
        shown[..., 2] = len(self.shown)
        self.shown.append((box, shown))
        return shown


class Damaged(Meadow):
    """An image of which some reads fail."""

    def __init__(self, fails):
        self.fails = fails
        self.reads = 0

    def show(self, box, width, height):
        self.reads += 1
        if self.fails(self.reads):
            raise ImageError("a tile is damaged", hint="copy it again")
        return super().show(box, width, height)


def find(picture, colour):
    """Return the first and last column and row of pixels of this colour."""
    rows, columns = np.nonzero((picture == colour).all(axis=2))
    assert len(rows), f"no pixel is {colour}"
    return columns.min(), rows.min(), columns.max() + 1, rows.max() + 1


def find_pixels(picture, part):
    """Return the only place (x, y) where these (height, width, 3) pixels are."""
    height, width = part.shape[:2]
    found = []
    for y, x in zip(*np.nonzero((picture == part[0, 0]).all(axis=2)), strict=True):
        if np.array_equal(picture[y : y + height, x : x + width], part):
            found.append((int(x), int(y)))
    assert len(found) == 1, f"{len(found)} places"
    return found[0]
