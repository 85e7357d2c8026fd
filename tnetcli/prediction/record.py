"""The prediction record: one validated object per image."""

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Final, Literal, Self, TypeAlias, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, JsonValue, model_validator
from pydantic.dataclasses import dataclass

from tnetcli.errors import TnetError
from tnetcli.geometry import Georeference
from tnetcli.text import check_plain, escape_surrogates, printable, public_name, redacted, shorten
from tnetcli.traversal.config import StopReason

SCHEMA: Final = "tnet.prediction/2"
MAX_COUNT = 10**18  # tables have 64 bits
MAX_PIXEL = 1e9  # from the corner of an image; browsers draw with 32 bits
MAX_ON_MAP = 1e12  # metres or degrees: larger than any planet
MIN_AREA = 1e-30  # of a pixel on the map, in square units of the map
MIN_SIDE = 0.02  # pixels of a box: thinner ones may vanish at two decimals
SUM_TOLERANCE = 1e-3  # window probabilities are rounded to 6 decimals
PATH = r"^root(/([0-9]+-[0-9]+|[gw][0-9]+))*$"  # cells, fixed regions, glimpses

STOP_REASONS: dict[StopReason, str] = {
    "max_level": "all levels are done",
    "native_resolution": "reached native resolution",
    "exhausted": "all other regions were read already",
    "no_data": "no region with valid pixels is left",
    "budget": "the budget is spent",
    "confidence": "reached the requested confidence",
    "failed": "failed",
}

CONFIG = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def _is_empty(value: object) -> bool:
    return value is None or value == ()


# Without secrets of URLs, and with bytes that are not UTF-8 escaped.
Text: TypeAlias = Annotated[str, AfterValidator(lambda text: redacted(escape_surrogates(text)))]
Count: TypeAlias = Annotated[int, Field(ge=0, le=MAX_COUNT)]
Ordinal: TypeAlias = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Amount: TypeAlias = Annotated[float, Field(ge=0, le=MAX_COUNT)]
Pixels: TypeAlias = Annotated[int, Field(ge=0, le=MAX_PIXEL)]
# Sums of 32-bit numbers may exceed one a little.
Share: TypeAlias = Annotated[float, Field(ge=0, le=1.000001)]
Shares: TypeAlias = Annotated[tuple[Share, ...], Field(fail_fast=True)]
Edge: TypeAlias = Annotated[float, Field(ge=-MAX_PIXEL, le=MAX_PIXEL)]
BoxEdges: TypeAlias = tuple[Edge, Edge, Edge, Edge]
Microns: TypeAlias = Annotated[float, Field(gt=0, lt=MAX_PIXEL)]
Corner: TypeAlias = Annotated[int, Field(ge=-MAX_PIXEL, le=MAX_PIXEL)]
Plain: TypeAlias = Annotated[dict[str, JsonValue], AfterValidator(check_plain)]


# Dataclasses with slots: a window takes a third of the memory of a pydantic model.
@dataclass(frozen=True, slots=True, config=CONFIG)
class GlimpseRecord:
    """A part of a window's view that the model read on its own, in full-resolution pixels.

    `label` and `probability` are its own prediction; of a recurrent model, the one after it.
    """

    box: BoxEdges
    label: str
    probability: Share


@dataclass(frozen=True, slots=True, config=CONFIG)
class RegionRecord:
    """One window that was read; `box` is x0, y0, x1, y1 in full-resolution pixels.

    `attention` is the probability that its parent gave it, `rank` its place within its level,
    `share` its weight in the prediction of the image. `label`, `probability` and `probabilities`
    (in the order of the record's classes, empty above 100) are what it predicts alone. `valid` is
    the fraction of its view that holds data. `evidence` for the predicted class, `steps`, the
    weights of a recurrent model's steps, and `glimpses` are left out of the JSON if there are none.
    """

    path: Annotated[str, Field(pattern=PATH)]
    level: Ordinal
    box: BoxEdges
    attention: Share
    rank: Ordinal
    share: Share | None
    label: str
    probability: Share
    valid: Share | None
    probabilities: Shares = ()
    evidence: Annotated[float | None, Field(exclude_if=_is_empty)] = None
    steps: Annotated[tuple[float, ...], Field(fail_fast=True, exclude_if=_is_empty)] = ()
    glimpses: Annotated[tuple[GlimpseRecord, ...], Field(fail_fast=True, exclude_if=_is_empty)] = ()

    def glimpsed(self) -> Iterator["RegionRecord"]:
        """Yield the glimpses as windows `g1`, `g2`, … of the level below, with equal attention."""
        attention = 1 / max(len(self.glimpses), 1)
        for rank, each in enumerate(self.glimpses, start=1):
            path, level = f"{self.path}/g{rank}", self.level + 1
            yield RegionRecord(
                path, level, each.box, attention, rank, None, each.label, each.probability, None
            )

    @property
    def is_glimpse(self) -> bool:
        """Return True for a glimpse that `glimpsed` turned into a window."""
        return "g" in self.path


@dataclass(frozen=True, slots=True, config=CONFIG)
class LevelRecord:
    """The prediction from the windows down to this level."""

    level: Ordinal
    windows: Count
    label: str
    probability: Share


@dataclass(frozen=True, slots=True, config=CONFIG)
class PredictionCost:
    """Cost of a prediction: windows, pixels, bytes and seconds."""

    windows: Count
    pixels_decoded: Count
    pixels_total: Count
    fraction_decoded: Amount
    bytes_read: Count
    file_bytes: Count
    read_seconds: Amount
    model_seconds: Amount
    seconds: Amount


@dataclass(frozen=True, slots=True, config=CONFIG)
class Problem:
    """The error of a failed image: the name of its class, its message and its hint."""

    type: str
    message: Text
    hint: Text = ""

    @classmethod
    def of(cls, error: TnetError) -> "Problem":
        """Return the record of an error."""
        return cls(type(error).__name__, str(error), error.hint)


@dataclass(frozen=True, slots=True, config=CONFIG)
class Provenance:
    """Origin of a prediction: model name, sha256 of its file, tnet version, runtime, settings.

    `config` holds the settings that the prediction depends on.
    """

    model: str = ""
    sha256: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")] = ""
    version: str = ""
    runtime: Literal["torch", "onnx"] = "torch"
    config: Plain = Field(default_factory=dict)


class Prediction(BaseModel):
    r"""The record of one image, `tnet.prediction/2`.

    - `status`: `ok`; `abstained`: no label, a `reason`, and everything that was computed; or
      `failed`: an `error`. Abstained images are done: they are not predicted again on resume.
    - `outcome`: what `task` adds to label and probabilities; empty for classification.
    - `offset`: the corner of the bounds of a slide, in pixels. `mpp`: microns per pixel, x and y.
    - `reader`, `reading`: what read the image, and its own read options, if it has any.
    - `fingerprint`: identifies the content of the image file. `warnings`: reasons for doubt.

    No text holds the login or the query values of a URL; `id` differs where these do. Bytes of file
    names that are not UTF-8 are spelled out (`\xff`).
    """

    model_config = ConfigDict(**CONFIG, frozen=True, serialize_by_alias=True)

    schema_: Literal["tnet.prediction/2"] = Field(alias="schema")
    id: Annotated[str, AfterValidator(public_name)]
    image: Text
    status: Literal["ok", "abstained", "failed"]
    reason: str | None = None
    label: str | None = None
    probability: Share | None = None
    probabilities: dict[str, Share] = Field(default_factory=dict)
    task: str = "classification"
    outcome: Plain = Field(default_factory=dict)
    stop_reason: StopReason | None = None
    warnings: Annotated[tuple[Text, ...], Field(fail_fast=True)] = ()
    error: Problem | None = None
    width: Pixels = 0
    height: Pixels = 0
    bands: Count = 0
    offset: tuple[Corner, Corner] = (0, 0)
    georeference: Georeference | None = None
    mpp: tuple[Microns, Microns] | None = None
    reader: str = ""
    reading: Plain = Field(default_factory=dict)
    fingerprint: str = ""
    provenance: Provenance = Provenance()
    cost: PredictionCost | None = None
    levels: Annotated[tuple[LevelRecord, ...], Field(fail_fast=True)] = ()
    windows: Annotated[tuple[RegionRecord, ...], Field(fail_fast=True)] = ()

    def replace(self, **changes: Any) -> Self:
        """Return a validated copy with other values."""
        values = {("schema" if name == "schema_" else name): value for name, value in self}
        return type(self).model_validate({**values, **changes})

    @property
    def is_done(self) -> bool:
        """Return True unless the image failed."""
        return self.status != "failed"

    def stopped_in_words(self) -> str:
        """Return why the traversal stopped, as part of a sentence; empty if unknown."""
        return "" if self.stop_reason is None else STOP_REASONS[self.stop_reason]

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.status == "ok" and self.task == "classification":
            if self.label is None or self.probability is None:
                raise ValueError("an `ok` record needs `label` and `probability`")
        elif self.status != "ok" and self.label is not None:
            raise ValueError(f"`label` has to be null for status `{self.status}`")
        if (self.status == "abstained") != bool(self.reason):
            raise ValueError("`reason` is for `abstained` records, which need one")
        if (self.status == "failed") != (self.error is not None):
            raise ValueError("`error` is for `failed` records, which need one")
        if self.is_done:
            self._check_image()
            self._check_classes()
            self._check_windows()
        return self

    def _check_image(self) -> None:
        if not self.width or not self.height:
            raise ValueError(f"the image has {self.width} x {self.height} pixels")
        if self.georeference is not None:
            a, b, _, d, e, _ = transform = self.georeference.transform
            # `not` also refuses numbers that are not finite.
            is_near = all(abs(each) <= MAX_ON_MAP for each in transform)
            if not (is_near and abs(a * e - b * d) >= MIN_AREA):
                values = printable(", ".join(map(shorten, transform)), 100)
                raise ValueError(f"`georeference.transform` is degenerate: {values}")
        view_size = self.provenance.config.get("view_size", 1)
        is_number = isinstance(view_size, int | float) and not isinstance(view_size, bool)
        if not is_number or not 1 <= cast(float, view_size) <= MAX_PIXEL:
            raise ValueError(f"`provenance.config.view_size` is {_quoted(view_size)}")

    def _check_classes(self) -> None:
        if [each.level for each in self.levels] != [*range(1, len(self.levels) + 1)]:
            raise ValueError("`levels` are not numbered from 1")
        if not self.probabilities:
            return
        if self.task == "classification":
            _check_sum(self.probabilities.values())
        for label in [self.label, *(each.label for each in self.levels)]:
            if label is not None and label not in self.probabilities:
                raise ValueError(f"{_quoted(label)} is not among the classes of `probabilities`")

    def _check_windows(self) -> None:
        paths: set[str] = set()
        for window in self.windows:
            if window.path in paths:
                raise ValueError(f"window {_quoted(window.path)} is there twice")
            paths.add(window.path)
            try:
                self._check_window(window)
            except ValueError as error:
                raise ValueError(f"window {_quoted(window.path)}: {error}") from None

    def _check_window(self, window: RegionRecord) -> None:
        """Check how the values of a window relate; pydantic has checked each of them."""
        if window.level != window.path.count("/") + 1 or window.is_glimpse:
            raise ValueError(f"`level` {window.level} does not fit the path")
        if window.probabilities:
            known, classes = len(window.probabilities), len(self.probabilities)
            if known != classes:
                raise ValueError(f"{known} probabilities of {classes} classes")
            if self.task == "classification":
                _check_sum(window.probabilities)
        parts: list[RegionRecord | GlimpseRecord] = [window, *window.glimpses]
        for number, each in enumerate(parts):
            where = f"glimpse {number}: " if number else ""
            x0, y0, x1, y1 = each.box
            if not (x1 - x0 >= MIN_SIDE and y1 - y0 >= MIN_SIDE):
                box = shorten(each.box)
                raise ValueError(f"{where}`box` is thinner than {MIN_SIDE} pixels: {box}")
            if self.probabilities and each.label not in self.probabilities:
                raise ValueError(f"{where}{_quoted(each.label)} is not a class of the record")


def _check_sum(probabilities: Iterable[float]) -> None:
    total = sum(probabilities)
    if abs(total - 1) > SUM_TOLERANCE:
        raise ValueError(f"`probabilities` add up to {total:g}, not 1")


def _quoted(value: object) -> str:
    return f"`{printable(shorten(value), 60)}`"
