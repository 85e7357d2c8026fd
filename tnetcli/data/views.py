"""Augmented views of training images, read lazily."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tnetcli.data.augment import Blur, Jitter, Pose, as_window, draw_jitter, draw_pose, overlap
from tnetcli.data.config import AugmentConfig
from tnetcli.data.statistics import finite, read_small
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Box, Cost, Pixels, Reader
from tnetcli.readers.handles import ForkSafeLock
from tnetcli.readers.resample import LEAST_SHARE, round_within

SMALL_SIDE = 64  # pixels of the look that the mean of an image is taken from
LEAST_SIGMA = 0.1  # a blur of less changes nothing
LEAST_WEIGHT = 0.5  # of valid pixels around a sample: its edge stays where it is
Mask = NDArray[np.bool_]


def augment(
    reader: Reader,
    augmentation: AugmentConfig,
    seed: int,
    *,
    value_range: tuple[float, float] | None = None,
) -> Reader:
    """Return a reader over the image changed by chance, or the reader itself if nothing changes.

    The same seed gives the same changes. `value_range` is what brightness is a part of and black
    is the lower end of; by itself all that integers can hold.
    """
    random = np.random.default_rng(seed)
    pose = draw_pose(augmentation, reader.size, random)
    limits = value_range or (0.0, 1.0)
    if value_range is None and augmentation.colour:
        limits = _limits(reader.dtype)
    jitter = draw_jitter(augmentation, len(reader.bands), limits, random)
    sigma = augmentation.blur * float(random.random())
    blur = Blur(sigma) if sigma > LEAST_SIGMA else None
    unmoved = Pose(Box(0, 0, reader.size.width, reader.size.height))
    if pose == unmoved and jitter is None and blur is None:
        return reader
    return Augmented(reader, pose, jitter, blur)


def move_boxes(reader: Reader, boxes: Sequence[Window]) -> tuple[Window, ...]:
    """Return where boxes of an image are in what `augment` made of it, and what is left of them."""
    return reader.pose.boxes(boxes) if isinstance(reader, Augmented) else tuple(boxes)


def _limits(dtype: np.dtype[Any]) -> tuple[float, float]:
    if dtype.kind == "f":
        raise ValueError("floats have no range of their own: give `value_range`")
    return float(np.iinfo(dtype).min), float(np.iinfo(dtype).max)


class Augmented(Reader):
    """A reader over an image in another pose and with other values; closing it closes the image.

    Where the pose crops, a pixel of a view across the edge of the crop shows what lies beyond too.
    """

    def __init__(
        self, image: Reader, pose: Pose, jitter: Jitter | None = None, blur: Blur | None = None
    ) -> None:
        self.name, self.path, self.info = image.name, image.path, pose.layout(image.info)
        self.pose = pose
        self._image, self._jitter, self._blur = image, jitter, blur
        crop = as_window(pose.crop)
        # What can be seen of the image, in its own pixels; the angle is not known to it.
        frame = crop if pose.angle else pose.window(Window.whole(pose.size))
        self._visible = overlap(crop, frame)
        narrow = self.dtype.itemsize <= 2 or self.dtype == np.float32
        self._float: type[np.floating[Any]] = np.float32 if narrow else np.float64
        self._before = None if jitter is None else jitter.before_contrast()
        self._centre: NDArray[np.float64] | None = None
        self._measuring = ForkSafeLock()

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_measuring"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._measuring = ForkSafeLock()

    @property
    def cost(self) -> Cost:
        """Return what has been decoded since the image was opened."""
        return self._image.cost

    def close(self) -> None:
        """Release every handle; reading afterwards is an error."""
        self._image.close()

    def read(self, window: Window, out_size: Size) -> Pixels:
        """Resample `window` to exactly `out_size`; see `Reader.read`."""
        pixels = self._read_in_pose(*self._grown(window, out_size))
        if pixels.values.dtype == self.dtype and self._jitter is None and self._blur is None:
            return pixels
        with np.errstate(invalid="ignore", over="ignore"):  # floats may be infinite
            return self._change_values(pixels)

    def estimate(self, window: Window, out_size: Size) -> int:
        """Return how many pixels `read` would decode at most, without reading."""
        measured = 0
        if self._before is not None and self._centre is None:
            bare = Augmented(self._image, self.pose)
            measured = bare.estimate(Window.whole(self.size), self.size.within(SMALL_SIDE))
        asked = self._asked(*self._grown(window, out_size))
        return measured + (0 if asked is None else self._image.estimate(*asked))

    def _grown(self, window: Window, out_size: Size) -> tuple[Window, Size]:
        """Return the window with as much around it as a blur needs."""
        if self._blur is None:
            return window, out_size
        reach = self._blur.reach
        x, y = (
            reach * window.width / out_size.width,
            reach * window.height / out_size.height,
        )
        grown = Window(window.left - x, window.top - y, window.width + 2 * x, window.height + 2 * y)
        return grown, Size(out_size.width + 2 * reach, out_size.height + 2 * reach)

    def _asked(self, window: Window, out_size: Size) -> tuple[Window, Size] | None:
        """Return what is read of the image for a window; None for one wholly outside."""
        if self._visible is None or overlap(window, Window.whole(self.size)) is None:
            return None
        if self.pose.angle:
            return self._around(window, out_size, self._visible)
        asked = self.pose.window(window)
        if overlap(asked, self._visible) is None:
            return None
        return asked, self.pose.turned_size(out_size)

    def _around(
        self, window: Window, out_size: Size, visible: Window
    ) -> tuple[Window, Size] | None:
        """Return the upright pixels of the image that a turned window is sampled from.

        They are as large as those of the view, but no smaller than the image's own, and lie as
        if the whole image was made of them: at full resolution they are the image's own.
        """
        step_x, step_y = window.width / out_size.width, window.height / out_size.height
        cosine = math.cos(math.radians(self.pose.angle))
        sine = math.sin(math.radians(self.pose.angle))
        wide = math.hypot(step_x * cosine, step_y * sine)
        high = math.hypot(step_x * sine, step_y * cosine)
        wide, high = (high, wide) if self.pose.across else (wide, high)
        wide, high = max(wide, 1.0), max(high, 1.0)
        x, y = self.pose.to_image(
            np.array([window.left, window.right, window.left, window.right]),
            np.array([window.top, window.top, window.bottom, window.bottom]),
        )
        columns = _pixels(x, wide, visible.left, visible.right)
        rows = _pixels(y, high, visible.top, visible.bottom)
        if not columns or not rows:
            return None
        asked = Window(
            columns.start * wide, rows.start * high, len(columns) * wide, len(rows) * high
        )
        return asked, Size(len(columns), len(rows))

    def _read_in_pose(self, window: Window, out_size: Size) -> Pixels:
        """Read a window as it is stored, in its place; floats where it was turned by an angle."""
        asked = self._asked(window, out_size)
        if asked is None or self._visible is None:
            shape = (out_size.height, out_size.width)
            empty = np.zeros((len(self.bands), *shape), self.dtype)
            return Pixels(empty, np.zeros(shape, np.bool_))
        pixels = _cut(self._image.read(*asked), *asked, self._visible)
        if not self.pose.angle:
            return Pixels(self.pose.turn(pixels.values), self.pose.turn(pixels.valid))
        sampled = self._sample(pixels, *asked, window, out_size)
        return _cut(sampled, window, out_size, Window.whole(self.size))

    def _sample(
        self, pixels: Pixels, asked: Window, size: Size, window: Window, out_size: Size
    ) -> Pixels:
        """Turn upright pixels by sampling between them, from the valid ones only."""
        x = window.left + (np.arange(out_size.width) + 0.5) * window.width / out_size.width
        y = window.top + (np.arange(out_size.height) + 0.5) * window.height / out_size.height
        x, y = self.pose.to_image(x[None, :], y[:, None])  # (height, width)
        # One row and column of nothing all round: what is farther away is nothing as well.
        values = np.pad(pixels.values.astype(self._float), ((0, 0), (1, 1), (1, 1)))
        weight = np.pad(pixels.valid.astype(self._float), 1)
        column, beside = _between((x - asked.left) * (size.width / asked.width), size.width)
        row, below = _between((y - asked.top) * (size.height / asked.height), size.height)
        stride = size.width + 2
        first = (row * stride + column).ravel()
        beside, below = (each.ravel().astype(self._float) for each in (beside, below))
        flat, seen = values.reshape(len(values), -1), weight.ravel()
        total = np.zeros((len(values), first.size), self._float)
        share = np.zeros(first.size, self._float)
        for offset, part in (
            (0, (1 - beside) * (1 - below)),
            (1, beside * (1 - below)),
            (stride, (1 - beside) * below),
            (stride + 1, beside * below),
        ):
            total += part * np.take(flat, first + offset, axis=1)
            share += part * np.take(seen, first + offset)
        valid = share >= LEAST_WEIGHT
        mean = np.divide(total, share, out=np.zeros_like(total), where=valid)
        shape = (out_size.height, out_size.width)
        return Pixels(mean.reshape(-1, *shape), valid.reshape(shape))

    def _change_values(self, pixels: Pixels) -> Pixels:
        values, valid = pixels.values.astype(self._float), pixels.valid
        if self._jitter is not None:
            values = self._jitter.apply(values, self._find_centre())
            values = np.where(valid, values, values.dtype.type(0))
        if self._blur is not None:
            reach = self._blur.reach
            values = self._blur.apply(values, valid)
            valid = np.ascontiguousarray(valid[reach:-reach, reach:-reach])
            values = np.where(valid, values, values.dtype.type(0))
        round_within(values, self.dtype)
        return Pixels(values.astype(self.dtype), valid)

    def _find_centre(self) -> NDArray[np.float64] | None:
        """Return the mean (bands,) of the whole image where contrast changes it, if it does."""
        if self._before is None:
            return None
        with self._measuring:
            if self._centre is None:
                pixels = read_small(Augmented(self._image, self.pose), SMALL_SIDE)
                known = pixels.values[:, finite(pixels)].astype(self._float)  # (bands, pixels)
                if not known.size:
                    known = np.zeros((len(self.bands), 1), self._float)
                changed = self._before.apply(known[:, None], None)
                self._centre = changed.mean(axis=(1, 2), dtype=np.float64)
            return self._centre


def _pixels(ends: NDArray[np.float64], step: float, low: float, high: float) -> range:
    """Return which pixels of `step` lie under a span and one around it, of those within limits."""
    first = math.floor(max(float(ends.min()), low) / step) - 1
    last = math.ceil(min(float(ends.max()), high) / step) + 1
    return range(max(first, math.floor(low / step)), min(last, math.ceil(high / step)))


def _between(
    position: NDArray[np.float64], count: int
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return the pixel before each position, counting the one of nothing, and how far past it."""
    past = np.clip(position + 0.5, 0.0, count + 1.0)
    index = np.minimum(past.astype(np.intp), count)
    return index, past - index


def _cut(pixels: Pixels, window: Window, out_size: Size, visible: Window) -> Pixels:
    """Take away the pixels of a view that lie wholly outside of what is visible."""
    rows = _reached(window.top, window.height, out_size.height, visible.top, visible.bottom)
    columns = _reached(window.left, window.width, out_size.width, visible.left, visible.right)
    if rows.all() and columns.all():
        return pixels
    inside = np.outer(rows, columns)
    values = np.where(inside, pixels.values, pixels.values.dtype.type(0))
    return Pixels(values, pixels.valid & inside)


def _reached(start: float, length: float, count: int, low: float, high: float) -> Mask:
    edges = start + np.arange(count + 1) * (length / count)
    shared = np.minimum(edges[1:], high) - np.maximum(edges[:-1], low)
    reached: Mask = shared > LEAST_SHARE * min(length / count, 1.0)
    return reached
