"""Who of the processes that torchrun has started says what went wrong, so that it is said once."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tnetcli.errors import TnetError

SPEAKER_PATIENCE = 10.0  # seconds for another process to say it
SPEAKER_LOOK = 0.05  # seconds between two looks at whether it has


class OtherFailedError(Exception):
    """Another process says what went wrong; this one only ends, with the same exit code."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


def is_speaker() -> bool:
    """Say whether this is the process of its machine that says what all of them come upon."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def wait_for_end(is_asked: Callable[[], bool]) -> bool:
    """Wait until torchrun asks this process to end, for a while; say whether it has.

    It does so as soon as one of them has ended. Whoever leaves the speaking to another one is
    therefore not to be the first to go: the other would be ended before it has spoken.
    """
    deadline = time.monotonic() + SPEAKER_PATIENCE
    while not is_asked():
        if time.monotonic() > deadline:
            return False
        time.sleep(SPEAKER_LOOK)
    return True


@contextmanager
def speaking_once(is_asked: Callable[[], bool]) -> Iterator[None]:
    """Let one process of a machine say what all of them come upon.

    What nobody else has ended for is this process's own trouble: it speaks itself.
    """
    try:
        yield
    except TnetError as error:
        if is_speaker() or not wait_for_end(is_asked):
            raise
        raise OtherFailedError(error.exit_code) from error
