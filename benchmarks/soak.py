"""Stress tests: damaged files, killed batches, hours of predictions.

`python benchmarks/soak.py` runs three parts, `--only` one of them; `--write` puts the table of each
part into benchmarks/RESULTS.md. The seed determines all damage, signals and times.

- files: small images of every format are damaged (flipped bits, truncated, spliced, absurd values,
  swapped blocks, mixed-up files, erased ranges), described as by `tnet info` and read in worker
  processes: soak_images.py, soak_damage.py, soak_check.py, soak_workers.py. soak_check.py defines
  "wrong pixels". `--keep` keeps the files that failed; `--first N --files 1` repeats one by number.
- kills: a batch is killed and restarted 200 times: soak_kills.py.
- hours: a scaled-down run of two hours of predictions: soak_hours.py.

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
COLUMNS = ("format", "files", "ok", "typed error", *BAD.values(), "checked", "wrong pixels")


def soak_files(arguments: argparse.Namespace, folder: Path) -> list[Figure]:
    """Damage files and check how they are read."""
    from soak_images import make_bases
    from soak_workers import BASES, check_many

    say = Console(stderr=True).print
    bases = make_bases(folder / "images")
    (folder / BASES).write_bytes(pickle.dumps(bases))
    if arguments.keep:
        Path(arguments.keep).mkdir(parents=True, exist_ok=True)
    reports: list[Report] = []
    start = time.monotonic()
    for report in check_many(
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
    """Return the numbers of failures, which must be zero, with their details."""
    from soak_workers import MOST_MEGABYTES, SECONDS, SECONDS_WAITING

    slowest = max(reports, key=lambda each: each.seconds)
    largest = max(reports, key=lambda each: each.megabytes)
    details = {
        "traceback": "any exception other than a TnetError",
        "crash": "the worker process died",
        "hang": f"more than {SECONDS:g} s of CPU or {SECONDS_WAITING:g} s of wall time; the "
        f"slowest, {slowest.format}, took {slowest.seconds:.2g} s of wall time",
        "memory": f"more than {MOST_MEGABYTES:g} MB above the worker's baseline; the largest, "
        f"{largest.format}, took {largest.megabytes:.0f} MB",
    }
    found = [
        Figure("files", name, sum(each.outcome == key for each in reports), 0, True, "",
               details[key])
        for key, name in BAD.items()
    ]  # fmt: skip
    checked = sum(each.checked for each in reports)
    wrong = sum(bool(each.wrong) for each in reports)
    known = sum(each.checked > 0 for each in reports)
    detail = f"{checked} boxes of {known} files were checked"
    return [*found, Figure("files", "wrong pixels", wrong, 0, True, "", detail)]


def write_files(
    arguments: argparse.Namespace,
    reports: Sequence["Report"],
    figures: list[Figure],
    formats: int,
    seconds: float,
) -> None:
    """Write a row for each format and for each kind of damage."""
    crashed = sum(each.reference_died for each in reports)
    write("soak-files", [
        "## Soak: damaged files",
        "",
        f"`python benchmarks/soak.py --only files --files {arguments.files} --seed "
        f"{arguments.seed} --write`. {_versions(LIBRARIES)}. {len(reports)} damaged "
        f"copies of {formats} small files, {arguments.workers} worker, {seconds / 60:.0f} minutes. "
        "Each is described as by `tnet info` and read as a whole, across its edge and box by box. "
        "A typed error is a `TnetError` with a hint, for the file or for some of its windows. "
        "Boxes are checked if their correct pixels are known: from untouched bytes, truncated "
        "files, blocks with a checksum or swapped blocks, and otherwise from the library of the "
        "format on the same bytes (benchmarks/soak_check.py). Flipped bits in pixels without a "
        f"checksum cannot be detected. The library itself crashed on {crashed} files that tnet "
        "had read or rejected.",
        "",
        *markdown(figures),
        "",
        *_table(reports, "format"),
        "",
        *_table(reports, "kind", "damage"),
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
        checked, wrong = sum(each.checked for each in some), sum(bool(each.wrong) for each in some)
        rows.append([name, *map(str, (len(some), *counts, checked, wrong))])
    return ["| " + " | ".join(row) + " |" for row in rows]


def soak_kills(arguments: argparse.Namespace, folder: Path) -> list[Figure]:
    """Kill a batch and restart it."""
    from soak_kills import kill_and_restart

    say = Console(stderr=True).print
    tally = kill_and_restart(folder, arguments.seed, arguments.rounds, say)
    for each in tally.unexpected:
        say(each, markup=False)
    figures = kill_figures(tally)
    show(figures)
    if arguments.write:
        write("soak-kills", [
            "## Soak: killed and restarted",
            "",
            f"`python benchmarks/soak.py --only kills --rounds {arguments.rounds} --seed "
            f"{arguments.seed} --write`. {_versions(('torch', 'numpy', 'rasterio'))}. "
            f"{tally.rounds} starts of `tnet predict` on 40 small images with a tiny model in "
            f"{tally.seconds / 60:.0f} minutes, each forked from a process with {tally.threads} "
            "thread that has the libraries imported but unused (benchmarks/soak_kills.py). In a "
            f"round on a full disk a few kB are free on {tally.space}.",
            "",
            *markdown(figures),
            "",
        ])  # fmt: skip
    return figures


def kill_figures(tally: "Tally") -> list[Figure]:
    """Return the numbers of failures, which must be zero, with their details."""
    signals = ", ".join(f"{count} {name}" for name, count in sorted(tally.signals.items()))
    codes = ", ".join(f"{code}: {count}" for code, count in sorted(tally.codes.items()))
    exits = f"exit codes {codes}"
    full = f"{tally.full} rounds on a full disk, {tally.full_errors} ended with exit code 7"
    return [
        Figure("kills", "lost records", tally.lost, 0, True, "", signals),
        Figure("kills", "duplicate records", tally.doubled, 0, True, "",
               f"{tally.in_time} signals arrived before the end"),
        Figure("kills", "records unlike the uninterrupted run", tally.others, 0, True, "",
               "equal labels and regions, probabilities within 0.00001"),
        Figure("kills", "torn lines", tally.torn, 0, True, "", full),
        Figure("kills", "unexpected exits", len(tally.unexpected), 0, True, "", exits),
        Figure("kills", "batches finished and compared", tally.batches, 1, False, "",
               f"{tally.left_behind} temporary files left by SIGKILL"),
    ]  # fmt: skip


def soak_hours(arguments: argparse.Namespace, folder: Path) -> list[Figure]:
    """Run a scaled-down version of hours of predictions."""
    from soak_hours import predict_for_hours

    found = predict_for_hours(folder, arguments.images, Console(stderr=True).print)
    figures = hour_figures(found)
    show(figures)
    if arguments.write:
        write("soak-hours", [
            "## Soak: predictions for hours",
            "",
            f"`python benchmarks/soak.py --only hours --images {arguments.images} --write`. "
            f"{_versions(('torch', 'numpy', 'rasterio', 'tifffile'))}. A scaled-down run of "
            f"two hours: {found.images} predictions, {found.images / 7200:.2g} a second for two "
            "hours, of images of 200 x 150 pixels with a tiny model, in one process of "
            f"{found.seconds / 60:.1f} minutes, {found.cpu_seconds / 60:.1f} of CPU. Ten formats "
            "alternate, each image has its own path, and one in fifty is broken. Memory growth is "
            "the median of the last quarter of the samples minus that of the first quarter, after "
            "a tenth of the images.",
            "",
            *markdown(figures),
            "",
        ])  # fmt: skip
    return figures


def hour_figures(found: "Flatness") -> list[Figure]:
    """Return the growth of memory and open files."""
    warm, files = found.warm(found.megabytes), found.warm(found.handles)
    return [
        Figure("hours", "memory grows by", found.grown, 20, True, " MB",
               f"{found.images} images; {warm[0]:.0f} MB after a tenth, {max(warm):.0f} at most, "
               f"{warm[-1]:.0f} at the end"),
        Figure("hours", "open files grow by", found.handles_grown, 2, True, "",
               f"{min(files)} to {max(files)}"),
        Figure("hours", "threads at most", max(found.threads), 32, True, "",
               f"{found.threads[0]} at the start, {found.threads[-1]} at the end"),
        Figure("hours", "intact images that failed", found.failed - found.broken, 0, True, "",
               f"{found.broken} are broken on purpose"),
    ]  # fmt: skip


def _versions(names: Sequence[str]) -> str:
    libraries = ", ".join(f"{name} {version(name)}" for name in names)
    today = datetime.date.today()
    return f"{today}; {os.cpu_count()} cores; Python {platform.python_version()}; {libraries}"


def main(given: Sequence[str] | None = None) -> int:
    """Run the requested parts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=PARTS, help="run one part")
    parser.add_argument("--files", type=int, default=FILES, help="number of damaged files")
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--rounds", type=int, default=200, help="number of kills")
    parser.add_argument("--images", type=int, default=36_000, help="number of predictions")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=1, help="worker processes")
    parser.add_argument("--keep", metavar="FOLDER", help="keep the files that failed")
    parser.add_argument("--folder", type=Path, help="working folder; default: temporary")
    parser.add_argument("--write", action="store_true", help="update the tables in RESULTS.md")
    arguments = parser.parse_args(given)
    if arguments.only is None:
        # Each part in its own process: `kills` forks and needs a process without threads.
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
