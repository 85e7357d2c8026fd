"""Run work on a Dask cluster that is already running: dask-jobqueue, Kubernetes, a few machines.

Pieces of work are names and results are records: no pixels are sent.
"""

import json
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias, TypeVar

from tnetcli.errors import ClusterError, MissingExtraError, UsageError
from tnetcli.files import is_private, open_regular
from tnetcli.text import first_line, shorten

AHEAD = 2  # pieces for each thread of a worker: one is worked on, one is on its way
QUEUED = 1000  # pieces more, by which an adaptive cluster can tell that there is work
PATIENCE = 30.0  # seconds for a scheduler to answer
TRANSFER = 5.0  # seconds for a result, or the check of a worker, to come over
LOOK = 1.0  # seconds between two requests for the list of workers
POLL = 0.05  # seconds between two checks for finished tasks
MOST_BYTES = 1 << 20  # of a scheduler file
SAMPLE = 64  # paths that every worker has to see
ADDRESS = re.compile(r"(?:(?P<protocol>tcp|tls|ws|wss|ucx)://)?[^/\s]+:\d+")
SAME_ENVIRONMENT = "start workers from the same environment"
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

    A piece whose worker dies is given to another one. Dask gives up on a piece after several
    workers died with it, though another piece may have killed them: it is tried again alone when
    all else is done, and is `lost` if that fails too. Every worker has to see the same files: some
    of `paths` are checked.
    """
    with _connected(cluster) as client:
        from distributed import KilledWorker, as_completed

        workers = _Workers(client, cluster, _sample(paths))
        left, suspects = iter(pieces), list[Piece]()
        running: dict[Task, Piece] = {}
        done: Any = as_completed(loop=client.loop)  # type: ignore[no-untyped-call]
        alone, came = False, 0
        while True:
            new: list[Piece] = []
            # Few at first: with --fail-fast a thousand would be in vain.
            most = AHEAD * max(workers.threads(), 1) + min(2 * came, QUEUED)
            if should_stop():
                suspects.clear()
                with _asking(cluster):
                    _withdraw(client, running)
            else:
                new += islice(left, max(most - len(running), 0))
                if suspects and not running and not new:
                    new, alone = [suspects.pop(0)], True
            for piece in new:
                task = client.submit(work, piece, pure=False)
                running[task] = piece
                done.add(task)
            if not running:
                return
            ended = [task for task in done.next_batch(block=False) if task in running]
            if not ended:
                time.sleep(POLL)
            for task in ended:
                try:
                    result: Result = task.result(timeout=TRANSFER)
                except TimeoutError:  # lost with its worker: Dask computes it again
                    done.add(task)
                except KilledWorker:
                    piece = running.pop(task)
                    if alone:
                        yield lost(piece)
                    else:
                        suspects.append(piece)
                except ImportError as error:
                    raise _unable("a worker", error) from error
                except (CancelledError, OSError) as error:
                    raise _gone(cluster, error) from error
                else:
                    del running[task]
                    came += 1
                    yield result
                    task.release()


def _withdraw(client: Client, running: dict[Task, Any]) -> None:
    """Cancel the tasks that no worker has."""
    begun = {key for keys in client.processing().values() for key in keys} if running else set()
    time.sleep(POLL)  # a task that has just ended is with no worker either: its end is soon known
    for task in [each for each in running if each.status == "pending" and each.key not in begun]:
        del running[task]
        task.cancel()


@contextmanager
def _connected(cluster: Cluster) -> Iterator[Client]:
    try:
        import distributed
    except ImportError as error:
        raise MissingExtraError.of("dask", "a Dask cluster") from error
    address = (cluster.address if cluster.file is None else _read_address(cluster.file)) or ""
    logger = logging.getLogger("distributed.client")
    before = logger.level
    if not log.isEnabledFor(logging.DEBUG):
        logger.setLevel(logging.CRITICAL)
    try:
        try:
            _check_address(address)
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
    finally:
        logger.setLevel(before)


def _check_address(address: str) -> None:
    """Raise for what the client would fail at after a minute, with a traceback."""
    from distributed import Security

    found = ADDRESS.fullmatch(address)
    if found is None:
        raise ValueError("not an address with a port")
    is_encrypted = found["protocol"] in ("tls", "wss")
    given = Security().get_connection_args("client")  # type: ignore[no-untyped-call]
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


def _read_address(file: str) -> str:
    """Return the address in a scheduler file; its author can run code in this process."""
    try:
        with open_regular(file) as content:
            status, folder = os.fstat(content.fileno()), os.path.dirname(os.path.realpath(file))
            address = str(json.loads(content.read(MOST_BYTES))["address"])
        mode = os.stat(folder).st_mode
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        there = "this is" if os.path.exists(file) else "there is"
        raise UsageError(
            f"{there} no scheduler file `{shorten(file)}`",
            hint="`dask scheduler --scheduler-file FILE` writes it; is it running?",
        ) from error
    if not is_private(status, or_root=True):
        raise UsageError(
            f"other users may write to the scheduler file `{shorten(file)}`",
            hint="its author can run code as you: use one that only you can write, with "
            "`chmod go-w FILE`",
        )
    if os.name == "posix" and mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise UsageError(
            f"other users may replace the scheduler file `{shorten(file)}`",
            hint=f"write it to a folder of your own, or `chmod o-w {shorten(folder)}`",
        )
    return address


@dataclass(slots=True)
class _Workers:
    """The workers, which come and go; each is checked once, by a task that only it may run."""

    client: Client
    cluster: Cluster
    paths: list[str]
    _checks: dict[str, Task | None] = field(default_factory=dict)  # None once passed
    _threads: int = 0
    _asked: float = float("-inf")
    _warned: bool = False

    def threads(self) -> int:
        """Return how many pieces the present workers can work on at once."""
        if time.monotonic() - self._asked < LOOK:
            return self._threads
        if self.client.status != "running":
            raise _gone(self.cluster, self.client.status)
        with _asking(self.cluster):
            found = self.client.nthreads(callback_timeout=PATIENCE)
        self._check(found)
        self._asked = time.monotonic()
        self._threads = sum(found.values())
        if not found and not self._warned:
            log.warning(
                "the cluster at `%s` has no worker: waiting; `dask worker ADDRESS` starts one",
                shorten(str(self.cluster)),
            )
        self._warned = not found
        return self._threads

    def _check(self, present: Iterable[str]) -> None:
        """Raise UsageError for a worker that lacks files or runs another version of tnet.

        One that does not answer, as its storage may not, is left to the scheduler.
        """
        for gone in self._checks.keys() - set(present):
            del self._checks[gone]
        new = {
            worker: self.client.submit(
                _inspect, self.paths, workers=[worker], priority=1, pure=False
            )
            for worker in present
            if worker not in self._checks
        }
        self._checks |= new
        end = time.monotonic() + TRANSFER
        while time.monotonic() < end and not all(task.done() for task in new.values()):
            time.sleep(POLL)
        for worker, task in sorted(self._checks.items()):
            if task is not None and task.done():
                self._judge(worker, task)
                self._checks[worker] = None
            elif worker in new:
                log.warning("worker `%s` does not answer: not waiting for it", worker)

    def _judge(self, worker: str, task: Task) -> None:
        from distributed import KilledWorker

        try:
            version, missing = task.result(timeout=TRANSFER)
        except (CancelledError, OSError, KilledWorker):  # it is gone again
            return
        except Exception as error:
            raise _unable(f"worker `{worker}`", error) from error
        own = _inspect([])[0]
        if version != own:
            raise UsageError(
                f"worker `{worker}` runs tnet {version}, this is {own}", hint=SAME_ENVIRONMENT
            )
        if missing:
            raise UsageError(
                f"worker `{worker}` does not see `{missing}`",
                hint="files have to be on storage that all machines share, under the same path",
            )


def _sample(paths: Sequence[str]) -> list[str]:
    """Return some paths; one that is missing here too gets a failed record."""
    step = max(len(paths) // SAMPLE, 1)
    return [path for path in paths[::step][:SAMPLE] if os.path.exists(path)]


def _inspect(paths: Sequence[str]) -> tuple[str, str]:
    """Return the version of tnet, and the first path that does not exist."""
    from tnetcli import __version__

    return __version__, next((path for path in paths if not os.path.exists(path)), "")


@contextmanager
def _asking(cluster: Cluster) -> Iterator[None]:
    """Raise ClusterError if the scheduler does not answer."""
    try:
        yield
    except OSError as error:  # of which TimeoutError is one
        raise _gone(cluster, error) from error


def _unable(worker: str, error: Exception) -> UsageError:
    return UsageError(f"{worker} cannot do this work: {first_line(error)}", hint=SAME_ENVIRONMENT)


def _gone(cluster: Cluster, reason: Exception | str) -> ClusterError:
    why = reason if isinstance(reason, str) else first_line(reason)
    return ClusterError(
        f"the scheduler at `{shorten(str(cluster))}` is gone: {why}",
        hint="finished records are kept: start the cluster, and run the same command again",
    )
