"""Imagery made for tests."""

from contextlib import contextmanager

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
    """Pixels encode their position in 256 shades of x and y, and the number of the read."""

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
    """An image with reads that fail."""

    def __init__(self, fails):
        self.fails = fails
        self.reads = 0

    def show(self, box, width, height):
        self.reads += 1
        if self.fails(self.reads):
            raise ImageError("a tile is damaged", hint="copy it again")
        return super().show(box, width, height)


class Places:
    """Red grows with the column and green with the row, over the whole image."""

    def __init__(self, width, height, hole=None):
        self.width, self.height, self.hole = width, height, hole
        self.asked = []

    def show(self, box, width, height):
        self.asked.append((box, width, height))
        x0, y0, x1, y1 = box
        x = x0 + (np.arange(width) + 0.5) * (x1 - x0) / width
        y = y0 + (np.arange(height) + 0.5) * (y1 - y0) / height
        pixels = np.zeros((height, width, 4), np.uint8)
        pixels[..., :3] = np.moveaxis(np.array(self.colour(*np.meshgrid(x, y))), 0, -1).round()
        inside = ((y >= 0) & (y < self.height))[:, None] & ((x >= 0) & (x < self.width))
        if self.hole is not None:
            left, top, right, bottom = self.hole
            inside &= ~(((y >= top) & (y < bottom))[:, None] & ((x >= left) & (x < right)))
        pixels[..., 3] = 255 * inside
        pixels[~inside] = 0
        return pixels

    def colour(self, x, y):
        """Return red, green and blue at a position, as floats."""
        red, green = 20 + 200 * x / self.width, 20 + 200 * y / self.height
        clipped = np.clip(red, 0, 255), np.clip(green, 0, 255)
        return *clipped, np.full_like(clipped[0], 90.0)


@contextmanager
def places(prediction):
    """Yield the pixels of an image without a file."""
    yield Places(prediction.width, prediction.height)
