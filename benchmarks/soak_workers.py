"""Worker processes that check damaged images, watched for crashes, time and memory."""

import faulthandler
import multiprocessing
import os
import pickle
import resource
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
from memory import status

SECONDS = 30.0  # of CPU for one image; usual is a twentieth of a second
SECONDS_WAITING = 300.0  # of wall time, for waits without CPU on a busy machine
MOST_MEGABYTES = 600.0  # above the memory of a worker between images
ADDRESS_SPACE = 2**33  # last resort: a worker must not exhaust the machine
BASES = "bases.pickle"
UNFINISHED = ("given", "begun", "read")  # steps of a worker; the last is "checked"


@dataclass
class Report:
    """Outcome of one damaged image."""

    number: int
    format: str = ""
    kind: str = ""
    note: str = ""
    # ok, refused, traceback; of a worker: crash, hang, memory
    outcome: str = "ok"
    problem: str = ""
    checked: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    megabytes: float = 0.0
    reference_died: bool = False


def serve(pipe: Connection, folder: str, seed: int, keep: str | None) -> None:
    """Receive image numbers; damage and check each image; send reports."""
    place = Path(folder) / str(os.getpid())
    place.mkdir()
    log = open(place.with_suffix(".log"), "w")  # noqa: SIM115  it stays open
    os.dup2(log.fileno(), 2)  # C libraries log there
    faulthandler.enable(log)
    os.environ["TNET_CACHE"] = str(place / "cache")
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    bases = pickle.loads((Path(folder) / BASES).read_bytes())
    import soak_check  # noqa: F401  loaded before the first image is timed

    pipe.send(("ready", None))
    while True:
        try:
            number = pipe.recv()
        except EOFError:
            return
        damage_and_check(pipe, bases, number, seed, place / str(number), keep)


def damage_and_check(
    pipe: Any, bases: Sequence[Any], number: int, seed: int, place: Path, keep: str | None
) -> None:
    """Send the report after the damage, after reading and after the check."""
    from soak_check import Checked, compare, read_image
    from soak_damage import damage

    base = bases[number % len(bases)]
    damaged = damage(base, bases, np.random.default_rng([seed, number]))
    report = Report(number, base.format, damaged.kind, damaged.note)
    path = base.write(place, damaged.files)
    pipe.send(("begun", report))
    before, start = status("VmRSS"), time.perf_counter()
    forget_peak()
    result = Checked()
    boxes_read = read_image(path, result)
    report.seconds = time.perf_counter() - start
    report.megabytes = (status("VmHWM") - before) / 1e3
    report.outcome, report.problem = result.outcome, result.problem
    if report.megabytes > MOST_MEGABYTES and report.outcome != "traceback":
        report.outcome = "memory"
    pipe.send(("read", report))
    if boxes_read is not None:
        compare(base, damaged, boxes_read, result)
        boxes_read.reader.close()
        report.checked, report.wrong = result.checked, result.wrong
    if keep and (report.wrong or report.outcome not in ("ok", "refused")):
        shutil.copytree(place, Path(keep) / f"{number}", dirs_exist_ok=True)
    shutil.rmtree(place)
    pipe.send(("checked", report))


def forget_peak() -> None:
    """Reset VmHWM."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


class Worker:
    """One process and its current step."""

    def __init__(self, folder: Path, seed: int, keep: str | None) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        arguments = (theirs, str(folder), seed, keep)
        self.process = context.Process(target=serve, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self._folder = folder
        self.report: Report | None = None
        self.step = ""
        self.is_ready = False
        self.note_time()

    def give(self, number: int) -> None:
        """Send the next image."""
        self.report, self.step = Report(number), "given"
        self.note_time()
        self.pipe.send(number)

    def note_time(self) -> None:
        """Start the timer of the next step."""
        self._since, self._cpu_since = time.monotonic(), self._cpu()

    def _cpu(self) -> float:
        """Return the CPU seconds of the process."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def is_late(self) -> bool:
        """Return True if the current step exceeds its time limit."""
        worked = self._cpu() - self._cpu_since if self.is_ready else 0.0
        return worked > SECONDS or time.monotonic() - self._since > SECONDS_WAITING

    def end(self) -> str:
        """End the process if it still runs and return the end of its log."""
        self.pipe.close()
        self.process.join(0 if self.step in UNFINISHED else 5)  # it ends when the pipe is closed
        self.process.kill()
        self.process.join()
        place = self._folder / str(self.process.pid)
        log = place.with_suffix(".log")
        text = log.read_text(errors="replace") if log.exists() else ""
        text = text.partition("Extension modules:")[0][-3000:]  # a long list without information
        shutil.rmtree(place, ignore_errors=True)
        return text


def check_many(
    numbers: Sequence[int], folder: Path, seed: int, *, workers: int = 1, keep: str | None = None
) -> Iterator[Report]:
    """Yield a report for each number, even if workers die."""
    left = list(reversed(numbers))
    busy: list[Worker] = []
    idle = [Worker(folder, seed, keep) for _ in range(workers)]
    try:
        while left or busy:
            while left and idle:
                worker = idle.pop()
                worker.give(left.pop())
                busy.append(worker)
            ready = wait([worker.pipe for worker in busy], timeout=0.5)
            for worker in list(busy):
                done = _listen(worker) if worker.pipe in ready else _late(worker)
                if done is None:
                    continue
                yield done
                busy.remove(worker)
                if not worker.pipe.closed:
                    idle.append(worker)
                elif left:
                    idle.append(Worker(folder, seed, keep))
    finally:
        for worker in (*busy, *idle):
            worker.end()


def _listen(worker: Worker) -> Report | None:
    try:
        step, report = worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        return _end_worker(worker, "crash")
    worker.note_time()
    if step == "ready":
        worker.is_ready = True
        return None
    worker.step, worker.report = step, report
    return report if step == "checked" else None


def _late(worker: Worker) -> Report | None:
    return _end_worker(worker, "hang") if worker.is_late else None


def _end_worker(worker: Worker, outcome: str) -> Report:
    report = worker.report
    assert report is not None
    if outcome == "hang":
        os.kill(worker.process.pid or 0, signal.SIGABRT)  # faulthandler logs the stack
        worker.process.join(5)
    log = worker.end()
    if worker.step == "read":  # our part is done; the reference library crashed
        report.reference_died = True
    else:
        code = worker.process.exitcode
        report.outcome, report.problem = outcome, f"exit code {code}\n{log}"
    return report
