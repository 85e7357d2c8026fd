"""Which records can be shown: one rule for all formats, so that none draws what another refuses."""

import math
import re
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tnetcli.errors import OutputError
from tnetcli.exporters.looked import Looked
from tnetcli.exporters.overlay import checked_box, checked_transform
from tnetcli.exporters.record_kinds import is_of, misfit
from tnetcli.prediction import (
    AttentionCheck,
    BoxEdges,
    Prediction,
    PredictionCost,
    SeenGlimpse,
    SeenWindow,
)
from tnetcli.wording import first_line, printable, shorten

MOST = 1.000001  # of a share: sums of 32 bit numbers may be a little more than one
FARTHEST = 1e9  # pixels from the corner of an image; browsers draw with 32 bits
LEAST_SIDE = 0.02  # pixels: what is thinner may be nothing at two decimals
LARGEST = 10**18  # of what is counted; tables have 64 bits
SHA256 = re.compile("([0-9a-f]{64})?")
PATH = re.compile("root(/([0-9]+-[0-9]+|w[0-9]+))*")
SHARES = ("attention", "weight", "probability", "valid")


def sound(looked: Looked) -> Looked:
    """Return the same, which is refused as soon as something is met that cannot be shown.

    OutputError names the first that is wrong. The windows are looked at as they are walked.
    """
    prediction = looked.prediction
    try:
        _check_record(prediction)
    except ValueError as error:
        raise _refusal(prediction, error) from error
    if prediction.status != "ok":
        return looked
    return replace(looked, windows=_SoundWindows(prediction, looked.windows))


@dataclass(frozen=True, slots=True)
class _SoundWindows:
    """The windows of a record, looked at each time they are walked."""

    prediction: Prediction
    windows: Iterable[SeenWindow]

    def __iter__(self) -> Iterator[SeenWindow]:
        classes = len(self.prediction.probabilities)
        seen = array("q")  # eight bytes a window, which is all that is kept of it
        for window in self.windows:
            try:
                _check_window(window, classes)
            except ValueError as error:
                named = ValueError(f"window `{printable(str(window.path), 60)}`: {error}")
                raise _refusal(self.prediction, named) from error
            seen.append(hash(window.path))
            yield window
        self._check_names(seen)

    def _check_names(self, seen: "array[int]") -> None:
        names = np.sort(np.frombuffer(seen, np.int64)) if seen else np.zeros(0, np.int64)
        twice = set(names[1:][names[1:] == names[:-1]].tolist())
        met: set[str] = set()
        for window in self.windows if twice else ():
            if hash(window.path) in twice:
                if window.path in met:
                    error = ValueError(f"window `{printable(window.path, 60)}` is there twice")
                    raise _refusal(self.prediction, error)
                met.add(window.path)


def _refusal(prediction: Prediction, error: ValueError) -> OutputError:
    return OutputError(
        f"`{printable(str(prediction.id), 200)}` cannot be shown: {first_line(error)}",
        hint="was its record changed by something else than tnet? predict it again",
    )


def _check_record(prediction: Prediction) -> None:
    # The windows may be any number: they are looked at one by one.
    if said := misfit(replace(prediction, windows=()), Prediction):
        raise ValueError(said)
    for name, value in (("width", prediction.width), ("height", prediction.height)):
        _check_range(name, value, int(prediction.status == "ok"), FARTHEST)
    if prediction.cost is not None:
        _check_cost(prediction.cost)
    if prediction.status != "ok":
        return
    for number, value in enumerate(prediction.offset):
        _check_range(f"offset[{number}]", value, -FARTHEST, FARTHEST)
    checked_transform(prediction)
    for number, microns in enumerate(prediction.microns_per_pixel or ()):
        if not 0 < microns < FARTHEST:
            raise ValueError(f"`microns_per_pixel[{number}]` is {shorten(microns)}")
    if not SHA256.fullmatch(prediction.model_sha256):
        raise ValueError(f"`model_sha256` is none: {printable(prediction.model_sha256, 80)}")
    _check_view_size(prediction.settings.get("view_size"))
    _check_answers(prediction)
    if prediction.attention_check is not None:
        _check_attention(prediction.attention_check)


def _check_answers(prediction: Prediction) -> None:
    _check_share("probability", prediction.probability)
    for name, share in prediction.probabilities.items():
        _check_share(f"probabilities.{printable(name, 40)}", share)
    for number, level in enumerate(prediction.levels):
        _check_range(f"levels[{number}].level", level.level, 1, LARGEST)
        _check_range(f"levels[{number}].windows", level.windows, 0, LARGEST)
        _check_share(f"levels[{number}].probability", level.probability)


def _check_attention(check: AttentionCheck) -> None:
    for name in ("masked", "random", "random_same"):
        share = getattr(check, name)
        if share is not None:
            _check_range(f"attention_check.{name}", share, 0, MOST)
    _check_range("attention_check.draws", check.draws, 1, LARGEST)
    _check_range("attention_check.seed", check.seed, 0, 2**63 - 1)


def _check_cost(cost: PredictionCost) -> None:
    for name in PredictionCost.__slots__:
        value = getattr(cost, name)
        if not (isinstance(value, float) and math.isnan(value)):
            _check_range(f"cost.{name}", value, 0, LARGEST)


def _check_view_size(size: Any) -> None:
    if size is not None and not (is_of(size, float) and 1 <= size <= FARTHEST):
        raise ValueError(f"`settings.view_size` is {printable(shorten(size), 60)}")


def _check_window(window: SeenWindow, classes: int) -> None:
    """Raise ValueError for what is wrong; by hand, as there may be a million of them."""
    path = window.path
    if not isinstance(path, str) or not PATH.fullmatch(path):
        raise ValueError("its path is no way down from the root")
    if type(window.level) is not int or window.level != path.count("/") + 1:
        raise ValueError(f"`level` {printable(shorten(window.level), 60)} does not fit its path")
    if type(window.rank) is not int:
        raise ValueError(f"`rank` is {printable(shorten(window.rank), 60)}, not a whole number")
    _check_range("rank", window.rank, 1, LARGEST)
    if not is_of(window.label, str):
        raise ValueError(f"`label` is {printable(shorten(window.label), 60)}, not text")
    for name in SHARES:
        _check_share(name, getattr(window, name))
    told = window.probabilities
    if told and len(told) != classes:
        raise ValueError(f"tells {len(told)} probabilities of {classes} classes")
    for share in told:
        _check_share("probabilities", share)
    if not all(is_of(step, float) for step in window.steps):
        raise ValueError(f"`steps` are {printable(shorten(window.steps), 60)}, not numbers")
    _check_box(window)
    for number, glimpse in enumerate(window.glimpses, start=1):
        try:
            _check_glimpse(glimpse)
        except ValueError as error:
            raise ValueError(f"glimpse {number}: {error}") from error


def _check_glimpse(glimpse: SeenGlimpse) -> None:
    if not is_of(glimpse.label, str):
        raise ValueError(f"`label` is {printable(shorten(glimpse.label), 60)}, not text")
    _check_share("probability", glimpse.probability)
    _check_box(glimpse)


def _check_box(window: SeenWindow | SeenGlimpse) -> None:
    box: BoxEdges = window.box
    if len(box) != 4 or not all(is_of(edge, float) for edge in box):
        raise ValueError(f"`box` is {printable(shorten(box), 60)}, not four numbers")
    if any(FARTHEST < abs(edge) < math.inf for edge in box):
        raise ValueError(f"`box` lies too far out: {shorten(box)}")
    x0, y0, x1, y1 = checked_box(window)
    if min(x1 - x0, y1 - y0) < LEAST_SIDE:
        raise ValueError(f"`box` is thinner than {LEAST_SIDE} pixels: {shorten(box)}")


def _check_share(name: str, value: Any) -> None:
    """Take a part of the whole, or NaN for one that is not known."""
    if not is_of(value, float):
        raise ValueError(f"`{name}` is {printable(shorten(value), 60)}, not a number")
    if value < 0 or value > MOST:
        raise ValueError(f"`{name}` is {shorten(value)}, not between 0 and 1")


def _check_range(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ValueError(f"`{name}` is {shorten(value)}, not between {least:g} and {most:g}")
