"""Scenes composed of labelled tiles."""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tnetcli.config import SPLITS
from tnetcli.data.config import LandscapeConfig, TilesConfig
from tnetcli.errors import RecipeError
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Block, Box, Cost, ImageInfo, Level
from tnetcli.readers.pyramid import LevelReader
from tnetcli.synth.tiles import TileSet

# A window shows a site if it holds this fraction of it, or is filled to this fraction by it.
LEAST_OF_SITE, LEAST_OF_WINDOW = 1 / 2, 1 / 4
AMBIGUOUS = -1
COARSEST = 64  # pixels along a side of the coarsest level, about
PIXEL = Size(1, 1)  # the block size: only the requested pixels are drawn
BAND_NAMES = {1: ("1",), 3: ("red", "green", "blue")}
FIELDS = (2, 4)  # least and most background classes in a scene
FIELD_POINTS = (3, 8)  # random points per side that a field is interpolated from
EDGE_NOISE = 0.15  # roughens the edges of fields
WHITE = 255
CONTRAST_SIDE = 8  # pixels a side of the tile level that contrast is measured on


@dataclass(frozen=True, slots=True, eq=False)
class Composition:
    """Which tile lies where; the scene starts `shift` pixels right of and below the first tile."""

    label: str
    kinds: NDArray[np.unsignedinteger[Any]]  # (rows, columns), indices into tile_classes
    tiles: NDArray[np.int32]  # (rows, columns), indices into the tile set
    turns: NDArray[np.uint8]  # (rows, columns), quarter turns; 4 more if mirrored first
    shift: tuple[int, int]  # x, y
    sites: tuple[tuple[str, Box], ...]  # class and place in tiles
    gain: NDArray[np.float32] | None = None  # (bands,)
    offset: float = 0.0


class LandscapeMaker:
    """Makes scenes from the tiles of one split; a seed gives the same scene every time."""

    def __init__(self, tiles: TileSet, split: str, landscape: LandscapeConfig) -> None:
        self.tiles = tiles
        self.split = split
        self.landscape = landscape
        self.tile_classes = (*landscape.background, *landscape.sites)
        known = [name for name in self.tile_classes if name in tiles.classes]
        self._members = [tiles.chosen(split, name) for name in known]
        found = {name for name, some in zip(known, self._members, strict=True) if len(some)}
        if missing := set(self.tile_classes) - found:
            raise RecipeError(
                f"`{tiles.path}` has no tiles of `{', '.join(sorted(missing))}` for {split}",
                hint=f"there are tiles of {', '.join(tiles.classes)}; index.csv assigns splits",
            )
        if landscape.size < tiles.side:
            raise RecipeError(
                f"a scene of `{landscape.size}` pixels a side is smaller than a tile",
                hint=f"tiles have {tiles.side} pixels a side: raise the size",
            )
        self._appearances: dict[int, NDArray[np.float32]] = {}
        self._similar: dict[tuple[int, int], NDArray[np.intp]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.tiles, self.split, self.landscape)

    def scene(
        self, seed: int, *, training: bool, crowd: TilesConfig | None = None
    ) -> "LandscapeScene":
        """Compose the scene of a seed; with `training`, brightness and colours vary.

        `crowd` gives the fraction of scenes with several sites. Those have no label; they are for
        tile pre-training.
        """
        return LandscapeScene(self, seed, training, crowd)

    def compose(self, seed: int, training: bool, crowd: TilesConfig | None = None) -> Composition:
        """Draw labels, shift, fields, sites, tiles and colours, in this order."""
        random = np.random.default_rng((SPLITS.index(self.split), seed))
        rules, side = self.landscape, self.tiles.side
        labels = self._labels(random, crowd)
        # At least one tile is completely inside the scene.
        half = side // 2 if rules.size >= side + side // 2 else 0
        shift = int(random.integers(2)) * half, int(random.integers(2)) * half
        kinds = self._fields(random, -(-(rules.size + half) // side))
        sites = [(label, self._site(random, shift)) for label in labels if label in rules.sites]
        for label, site in sites:
            within = slice(site.top, site.bottom), slice(site.left, site.right)
            kinds[within] = self.tile_classes.index(label)
        label = labels[0] if len(labels) == 1 else ""
        tiles = self._choose_tiles(random, kinds)
        turns = random.integers(8, size=kinds.shape, dtype=np.uint8)
        made = Composition(label, kinds, tiles, turns, shift, tuple(sites))
        if not training:
            return made
        gain = 1 + rules.gain * random.uniform(-1, 1)
        gains = gain * (1 + rules.channel_gain * random.uniform(-1, 1, self.tiles.bands))
        offset = WHITE * rules.offset * random.uniform(-1, 1)
        return replace(made, gain=gains.astype(np.float32), offset=offset)

    def _labels(self, random: np.random.Generator, crowd: TilesConfig | None) -> list[str]:
        """Return one label, or the classes of several sites."""
        rules = self.landscape
        if crowd is None:
            return [rules.classes[random.integers(len(rules.classes))]]
        chosen, count = rules.classes, 1
        if random.random() < crowd.crowded:
            chosen, count = rules.sites, int(random.integers(*crowd.sites, endpoint=True))
        weights = np.array([crowd.weights.get(name, 1.0) for name in chosen])
        drawn = random.choice(len(chosen), size=count, p=weights / weights.sum())
        return [chosen[number] for number in drawn]

    def _fields(self, random: np.random.Generator, side: int) -> NDArray[Any]:
        """Return (side, side) background classes: at each place the one with the largest noise."""
        rules = self.landscape
        least, most = (min(each, len(rules.background)) for each in FIELDS)
        count = random.integers(least, most, endpoint=True)
        kinds = np.zeros((side, side), np.min_scalar_type(len(self.tile_classes)))
        highest = np.full((side, side), -np.inf, np.float32)
        for kind in random.permutation(len(rules.background))[:count]:
            points = int(random.integers(*FIELD_POINTS, endpoint=True))
            weights = cubic_weights(side, points)
            field = weights @ random.standard_normal((points, points), np.float32) @ weights.T
            field += EDGE_NOISE * random.standard_normal((side, side), np.float32)
            wins = field > highest
            kinds[wins] = kind
            np.maximum(highest, field, out=highest)
        return kinds

    def _site(self, random: np.random.Generator, shift: tuple[int, int]) -> Box:
        """Return a random place for a site among the tiles that are completely inside the scene."""
        side, size = self.tiles.side, self.landscape.size
        firsts = [-(-each // side) for each in shift]
        counts = [(size + each) // side - first for each, first in zip(shift, firsts, strict=True)]
        tiles = int(random.integers(*self.landscape.site_tiles, endpoint=True))
        tiles = min(tiles, *counts)
        left, top = (
            first + int(random.integers(count - tiles, endpoint=True))
            for first, count in zip(firsts, counts, strict=True)
        )
        return Box(left, top, tiles, tiles)

    def _choose_tiles(self, random: np.random.Generator, kinds: NDArray[Any]) -> NDArray[np.int32]:
        """Return a tile for each place, from those most similar to a random one of their class."""
        anchors = random.integers([len(members) for members in self._members])
        counts = np.array([min(len(each), self.landscape.neighbours) for each in self._members])
        pools = np.zeros((len(counts), counts.max()), np.int32)
        for kind in np.flatnonzero(np.bincount(kinds.ravel())):
            pools[kind, : counts[kind]] = self._like(int(kind), int(anchors[kind]))
        return np.asarray(pools[kinds, random.integers(counts[kinds])])

    def _like(self, kind: int, anchor: int) -> NDArray[np.intp]:
        """Return the tiles of a class most similar to one of it, by mean colour and contrast."""
        if kind not in self._appearances:
            level = next(each for each in self.tiles.levels if each.shape[1] <= CONTRAST_SIDE)
            small = level[self._members[kind]].astype(np.float32)  # (members, side, side, bands)
            both = np.concatenate([small.mean((1, 2)), small.std((1, 2))], 1)
            self._appearances[kind] = both  # (members, 2 * bands)
        if (kind, anchor) not in self._similar:
            appearances = self._appearances[kind]
            distance = np.square(appearances - appearances[anchor]).sum(1)
            nearest = np.argsort(distance, kind="stable")[: self.landscape.neighbours]
            self._similar[kind, anchor] = self._members[kind][nearest]
        return self._similar[kind, anchor]


class LandscapeScene(LevelReader):
    """A scene that is drawn where it is read, with the true classes under any window.

    Every pixel is valid. `boxes` are the sites.
    """

    name = "scene"

    def __init__(
        self, maker: LandscapeMaker, seed: int, training: bool, crowd: TilesConfig | None = None
    ) -> None:
        self._made = (maker, seed, training, crowd)
        self._tiles = tiles = maker.tiles
        self._rules = maker.landscape
        self._kinds = len(maker.tile_classes)
        self.composition = composition = maker.compose(seed, training, crowd)
        self.path = f"{tiles.path}#{maker.split}-{seed}"
        self.label = composition.label
        side, (x, y) = tiles.side, composition.shift
        self.boxes = tuple(
            Window(float(at.left * side - x), float(at.top * side - y), width, width)
            for at, width in ((at, float(at.width * side)) for _, at in composition.sites)
        )
        size = Size(self._rules.size, self._rules.size)
        levels = [Level(size, 1.0, 1.0, PIXEL)]
        # Scenes start at half tiles, so that tiles need two pixels a side.
        for scale in (2**each for each in range(1, len(tiles.levels) - 1)):
            if size.width >= scale * COARSEST:
                smaller = Size(-(-size.width // scale), -(-size.height // scale))
                levels.append(Level(smaller, float(scale), float(scale), PIXEL, full=size))
        names = BAND_NAMES.get(tiles.bands, tuple(str(band + 1) for band in range(tiles.bands)))
        self.info = ImageInfo(tuple(levels), names, np.dtype("uint8"))
        self._start()
        self._closed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return LandscapeScene, self._made

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the image is closed")

    def close(self) -> None:
        """End reading; reading afterwards is an error."""
        self._closed = True

    def _obtain(self, level: int, box: Box) -> Block:
        return Block(self.draw(box, level), None, Cost(box.width * box.height))

    def draw(self, box: Box, level: int = 0) -> NDArray[np.uint8]:
        """Return (height, width, bands) of the pixels of `level` in `box`.

        A pixel that reaches past the edge of the scene is the mean over its whole tile area.
        """
        return self._shade(self._gather(level, box))

    def _gather(self, level: int, box: Box) -> NDArray[np.uint8]:
        """Take each pixel from its turned tile."""
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
        """Apply the gain and offset of training."""
        gain = self.composition.gain
        if gain is None:
            return values
        height, width, _ = values.shape
        lines = np.multiply(values.reshape(height, -1), np.tile(gain, width), dtype=np.float32)
        lines += np.float32(self.composition.offset)
        np.rint(lines, out=lines)
        np.clip(lines, 0, WHITE, out=lines)
        return lines.astype(np.uint8).reshape(values.shape)

    def fractions(self, window: Window, cells: int) -> NDArray[np.float32]:
        """Return the fraction of each tile class in cells x cells parts of a window.

        (cells, cells, tile classes), of the part inside the scene; zero where there is none.
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
        """Return the first tile along an axis, and the length of each tile in each cell."""
        edges = np.clip(start + length * np.arange(cells + 1) / cells, 0, self._rules.size)
        edges = (edges + shift) / self._tiles.side
        first, last = int(edges[0]), max(int(np.ceil(edges[-1])), int(edges[0]) + 1)
        tile = np.arange(first, last)
        covered = np.minimum(edges[1:, None], tile + 1) - np.maximum(edges[:-1, None], tile)
        return first, np.maximum(covered, 0)

    def shown(self, window: Window) -> int:
        """Return the index of the class that a window shows, or AMBIGUOUS.

        That of a site if the window holds half of it or is filled to a quarter by it; that of
        the empty class if it touches no site. Indices are into `LandscapeConfig.classes`.
        """
        found, touched = set(), False
        for (label, _), site in zip(self.composition.sites, self.boxes, strict=True):
            width = min(site.right, window.right) - max(site.left, window.left)
            height = min(site.bottom, window.bottom) - max(site.top, window.top)
            if width <= 0 or height <= 0:
                continue
            touched, shared = True, width * height
            least = LEAST_OF_SITE * site.width * site.height
            if shared >= min(least, LEAST_OF_WINDOW * window.width * window.height):
                found.add(label)
        if len(found) == 1:
            return self._rules.classes.index(found.pop())
        return AMBIGUOUS if touched or self._rules.empty is None else 0


@lru_cache
def _turned(side: int) -> NDArray[np.intp]:
    """Return the first pixel, the step down and the step across of each of 8 turns: (3, 8)."""
    plain = np.arange(side * side).reshape(side, side)
    turned = np.stack([np.rot90(each, n) for each in (plain, plain[:, ::-1]) for n in range(4)])
    first, down, across = turned[:, 0, 0], turned[:, 1, 0], turned[:, 0, 1]
    return np.stack([first, down - first, across - first])


@lru_cache(maxsize=64)
def cubic_weights(count: int, points: int) -> NDArray[np.float32]:
    """Return bicubic interpolation weights (count, points) from `points` to `count` places."""
    place = (np.arange(count) + 0.5) / count * points - 0.5
    weights = np.zeros((count, points))
    for step in range(-1, 3):
        point = np.floor(place) + step
        away = np.abs(place - point)
        near = 1.5 * away**3 - 2.5 * away**2 + 1
        far = -0.5 * away**3 + 2.5 * away**2 - 4 * away + 2
        inside = np.clip(point, 0, points - 1).astype(int)
        np.add.at(weights, (np.arange(count), inside), np.where(away <= 1, near, far))
    return weights.astype(np.float32)
