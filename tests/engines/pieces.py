"""Work for other processes; they import it, so that it cannot stand in a test."""

import os
import signal
import time
from pathlib import Path


def double(piece):
    return 2 * piece


def whose(piece):
    time.sleep(0.05)
    return piece, os.getpid()


def kill_at(folder, piece):
    """Take the process along at 3, always, and at 5 the first time."""
    marker = Path(folder) / f"seen-{piece}"
    first = not marker.exists()
    marker.touch()
    if piece == 3 or (piece == 5 and first):
        os.kill(os.getpid(), signal.SIGKILL)
    return piece


def double_all(pieces):
    """Take the process along if 3 is among them."""
    if 3 in pieces:
        os.kill(os.getpid(), signal.SIGKILL)
    return [2 * piece for piece in pieces]


def nap(seconds):
    time.sleep(seconds)
    return seconds


def raise_at(piece):
    if piece == 2:
        raise ValueError("two")
    return piece


def ask_for_signals(piece):
    return [
        signal.getsignal(number) == signal.SIG_IGN for number in (signal.SIGINT, signal.SIGTERM)
    ]
