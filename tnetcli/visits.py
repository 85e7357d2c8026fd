"""What a walk through images is told in: places, what was seen there, visits, and why it ended."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tnetcli.geometry import Region, Window

# Why an image was not looked at any closer. Where several are true, the first of this order:
# a part could not be read; the deepest level was reached; the next view would be finer than the
# image's own pixels; only windows already seen were left; no cell with data was left; the budget
# is spent; the caller was sure enough (asked only about images that would go on).
Stop: TypeAlias = Literal["failed", "levels", "pixels", "repeats", "empty", "budget", "confidence"]


@dataclass(frozen=True, slots=True)
class Place:
    """One thing to look at; `image` is an index into the roots of the walk."""

    image: int
    region: Region


@dataclass(frozen=True, slots=True)
class Told:
    """A window that somebody else has found, to be looked at instead of a cell."""

    window: Window
    attention: float  # that it was found with

    def __post_init__(self) -> None:
        if not 0 <= self.attention <= 1:
            raise ValueError(f"attention is not within [0, 1]: `{self.attention}`")


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What a look tells of one region, both arrays (rows, columns) of the grid.

    `attention` is the probability that the location module gives each cell, `valid` the fraction
    of each cell that holds data.
    """

    attention: NDArray[np.floating]
    valid: NDArray[np.floating]


Look: TypeAlias = Callable[[Sequence[Place]], Sequence[Seen | None]]
# Takes a place and the attention (rows, columns) that a model gives it; returns another.
Attend: TypeAlias = Callable[[Place, NDArray[np.floating]], NDArray[np.floating]]


@dataclass(frozen=True, slots=True)
class Followed:
    """A cell that was followed, and the index of the visit that shows it.

    `order` counts from 0 in the order in which the cells of a window were chosen: by attention, or
    as they were drawn.
    """

    row: int
    column: int
    visit: int
    order: int


@dataclass(slots=True, eq=False)
class Visit:
    """One window looked at.

    `attention` is what its parent gave this cell, `joint` the product of attention along the path;
    both are 1 for the whole image. `rank` 1 is the most probable of its image and level by
    `joint` (ties: the earlier). `seen` is None where the look failed.

    `followed` holds the cells chosen here that were looked at, in reading order; windows that were
    told are no cells, and not among them. Several parents
    may share a visit; its path, attention and joint are those of the parent that came first. Where
    cells are as large as their window, a visit may even name itself.
    """

    place: Place
    attention: float
    joint: float
    rank: int = 0
    seen: Seen | None = None
    followed: tuple[Followed, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """All visits in the order they were looked at, and one stop per image."""

    visits: tuple[Visit, ...]
    stops: tuple[Stop, ...]

    def of(self, image: int) -> list[int]:
        """Return the indices of the visits of one image."""
        return [i for i, visit in enumerate(self.visits) if visit.place.image == image]

    def alone(self, image: int) -> tuple[Visit, ...]:
        """Return the visits of one image, numbered as if it had been the only one."""
        numbers = {number: own for own, number in enumerate(self.of(image))}
        return tuple(
            replace(
                visit,
                place=Place(0, visit.place.region),
                followed=tuple(replace(cell, visit=numbers[cell.visit]) for cell in visit.followed),
            )
            for visit in (self.visits[number] for number in numbers)
        )
