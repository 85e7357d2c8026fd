"""Make labelled images with something hidden in them, and a manifest that says where it is."""

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import ValidationError

from tnetcli.errors import OutputError, UsageError
from tnetcli.geometry import Window
from tnetcli.readers.handles import content_stamp
from tnetcli.scenes.base import Scene
from tnetcli.scenes.digits import DigitMaker, Digits, check_size
from tnetcli.scenes.glyphs import load_glyphs
from tnetcli.scenes.landscape import LandscapeMaker
from tnetcli.scenes.tiles import TileSet, read_tiles
from tnetcli.sections.data import Landscape
from tnetcli.sections.fields import SPLITS, Split
from tnetcli.wording import counted, reason, shorten
from tnetcli.workflows.scene_files import (
    ENDINGS,
    IMAGES,
    MANIFEST,
    Advance,
    check_format,
    prepare_folder,
    write_image,
    write_manifest,
)

__all__ = ["Digits", "Made", "Order", "TileScenes", "synthesise"]

SCHEMA = "tnet.synth/1"
# EuroSAT's classes, for whoever has those tiles.
SITES = ("Industrial", "Residential", "Highway", "River")
BACKGROUND = (
    *("Forest", "Pasture", "AnnualCrop"),
    *("HerbaceousVegetation", "PermanentCrop", "SeaLake"),
)
READING = 0.05  # of the work, about
SEEDS_APART = 1000  # seeds of one image, until its scene has the label that is its turn


@dataclass(frozen=True, slots=True)
class TileScenes:
    """Scenes of labelled tiles; None stands for EuroSAT's classes, or the rest."""

    path: str
    size: int
    sites: tuple[str, ...] | None = None
    background: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_size(self.size)


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be made; `scenes` of digits or of tiles."""

    scenes: Digits | TileScenes
    images: int
    seed: int = 0
    format: Literal["cog", "png"] = "cog"
    split: tuple[float, ...] = (0.7, 0.15, 0.15)  # parts for train, validation and test
    glyphs: str | None = None  # MNIST, or None: drawn

    def __post_init__(self) -> None:
        whole = len(self.split) == len(SPLITS) and abs(sum(self.split) - 1) < 1e-6
        if not whole or min(self.split) < 0:
            raise UsageError(
                "--split is not three parts of 1: "
                f"`{shorten(','.join(f'{part:g}' for part in self.split))}`",
                hint="for train, validation and test: --split 0.7,0.15,0.15",
            )

    @property
    def counts(self) -> tuple[int, ...]:
        """Return how many images each split gets: the largest remainders are rounded up."""
        exact = np.array(self.split) * self.images
        counts = np.floor(exact + 1e-9).astype(int)
        order = np.argsort(counts - exact, kind="stable")
        counts[order[: self.images - counts.sum()]] += 1
        return tuple(counts.tolist())

    def described(self) -> dict[str, Any]:
        """Return all that decides what the images are like, for JSON; no place on this machine."""
        source = self.scenes.path if isinstance(self.scenes, TileScenes) else self.glyphs
        kind = "tiles" if isinstance(self.scenes, TileScenes) else "digits"
        record = {"schema": SCHEMA, "kind": kind, **dataclasses.asdict(self)}
        record["scenes"].pop("path", None)
        del record["glyphs"]
        if source is not None:
            ((_, files, size, _),) = content_stamp([source])
            record["source"] = {
                "name": os.path.basename(os.path.abspath(source)), "files": files, "bytes": size
            }  # fmt: skip
        plain: dict[str, Any] = json.loads(json.dumps(record))  # as it will be read again
        return plain


@dataclass(frozen=True, slots=True)
class Made:
    """What there is now."""

    manifest: Path
    made: int
    kept: int
    labels: Mapping[str, int]
    splits: Mapping[str, int]

    def __str__(self) -> str:
        kept = f", {self.kept} of them kept" if self.kept else ""
        labels = ", ".join(f"{label} ({count})" for label, count in sorted(self.labels.items()))
        splits = ", ".join(f"{count} {split}" for split, count in self.splits.items())
        images = self.made + self.kept
        return (
            f"{counted(images, 'image')}{kept}; {splits}; "
            f"{counted(len(self.labels), 'class', 'classes')}: {labels}; {self.manifest}"
        )


@dataclass(frozen=True, slots=True)
class Planned:
    """One image to be: its number, from 1, its split, its label and where seeds begin."""

    number: int
    split: Split
    label: str
    seed: int

    @property
    def name(self) -> str:
        """Return what the image is called."""
        return f"{self.number:05d}"


def synthesise(
    out: Path, order: Order, *, overwrite: bool = False, advance: Advance = lambda fraction: None
) -> Made:
    """Make the images that are not there yet, and the manifest of all.

    Each image appears whole or not at all. A folder made with other settings is refused.
    """
    check_format(order.format, order.scenes.size)
    maker = _Maker(order, lambda fraction: advance(READING * fraction))
    described, placed = order.described(), isinstance(order.scenes, TileScenes)
    try:
        prepare_folder(out, described, overwrite=overwrite)
        rows, made = [], 0
        for planned in _plan(order, maker.classes):
            scene = maker.scene(planned)
            path = out / IMAGES / f"{planned.name}{ENDINGS[order.format]}"
            rows.append(_row(planned, scene, f"{IMAGES}/{path.name}"))
            start = READING + (1 - READING) * (planned.number - 1) / order.images

            def report(fraction: float, start: float = start) -> None:
                advance(start + (1 - READING) * fraction / order.images)

            if not path.exists():
                write_image(scene, path, report, placed=placed)
                made += 1
            report(1.0)
        write_manifest(out / MANIFEST, rows)
    except OSError as error:
        problem = f"cannot write to `{out}`: {reason(error)}"
        raise OutputError(problem, hint="is there space left, and may you write there?") from error
    labels, splits = Counter(row[1] for row in rows), Counter(row[2] for row in rows)
    return Made(out / MANIFEST, made, order.images - made, labels, splits)


class _Maker:
    """Makes the scenes of an order, for each split of what that split alone may show."""

    def __init__(self, order: Order, advance: Advance) -> None:
        scenes = order.scenes
        used = [split for split, count in zip(SPLITS, order.counts, strict=True) if count]
        self._makers: dict[Split, DigitMaker | LandscapeMaker]
        if isinstance(scenes, Digits):
            self.classes = scenes.labels
            self._makers = {
                split: DigitMaker(scenes, load_glyphs(order.glyphs, split)) for split in used
            }
        else:
            tiles = read_tiles(Path(scenes.path), advance)
            landscape = _landscape(scenes, tiles)
            self.classes = landscape.classes
            self._makers = {split: LandscapeMaker(tiles, split, landscape) for split in used}

    def scene(self, planned: Planned) -> Scene:
        """Return the scene of one image."""
        maker = self._makers[planned.split]
        if isinstance(maker, DigitMaker):
            return maker.scene(planned.seed, label=planned.label)
        for seed in range(planned.seed, planned.seed + SEEDS_APART):
            scene = maker.scene(seed, training=False)
            if scene.label == planned.label:
                return scene
        raise AssertionError(f"no scene of `{planned.label}`")  # pragma: no cover - all are likely


def _landscape(scenes: TileScenes, tiles: TileSet) -> Landscape:
    """Return how tiles are composed; classes that nobody named are EuroSAT's, or the rest."""
    sites, background = scenes.sites, scenes.background
    if sites is None and background is None:
        if not {*SITES, *BACKGROUND} <= set(tiles.classes):
            raise UsageError(
                f"which classes of `{tiles.path}` are sites is not told",
                hint=f"give --sites A,B of: {', '.join(tiles.classes)}",
            )
        sites, background = SITES, BACKGROUND
    if sites is None:
        sites = tuple(each for each in tiles.classes if each not in (background or ()))
    if background is None:
        background = tuple(each for each in tiles.classes if each not in sites)
    if not sites or not background:
        raise UsageError(
            f"no class is left for --{'background' if sites else 'sites'}",
            hint=f"share out: {', '.join(tiles.classes)}",
        )
    missing = [each for each in (*sites, *background) if each not in tiles.classes]
    if missing:
        raise UsageError(
            f"`{tiles.path}` has no tiles of `{shorten(', '.join(missing))}`",
            hint=f"there are: {', '.join(tiles.classes)}",
        )
    if scenes.size < tiles.side:
        raise UsageError(
            f"--size is smaller than a tile: `{scenes.size}`",
            hint=f"tiles have {tiles.side} a side",
        )
    try:
        return Landscape(size=scenes.size, sites=sites, background=background)
    except ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UsageError(
            f"tiles cannot be composed so: {problem}", hint="see --sites and --background"
        ) from error


def _plan(order: Order, classes: Sequence[str]) -> Iterator[Planned]:
    """Decide what each image is: in every split all classes are about as frequent."""
    random = np.random.default_rng(order.seed)
    number = 0
    for split, count in zip(SPLITS, order.counts, strict=True):
        turns = np.resize(random.permutation(len(classes)), count)
        for turn in random.permutation(turns):
            number += 1
            seed = order.seed * 2**32 + number * SEEDS_APART
            yield Planned(number, split, classes[turn], seed)


def _row(planned: Planned, scene: Scene, path: str) -> tuple[str, ...]:
    boxes = ";".join(map(_box, scene.boxes))
    return path, planned.label, planned.split, planned.name, planned.name, boxes


def _box(window: Window) -> str:
    """Return `x0 y0 x1 y1`, without needless zeros."""
    return " ".join(f"{each:.10g}" for each in window.box)
