"""Which windows of an image a page draws: so many of every level, those with most attention."""

import math
from collections import Counter
from dataclasses import dataclass

from tnetcli.exporters.looked import Looked
from tnetcli.exporters.overlay import WithJoint, checked_box

MOST_LEVELS = 16
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
    """Return the windows of the highest attention of each level; of equals, the first.

    ValueError for a box that is no rectangle.
    """
    levels: dict[int, list[WithJoint]] = {}
    deeper = 0
    for window, joint in looked.with_joint():
        if not 1 <= window.level <= MOST_LEVELS:
            deeper += 1
            continue
        checked_box(window)
        levels.setdefault(window.level, []).append((window, joint))
    chosen = [
        each
        for _, level in sorted(levels.items())
        for each in sorted(level, key=_rating, reverse=True)[:MOST_OF_A_LEVEL]
    ]
    counts = {level: len(windows) for level, windows in sorted(levels.items())}
    return Drawn(tuple(chosen), counts, deeper)


def _rating(each: WithJoint) -> float:
    attention = each[0].attention
    return attention if math.isfinite(attention) else -math.inf
