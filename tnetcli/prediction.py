"""The record of one prediction: what was seen, scored and concluded, and what it cost."""

import json
import math
from collections.abc import Iterator
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any, Literal, TypeVar, cast

from tnetcli.errors import TnetError
from tnetcli.wording import public_name, redacted

SCHEMA = "tnet.prediction/1"
Part = TypeVar("Part")
BoxEdges = tuple[float, float, float, float]
STOPS = {
    "levels": "all levels are done",
    "budget": "the budget is spent",
    "confidence": "sure enough",
    "pixels": "closer views would be finer than its pixels",
    "empty": "nothing valid is left to look at",
    "repeats": "all else was seen already",
}
LISTS = {"box", "probabilities", "steps"}  # of a window; JSON knows no tuples
SELDOM = ("steps", "glimpses")  # of a window; no key in JSON where there are none


def _hide(value: Any) -> Any:
    """Return text without the secrets of URLs; records of strangers may hold other values."""
    return redacted(value) if isinstance(value, str) else value


def _made(kind: type[Part], given: dict[str, Any]) -> Part:
    """Return an object of plain values; TypeError names a key that is unknown or missing."""
    try:
        return kind(**given)
    except TypeError as error:
        known = fields(cast(Any, kind))
        unknown = sorted(given.keys() - {each.name for each in known})
        missing = [e.name for e in known if e.default is MISSING and e.name not in given]
        what = f"unknown `{unknown[0]}`" if unknown else f"no `{missing[0]}`" if missing else ""
        raise TypeError(what or str(error)) from error


@dataclass(frozen=True, slots=True)
class SeenGlimpse:
    """A look inside of a window, at the pixels that its view had; `box` is as that of a window.

    `label` and `probability` are what it alone would say, or, of a model that remembers the
    glimpses before, what was known after it.
    """

    box: BoxEdges
    label: str
    probability: float

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> "SeenGlimpse":
        """Take plain values as JSON has them."""
        if not isinstance(data, dict):
            raise TypeError("a glimpse is no object")
        return _made(cls, {**data, "box": tuple(data.get("box", ()))})


@dataclass(frozen=True, slots=True)
class SeenWindow:
    """One window that was looked at; `box` is x0, y0, x1, y1 in full-resolution pixels.

    `attention` is the probability that its parent gave it, `weight` its share in the conclusion,
    `label` and `probability` what it alone would say, `valid` the part of its view
    under which there is data: at most, as a pixel of the view counts where any of it holds data.
    `probabilities` are those of all classes, in the order of the record's own; none where the
    classes are too many to tell them of every window. `steps` are how much each step counted of a
    model that thinks about a window in steps, `glimpses` where a model looked inside of it, one
    after another; none where there are none.
    """

    path: str
    level: int
    box: BoxEdges
    attention: float
    rank: int
    weight: float
    label: str
    probability: float
    valid: float
    probabilities: tuple[float, ...] = ()
    steps: tuple[float, ...] = ()
    glimpses: tuple[SeenGlimpse, ...] = ()

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> "SeenWindow":
        """Take plain values as JSON has them."""
        given = {**data, **{key: tuple(data[key]) for key in LISTS & data.keys()}}
        if "glimpses" in data:
            if not isinstance(data["glimpses"], list):
                raise TypeError("`glimpses` is no list")
            given["glimpses"] = tuple(map(SeenGlimpse.from_data, data["glimpses"]))
        return _made(cls, given)

    def glimpsed(self) -> Iterator["SeenWindow"]:
        """Yield the glimpses as windows `g1`, `g2`, … of the level below.

        Each has the same part of the attention: they are all that was looked at. What they weigh
        and how much of them holds data nobody tells.
        """
        for number, glimpse in enumerate(self.glimpses, start=1):
            yield SeenWindow(
                path=f"{self.path}/g{number}",
                level=self.level + 1,
                box=glimpse.box,
                attention=1 / len(self.glimpses),
                rank=number,
                weight=math.nan,
                label=glimpse.label,
                probability=glimpse.probability,
                valid=math.nan,
            )

    @property
    def is_glimpse(self) -> bool:
        """Say whether it is a glimpse that is shown as a window."""
        return self.path.rpartition("/")[2].startswith("g")


@dataclass(frozen=True, slots=True)
class SeenLevel:
    """What would have been concluded had the looking ended at this level."""

    level: int
    windows: int
    label: str
    probability: float


@dataclass(frozen=True, slots=True)
class PredictionCost:
    """What the prediction took."""

    windows: int
    pixels_decoded: int
    pixels_total: int
    fraction_decoded: float
    bytes_read: int
    file_bytes: int
    read_seconds: float
    model_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Problem:
    """Why an image failed."""

    type: str
    message: str
    hint: str = ""

    def __post_init__(self) -> None:
        for name in ("message", "hint"):
            object.__setattr__(self, name, _hide(getattr(self, name)))

    @classmethod
    def of(cls, error: TnetError) -> "Problem":
        """Keep what the user would have read."""
        return cls(type(error).__name__, str(error), error.hint)


@dataclass(frozen=True, slots=True)
class AttentionCheck:
    """Whether it mattered where was looked: how probable the same answer is otherwise.

    `masked` is with the closest windows hidden wherever they show, None where nothing is left
    to see then, and `masked_label` the answer; `random` is the mean of `draws` walks to windows
    drawn by chance, as many as were looked at, and `random_same` how many of them answer the same.
    """

    masked: float | None
    masked_label: str
    random: float
    random_same: float
    draws: int
    seed: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """One image: predicted, or failed with nothing else lost.

    `stopped` says why it was not looked at any closer: `levels` all done, `budget` spent,
    `confidence` reached, `pixels` (a closer view would be finer than the image's own pixels),
    `empty` (no valid cell left), `repeats` (only windows already seen were left), `failed`.
    `settings` are those that the answer depends on beside the model, `reading` how this image was
    read if that was told of it alone, `fingerprint` tells whether the image is still the one that
    was looked at, `warnings` are why the answer may be wrong. No text of a record holds the login
    or the query values of a URL; `id` differs where these do.
    """

    image: str
    id: str
    status: Literal["ok", "failed"]
    width: int = 0
    height: int = 0
    bands: int = 0
    reader: str = ""
    crs: str | None = None
    transform: tuple[float, ...] | None = None
    georeference: str | None = None  # where that is from: the file's transform, or its gcps
    microns_per_pixel: tuple[float, float] | None = None
    offset: tuple[int, int] = (0, 0)
    model: str = ""
    model_sha256: str = ""
    tnet: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    reading: dict[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    warnings: tuple[str, ...] = ()
    label: str = ""
    probability: float = 0.0
    probabilities: dict[str, float] = field(default_factory=dict)
    stopped: str = ""
    levels: tuple[SeenLevel, ...] = ()
    windows: tuple[SeenWindow, ...] = ()
    cost: PredictionCost | None = None
    attention_check: AttentionCheck | None = None
    error: Problem | None = None
    schema: str = SCHEMA

    def __post_init__(self) -> None:
        object.__setattr__(self, "image", _hide(self.image))
        object.__setattr__(self, "id", public_name(self.id))
        object.__setattr__(self, "warnings", tuple(map(_hide, self.warnings)))

    def stopped_in_words(self) -> str:
        """Say why it was not looked at any closer."""
        return STOPS.get(self.stopped, self.stopped)

    def attention_in_words(self) -> str:
        """Say in one sentence whether it mattered where was looked; nothing if nobody checked."""
        check = self.attention_check
        if check is None:
            return ""
        hidden = "nothing is left to see" if check.masked is None else f"{check.masked:.1%}"
        changed = check.masked_label not in ("", self.label)
        other = f" (then {check.masked_label})" if changed else ""
        return (
            f"{self.label} is {self.probability:.1%} probable as it looked, {hidden} with its "
            f"closest windows hidden{other}, {check.random:.1%} with random windows"
        )

    def to_json(self) -> str:
        """Return one line; a failed record holds only what is known."""
        everything = asdict(self)
        for window in everything["windows"]:
            for key in SELDOM:
                if not window[key]:
                    del window[key]
        record = {"schema": everything.pop("schema"), **everything}
        if self.status == "failed":
            blank = Prediction(self.image, self.id, "failed")
            known = {"schema", "image", "id", "status"}
            record = {
                key: value
                for key, value in record.items()
                if key in known or value != getattr(blank, key)
            }
        else:
            del record["error"]
            for key in ("attention_check", "reading"):
                if not record[key]:
                    del record[key]
        line = json.dumps(record, ensure_ascii=False, allow_nan=False)
        try:
            line.encode()
        except UnicodeEncodeError:  # half characters: a file name that is not UTF-8
            return json.dumps(record, allow_nan=False)
        return line

    @classmethod
    def from_json(cls, line: str) -> "Prediction":
        """Read a line back; ValueError says what is wrong with it."""
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"not JSON: {error}") from error
        return cls.from_data(record)

    @classmethod
    def from_data(cls, record: Any) -> "Prediction":
        """Take plain values as JSON has them; ValueError says what is wrong with them."""
        if not isinstance(record, dict) or record.get("schema") != SCHEMA:
            found = record.get("schema") if isinstance(record, dict) else record
            raise ValueError(f"not a {SCHEMA} record: `{found}`")
        try:
            return _build(record)
        except (TypeError, KeyError) as error:
            raise ValueError(f"not a {SCHEMA} record: {error}") from error


PARTS = {"cost": PredictionCost, "attention_check": AttentionCheck, "error": Problem}


KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("image", "id", "status", "reader", "model", "model_sha256"), (str,)),
    **dict.fromkeys(("tnet", "fingerprint", "label", "stopped"), (str,)),
    **dict.fromkeys(("crs", "georeference"), (str, type(None))),
    **dict.fromkeys(("width", "height", "bands"), (int,)),
    **dict.fromkeys(("settings", "reading", "probabilities"), (dict,)),
    **dict.fromkeys(("levels", "windows", "warnings", "offset"), (list, tuple)),
    "probability": (int, float),
}


def _build(record: dict[str, Any]) -> Prediction:
    given = dict(record)
    for key, kinds in KINDS.items():
        if key in given and not isinstance(given[key], kinds):
            raise TypeError(f"`{key}` is no {' or '.join(kind.__name__ for kind in kinds)}")
    unknown = set(given) - {each.name for each in fields(Prediction)}
    if unknown:
        raise TypeError(f"unknown keys: {', '.join(sorted(unknown))}")
    given["levels"] = tuple(SeenLevel(**each) for each in given.get("levels", ()))
    given["windows"] = tuple(SeenWindow.from_data(each) for each in given.get("windows", ()))
    for key, kind in PARTS.items():
        if given.get(key) is not None:
            given[key] = kind(**given[key])
    for key in ("transform", "microns_per_pixel", "offset", "warnings"):
        if given.get(key) is not None:
            given[key] = tuple(given[key])
    return Prediction(**given)
