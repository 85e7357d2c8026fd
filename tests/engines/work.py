"""Work for other processes, which import it: it cannot be defined in a test."""

import os
import signal
import time
from pathlib import Path


def double(batch):
    return [2 * item for item in batch]


def process_of(batch):
    time.sleep(0.05)
    return batch[0], os.getpid()


def kill_at(folder, batch):
    """Kill the process at 3, always, and at 5 the first time."""
    for item in batch:
        marker = Path(folder) / f"seen-{item}"
        first = not marker.exists()
        marker.touch()
        if item == 3 or (item == 5 and first):
            os.kill(os.getpid(), signal.SIGKILL)
    return list(batch)


def nap(batch):
    time.sleep(batch[0])
    return batch[0]


def raise_at(batch):
    if batch[0] == 2:
        raise ValueError("two")
    return batch[0]


def ignored_signals(batch):
    return [signal.getsignal(each) == signal.SIG_IGN for each in (signal.SIGINT, signal.SIGTERM)]


def singles(*items):
    return [[item] for item in items]


def never():
    return False


def unexpected(batch):
    raise AssertionError(f"{batch} is not lost")


def negative(batch):
    return [-item for item in batch]
