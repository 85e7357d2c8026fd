"""Read the pixels of predicted images as 8-bit RGBA."""

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from tnetcli.errors import ImageError
from tnetcli.exporters.base import RegionOptions, image_path
from tnetcli.files import is_remote
from tnetcli.geometry import Size, Window
from tnetcli.prediction.record import BoxEdges, Prediction
from tnetcli.readers.base import Pixels, Reader, ReadOptions
from tnetcli.readers.detect import READERS, open_image
from tnetcli.readers.pyramid import fingerprint
from tnetcli.text import HIDDEN, unescape_surrogates

SAMPLE_SIDE = 512  # pixels on the longer side of the view that sets the contrast
PERCENTILES = (2, 98)  # values outside are clipped
GREY = 128  # of an image with a single value
log = logging.getLogger(__name__)


class ImageOptions(RegionOptions):
    """Options of exporters that show the pixels of images."""

    pixels: bool = Field(default=True, description="Read the images and show their pixels")
    root: Path | None = Field(
        default=None,
        description="Folder of images with relative paths; the current folder by default",
    )
    allow_remote: bool = Field(default=False, description="Fetch images whose path is a URL")


@contextmanager
def open_imagery(
    prediction: Prediction, options: ImageOptions | None = None
) -> Iterator["Imagery"]:
    """Open a predicted image with the reader and the read options of the prediction.

    Raise ImageError if the image is missing, remote without `allow_remote`, or of another size.
    Records may come from anywhere, so a URL is fetched only on request.
    """
    path = _find(prediction, options or ImageOptions())
    reader = prediction.reader if prediction.reader in READERS else None
    with open_image(path, reader=reader, options=_read_options(prediction)) as opened:
        _check(prediction, opened, path)
        yield Imagery(opened)


def _find(prediction: Prediction, options: ImageOptions) -> str:
    path = image_path(prediction.image, options.root)
    if is_remote(path):
        if HIDDEN in path:
            raise ImageError(
                f"cannot fetch `{path}`: records do not store logins and signatures",
                hint="download the image and predict the file, or use -O pixels=false",
            )
        if not options.allow_remote:
            raise ImageError(
                f"not fetched without --allow-remote: `{path}`",
                hint="add --allow-remote if you trust the predictions, or use -O pixels=false",
            )
        return path
    for name in (path, unescape_surrogates(path)):
        with suppress(ValueError):  # a name with a NUL in it
            if os.path.exists(name):
                return name
    hint = "check the path"
    if not os.path.isabs(prediction.image):
        hint = "give the folder of the images with --root"
    raise ImageError(f"the image does not exist: `{path}`", hint=hint)


def _read_options(prediction: Prediction) -> ReadOptions:
    """Return the read options of the prediction, or the defaults if they are not valid."""
    stored: Any = prediction.reading or prediction.provenance.config.get("reading")
    known = stored.items() if isinstance(stored, dict) else ()
    try:
        return ReadOptions(**{key: each for key, each in known if key in ReadOptions.model_fields})
    except ValidationError:
        return ReadOptions()


def _check(prediction: Prediction, reader: Reader, path: str) -> None:
    size = reader.size
    if (size.width, size.height) != (prediction.width, prediction.height):
        raise ImageError(
            f"`{path}` has {size.width} x {size.height} pixels, but {prediction.width} x "
            f"{prediction.height} were predicted",
            hint="restore the image, or predict it again",
        )
    before, now = prediction.fingerprint.partition("-")[0], fingerprint(path)
    if before and now and before != now:
        log.warning(
            "`%s` was changed or copied since its prediction: if its pixels differ, regions show "
            "other pixels than the model read",
            path,
        )


class Imagery:
    """An open image in red, green, blue and alpha.

    Images of 8 bits are shown as they are; of others, percentiles of a small view set the
    contrast of each band.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._bands = [0, 1, 2] if len(reader.bands) >= 3 else [0, 0, 0]
        self._ranges: NDArray[np.float64] | None = None

    def show(self, box: BoxEdges, width: int, height: int) -> NDArray[np.uint8]:
        """Return a box resampled to (height, width, 4); transparent black where no data is."""
        x0, y0, x1, y1 = box
        values, valid = self._read(Window(x0, y0, x1 - x0, y1 - y0), Size(width, height))
        if self._reader.dtype != np.uint8:
            values = self._stretched(values)
        shown = np.zeros((height, width, 4), np.uint8)
        shown[..., :3] = np.where(valid, values, 0).transpose(1, 2, 0)
        shown[..., 3] = np.where(valid, 255, 0)
        return shown

    def _read(self, window: Window, size: Size) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return values (3, height, width) and where they are valid."""
        pixels: Pixels = self._reader.read(window, size)
        values = pixels.values[self._bands]
        return values, pixels.valid & np.isfinite(values).all(axis=0)

    def _stretched(self, values: NDArray[Any]) -> NDArray[np.uint8]:
        if self._ranges is None:
            self._ranges = self._find_ranges()
        low, high = (each[:, None, None] for each in self._ranges)  # (3, 1, 1)
        # Halved, so that the full range of floats does not overflow.
        half = values.astype(np.float64) / 2 - low / 2
        with np.errstate(invalid="ignore", divide="ignore"):
            fraction = np.clip(half / (high / 2 - low / 2), 0, 1)
        grey = np.where(np.isfinite(fraction) & (low < high), np.rint(255 * fraction), GREY)
        return grey.astype(np.uint8)

    def _find_ranges(self) -> NDArray[np.float64]:
        """Return the darkest and the brightest value (2, 3) of each shown band."""
        size = self._reader.size
        values, valid = self._read(Window.whole(size), size.within(SAMPLE_SIDE))
        if not valid.any():
            return np.zeros((2, 3))
        return np.array([_range(band[valid].astype(np.float64)) for band in values]).T


def _range(values: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.percentile(values, PERCENTILES)
    if not (low < high and math.isfinite(low) and math.isfinite(high)):
        low, high = values.min(), values.max()  # a few bright cells on black
    return float(low), float(high)
