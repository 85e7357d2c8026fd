"""Select regions of predictions, and name output files."""

import colorsys
import hashlib
import json
import math
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tnetcli.errors import OutputError
from tnetcli.prediction.record import Prediction, RegionRecord
from tnetcli.text import reason

Colour: TypeAlias = tuple[int, int, int]

# Okabe and Ito: told apart by the colour-blind as well; black and pale yellow are left out.
CLASSES: tuple[Colour, ...] = (
    (0, 114, 178),
    (230, 159, 0),
    (0, 158, 115),
    (204, 121, 167),
    (86, 180, 233),
    (213, 94, 0),
)
# From dark to bright, so that it also reads in grey: violet, red, orange, pale yellow.
ATTENTION: tuple[Colour, ...] = (
    (40, 11, 84),
    (101, 21, 110),
    (159, 42, 99),
    (212, 72, 66),
    (245, 125, 21),
    (250, 193, 39),
    (252, 255, 164),
)
GOLDEN = (math.sqrt(5) - 1) / 2  # of a turn: hues that never come close to one another soon


def class_colour(label: str, classes: Sequence[str]) -> Colour:
    """Return the colour of a class, the same wherever the classes of the model are the same."""
    try:
        number = classes.index(label)
    except ValueError:
        number = len(CLASSES) + zlib.crc32(label.encode("utf-8", "surrogatepass")) % 1000
    if number < len(CLASSES):
        return CLASSES[number]
    red, green, blue = colorsys.hsv_to_rgb(number * GOLDEN % 1.0, 0.65, 0.85)
    return round(255 * red), round(255 * green), round(255 * blue)


def attention_colour(attention: float) -> Colour:
    """Return the colour of an attention from 0 to 1, brighter for more; nothing is 0."""
    position = min(max(attention, 0.0), 1.0) if math.isfinite(attention) else 0.0
    position *= len(ATTENTION) - 1
    below = min(int(position), len(ATTENTION) - 2)
    part = position - below
    low, high = ATTENTION[below], ATTENTION[below + 1]
    red, green, blue = (round(a + part * (b - a)) for a, b in zip(low, high, strict=True))
    return red, green, blue


def as_hex(colour: Colour) -> str:
    """Return `#rrggbb`."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


@dataclass(frozen=True, slots=True)
class Choice:
    """Which windows are wanted: of these levels, None for all, and with this attention at least."""

    levels: frozenset[int] | None = None
    least_attention: float = 0.0

    def takes(self, window: RegionRecord) -> bool:
        """Say whether a window is wanted."""
        return (self.levels is None or window.level in self.levels) and self.attends(window)

    def attends(self, window: RegionRecord) -> bool:
        """Say whether a window has the attention that is asked for, if any is."""
        return not self.least_attention or window.attention >= self.least_attention


EVERYTHING = Choice()


@dataclass(frozen=True, slots=True)
class Looked:
    """A prediction, and which of its windows are exported."""

    prediction: Prediction
    choice: Choice = EVERYTHING

    def chosen(self) -> Iterator[RegionRecord]:
        """Yield the windows that are wanted, and glimpses as windows of the level below."""
        return (window for window in self._with_glimpses() if self.choice.takes(window))

    def with_joint(self) -> Iterator[tuple[RegionRecord, float | None]]:
        """Yield the chosen windows and glimpses, each with the product of attention along its path.

        The product is None where a parent is not among the windows of the record.
        """
        joint: dict[str, float] = {"": 1.0}
        for window in self._with_glimpses():
            above = joint.get(window.path.rpartition("/")[0])
            if above is not None:
                # Sums of 32-bit numbers may exceed one a little.
                joint[window.path] = min(above * window.attention, 1.0)
            if self.choice.takes(window):
                yield window, joint.get(window.path)

    def _with_glimpses(self) -> Iterator[RegionRecord]:
        for window in self.prediction.windows:
            yield window
            if self.choice.attends(window):  # else they would be left alone
                yield from window.glimpsed()


WithJoint: TypeAlias = tuple[RegionRecord, float | None]  # as `Looked.with_joint` yields them
DIGITS = 9  # significant, as many as a number of 32 bits holds
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
HALF_CHARACTERS = re.compile("[\ud800-\udfff]")


def measured(
    window: RegionRecord, joint: float | None, prediction: Prediction
) -> dict[str, float | None]:
    """Return the numbers told of a window; None stands for one that is not known."""
    view_size = prediction.provenance.config.get("view_size")
    across = window.box[2] - window.box[0]
    return {
        "level": window.level,
        "rank": window.rank,
        "attention": _number(window.attention),
        "joint": _number(joint),
        "weight": _number(window.share),
        "probability": _number(window.probability),
        "valid": _number(window.valid),
        # A glimpse has the pixels of the view it is a part of, which is not told here.
        "downsample": _number(across / view_size)
        if isinstance(view_size, int | float) and not window.is_glimpse
        else None,
    }


def _number(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")


def as_line(value: Any) -> str:
    """Return JSON in one line that can be written as UTF-8: half characters become U+FFFD."""
    text = ENCODER.encode(value)
    return text if text.isascii() else HALF_CHARACTERS.sub("\ufffd", text)


ROOT = "_"
LONGEST = 200  # bytes of a name; file systems take 255
DEEPEST = 1500  # bytes of all folders together; systems take 4096, and the output lies somewhere


class ImageFolder:
    """Gives every image a file of its own below one folder, which is made."""

    def __init__(self, folder: str | os.PathLike[str], suffix: str) -> None:
        self.folder = Path(folder)
        self.suffix = suffix
        _make(self.folder)

    def path(self, id: str) -> Path:
        """Return the file of an image: its id below the folder, and no other's.

        What file systems do not take is replaced; a digest then keeps apart what would meet.
        """
        *folders, name = id.split("/")
        if len(id.encode(errors="surrogatepass")) > DEEPEST:
            folders = [ROOT]  # no system takes it as it is; the digest tells it from others
        safe = [_safe(each) for each in folders]
        safe = [f"{each}_" if each.endswith(self.suffix) else each for each in safe]  # no file's
        told = "/".join([*safe, _safe(name)])
        # Absolute paths lie below `_`, and nothing else does without a digest.
        plain = f"{ROOT}{id}" if id.startswith("/") else id
        if told != plain or folders[:1] == [ROOT]:
            digest = hashlib.blake2b(id.encode(errors="surrogatepass"), digest_size=4)
            name = f"{_safe(name)}-{digest.hexdigest()}"
        return self.folder.joinpath(*safe, f"{name}{self.suffix}")

    def place(self, id: str) -> Path:
        """Return the file of an image, and see to it that its folder is there."""
        path = self.path(id)
        _make(path.parent)
        return path


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot make the folder `{folder}`: {reason(error)}", hint="name another"
        ) from error


def _safe(part: str) -> str:
    """Return a part of a path that leads nowhere else and that file systems take."""
    plain = re.sub(r'[\x00-\x1f<>:"|?*\\\ud800-\udfff]', "_", part)
    plain = plain.encode()[-LONGEST:].decode(errors="ignore")
    return "_" if plain in ("", ".", "..") else plain
