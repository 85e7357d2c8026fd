"""Read one damaged image as `tnet info` and a prediction do, and check the pixels.

A reader may reject an image, or a window of it, with a `TnetError`. Pixels that it returns must be
correct wherever the correct value is known:

- untouched: blocks whose bytes and descriptions were not changed are equal to the original;
- truncated: whatever a reader returns of a truncated file is equal to the original;
- checksummed: so are blocks with a checksum (DEFLATE and gzip blocks, PNG, zip, CRC-32C). A flipped
  bit in other pixels cannot be detected by any reader;
- moved: exchanged blocks have changed places; missing chunks of a zarr are not valid;
- reference: where the description of the image was changed, the library of the format reads the
  same bytes. If it returns pixels, they must be equal. JPEG pixels must be equally bright, within
  one grey level on average: libraries upsample chroma in different ways.
"""

import json
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from numpy.typing import NDArray
from soak_damage import Damaged, Known
from soak_images import Base
from soak_places import BoxTuple
from soak_reference import NoReference, Reference, boxes_of, difference, read_box

from tnetcli.cli.info import Assumptions, inspect
from tnetcli.errors import TnetError
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Pixels, Reader, ReadOptions
from tnetcli.readers.detect import open_image
from tnetcli.traversal.config import TraversalConfig

VIEW = Size(32, 32)
LOSSY = 1.0  # mean difference between JPEG decoders, in grey levels


@dataclass
class Checked:
    """Outcome of one image."""

    outcome: str = "ok"  # or "refused": an error of ours; "traceback": any other
    problem: str = ""
    checked: int = 0  # boxes whose correct pixels are known
    wrong: list[str] = field(default_factory=list)


@dataclass
class ReadBoxes:
    """The boxes of an open image that were read without an error."""

    reader: Reader
    boxes: list[tuple[int, BoxTuple, Pixels]]


def read_image(path: Path, result: Checked) -> ReadBoxes | None:
    """Describe an image and read all of it, box by box; the caller closes the returned reader."""
    try:
        assumed = Assumptions(TraversalConfig(levels=3, keep=(2, 1)), 32)
        json.dumps(inspect(str(path), None, ReadOptions(), assumed), allow_nan=False)
        reader = open_image(path)
    except TnetError as error:
        _note(result, error)
        return None
    except Exception:
        result.outcome, result.problem = "traceback", traceback.format_exc()
        return None
    boxes_read = ReadBoxes(reader, [])
    try:
        _view(reader, result)
        for level, box in boxes_of(reader):
            try:
                pixels = read_box(reader, level, box)
            except TnetError as error:
                _note(result, error)
                continue
            _check(reader, pixels, Size(box[2] - box[0], box[3] - box[1]))
            boxes_read.boxes.append((level, box, pixels))
    except Exception:
        result.outcome, result.problem = "traceback", traceback.format_exc()
    return boxes_read


def _view(reader: Reader, result: Checked) -> None:
    """Read the whole image at a small size, and a window across its edge."""
    size = reader.size
    for window in (
        Window.whole(size),
        Window(size.width * 0.6, -0.3 * size.height, size.width * 0.7, size.height * 0.7),
    ):
        try:
            pixels = reader.read(window, VIEW)
        except TnetError as error:
            _note(result, error)
        else:
            _check(reader, pixels, VIEW)


def _check(reader: Reader, pixels: Pixels, size: Size) -> None:
    """Check the promises of a reader for any view; a violation counts as a traceback."""
    assert pixels.values.shape == (len(reader.bands), size.height, size.width)
    assert pixels.valid.shape == (size.height, size.width)
    assert pixels.values.dtype == reader.dtype
    assert not pixels.values[:, ~pixels.valid].any()


def _note(result: Checked, error: TnetError) -> None:
    assert str(error)
    assert error.hint, f"no hint: {error}"
    result.outcome = "refused"
    result.problem = result.problem or f"{type(error).__name__}: {error}"


def compare(base: Base, damaged: Damaged, boxes_read: ReadBoxes, result: Checked) -> None:
    """Compare the boxes with the known pixels, or else with those of the reference library."""
    reference = Reference(boxes_read.reader)
    sizes = [level.size for level in boxes_read.reader.info.levels]
    same_image = bool(sizes) and sizes[0] == base.sizes[0]
    for level, box, pixels in boxes_read.boxes:
        known = None
        if same_image and sizes[level] in base.sizes:
            known = damaged.known[base.sizes.index(sizes[level])]
        fault = None
        if known is not None:
            checked, fault = _compare(known, box, pixels)
            result.checked += checked
            if fault is None or not damaged.arguable:
                if fault is not None:
                    result.wrong.append(f"level {level}, {box}: {fault}")
                continue
        elif not damaged.arguable:
            continue
        try:
            theirs = reference.read(level, box)
        except NoReference:
            if fault is not None:
                result.wrong.append(f"level {level}, {box}: {fault}; no reference")
            continue
        result.checked += fault is None
        others = [_differ(pixels, each, lossy=reference.is_lossy(level)) for each in theirs]
        if all(others):
            result.wrong.append(f"level {level}, {box}: {others[0]} than the library's; {fault}")


def _compare(known: Known, box: BoxTuple, pixels: Pixels) -> tuple[bool, str | None]:
    """Return whether the pixels are known, and a description of the first mismatch."""
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
            f"{int((pixels.valid != valid)[sure].sum())} pixels differ in validity",
        )
    other = (pixels.values != values).any(axis=0) & sure
    return True, f"{int(other.sum())} pixels differ" if other.any() else None


def _differ(pixels: Pixels, theirs: NDArray[Any], *, lossy: bool) -> str:
    if theirs.shape != pixels.values.shape:
        return f"shape {pixels.values.shape}, not {theirs.shape},"
    mean = difference(pixels, theirs, lossy=lossy)
    return "" if mean <= (LOSSY if lossy else 0) else f"{mean:.3g} grey levels"
