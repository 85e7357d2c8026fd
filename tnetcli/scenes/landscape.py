"""Landscapes composed of labelled tiles, gathered where they are looked at and never built."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tnetcli.geometry import Size, Window
from tnetcli.readers.area import AreaMean
from tnetcli.readers.base import Box
from tnetcli.readers.handles import ForkSafeLock
from tnetcli.readers.levels import CHUNK_SAMPLES
from tnetcli.readers.placement import chunks, place
from tnetcli.scenes.base import PIXEL, Scene
from tnetcli.scenes.composition import WHITE, Composer
from tnetcli.sections import Tiles

# A window shows the site if it has that much of it, or is filled that much by it.
LEAST_OF_SITE, LEAST_OF_WINDOW = 1 / 2, 1 / 4
AMBIGUOUS = -1


class LandscapeMaker(Composer):
    """Makes scenes of the tiles of one split, each wholly determined by its seed."""

    def scene(self, seed: int, *, training: bool, crowd: Tiles | None = None) -> "LandscapeScene":
        """Compose the scene of a seed; in training its brightness and colours vary.

        A `crowd` says how often a scene holds several sites, and which: of these scenes no label
        is true, they are for learning what tiles look like.
        """
        return LandscapeScene(self, seed, training, crowd)


class LandscapeScene(Scene):
    """A landscape that knows its label, its site, and the tiles under any window."""

    def __init__(
        self, maker: LandscapeMaker, seed: int, training: bool, crowd: Tiles | None = None
    ) -> None:
        self._made = (maker, seed, training, crowd)
        self._tiles = maker.tiles
        self._rules = maker.landscape
        self._kinds = len(maker.tile_classes)
        self.composition = composition = maker.compose(seed, training=training, crowd=crowd)
        side, (x, y) = maker.tiles.side, composition.shift
        boxes = []
        for _, site in composition.sites:
            width = float(site.width * side)
            left, top = float(site.left * side - x), float(site.top * side - y)
            boxes.append(Window(left, top, width, width))
        super().__init__(
            f"{maker.tiles.path}#{maker.split}-{seed}",
            Size(self._rules.size, self._rules.size),
            label=composition.label,
            boxes=boxes,
            bands=maker.tiles.bands,
        )
        # Of tiles of two pixels half a tile is still a whole pixel; levels above straddle tiles.
        self._last_gathered = min(len(maker.tiles.levels) - 2, len(self.layout.levels) - 1)
        self._coarse: list[NDArray[np.uint8]] | None = None
        self._making = ForkSafeLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return LandscapeScene, self._made

    def draw(self, level: int, box: Box) -> NDArray[Any]:
        """Return (height, width, bands) of the pixels of a level.

        A pixel in which the scene ends shows all of its tile, also what lies beyond.
        """
        if level <= self._last_gathered:
            return self._shade(self._gather(level, box))
        stored = self._averaged()[level - self._last_gathered - 1]
        return self._shade(stored[box.top : box.bottom, box.left : box.right])

    def _gather(self, level: int, box: Box) -> NDArray[np.uint8]:
        """Take each pixel from its tile, turned as it lies."""
        made, tiles = self.composition, self._tiles.levels[level]
        side = int(tiles.shape[1])
        x, y = made.shift[0] >> level, made.shift[1] >> level
        left, top = (box.left + x) // side, (box.top + y) // side
        right, bottom = (box.right + x - 1) // side + 1, (box.bottom + y - 1) // side + 1
        within = slice(top, bottom), slice(left, right)
        # The pixel (row, column) of a turned tile is number start + down * row + across * column.
        start, down, across = _turned(side)[:, made.turns[within]]  # each (rows, columns) of tiles
        start = start + made.tiles[within].astype(np.intp) * side**2
        columns = slice(box.left + x - left * side, box.right + x - left * side)
        rows = slice(box.top + y - top * side, box.bottom + y - top * side)
        inner = np.arange(side)
        beside = np.tile(inner, right - left)[columns]
        down, across, start = (
            np.repeat(each, side, 1)[:, columns] for each in (down, across, start)
        )  # each (tile rows, width)
        across *= beside
        across += start
        index = down[:, None] * inner[:, None]  # (tile rows, side, width)
        index += across[:, None]
        flat = tiles.reshape(-1, tiles.shape[3])
        index = index.reshape(-1, box.width)[rows]
        taken: NDArray[np.uint8] = flat.take(index, axis=0)
        return taken

    def _shade(self, values: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return brighter or darker values, as far as training wants it."""
        gain = self.composition.gain
        if gain is None:
            return values
        height, width, bands = values.shape
        lines = np.multiply(
            values.reshape(height, width * bands), np.tile(gain, width), dtype=np.float32
        )
        lines += np.float32(self.composition.offset)
        np.rint(lines, out=lines)
        np.clip(lines, 0, WHITE, out=lines)
        return lines.astype(np.uint8).reshape(values.shape)

    def _averaged(self) -> Sequence[NDArray[np.uint8]]:
        """Return the levels that are too coarse to be gathered, averaged once and kept."""
        with self._making:
            if self._coarse is None:
                self._coarse = self._average()
            return self._coarse

    def _average(self) -> list[NDArray[np.uint8]]:
        source, *coarser = self.layout.levels[self._last_gathered :]
        means = []
        for level in coarser:
            size, scale = level.size, level.scale_x
            all_of_it = place(Window(0, 0, size.width * scale, size.height * scale), source, size)
            assert all_of_it is not None
            means.append(AreaMean(all_of_it, len(self.bands), self.dtype))
        whole = Box(0, 0, source.size.width, source.size.height)
        for part in chunks(whole, PIXEL, CHUNK_SAMPLES // len(self.bands)):
            values = self._gather(self._last_gathered, part)
            for mean in means:
                mean.add(part, values, None)
        return [mean.finish().values.transpose(1, 2, 0).copy() for mean in means]

    def fractions(self, window: Window, cells: int) -> NDArray[np.float32]:
        """Return the share of each class of tiles in cells x cells parts of a window.

        (cells, cells, tile classes), of what is within the scene; zero where nothing is.
        """
        x, y = self.composition.shift
        first_row, rows = self._overlap(window.top, window.height, y, cells)
        first_column, columns = self._overlap(window.left, window.width, x, cells)
        last_row, last_column = first_row + rows.shape[1], first_column + columns.shape[1]
        kinds = self.composition.kinds[first_row:last_row, first_column:last_column]
        shares = np.zeros((cells, cells, self._kinds))
        for kind in np.flatnonzero(np.bincount(kinds.ravel())):
            shares[..., kind] = rows @ (kinds == kind) @ columns.T
        area = np.outer(rows.sum(1), columns.sum(1))[..., None]
        return np.divide(shares, area, out=np.zeros_like(shares), where=area > 0).astype(np.float32)

    def _overlap(
        self, start: float, length: float, shift: int, cells: int
    ) -> tuple[int, NDArray[np.float64]]:
        """Return the first tile along an axis and how much of it and the next each cell has."""
        edges = np.clip(start + length * np.arange(cells + 1) / cells, 0, self._rules.size)
        edges = (edges + shift) / self._tiles.side
        first, last = int(edges[0]), max(int(np.ceil(edges[-1])), int(edges[0]) + 1)
        tile = np.arange(first, last)
        covered = np.minimum(edges[1:, None], tile + 1) - np.maximum(edges[:-1, None], tile)
        return first, np.maximum(covered, 0)

    def shown(self, window: Window) -> int:
        """Return the number of the class that a window shows, -1 where that is hard to tell.

        A site's if the window has half of it or a quarter of the window is site; the empty class
        if the window has nothing of a site; numbers are those of `Landscape.classes`.
        """
        found, touched = set(), False
        for (label, _), site in zip(self.composition.sites, self.boxes, strict=True):
            width = min(site.right, window.right) - max(site.left, window.left)
            height = min(site.bottom, window.bottom) - max(site.top, window.top)
            if width <= 0 or height <= 0:
                continue
            touched, shared = True, width * height
            if (
                shared >= LEAST_OF_SITE * site.width * site.height
                or shared >= LEAST_OF_WINDOW * window.width * window.height
            ):
                found.add(label)
        if len(found) == 1:
            return self._rules.classes.index(found.pop())
        return AMBIGUOUS if touched or self._rules.empty is None else 0


@lru_cache
def _turned(side: int) -> NDArray[np.intp]:
    """Return the first pixel, the step down and the step across of each of 8 turns: (3, 8)."""
    plain = np.arange(side * side).reshape(side, side)
    turned = [np.rot90(each, turn) for each in (plain, plain[:, ::-1]) for turn in range(4)]
    first = [int(each[0, 0]) for each in turned]
    down = [int(each[1, 0] - each[0, 0]) for each in turned]
    across = [int(each[0, 1] - each[0, 0]) for each in turned]
    return np.array([first, down, across])
