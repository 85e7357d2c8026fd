"""What lies where in a landscape: fields of nature, and one site or none hidden in them."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tnetcli.errors import ManifestError, RecipeError
from tnetcli.readers.base import Box
from tnetcli.scenes.tiles import TileSet
from tnetcli.sections import Landscape, Tiles
from tnetcli.sections.fields import SPLITS

WHITE = 255
CONTRAST_SIDE = 8  # pixels a side of the small tile that contrast is measured on


@dataclass(frozen=True, slots=True, eq=False)
class Composition:
    """Which tile lies where; the scene begins `shift` pixels right of and below the first tile."""

    label: str
    kinds: NDArray[np.unsignedinteger[Any]]  # (rows, columns), into the composer's tile_classes
    tiles: NDArray[np.int32]  # (rows, columns), into the tile set
    turns: NDArray[np.uint8]  # (rows, columns), quarter turns; 4 more if mirrored before
    shift: tuple[int, int]  # x, y
    sites: tuple[tuple[str, Box], ...]  # class and place in tiles; several only where it is crowded
    gain: NDArray[np.float32] | None  # (bands,)
    offset: float = 0.0


class Composer:
    """Composes landscapes of the tiles of one split, each wholly determined by its seed."""

    def __init__(self, tiles: TileSet, split: str, landscape: Landscape) -> None:
        self.tiles = tiles
        self.split = split
        self.landscape = landscape
        self.tile_classes = (*landscape.background, *landscape.sites)
        self._check()
        self._members = [tiles.chosen(split, name) for name in self.tile_classes]
        for name, members in zip(self.tile_classes, self._members, strict=True):
            if not len(members):
                raise ManifestError(
                    f"`{tiles.path}` has no tile of `{name}` for {split}",
                    hint="add tiles, or say in index.csv which are for what",
                )
        self._looks: dict[int, NDArray[np.float32]] = {}
        self._alike: dict[tuple[int, int], NDArray[np.intp]] = {}

    def _check(self) -> None:
        missing = [name for name in self.tile_classes if name not in self.tiles.classes]
        if missing:
            raise RecipeError(
                f"`{self.tiles.path}` has no tiles of `{', '.join(missing)}`",
                hint=f"there are: {', '.join(self.tiles.classes)}",
            )
        if self.landscape.size < self.tiles.side:
            raise RecipeError(
                f"a scene of `{self.landscape.size}` pixels a side is smaller than a tile",
                hint=f"tiles have {self.tiles.side}: raise data.landscape.size",
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.tiles, self.split, self.landscape)

    def compose(self, seed: int, *, training: bool, crowd: Tiles | None = None) -> Composition:
        """Decide what lies where, in this order: labels, shift, fields, sites, tiles, colours."""
        random = np.random.default_rng((SPLITS.index(self.split), seed))
        rules, side = self.landscape, self.tiles.side
        labels = self._labels(random, crowd)
        # One tile at least is seen as a whole.
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
        if not training:
            return Composition(label, kinds, tiles, turns, shift, tuple(sites), None)
        gain = 1 + rules.gain * random.uniform(-1, 1)
        gains = gain * (1 + rules.channel_gain * random.uniform(-1, 1, self.tiles.bands))
        offset = WHITE * rules.offset * random.uniform(-1, 1)
        return Composition(
            label, kinds, tiles, turns, shift, tuple(sites), gains.astype(np.float32), offset
        )

    def _labels(self, random: np.random.Generator, crowd: Tiles | None) -> list[str]:
        """Return one label, or the classes of several sites."""
        rules = self.landscape
        if crowd is None:
            return [rules.classes[random.integers(len(rules.classes))]]
        chosen, count = rules.classes, 1
        if random.random() < crowd.crowded:
            chosen, count = rules.sites, int(random.integers(*crowd.sites, endpoint=True))
        chances = np.array([crowd.chances.get(name, 1.0) for name in chosen])
        drawn = random.choice(len(chosen), size=count, p=chances / chances.sum())
        return [chosen[number] for number in drawn]

    def _fields(self, random: np.random.Generator, side: int) -> NDArray[Any]:
        """Return (side, side) background classes: where noise of a class is the largest, it is."""
        rules = self.landscape
        most = min(rules.fields[1], len(rules.background))
        count = random.integers(rules.fields[0], most, endpoint=True)
        kinds = np.zeros((side, side), np.min_scalar_type(len(self.tile_classes)))
        highest = np.full((side, side), -np.inf, np.float32)
        for kind in random.permutation(len(rules.background))[:count]:
            points = int(random.integers(*rules.field_points, endpoint=True))
            weights = cubic_weights(side, points)
            field = weights @ random.standard_normal((points, points), np.float32) @ weights.T
            field += rules.noise * random.standard_normal((side, side), np.float32)
            wins = field > highest
            kinds[wins] = kind
            np.maximum(highest, field, out=highest)
        return kinds

    def _site(self, random: np.random.Generator, shift: tuple[int, int]) -> Box:
        """Return a place among the tiles that are seen as a whole, as far as there are enough."""
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
        """Return a tile for each place, of those that look like the anchor of their class."""
        anchors = random.integers([len(members) for members in self._members])
        counts = np.array([min(len(each), self.landscape.neighbours) for each in self._members])
        pools = np.zeros((len(counts), counts.max()), np.int32)
        for kind in np.flatnonzero(np.bincount(kinds.ravel())):
            pools[kind, : counts[kind]] = self._like(int(kind), int(anchors[kind]))
        return np.asarray(pools[kinds, random.integers(counts[kinds])])

    def _like(self, kind: int, anchor: int) -> NDArray[np.intp]:
        """Return the tiles of a class nearest to one of it, by mean colour and coarse contrast."""
        found = self._alike.get((kind, anchor))
        if found is None:
            looks = self._looks_of(kind)
            distance = np.square(looks - looks[anchor]).sum(1)
            nearest = np.argsort(distance, kind="stable")[: self.landscape.neighbours]
            found = self._alike[kind, anchor] = self._members[kind][nearest]
        return found

    def _looks_of(self, kind: int) -> NDArray[np.float32]:
        found = self._looks.get(kind)
        if found is None:
            level = next(each for each in self.tiles.levels if each.shape[1] <= CONTRAST_SIDE)
            small = level[self._members[kind]].astype(np.float32)  # (members, side, side, bands)
            looks = np.concatenate([small.mean((1, 2)), small.std((1, 2))], 1)
            found = self._looks[kind] = looks  # (members, 2 * bands)
        return found


@lru_cache(maxsize=64)
def cubic_weights(count: int, points: int) -> NDArray[np.float32]:
    """Return what each of `points` adds to each of `count` in between: (count, points), bicubic."""
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
