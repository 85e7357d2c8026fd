"""Checked boxes, transforms and numbers of a record, as all exporters write them."""

import json
import math
import re
from typing import Any, TypeAlias

from tnetcli.geometry import Window
from tnetcli.prediction import BoxEdges, Prediction, SeenGlimpse, SeenWindow
from tnetcli.wording import printable, shorten

Transform: TypeAlias = tuple[float, float, float, float, float, float]
WithJoint: TypeAlias = tuple[SeenWindow, float | None]  # as `Looked.with_joint` yields them
FARTHEST = 1e12  # metres or degrees: no planet is as large
SMALLEST = 1e-30  # of a pixel, in the square of these: a millionth of what is ever seen
DIGITS = 9  # significant, as many as a number of 32 bits holds
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
HALF_CHARACTERS = re.compile("[\ud800-\udfff]")


def checked_box(window: SeenWindow | SeenGlimpse) -> BoxEdges:
    """Return the edges of a window; ValueError if they are those of no rectangle."""
    x0, y0, x1, y1 = window.box
    Window(x0, y0, x1 - x0, y1 - y0)
    return window.box


def checked_transform(prediction: Prediction) -> Transform | None:
    """Return what leads from pixels to the map, if anything; ValueError if it leads nowhere."""
    if prediction.transform is None:
        return None
    try:
        a, b, c, d, e, f = map(float, prediction.transform)
    except (OverflowError, ValueError):
        a = b = c = d = e = f = math.nan
    is_flat = abs(a * e - b * d) < SMALLEST
    if is_flat or not all(abs(each) <= FARTHEST for each in (a, b, c, d, e, f)):
        told = ", ".join(map(shorten, prediction.transform))
        raise ValueError(f"`transform` leads nowhere: {printable(told, 100)}")
    return a, b, c, d, e, f


def measured(
    window: SeenWindow, joint: float | None, prediction: Prediction
) -> dict[str, float | None]:
    """Return the numbers told of a window; None stands for one that is not known."""
    view_size = prediction.settings.get("view_size")
    across = window.box[2] - window.box[0]
    return {
        "level": window.level,
        "rank": window.rank,
        "attention": _number(window.attention),
        "joint": _number(joint),
        "weight": _number(window.weight),
        "probability": _number(window.probability),
        "valid": _number(window.valid),
        # A glimpse has the pixels of the view it is a part of, which is not told here.
        "downsample": _number(across / view_size) if view_size and not window.is_glimpse else None,
    }


def _number(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{DIGITS}g}")


def as_line(value: Any) -> str:
    """Return JSON in one line that can be written as UTF-8: half characters become U+FFFD."""
    text = ENCODER.encode(value)
    return text if text.isascii() else HALF_CHARACTERS.sub("\ufffd", text)
