"""Images whose pixels tell where they are, for tests of pages."""

from contextlib import contextmanager

import numpy as np


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
        """Return red, green and blue at a place, as floats."""
        red, green = 20 + 200 * x / self.width, 20 + 200 * y / self.height
        clipped = np.clip(red, 0, 255), np.clip(green, 0, 255)
        return *clipped, np.full_like(clipped[0], 90.0)


@contextmanager
def places(prediction):
    """Lend the pixels of an image that is nowhere."""
    yield Places(prediction.width, prediction.height)
