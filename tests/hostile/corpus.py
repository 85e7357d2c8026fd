"""The hostile files of the audit: write them, or run every case and print what it came to.

    python tests/hostile/corpus.py FOLDER [--only NAME]
    python tests/hostile/corpus.py --report [--only NAME] [--tree CHECKOUT] [--cold]

`--report` runs the package of this checkout, or of another one. Exits with 1 if a case is not as it
must be.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.hostile import bombs, drivers, pipes, records  # noqa: E402
from tests.hostile.case import Case, Place  # noqa: E402
from tests.hostile.running import Listener, Verdict, runner  # noqa: E402

CASES: tuple[Case, ...] = (*drivers.CASES, *bombs.CASES, *pipes.CASES, *records.CASES)
SECONDS = 10.0  # that a case may take; the limit of the process is longer
MOST_SHOWN = 4  # of what is not as it must be
COLUMNS = ("case", "finding", "exit", "seconds", "MB", "requests", "changed", "verdict")


def write(folder: Path, cases: tuple[Case, ...]) -> None:
    """Write the files of each case into a folder of its own."""
    listener = Listener()
    for case in cases:
        place = Place(folder / case.name, listener.url)
        place.make()
        case.make(place)
    listener.close()


def report(cases: tuple[Case, ...], tree: Path, *, cold: bool, seconds: float, errors: bool) -> int:
    """Run the cases and print a table; return how many are not as they must be."""
    print("| " + " | ".join(COLUMNS) + " |")
    print("| " + " | ".join("---" for _ in COLUMNS) + " |")
    bad = 0
    with (
        tempfile.TemporaryDirectory(prefix="tnet-hostile-") as folder,
        runner(Path(folder), tree, seconds=seconds, cold=cold) as running,
    ):
        for case in cases:
            verdict = running.case(case)
            late = [each for each in verdict.ended if each.seconds > SECONDS]
            verdict.problems += [f"took {each.seconds:.1f} s" for each in late]
            bad += bool(verdict.problems)
            print("| " + " | ".join(row(verdict)) + " |", flush=True)
            if errors:
                print("\n".join(each.err for each in verdict.ended), flush=True)
    print(f"\n{len(cases) - bad} of {len(cases)} cases are as they must be")
    return bad


def row(verdict: Verdict) -> list[str]:
    """Return the cells of a case."""
    ended = verdict.ended
    codes = ", ".join("none" if each.code is None else str(each.code) for each in ended)
    return [
        verdict.case.name,
        verdict.case.finding,
        codes,
        f"{max(each.seconds for each in ended):.1f}",
        f"{max(each.megabytes for each in ended):.0f}",
        str(len(verdict.requests)),
        ", ".join(verdict.changes) or "0",
        "; ".join(list(dict.fromkeys(verdict.problems))[:MOST_SHOWN]) or "ok",
    ]


def main() -> int:
    """Write or report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, help="write the files here")
    parser.add_argument("--only", metavar="NAME", help="cases whose name matches")
    parser.add_argument("--report", action="store_true", help="run the cases instead")
    parser.add_argument("--tree", type=Path, default=ROOT, help="checkout to run; this one")
    parser.add_argument("--cold", action="store_true", help="start Python for each command")
    parser.add_argument("--limit", type=float, default=60, help="seconds before a kill; 60")
    parser.add_argument("--errors", action="store_true", help="show what commands print, too")
    given = parser.parse_args()
    cases = tuple(case for case in CASES if re.search(given.only or "", case.name))
    if given.report:
        tree = given.tree.resolve()
        bad = report(cases, tree, cold=given.cold, seconds=given.limit, errors=given.errors)
        return int(bad > 0)
    if given.folder is None:
        parser.error("name a folder, or give --report")
    write(given.folder, cases)
    return 0


if __name__ == "__main__":
    sys.exit(main())
