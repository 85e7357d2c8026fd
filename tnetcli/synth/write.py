"""Write synthetic scenes as images, with a manifest of labels, splits and boxes."""

import csv
import dataclasses
import io
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from tnetcli.config import SPLITS, Split, validate
from tnetcli.data.config import LandscapeConfig
from tnetcli.errors import OutputError, RecipeError, UsageError
from tnetcli.files import open_regular, temporary_folder, write_file
from tnetcli.geometry import Size
from tnetcli.readers.base import Box
from tnetcli.readers.pyramid import content_stamp
from tnetcli.synth.digits import DigitMaker, Digits, DigitScene, check_size
from tnetcli.synth.glyphs import load_glyphs
from tnetcli.synth.landscape import LandscapeMaker, LandscapeScene
from tnetcli.synth.tiles import TileSet, read_tiles
from tnetcli.text import counted, one_line, parse_json, reason, shorten

Advance = Callable[[float], None]
Maker = DigitMaker | LandscapeMaker
Scene = DigitScene | LandscapeScene
SUFFIXES = {"cog": ".tif", "png": ".png"}
SETTINGS, MANIFEST, IMAGES = "synth.json", "manifest.csv", "images"
COLUMNS = ("path", "label", "split", "id", "group", "box")
MADE_BY_US = re.compile(r"synth\.json|manifest\.csv|images/\d{5,}\.(tif|png)")
MOST_SETTINGS_BYTES = 2**20
BLOCK = 512
AT_ONCE = 8  # blocks drawn at a time
LARGEST_PNG = 8192  # pixels a side: a PNG has to fit into memory
CACHE_BYTES = 2**27
# A larger COG is copied in a process of its own, which can be interrupted.
MANY_PIXELS = 2**26
DRAWING = 0.5  # fraction of the work on a COG before it is copied
READING = 0.05  # fraction of the work before the first image
SEEDS_APART = 1000  # seeds tried for one image until its scene has the wanted label
# An arbitrary place in Slovenia, on the grid of a Sentinel-2 scene.
CRS, PIXEL_METRES, WEST, NORTH = "EPSG:32633", 10.0, 399_960.0, 5_000_040.0
# Defaults for EuroSAT.
SITES = ("Industrial", "Residential", "Highway", "River")
BACKGROUND = (
    *("Forest", "Pasture", "AnnualCrop"),
    *("HerbaceousVegetation", "PermanentCrop", "SeaLake"),
)


@dataclass(frozen=True, slots=True)
class TileScenes:
    """Parameters of scenes of tiles; classes that are None are EuroSAT's, or the rest."""

    path: str
    size: int
    sites: tuple[str, ...] | None = None
    background: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        check_size(self.size)


@dataclass(frozen=True, slots=True)
class SynthConfig:
    """What to write; `glyphs` is a folder with MNIST, None for drawn digits."""

    scenes: Digits | TileScenes
    images: int
    seed: int = 0
    format: Literal["cog", "png"] = "cog"
    split: tuple[float, ...] = (0.7, 0.15, 0.15)  # fractions of train, validation and test
    glyphs: str | None = None

    def __post_init__(self) -> None:
        sums_to_one = len(self.split) == len(SPLITS) and abs(sum(self.split) - 1) < 1e-6
        if not sums_to_one or min(self.split) < 0:
            given = shorten(",".join(f"{part:g}" for part in self.split))
            raise UsageError(
                f"--split is not three fractions that sum to 1: `{given}`",
                hint="for train, validation and test: --split 0.7,0.15,0.15",
            )
        if self.format == "png" and self.scenes.size > LARGEST_PNG:
            raise UsageError(
                f"a PNG has at most {LARGEST_PNG} pixels a side: `{self.scenes.size}`",
                hint="use --format cog",
            )

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the number of images per split; the largest remainders are rounded up."""
        exact = np.array(self.split) * self.images
        counts = np.floor(exact + 1e-9).astype(int)
        order = np.argsort(counts - exact, kind="stable")
        counts[order[: self.images - counts.sum()]] += 1
        return tuple(counts.tolist())

    def record(self) -> dict[str, Any]:
        """Return everything that decides the pixels, as JSON values without local paths."""
        kind, source = "digits", self.glyphs
        if isinstance(self.scenes, TileScenes):
            kind, source = "tiles", self.scenes.path
        record = {"schema": "tnet.synth/1", "kind": kind, **dataclasses.asdict(self)}
        record["scenes"].pop("path", None)
        del record["glyphs"]
        if source is not None:
            ((_, files, size, _),) = content_stamp([source])
            name = os.path.basename(os.path.abspath(source))
            record["source"] = {"name": name, "files": files, "bytes": size}
        plain: dict[str, Any] = json.loads(json.dumps(record))  # tuples become lists
        return plain


def synthesise(
    out: Path,
    config: SynthConfig,
    *,
    overwrite: bool = False,
    advance: Advance = lambda fraction: None,
) -> str:
    """Write the images that are missing in `out` and the manifest of all, and describe them.

    Each image appears complete or not at all. Raise OutputError if the folder was made with
    other settings.
    """
    classes, makers = _makers(config, lambda fraction: advance(READING * fraction))
    rows: list[tuple[str, ...]] = []
    made = 0
    try:
        prepare_folder(out, config.record(), overwrite=overwrite)
        for number, (split, label) in enumerate(_plan(config, classes), start=1):
            scene = _scene(makers[split], config.seed * 2**32 + number * SEEDS_APART, label)
            name = f"{number:05d}"
            path = out / IMAGES / f"{name}{SUFFIXES[config.format]}"
            # `x0 y0 x1 y1` without trailing zeros.
            boxes = ";".join(" ".join(f"{e:.10g}" for e in each.box) for each in scene.boxes)
            rows.append((f"{IMAGES}/{path.name}", label, split, name, name, boxes))

            def report(fraction: float, before: int = number - 1) -> None:
                advance(READING + (1 - READING) * (before + fraction) / config.images)

            if not path.exists():
                write_image(scene, path, report)
                made += 1
            report(1.0)
        text = io.StringIO(newline="")
        csv.writer(text, lineterminator="\n").writerows([COLUMNS, *rows])
        write_file(out / MANIFEST, text.getvalue().encode())
    except OSError as error:
        problem = f"cannot write to `{out}`: {reason(error)}"
        raise OutputError(problem, hint="check the permissions and the disk space") from error
    _, labels, splits, *_ = (Counter(column) for column in zip(*rows, strict=True))
    kept = f", {len(rows) - made} of them kept" if made < len(rows) else ""
    by_split = ", ".join(f"{count} {split}" for split, count in splits.items())
    by_label = ", ".join(f"{label} ({count})" for label, count in sorted(labels.items()))
    classes_found = f"{counted(len(labels), 'class', 'classes')}: {by_label}"
    return f"{counted(len(rows), 'image')}{kept}; {by_split}; {classes_found}; {out / MANIFEST}"


def _makers(config: SynthConfig, advance: Advance) -> tuple[Sequence[str], Mapping[Split, Maker]]:
    """Return the classes, and a maker of scenes for each split; splits share no pictures."""
    scenes = config.scenes
    used = [split for split, count in zip(SPLITS, config.counts, strict=True) if count]
    if isinstance(scenes, Digits):
        glyphs = {split: load_glyphs(config.glyphs, split) for split in used}
        return scenes.labels, {split: DigitMaker(scenes, glyphs[split]) for split in used}
    tiles = read_tiles(Path(scenes.path), advance)
    rules = _landscape(scenes, tiles)
    try:
        return rules.classes, {split: LandscapeMaker(tiles, split, rules) for split in used}
    except RecipeError as error:
        raise UsageError(str(error), hint=error.hint) from error


def _landscape(scenes: TileScenes, tiles: TileSet) -> LandscapeConfig:
    sites, background = scenes.sites, scenes.background
    if sites is None and background is None:
        if not {*SITES, *BACKGROUND} <= set(tiles.classes):
            raise UsageError(
                f"--sites is not given, and the classes of `{tiles.path}` are not EuroSAT's",
                hint=f"give --sites A,B of: {', '.join(tiles.classes)}",
            )
        sites, background = SITES, BACKGROUND
    rest = tuple(each for each in tiles.classes if each not in (sites or background or ()))
    rules = {
        "size": scenes.size,
        "sites": rest if sites is None else sites,
        "background": rest if background is None else background,
    }
    return validate(LandscapeConfig, rules, "cannot compose these tiles", UsageError)


def _plan(config: SynthConfig, classes: Sequence[str]) -> Iterator[tuple[Split, str]]:
    """Yield split and label of each image; in every split the classes are balanced."""
    random = np.random.default_rng(config.seed)
    for split, count in zip(SPLITS, config.counts, strict=True):
        turns = np.resize(random.permutation(len(classes)), count)
        for turn in random.permutation(turns):
            yield split, classes[turn]


def _scene(maker: Maker, first_seed: int, label: str) -> Scene:
    if isinstance(maker, DigitMaker):
        return maker.scene(first_seed, label)
    seeds = range(first_seed, first_seed + SEEDS_APART)
    scenes = (maker.scene(seed, training=False) for seed in seeds)
    return next(scene for scene in scenes if scene.label == label)


# --- the folder -------------------------------------------------------------------------------


def prepare_folder(out: Path, record: Mapping[str, Any], *, overwrite: bool) -> None:
    """Create the folder, or check that it was made with the same settings."""
    if out.exists() and not out.is_dir():
        raise OutputError(f"`{out}` is not a folder", hint="choose another name")
    before = _read_settings(out / SETTINGS)
    problem = ""
    if overwrite:
        for each in (*out.glob("*"), *out.glob(f"{IMAGES}/*")):
            if MADE_BY_US.fullmatch(each.relative_to(out).as_posix()):
                each.unlink()
    elif before is None and out.exists() and any(out.iterdir()):
        problem = "is not empty, and not made by tnet synth"
    elif before is not None and before != record:
        keys = {*before, *record}
        changed = sorted(key for key in keys if before.get(key) != record.get(key))
        problem = f"was made with other settings: {', '.join(changed)}"
    if problem:
        raise OutputError(f"`{out}` {problem}", hint="choose another name, or use --overwrite")
    (out / IMAGES).mkdir(parents=True, exist_ok=True)
    write_file(out / SETTINGS, (json.dumps(record, indent=2) + "\n").encode())


def _read_settings(path: Path) -> dict[str, Any] | None:
    """Return the settings of an earlier run; None if there was none."""
    try:
        with open_regular(path) as file:
            found = parse_json(file.read(MOST_SETTINGS_BYTES))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OutputError(f"cannot read `{path}`: {reason(error)}", hint="remove it") from error
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


# --- images -----------------------------------------------------------------------------------


def write_image(scene: Scene, path: Path, advance: Advance) -> None:
    """Write one image, complete or not at all; the suffix of `path` selects the format."""
    write = write_png if path.suffix == SUFFIXES["png"] else write_cog
    with temporary_folder(path, "the image") as folder:
        made = folder / path.name
        write(scene, made, advance)
        with made.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(made, path)


def write_cog(scene: Scene, path: Path, advance: Advance) -> None:
    """Write a cloud-optimised GeoTIFF; scenes of tiles are georeferenced."""
    import rasterio
    from affine import Affine
    from rasterio.windows import Window as RasterioWindow

    from tnetcli.readers.cog import build_overviews, copy_as_cog
    from tnetcli.readers.gdal import raise_on_damage

    flat, size = path.with_name(f"flat-{path.name}"), scene.size
    profile: dict[str, Any] = {
        "driver": "GTiff", "width": size.width, "height": size.height,
        "count": len(scene.bands), "dtype": "uint8", "interleave": "pixel",
        "tiled": True, "blockxsize": BLOCK, "blockysize": BLOCK,
        "compress": "deflate", "zlevel": 1, "bigtiff": "if_safer",
    }  # fmt: skip
    if isinstance(scene, LandscapeScene):
        transform = Affine(PIXEL_METRES, 0, WEST, 0, -PIXEL_METRES, NORTH)
        profile |= {"crs": CRS, "transform": transform}
    try:
        with rasterio.Env(GDAL_CACHEMAX=CACHE_BYTES), raise_on_damage():
            with rasterio.open(flat, "w", **profile) as dataset:
                for part in _parts(size):
                    window = RasterioWindow(part.left, part.top, part.width, part.height)
                    dataset.write(scene.draw(part).transpose(2, 0, 1), window=window)
                    advance(DRAWING * part.bottom / size.height)
            if size.pixels <= MANY_PIXELS:
                copy_as_cog(str(flat), str(path))
    except Exception as error:  # GDAL's own errors, which rasterio does not export
        problem = f"cannot write `{path.name}`: {one_line(error)}"
        raise OutputError(problem, hint="check the free disk space") from error
    if size.pixels > MANY_PIXELS:
        reached = DRAWING

        def follow(fraction: float) -> None:
            nonlocal reached  # an estimate that may go back
            reached = max(reached, DRAWING + fraction * (1 - DRAWING))
            advance(reached)

        build_overviews(str(flat), output=str(path), advance=follow)
    flat.unlink()


def write_png(scene: Scene, path: Path, advance: Advance) -> None:
    """Write a PNG, drawn in memory."""
    pixels = np.empty((scene.size.height, scene.size.width, len(scene.bands)), np.uint8)
    for part in _parts(scene.size):
        pixels[part.top : part.bottom, part.left : part.right] = scene.draw(part)
        advance(0.9 * part.bottom / scene.size.height)
    Image.fromarray(pixels if pixels.shape[2] > 1 else pixels[..., 0]).save(path)


def _parts(size: Size) -> Iterator[Box]:
    """Yield boxes that cover the image: rows of blocks, a few blocks at a time."""
    wide = BLOCK * AT_ONCE
    for top in range(0, size.height, BLOCK):
        for left in range(0, size.width, wide):
            yield Box(left, top, min(wide, size.width - left), min(BLOCK, size.height - top))
