"""Read fixed regions from a file: predictions of another model, or a CSV."""

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
from tnetcli.prediction.jsonl import read_records
from tnetcli.prediction.record import Prediction
from tnetcli.text import reason, shorten
from tnetcli.traversal.policies import ScoredRegion

EDGES = ("left", "top", "right", "bottom")
LEVEL = 2  # whose windows are taken from the records of another model
NAME_THEM = "it has to name every image, by the same path or the same id"
PIECE = 1 << 20  # bytes read at once
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a file tells of one image; `size` is that of the image where the file knows it."""

    windows: tuple[ScoredRegion, ...]
    size: Size | None = None
    failed: bool = False


class RegionFile:
    """The windows of a file by image: predictions as `tnet predict -o` writes them, or a CSV.

    Of a prediction those of level 2 are taken, glimpses among them, by their attention. A CSV has a
    row for each window, with the columns left, top, right and bottom in full-resolution pixels, and
    a path or an id; all windows of an image count alike, in the order of their rows, each once.
    `digest` is the file's.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ids: dict[str, _Entry] = {}
        self._paths: dict[str, _Entry] = {}
        if is_pipe(path):
            raise ManifestError(
                f"`{path}` is a pipe, and windows may be read by several processes",
                hint="write them to a file, then give that",
            )
        self.digest, start = _digest(path)
        if start.lstrip().startswith(b"{"):
            self._read_records()
        else:
            self._read_table()

    def of(self, id: str, path: str, size: Size) -> tuple[ScoredRegion, ...]:
        """Return the windows of an image, the best first; ImageError if the file has none for it.

        An image is known by its id, else by its path.
        """
        entry = self._find(id, path)
        if entry is None:
            raise ImageError(
                f"`{self.path}` tells no window of `{shorten(id)}`",
                hint=NAME_THEM,
            )
        if entry.failed:
            raise ImageError(
                f"the prediction of `{shorten(id)}` in `{self.path}` had failed",
                hint="predict it again there, or leave the image out",
            )
        if entry.size is not None and entry.size != size:
            raise ImageError(
                f"`{shorten(id)}` has {size} pixels, its windows in `{self.path}` are of one with "
                f"{entry.size}",
                hint="predict it again there: boxes are in full-resolution pixels",
            )
        for told in entry.windows:
            # The square around an image that is padded reaches past its edges: so may its windows.
            self._check(told.window, size, id, within=entry.size is None)
        return entry.windows

    def require(self, images: Iterable[tuple[str, str]]) -> None:
        """Raise a ManifestError unless each of these images, by id and path, is told of."""
        named = list(images)
        missing = [id for id, path in named if self._find(id, path) is None]
        if missing:
            raise ManifestError(
                f"`{self.path}` tells no window of {len(missing)} of {len(named)} images, such as "
                f"`{shorten(missing[0])}`",
                hint=NAME_THEM,
            )

    def _find(self, id: str, path: str) -> _Entry | None:
        return self._ids.get(id) or self._paths.get(absolute(path))

    def _check(self, window: Window, size: Size, id: str, *, within: bool) -> None:
        if within:
            good = window.is_inside(size)
        else:
            good = max(window.left - size.width, window.top - size.height) < 0
            good = good and min(window.right, window.bottom) > 0
        if not good:
            edges = ", ".join(f"{edge:g}" for edge in window.box)
            raise ImageError(
                f"the window `{edges}` of `{self.path}` is outside of `{shorten(id)}`, "
                f"{size} pixels",
                hint="left, top, right and bottom are in full-resolution pixels of the image",
            )

    def _read_records(self) -> None:
        try:
            for record in read_records(self.path):
                if record.id in self._ids:
                    raise ManifestError(
                        f"`{self.path}` has two predictions of `{shorten(record.id)}`",
                        hint="`tnet merge` puts files together, each image once",
                    )
                entry = _recorded(record)
                self._ids[record.id] = entry
                self._paths.setdefault(absolute(record.image), entry)
        except OutputError as error:  # here the records are an input, like a manifest
            raise ManifestError(str(error), hint=error.hint) from error
        if not any(entry.windows for entry in self._ids.values()):
            log.warning("`%s` tells no window: its images were seen as a whole only", self.path)

    def _read_table(self) -> None:
        rows = read_rows(self.path, EDGES)
        names = [name for name in ("id", "path") if name in rows[0].values]
        problems = Problems(str(self.path))
        if not names:
            problems.add(
                "no column `path` or `id`", hint="name the image of each window in one of them"
            )
            problems.check()
        found: dict[str, dict[str, list[Window]]] = {"id": {}, "path": {}}
        for row in rows:
            window = _window(row, problems)
            name = next((each for each in names if row[each]), None)
            if name is None:
                problems.add("no image", line=row.line, hint="fill in its path or id")
            elif window is not None:
                key = row["id"] if name == "id" else absolute(locate(self.path, row["path"]))
                found[name].setdefault(key, []).append(window)
        problems.check()
        self._ids = {key: _even(windows) for key, windows in found["id"].items()}
        self._paths = {key: _even(windows) for key, windows in found["path"].items()}


def _digest(path: Path) -> tuple[str, bytes]:
    """Return the sha256 of a file, and how it begins."""
    digest, start = hashlib.sha256(), b""
    try:
        with open_regular(path) as file:
            while piece := file.read(PIECE):
                start = start or piece[:64]
                digest.update(piece)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise ManifestError(
            f"cannot read the windows `{path}`: {reason(error)}",
            hint="give predictions (FILE.jsonl), or a CSV with path, left, top, right, bottom",
        ) from error
    return digest.hexdigest(), start


def _recorded(record: Prediction) -> _Entry:
    if not record.is_done:
        return _Entry((), failed=True)
    told = []
    for each in chain.from_iterable((window, *window.glimpsed()) for window in record.windows):
        if each.level == LEVEL:
            x0, y0, x1, y1 = each.box
            # A sum of 32-bit numbers may exceed one a little.
            share = min(each.attention, 1.0)
            told.append(ScoredRegion(Window(x0, y0, x1 - x0, y1 - y0), share))
    best_first = sorted(told, key=lambda each: -each.attention)
    return _Entry(tuple(best_first), Size(record.width, record.height))


def _window(row: Row, problems: Problems) -> Window | None:
    try:
        left, top, right, bottom = (float(row[edge]) for edge in EDGES)
    except ValueError:
        texts = ", ".join(f"`{shorten(row[edge])}`" for edge in EDGES)
        problems.add(f"not four numbers: {texts}", line=row.line, hint=f"give {', '.join(EDGES)}")
        return None
    if not all(map(math.isfinite, (left, top, right, bottom))) or right <= left or bottom <= top:
        problems.add(
            f"an empty window: `{left:g}, {top:g}, {right:g}, {bottom:g}`",
            line=row.line,
            hint="right is larger than left, and bottom larger than top",
        )
        return None
    return Window(left, top, right - left, bottom - top)


def _even(windows: list[Window]) -> _Entry:
    windows = list(dict.fromkeys(windows))  # told twice, a window would take the place of another
    return _Entry(tuple(ScoredRegion(window, 1 / len(windows)) for window in windows))
