"""Random augmentation of an image, applied lazily to the windows that are read.

All windows of an image share one pose (crop, flips, turns, shift, rotation) and one colour change.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tnetcli.data.colour import Blur, Jitter, Mask, Values, draw_jitter
from tnetcli.data.config import AugmentConfig
from tnetcli.data.normalize import finite, read_small
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Box, Cost, ImageInfo, Level, Pixels, Reader, Resolution
from tnetcli.readers.resample import LEAST_SHARE, round_within

MAX_TRIES = 50  # to place a crop; then the whole image is kept
MEAN_SIDE = 64  # pixels a side of the copy that the mean of an image is taken from
MIN_WEIGHT = 0.5  # of valid pixels around a sample, so that edges stay in place
MIN_SIGMA = 0.1  # a weaker blur has no effect
Coordinates = NDArray[np.float64]


def augment(
    reader: Reader,
    config: AugmentConfig,
    seed: int,
    *,
    value_range: tuple[float, float] | None = None,
) -> Reader:
    """Return a randomly augmented view of an image, or the reader itself if nothing changes.

    The same seed gives the same changes. Brightness is a fraction of `value_range`, by default the
    range of the integer type; its lower end is black.
    """
    random = np.random.default_rng(seed)
    pose = draw_pose(config, reader.size, random)
    limits = value_range or (0.0, 1.0)
    if value_range is None and config.colour:
        if reader.dtype.kind == "f":
            raise ValueError("float images need a `value_range`")
        limits = float(np.iinfo(reader.dtype).min), float(np.iinfo(reader.dtype).max)
    jitter = draw_jitter(config, len(reader.bands), limits, random)
    sigma = config.blur * float(random.random())
    blur = Blur(sigma) if sigma > MIN_SIGMA else None
    unmoved = Pose(Box(0, 0, reader.size.width, reader.size.height))
    if pose == unmoved and jitter is None and blur is None:
        return reader
    return Augmented(reader, pose, jitter, blur)


def move_boxes(reader: Reader, boxes: Sequence[Window]) -> tuple[Window, ...]:
    """Return boxes of the original image in the coordinates of what `augment` returned."""
    return reader.pose.boxes(boxes) if isinstance(reader, Augmented) else tuple(boxes)


@dataclass(frozen=True, slots=True)
class Pose:
    """A crop of the image, then optionally transposed, flipped, shifted and rotated.

    `across` swaps rows and columns. `shift_x` and `shift_y` are whole pixels of the result, which
    has the size of the crop and is rotated by `angle` degrees about its centre.
    """

    crop: Box
    across: bool = False
    flip_x: bool = False
    flip_y: bool = False
    shift_x: int = 0
    shift_y: int = 0
    angle: float = 0.0

    @property
    def size(self) -> Size:
        """Return the size of the result."""
        return self.turned_size(Size(self.crop.width, self.crop.height))

    def turned_size(self, size: Size) -> Size:
        """Return a size of the result in the frame of the image, or the reverse."""
        return Size(size.height, size.width) if self.across else size

    def turn(self, array: Values) -> Values:
        """Return pixels (..., height, width) of the image in the orientation of the result."""
        if self.across:
            array = array.swapaxes(-1, -2)
        if self.flip_x:
            array = array[..., ::-1]
        if self.flip_y:
            array = array[..., ::-1, :]
        return np.ascontiguousarray(array)

    def to_image(self, x: Coordinates, y: Coordinates) -> tuple[Coordinates, Coordinates]:
        """Map points of the result to the image."""
        width, height = self.size.width, self.size.height
        x, y = _rotate(x - width / 2, y - height / 2, self.angle)
        x, y = x + width / 2 - self.shift_x, y + height / 2 - self.shift_y
        x, y = (width - x if self.flip_x else x), (height - y if self.flip_y else y)
        x, y = (y, x) if self.across else (x, y)
        return x + self.crop.left, y + self.crop.top

    def from_image(self, x: Coordinates, y: Coordinates) -> tuple[Coordinates, Coordinates]:
        """Map points of the image to the result."""
        width, height = self.size.width, self.size.height
        x, y = x - self.crop.left, y - self.crop.top
        x, y = (y, x) if self.across else (x, y)
        x, y = (width - x if self.flip_x else x), (height - y if self.flip_y else y)
        x, y = x + self.shift_x - width / 2, y + self.shift_y - height / 2
        x, y = _rotate(x, y, -self.angle)
        return x + width / 2, y + height / 2

    def window(self, window: Window) -> Window:
        """Map a window of the result to the image, ignoring the angle."""
        left, top = window.left - self.shift_x, window.top - self.shift_y
        if self.flip_x:
            left = self.size.width - left - window.width
        if self.flip_y:
            top = self.size.height - top - window.height
        if self.across:
            return Window(top + self.crop.left, left + self.crop.top, window.height, window.width)
        return Window(left + self.crop.left, top + self.crop.top, window.width, window.height)

    def boxes(self, boxes: Sequence[Window]) -> tuple[Window, ...]:
        """Map boxes of the image to bounding boxes in the result; drop those that are outside."""
        found = []
        for box in boxes:
            if (kept := overlap(box, as_window(self.crop))) is not None:
                x, y = self.from_image(*_corners(kept))
                left, top = float(x.min()), float(y.min())
                around = Window(left, top, float(x.max()) - left, float(y.max()) - top)
                found.append(overlap(around, Window.whole(self.size)))
        return tuple(box for box in found if box is not None)

    def layout(self, layout: ImageInfo) -> ImageInfo:
        """Return the layout of the result, which has no georeference."""
        microns = layout.microns_per_pixel
        if self.across and microns is not None:
            microns = Resolution(microns.y, microns.x, microns.source)
        return replace(
            layout,
            levels=tuple(map(self._level, layout.levels)),
            georeference=None,
            microns_per_pixel=microns,
            offset=(0, 0),
        )

    def _level(self, level: Level) -> Level:
        size, scale_x, scale_y = self.size, level.scale_x, level.scale_y
        if self.across:
            scale_x, scale_y = scale_y, scale_x
        small = Size(math.ceil(size.width / scale_x), math.ceil(size.height / scale_y))
        return Level(small, scale_x, scale_y, self.turned_size(level.block), full=size)


def _rotate(x: Coordinates, y: Coordinates, angle: float) -> tuple[Coordinates, Coordinates]:
    if angle == 0:
        return x, y
    cosine, sine = math.cos(math.radians(angle)), math.sin(math.radians(angle))
    return cosine * x - sine * y, sine * x + cosine * y


def _corners(window: Window) -> tuple[Coordinates, Coordinates]:
    left, top, right, bottom = window.box
    return np.array([left, right, left, right]), np.array([top, top, bottom, bottom])


def as_window(box: Box) -> Window:
    """Return whole pixels as a window."""
    return Window(float(box.left), float(box.top), float(box.width), float(box.height))


def overlap(one: Window, other: Window) -> Window | None:
    """Return the intersection of two windows, or None."""
    left, top = max(one.left, other.left), max(one.top, other.top)
    width, height = min(one.right, other.right) - left, min(one.bottom, other.bottom) - top
    return Window(left, top, width, height) if width > 0 and height > 0 else None


def draw_pose(config: AugmentConfig, size: Size, random: np.random.Generator) -> Pose:
    """Draw a pose; every setting uses its own numbers, so that one does not affect another."""
    flips, turn, angle = random.random(2) < 0.5, int(random.integers(4)), random.uniform(-1, 1)
    shifts, tries = random.uniform(-1, 1, 2), random.random((MAX_TRIES, 4))
    crop = Box(0, 0, size.width, size.height)
    if config.crop is not None:
        crop = _draw_crop(config.crop, config.aspect, size, tries)
    turn = turn if config.turns else 0
    flip_x = config.flip != "none" and bool(flips[0])
    flip_y = config.flip == "both" and bool(flips[1])
    # A quarter turn is a transposition and a flip; half a turn is two flips.
    pose = Pose(
        crop,
        across=turn in (1, 3),
        flip_x=flip_x != (turn in (2, 3)),
        flip_y=flip_y != (turn in (1, 2)),
        angle=config.rotate * float(angle),
    )
    return replace(
        pose,
        shift_x=round(config.shift * float(shifts[0]) * pose.size.width),
        shift_y=round(config.shift * float(shifts[1]) * pose.size.height),
    )


def _draw_crop(
    areas: tuple[float, float],
    aspects: tuple[float, float],
    size: Size,
    tries: NDArray[np.float64],
) -> Box:
    """Return the first drawn box that fits into the image, or the whole image."""
    for part, shape, at_x, at_y in tries.tolist():
        area = (areas[0] + (areas[1] - areas[0]) * part) * size.pixels
        aspect = aspects[0] + (aspects[1] - aspects[0]) * shape
        width, height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 1 <= width <= size.width and 1 <= height <= size.height:
            left = int(at_x * (size.width - width + 1))
            top = int(at_y * (size.height - height + 1))
            return Box(left, top, width, height)
    return Box(0, 0, size.width, size.height)


class Augmented(Reader):
    """A reader of an image in a pose, with changed values; closing it closes the image.

    A pixel of a view that straddles the edge of the crop includes pixels beyond the edge.
    """

    def __init__(
        self, image: Reader, pose: Pose, jitter: Jitter | None = None, blur: Blur | None = None
    ) -> None:
        self.name, self.path, self.info = image.name, image.path, pose.layout(image.info)
        self.pose = pose
        self._image, self._jitter, self._blur = image, jitter, blur
        crop = as_window(pose.crop)
        # In pixels of the image, without the angle.
        frame = crop if pose.angle else pose.window(Window.whole(pose.size))
        self._visible = overlap(crop, frame)
        narrow = self.dtype.itemsize <= 2 or self.dtype == np.float32
        self._float: type[np.floating[Any]] = np.float32 if narrow else np.float64
        self._before = None if jitter is None else jitter.before_contrast()
        self._centre: NDArray[np.float64] | None = None

    @property
    def cost(self) -> Cost:
        """Return the cost of the underlying image since it was opened."""
        return self._image.cost

    def close(self) -> None:
        """Close the underlying image."""
        self._image.close()

    def read(self, window: Window, out_size: Size) -> Pixels:
        """Resample `window` to exactly `out_size`; see `Reader.read`."""
        pixels = self._read_in_pose(*self._grown(window, out_size))
        if pixels.values.dtype == self.dtype and self._jitter is None and self._blur is None:
            return pixels
        values, valid = pixels.values.astype(self._float), pixels.valid
        with np.errstate(invalid="ignore", over="ignore"):  # floats may be infinite
            if self._jitter is not None:
                values = self._jitter.apply(values, self._find_centre())
                values = np.where(valid, values, values.dtype.type(0))
            if self._blur is not None:
                values, valid = self._blur.apply(values, valid)
            round_within(values, self.dtype)
            return Pixels(values.astype(self.dtype), valid)

    def estimate(self, window: Window, out_size: Size) -> int:
        """Return how many pixels `read` would decode at most, without reading."""
        measured = 0
        if self._before is not None and self._centre is None:
            bare = Augmented(self._image, self.pose)
            measured = bare.estimate(Window.whole(self.size), self.size.within(MEAN_SIDE))
        asked = self._asked(*self._grown(window, out_size))
        return measured + (0 if asked is None else self._image.estimate(*asked))

    def _grown(self, window: Window, out_size: Size) -> tuple[Window, Size]:
        """Return the window with the margin that the blur needs."""
        if self._blur is None:
            return window, out_size
        reach = self._blur.reach
        x, y = reach * window.width / out_size.width, reach * window.height / out_size.height
        grown = Window(window.left - x, window.top - y, window.width + 2 * x, window.height + 2 * y)
        return grown, Size(out_size.width + 2 * reach, out_size.height + 2 * reach)

    def _asked(self, window: Window, out_size: Size) -> tuple[Window, Size] | None:
        """Return the window and size to read from the image; None if the window is outside."""
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
        """Return the unrotated pixels of the image that a rotated window is sampled from.

        They are as large as pixels of the view but never smaller than the image's own, and lie on
        one grid over the whole image.
        """
        step_x, step_y = window.width / out_size.width, window.height / out_size.height
        cosine = math.cos(math.radians(self.pose.angle))
        sine = math.sin(math.radians(self.pose.angle))
        wide = math.hypot(step_x * cosine, step_y * sine)
        high = math.hypot(step_x * sine, step_y * cosine)
        wide, high = (high, wide) if self.pose.across else (wide, high)
        wide, high = max(wide, 1.0), max(high, 1.0)
        x, y = self.pose.to_image(*_corners(window))
        columns = _pixels(x, wide, visible.left, visible.right)
        rows = _pixels(y, high, visible.top, visible.bottom)
        if not columns or not rows:
            return None
        asked = Window(
            columns.start * wide, rows.start * high, len(columns) * wide, len(rows) * high
        )
        return asked, Size(len(columns), len(rows))

    def _read_in_pose(self, window: Window, out_size: Size) -> Pixels:
        """Read a window in the pose; rotated values are floats."""
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
        """Rotate pixels by bilinear interpolation over the valid ones."""
        x = window.left + (np.arange(out_size.width) + 0.5) * window.width / out_size.width
        y = window.top + (np.arange(out_size.height) + 0.5) * window.height / out_size.height
        x, y = self.pose.to_image(x[None, :], y[:, None])  # (height, width)
        # A border of invalid pixels; positions farther out are clamped to it.
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
        for down, right in itertools.product((0, 1), (0, 1)):
            part = np.abs(1 - right - beside) * np.abs(1 - down - below)
            total += part * np.take(flat, first + stride * down + right, axis=1)
            share += part * np.take(seen, first + stride * down + right)
        valid = share >= MIN_WEIGHT
        mean = np.divide(total, share, out=np.zeros_like(total), where=valid)
        shape = (out_size.height, out_size.width)
        return Pixels(mean.reshape(-1, *shape), valid.reshape(shape))

    def _find_centre(self) -> NDArray[np.float64] | None:
        """Return the mean (bands,) of the image as the contrast step sees it; None without one."""
        if self._before is not None and self._centre is None:
            # Level 1 is read first, by one thread.
            pixels = read_small(Augmented(self._image, self.pose), MEAN_SIDE)
            known = pixels.values[:, finite(pixels)].astype(self._float)  # (bands, pixels)
            if not known.size:
                known = np.zeros((len(self.bands), 1), self._float)
            changed = self._before.apply(known[:, None], None)
            self._centre = changed.mean(axis=(1, 2), dtype=np.float64)
        return self._centre


def _pixels(ends: NDArray[np.float64], step: float, low: float, high: float) -> range:
    """Return the indices of pixels of size `step` under a span and one beyond, within limits."""
    first = math.floor(max(float(ends.min()), low) / step) - 1
    last = math.ceil(min(float(ends.max()), high) / step) + 1
    return range(max(first, math.floor(low / step)), min(last, math.ceil(high / step)))


def _between(
    position: NDArray[np.float64], count: int
) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
    """Return the index of the padded pixel before each position, and the distance past it."""
    past = np.clip(position + 0.5, 0.0, count + 1.0)
    index = np.minimum(past.astype(np.intp), count)
    return index, past - index


def _cut(pixels: Pixels, window: Window, out_size: Size, visible: Window) -> Pixels:
    """Invalidate the pixels of a view that lie wholly outside the visible window."""
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
