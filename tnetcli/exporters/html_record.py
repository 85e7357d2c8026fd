"""The part of an HTML page that shows one prediction."""

import base64
import io
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tnetcli.errors import ImageError
from tnetcli.exporters.base import (
    Looked,
    WithJoint,
    as_hex,
    attention_colour,
    class_colour,
    measured,
)
from tnetcli.exporters.imagery import Imagery
from tnetcli.geometry import UnknownCRSError
from tnetcli.prediction.record import BoxEdges, Prediction, PredictionCost
from tnetcli.text import counted

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


MOST_LEVELS = 16
MOST_OF_A_LEVEL = 250  # windows: more cannot be distinguished on a screen
MOST_CLASSES = 20  # bars of the answer
MOST_VOTES = 5  # bars of a window
MOST_WARNINGS = 20
LONGEST_FACT = 200  # characters
Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Drawn:
    """The windows to draw, level by level and by falling attention, and how many there are.

    `counts` are all windows of each level that is drawn, `deeper` those of levels that are not.
    """

    windows: tuple[WithJoint, ...]
    counts: dict[int, int]
    deeper: int

    def spread(self, most: int) -> list[int]:
        """Return the places of at most so many windows, in turn from every level."""
        turns: Counter[int] = Counter()
        order = []
        for place, (window, _) in enumerate(self.windows):
            order.append((turns[window.level], place))
            turns[window.level] += 1
        return sorted(place for _, place in sorted(order)[:most])


def strongest(looked: Looked) -> Drawn:
    """Return the windows of the highest attention of each level; of equals, the first.

    ValueError for a box that is no rectangle.
    """
    levels: dict[int, list[WithJoint]] = {}
    deeper = 0
    for window, joint in looked.with_joint():
        if not 1 <= window.level <= MOST_LEVELS:
            deeper += 1
            continue
        levels.setdefault(window.level, []).append((window, joint))
    chosen = [
        each
        for _, level in sorted(levels.items())
        for each in sorted(level, key=_rating, reverse=True)[:MOST_OF_A_LEVEL]
    ]
    counts = {level: len(windows) for level, windows in sorted(levels.items())}
    return Drawn(tuple(chosen), counts, deeper)


def _rating(each: WithJoint) -> float:
    attention = each[0].attention
    return attention if math.isfinite(attention) else -math.inf


class ClassNames:
    """Gives every class of an image a number, so that its name is written once."""

    def __init__(self, classes: Sequence[str]) -> None:
        self._classes = list(classes)
        self._numbers: dict[str, int] = {}

    def number(self, name: str) -> int:
        """Return the number of a class, a new one where it was not met before."""
        return self._numbers.setdefault(name, len(self._numbers))

    def told(self) -> list[list[str]]:
        """Return name and colour of every class that was met, by number."""
        return [[name, as_hex(class_colour(name, self._classes))] for name in self._numbers]


def row_facts(number: int, prediction: Prediction, drawn: Drawn, preview: str) -> Facts:
    """Return what the list of images tells of one."""
    cost, ok = prediction.cost, prediction.is_done
    return {
        "number": number,
        "id": prediction.id,
        "label": prediction.label or "",
        "probability": prediction.probability,
        "windows": (cost.windows if cost else sum(drawn.counts.values())) if ok else None,
        "fraction": known(cost.fraction_decoded) if cost else None,
        "status": prediction.status,
        "reason": prediction.error.message if prediction.error else prediction.reason or "",
        "preview": preview,
    }


def image_facts(
    prediction: Prediction, drawn: Drawn, pictures: Pictures, notes: Sequence[str]
) -> Facts:
    """Return all that the page tells of an image."""
    names = ClassNames(list(prediction.probabilities))
    classes = _highest(list(prediction.probabilities.items()), MOST_CLASSES)
    told = {
        "id": prediction.id,
        "status": prediction.status,
        "width": prediction.width,
        "height": prediction.height,
        "reason": prediction.reason or "",
        "label": None if prediction.label is None else names.number(prediction.label),
        "probability": prediction.probability,
        "classes": [[names.number(name), chance] for name, chance in classes],
        "more": len(prediction.probabilities) - len(classes),
        "levels": [
            {
                **asdict(each),
                "label": names.number(each.label),
                "probability": known(each.probability),
            }
            for each in prediction.levels[:MOST_LEVELS]
        ],
        "drawn": _drawn_of_levels(drawn),
        "windows": _windows(prediction, drawn.windows, pictures, names),
        "notes": [*notes, *_left_out(drawn)],
        "warnings": list(prediction.warnings[:MOST_WARNINGS]),
        "mattered": prediction.attention_in_words(),
        "stopped": prediction.stopped_in_words(),
        "cost": None if prediction.cost is None else _cost(prediction.cost),
        "facts": _facts(prediction),
        "error": None if prediction.error is None else asdict(prediction.error),
        "overview": _picture(pictures.overview),
    }
    return told | {"names": names.told()}


def known(value: float) -> float | None:
    """Return a number that JSON can hold; None stands for one that is not known."""
    return value if math.isfinite(value) else None


def _windows(
    prediction: Prediction, windows: Sequence[WithJoint], pictures: Pictures, names: ClassNames
) -> list[Facts]:
    centres = _centres(prediction, [window.box for window, _ in windows])
    classes = list(prediction.probabilities)
    told = []
    for place, (window, joint) in enumerate(windows):
        votes: list[tuple[str, float | None]] = [(window.label, known(window.probability))]
        if len(window.probabilities) == len(classes):
            chances = list(zip(classes, window.probabilities, strict=True))
            votes = list(_highest(chances, MOST_VOTES))
        told.append(
            {
                "path": window.path,
                **measured(window, joint, prediction),
                "label": names.number(window.label),
                "votes": [[names.number(name), chance] for name, chance in votes],
                "box": [round(edge, 6) for edge in window.box],
                "centre": centres[place],
                "colour": as_hex(attention_colour(window.attention)),
                "picture": _picture(pictures.windows.get(place)),
            }
        )
    return told


def _highest(chances: Sequence[tuple[str, float]], most: int) -> Sequence[tuple[str, float | None]]:
    finite = [(name, known(chance)) for name, chance in chances]
    return sorted(finite, key=lambda each: -1.0 if each[1] is None else each[1], reverse=True)[
        :most
    ]


def _centres(prediction: Prediction, boxes: Sequence[BoxEdges]) -> list[list[float] | None]:
    """Return longitude and latitude of the middle of each box, None where it has none."""
    nowhere: list[list[float] | None] = [None] * len(boxes)
    place = prediction.georeference
    if place is None or place.crs is None or not boxes:
        return nowhere
    column = [(box[0] + box[2]) / 2 for box in boxes]
    row = [(box[1] + box[3]) / 2 for box in boxes]
    try:
        found = place.to_lonlat(column, row)
    except UnknownCRSError:
        return nowhere
    places = zip(*(each.tolist() for each in found), strict=True)
    return [_on_earth(longitude, latitude) for longitude, latitude in places]


def _on_earth(longitude: float, latitude: float) -> list[float] | None:
    if not (math.isfinite(longitude) and abs(latitude) <= 90):
        return None
    if abs(longitude) > 180:
        longitude = (longitude + 180) % 360 - 180
    return [round(longitude, 6), round(latitude, 6)]


def _drawn_of_levels(drawn: Drawn) -> list[Facts]:
    shown = [window.level for window, _ in drawn.windows]
    return [
        {"level": level, "drawn": shown.count(level), "all": count}
        for level, count in drawn.counts.items()
    ]


def _left_out(drawn: Drawn) -> list[str]:
    shown, counted = len(drawn.windows), sum(drawn.counts.values())
    notes = []
    if shown < counted:
        notes.append(
            f"{shown:,} of {counted:,} windows are drawn: of every level those with the highest "
            "attention."
        )
    if drawn.deeper:
        notes.append(f"{drawn.deeper:,} windows deeper than level {MOST_LEVELS} are not drawn.")
    return notes


def _cost(cost: PredictionCost) -> Facts:
    return {
        name: known(value) if isinstance(value, float) else value
        for name, value in asdict(cost).items()
    }


def _facts(prediction: Prediction) -> list[list[str]]:
    """Return what else is known, as pairs of words; settings that were not made are left out."""
    place, made = prediction.georeference, prediction.provenance
    facts = {
        "image": prediction.image if prediction.image != prediction.id else "",
        "size": _size(prediction),
        "reader": prediction.reader,
        "CRS": (place.crs or "") if place else "",
        "place from": "ground control points, so roughly"
        if place and place.source == "gcps"
        else "",
        "microns per pixel": " x ".join(f"{each:.6g}" for each in prediction.mpp or ()),
        "model": made.model,
        "sha256 of the model": made.sha256,
        "tnet": made.version,
    }
    settings = {
        key.replace("_", " "): value if isinstance(value, str) else json.dumps(value, default=str)
        for key, value in made.config.items()
        if value not in (None, "", {}, [])
    }
    pairs = [*facts.items(), *settings.items()]
    return [[key, _short(text)] for key, text in pairs if text]


def _size(prediction: Prediction) -> str:
    if not prediction.width:
        return ""
    size = f"{prediction.width:,} x {prediction.height:,} pixels"
    return f"{size}, {counted(prediction.bands, 'band')}" if prediction.bands else size


def _short(text: str) -> str:
    return text if len(text) <= LONGEST_FACT else f"{text[: LONGEST_FACT - 1]}…"


def _picture(picture: Picture | None) -> Facts | None:
    return None if picture is None else asdict(picture)
