"""Write predictions as one self-contained HTML page."""

import base64
import hashlib
import html
import os
import re
from collections.abc import Iterable, Iterator
from importlib.resources import files

from tnetcli.exporters.base import ATTENTION, HALF_CHARACTERS, Looked, as_hex, as_line
from tnetcli.exporters.html_record import (
    DETAILS,
    Detail,
    Drawn,
    OpenImagery,
    Pictures,
    detail_after,
    image_facts,
    row_facts,
    strongest,
    take_pictures,
)
from tnetcli.files import write_text
from tnetcli.prediction.record import Prediction

TITLE = "Where tnet looked"
NOTHING_DRAWN = Drawn((), {}, 0)
CONTROLS = re.compile("[\x00-\x1f\x7f]+")


def write_page(
    path: str | os.PathLike[str],
    looked: Iterable[Looked],
    imagery: OpenImagery | None,
    *,
    overwrite: bool = False,
    title: str = "",
) -> None:
    """Write one page for all images, whole or not at all.

    `imagery` lends the pixels of an image, which is opened once; None leaves them out. One that
    raises ImageError is shown without pixels and with the reason.
    """
    pieces = page_text(looked, imagery, title=title)
    write_text(path, pieces, overwrite=overwrite, what="the page")


def page_text(
    looked: Iterable[Looked], imagery: OpenImagery | None, *, title: str = ""
) -> Iterator[str]:
    """Return the page piece by piece, holding what belongs to one image at a time."""
    before, after = _frame(title)
    yield before
    yield _block(as_line([as_hex(colour) for colour in ATTENTION]), 'id="attention"')
    spent = 0  # characters of pictures
    for number, each in enumerate(looked, start=1):
        ok = each.prediction.is_done
        drawn = strongest(each) if ok else NOTHING_DRAWN
        pictures, notes = _pictures(each.prediction, drawn, imagery if ok else None, spent)
        spent += pictures.characters
        row = row_facts(number, each.prediction, drawn, pictures.preview)
        yield _block(as_line(row), 'class="row"')
        facts = image_facts(each.prediction, drawn, pictures, notes if ok else ())
        yield _block(as_line(facts), f'id="image-{number}"')
    yield after


def _pictures(
    prediction: Prediction, drawn: Drawn, imagery: OpenImagery | None, spent: int
) -> tuple[Pictures, list[str]]:
    """Return the pictures of an image, and in words what is missing of them."""
    if imagery is None:
        return Pictures(), ["The page was written without pixels."]
    detail = detail_after(spent)
    if detail is None:
        return Pictures(), [
            f"Without pixels: the images before take {_megabytes(spent)}. Export this one alone "
            "to see it."
        ]
    boxes = [window.box for window, _ in drawn.windows]
    places = drawn.spread(detail.thumbnails)
    pictures = take_pictures(imagery, prediction, boxes, places, detail)
    return pictures, _missing(pictures, detail, spent)


def _missing(pictures: Pictures, detail: Detail, spent: int) -> list[str]:
    if pictures.problem:
        what = "Some pixels" if pictures.overview else "The pixels"
        return [f"{what} could not be read: {pictures.problem}"]
    if detail is not DETAILS[0]:
        return [
            f"In little detail: the images before take {_megabytes(spent)}. Export this one alone "
            "to see more."
        ]
    return []


def _megabytes(characters: int) -> str:
    return f"{characters / 1e6:,.0f} MB"


def _frame(title: str) -> tuple[str, str]:
    """Return what comes before and after the images.

    The policy names the one style and the one script by their hashes: nothing else can run, and
    nothing can be fetched.
    """
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; img-src data:; style-src {_hash(style)}; "
        f"script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    plain = CONTROLS.sub(" ", HALF_CHARACTERS.sub("\ufffd", title)).strip()
    parts = {
        "policy": policy,
        "title": html.escape(plain or TITLE),
        "style": style,
        "script": script,
    }
    template = _asset("page.html")
    pieces = re.split(r"\{\{(\w+)\}\}", template)
    filled = [parts.get(piece) if place % 2 else piece for place, piece in enumerate(pieces)]
    middle = filled.index(None)  # {{images}}: what comes in between
    return "".join(map(str, filled[:middle])), "".join(map(str, filled[middle + 1 :]))


def _asset(name: str) -> str:
    return (files("tnetcli") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
    return f"'sha256-{digest}'"


def _block(line: str, attribute: str) -> str:
    """Return JSON as an element that is neither run nor shown, and that no text can end."""
    for character in "&<>\u2028\u2029":
        line = line.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" {attribute}>{line}</script>\n'
