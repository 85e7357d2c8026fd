"""Joint probabilities along the paths of windows that pass by once, in any number."""

import sqlite3
from contextlib import suppress
from types import TracebackType
from typing import Self

from tnetcli.prediction import SeenWindow

MOST_IN_MEMORY = 50_000


class JointProbabilities:
    """Multiplies attention down the paths; parents must come before their children.

    A context. Any window may turn out to be a parent later, so all are remembered: the latest in
    memory, the rest in a temporary file, so that memory does not follow their number.
    """

    def __init__(self) -> None:
        self._latest: dict[str, float] = {}
        self._shelf: sqlite3.Connection | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shelf is not None:
            self._shelf.close()
        self._shelf = None

    def of(self, window: SeenWindow) -> float | None:
        """Return the product along the path of a window, None where its parent was never seen."""
        parent, is_child, _ = window.path.rpartition("/")
        above = self._find(parent) if is_child else 1.0
        if above is None:
            return None
        joint = min(above * window.attention, 1.0)  # sums of 32 bit numbers may be a little more
        self._latest[window.path] = joint
        if len(self._latest) >= MOST_IN_MEMORY:
            self._put_away()
        return joint

    def _find(self, path: str) -> float | None:
        if path in self._latest:
            return self._latest[path]
        if self._shelf is None:
            return None
        found = self._shelf.execute("select joint from seen where path = ?", (_key(path),))
        row = found.fetchone()
        return float(row[0]) if row else None

    def _put_away(self) -> None:
        if self._shelf is None:
            # No name: a file that is gone when it is closed, or when the process ends.
            self._shelf = sqlite3.connect("", isolation_level=None)
            with suppress(sqlite3.DatabaseError):
                self._shelf.execute("pragma journal_mode = off")
            self._shelf.execute("create table seen (path blob primary key, joint real)")
        self._shelf.execute("begin")
        self._shelf.executemany(
            "insert or replace into seen values (?, ?)",
            ((_key(path), joint) for path, joint in self._latest.items()),
        )
        self._shelf.execute("commit")
        self._latest.clear()


def _key(path: str) -> bytes:
    return path.encode("utf-8", "surrogatepass")
