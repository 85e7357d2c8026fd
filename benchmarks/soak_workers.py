"""Worker processes that look at spoilt images, watched for death, for time and for memory."""

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

SECONDS = 30.0  # of CPU for one image: it should take a twentieth of one
SECONDS_WAITING = 300.0  # by the clock, on a busy machine, for what takes no CPU
MOST_MEGABYTES = 600.0  # above what a worker has between images
ADDRESS_SPACE = 2**33  # the last resort: no worker may take the machine with it
BASES = "bases.pickle"
UNFINISHED = ("given", "begun", "looked")  # steps of a worker; the last is "judged"


@dataclass
class Report:
    """What became of one spoilt image."""

    number: int
    format: str = ""
    kind: str = ""
    note: str = ""
    # ok, refused, traceback; of a worker: crash, hang, memory
    outcome: str = "ok"
    problem: str = ""
    told: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    megabytes: float = 0.0
    witness_died: bool = False


def serve(pipe: Connection, folder: str, seed: int, keep: str | None) -> None:
    """Take numbers of images, spoil and look at each, and report."""
    place = Path(folder) / str(os.getpid())
    place.mkdir()
    log = open(place.with_suffix(".log"), "w")  # noqa: SIM115  it stays open
    os.dup2(log.fileno(), 2)  # libraries in C complain there
    faulthandler.enable(log)
    os.environ["TNET_CACHE"] = str(place / "cache")
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    bases = pickle.loads((Path(folder) / BASES).read_bytes())
    import soak_looks  # noqa: F401  what loads now takes no image's time

    pipe.send(("ready", None))
    while True:
        try:
            number = pipe.recv()
        except EOFError:
            return
        spoil_and_look(pipe, bases, number, seed, place / str(number), keep)


def spoil_and_look(
    pipe: Any, bases: Sequence[Any], number: int, seed: int, place: Path, keep: str | None
) -> None:
    """Report twice: once it is known what was done, and once it was looked at and judged."""
    from soak_harm import harm
    from soak_looks import Looked, judge, look

    base = bases[number % len(bases)]
    harmed = harm(base, bases, np.random.default_rng([seed, number]))
    report = Report(number, base.format, harmed.kind, harmed.note)
    path = base.write(place, harmed.files)
    pipe.send(("begun", report))
    before, start = status("VmRSS"), time.perf_counter()
    forget_peak()
    looked = Looked()
    seen = look(path, looked)
    report.seconds = time.perf_counter() - start
    report.megabytes = (status("VmHWM") - before) / 1e3
    report.outcome, report.problem = looked.outcome, looked.problem
    if report.megabytes > MOST_MEGABYTES and report.outcome != "traceback":
        report.outcome = "memory"
    pipe.send(("looked", report))
    if seen is not None:
        judge(base, harmed, seen, looked)
        seen.reader.close()
        report.told, report.wrong = looked.told, looked.wrong
    if keep and (report.wrong or report.outcome not in ("ok", "refused")):
        shutil.copytree(place, Path(keep) / f"{number}", dirs_exist_ok=True)
    shutil.rmtree(place)
    pipe.send(("judged", report))


def forget_peak() -> None:
    """Let VmHWM begin anew."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


class Worker:
    """One process and what it is doing."""

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
        """Give it the next image."""
        self.report, self.step = Report(number), "given"
        self.note_time()
        self.pipe.send(number)

    def note_time(self) -> None:
        """Let the time for the next step begin."""
        self._since, self._cpu_since = time.monotonic(), self._cpu()

    def _cpu(self) -> float:
        """Return the seconds of CPU that the process has taken."""
        try:
            fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @property
    def is_late(self) -> bool:
        """Say whether a step takes longer than any should."""
        worked = self._cpu() - self._cpu_since if self.is_ready else 0.0
        return worked > SECONDS or time.monotonic() - self._since > SECONDS_WAITING

    def end(self) -> str:
        """End the process, if it did not end by itself, and return its last words."""
        self.pipe.close()
        self.process.join(0 if self.step in UNFINISHED else 5)  # it ends when nobody asks any more
        self.process.kill()
        self.process.join()
        place = self._folder / str(self.process.pid)
        log = place.with_suffix(".log")
        words = log.read_text(errors="replace") if log.exists() else ""
        words = words.partition("Extension modules:")[0][-3000:]  # a long list that tells nothing
        shutil.rmtree(place, ignore_errors=True)
        return words


def look_at_many(
    numbers: Sequence[int], folder: Path, seed: int, *, workers: int = 1, keep: str | None = None
) -> Iterator[Report]:
    """Yield a report for each number, whatever becomes of the workers."""
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
        return _bury(worker, "crash")
    worker.note_time()
    if step == "ready":
        worker.is_ready = True
        return None
    worker.step, worker.report = step, report
    return report if step == "judged" else None


def _late(worker: Worker) -> Report | None:
    return _bury(worker, "hang") if worker.is_late else None


def _bury(worker: Worker, outcome: str) -> Report:
    report = worker.report
    assert report is not None
    if outcome == "hang":
        os.kill(worker.process.pid or 0, signal.SIGABRT)  # faulthandler tells where it was
        worker.process.join(5)
    words = worker.end()
    if worker.step == "looked":  # ours is done; the library that was to be its witness was not
        report.witness_died = True
    else:
        code = worker.process.exitcode
        report.outcome, report.problem = outcome, f"exit code {code}\n{words}"
    return report
