"""Try to break everything: spoilt files, killed batches, hours of predictions.

`python benchmarks/soak.py` runs three parts, `--only` one of them; `--write` puts the table of each
part that was run into benchmarks/RESULTS.md. The seed decides every harm, signal and time.

- files: small sound images of every format are spoilt (bits flipped, cut off, spliced, absurd
  values, blocks swapped, files mixed up, stretches erased) and go through what `tnet info` does
  and through window reads, in worker processes: soak_images.py, soak_harm.py, soak_looks.py,
  soak_workers.py. soak_looks.py defines "wrong pixels". `--keep` keeps the files
  that were not borne; `--first N --files 1` repeats one by its number.
- kills: a batch is killed and started again, 200 times: soak_kills.py.
- hours: as many predictions in a row as two hours hold, made smaller: soak_hours.py.

Exits with 1 if a target is missed.
"""

import argparse
import datetime
import os
import pickle
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [path for path in (str(ROOT), str(ROOT / "benchmarks")) if path not in sys.path]

from figures import Figure, markdown, show, write  # noqa: E402
from rich.console import Console  # noqa: E402

if TYPE_CHECKING:
    from soak_hours import Flatness
    from soak_kills import Tally
    from soak_workers import Report

PARTS = ("files", "kills", "hours")
FILES = 12_000
LIBRARIES = ("numpy", "rasterio", "tifffile", "imagecodecs", "openslide-python", "zarr", "pillow")
BAD = {"traceback": "traceback", "crash": "crash", "hang": "hang", "memory": "over memory"}
COLUMNS = ("format", "files", "ok", "typed error", *BAD.values(), "told", "wrong pixels")


def soak_files(arguments: argparse.Namespace, folder: Path) -> list[Figure]:
    """Spoil files and look at them."""
    from soak_images import make_bases
    from soak_workers import BASES, look_at_many

    say = Console(stderr=True).print
    bases = make_bases(folder / "sound")
    (folder / BASES).write_bytes(pickle.dumps(bases))
    if arguments.keep:
        Path(arguments.keep).mkdir(parents=True, exist_ok=True)
    reports: list[Report] = []
    start = time.monotonic()
    for report in look_at_many(
        range(arguments.first, arguments.first + arguments.files), folder, arguments.seed,
        workers=arguments.workers, keep=arguments.keep,
    ):  # fmt: skip
        reports.append(report)
        if report.outcome in BAD or report.wrong:
            what = f"{report.number}: {report.format}, {report.kind}, {report.note}"
            say(what, report.outcome, report.problem[-800:], report.wrong[:2], markup=False)
        if len(reports) % 500 == 0:
            rate = len(reports) / (time.monotonic() - start)
            say(f"{len(reports)} of {arguments.files} files, {rate:.0f} a second")
    figures = file_figures(reports)
    show(figures)
    if arguments.write:
        write_files(arguments, reports, figures, len(bases), time.monotonic() - start)
    return figures


def file_figures(reports: Sequence["Report"]) -> list[Figure]:
    """Return what must be zero, and what it was zero of."""
    from soak_workers import MOST_MEGABYTES, SECONDS, SECONDS_WAITING

    slowest = max(reports, key=lambda each: each.seconds)
    largest = max(reports, key=lambda each: each.megabytes)
    details = {
        "traceback": "any exception that is not an error of ours",
        "crash": "the worker process died",
        "hang": f"more than {SECONDS:g} s of CPU, or {SECONDS_WAITING:g} by the clock; the "
        f"slowest, {slowest.format}, took {slowest.seconds:.2g} by the clock",
        "memory": f"more than {MOST_MEGABYTES:g} MB above the worker's own; the largest, "
        f"{largest.format}, took {largest.megabytes:.0f} MB",
    }
    found = [
        Figure("files", name, sum(each.outcome == key for each in reports), 0, True, "",
               details[key])
        for key, name in BAD.items()
    ]  # fmt: skip
    told = sum(each.told for each in reports)
    wrong = sum(bool(each.wrong) for each in reports)
    known = sum(each.told > 0 for each in reports)
    detail = f"{told} boxes of {known} files could be told right from wrong"
    return [*found, Figure("files", "wrong pixels", wrong, 0, True, "", detail)]


def write_files(
    arguments: argparse.Namespace,
    reports: Sequence["Report"],
    figures: list[Figure],
    formats: int,
    seconds: float,
) -> None:
    """Write a row for each format and for each kind of harm."""
    unheard = sum(each.witness_died for each in reports)
    write("soak-files", [
        "## Soak: spoilt files",
        "",
        f"`python benchmarks/soak.py --only files --files {arguments.files} --seed "
        f"{arguments.seed} --write`. {_versions(LIBRARIES)}. {len(reports)} files made of "
        f"{formats} small sound ones, {arguments.workers} worker at a time, {seconds / 60:.0f} "
        "minutes. Each is described as `tnet info` does and read as a whole, across its edge and "
        "box by box. A typed error is one of ours, with a hint, for the file or for some of its "
        "windows. Told are boxes of which somebody knows how they should look: bytes that nobody "
        "touched, files cut off, blocks with a checksum, blocks that changed places, and else the "
        "format's own library on the same bytes (benchmarks/soak_looks.py). Flipped bits in pixels "
        f"without a checksum nobody can tell. The library itself died of {unheard} files that "
        "ours had read or refused.",
        "",
        *markdown(figures),
        "",
        *_table(reports, "format"),
        "",
        *_table(reports, "kind", "harm"),
        "",
    ])  # fmt: skip


def _table(reports: Sequence["Report"], field: str, heading: str = "") -> list[str]:
    """Count outcomes by a field of the reports."""
    head = [heading or COLUMNS[0], *COLUMNS[1:]]
    rows = [head, ["---"] * len(head)]
    groups = list(dict.fromkeys(getattr(each, field) for each in reports))
    for name in [*sorted(groups), "all"]:
        some = [each for each in reports if name in ("all", getattr(each, field))]
        counts = [sum(each.outcome == key for each in some) for key in ("ok", "refused", *BAD)]
        told, wrong = sum(each.told for each in some), sum(bool(each.wrong) for each in some)
        rows.append([name, *map(str, (len(some), *counts, told, wrong))])
    return ["| " + " | ".join(row) + " |" for row in rows]


def soak_kills(arguments: argparse.Namespace, folder: Path) -> list[Figure]:
    """Kill a batch and start it again."""
    from soak_kills import kill_and_restart

    say = Console(stderr=True).print
    tally = kill_and_restart(folder, arguments.seed, arguments.rounds, say)
    for each in tally.strange:
        say(each, markup=False)
    figures = kill_figures(tally)
    show(figures)
    if arguments.write:
        write("soak-kills", [
            "## Soak: killed and started again",
            "",
            f"`python benchmarks/soak.py --only kills --rounds {arguments.rounds} --seed "
            f"{arguments.seed} --write`. {_versions(('torch', 'numpy', 'rasterio'))}. "
            f"{tally.rounds} starts of `tnet predict` on 40 small images with a tiny model in "
            f"{tally.seconds / 60:.0f} minutes, each forked from a process with {tally.threads} "
            "thread that has the libraries loaded and unused (benchmarks/soak_kills.py). A round "
            f"without space has a few kB left on {tally.space}.",
            "",
            *markdown(figures),
            "",
        ])  # fmt: skip
    return figures


def kill_figures(tally: "Tally") -> list[Figure]:
    """Return what must be zero, and what it was zero of."""
    signals = ", ".join(f"{count} {name}" for name, count in sorted(tally.signals.items()))
    codes = ", ".join(f"{code}: {count}" for code, count in sorted(tally.codes.items()))
    strange = f"exit codes {codes}"
    full = f"{tally.full} rounds without space, {tally.full_felt} ended with exit code 7"
    return [
        Figure("kills", "lost records", tally.lost, 0, True, "", signals),
        Figure("kills", "doubled records", tally.doubled, 0, True, "",
               f"{tally.in_time} signals came before the end"),
        Figure("kills", "records other than undisturbed", tally.others, 0, True, "",
               "labels and windows the same, probabilities within 0.00001"),
        Figure("kills", "torn lines", tally.torn, 0, True, "", full),
        Figure("kills", "unexpected ends", len(tally.strange), 0, True, "", strange),
        Figure("kills", "batches done and compared", tally.batches, 1, False, "",
               f"{tally.left_behind} temporary files left behind by SIGKILL"),
    ]  # fmt: skip


def soak_hours(arguments: argparse.Namespace, folder: Path) -> list[Figure]:
    """Predict for hours, made smaller."""
    from soak_hours import predict_for_hours

    found = predict_for_hours(folder, arguments.images, Console(stderr=True).print)
    figures = hour_figures(found)
    show(figures)
    if arguments.write:
        write("soak-hours", [
            "## Soak: predictions for hours",
            "",
            f"`python benchmarks/soak.py --only hours --images {arguments.images} --write`. "
            f"{_versions(('torch', 'numpy', 'rasterio', 'tifffile'))}. Two hours made smaller: "
            f"{found.images} predictions, {found.images / 7200:.2g} a second for two hours, of "
            "images of 200 x 150 pixels with a tiny model, in one process of "
            f"{found.seconds / 60:.1f} minutes, {found.cpu_seconds / 60:.1f} of CPU. Ten formats "
            "in turn, a path for each image, one in fifty broken. Memory is the median of the last "
            "quarter of the samples less that of the first, after a tenth of the images.",
            "",
            *markdown(figures),
            "",
        ])  # fmt: skip
    return figures


def hour_figures(found: "Flatness") -> list[Figure]:
    """Return how flat memory and open files were."""
    warm, files = found.warm(found.megabytes), found.warm(found.handles)
    return [
        Figure("hours", "memory grows by", found.grown, 20, True, " MB",
               f"{found.images} images; {warm[0]:.0f} MB after a tenth, {max(warm):.0f} at most, "
               f"{warm[-1]:.0f} at the end"),
        Figure("hours", "open files grow by", found.handles_grown, 2, True, "",
               f"{min(files)} to {max(files)}"),
        Figure("hours", "threads at most", max(found.threads), 32, True, "",
               f"{found.threads[0]} at the start, {found.threads[-1]} at the end"),
        Figure("hours", "images failed that are sound", found.failed - found.broken, 0, True, "",
               f"{found.broken} are broken on purpose"),
    ]  # fmt: skip


def _versions(names: Sequence[str]) -> str:
    libraries = ", ".join(f"{name} {version(name)}" for name in names)
    today = datetime.date.today()
    return f"{today}; {os.cpu_count()} cores; Python {platform.python_version()}; {libraries}"


def main(given: Sequence[str] | None = None) -> int:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, help="run one part")
    parser.add_argument("--files", type=int, default=FILES, help="spoilt files")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them")
    parser.add_argument("--rounds", type=int, default=200, help="kills")
    parser.add_argument("--images", type=int, default=36_000, help="predictions in a row")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="processes that look at files")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the files that were not borne")
    parser.add_argument("--folder", type=Path, help="work here; default: a temporary folder")
    parser.add_argument("--write", action="store_true", help="renew the tables in RESULTS.md")
    arguments = parser.parse_args(given)
    if arguments.only is None:
        # Each in a process of its own: kills forks, and needs one without threads.
        own = sys.argv[1:] if given is None else list(given)
        commands = [[sys.executable, __file__, "--only", part, *own] for part in PARTS]
        return max([subprocess.run(command).returncode for command in commands])
    part = {"files": soak_files, "kills": soak_kills, "hours": soak_hours}[arguments.only]
    folder = Path(tempfile.mkdtemp(prefix="tnet-soak-", dir=arguments.folder))
    try:
        figures = part(arguments, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return int(not all(figure.holds for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
