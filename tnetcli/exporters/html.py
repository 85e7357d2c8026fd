"""Write predictions as one self-contained HTML page."""

import base64
import hashlib
import html
import io
import json
import logging
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.resources import files
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field

from tnetcli.errors import ImageError, OutputError
from tnetcli.exporters.base import (
    RegionWithJoint,
    as_json,
    clean_text,
    globe_of,
    measurements,
    regions_of,
    whole_box,
    write_pieces,
)
from tnetcli.exporters.geojson import ATTENTION_COLOURS, as_hex, attention_colour, class_colour
from tnetcli.exporters.imagery import ImageOptions, Imagery, open_imagery
from tnetcli.prediction.record import BoxEdges, Prediction
from tnetcli.text import counted

OpenImagery: TypeAlias = Callable[[Prediction], AbstractContextManager[Imagery]]
Facts: TypeAlias = dict[str, Any]
TITLE = "tnet predictions"
CONTROLS = re.compile("[\x00-\x1f\x7f]+")
PREVIEW = 96  # pixels, twice as many as the list shows, for fine screens
QUALITY = 85
MAX_REGIONS = 250  # of a level: more cannot be distinguished on a screen
MAX_CLASSES, MAX_REGION_CLASSES = 20, 5  # bars of the image and of a region
MAX_WARNINGS = 20
MAX_FACT = 200  # characters
log = logging.getLogger(__name__)


class HTMLOptions(ImageOptions):
    """Options of the HTML exporter."""

    title: str = Field(default="", description="Title of the page")


class HTMLExporter:
    """Writes a page with a list of images and a viewer; it loads nothing from the network."""

    name = "html"
    suffixes = (".html", ".htm")
    many = True
    options = HTMLOptions

    def write(self, predictions: Iterable[Prediction], path: Path, options: HTMLOptions) -> int:
        """Write a page, and return the number of images that are shown without their pixels."""
        problems: list[str] = []
        write_pieces(path, page_text(predictions, options, problems.append))
        return len(problems)


EXPORTER = HTMLExporter()


class Detail(NamedTuple):
    """Sizes of pictures while the page has fewer than `until` characters."""

    until: int
    overview: int  # pixels of the longest side
    thumbnail: int
    thumbnails: int  # regions per image that have one


# Browsers open a page of 300 MB, but not of gigabytes: detail falls with the images before.
DETAILS = (
    Detail(64 << 20, overview=1280, thumbnail=256, thumbnails=48),
    Detail(160 << 20, overview=640, thumbnail=128, thumbnails=12),
    Detail(256 << 20, overview=320, thumbnail=0, thumbnails=0),
)


def page_text(
    predictions: Iterable[Prediction],
    options: HTMLOptions,
    report: Callable[[str], None] = lambda id: None,
    open_image: OpenImagery | None = None,
) -> Iterator[str]:
    """Yield the page, holding the pictures of one image at a time.

    `report` is called with the id of each image whose pixels cannot be read.
    """
    before, after = _template(options.title)
    yield before
    yield _block(as_json([as_hex(colour) for colour in ATTENTION_COLOURS]), 'id="attention"')
    show = open_image or partial(open_imagery, options=options)
    spent = 0  # characters
    for number, prediction in enumerate(predictions, start=1):
        drawn, pictures = Drawn(), Pictures()
        if prediction.is_done:
            drawn = strongest(prediction, options.levels)
            if options.pixels:
                pictures.take(prediction, drawn, show, spent)
            else:
                pictures.notes.append("The page was written without pixels.")
            if pictures.problem and pictures.overview is None:
                log.warning("%s: %s", prediction.id, pictures.problem)
                report(prediction.id)
        row = _block(as_json(_row_facts(number, prediction, drawn, pictures)), 'class="row"')
        image = _block(as_json(_facts(prediction, drawn, pictures)), f'id="image-{number}"')
        spent += len(row) + len(image)
        yield row
        yield image
    yield after


@dataclass(frozen=True, slots=True)
class Drawn:
    """The regions to draw, by level and falling attention; `counts` are all of each level."""

    regions: tuple[RegionWithJoint, ...] = ()
    counts: dict[int, int] = field(default_factory=dict)

    def spread(self, most: int) -> list[int]:
        """Return the places of at most so many regions, in turn from every level."""
        turns = defaultdict[int, Iterator[int]](count)
        order = [(next(turns[each.level]), place) for place, (each, _) in enumerate(self.regions)]
        return sorted(place for _, place in sorted(order)[:most])

    def note(self) -> list[str]:
        """Return a note if regions are not drawn."""
        shown, total = len(self.regions), sum(self.counts.values())
        which = "those of every level with the highest attention"
        return [f"{shown:,} of {total:,} regions are drawn: {which}."] if shown < total else []


def strongest(prediction: Prediction, levels: frozenset[int] | None = None) -> Drawn:
    """Return the regions of the highest attention of each level."""
    found = defaultdict[int, list[RegionWithJoint]](list)
    for each in regions_of(prediction, levels):
        found[each[0].level].append(each)
    counts = {level: len(found[level]) for level in sorted(found)}
    order = {level: sorted(found[level], key=lambda each: -each[0].attention) for level in counts}
    chosen = chain.from_iterable(each[:MAX_REGIONS] for each in order.values())
    return Drawn(tuple(chosen), counts)


@dataclass(slots=True)
class Pictures:
    """Pictures of one image and of its regions, by their place; `problem` is why some miss."""

    overview: Facts | None = None
    preview: str = ""
    regions: dict[int, Facts] = field(default_factory=dict)
    problem: str = ""
    notes: list[str] = field(default_factory=list)

    def take(
        self, prediction: Prediction, drawn: Drawn, open_image: OpenImagery, spent: int
    ) -> None:
        """Read the pictures of an image, in the detail that is left after `spent` characters."""
        detail = next((each for each in DETAILS if spent < each.until), None)
        before = f"the images before take {spent / 1e6:,.0f} MB. Export this one alone"
        if detail is None:
            self.notes.append(f"Without pixels: {before} to see it.")
            return
        whole = whole_box(prediction)
        try:
            with open_image(prediction) as imagery:
                overview = _as_image(imagery.show(whole, *size_within(whole, detail.overview)))
                self.overview = _encoded(overview)
                overview.thumbnail((PREVIEW, PREVIEW))
                self.preview = _encoded(overview)["source"]
                for place in drawn.spread(detail.thumbnails):
                    box = drawn.regions[place][0].box
                    shown = imagery.show(box, *size_within(box, detail.thumbnail))
                    self.regions[place] = _encoded(_as_image(shown))
        except ImageError as error:
            self.problem = f"{error} ({error.hint})" if error.hint else str(error)
            what = "Some pixels" if self.overview else "The pixels"
            self.notes.append(f"{what} could not be read: {self.problem}")
        else:
            if detail is not DETAILS[0]:
                self.notes.append(f"In little detail: {before} to see more.")


def size_within(box: BoxEdges, longest: int) -> tuple[int, int]:
    """Return width and height of a picture of a box, with no more pixels than the box has."""
    width, height = box[2] - box[0], box[3] - box[1]
    scale = min(1.0, longest / max(width, height))
    return max(math.floor(width * scale + 0.5), 1), max(math.floor(height * scale + 0.5), 1)


def _as_image(pixels: NDArray[np.uint8]) -> Image.Image:
    """Return (height, width, 4) as an image, without alpha if it is opaque."""
    opaque = bool((pixels[..., 3] == 255).all())
    return Image.fromarray(np.ascontiguousarray(pixels[..., : 3 if opaque else 4]))


def _encoded(image: Image.Image) -> Facts:
    """Return a picture as a data URL, with its size in pixels."""
    file = io.BytesIO()
    kind = "jpeg" if image.mode == "RGB" else "webp"  # a tenth of the size of a PNG
    image.save(file, kind, quality=QUALITY, optimize=True)
    data = base64.b64encode(file.getvalue()).decode("ascii")
    source = f"data:image/{kind};base64,{data}"
    return {"source": source, "width": image.width, "height": image.height}


def _row_facts(number: int, prediction: Prediction, drawn: Drawn, pictures: Pictures) -> Facts:
    """Return the row of an image in the list."""
    cost, error = prediction.cost, prediction.error
    windows = cost.windows if cost else sum(drawn.counts.values())
    return {
        "number": number,
        "id": prediction.id,
        "label": prediction.label or "",
        "probability": prediction.probability,
        "windows": windows if prediction.is_done else None,
        "fraction": cost.fraction_decoded if cost else None,
        "status": prediction.status,
        "reason": error.message if error else prediction.reason or "",
        "preview": pictures.preview,
    }


def _facts(prediction: Prediction, drawn: Drawn, pictures: Pictures) -> Facts:
    """Return everything that the page shows of an image; class names are written once."""
    names: dict[str, int] = {}

    def number(name: str) -> int:
        return names.setdefault(name, len(names))

    def numbered(probabilities: dict[str, float], most: int) -> list[list[float]]:
        highest = sorted(probabilities.items(), key=lambda each: -each[1])[:most]
        return [[number(name), probability] for name, probability in highest]

    classes = list(prediction.probabilities)
    centres = _centres(prediction, [region.box for region, _ in drawn.regions])
    windows = []
    for place, (region, joint) in enumerate(drawn.regions):
        own = {region.label: region.probability}
        if len(region.probabilities) == len(classes):
            own = dict(zip(classes, region.probabilities, strict=True))
        windows.append(
            {
                "path": region.path,
                **measurements(region, joint, prediction),
                "label": number(region.label),
                "classes": numbered(own, MAX_REGION_CLASSES),
                "box": [round(edge, 6) for edge in region.box],
                "centre": centres[place],
                "colour": as_hex(attention_colour(region.attention)),
                "picture": pictures.regions.get(place),
            }
        )
    levels = Counter(region.level for region, _ in drawn.regions)
    facts = {
        **{name: getattr(prediction, name) for name in ("id", "status", "width", "height")},
        "reason": prediction.reason or "",
        "label": None if prediction.label is None else number(prediction.label),
        "probability": prediction.probability,
        "classes": numbered(prediction.probabilities, MAX_CLASSES),
        "more": max(len(classes) - MAX_CLASSES, 0),
        "levels": [asdict(each) | {"label": number(each.label)} for each in prediction.levels],
        "drawn": [
            {"level": level, "drawn": levels[level], "all": count}
            for level, count in drawn.counts.items()
        ],
        "windows": windows,
        "notes": pictures.notes + drawn.note(),
        "warnings": list(prediction.warnings[:MAX_WARNINGS]),
        "stopped": prediction.stopped_in_words(),
        "cost": prediction.cost and asdict(prediction.cost),
        "facts": _details(prediction),
        "error": prediction.error and asdict(prediction.error),
        "overview": pictures.overview,
    }
    return facts | {"names": [[name, as_hex(class_colour(name, classes))] for name in names]}


def _centres(prediction: Prediction, boxes: Sequence[BoxEdges]) -> list[list[float] | None]:
    """Return longitude and latitude of the centre of each box, None where it has none."""
    try:
        globe = globe_of(prediction)
    except OutputError:  # an unknown CRS
        globe = None
    centres = [None] * len(boxes) if globe is None else globe.centres(boxes)
    return [
        [round(x if abs(x) <= 180 else (x + 180) % 360 - 180, 6), round(y, 6)]
        if abs(y) <= 90
        else None
        for x, y in (each or (math.nan, math.nan) for each in centres)
    ]


def _details(prediction: Prediction) -> list[list[str]]:
    """Return names and texts of what else is known; empty options are left out."""
    place, provenance = prediction.georeference, prediction.provenance
    size = f"{prediction.width:,} x {prediction.height:,} pixels" if prediction.width else ""
    bands = f", {counted(prediction.bands, 'band')}" if size and prediction.bands else ""
    facts = {
        "image": prediction.image if prediction.image != prediction.id else "",
        "size": size + bands,
        "reader": prediction.reader,
        "CRS": (place.crs or "") if place else "",
        "georeference": "from ground control points" if place and place.source == "gcps" else "",
        "microns per pixel": " x ".join(f"{each:.6g}" for each in prediction.mpp or ()),
        "model": provenance.model,
        "sha256 of the model": provenance.sha256,
        "tnet": provenance.version,
    }
    for key, value in provenance.config.items():
        if value not in (None, "", {}, []):
            text = value if isinstance(value, str) else json.dumps(value, default=str)
            facts[key.replace("_", " ")] = text
    return [
        [name, text if len(text) <= MAX_FACT else f"{text[: MAX_FACT - 1]}…"]
        for name, text in facts.items()
        if text
    ]


def _template(title: str) -> tuple[str, str]:
    """Return the page before and after the images.

    The content security policy allows the one style and the one script by their hashes, so
    nothing else runs and nothing is fetched.
    """
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; "
        f"script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    plain = CONTROLS.sub(" ", clean_text(title)).strip()
    parts = {"{{policy}}": policy, "{{style}}": style, "{{script}}": script}
    parts["{{title}}"] = html.escape(plain or TITLE)  # last: nothing in it is replaced
    before, after = _asset("page.html").split("{{images}}")
    for name, part in parts.items():
        before, after = before.replace(name, part), after.replace(name, part)
    return before, after


def _asset(name: str) -> str:
    return (files("tnetcli") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
    return f"'sha256-{digest}'"


def _block(line: str, attribute: str) -> str:
    """Return JSON in an element that is neither run nor shown, and that no text can close."""
    for character in "&<>\u2028\u2029":
        line = line.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" {attribute}>{line}</script>\n'
