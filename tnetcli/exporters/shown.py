"""Which of any number of windows a picture has room for."""

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tnetcli.prediction import SeenWindow

MOST_LEVELS = 16  # nobody looks deeper
MOST_DRAWN = 100  # of a level
MOST_LISTED = 48
Item = TypeVar("Item", bound=tuple[Any, ...])


@dataclass(frozen=True, slots=True)
class Shown:
    """The windows of a picture, and how many there were.

    `drawn` are those of the highest attention of each level, the highest last, `listed` the first
    by level and rank. `most` is the highest attention that a window was chosen for.
    """

    drawn: dict[int, list[SeenWindow]] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    glimpses: dict[int, int] = field(default_factory=dict)  # how many of these are some
    listed: list[SeenWindow] = field(default_factory=list)
    total: int = 0
    others: int = 0  # of levels beyond any that is drawn
    most: float = 0.0


def choose_shown(
    windows: Iterable[SeenWindow],
    *,
    most_drawn: int = MOST_DRAWN,
    most_listed: int = MOST_LISTED,
) -> Shown:
    """Walk once over windows in any number and hold no more of them than are shown."""
    best: dict[int, list[tuple[float, int, SeenWindow]]] = {}
    first: list[tuple[int, int, int, SeenWindow]] = []
    counts: dict[int, int] = {}
    glimpses: dict[int, int] = {}
    most, total, others = 0.0, 0, 0
    for number, window in enumerate(windows):
        total += 1
        attention = known_attention(window)
        if is_chosen(window):
            most = max(most, attention or 0.0)
        # The number keeps equal ones apart, in the order of the record.
        keep_best(first, (-window.level, -window.rank, -number, window), most_listed)
        if not 1 <= window.level <= MOST_LEVELS:
            others += 1
            continue
        counts[window.level] = counts.get(window.level, 0) + 1
        if window.is_glimpse:
            glimpses[window.level] = glimpses.get(window.level, 0) + 1
        rated = -1.0 if attention is None else attention
        keep_best(best.setdefault(window.level, []), (rated, -number, window), most_drawn)
    return Shown(
        {level: [each[-1] for each in sorted(best[level])] for level in sorted(best)},
        dict(sorted(counts.items())),
        glimpses,
        [each[-1] for each in sorted(first, reverse=True)],
        total,
        others,
        most,
    )


def keep_best(heap: list[Item], item: Item, most: int) -> None:
    """Put an item on a heap that holds the largest, and `most` of them."""
    if len(heap) < most:
        heapq.heappush(heap, item)
    else:
        heapq.heappushpop(heap, item)


def is_chosen(window: SeenWindow) -> bool:
    """Say whether a window was chosen among others; nobody chose the whole image."""
    return "/" in window.path


def known_attention(window: SeenWindow) -> float | None:
    """Return the attention of a window within [0, 1], None where it is not a number."""
    if not math.isfinite(window.attention):
        return None
    return min(max(window.attention, 0.0), 1.0)
