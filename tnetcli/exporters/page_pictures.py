"""The pictures inside a page: overview, preview and windows, small enough for a browser."""

import base64
import io
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tnetcli.errors import ImageError
from tnetcli.exporters.imagery import Imagery
from tnetcli.prediction import BoxEdges, Prediction

if TYPE_CHECKING:
    from PIL.Image import Image

OpenImagery: TypeAlias = Callable[[Prediction], AbstractContextManager[Imagery]]
PREVIEW = 96  # pixels, twice as many as the list shows: screens are fine
QUALITY = 85


@dataclass(frozen=True, slots=True)
class Detail:
    """How large pictures may be while a page holds less than `until` characters of them.

    `overview` and `thumbnail` are their longest sides in pixels, `thumbnails` is how many windows
    of an image have one.
    """

    until: int
    overview: int
    thumbnail: int
    thumbnails: int


# Browsers open a page of 300 MB, but not one of thousands: the more images came before, the less
# is shown of the next.
DETAILS = (
    Detail(64 << 20, overview=1280, thumbnail=256, thumbnails=48),
    Detail(160 << 20, overview=640, thumbnail=128, thumbnails=12),
    Detail(256 << 20, overview=320, thumbnail=0, thumbnails=0),
)


def detail_after(spent: int) -> Detail | None:
    """Return what the next image may take once so many characters are taken, None for nothing."""
    return next((detail for detail in DETAILS if spent < detail.until), None)


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture as an address that holds its data, and its size in pixels."""

    source: str
    width: int
    height: int


@dataclass(slots=True)
class Pictures:
    """What could be shown of one image: windows by their place in the list, and what went wrong."""

    overview: Picture | None = None
    preview: str = ""
    windows: dict[int, Picture] = field(default_factory=dict)
    problem: str = ""

    @property
    def characters(self) -> int:
        """Return how much of the page these take."""
        sources = [each.source for each in self.windows.values()]
        sources += [self.overview.source] if self.overview else []
        return len(self.preview) + sum(map(len, sources))


def take_pictures(
    open_imagery: OpenImagery,
    prediction: Prediction,
    boxes: Sequence[BoxEdges],
    places: Sequence[int],
    detail: Detail,
) -> Pictures:
    """Open the image once and show it and the boxes at these places.

    What cannot be read is left out with its reason, what was read before stays.
    """
    pictures = Pictures()
    whole = (0.0, 0.0, float(prediction.width), float(prediction.height))
    try:
        with open_imagery(prediction) as imagery:
            width, height = size_within(whole, detail.overview)
            overview = _as_image(imagery.show(whole, width, height))
            pictures.overview = _encoded(overview)
            overview.thumbnail((PREVIEW, PREVIEW))
            pictures.preview = _encoded(overview).source
            for place in places:
                width, height = size_within(boxes[place], detail.thumbnail)
                shown = imagery.show(boxes[place], width, height)
                pictures.windows[place] = _encoded(_as_image(shown))
    except ImageError as error:
        pictures.problem = f"{error} ({error.hint})" if error.hint else str(error)
    return pictures


def size_within(box: BoxEdges, longest: int) -> tuple[int, int]:
    """Return width and height of a picture of a box, with no more pixels than the box has."""
    width, height = box[2] - box[0], box[3] - box[1]
    scale = min(1.0, longest / max(width, height))
    return max(math.floor(width * scale + 0.5), 1), max(math.floor(height * scale + 0.5), 1)


def _as_image(pixels: NDArray[np.uint8]) -> "Image":
    """Take (height, width, 4), without alpha where all of it is opaque."""
    from PIL import Image

    opaque = bool((pixels[..., 3] == 255).all())
    return Image.fromarray(np.ascontiguousarray(pixels[..., : 3 if opaque else 4]))


def _encoded(image: "Image") -> Picture:
    from PIL import features

    file = io.BytesIO()
    if image.mode == "RGB":
        kind = "jpeg"
        image.save(file, "JPEG", quality=QUALITY, optimize=True)
    elif features.check("webp"):
        kind = "webp"  # a tenth of a PNG where there is anything to see
        image.save(file, "WEBP", quality=QUALITY)
    else:
        kind = "png"
        image.save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode("ascii")
    return Picture(f"data:image/{kind};base64,{data}", image.width, image.height)
