"""Numbers and text of a record, as all exporters write them."""

import json
import re
from typing import Any, TypeAlias

from tnetcli.prediction import Prediction, SeenWindow

WithJoint: TypeAlias = tuple[SeenWindow, float | None]  # as `Looked.with_joint` yields them
DIGITS = 9  # significant, as many as a number of 32 bits holds
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
HALF_CHARACTERS = re.compile("[\ud800-\udfff]")


def measured(
    window: SeenWindow, joint: float | None, prediction: Prediction
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
