"""Append, resume, read and merge JSON Lines of prediction records."""

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from pydantic import ValidationError

from tnetcli.config import UNKNOWN_KEY
from tnetcli.data.images import Image
from tnetcli.errors import OutputError, UsageError
from tnetcli.files import (
    atomic_file,
    check_not_input,
    check_not_special,
    check_output,
    open_regular,
    remove_stale,
    try_lock,
)
from tnetcli.prediction.record import SCHEMA, Prediction
from tnetcli.text import DEEP, counted, first_line, join_some, printable, reason, shorten

SECONDS_BETWEEN_SYNCS = 10.0  # what a power failure may cost; a killed process loses nothing
UNSPOKEN = "nothing"
log = logging.getLogger(__name__)
BEGINNING = f'{{"schema":"{SCHEMA}"'.encode()  # of every record
ATTEMPTS = 10  # to get hold of a file that another process is just replacing
PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".lz4", ".7z")
MAX_LINE = 2**26  # bytes; more than 200,000 windows
MAX_PROBLEMS = 100  # of a line
IsCurrent = Callable[[Prediction], bool | None]


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file, the byte it starts at, and its record."""

    text: bytes
    start: int
    record: Prediction


def refuse_compressed(path: str | os.PathLike[str]) -> None:
    """Refuse a name that promises packed records: they are written, and gone on with, as text."""
    ending = os.path.splitext(path)[1].lower()
    if ending in PACKED:
        raise UsageError(
            f"records are written as plain text, which `{ending}` is not: `{path}`",
            hint="name a FILE.jsonl, and compress it when all is done",
        )


def read_records(path: str | os.PathLike[str]) -> Iterator[Prediction]:
    """Yield the records of a file one by one; see `read_lines`."""
    return (line.record for line in read_lines(path))


def read_lines(path: str | os.PathLike[str]) -> Iterator[Line]:
    """Yield the lines of a file one by one, with their records.

    A last line that was cut off is skipped with a warning; empty lines after the last record are
    skipped. OutputError names the first line that holds no valid record.
    """
    start = empty = 0  # the first empty line
    for number, text in enumerate(_lines(path), start=1):
        if number > 1 and text.isspace():
            empty = empty or number
        elif empty:
            raise OutputError(
                f"`{path}`, line {empty}: empty, and more follow",
                hint="take it out: every line is a record",
            )
        else:
            try:
                record = parse_record(text)
            except ValueError as error:
                _refuse_unless_cut_off(path, number, text, error)
                return
            yield Line(text, start, record)
        start += len(text)


def _refuse_unless_cut_off(
    path: str | os.PathLike[str], number: int, text: bytes, error: ValueError
) -> None:
    """Warn about a last line that is the beginning of a record; raise OutputError for any other."""
    begin = text[: len(BEGINNING)]
    if BEGINNING.startswith(begin) and not text.endswith(b"\n"):
        log.warning("`%s`, line %d was cut off and is left out", path, number)
        return
    hint = "this is no file of predictions: name another"
    if SCHEMA.encode() in text[:100]:
        hint = (
            "this record was changed by something else than tnet: take the line out, predict again"
        )
    elif SCHEMA.partition("/")[0].encode() in text[:100]:
        hint = "another version of tnet wrote it: predict again"
    raise OutputError(
        f"`{path}`, line {number}: {printable(first_line(error), 200)}", hint=hint
    ) from error


def _lines(path: str | os.PathLike[str]) -> Iterator[bytes]:
    try:
        with open_regular(path) as file:
            while text := file.readline(MAX_LINE + 1):
                if len(text) > MAX_LINE:
                    raise OutputError(
                        f"`{path}` has a line of more than {MAX_LINE >> 20} MiB",
                        hint="this is no file of predictions: name another",
                    )
                yield text
    except OSError as error:
        raise OutputError(
            f"cannot read `{path}`: {reason(error)}", hint="check path and rights"
        ) from error


def parse_record(text: bytes) -> Prediction:
    """Return the record of one line; ValueError says in one line what is wrong with it."""
    try:
        return Prediction.model_validate_json(text)
    except ValidationError as error:
        raise ValueError(_explain(error)) from error


def _explain(error: ValidationError) -> str:
    """Return the first problem of a line; a wrong schema explains all others."""
    count = error.error_count()
    if count > MAX_PROBLEMS:  # each would become an object
        return f"not a {SCHEMA} record: {count:,} problems"
    found = error.errors(include_url=False)
    first = next((each for each in found if each["loc"] == ("schema",)), found[0])
    kind, message = first["type"], first["msg"]
    if kind == "json_invalid":
        message = message.removeprefix("Invalid JSON: ")
        return f"not JSON: {DEEP if message.startswith('recursion limit') else message}"
    key = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in first["loc"])
    key = f"`{shorten(key.removeprefix('.'))}`"
    if kind == "missing":
        what = f"{key} is missing"
    elif kind in UNKNOWN_KEY:
        what = f"unknown key {key}"
    elif kind == "value_error" and not first["loc"]:
        what = message.removeprefix("Value error, ")
    else:
        message = message.removeprefix("Value error, ")
        what = f"{key} is {shorten(first['input'])}: {message[:1].lower()}{message[1:]}"
    return f"not a {SCHEMA} record: {what}"


class PredictionFile:
    """Takes records one by one: what was taken stays, whatever happens to the process.

    A context that holds the file for itself. What is there already is kept if it was made by the
    same model with the same settings; otherwise it is refused, or with `overwrite` replaced.
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
        self.path = Path(path)
        self._overwrite = overwrite
        self._file: FileIO | None = None
        self._synced = time.monotonic()

    def __enter__(self) -> Self:
        refuse_compressed(self.path)
        check_not_special(self.path, hint="name a file; `-o -` is standard output")
        remove_stale(self.path.parent)
        problem = self._taken()
        for _ in range(ATTEMPTS):
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = open(self.path, "ab", buffering=0)
                self._claim(self._file)
                # Whoever held it may have put another file in its place meanwhile.
                if os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path)):
                    return self
                self._file.close()
            except FileNotFoundError as error:
                problem = self._unwritable(error)
            except (OSError, ValueError) as error:
                raise self._unwritable(error) from error
            except OutputError:
                assert self._file is not None
                self._file.close()
                raise
        raise problem

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._file is not None
        try:
            self._sync()
            self._file.close()
        except OSError as problem:
            if error is None:
                raise self._unwritable(problem) from problem

    def resume(self, sha256: str, config: Mapping[str, Any], is_current: IsCurrent) -> list[str]:
        """Return the ids that are done, and drop the records of those that are not.

        `is_current` returns whether the image of a record is still the same, or None if the image
        is not among those to predict: its record stays. Of the others, failed records are dropped,
        to be predicted again; abstained records are done.
        """
        if self._overwrite:
            self._replace(set())
            return []
        done: list[str] = []
        known: set[str] = set()
        kept: set[int] = set()
        size = lines = 0
        for number, line in enumerate(read_lines(self.path)):
            record = line.record
            lines, size = number + 1, size + len(line.text)
            current = is_current(record)
            if record.is_done or current is None:
                self._check(record, sha256, config)
            is_done = record.is_done and current is True
            if record.id in known or not line.text.endswith(b"\n"):
                continue
            if is_done or current is None:
                known.add(record.id)
                kept.add(number)
                done += [record.id] if is_done else []
        if len(kept) < lines or size != self.path.stat().st_size:
            self._replace(kept)
        return done

    def _check(self, record: Prediction, sha256: str, config: Mapping[str, Any]) -> None:
        found = differences(record, sha256, config)
        if found:
            raise OutputError(
                f"`{self.path}` was made otherwise: {'; '.join(found)}",
                hint="name another file with -o, or --overwrite it",
            )

    def _replace(self, kept: Collection[int]) -> None:
        """Leave the lines with these numbers, and nothing else."""
        renewed: FileIO | None = None
        try:
            with atomic_file(self.path) as file:
                for number, line in enumerate(read_lines(self.path) if kept else ()):
                    if number in kept:
                        file.write(line.text)
                # It is ours before it has its name, so that nobody comes between.
                renewed = open(file.name, "ab", buffering=0)  # noqa: SIM115  it stays open
                self._claim(renewed)
        except BaseException:
            if renewed is not None:
                renewed.close()
            raise
        assert self._file is not None
        self._file.close()
        self._file = renewed

    def add(self, record: Prediction) -> None:
        """Append a record; if it cannot be written whole, nothing of it stays."""
        assert self._file is not None
        left = memoryview(record.model_dump_json().encode() + b"\n")
        before = os.fstat(self._file.fileno()).st_size
        try:
            while left:
                left = left[self._file.write(left) :]
            if time.monotonic() - self._synced >= SECONDS_BETWEEN_SYNCS:
                self._sync()
        except OSError as error:
            with suppress(OSError):  # the next run would leave out half a line
                os.truncate(self._file.fileno(), before)
            raise self._unwritable(error) from error

    def _sync(self) -> None:
        assert self._file is not None
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def _claim(self, file: FileIO) -> None:
        """Refuse a file that another process is writing; not every disk can tell."""
        if not try_lock(file):
            raise self._taken()

    def _taken(self) -> OutputError:
        return OutputError(
            f"another tnet is writing `{self.path}`",
            hint="wait for it, or name another file; --shard I/N gives every job its own",
        )

    def _unwritable(self, error: Exception) -> OutputError:
        return OutputError(
            f"cannot write `{self.path}`: {reason(error)}",
            hint="may you write there, is there space left? records so far are kept",
        )


def differences(record: Prediction, sha256: str, config: Mapping[str, Any]) -> list[str]:
    """Return how the model and the options of a record differ from these."""
    found = []
    made = record.provenance
    if made.sha256 != sha256:
        found.append(f"with the model {made.sha256[:12]}, not {sha256[:12]}")
    for name in dict.fromkeys([*made.config, *config]):
        before, now = made.config.get(name), config.get(name)
        if before != now:
            found.append(f"{name} was {_say(before)}, now {_say(now)}")
    return found


def _say(value: Any) -> str:
    return UNSPOKEN if value is None else shorten(str(value))


MOST_NAMED = 5
LONGEST = 500  # characters of a name
MOST_OPEN = 64  # files; some systems allow 256


@dataclass(frozen=True, slots=True)
class Merged:
    """What came together."""

    records: int
    failed: int
    repeated: int  # found in more than one file
    missing: tuple[str, ...]  # asked for, and in none


def merge(
    files: Sequence[Path],
    output: Path,
    *,
    wanted: Sequence[Image] | None = None,
    overwrite: bool = False,
) -> Merged:
    """Write the records of all files into one, each id once; refuse what was made otherwise.

    Records are ordered as `wanted`, which also tells what is missing, or as the files are. Of a
    record that several files hold, the first that did not fail is taken. Memory holds ids, not
    records.
    """
    refuse_compressed(output)
    check_output(output, overwrite=overwrite)
    if any(os.path.realpath(file) == os.path.realpath(output) for file in files):
        raise OutputError(f"`{output}` is one of the files", hint="name another with -o")
    chosen: dict[str, _Spot] = {}
    repeated = contradicted = 0
    first = None
    for number, file in enumerate(files):
        for line in read_lines(file):
            record = line.record
            first = first or record
            found = differences(record, first.provenance.sha256, first.provenance.config)
            if found:
                raise OutputError(
                    f"`{file}` does not belong to `{files[0]}`: {'; '.join(found)}",
                    hint="merge only what was made by one model with one set of options",
                )
            check_not_input(output, [record.image])
            answer = hash((record.label, round(record.probability or 0.0, 5)))
            spot = _Spot(number, line.start, len(line.text), not record.is_done, answer)
            before = chosen.get(record.id)
            repeated += before is not None
            if before is not None and not (before.failed or spot.failed):
                contradicted += before.answer != spot.answer
            if before is None or (before.failed and not spot.failed):
                chosen[record.id] = spot
    if contradicted:
        repeats = counted(contradicted, "record")
        log.warning("found twice with another answer: %s; the first is taken", repeats)
    order = list(chosen) if wanted is None else [image.id for image in wanted]
    missing = tuple(id for id in order if id not in chosen)
    asked = set(order)
    strangers = [id for id in chosen if id not in asked]
    if strangers:
        log.warning(
            "of no image that was asked for: %s: %s",
            counted(len(strangers), "record"),
            join_some(strangers, MOST_NAMED),
        )
    present = [chosen[id] for id in [*order, *strangers] if id in chosen]
    _write(files, present, output)
    return Merged(
        records=len(present),
        failed=sum(spot.failed for spot in present),
        repeated=repeated,
        missing=missing,
    )


@dataclass(frozen=True, slots=True)
class _Spot:
    """Where a record stands."""

    file: int
    start: int
    length: int  # bytes
    failed: bool
    answer: int  # a digest: whether another record says the same


def _write(files: Sequence[Path], spots: Sequence[_Spot], output: Path) -> None:
    opened: OrderedDict[int, BinaryIO] = OrderedDict()
    try:
        with atomic_file(output) as merged:
            for spot in spots:
                if spot.file not in opened:
                    if len(opened) >= MOST_OPEN:
                        opened.popitem(last=False)[1].close()
                    opened[spot.file] = open_regular(files[spot.file])
                opened[spot.file].seek(spot.start)
                merged.write(opened[spot.file].read(spot.length).rstrip(b"\n") + b"\n")
    finally:
        for file in opened.values():
            file.close()


def as_text(merged: Merged) -> str:
    """Return the totals in a line or two."""
    parts = [counted(merged.records, "record")]
    if merged.failed:
        parts.append(f"{merged.failed:,} of them failed")
    if merged.repeated:
        parts.append(f"{merged.repeated:,} repeated and left out")
    if merged.missing:
        parts.append(f"{len(merged.missing):,} missing:")
    return "\n".join([", ".join(parts), *(f"  {printable(id, LONGEST)}" for id in merged.missing)])
