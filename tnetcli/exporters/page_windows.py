"""Which windows of an image a page draws: so many of every level, those with most attention."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tnetcli.exporters.looked import Looked
from tnetcli.exporters.overlay import WithJoint
from tnetcli.exporters.shown import MOST_LEVELS, keep_best

MOST_OF_A_LEVEL = 250  # windows: more than these nobody tells apart on a screen


@dataclass(frozen=True, slots=True)
class Drawn:
    """The windows to draw, level by level and by falling attention, and how many there are.

    `counts` are all windows of each level that is drawn, `deeper` those of levels that are not.
    """

    windows: tuple[WithJoint, ...]
    counts: dict[int, int]
    deeper: int

    def spread(self, most: int) -> list[int]:
        """Return the places of at most so many windows, in turn from every level."""
        turns: Counter[int] = Counter()
        order = []
        for place, (window, _) in enumerate(self.windows):
            order.append((turns[window.level], place))
            turns[window.level] += 1
        return sorted(place for _, place in sorted(order)[:most])


def strongest(looked: Looked) -> Drawn:
    """Choose what to draw; of equals, the first."""
    kept: dict[int, list[tuple[float, int, WithJoint]]] = {}
    counts: Counter[int] = Counter()
    deeper = 0
    for number, (window, joint) in enumerate(looked.with_joint()):
        if not 1 <= window.level <= MOST_LEVELS:
            deeper += 1
            continue
        counts[window.level] += 1
        attention = window.attention if math.isfinite(window.attention) else -math.inf
        entry = (attention, -number, (window, joint))
        level = kept.setdefault(window.level, [])
        keep_best(level, entry, MOST_OF_A_LEVEL)
    return Drawn(tuple(_in_order(kept)), dict(sorted(counts.items())), deeper)


def _in_order(kept: dict[int, list[tuple[float, int, WithJoint]]]) -> Iterator[WithJoint]:
    for _, level in sorted(kept.items()):
        yield from (each for _, _, each in sorted(level, reverse=True))
