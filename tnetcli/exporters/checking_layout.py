"""The features of a file of GeoJSON one by one, whoever wrote it, with the place of each."""

import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, NoReturn, TypeAlias, cast

from tnetcli.errors import OutputError
from tnetcli.exporters.geojson import HEAD, RECORD_SEPARATOR, SEQUENCES
from tnetcli.files import open_regular
from tnetcli.json_text import parse_json
from tnetcli.wording import printable, reason, shorten

MOST_AT_ONCE = 32 << 20  # bytes of a line, or of a file that is not one feature a line
GZIP = b"\x1f\x8b"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SEPARATOR = RECORD_SEPARATOR.encode()
Layout: TypeAlias = Literal["collection", "sequence"]


@dataclass(frozen=True, slots=True)
class Found:
    """One feature, counted from one, and the line it is in, where a line holds one."""

    number: int
    value: Any
    line: int | None = None

    def __str__(self) -> str:
        return f"feature {self.number}" + (f" (line {self.line})" if self.line else "")


class OverlayFile:
    """A file of GeoJSON, compressed or not, whose features can be walked again and again.

    A feature a line, as our writer and text sequences have it, takes little memory whatever the
    number of features. Any other layout is read as a whole; OutputError where that is too much, or
    where it is not JSON.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        self.layout: Layout = "collection"
        self.members: dict[str, Any] = {}  # of the collection, but for its features
        self._whole: list[Any] | None = None
        self._last = 0  # the line that ends the features, in the layout of our own
        with self._open() as file:
            first = self._line(file, 1).removeprefix(BYTE_ORDER_MARK)
            if not first:
                if not os.fspath(path).lower().endswith(SEQUENCES):
                    self.refuse("is empty", hint="only a text sequence (.geojsonl) may be empty")
                self.layout = "sequence"
                return
            if first.strip() == HEAD.encode() and self._has_lines(file):
                return
        if _is_feature(first):
            self.layout = "sequence"
        else:
            self._load()

    def features(self) -> Iterator[Found]:
        """Yield all features."""
        if self._whole is not None:
            yield from (Found(number, each) for number, each in enumerate(self._whole, start=1))
            return
        number = 0
        for line, text in self._lines():
            if self.layout == "collection":
                if line == 1:
                    continue
                if line >= self._last:
                    return
                text = text.removesuffix(b",")
            elif not (text := text.removeprefix(SEPARATOR).strip()):
                continue
            number += 1
            yield Found(number, self._parse(text, line), line)

    def refuse(self, problem: str, *, hint: str = "") -> NoReturn:
        """Raise the error that names this file."""
        name = printable(os.fspath(self._path), 200)
        raise OutputError(f"`{name}` {problem}", hint=hint or "is it GeoJSON?")

    def _has_lines(self, file: BinaryIO) -> bool:
        """Look whether every line but the first and the last is a feature, and read the last."""
        number, before, last, is_feature = 1, b"", b"[", True
        while is_feature and (line := self._line(file, number + 1)):
            before, last, number = last, line.strip(), number + 1
            is_feature = last.startswith(b"{") and last.endswith((b"}", b"},"))
            if is_feature and not before.endswith((b",", b"[")):
                break  # a comma is missing
        self._last = number
        if not last.startswith((b"],", b"]}")) or before.endswith(b",") or file.read(1):
            return False  # written by someone else, or damaged, which reading it all will tell
        rest = last.removeprefix(b"]").removeprefix(b",")
        self.members = {} if rest == b"}" else self._parse(b"{" + rest, number)
        return not {"type", "features"} & self.members.keys()

    def _load(self) -> None:
        with self._open() as file:
            text = self._read(file, MOST_AT_ONCE + 1)
        if len(text) > MOST_AT_ONCE:
            self.refuse(
                f"is larger than {MOST_AT_ONCE >> 20} MiB and not one feature a line"
                + (f", see line {self._last}" if self._last else ""),
                hint="make a text sequence of it: ogr2ogr -f GeoJSONSeq OUT.geojsonl FILE",
            )
        value = self._parse(text.removeprefix(BYTE_ORDER_MARK))
        kind = value.get("type") if isinstance(value, dict) else None
        if kind == "Feature":
            self.layout, self._whole = "sequence", [value]
        elif kind == "FeatureCollection" and isinstance(value.get("features"), list):
            self._whole = value.pop("features")
            self.members = {name: each for name, each in value.items() if name != "type"}
        else:
            self.refuse(f"is no collection of features but {shorten(value)}")

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        with self._open() as file:
            number = 0
            while line := self._line(file, number + 1):
                number += 1
                yield number, (line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line).strip()

    def _line(self, file: BinaryIO, number: int) -> bytes:
        with self._explained():
            line = file.readline(MOST_AT_ONCE + 1)
        if len(line) > MOST_AT_ONCE:
            self.refuse(
                f"has more than {MOST_AT_ONCE >> 20} MiB in line {number}",
                hint="make a text sequence of it: ogr2ogr -f GeoJSONSeq OUT.geojsonl FILE",
            )
        return line

    def _read(self, file: BinaryIO, most: int) -> bytes:
        with self._explained():
            return file.read(most)

    def _parse(self, text: bytes, line: int | None = None) -> Any:
        try:
            return parse_json(text, unique=True)
        except ValueError as error:
            where = f", line {line}" if line else ""
            self.refuse(f"is not JSON{where}: {shorten(str(error))}")

    @contextmanager
    def _open(self) -> Iterator[BinaryIO]:
        with self._explained():
            raw = open_regular(self._path)
        with raw:
            with self._explained():
                is_compressed = raw.read(len(GZIP)) == GZIP
                raw.seek(0)
            if not is_compressed:
                yield raw
                return
            with gzip.open(raw) as unpacked:
                yield cast(BinaryIO, unpacked)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, zlib.error, gzip.BadGzipFile):
            self.refuse("is damaged, or was cut off: it cannot be decompressed", hint="copy again")
        except (OSError, ValueError) as error:
            self.refuse(f"cannot be read: {reason(error)}", hint="check path and rights")


def _is_feature(line: bytes) -> bool:
    """Say whether a line is the first of a text sequence."""
    if line.startswith(SEPARATOR):
        return True
    try:
        value = parse_json(line, unique=True)
    except ValueError:
        return False
    return isinstance(value, dict) and value.get("type") == "Feature"
