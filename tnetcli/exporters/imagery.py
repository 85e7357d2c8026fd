"""Pixels of a predicted image as a screen shows them."""

import logging
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from tnetcli.errors import ImageError
from tnetcli.files import is_remote
from tnetcli.geometry import Size, Window
from tnetcli.prediction.record import BoxEdges, Prediction
from tnetcli.readers.base import Pixels, Reader, ReadOptions
from tnetcli.readers.detect import READERS, open_image
from tnetcli.readers.handles import fingerprint
from tnetcli.text import HIDDEN, unescape_surrogates


class Imagery(Protocol):
    """The pixels of one image, as a screen shows them."""

    def show(self, box: BoxEdges, width: int, height: int) -> NDArray[np.uint8]:
        """Return (height, width, 4), red, green, blue, alpha: the box resampled to this size.

        Transparent, and black, where there is no data, which is everywhere outside the image too.
        """
        ...


SMALL = 512  # pixels on the longer side of the view that the contrast is taken from
PERCENTILES = (2, 98)  # what lies beyond is as dark or as bright as it gets
GREY = 128  # of an image that holds a single value
log = logging.getLogger(__name__)


@contextmanager
def open_imagery(
    prediction: Prediction, root: Path | None = None, *, remote: bool = False
) -> Iterator[Imagery]:
    """Lend the pixels of a predicted image, read as they were when it was predicted.

    Nothing is decoded before it is asked for. `root` is the folder where relative paths start, if
    not here. A URL is fetched only if `remote` is set, as records may come from anywhere.
    ImageError where the image is gone or of another size; one that may have changed is shown with
    a warning.
    """
    with open_predicted(prediction, root, remote=remote) as reader:
        yield as_imagery(reader)


@contextmanager
def open_predicted(
    prediction: Prediction, root: Path | None = None, *, remote: bool = False
) -> Iterator[Reader]:
    """Lend the reader of a predicted image, as `open_imagery` does its pixels."""
    path = _find(prediction, root, remote)
    options = _options(prediction)
    with open_image(path, reader=_reader(prediction), options=options) as reader:
        _check(prediction, reader, path)
        yield reader


def as_imagery(reader: Reader) -> Imagery:
    """Return an open image as a screen shows it."""
    return _Screen(reader)


def image_place(image: str, root: Path | None) -> str:
    """Return where an image is looked for: a relative path below `root`, any other as it is."""
    return image if root is None or is_remote(image) else os.path.join(root, image)


def _find(prediction: Prediction, root: Path | None, remote: bool) -> str:
    path = image_place(prediction.image, root)
    if is_remote(path):
        _refuse_remote(path, remote)
        return path
    for name in (path, unescape_surrogates(path)):
        with suppress(ValueError):  # a name with a NUL in it
            if os.path.exists(name):
                return name
    where = "check the path"
    if not os.path.isabs(prediction.image):
        where = "it is looked for from here: go where `tnet predict` was started, or --root FOLDER"
    raise ImageError(f"the image is gone: `{path}`", hint=where)


def _refuse_remote(path: str, remote: bool) -> None:
    if HIDDEN in path:
        raise ImageError(
            f"records do not keep logins and signatures: `{path}` cannot be fetched",
            hint="download the image and predict the file, or use --no-pixels",
        )
    if not remote:
        raise ImageError(
            f"not fetched without --allow-remote: `{path}`",
            hint="add --allow-remote if you trust the predictions, or use --no-pixels",
        )


def _reader(prediction: Prediction) -> str | None:
    """Return the reader that counted the pixels of the record."""
    return prediction.reader if prediction.reader in READERS else None


def _options(prediction: Prediction) -> ReadOptions:
    """Return how the image was read; the defaults if a record has no valid options."""
    found: Any = prediction.reading or prediction.provenance.config.get("reading")
    known = found.items() if isinstance(found, dict) else ()
    try:
        return ReadOptions(**{key: each for key, each in known if key in ReadOptions.model_fields})
    except ValidationError:
        return ReadOptions()


def _check(prediction: Prediction, reader: Reader, path: str) -> None:
    size = reader.size
    if (size.width, size.height) != (prediction.width, prediction.height):
        raise ImageError(
            f"`{path}` is not what was predicted: {size.width} x {size.height} pixels, "
            f"not {prediction.width} x {prediction.height}",
            hint="predict it again, or put the image back",
        )
    before, now = prediction.fingerprint.partition("-")[0], fingerprint(path)
    if before and now and before != now:
        log.warning(
            "`%s` was changed or copied since it was predicted: if its pixels are others, "
            "windows show what the model has not seen",
            path,
        )


class _Screen:
    """An open image in red, green, blue and alpha."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        count = len(reader.bands)
        self._bands = [0, 1, 2] if count >= 3 else [0, 0, 0]
        self._is_plain = reader.dtype == np.uint8
        self._ranges: NDArray[np.float64] | None = None

    def show(self, box: BoxEdges, width: int, height: int) -> NDArray[np.uint8]:
        """Return (height, width, 4); see `Imagery.show`."""
        x0, y0, x1, y1 = box
        values, known = self._read(Window(x0, y0, x1 - x0, y1 - y0), Size(width, height))
        if not self._is_plain:
            values = self._stretched(values)
        shown = np.zeros((height, width, 4), np.uint8)
        shown[..., :3] = np.where(known, values, 0).transpose(1, 2, 0)
        shown[..., 3] = np.where(known, 255, 0)
        return shown

    def _read(self, window: Window, size: Size) -> tuple[NDArray[Any], NDArray[np.bool_]]:
        """Return the bands that are shown (3, height, width), and where they are known."""
        pixels: Pixels = self._reader.read(window, size)
        values = pixels.values[self._bands]
        return values, pixels.valid & np.isfinite(values).all(axis=0)

    def _stretched(self, values: NDArray[Any]) -> NDArray[np.uint8]:
        if self._ranges is None:
            self._ranges = self._find_ranges()
        low, high = (each[:, None, None] for each in self._ranges)  # (3, 1, 1)
        # Halved, so that the range of all that a float holds is a float as well.
        half = values.astype(np.float64) / 2 - low / 2
        with np.errstate(invalid="ignore", divide="ignore"):
            share = np.clip(half / (high / 2 - low / 2), 0, 1)
        grey = np.where(np.isfinite(share) & (low < high), np.rint(255 * share), GREY)
        return grey.astype(np.uint8)

    def _find_ranges(self) -> NDArray[np.float64]:
        """Return the darkest and the brightest value (2, 3) of each band that is shown."""
        size = self._reader.size
        values, known = self._read(Window.whole(size), size.within(SMALL))
        if not known.any():
            return np.zeros((2, 3))
        return np.array([_range(band[known].astype(np.float64)) for band in values]).T


def _range(values: NDArray[np.float64]) -> tuple[float, float]:
    low, high = np.percentile(values, PERCENTILES)
    if not (low < high and math.isfinite(low) and math.isfinite(high)):
        low, high = values.min(), values.max()  # a few bright cells on black
    return float(low), float(high)
