"""Put the records of shards together, if they belong together, and name what is missing."""

import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from tnetcli.errors import OutputError
from tnetcli.files import open_regular
from tnetcli.output_file import check_free, refuse_inputs, whole_file
from tnetcli.prediction_file import differences, read_lines, refuse_compressed
from tnetcli.wording import counted, printable, some_of
from tnetcli.workflows.images import Image

log = logging.getLogger(__name__)
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
    check_free(output, overwrite=overwrite)
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
            refuse_inputs(output, [record.image])
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
            some_of(strangers, MOST_NAMED),
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
        with whole_file(output) as merged:
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
