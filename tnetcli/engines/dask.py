"""Run work on a Dask cluster that others have started: dask-jobqueue, Kubernetes, a few machines.

Nothing else knows about clusters. What is sent are names, what comes back are results: no pixels.
"""

import asyncio
import json
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import CancelledError, Future, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, TypeVar

from tnetcli.errors import ClusterError, MissingExtraError, UsageError
from tnetcli.files import is_private, open_regular
from tnetcli.wording import first_line, shorten

AHEAD = 2  # pieces for each thread of a worker: one is worked on, one is on its way
QUEUED = 1000  # pieces more, by which a cluster that grows can tell that there is work
PATIENCE = 30.0  # seconds for a scheduler to answer
TRANSFER = 5.0  # seconds for a result to come over, before others are looked at
LOOK = 1.0  # seconds between two looks at whether it should stop, and at who is there
MOST_BYTES = 1 << 20  # of a scheduler file
SAMPLE = 64  # paths that are looked for on every worker
Client: TypeAlias = Any  # of distributed, which has no types
Task: TypeAlias = Any  # its future
Piece = TypeVar("Piece")
Result = TypeVar("Result")
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where a scheduler listens: its address, or the file that it has written it to."""

    address: str | None = None
    file: str | None = None

    def __str__(self) -> str:
        return self.address or self.file or ""


def in_dask(
    work: Callable[[Piece], Result],
    pieces: Iterable[Piece],
    *,
    cluster: Cluster,
    should_stop: Callable[[], bool],
    lost: Callable[[Piece], Result],
    paths: Sequence[str] = (),
) -> Iterator[Result]:
    """Yield the results as they come; once it should stop, only of those that were begun before.

    A piece whose worker dies is given to another one. What has taken several workers along is tried
    again when all else is done, by itself, as Dask blames all that a worker held; then it is
    `lost`. Every worker has to see the same files: some of `paths` are looked for.
    """
    with _connected(cluster) as client, closing(_Crew(client, cluster, paths)) as crew:
        from distributed.scheduler import KilledWorker

        left, suspects = iter(pieces), list[Piece]()
        running: dict[Task, Piece] = {}
        done: SimpleQueue[Task] = SimpleQueue()
        alone, came = False, 0
        while True:
            new: list[Piece] = []
            # Few at first: who wants to end at the first failure does not want a thousand.
            most = AHEAD * max(crew.threads(), 1) + min(came, QUEUED)
            if should_stop():
                _withdraw(client, cluster, running)
                suspects.clear()
            else:
                new += islice(left, max(most - len(running), 0))
                if suspects and not running and not new:
                    new, alone = [suspects.pop(0)], True
            for piece in new:
                task = client.submit(work, piece, pure=False)
                task.add_done_callback(done.put)
                running[task] = piece
            if not running:
                return
            for task in _ready(done, client, cluster):
                if task not in running:  # withdrawn
                    continue
                try:
                    result: Result = _result(task, cluster)
                except TimeoutError:  # gone with its worker before we had it: it is made again
                    task.add_done_callback(done.put)
                except KilledWorker:
                    piece = running.pop(task)
                    if alone:
                        yield lost(piece)
                    else:
                        suspects.append(piece)
                else:
                    del running[task]
                    came += 1
                    yield result
                    task.release()


def _result(task: Task, cluster: Cluster) -> Any:
    """Return what came of it."""
    try:
        return task.result(timeout=TRANSFER)
    except TimeoutError:
        raise
    except ImportError as error:
        raise _unable("a worker", error) from error
    except (CancelledError, OSError) as error:
        raise _gone(cluster, first_line(error)) from error


def _ready(done: "SimpleQueue[Task]", client: Client, cluster: Cluster) -> Iterator[Task]:
    """Yield the tasks that have ended, after waiting a while for the first of them."""
    if client.status != "running":
        raise _gone(cluster, client.status)
    try:
        yield done.get(timeout=LOOK)
    except Empty:
        return
    for _ in range(done.qsize()):  # not of those that end meanwhile: others want to be heard
        yield done.get_nowait()


def _withdraw(client: Client, cluster: Cluster, running: dict[Task, Any]) -> None:
    """Take back what no worker has."""
    if not running:
        return
    with _asking(cluster):
        held = client.sync(client.scheduler.processing, callback_timeout=PATIENCE)
    begun = {key for keys in held.values() for key in keys}
    time.sleep(LOOK / 10)  # what has just ended has no worker either: this is soon heard
    for task in [each for each in running if each.status == "pending" and each.key not in begun]:
        del running[task]
        task.cancel()


@contextmanager
def _connected(cluster: Cluster) -> Iterator[Client]:
    try:
        import distributed
        from distributed.comm.addressing import resolve_address
    except ImportError as error:
        raise MissingExtraError.of("dask", "a Dask cluster") from error
    address = cluster.address if cluster.file is None else _read_address(cluster.file)
    with _quiet():
        try:
            # A client that is given no address of a machine waits a minute to be closed.
            resolve_address(address or "")
            _check_security(address or "")
            client: Client = distributed.Client(  # type: ignore[no-untyped-call]
                address, timeout=PATIENCE, set_as_default=False
            )
        except (OSError, ValueError) as error:
            raise UsageError(
                f"no scheduler answers at `{shorten(str(cluster))}`: {first_line(error)}",
                hint="--scheduler tcp://HOST:8786, or tls://, as `dask scheduler` has printed it",
            ) from error
        try:
            yield client
        finally:
            try:
                client.close(timeout=LOOK)
            except OSError:
                log.debug("the cluster was gone before", exc_info=True)


def _check_security(address: str) -> None:
    """Refuse what the client would fail at after a minute, with a traceback."""
    from distributed import Security
    from distributed.comm.addressing import parse_address

    given = Security().get_connection_args("client")  # type: ignore[no-untyped-call]
    is_encrypted = parse_address(address)[0] in ("tls", "wss")
    if is_encrypted and given.get("ssl_context") is None:
        raise UsageError(
            f"no certificate is configured for `{shorten(address)}`",
            hint="name ca-file, client cert and key in Dask's configuration "
            "(DASK_CONFIG=FILE.yaml); docs/hpc.md has an example",
        )
    if given.get("require_encryption") and not is_encrypted:
        raise UsageError(
            f"Dask is configured to refuse unencrypted connections: `{shorten(address)}`",
            hint="start the scheduler with `--protocol tls`, and give its tls:// address",
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the log of Dask's client unless debug logging is on."""
    logger = logging.getLogger("distributed.client")
    before = logger.level
    if not log.isEnabledFor(logging.DEBUG):
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _read_address(file: str) -> str:
    """Return what a scheduler has written; who changes it can run code in this process."""
    try:
        with open_regular(file) as content:
            _refuse_shared(file, os.fstat(content.fileno()))
            return str(json.loads(content.read(MOST_BYTES))["address"])  # cut off, it is no JSON
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        there = "this is" if os.path.exists(file) else "there is"
        raise UsageError(
            f"{there} no scheduler file `{shorten(file)}`",
            hint="`dask scheduler --scheduler-file FILE` writes it; is it running?",
        ) from error


def _refuse_shared(file: str, status: os.stat_result) -> None:
    folder = os.path.dirname(os.path.realpath(file))
    mode = os.stat(folder).st_mode
    if not is_private(status, or_root=True):
        raise UsageError(
            f"other users may write to the scheduler file `{shorten(file)}`",
            hint="who writes it can run code as you: use one that only you can write, with "
            "`chmod go-w FILE`",
        )
    if os.name == "posix" and mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise UsageError(
            f"other users may replace the scheduler file `{shorten(file)}`",
            hint=f"write it to a folder of your own, or `chmod o-w {shorten(folder)}`",
        )


class _Crew:
    """The workers, who come and go: each is asked, once, whether it can do the work."""

    def __init__(self, client: Client, cluster: Cluster, paths: Sequence[str]) -> None:
        self._client, self._cluster = client, cluster
        step = max(len(paths) // SAMPLE, 1)
        # What is not here either is no matter of the cluster: it will have a failed record.
        self._paths = [path for path in paths[::step][:SAMPLE] if os.path.exists(path)]
        self._known: set[str] = set()
        self._answers: dict[str, Future[Any]] = {}  # that are awaited
        self._threads = 0
        self._asked = float("-inf")
        self._warned = False

    def threads(self) -> int:
        """Return how many pieces the workers of now can work on at once."""
        if time.monotonic() - self._asked < LOOK:
            return self._threads
        with _asking(self._cluster):
            found = self._client.sync(
                self._client.scheduler.ncores, callback_timeout=PATIENCE
            )  # or it waits for ever
        self._check(found.keys())
        self._asked = time.monotonic()
        self._threads = sum(found.values())
        if not found and not self._warned:
            log.warning(
                "the cluster at `%s` has no worker: waiting; `dask worker ADDRESS` starts one",
                shorten(str(self._cluster)),
            )
        self._warned = not found
        return self._threads

    def close(self) -> None:
        """Wait for no more answers."""
        for answer in self._answers.values():
            answer.cancel()

    def _check(self, there: Set[str]) -> None:
        """Refuse workers that would see other files or run another version of this program.

        One that does not answer, as its storage may not, is left to the scheduler: others work on.
        """
        new = there - self._known - self._answers.keys()
        for worker in new:
            asking = asyncio.run_coroutine_threadsafe(
                self._ask(worker), self._client.loop.asyncio_loop
            )
            self._answers[worker] = asking
        wait([self._answers[worker] for worker in new], TRANSFER)
        for worker, answer in sorted(self._answers.items()):
            if answer.done():
                del self._answers[worker]
                self._judge(worker, answer)
            elif worker in new:
                log.warning("worker `%s` does not answer: not waiting for it", worker)

    async def _ask(self, worker: str) -> Any:
        told = await self._client.run(_inspect, self._paths, workers=[worker], on_error="return")
        return told[worker]

    def _judge(self, worker: str, asked: "Future[Any]") -> None:
        try:
            answer = asked.result()
        except (CancelledError, OSError, KeyError):  # it is gone again
            return
        if isinstance(answer, OSError):
            return
        if isinstance(answer, Exception):
            raise _unable(f"worker `{worker}`", answer) from answer
        version, missing = answer
        own = _inspect([])[0]
        if version != own:
            raise UsageError(
                f"worker `{worker}` runs tnet {version}, this is {own}",
                hint="start workers from the same environment",
            )
        if missing:
            raise UsageError(
                f"worker `{worker}` does not see `{missing}`",
                hint="files have to be on storage that all machines share, under the same path",
            )
        self._known.add(worker)


def _inspect(paths: Sequence[str]) -> tuple[str, str]:
    """Return the version that a worker runs, and the first path that it does not see."""
    from tnetcli import __version__

    return __version__, next((path for path in paths if not os.path.exists(path)), "")


@contextmanager
def _asking(cluster: Cluster) -> Iterator[None]:
    """Say in one line that nobody answers any more."""
    try:
        yield
    except OSError as error:  # of which TimeoutError is one
        raise _gone(cluster, first_line(error)) from error


def _unable(who: str, error: Exception) -> UsageError:
    return UsageError(
        f"{who} cannot do this work: {first_line(error)}",
        hint="start workers from the same environment",
    )


def _gone(cluster: Cluster, reason: str) -> ClusterError:
    return ClusterError(
        f"the scheduler at `{shorten(str(cluster))}` is gone: {reason}",
        hint="finished records are kept: start the cluster, and run the same command again",
    )
