"""Look at one spoilt image as `tnet info` and a prediction do, and judge what came out.

A reader may refuse an image, or a window of it, with an error of its own: `TnetError`. What it
does give must be right wherever anybody can tell:

- untouched: blocks whose bytes, and whose descriptions, nobody changed are as they were;
- cut off: of a file that was cut off, all that is given is as it was;
- checked: so it is where a checksum guards the changed bytes (DEFLATE and gzip blocks, PNG, zip,
  CRC-32C). A flipped bit in other pixels is one that no reader can notice;
- moved: blocks that were exchanged have changed places, lost ones of a zarr are not valid;
- witness: where what describes the image was changed, the library of the format reads the same
  bytes, and if it gives pixels as well, they are the same. After JPEG they are as bright, within a
  grey level on average: libraries enlarge subsampled chroma in different ways.
"""

import json
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from soak_harm import Harmed, Known
from soak_images import Base
from soak_places import BoxTuple
from soak_witness import Speechless, Witness, boxes_of, difference, read_box

from tnetcli.cli.info import Walk, as_json, as_text, inspect
from tnetcli.errors import TnetError
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Pixels, Reader, ReadOptions
from tnetcli.readers.detect import open_image
from tnetcli.traversal.config import TraversalConfig

VIEW = Size(32, 32)
LOSSY = 1.0  # grey levels, on average, between decoders of JPEG


@dataclass
class Looked:
    """What one image came to."""

    outcome: str = "ok"  # or "refused": an error of ours; "traceback": any other
    problem: str = ""
    told: int = 0  # boxes of which somebody can tell how they should look
    wrong: list[str] = field(default_factory=list)


@dataclass
class Seen:
    """The boxes of an open image that were read without an error."""

    reader: Reader
    boxes: list[tuple[int, BoxTuple, Pixels]]


def look(path: Path, looked: Looked) -> Seen | None:
    """Describe an image and read all of it, box by box; the caller closes what is returned."""
    try:
        found = inspect(
            str(path),
            reader=None,
            options=ReadOptions(),
            walk=Walk(TraversalConfig(levels=3, keep=(2, 1)), 32),
        )
        json.loads(as_json(found))
        if found.error is None:
            as_text(found)
        reader = open_image(path)
    except TnetError as error:
        _note(looked, error)
        return None
    except Exception:
        looked.outcome, looked.problem = "traceback", traceback.format_exc()
        return None
    seen = Seen(reader, [])
    try:
        _view(reader, looked)
        for level, box in boxes_of(reader):
            try:
                pixels = read_box(reader, level, box)
            except TnetError as error:
                _note(looked, error)
                continue
            _check(reader, pixels, Size(box[2] - box[0], box[3] - box[1]))
            seen.boxes.append((level, box, pixels))
    except Exception:
        looked.outcome, looked.problem = "traceback", traceback.format_exc()
    return seen


def _view(reader: Reader, looked: Looked) -> None:
    """Read the whole image small, and a window across its edge."""
    size = reader.size
    for window in (
        Window.whole(size),
        Window(size.width * 0.6, -0.3 * size.height, size.width * 0.7, size.height * 0.7),
    ):
        try:
            pixels = reader.read(window, VIEW)
        except TnetError as error:
            _note(looked, error)
        else:
            _check(reader, pixels, VIEW)


def _check(reader: Reader, pixels: Pixels, size: Size) -> None:
    """Hold a reader to its promise about any view; what it breaks counts as a traceback."""
    assert pixels.values.shape == (len(reader.bands), size.height, size.width)
    assert pixels.valid.shape == (size.height, size.width)
    assert pixels.values.dtype == reader.dtype
    assert not pixels.values[:, ~pixels.valid].any()


def _note(looked: Looked, error: TnetError) -> None:
    assert str(error)
    assert error.hint, f"no hint: {error}"
    looked.outcome = "refused"
    looked.problem = looked.problem or f"{type(error).__name__}: {error}"


def judge(base: Base, harmed: Harmed, seen: Seen, looked: Looked) -> None:
    """Compare what was read with what is known, and else with what the library reads."""
    witness = Witness(seen.reader)
    sizes = [level.size for level in seen.reader.info.levels]
    same_image = bool(sizes) and sizes[0] == base.sizes[0]
    for level, box, pixels in seen.boxes:
        known = None
        if same_image and sizes[level] in base.sizes:
            known = harmed.known[base.sizes.index(sizes[level])]
        fault = None
        if known is not None:
            told, fault = _compare(known, box, pixels)
            looked.told += told
            if fault is None or not harmed.arguable:
                if fault is not None:
                    looked.wrong.append(f"level {level}, {box}: {fault}")
                continue
        elif not harmed.arguable:
            continue
        try:
            theirs = witness.read(level, box)
        except Speechless:
            if fault is not None:
                looked.wrong.append(f"level {level}, {box}: {fault}; no witness")
            continue
        looked.told += fault is None
        others = [_differ(pixels, each, lossy=witness.is_lossy(level)) for each in theirs]
        if all(others):
            looked.wrong.append(f"level {level}, {box}: {others[0]} than the library's; {fault}")


def _compare(known: Known, box: BoxTuple, pixels: Pixels) -> tuple[bool, str | None]:
    """Say whether anything can be told, and what is wrong."""
    left, top, right, bottom = box
    sure = ~known.free[top:bottom, left:right]
    if not sure.any():
        return False, None
    values = known.pixels.values[:, top:bottom, left:right]
    valid = known.pixels.valid[top:bottom, left:right]
    if pixels.values.shape != values.shape or pixels.values.dtype != values.dtype:
        return True, f"{pixels.values.shape} {pixels.values.dtype} instead of {values.shape}"
    if (pixels.valid != valid)[sure].any():
        return (
            True,
            f"{int((pixels.valid != valid)[sure].sum())} pixels are valid that were not, or not",
        )
    other = (pixels.values != values).any(axis=0) & sure
    return True, f"{int(other.sum())} pixels are others" if other.any() else None


def _differ(pixels: Pixels, theirs: NDArray[Any], *, lossy: bool) -> str:
    if theirs.shape != pixels.values.shape:
        return f"shape {pixels.values.shape}, not {theirs.shape},"
    mean = difference(pixels, theirs, lossy=lossy)
    return "" if mean <= (LOSSY if lossy else 0) else f"{mean:.3g} grey levels other"
