"""Regions of level 2 from a file: predictions of another model, or a CSV."""

import hashlib
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from tnetcli.data.listing import Problems, Row, locate, read_rows
from tnetcli.errors import ImageError, ManifestError, OutputError
from tnetcli.files import absolute, is_pipe, open_regular
from tnetcli.geometry import Size, Window
from tnetcli.prediction.jsonl import read_predictions
from tnetcli.prediction.record import Prediction
from tnetcli.text import reason, shorten
from tnetcli.traversal.policies import ScoredRegion

EDGES = ("left", "top", "right", "bottom")
LEVEL = 2  # the level whose windows are taken from predictions
NAME_IMAGES = "name every image in it, by the same path or the same id"
CHUNK = 1 << 20  # bytes
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Entry:
    """The regions of one image; `size` is that of the image, if the file states it."""

    regions: tuple[ScoredRegion, ...]
    size: Size | None = None
    failed: bool = False


class RegionFile:
    """The regions of a file by image: predictions as `tnet predict -o` writes them, or a CSV.

    From predictions the windows of level 2 are taken, glimpses included, with their attention. A
    CSV has one row per region with the columns left, top, right and bottom in full-resolution
    pixels, and path or id; all its regions have equal attention. `digest` is the file's sha256.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ids: dict[str, _Entry] = {}
        self._paths: dict[str, _Entry] = {}
        if is_pipe(path):
            raise ManifestError(
                f"`{path}` is a pipe, and several processes may read the regions",
                hint="write them to a file first",
            )
        self.digest, start = _digest(path)
        if start.lstrip().startswith(b"{"):
            self._read_predictions()
        else:
            self._read_table()

    def of(self, id: str, path: str, size: Size) -> tuple[ScoredRegion, ...]:
        """Return the regions of an image by its id or else its path, the best first.

        Raise ImageError if the file has none for it, or if they do not fit the image.
        """
        entry = self._find(id, path)
        if entry is None:
            raise ImageError(f"`{self.path}` has no regions of `{shorten(id)}`", hint=NAME_IMAGES)
        if entry.failed:
            raise ImageError(
                f"the prediction of `{shorten(id)}` in `{self.path}` failed",
                hint="predict it again there, or leave the image out",
            )
        if entry.size is not None and entry.size != size:
            raise ImageError(
                f"`{shorten(id)}` has {size} pixels, its regions in `{self.path}` are from an "
                f"image of {entry.size}",
                hint="predict it again there: boxes are in full-resolution pixels",
            )
        for region in entry.regions:
            window = region.window
            # Regions of a padded image may reach past its edges.
            inside = window.is_inside(size) if entry.size is None else _overlaps(window, size)
            if not inside:
                edges = ", ".join(f"{edge:g}" for edge in window.box)
                raise ImageError(
                    f"the region `{edges}` of `{self.path}` is outside `{shorten(id)}`, "
                    f"{size} pixels",
                    hint="left, top, right and bottom are in full-resolution pixels of the image",
                )
        return entry.regions

    def require(self, images: Iterable[tuple[str, str]]) -> None:
        """Raise ManifestError unless the file has each of these images, by id and path."""
        named = list(images)
        missing = [id for id, path in named if self._find(id, path) is None]
        if missing:
            raise ManifestError(
                f"`{self.path}` has no regions of {len(missing)} of {len(named)} images, such as "
                f"`{shorten(missing[0])}`",
                hint=NAME_IMAGES,
            )

    def _find(self, id: str, path: str) -> _Entry | None:
        return self._ids.get(id) or self._paths.get(absolute(path))

    def _read_predictions(self) -> None:
        try:
            for record in read_predictions(self.path):
                if record.id in self._ids:
                    raise ManifestError(
                        f"`{self.path}` has two predictions of `{shorten(record.id)}`",
                        hint="`tnet merge` merges files, each image once",
                    )
                entry = _from_prediction(record)
                self._ids[record.id] = entry
                self._paths.setdefault(absolute(record.image), entry)
        except OutputError as error:  # here the predictions are an input, like a manifest
            raise ManifestError(str(error), hint=error.hint) from error
        if not any(entry.regions for entry in self._ids.values()):
            log.warning("`%s` has no regions of level 2", self.path)

    def _read_table(self) -> None:
        rows = read_rows(self.path, EDGES)
        names = [name for name in ("id", "path") if name in rows[0].values]
        problems = Problems(str(self.path))
        if not names:
            problems.add(
                "no column `path` or `id`", hint="name the image of each region in one of them"
            )
            problems.check()
        found: dict[str, dict[str, list[Window]]] = {"id": {}, "path": {}}
        for row in rows:
            window = _parse_window(row, problems)
            name = next((each for each in names if row[each]), None)
            if name is None:
                problems.add("no image", line=row.line, hint="fill in its path or id")
            elif window is not None:
                key = row["id"] if name == "id" else absolute(locate(self.path, row["path"]))
                found[name].setdefault(key, []).append(window)
        problems.check()
        self._ids = {key: _equal(windows) for key, windows in found["id"].items()}
        self._paths = {key: _equal(windows) for key, windows in found["path"].items()}


def _digest(path: Path) -> tuple[str, bytes]:
    """Return the sha256 of a file and its first bytes."""
    digest, start = hashlib.sha256(), b""
    try:
        with open_regular(path) as file:
            while chunk := file.read(CHUNK):
                start = start or chunk[:64]
                digest.update(chunk)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise ManifestError(
            f"cannot read the regions `{path}`: {reason(error)}",
            hint="give predictions (FILE.jsonl), or a CSV with path, left, top, right, bottom",
        ) from error
    return digest.hexdigest(), start


def _overlaps(window: Window, size: Size) -> bool:
    starts = window.left < size.width and window.top < size.height
    return starts and min(window.right, window.bottom) > 0


def _from_prediction(record: Prediction) -> _Entry:
    if not record.is_done:
        return _Entry((), failed=True)
    found = []
    for each in chain.from_iterable((window, *window.glimpsed()) for window in record.windows):
        if each.level == LEVEL:
            x0, y0, x1, y1 = each.box
            # A sum of 32-bit numbers may exceed one a little.
            attention = min(each.attention, 1.0)
            found.append(ScoredRegion(Window(x0, y0, x1 - x0, y1 - y0), attention))
    found.sort(key=lambda each: -each.attention)
    return _Entry(tuple(found), Size(record.width, record.height))


def _parse_window(row: Row, problems: Problems) -> Window | None:
    try:
        left, top, right, bottom = (float(row[edge]) for edge in EDGES)
    except ValueError:
        texts = ", ".join(f"`{shorten(row[edge])}`" for edge in EDGES)
        problems.add(f"not four numbers: {texts}", line=row.line, hint=f"give {', '.join(EDGES)}")
        return None
    if not all(map(math.isfinite, (left, top, right, bottom))) or right <= left or bottom <= top:
        problems.add(
            f"an empty region: `{left:g}, {top:g}, {right:g}, {bottom:g}`",
            line=row.line,
            hint="right is larger than left, and bottom larger than top",
        )
        return None
    return Window(left, top, right - left, bottom - top)


def _equal(windows: list[Window]) -> _Entry:
    windows = list(dict.fromkeys(windows))  # a repeated one would take the place of another
    return _Entry(tuple(ScoredRegion(window, 1 / len(windows)) for window in windows))
