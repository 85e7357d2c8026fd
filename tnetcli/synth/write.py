"""Write synthetic scenes with a manifest."""

import csv
import dataclasses
import io
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image
from pydantic import ValidationError

from tnetcli.config import SPLITS, Split
from tnetcli.data.config import LandscapeConfig
from tnetcli.errors import OutputError, UsageError
from tnetcli.files import open_regular, temporary_folder, write_file
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Box
from tnetcli.readers.handles import content_stamp
from tnetcli.synth.digits import DigitMaker, Digits, check_size, load_glyphs
from tnetcli.synth.landscape import LandscapeMaker
from tnetcli.synth.scene import Scene
from tnetcli.synth.tiles import TileSet, read_tiles
from tnetcli.text import counted, one_line, parse_json, reason, shorten

Advance = Callable[[float], None]
ENDINGS = {"cog": ".tif", "png": ".png"}
SETTINGS, MANIFEST, IMAGES = "synth.json", "manifest.csv", "images"
COLUMNS = ("path", "label", "split", "id", "group", "box")
OURS = re.compile(r"\d{5,}\.(tif|png)|\.tnet-\w+")
MOST_BYTES = 2**20  # of the settings
BLOCK = 512
AT_ONCE = 8  # blocks drawn at a time
LARGEST_PNG = 8192  # pixels a side: it has to be in memory as a whole
CACHE_BYTES = 2**27
# A COG of more pixels is made in a process of its own, which can be watched and stopped.
MANY_PIXELS = 2**26
# A place in Slovenia, as real as that of any Sentinel-2 scene.
CRS, PIXEL_METRES, WEST, NORTH = "EPSG:32633", 10.0, 399_960.0, 5_000_040.0


def check_format(kind: str, size: int) -> None:
    """Raise UsageError where images of `size` pixels a side cannot be written."""
    if kind == "png" and size > LARGEST_PNG:
        raise UsageError(
            f"PNG files of `{size}` pixels a side have to fit into memory: at most {LARGEST_PNG}",
            hint="use --format cog",
        )


def prepare_folder(out: Path, described: Mapping[str, Any], *, overwrite: bool) -> None:
    """Make the folder, or find it made with the same settings."""
    if out.exists() and not out.is_dir():
        raise OutputError(f"`{out}` is not a folder", hint="choose another name")
    before = _read_settings(out / SETTINGS)
    if overwrite:
        _clear(out)
    elif before is None and out.exists() and any(out.iterdir()):
        raise OutputError(
            f"`{out}` is not empty, and not from tnet synth",
            hint="choose another name, or use --overwrite",
        )
    elif before is not None and before != described:
        changed = sorted(
            key for key in {*before, *described} if before.get(key) != described.get(key)
        )
        raise OutputError(
            f"`{out}` was made with other settings: {', '.join(changed)}",
            hint="choose another name, or use --overwrite",
        )
    (out / IMAGES).mkdir(parents=True, exist_ok=True)
    write_file(out / SETTINGS, (json.dumps(described, indent=2) + "\n").encode())


def _read_settings(path: Path) -> dict[str, Any] | None:
    """Return the settings of an earlier run; None if there was none."""
    try:
        with open_regular(path) as file:
            found = parse_json(file.read(MOST_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OutputError(f"cannot read `{path}`: {reason(error)}", hint="remove it") from error
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _clear(out: Path) -> None:
    """Remove what an earlier run made, and nothing else."""
    for name in (SETTINGS, MANIFEST):
        (out / name).unlink(missing_ok=True)
    images = out / IMAGES
    for each in images.iterdir() if images.is_dir() else ():
        if OURS.fullmatch(each.name):
            if each.is_dir() and not each.is_symlink():
                shutil.rmtree(each)
            else:
                each.unlink()


def write_image(scene: Scene, path: Path, advance: Advance, *, placed: bool = False) -> None:
    """Write one image, which appears whole or not at all; a COG is `placed` on the map."""
    from rasterio.errors import RasterioError

    try:
        with temporary_folder(path, "the image") as folder:
            made = folder / path.name
            if path.suffix == ENDINGS["png"]:
                write_png(scene, made, advance)
            else:
                write_cog(scene, made, advance, placed=placed)
            with made.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(made, path)
    except RasterioError as error:
        raise _unwritten(path, error) from error


def write_manifest(path: Path, rows: Sequence[tuple[str, ...]]) -> None:
    """Write the rows below the names of the columns."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows)
    write_file(path, text.getvalue().encode())


def write_cog(scene: Scene, path: Path, advance: Advance, *, placed: bool) -> None:
    """Write a cloud-optimised GeoTIFF, somewhere on the map if it is to be `placed`."""
    import rasterio
    from affine import Affine
    from rasterio.windows import Window as RasterioWindow

    from tnetcli.readers.cog import build_overviews
    from tnetcli.readers.gdal import raise_on_damage

    flat = path.with_name(f"flat-{path.name}")
    profile: dict[str, Any] = {
        "driver": "GTiff", "width": scene.size.width, "height": scene.size.height,
        "count": len(scene.bands), "dtype": scene.dtype, "interleave": "pixel",
        "tiled": True, "blockxsize": BLOCK, "blockysize": BLOCK,
        "compress": "deflate", "zlevel": 1, "bigtiff": "if_safer",
    }  # fmt: skip
    if placed:
        transform = Affine(PIXEL_METRES, 0, WEST, 0, -PIXEL_METRES, NORTH)
        profile |= {"crs": CRS, "transform": transform}
    share = 0.5  # of the work, before it is copied into its final order
    with rasterio.Env(GDAL_CACHEMAX=CACHE_BYTES), raise_on_damage():
        with rasterio.open(flat, "w", **profile) as dataset:
            for part in _parts(scene.size):
                window = RasterioWindow(part.left, part.top, part.width, part.height)
                dataset.write(scene.draw(0, part).transpose(2, 0, 1), window=window)
                advance(share * (part.top + part.height) / scene.size.height)
        if scene.size.pixels <= MANY_PIXELS:
            _copy(flat, path)
    if scene.size.pixels > MANY_PIXELS:
        reached = share

        def follow(fraction: float) -> None:
            nonlocal reached  # it is guessed from what the process has read, and may go back
            reached = max(reached, share + fraction * (1 - share))
            advance(reached)

        build_overviews(str(flat), output=str(path), advance=follow)
    flat.unlink()


def _copy(flat: Path, path: Path) -> None:
    import rasterio.shutil
    import tifffile

    try:
        rasterio.shutil.copy(
            flat, path, driver="COG", BLOCKSIZE=BLOCK, BIGTIFF="IF_SAFER", COMPRESS="DEFLATE",
            PREDICTOR="STANDARD", OVERVIEW_RESAMPLING="AVERAGE",
        )  # fmt: skip
        with tifffile.TiffFile(path) as file:
            ends = [
                start + count
                for page in file.pages
                for start, count in zip(page.dataoffsets, page.databytecounts, strict=True)
            ]
    except Exception as error:  # GDAL's own errors, which rasterio does not export
        raise _unwritten(path, error) from error
    if max(ends) > path.stat().st_size:  # GDAL does not report what it cannot write at the end
        raise _unwritten(path, OSError("it is truncated"))


def _unwritten(path: Path, error: Exception) -> OutputError:
    return OutputError(
        f"cannot write `{path.name}`: {one_line(error)}", hint="is there space left?"
    )


def write_png(scene: Scene, path: Path, advance: Advance) -> None:
    """Write a PNG, which is drawn in memory as a whole."""
    pixels = np.empty((scene.size.height, scene.size.width, len(scene.bands)), scene.dtype)
    for part in _parts(scene.size):
        pixels[part.top : part.bottom, part.left : part.right] = scene.draw(0, part)
        advance(0.9 * (part.top + part.height) / scene.size.height)
    Image.fromarray(pixels if pixels.shape[2] > 1 else pixels[..., 0]).save(path)


def _parts(size: Size) -> Iterator[Box]:
    """Cut an image into rows of blocks, and each row into a few blocks at a time."""
    wide = BLOCK * AT_ONCE
    for top in range(0, size.height, BLOCK):
        for left in range(0, size.width, wide):
            width, height = min(wide, size.width - left), min(BLOCK, size.height - top)
            yield Box(left, top, width, height)


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


def _landscape(scenes: TileScenes, tiles: TileSet) -> LandscapeConfig:
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
        return LandscapeConfig(size=scenes.size, sites=sites, background=background)
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
