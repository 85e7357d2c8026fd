"""Run commands under limits, beside a listener on loopback, and judge what they did.

Commands are forked from one process that has the libraries loaded, as in tests/warm.py; `cold`
starts each as a user does. Memory is the peak of the process less that of `tnet info` of a sound
image. This file is also the program of that process.
"""

import gc
import hashlib
import importlib
import json
import os
import re
import resource
import runpy
import signal
import stat
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, BinaryIO

if __name__ != "__main__":
    from tests.hostile.case import Case, Ended, Place, write_tiff

MOST_MEGABYTES = 600.0  # above idle
ADDRESS_SPACE = 14_000_000_000  # bytes, with torch's libraries: the machine survives a bomb
# None of our readers: which thread imports them first decides about settings of GDAL.
LOADED = (
    *("tnetcli.cli.app", "tnetcli.prediction.record", "tnetcli.models.tnet"),
    *("tnetcli.models.checkpoint", "tnetcli.training.recipe"),
    *("torch", "torch._dynamo", "rasterio", "tifffile", "imagecodecs", "simplejpeg", "openslide"),
    *("zarr", "PIL.Image", "typer", "rich.console", "yaml", "pydantic", "rasterio.warp", "sqlite3"),
    *("distributed", "matplotlib.pyplot", "xml.parsers.expat"),
)
RAW_WARNING = re.compile(r"\.py:\d+: \w*Warning: ")
MOST_HASHED = 2**26  # bytes of a file that is compared by its content
SERVED = "/served/"  # what the listener has; all else is not found


class Listener:
    """An HTTP server on loopback that notes every connection and every request."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        listener = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                listener.answer(self)

            do_HEAD = do_GET

            def log_message(self, *arguments: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def process_request(self, request: Any, address: Any) -> None:
                listener.requests.append("connection")
                super().process_request(request, address)

            def handle_error(self, request: Any, address: Any) -> None:
                pass

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        """Give a file, or the part of it that is asked for."""
        self.requests.append(f"{handler.command} {handler.path}")
        content = self.files.get(handler.path.partition("?")[0])
        if content is None:
            handler.send_error(404)
            return
        first, last = 0, len(content) - 1
        if asked := handler.headers.get("Range", "").removeprefix("bytes="):
            start, _, end = asked.partition("-")
            first, last = int(start), min(int(end or last), last)
        handler.send_response(206 if asked else 200)
        handler.send_header("Accept-Ranges", "bytes")
        if asked:
            handler.send_header("Content-Range", f"bytes {first}-{last}/{len(content)}")
        handler.send_header("Content-Length", str(last - first + 1))
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(content[first : last + 1])

    def unasked(self, allowed: str) -> list[str]:
        """Return the requests whose path is not one that a command named."""
        if allowed:
            paths = [each for each in self.requests if each != "connection"]
            return [each for each in paths if not each.split(" ")[1].startswith(allowed)]
        return list(self.requests)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


@dataclass
class Verdict:
    """What became of one case: the commands, and everything that is not as it must be."""

    case: "Case"
    ended: list["Ended"] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Runner:
    """Runs cases in folders of their own, with commands of the package in `tree`."""

    def __init__(
        self, folder: Path, tree: Path, *, seconds: float = 60, cold: bool = False
    ) -> None:
        self.folder, self._tree, self._seconds, self._cold = folder, tree, seconds, cold
        self.listener = Listener()
        folder.mkdir(parents=True, exist_ok=True)
        self._server = subprocess.Popen(
            [sys.executable, "-P", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=folder,
            env=_environment(folder, tree),
            text=True,
        )
        good = write_tiff(folder / "good.tif")
        self.listener.files[f"{SERVED}good.tif"] = good.read_bytes()
        self.idle: dict[str, float] = {}
        self.idle = {command: self._idle(command, good) for command in ("info", "predict")}

    def _idle(self, command: str, good: Path) -> float:
        place = Place(self.folder / "idle", self.listener.url)
        place.work.mkdir(parents=True, exist_ok=True)
        ended = self.run(place, (command, str(good)), {})
        assert ended.code == 0, ended.err
        return ended.megabytes

    def case(self, case: "Case") -> Verdict:
        """Write the files of a case, run its commands and judge."""
        place = Place(self.folder / case.name, self.listener.url)
        place.make()
        verdict = Verdict(case)
        self.listener.requests.clear()
        case.make(place)
        before = snapshot(place)
        for step in case.steps:
            if step.before is not None:
                step.before(place)
            words = tuple(place.fill(word) for word in step.words)
            environment = {key: place.fill(value) for key, value in case.environment.items()}
            ended = self.run(place, words, environment)
            verdict.ended.append(ended)
            verdict.problems += faults(ended, step.codes, step.says)
        after = snapshot(place)
        verdict.changes = sorted(
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        )
        verdict.requests = self.listener.unasked(case.may_request)
        verdict.problems += [f"changed {name}" for name in verdict.changes]
        verdict.problems += [f"requested {each}" for each in dict.fromkeys(verdict.requests)]
        if case.check is not None:
            verdict.problems += case.check(place, verdict.ended)
        return verdict

    def run(self, place: "Place", words: Sequence[str], environment: Mapping[str, str]) -> "Ended":
        """Run one command in the working folder of a place."""
        streams = [str(place.work / name) for name in (".stdout", ".stderr")]
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        question = {
            "words": list(words),
            "folder": str(place.work),
            "environment": {**_environment(place.work, self._tree), **environment},
            "streams": streams,
            "seconds": self._seconds,
            "cold": self._cold,
        }
        self._server.stdin.write(json.dumps(question) + "\n")
        self._server.stdin.flush()
        code, seconds, megabytes = json.loads(self._server.stdout.readline())
        out, err = (Path(each).read_text(errors="replace") for each in streams)
        idle = self.idle.get(words[0] if words[0] == "info" else "predict", 0.0)
        return Ended(tuple(words), code, seconds, max(megabytes - idle, 0), out, err)

    def close(self) -> None:
        """End the process that commands are forked from."""
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait(timeout=60)
        assert self._server.stdout is not None
        self._server.stdout.close()
        self.listener.close()


def _environment(folder: Path, tree: Path) -> dict[str, str]:
    """Return what commands know of the machine: nothing of the user's own settings."""
    return {
        "PATH": os.environ.get("PATH", ""),
        "PYTHONPATH": str(tree),
        "LANG": "C.UTF-8",
        "COLUMNS": "200",
        # Idle threads would spin on cores that other tests need.
        "OMP_WAIT_POLICY": "passive",
        "OPENBLAS_NUM_THREADS": "1",
        "HOME": str(folder / "home"),
        "TNET_CACHE": str(folder / "cache"),
    }


def faults(ended: "Ended", codes: frozenset[int], says: Sequence[str]) -> Iterator[str]:
    what = f"`tnet {ended.words[0]}`"
    if ended.code is None:
        yield f"{what} did not end"
    elif ended.code not in codes:
        yield f"{what} exited with {ended.code}, not with {sorted(codes)}"
    if "Traceback" in ended.err:
        yield f"{what} showed a traceback"
    if ended.code and "error:" not in ended.err:
        yield f"{what} showed no error"
    if RAW_WARNING.search(ended.err):
        yield f"{what} showed a warning of Python"
    if ended.megabytes > MOST_MEGABYTES:
        yield f"{what} took {ended.megabytes:.0f} MB"
    yield from (f"{what} does not say `{word}`" for word in says if word not in ended.err)


def snapshot(place: "Place") -> dict[str, tuple[int, str]]:
    """Return kind, permissions and content of all that commands must leave as it is."""
    # Reading the gigabytes of a sparse file would take longer than all the rest.
    found = {}
    for path in sorted(place.root.rglob("*")):
        if path == place.work or place.work in path.parents:
            continue
        status = path.lstat()
        content = ""
        if stat.S_ISREG(status.st_mode) and status.st_size <= MOST_HASHED:
            content = hashlib.sha256(path.read_bytes()).hexdigest()
        elif stat.S_ISREG(status.st_mode):
            content = f"{status.st_size} {status.st_mtime_ns}"
        found[str(path.relative_to(place.root))] = (status.st_mode, content)
    return found


@contextmanager
def runner(folder: Path, tree: Path, **options: Any) -> Iterator[Runner]:
    """Lend a runner."""
    made = Runner(folder, tree, **options)
    try:
        yield made
    finally:
        made.close()


def serve(questions: BinaryIO) -> None:
    """Answer each line with the exit code, the seconds and the peak megabytes of a command."""
    for name in LOADED:
        with suppress(ImportError):  # an extra that is not installed
            importlib.import_module(name)
    gc.freeze()  # else each child copies what it collects
    for line in questions:
        question = json.loads(line)
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            _be(question)
        code, kilobytes = _wait(child, start + question["seconds"])
        print(json.dumps([code, time.monotonic() - start, kilobytes / 1024]), flush=True)


def _be(question: dict[str, Any]) -> None:
    """Be the command that is asked for, in a group of its own that can be killed as a whole."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in enumerate(question["streams"], 1):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    os.chdir(question["folder"])
    if question["cold"]:
        words = [sys.executable, "-m", "tnetcli", *question["words"]]
        os.execve(sys.executable, words, question["environment"])
    os.environ.clear()
    os.environ.update(question["environment"])
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  the old one may hold questions already
    sys.argv = ["tnet", *question["words"]]
    code = 0
    try:
        runpy.run_module("tnetcli", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # a traceback and exit code 1 elsewhere
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _wait(child: int, until: float) -> tuple[int | None, int]:
    """Return the exit code, None past the time limit, and the peak memory in kilobytes."""
    late = False
    while True:
        ended, status, usage = os.wait4(child, os.WNOHANG)
        if ended:
            return None if late else os.waitstatus_to_exitcode(status), usage.ru_maxrss
        if not late and time.monotonic() > until:
            late = True
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
        time.sleep(0.005)


if __name__ == "__main__":
    serve(sys.stdin.buffer)
