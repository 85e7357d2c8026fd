"""JSON Lines of prediction records: append, resume, read and merge."""

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

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
from tnetcli.text import DEEP, counted, join_some, printable, reason, shorten

SYNC_SECONDS = 10.0  # work that a power failure may cost; a killed process loses nothing
BEGINNING = f'{{"schema":"{SCHEMA}"'.encode()  # of every record
ATTEMPTS = 10  # to open a file that another process is replacing
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".lz4", ".7z")
MAX_LINE = 2**26  # bytes; more than 200,000 windows
MAX_PROBLEMS = 100  # per line
MAX_NAMED = 5
MAX_OPEN = 64  # files; some systems allow 256
NO_PREDICTIONS = "this is not a file of predictions: name another"
log = logging.getLogger(__name__)
AnyPath = str | os.PathLike[str]


class _Place(NamedTuple):
    """Where a record is stored, in bytes."""

    file: Path
    start: int
    length: int


class Line(NamedTuple):
    """One line of a file; `is_whole` unless its end is missing."""

    record: Prediction
    place: _Place
    is_whole: bool


def read_predictions(path: AnyPath) -> Iterator[Prediction]:
    """Yield the predictions of a file that `tnet predict -o` or `predict_many` wrote.

    A last line that was cut off is skipped with a warning. Raise OutputError if the file cannot be
    read, or a line is not a valid record.

    >>> for prediction in tnetcli.read_predictions("out.jsonl"):  # doctest: +SKIP
    ...     print(prediction.image, prediction.label)
    """
    return (line.record for line in read_lines(path))


def read_lines(path: AnyPath) -> Iterator[Line]:
    """Yield the lines of a file with their records; see `read_predictions`.

    Empty lines after the last record are skipped.
    """
    file, start, empty = Path(path), 0, 0  # `empty` is the number of the first empty line
    for number, text in enumerate(_lines(path), start=1):
        if number > 1 and text.isspace():
            empty = empty or number
        elif empty:
            hint = "remove it: every line is a record"
            raise OutputError(f"`{path}`, line {empty}: empty, and more follow", hint=hint)
        else:
            try:
                record = Prediction.model_validate_json(text)
            except ValidationError as error:
                if BEGINNING.startswith(text[: len(BEGINNING)]) and not text.endswith(b"\n"):
                    log.warning("`%s`, line %d is cut off and skipped", path, number)
                    return
                problem = f"`{path}`, line {number}: {printable(_first_problem(error), 200)}"
                raise OutputError(problem, hint=_advice(text)) from error
            yield Line(record, _Place(file, start, len(text)), text.endswith(b"\n"))
        start += len(text)


def _lines(path: AnyPath) -> Iterator[bytes]:
    try:
        with open_regular(path) as file:
            while text := file.readline(MAX_LINE + 1):
                if len(text) > MAX_LINE:
                    problem = f"`{path}` has a line of more than {MAX_LINE >> 20} MiB"
                    raise OutputError(problem, hint=NO_PREDICTIONS)
                yield text
    except OSError as error:
        hint = "check the path and its permissions"
        raise OutputError(f"cannot read `{path}`: {reason(error)}", hint=hint) from error


def _advice(text: bytes) -> str:
    if SCHEMA.encode() in text[:100]:
        return "another program changed this record: remove the line and predict again"
    if SCHEMA.partition("/")[0].encode() in text[:100]:
        return "another version of tnet wrote it: predict again"
    return NO_PREDICTIONS


def _first_problem(error: ValidationError) -> str:
    count = error.error_count()
    if count > MAX_PROBLEMS:  # each would become an object
        return f"not a {SCHEMA} record: {count:,} problems"
    found = error.errors(include_url=False)
    # A wrong schema explains all other problems.
    first = next((each for each in found if each["loc"] == ("schema",)), found[0])
    kind, message = first["type"], first["msg"].removeprefix("Value error, ")
    if kind == "json_invalid":
        message = message.removeprefix("Invalid JSON: ")
        return f"not JSON: {DEEP if message.startswith('recursion limit') else message}"
    key = "".join(f"[{each}]" if isinstance(each, int) else f".{each}" for each in first["loc"])
    key = f"`{shorten(key.removeprefix('.'))}`"
    if kind == "missing":
        message = f"{key} is missing"
    elif kind in UNKNOWN_KEY:
        message = f"unknown key {key}"
    elif kind != "value_error" or first["loc"]:
        message = f"{key} is {shorten(first['input'])}: {message[:1].lower()}{message[1:]}"
    return f"not a {SCHEMA} record: {message}"


def check_uncompressed(path: AnyPath) -> None:
    """Raise UsageError for the name of a compressed file: records are appended as text."""
    ending = os.path.splitext(path)[1].lower()
    if ending in COMPRESSED:
        raise UsageError(
            f"predictions are plain text, `{ending}` is not: `{path}`",
            hint="name a FILE.jsonl, and compress it afterwards",
        )


class PredictionFile:
    """Append records one by one; a record that was added survives the death of the process.

    A context manager that locks the file. Existing records are kept if they were made by the same
    model with the same settings; otherwise `resume` raises OutputError, or with `overwrite` starts
    again.
    """

    _file: FileIO

    def __init__(self, path: AnyPath, *, overwrite: bool = False) -> None:
        self.path = Path(path)
        self._overwrite = overwrite
        self._synced = time.monotonic()

    def __enter__(self) -> Self:
        check_uncompressed(self.path)
        check_not_special(self.path, hint="name a file; `-o -` is standard output")
        remove_stale(self.path.parent)
        problem = self._taken()
        for _ in range(ATTEMPTS):
            try:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._file = self._open(self.path)
                # The process that held it may have replaced the file meanwhile.
                if os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path)):
                    return self
                self._file.close()
            except FileNotFoundError as error:
                problem = self._unwritable(error)
            except (OSError, ValueError) as error:
                raise self._unwritable(error) from error
        raise problem

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            self._sync()
            self._file.close()
        except OSError as problem:
            if error is None:
                raise self._unwritable(problem) from problem

    def resume(
        self,
        sha256: str,
        config: Mapping[str, Any],
        is_current: Callable[[Prediction], bool | None],
    ) -> list[str]:
        """Return the ids that are done, and remove the records of images to predict again.

        `is_current` returns whether the image of a record is unchanged, or None if it is not among
        the images to predict: its record stays. Failed records are removed, abstained ones stay.
        """
        done: list[str] = []
        kept: dict[str, _Place] = {}
        for record, place, is_whole in () if self._overwrite else read_lines(self.path):
            current = is_current(record)
            stays = current is None or (record.is_done and current)
            if (record.is_done or stays) and (found := differences(record, sha256, config)):
                raise OutputError(
                    f"`{self.path}` was made with other settings: {'; '.join(found)}",
                    hint="name another file with -o, or replace it with --overwrite",
                )
            if stays and is_whole and kept.setdefault(record.id, place) is place and current:
                done.append(record.id)
        if sum(place.length for place in kept.values()) != self.path.stat().st_size:
            self._replace(kept.values())
        return done

    def _replace(self, kept: Iterable[_Place]) -> None:
        """Replace the file by one with some of its records."""
        with ExitStack() as on_error:
            with atomic_file(self.path) as file:
                _copy(kept, file)
                # Locked before it gets its name, so that no other process can come between.
                renewed = on_error.enter_context(self._open(file.name))
            on_error.pop_all()
        self._file.close()
        self._file = renewed

    def add(self, record: Prediction) -> None:
        """Append a record; nothing of it stays if it cannot be written whole."""
        left = memoryview(record.model_dump_json().encode() + b"\n")
        before = os.fstat(self._file.fileno()).st_size
        try:
            while left:
                left = left[self._file.write(left) :]
            if time.monotonic() - self._synced >= SYNC_SECONDS:
                self._sync()
        except OSError as error:
            with suppress(OSError):  # the next run would skip half a line
                os.truncate(self._file.fileno(), before)
            raise self._unwritable(error) from error

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced = time.monotonic()

    def _open(self, path: AnyPath) -> FileIO:
        """Open a file to append to it, and lock it."""
        file = open(path, "ab", buffering=0)  # noqa: SIM115  it stays open
        if not try_lock(file):
            file.close()
            raise self._taken()
        return file

    def _taken(self) -> OutputError:
        return OutputError(
            f"another tnet is writing `{self.path}`",
            hint="wait for it, or name another file; --shard I/N gives every job its own",
        )

    def _unwritable(self, error: Exception) -> OutputError:
        return OutputError(
            f"cannot write `{self.path}`: {reason(error)}",
            hint="check permissions and free space; records written so far are saved",
        )


def differences(record: Prediction, sha256: str, config: Mapping[str, Any]) -> list[str]:
    """Return how the model and the settings of a record differ from these."""
    made = record.provenance
    found = []
    if made.sha256 != sha256:
        found.append(f"model {made.sha256[:12]}, now {sha256[:12]}")
    for name in dict.fromkeys([*made.config, *config]):
        before, now = made.config.get(name), config.get(name)
        if before != now:
            values = ("not set" if each is None else shorten(str(each)) for each in (before, now))
            found.append(f"{name} was {', now '.join(values)}")
    return found


class Merged(NamedTuple):
    """Counts of a merge."""

    records: int
    failed: int
    repeated: int  # found in more than one file
    missing: tuple[str, ...]  # expected ids that no file has

    def __str__(self) -> str:
        parts = [counted(self.records, "record")]
        parts += [f"{self.failed:,} of them failed"] if self.failed else []
        parts += [f"{self.repeated:,} repeated and left out"] if self.repeated else []
        parts += [f"{len(self.missing):,} missing:"] if self.missing else []
        return "\n".join([", ".join(parts), *(f"  {printable(id, 500)}" for id in self.missing)])


class _Chosen(NamedTuple):
    """The record of an id that is merged."""

    place: _Place
    failed: bool
    answer: int  # a digest of the prediction


def merge(
    files: Sequence[Path],
    output: Path,
    *,
    wanted: Sequence[Image] | None = None,
    overwrite: bool = False,
) -> Merged:
    """Write the records of all files to one, each id once.

    Records are ordered as `wanted`, or as the files are. Of an id in several files the first record
    that did not fail is taken. Raise OutputError for files of another model or other settings.
    Memory holds ids, not records.
    """
    check_uncompressed(output)
    check_output(output, overwrite=overwrite)
    if any(os.path.realpath(file) == os.path.realpath(output) for file in files):
        raise OutputError(f"`{output}` is one of the files", hint="name another with -o")
    chosen: dict[str, _Chosen] = {}
    repeated = contradicted = 0
    made = None
    for file in files:
        for record, place, _ in read_lines(file):
            made = made or record.provenance
            if found := differences(record, made.sha256, made.config):
                raise OutputError(
                    f"`{file}` does not belong to `{files[0]}`: {'; '.join(found)}",
                    hint="merge only files of one model with the same settings",
                )
            check_not_input(output, [record.image])
            answer = hash((record.label, round(record.probability or 0.0, 5)))
            now = _Chosen(place, not record.is_done, answer)
            before = chosen.setdefault(record.id, now)
            repeated += before is not now
            if before.failed and not now.failed:
                chosen[record.id] = now
            elif not (before.failed or now.failed):
                contradicted += before.answer != now.answer
    if contradicted:
        repeats = counted(contradicted, "record")
        log.warning("found twice with different predictions: %s; the first is taken", repeats)
    order = dict.fromkeys(chosen if wanted is None else (image.id for image in wanted))
    if others := [id for id in chosen if id not in order]:
        some = join_some(others, MAX_NAMED)
        log.warning("not among the expected images: %s: %s", counted(len(others), "record"), some)
    present = [chosen[id] for id in [*order, *others] if id in chosen]
    with atomic_file(output) as target:
        _copy([each.place for each in present], target)
    return Merged(
        records=len(present),
        failed=sum(each.failed for each in present),
        repeated=repeated,
        missing=tuple(id for id in order if id not in chosen),
    )


def _copy(places: Iterable[_Place], target: BinaryIO) -> None:
    opened: dict[Path, BinaryIO] = {}
    with ExitStack() as stack:
        for place in places:
            if place.file not in opened:
                if len(opened) == MAX_OPEN:
                    stack.close()
                    opened.clear()
                opened[place.file] = stack.enter_context(open_regular(place.file))
            opened[place.file].seek(place.start)
            target.write(opened[place.file].read(place.length).rstrip(b"\n") + b"\n")
