"""The exporter protocol and registry, the regions of a prediction, and the colours of classes."""

import colorsys
import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Protocol, TypeAlias

from pydantic import BaseModel, Field

from tnetcli.config import Strict
from tnetcli.errors import OutputError, UsageError
from tnetcli.files import is_remote
from tnetcli.geo import Globe
from tnetcli.geometry import Size, UnknownCRSError
from tnetcli.prediction.record import BoxEdges, Prediction, RegionRecord
from tnetcli.registry import Registry

Colour: TypeAlias = tuple[int, int, int]
RegionWithJoint: TypeAlias = tuple[RegionRecord, float | None]  # as `regions_of` yields them

# The colour-blind safe palette of Okabe and Ito, without black and pale yellow.
CLASS_COLOURS: tuple[Colour, ...] = (
    (0, 114, 178),
    (230, 159, 0),
    (0, 158, 115),
    (204, 121, 167),
    (86, 180, 233),
    (213, 94, 0),
)
# From dark to bright, so that it also reads in grey: violet, red, orange, pale yellow.
ATTENTION_COLOURS: tuple[Colour, ...] = (
    (40, 11, 84),
    (101, 21, 110),
    (159, 42, 99),
    (212, 72, 66),
    (245, 125, 21),
    (250, 193, 39),
    (252, 255, 164),
)
GOLDEN_RATIO = (math.sqrt(5) - 1) / 2  # of a turn: consecutive hues stay far apart
DIGITS = 9  # significant digits of a 32-bit float
SURROGATES = re.compile("[\ud800-\udfff]")
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class Exporter(Protocol):
    """Writes predictions in one format.

    `suffixes` are the file name endings that select it, the default one first. `many` tells
    whether several images can share a file. `options` is the model of its `-O key=value` options.
    """

    name: str
    suffixes: tuple[str, ...]
    many: bool
    options: type[BaseModel]

    def write(self, predictions: Iterable[Prediction], path: Path, options: Any) -> int | None:
        """Write a new file at `path`, and return how many images are incomplete, if any are.

        `path` is in a temporary folder; the caller moves the finished file to its place.
        """
        ...


EXPORTERS: Registry[Exporter] = Registry(
    "exporter",
    {
        "geojson": "tnetcli.exporters.geojson:EXPORTER",
        "heatmap": "tnetcli.exporters.heatmap:EXPORTER",
        "figure": "tnetcli.exporters.figure:EXPORTER",
        "html": "tnetcli.exporters.html:EXPORTER",
        "csv": "tnetcli.exporters.table:CSV",
        "parquet": "tnetcli.exporters.table:PARQUET",
    },
)


def find_exporter(output: str | None, name: str | None = None) -> Exporter:
    """Return the exporter with this name, or the one that the suffix of `output` selects.

    GeoJSON is the default. Raise UsageError if the name and the suffix contradict each other, or
    if no exporter has the suffix.
    """
    every = [EXPORTERS.load(each) for each in EXPORTERS] if output and not is_folder(output) else []
    by_suffix = next((each for each in every if str(output).lower().endswith(each.suffixes)), None)
    if name is not None:
        exporter = EXPORTERS.load(name)
        if by_suffix is not None and by_suffix.name != name:
            raise UsageError(
                f"`{output}` has the suffix of the format {by_suffix.name}, not of {name}",
                hint=f"use the suffix {' or '.join(exporter.suffixes)}",
            )
        return exporter
    if every and by_suffix is None:
        raise UsageError(
            f"no format has the suffix of `{output}`",
            hint="use .geojson, .tif, .png, .html, .csv or .parquet, or choose a format with -f",
        )
    return by_suffix or EXPORTERS.load("geojson")


def is_folder(output: str) -> bool:
    """Return True if `output` is a folder, ends with a slash, or is new and has no suffix."""
    path = Path(output)
    return output.endswith("/") or path.is_dir() or not (path.suffix or path.exists())


class RegionOptions(Strict):
    """Options of all built-in exporters."""

    levels: frozenset[int] | None = Field(
        default=None, description="Levels of the exported regions; all levels by default"
    )


class ImageOptions(RegionOptions):
    """Options of exporters that show the pixels of images."""

    pixels: bool = Field(default=True, description="Read the images and show their pixels")
    root: Path | None = Field(
        default=None,
        description="Folder of images with relative paths; the current folder by default",
    )
    allow_remote: bool = Field(default=False, description="Fetch images whose path is a URL")


def regions_of(
    prediction: Prediction, levels: frozenset[int] | None = None
) -> Iterator[RegionWithJoint]:
    """Yield the regions of these levels, each with the product of attention along its path.

    Glimpses count as regions of the level below. The product is None where a parent is missing
    from the record.
    """
    joint: dict[str, float] = {"": 1.0}
    for window in prediction.windows:
        for region in (window, *window.glimpsed()):
            parent = joint.get(region.path.rpartition("/")[0])
            if parent is not None:
                # Sums of 32-bit numbers may exceed one a little.
                joint[region.path] = min(parent * region.attention, 1.0)
            if levels is None or region.level in levels:
                yield region, joint.get(region.path)


def measurements(
    region: RegionRecord, joint: float | None, prediction: Prediction
) -> dict[str, float | None]:
    """Return the numbers of a region that all formats export; None where one is unknown."""
    view_size = prediction.provenance.config.get("view_size")
    width = region.box[2] - region.box[0]
    # A glimpse is a part of a view, and the record has no size of that part.
    known = isinstance(view_size, int | float) and not region.is_glimpse
    return {
        "level": region.level,
        "rank": region.rank,
        "attention": rounded(region.attention),
        "joint": rounded(joint),
        "share": rounded(region.share),
        "probability": rounded(region.probability),
        "valid": rounded(region.valid),
        "downsample": rounded(width / view_size) if known else None,  # type: ignore[operator]
    }


def rounded(value: float | None) -> float | None:
    """Return a number with nine significant digits."""
    return None if value is None else float(f"{value:.{DIGITS}g}")


def globe_of(prediction: Prediction) -> Globe | None:
    """Return the place of an image on the Earth; None for slides, photos and local systems."""
    georeference = prediction.georeference
    if georeference is None or georeference.crs is None:
        return None
    try:
        globe = Globe(georeference, Size(prediction.width, prediction.height))
    except UnknownCRSError as error:
        raise unknown_crs(prediction) from error
    return globe if globe.is_known else None


def unknown_crs(prediction: Prediction) -> OutputError:
    """Return the error of an image whose CRS cannot be interpreted."""
    crs = (prediction.georeference and prediction.georeference.crs) or ""
    return OutputError(
        f"cannot georeference `{prediction.image}`: unknown CRS `{crs[:60]}`",
        hint="the prediction may have been made with a newer version of PROJ",
    )


def image_path(image: str, root: Path | None) -> str:
    """Return where an image is: a relative path below `root`, any other as it is."""
    return image if root is None or is_remote(image) else os.path.join(root, image)


def whole_box(prediction: Prediction) -> BoxEdges:
    """Return the box of the whole image."""
    return 0.0, 0.0, float(prediction.width), float(prediction.height)


def class_colour(label: str, classes: Sequence[str]) -> Colour:
    """Return the colour of a class, which depends on its place among the classes of the model."""
    try:
        number = classes.index(label)
    except ValueError:
        number = len(CLASS_COLOURS) + zlib.crc32(label.encode("utf-8", "surrogatepass")) % 1000
    if number < len(CLASS_COLOURS):
        return CLASS_COLOURS[number]
    red, green, blue = colorsys.hsv_to_rgb(number * GOLDEN_RATIO % 1.0, 0.65, 0.85)
    return round(255 * red), round(255 * green), round(255 * blue)


def attention_colour(attention: float) -> Colour:
    """Return the colour of an attention from 0 to 1, brighter for more."""
    position = min(max(attention, 0.0), 1.0) * (len(ATTENTION_COLOURS) - 1)
    below = min(int(position), len(ATTENTION_COLOURS) - 2)
    low, high = ATTENTION_COLOURS[below : below + 2]
    red, green, blue = (
        round(a + (position - below) * (b - a)) for a, b in zip(low, high, strict=True)
    )
    return red, green, blue


def as_hex(colour: Colour) -> str:
    """Return `#rrggbb`."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def clean_text(text: str) -> str:
    """Return text that can be encoded as UTF-8; lone surrogates become U+FFFD."""
    return text if text.isascii() else SURROGATES.sub("\ufffd", text)


def as_json(value: Any) -> str:
    """Return compact JSON on one line that can be encoded as UTF-8."""
    return clean_text(ENCODER.encode(value))


def write_pieces(path: Path, pieces: Iterable[str]) -> None:
    """Write pieces of text as UTF-8, compressed if the name ends in `.gz`."""
    with open(path, "wb") as raw:
        if path.suffix.lower() != ".gz":
            _write_encoded(raw, pieces)
            return
        # Neither name nor time inside: the same pieces give the same bytes.
        with gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0) as packed:
            _write_encoded(packed, pieces)


def _write_encoded(file: IO[bytes] | gzip.GzipFile, pieces: Iterable[str]) -> None:
    for piece in pieces:
        file.write(piece.encode())
