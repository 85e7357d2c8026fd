"""DaskEngine: a Dask cluster that is already running (dask-jobqueue, Kubernetes, `dask worker`).

Only names of images and records pass through the scheduler, never pixels.
"""

import json
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, TypeAlias

from tnetcli.engines.local import Item, Result, Work
from tnetcli.errors import ClusterError, MissingExtraError, UsageError
from tnetcli.files import is_private, open_regular
from tnetcli.text import first_line, shorten

AHEAD = 2  # batches per thread of a worker: one runs, one is on its way
QUEUED = 1000  # more batches, which show an adaptive cluster that there is work
PATIENCE = 30.0  # seconds for a scheduler to answer
TRANSFER = 5.0  # seconds for a result, or the check of a worker, to arrive
REFRESH = 1.0  # seconds between two requests for the list of workers
POLL = 0.05  # seconds between two checks for finished tasks
MAX_BYTES = 1 << 20  # of a scheduler file
SAMPLE = 64  # paths that every worker has to see
ADDRESS = re.compile(r"(?:(?P<protocol>tcp|tls|ws|wss|ucx)://)?[^/\s]+:\d+")
SAME_ENVIRONMENT = "start workers from the same environment"
Client: TypeAlias = Any  # distributed has no types
Task: TypeAlias = Any
log = logging.getLogger(__name__)


class DaskEngine:
    """Run batches on the workers of `scheduler`, an address or a scheduler file.

    A batch whose worker dies goes to another worker. Dask gives up on a batch after several workers
    died with it, though another batch may have killed them: it runs again alone when all others are
    done. Every worker has to see the same files; a sample of `paths` is checked.
    """

    def __init__(self, scheduler: str, paths: Sequence[str] = ()) -> None:
        self.scheduler = scheduler
        # A path that is missing here too becomes a failed record.
        some = paths[:: max(len(paths) // SAMPLE, 1)][:SAMPLE]
        self._paths = [path for path in some if os.path.exists(path)]

    def map(
        self,
        work: Work[Item, Result],
        batches: Iterable[Sequence[Item]],
        *,
        should_stop: Callable[[], bool],
        lost: Work[Item, Result],
    ) -> Iterator[Result]:
        """Yield the result of each batch as it is ready."""
        with _connected(self.scheduler) as client:
            from distributed import KilledWorker, as_completed

            workers = _Workers(client, self.scheduler, self._paths)
            left, suspects = iter(batches), list[Sequence[Item]]()
            running: dict[Task, Sequence[Item]] = {}
            done: Any = as_completed(loop=client.loop)  # type: ignore[no-untyped-call]
            alone, arrived = False, 0
            while True:
                new: list[Sequence[Item]] = []
                # Few at first: most of a thousand would be cancelled by --max-failures 0.
                most = AHEAD * max(workers.threads(), 1) + min(2 * arrived, QUEUED)
                if should_stop():
                    suspects.clear()
                    with _errors_of(self.scheduler):
                        _cancel_pending(client, running)
                else:
                    new += islice(left, max(most - len(running), 0))
                    if suspects and not running and not new:
                        new, alone = [suspects.pop(0)], True
                for batch in new:
                    task = client.submit(work, batch, pure=False)
                    running[task] = batch
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
                        batch = running.pop(task)
                        if alone:
                            yield lost(batch)
                        else:
                            suspects.append(batch)
                    except ImportError as error:
                        raise _unusable("a worker", error) from error
                    except (CancelledError, OSError) as error:
                        raise _gone(self.scheduler, error) from error
                    else:
                        del running[task]
                        arrived += 1
                        yield result
                        task.release()


def _cancel_pending(client: Client, running: dict[Task, Any]) -> None:
    """Cancel the tasks that no worker has."""
    begun = {key for keys in client.processing().values() for key in keys} if running else set()
    time.sleep(POLL)  # a task that has just ended is with no worker either
    for task in [each for each in running if each.status == "pending" and each.key not in begun]:
        del running[task]
        task.cancel()


class _Workers:
    """The workers, which come and go; each is checked once by a task that only it may run."""

    def __init__(self, client: Client, scheduler: str, paths: Sequence[str]) -> None:
        self._client, self._scheduler, self._paths = client, scheduler, paths
        self._checks: dict[str, Task] = {}  # None once passed
        self._threads, self._refreshed, self._warned = 0, float("-inf"), False

    def threads(self) -> int:
        """Return how many batches the present workers can run at once."""
        if time.monotonic() - self._refreshed < REFRESH:
            return self._threads
        if self._client.status != "running":
            raise _gone(self._scheduler, self._client.status)
        with _errors_of(self._scheduler):
            found = self._client.nthreads(callback_timeout=PATIENCE)
        self._check(found)
        self._refreshed, self._threads = time.monotonic(), sum(found.values())
        if not found and not self._warned:
            log.warning(
                "the cluster at `%s` has no workers; waiting (`dask worker ADDRESS` starts one)",
                shorten(self._scheduler),
            )
        self._warned = not found
        return self._threads

    def _check(self, present: Iterable[str]) -> None:
        """Raise UsageError for a worker that lacks files or runs another version of tnet."""
        from distributed import KilledWorker

        new = [name for name in present if name not in self._checks]
        self._checks = {name: self._checks.get(name) for name in present}
        for name in new:
            self._checks[name] = self._client.submit(
                _inspect, self._paths, workers=[name], priority=1, pure=False
            )
        end = time.monotonic() + TRANSFER
        while time.monotonic() < end and any(not self._checks[name].done() for name in new):
            time.sleep(POLL)
        for name, task in sorted(self._checks.items()):
            if task is None:
                continue
            if not task.done():  # its storage may hang: the scheduler gives its work to others
                if name in new:
                    log.warning("worker `%s` does not answer: continuing without it", name)
                continue
            self._checks[name] = None
            try:
                version, missing = task.result(timeout=TRANSFER)
            except (CancelledError, OSError, KilledWorker):  # the worker is gone
                continue
            except Exception as error:
                raise _unusable(f"worker `{name}`", error) from error
            own, _ = _inspect([])
            if version != own:
                problem = f"worker `{name}` runs tnet {version}, this is {own}"
                raise UsageError(problem, hint=SAME_ENVIRONMENT)
            if missing:
                raise UsageError(
                    f"worker `{name}` does not see `{missing}`",
                    hint="files have to be on storage that all machines share, under the same path",
                )


def _inspect(paths: Sequence[str]) -> tuple[str, str]:
    """Return the version of tnet, and the first path that does not exist."""
    from tnetcli import __version__

    return __version__, next((path for path in paths if not os.path.exists(path)), "")


@contextmanager
def _connected(scheduler: str) -> Iterator[Client]:
    try:
        import distributed
    except ImportError as error:
        raise MissingExtraError.of("dask", "a Dask cluster") from error
    is_address = "://" in scheduler or ADDRESS.fullmatch(scheduler) is not None
    address = scheduler if is_address else _read_address(scheduler)
    _check_address(address)
    logger = logging.getLogger("distributed.client")
    before = logger.level
    if not log.isEnabledFor(logging.DEBUG):
        logger.setLevel(logging.CRITICAL)
    try:
        client: Client = distributed.Client(  # type: ignore[no-untyped-call]
            address, timeout=PATIENCE, set_as_default=False
        )
    except (OSError, ValueError) as error:
        logger.setLevel(before)
        raise _unreachable(address, first_line(error)) from error
    try:
        yield client
    finally:
        with suppress(OSError):  # the cluster was gone before
            client.close(timeout=REFRESH)
        logger.setLevel(before)


def _check_address(address: str) -> None:
    """Raise UsageError for an address at which the client would fail only after a minute."""
    from distributed import Security

    if (found := ADDRESS.fullmatch(address)) is None:
        raise _unreachable(address, "not an address with a port")
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
            address = str(json.loads(content.read(MAX_BYTES))["address"])
        mode = os.stat(folder).st_mode
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        there = "this is" if os.path.exists(file) else "there is"
        raise UsageError(
            f"{there} no scheduler file: `{shorten(file)}`",
            hint="give tcp://HOST:PORT, or the file of `dask scheduler --scheduler-file FILE`",
        ) from error
    if not is_private(status, or_root=True):
        raise UsageError(
            f"other users may write to the scheduler file `{shorten(file)}`",
            hint="its author can run code as you: run `chmod go-w FILE`, or use a file of your own",
        )
    if os.name == "posix" and mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise UsageError(
            f"other users may replace the scheduler file `{shorten(file)}`",
            hint=f"write it to a folder of your own, or `chmod o-w {shorten(folder)}`",
        )
    return address


@contextmanager
def _errors_of(scheduler: str) -> Iterator[None]:
    """Raise ClusterError if the scheduler does not answer."""
    try:
        yield
    except OSError as error:  # includes TimeoutError
        raise _gone(scheduler, error) from error


def _unreachable(address: str, reason: str) -> UsageError:
    return UsageError(
        f"no scheduler answers at `{shorten(address)}`: {reason}",
        hint="give tcp://HOST:8786, or tls://, as `dask scheduler` prints it",
    )


def _unusable(worker: str, error: Exception) -> UsageError:
    return UsageError(f"{worker} cannot do this work: {first_line(error)}", hint=SAME_ENVIRONMENT)


def _gone(scheduler: str, reason: Exception | str) -> ClusterError:
    why = reason if isinstance(reason, str) else first_line(reason)
    return ClusterError(
        f"the scheduler at `{shorten(scheduler)}` is gone: {why}",
        hint="finished records are saved: start the cluster, and run the same command again",
    )
