"""Attention as a raster: a COG on the image's own grid, much coarser, NaN where nobody looked."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

from tnetcli.errors import OutputError
from tnetcli.exporters.heat_cells import HeatGrid, HeatWindows, Value
from tnetcli.exporters.heat_file import write_cog
from tnetcli.exporters.looked import Looked
from tnetcli.exporters.overlay import HALF_CHARACTERS
from tnetcli.files import is_plain_crs
from tnetcli.geometry import Size
from tnetcli.output_file import (
    UNWRITABLE,
    check_free,
    folder_beside,
    refuse_special,
    whole_file,
)
from tnetcli.prediction import Prediction
from tnetcli.wording import printable, reason, shorten

MOST_TEXT = 800  # characters of a name: GDAL keeps no more than 32,000 bytes of metadata in a file
IDENTITY = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)


def write_heatmap(
    path: str | os.PathLike[str],
    looked: Looked,
    *,
    value: Value = "attention",
    overwrite: bool = False,
) -> None:
    """Write the attention of the wanted windows, or their joint probability, whole or not at all.

    A cloud-optimised GeoTIFF of 32-bit numbers in the CRS of the image, or in pixels where it has
    none. Where windows overlap the deepest level is shown, then the larger value, in the overviews
    as well. See `HeatGrid` for how fine it is, and `HeatWindows` for what is painted.
    """
    if value not in get_args(Value):
        raise ValueError(f"no such value: `{value}`, choose one of {', '.join(get_args(Value))}")
    prediction = looked.prediction
    if not prediction.is_done:
        raise OutputError(
            f"`{shorten(prediction.image)}` was not predicted: there is nothing to show",
            hint="predict it again",
        )
    check_free(path, overwrite=overwrite)
    refuse_special(path)
    place = _place(prediction)
    guard = partial(_failures_told, path)
    with folder_beside(os.path.realpath(path), "the heat map") as folder:
        windows = HeatWindows.gather(looked, value, folder / "windows", guard)
        image = Size(prediction.width, prediction.height)
        grid = HeatGrid.for_windows(image, windows.smallest)
        tags = _facts(looked, value, grid, windows.count) | _resolution(prediction, grid, place)
        profile = place.profile(grid.downsample) if place else {}
        with guard():
            placed = windows.placed(grid, folder / "placed")
            write_cog(folder, placed, tags, value, profile)
            _check_place(folder / "heat.tif", place, prediction)
        with whole_file(path, "the heat map") as file, (folder / "heat.tif").open("rb") as made:
            shutil.copyfileobj(made, file)
            check_free(path, overwrite=overwrite)  # somebody may have been quicker


@contextmanager
def _failures_told(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what the system or GDAL fails to write into OutputError."""
    from rasterio._err import CPLE_BaseError
    from rasterio.errors import RasterioError

    try:
        yield
    except (OSError, RasterioError, CPLE_BaseError, UnicodeEncodeError) as error:
        cause = error.__cause__ or error  # rasterio says only that there is one
        raise OutputError(
            f"cannot write the heat map, {shorten(reason(cause))}: `{path}`", hint=UNWRITABLE
        ) from error


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the image lies: `crs` as rasterio knows it, if it is known at all."""

    transform: tuple[float, ...]
    crs: Any = None

    def profile(self, downsample: int) -> dict[str, Any]:
        """Return what rasterio takes for pixels `downsample` times as large."""
        from affine import Affine

        a, b, c, d, e, f = self.transform
        scaled = (a * downsample, b * downsample, c, d * downsample, e * downsample, f)
        return {"transform": Affine(*scaled), "crs": self.crs}


def _place(prediction: Prediction) -> _Place | None:
    """Return where an image lies; None for one in pixels: a slide, a photo."""
    place = prediction.georeference
    if place is None:
        return None
    if place.crs is None:
        return None if place.transform == IDENTITY else _Place(place.transform)
    from rasterio.crs import CRS  # GDAL loads for what is written with it, not with this module
    from rasterio.errors import CRSError

    try:
        if not is_plain_crs(place.crs):
            raise CRSError("neither a code nor WKT without grids")  # noqa: TRY301
        return _Place(place.transform, CRS.from_string(place.crs))
    except CRSError as error:
        raise OutputError(
            f"cannot place `{shorten(prediction.image)}` on the Earth: no CRS is known as "
            f"`{shorten(place.crs)}`",
            hint="was it predicted with a newer GDAL?",
        ) from error


def _check_place(made: Path, place: _Place | None, prediction: Prediction) -> None:
    """Refuse a file without its CRS: GDAL puts one that no GeoTIFF holds beside it, unasked."""
    if place is None or place.crs is None:
        return
    import rasterio

    with rasterio.open(made) as dataset:
        if dataset.crs is None:
            raise OutputError(
                f"a GeoTIFF cannot hold the CRS of `{shorten(prediction.image)}`: "
                f"`{shorten(place.crs)}`",
                hint="use --format geojson",
            )


def _facts(looked: Looked, value: Value, grid: HeatGrid, count: int) -> dict[str, str]:
    """Return what the file tells of itself."""
    prediction = looked.prediction
    x, y = prediction.offset
    facts = {
        "TNET_IMAGE": _text(prediction.image),
        "TNET_ID": _text(prediction.id),
        "TNET_MODEL": _text(prediction.provenance.model),
        "TNET_MODEL_SHA256": _text(prediction.provenance.sha256),
        "TNET_VERSION": _text(prediction.provenance.version),
        "TNET_STATUS": prediction.status,
        "TNET_LABEL": _text(prediction.label or ""),
        "TNET_PROBABILITY": ""
        if prediction.probability is None
        else f"{prediction.probability:.9g}",
        "TNET_VALUE": value,
        "TNET_WINDOWS": str(count),
        "TNET_DOWNSAMPLE": str(grid.downsample),
        "TNET_WIDTH": str(prediction.width),
        "TNET_HEIGHT": str(prediction.height),
        "TNET_OFFSET": f"{x},{y}",
    }
    if looked.choice.levels is not None:
        facts["TNET_LEVELS"] = _text(",".join(map(str, sorted(looked.choice.levels))))
    # Ground control points place an image less well than its own transform would.
    if prediction.georeference is not None and prediction.georeference.source != "transform":
        facts["TNET_GEOREFERENCE"] = _text(prediction.georeference.source)
    return facts


def _text(text: str) -> str:
    return HALF_CHARACTERS.sub("\ufffd", printable(text, MOST_TEXT))


def _resolution(prediction: Prediction, grid: HeatGrid, place: _Place | None) -> dict[str, str]:
    """Return the frame and, in pixels of a known size, how many cells fill a centimetre."""
    if place:
        return {"TNET_FRAME": "map"}
    facts = {"TNET_FRAME": "pixels"}
    if prediction.mpp is None:
        return facts
    across, down = prediction.mpp
    x, y = (1e4 / (microns * grid.downsample) for microns in (across, down))
    facts["TNET_MICRONS_PER_PIXEL"] = f"{across:.9g},{down:.9g}"
    if min(x, y) > 1e-6 and max(x, y) < 1e9:  # a TIFF holds fractions of 32 bits
        facts |= {"TIFFTAG_XRESOLUTION": f"{x:.9g}", "TIFFTAG_YRESOLUTION": f"{y:.9g}"}
        facts["TIFFTAG_RESOLUTIONUNIT"] = "3"
    return facts
