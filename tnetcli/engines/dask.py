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
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from functools import cache, partial
from itertools import chain, islice
from threading import Thread
from typing import Any, TypeAlias

from tnetcli import __version__
from tnetcli.engines.local import Item, Result, Work
from tnetcli.errors import ClusterError, MissingExtraError, UsageError
from tnetcli.files import is_private, open_regular
from tnetcli.text import first_line, shorten

AHEAD = 2  # batches per thread of a worker: one runs, one is on its way
QUEUED = 1000  # more batches, which show an adaptive cluster that there is work
PATIENCE = 30.0  # seconds for a scheduler to answer
TRANSFER = 5.0  # seconds for a result, or the storage of a worker, to answer
POLL = 0.05  # seconds between two checks for finished tasks
MAX_BYTES = 1 << 20  # of a scheduler file
SAMPLE = 8  # paths that every worker has to see; they are sent with every task
ADDRESS = re.compile(r"(?:(?P<protocol>tcp|tls|ws|wss|ucx)://)?[^/\s]+:\d+")
OTHER_CODE = re.compile("Can't get attribute|Error during deserialization")  # of a task
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
        self._paths = tuple(path for path in some if os.path.exists(path))

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

            checked = partial(_run_checked, __version__, self._paths, work)
            left, suspects = iter(batches), list[Sequence[Item]]()
            running: dict[Task, Sequence[Item]] = {}
            done: Any = as_completed(loop=client.loop)  # type: ignore[no-untyped-call]
            most, alone = AHEAD * _count_threads(client), False
            limit, hung = most + QUEUED, set[str]()
            answering: list[str] | None = None  # any worker
            while client.status == "running":
                new: list[Sequence[Item]] = []
                if should_stop():
                    suspects.clear()
                    _cancel_pending(client, running)
                else:
                    new += islice(left, max(most - len(running), 0))
                    if suspects and not running and not new:
                        new, alone = [suspects.pop(0)], True
                for batch in new:
                    task = client.submit(checked, batch, pure=False, workers=answering)
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
                        continue
                    except KilledWorker:
                        batch = running.pop(task)
                        if alone:
                            yield lost(batch)
                        else:
                            suspects.append(batch)
                        continue
                    except _HungError as error:
                        left = chain([running.pop(task)], left)
                        if (name := str(error)) not in hung:
                            log.warning("worker `%s` does not answer: continuing without it", name)
                        hung.add(name)
                        answering = [each for each in client.nthreads() if each not in hung] or None
                        continue
                    except (ImportError, AttributeError, RuntimeError) as error:
                        if not isinstance(error, ImportError) and not OTHER_CODE.search(str(error)):
                            raise
                        problem = f"the cluster cannot do this work: {first_line(error)}"
                        raise UsageError(problem, hint=SAME_ENVIRONMENT) from error
                    del running[task]
                    # Few at first: most of a thousand would be cancelled by --max-failures 0.
                    most = min(most + 2, limit)
                    yield result
                    task.release()
            raise ConnectionError(client.status)


def _count_threads(client: Client) -> int:
    """Return how many batches the workers can run at once, at least 1; they may come later."""
    threads: int = sum(client.nthreads().values())
    if not threads:
        log.warning("the cluster has no workers; waiting (`dask worker ADDRESS` starts one)")
    return max(threads, 1)


def _cancel_pending(client: Client, running: dict[Task, Any]) -> None:
    """Cancel the tasks that no worker has."""
    begun = {key for keys in client.processing().values() for key in keys} if running else set()
    time.sleep(POLL)  # a task that has just ended is with no worker either
    for task in [each for each in running if each.status == "pending" and each.key not in begun]:
        del running[task]
        task.cancel()


class _HungError(Exception):
    """The storage of a worker, whose name is the message, does not answer."""


def _run_checked(
    version: str, paths: tuple[str, ...], work: Work[Item, Result], batch: Sequence[Item]
) -> Result:
    """Run work on a worker; UsageError if it lacks files or runs another version of tnet."""
    from distributed import get_worker

    name = get_worker().address
    if version != __version__:
        problem = f"worker `{name}` runs tnet {__version__}, this is {version}"
        raise UsageError(problem, hint=SAME_ENVIRONMENT)
    try:
        missing = _find_missing(paths).result(TRANSFER)
    except TimeoutError as error:
        raise _HungError(name) from error
    if missing:
        raise UsageError(
            f"worker `{name}` does not see `{missing}`",
            hint="files have to be on storage that all machines share, under the same path",
        )
    return work(batch)


@cache
def _find_missing(paths: tuple[str, ...]) -> Future[str]:
    """Return the first path that does not exist, once the storage has answered."""
    found = Future[str]()

    def find() -> None:
        found.set_result(next((path for path in paths if not os.path.exists(path)), ""))

    Thread(target=find, daemon=True).start()
    return found


@contextmanager
def _connected(scheduler: str) -> Iterator[Client]:
    """Yield a client; ClusterError if the scheduler stops answering."""
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
    except (CancelledError, OSError) as error:
        raise ClusterError(
            f"the scheduler at `{shorten(scheduler)}` is gone: {first_line(error)}",
            hint="finished records are saved: start the cluster, and run the same command again",
        ) from error
    finally:
        with suppress(OSError):  # the cluster was gone before
            client.close(timeout=1)
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


def _unreachable(address: str, reason: str) -> UsageError:
    return UsageError(
        f"no scheduler answers at `{shorten(address)}`: {reason}",
        hint="give tcp://HOST:8786, or tls://, as `dask scheduler` prints it",
    )
