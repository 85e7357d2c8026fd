"""Kill and restart a batch many times: no record is lost and none is written twice.

Each round runs `tnetcli.cli.app.main` as `tnet predict IMAGES -o FILE.jsonl` does, in a child
forked from a process with one thread that has the libraries imported but unused: importing them
would take 6 seconds of CPU a round. At a random time, mostly after a few more records, the child
receives SIGKILL, SIGTERM, SIGUSR1, SIGINT or SIGINT twice. In some rounds the disk is almost full:
a small tmpfs if the user may mount one, otherwise RLIMIT_FSIZE. A finished batch is compared with
an uninterrupted one, and the next begins.
"""

import json
import os
import random
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from soak_disk import Disk

ROUNDS = 200
IMAGES = 40
FULL_EVERY = 8  # rounds
CLOSE = 1e-5  # between probabilities: batches differ after a restart
SIGNALS = {
    "SIGKILL": (signal.SIGKILL,),
    "SIGTERM": (signal.SIGTERM,),
    "SIGUSR1": (signal.SIGUSR1,),
    "SIGINT": (signal.SIGINT,),
    "SIGINT twice": (signal.SIGINT, signal.SIGINT),
}
DONE, FULL, STOPPED, INTERRUPTED = 0, 7, 75, 130
# Allowed exit codes; 0 is always allowed, because the batch may have finished first.
EXPECTED = {
    "SIGKILL": {-signal.SIGKILL},
    "SIGTERM": {STOPPED},
    "SIGUSR1": {STOPPED},
    "SIGINT": {INTERRUPTED},
    # The second signal may arrive after the handlers were removed.
    "SIGINT twice": {INTERRUPTED, -signal.SIGINT},
}
# Before the command installs its handlers, a signal ends it as any program.
EARLY = {
    name: -numbers[0] for name, numbers in SIGNALS.items() if name != "SIGKILL"
}  # fmt: skip


@dataclass
class Tally:
    """Counts over all rounds."""

    rounds: int = 0
    batches: int = 0  # finished
    signals: dict[str, int] = field(default_factory=dict)
    codes: dict[int, int] = field(default_factory=dict)
    full: int = 0  # rounds on a full disk
    full_errors: int = 0  # of these, ended with the error for it
    in_time: int = 0  # signals that arrived before the end of the command
    lost: int = 0
    doubled: int = 0
    others: int = 0  # records that differ from the uninterrupted run
    torn: int = 0  # complete lines that are not records
    unexpected: list[str] = field(default_factory=list)  # exit codes and tracebacks
    left_behind: int = 0  # temporary files after SIGKILL
    space: str = ""
    threads: int = 0  # of the process that forks
    seconds: float = 0.0


def kill_and_restart(folder: Path, seed: int, rounds: int = ROUNDS, say: Any = print) -> Tally:
    """Run the rounds."""
    # Threads do not survive a fork.
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    child = os.fork()
    if child == 0:  # torch is used in a child, so that this process stays without threads
        _in_a_child(lambda: make_batch(folder))
    assert wait_for(child) == DONE
    tally, chance = Tally(), random.Random(seed)
    disk = Disk(folder)
    tally.space = disk.kind
    try:
        _run(folder, disk, tally, chance, rounds, say)
    finally:
        disk.close()
    return tally


def make_batch(folder: Path, images: int = IMAGES) -> None:
    """Write small images and a tiny model."""
    from tests.checkpoints import write_tiny
    from tests.images import noise, write_geotiff

    (folder / "images").mkdir(parents=True)
    for number in range(images):
        path = folder / "images" / f"{number:04}.tif"
        write_geotiff(path, noise((160 + 20 * (number % 4), 180), seed=number), overviews=[2])
    write_tiny(
        folder / "m.safetensors",
        config={"backbone": "compact", "view_size": 32, "pooling": "mean_max"},
        bands=["red", "green", "blue"],
        normalisation={"dtype": "uint8", "mean": [128.0] * 3, "std": [60.0] * 3},
    )


def _run(
    folder: Path, disk: Disk, tally: Tally, chance: random.Random, rounds: int, say: Any
) -> None:
    reference = folder / "uninterrupted.jsonl"
    usual = 0.0
    for _ in range(2):
        start = time.monotonic()
        reference.unlink(missing_ok=True)
        code = wait_for(begin(folder, reference, disk))
        assert code == DONE, (folder / "log").read_text()
        usual = time.monotonic() - start
        for name in (folder / "modules").read_text().split():
            with suppress(Exception):  # imported here, used only in the children
                import_module(name)
    known = records_of(reference)
    assert len(known) == IMAGES
    output = disk.folder / "out.jsonl"
    begun = time.monotonic()
    before: dict[str, Any] = {}
    while tally.rounds < rounds or output.exists():
        number = tally.rounds
        is_full = number % FULL_EVERY == FULL_EVERY - 1 and number < rounds
        # SIGKILL, which cannot be handled, is twice as frequent; the last round may finish.
        name = chance.choice([*SIGNALS, "SIGKILL"]) if number < rounds else None
        # A third of the signals come at any time, the others after a few more records.
        more = chance.randrange(1, IMAGES // 2) if chance.random() < 0.67 else 0
        delay = chance.random() * (0.03 if more else usual)
        enough = len(before) + more
        if is_full:
            disk.fill(output, chance.randrange(20_000))
        tally.threads = max(tally.threads, len(os.listdir("/proc/self/task")))
        child = begin(folder, output, disk)
        if name is None:
            code = wait_for(child)
        else:
            code = wait_for(child, SIGNALS[name], delay, partial(_holds, output, enough))
        disk.free()
        tally.rounds += 1
        after = _count_records(output, known, tally)
        tally.lost += len(before.keys() - after.keys())
        _check_exit(tally, name, code, is_full, (folder / "log").read_text())
        before = after
        if code == DONE:
            tally.batches += 1
            tally.lost += len(known.keys() - after.keys())
            output.unlink()
            before = {}
        left = list(disk.folder.glob(".tnet-*"))
        tally.left_behind += len(left)
        for path in left:
            path.unlink()
        if tally.rounds % 25 == 0:
            say(f"{tally.rounds} rounds, {tally.batches} batches, exit codes {tally.codes}")
    tally.seconds = time.monotonic() - begun


def _check_exit(tally: Tally, name: str | None, code: int, is_full: bool, said: str) -> None:
    tally.codes[code] = tally.codes.get(code, 0) + 1
    if name is not None:
        tally.signals[name] = tally.signals.get(name, 0) + 1
        tally.in_time += code not in (DONE, FULL)
    tally.full += is_full
    tally.full_errors += is_full and code == FULL
    allowed = {DONE, *EXPECTED.get(name or "", ())}
    allowed |= {FULL} if is_full else set()
    if name in EARLY:
        allowed.add(EARLY[name])
    if code not in allowed or "Traceback" in said:
        tally.unexpected.append(f"{name}, full disk: {is_full}, exit code {code}: {said[-400:]}")


def begin(folder: Path, output: Path, disk: Disk) -> int:
    """Fork a child that runs the command; return its process id."""
    child = os.fork()
    if child == 0:
        _run_command(folder, output, disk.limit)
    return child


def _run_command(folder: Path, output: Path, limit: int | None) -> NoReturn:
    """Run `tnet predict` in this process; never return."""
    from tnetcli.cli.app import main

    def command() -> None:
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.chdir(folder)
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if limit is not None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        sys.argv = [
            "tnet", "predict", "images", "--model", "m.safetensors", "--device", "cpu",
            "--batch-size", "2", "-o", str(output),
        ]  # fmt: skip
        try:
            main()
        finally:
            if not output.is_relative_to(folder / "disk"):
                (folder / "modules").write_text("\n".join(sorted(sys.modules)))

    _in_a_child(command)


def _in_a_child(work: Callable[[], object]) -> NoReturn:
    """Run `work` and exit as a program does, without touching state of the parent."""
    code = 1
    try:
        work()
        code = DONE
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def wait_for(
    child: int,
    signals: tuple[int, ...] = (),
    delay: float = 0.0,
    is_time: Callable[[], bool] = lambda: True,
) -> int:
    """Send signals `delay` seconds after `is_time`; return the exit code, negative for a signal."""
    due: float | None = None
    while signals and (due is None or time.monotonic() < due):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if due is None and is_time():
            due = time.monotonic() + delay
        time.sleep(0.002)
    for number in signals:
        with suppress(ProcessLookupError):
            os.kill(child, number)
        time.sleep(0.01)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _holds(path: Path, lines: int) -> bool:
    return (path.read_bytes().count(b"\n") if path.exists() else 0) >= lines


def records_of(path: Path) -> dict[str, Any]:
    """Return the records of an uninterrupted run by image id."""
    lines = path.read_text().splitlines()
    return {record["id"]: record for record in map(json.loads, lines)}


def _count_records(path: Path, known: dict[str, Any], tally: Tally) -> dict[str, Any]:
    """Return the complete records of a file and count errors in them."""
    found: dict[str, Any] = {}
    lines = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for line in lines[:-1]:  # the last line may be incomplete
        try:
            record = json.loads(line)
        except ValueError:
            tally.torn += 1
            continue
        tally.doubled += record["id"] in found
        found[record["id"]] = record
        tally.others += not _alike(record, known.get(record["id"]))
    return found


def _alike(record: dict[str, Any], known: dict[str, Any] | None) -> bool:
    if known is None or record["status"] != "ok" or record["label"] != known["label"]:
        return False
    if [w["path"] for w in record["windows"]] != [w["path"] for w in known["windows"]]:
        return False
    if [w["box"] for w in record["windows"]] != [w["box"] for w in known["windows"]]:
        return False
    return all(
        abs(record["probabilities"][name] - value) < CLOSE
        for name, value in known["probabilities"].items()
    )
