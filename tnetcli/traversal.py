"""Which windows to look at next: from the whole image down, closer only where it matters."""

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from tnetcli.geometry import Grid, Region, Window
from tnetcli.visits import Followed, Look, Place, Seen, Stop, Told, Visit, Walk

Policy: TypeAlias = Literal["topk", "sample", "best_first"]
DEAD_ENDS: tuple[Stop, ...] = ("levels", "pixels", "repeats", "empty")
# Edges that differ by this part of a window's side or less are equal: far below a pixel of any
# view, far above what rounding adds up to on the way down.
SAME = 1e-6


@dataclass(frozen=True, slots=True)
class Plan:
    """How to walk.

    `keep` cells per window are followed when leaving level 1, 2, ...; the last number repeats.
    "topk" follows the best by attention, "sample" draws without replacement in proportion to
    `attention ** (1 / temperature)`, "best_first" spends the budget across all levels on the most
    probable cells of all seen so far and ignores `keep`.

    `budget` counts windows per image, the whole image included. A cell is entered only if more
    than `least_valid` of it holds data and its longer side has at least `least_side`
    full-resolution pixels. A cell is passed over where a sibling chosen before it covers more than
    `most_shared` of it. With `once`, windows of an image that cover the same pixels are looked at
    once.
    """

    levels: int
    keep: tuple[int, ...]
    policy: Policy = "topk"
    temperature: float = 1.0
    budget: int | None = None
    least_valid: float = 0.0
    least_side: float | None = None
    once: bool = True
    most_shared: float = 1.0

    def __post_init__(self) -> None:
        chooses_by_level, most = self.policy != "best_first", math.inf
        counts = (self.levels, *self.keep, *([] if self.budget is None else [self.budget]))
        for wrong, problem in (
            (
                not all(isinstance(each, Integral) for each in counts),
                f"not whole numbers: `{counts}`",
            ),
            (self.policy not in get_args(Policy), f"unknown policy: `{self.policy}`"),
            (self.levels < 1, f"levels is below 1: `{self.levels}`"),
            (any(count < 1 for count in self.keep), f"keep is below 1: `{self.keep}`"),
            (not self.keep and self.levels > 1 and chooses_by_level, "keep is empty"),
            (not 0 < self.temperature < most, f"temperature is not above 0: `{self.temperature}`"),
            (self.budget is None and not chooses_by_level, "best_first needs a budget"),
            (self.budget is not None and self.budget < 1, f"budget is below 1: `{self.budget}`"),
            (not 0 <= self.least_valid < 1, f"least_valid is not in [0, 1): `{self.least_valid}`"),
            (not 0 <= (self.least_side or 0) < most, f"least_side is below 0: `{self.least_side}`"),
            (not 0 <= self.most_shared <= 1, f"most_shared is not in [0, 1]: `{self.most_shared}`"),
        ):
            if wrong:
                raise ValueError(problem)

    def keep_at(self, level: int) -> int:
        """Return how many cells are followed per window when leaving `level`."""
        return self.keep[min(level, len(self.keep)) - 1] if self.keep else 0


def traverse(
    roots: Sequence[Window],
    look: Look,
    grid: Grid,
    plan: Plan,
    *,
    seeds: Sequence[int] | None = None,
    confident: Callable[[Sequence[int]], Sequence[bool]] | None = None,
    told: Sequence[Sequence[Told] | None] | None = None,
) -> Walk:
    """Look at the whole images, then at cells of what was seen, until every image has a stop.

    `look` is called once per level for all images together, never with nothing, and answers place
    by place; None ends that image while the others go on. Its places, call after call, are
    `Walk.visits`: image by image, parents in their own order, the cells of a parent in reading
    order (SPEC 1.1), whatever their probability. With "best_first" a call is a round, which takes
    the best cell of every image at any level, so that visits are ordered by round.

    A level that would overspend the budget keeps its best windows by joint probability. `seeds`,
    one per image, are needed to sample: what is drawn depends on them and on the path of a region,
    not on the batch. After every call `confident` is given the images that would go on and tells
    which are sure enough to stop.

    `told`, for each image, are windows that stand in for the cells of the whole image, each with
    its attention; None leaves the cells. They are chosen as cells are, and looked at in their own
    order, whatever their size and whatever they share. Their own cells are followed as usual.
    """
    if seeds is None and plan.policy == "sample":
        raise ValueError("sampling needs a seed for every image")
    if seeds is not None and len(seeds) != len(roots):
        raise ValueError(f"{len(seeds)} seeds for {len(roots)} images")
    if seeds is not None and any(seed < 0 for seed in seeds):
        raise ValueError(f"a seed is below 0: `{min(seeds)}`")
    if told is not None and len(told) != len(roots):
        raise ValueError(f"windows are told of {len(told)} images, there are {len(roots)}")
    visits: list[Visit] = []
    trails = [
        _Trail(
            Place(image, Region(root)),
            grid,
            plan,
            0 if seeds is None else int(seeds[image]),
            None if told is None else told[image],
        )
        for image, root in enumerate(roots)
    ]
    active = trails
    while active:
        start = len(visits)
        for trail in active:
            visits += trail.enter(len(visits))
        _look_at(visits[start:], look, grid)
        for trail in active:
            trail.choose()
        active = [trail for trail in active if trail.stop is None]
        _ask(confident, active)
        active = [trail for trail in active if trail.stop is None]
    _rank(visits)
    return Walk(tuple(visits), tuple(trail.stop for trail in trails if trail.stop is not None))


def _look_at(visits: Sequence[Visit], look: Look, grid: Grid) -> None:
    answers = look([visit.place for visit in visits])
    if len(answers) != len(visits):
        raise ValueError(f"look gave {len(answers)} answers for {len(visits)} places")
    for visit, seen in zip(visits, answers, strict=True):
        visit.seen = seen
        if seen is not None:
            _check(seen, (grid.rows, grid.columns), visit.place)


def _check(seen: Seen, shape: tuple[int, int], place: Place) -> None:
    where = f"image {place.image}, `{place.region.path}`"
    for name, values in (("attention", seen.attention), ("valid", seen.valid)):
        if values.shape != shape:
            raise ValueError(f"{name} of {where} has shape {values.shape} instead of {shape}")
        if not (np.isfinite(values) & (values >= 0)).all():
            raise ValueError(f"{name} of {where} holds a negative number, NaN or infinity")


def _ask(
    confident: Callable[[Sequence[int]], Sequence[bool]] | None, trails: Sequence["_Trail"]
) -> None:
    if confident is None or not trails:
        return
    answers = confident([trail.image for trail in trails])
    if len(answers) != len(trails):
        raise ValueError(f"confident gave {len(answers)} answers for {len(trails)} images")
    for trail, sure in zip(trails, answers, strict=True):
        if sure:
            trail.stop = "confidence"


def _rank(visits: Iterable[Visit]) -> None:
    levels: defaultdict[tuple[int, int], list[Visit]] = defaultdict(list)
    for visit in visits:
        levels[visit.place.image, visit.place.region.level].append(visit)
    for peers in levels.values():
        for rank, visit in enumerate(_by_joint(peers), 1):
            visit.rank = rank


def _by_joint(visits: Iterable[Visit]) -> list[Visit]:
    return sorted(visits, key=lambda visit: -visit.joint)


class _Trail:
    """The walk through one image: what it has seen, and what it wants to see next."""

    def __init__(
        self, root: Place, grid: Grid, plan: Plan, seed: int, told: Sequence[Told] | None
    ) -> None:
        self.image = root.image
        self.stop: Stop | None = None
        self._told = told
        self._grid, self._plan, self._seed = grid, plan, seed
        self._fresh: list[Visit] = []
        self._numbers: dict[Visit, int] = {}  # of what was looked at
        self._known: list[tuple[float, int, Visit]] = []  # sorted by left edge
        self._candidates: list[tuple[float, int, int, float, Visit]] = []  # the heap of best_first
        self._dead_ends: set[Stop] = set()
        self._cut = False  # whether the budget had no room for all that was chosen
        self._choices: list[tuple[Visit, int, Visit]] = []  # parent, cell, what shows it
        self._chosen: defaultdict[Visit, list[int]] = defaultdict(list)  # cells of a parent
        self._root = self._visit(root.region, 1.0, 1.0)
        self._next = [self._root]

    def enter(self, number: int) -> list[Visit]:
        """Return what is to be looked at now; the first of these is visit `number` of the walk."""
        self._fresh, self._next = self._next, []
        self._numbers |= {visit: i for i, visit in enumerate(self._fresh, number)}
        self._link()
        return self._fresh

    def choose(self) -> None:
        """Settle what to look at next, or why there is nothing."""
        self._choices = []
        for visit in self._fresh:
            if visit.seen is None:
                self.stop = "failed"
                return
            self._open(visit, visit.seen)
        if self._plan.policy == "best_first":
            self._choose_from_all()
        # A dict is a set that keeps the order: two parents may have chosen the same window.
        chosen = dict.fromkeys(visit for _, _, visit in self._choices)
        new = [visit for visit in chosen if visit not in self._numbers]
        left = math.inf if self._plan.budget is None else self._plan.budget - len(self._numbers)
        if not new:
            dead_end = next(reason for reason in DEAD_ENDS if reason in self._dead_ends)
            self.stop = "budget" if self._cut else dead_end
            self._link()
        elif left < 1:
            self.stop = "budget"
        elif len(new) > left:
            self._cut = True
            best = set(_by_joint(new)[: int(left)])
            new = [visit for visit in new if visit in best]
        self._next = new

    def _open(self, visit: Visit, seen: Seen) -> None:
        cells, attention = self._choice(visit, seen)
        region = visit.place.region
        if dead_end := self._dead_end(visit, bool(cells.size)):
            self._dead_ends.add(dead_end)
        elif self._plan.policy == "best_first":
            for cell, chance in zip(cells.tolist(), attention.tolist(), strict=True):
                # Ties: the earlier parent, then reading order.
                candidate = (-visit.joint * chance, self._numbers[visit], cell, chance, visit)
                heapq.heappush(self._candidates, candidate)
        else:
            scores = attention
            if self._plan.policy == "sample":
                # Gumbel top-k; times the temperature, as log / temperature may overflow.
                with np.errstate(divide="ignore"):  # 0: never drawn while others are left
                    scores = np.log(attention) + self._plan.temperature * self._noise(region, cells)
            best = np.argsort(-scores, kind="stable")
            for i in np.sort(self._take(visit, cells, best)):
                self._choose(visit, int(cells[i]), float(attention[i]))

    def _told_of(self, visit: Visit) -> Sequence[Told] | None:
        """Return the windows that stand in for the cells of a visit, None where cells do."""
        return self._told if visit is self._root else None

    def _choice(self, visit: Visit, seen: Seen) -> tuple[NDArray[np.intp], NDArray[np.float64]]:
        """Return the numbers of the cells, or of the windows told, that may be followed.

        And the attention of each.
        """
        if (told := self._told_of(visit)) is not None:
            return np.arange(len(told)), np.array([each.attention for each in told], np.float64)
        worth = seen.valid > self._plan.least_valid  # (rows, columns)
        if self._grid.only_attended:
            worth &= seen.attention > 0
        cells = np.flatnonzero(worth)
        return cells, seen.attention.ravel()[cells].astype(np.float64)

    def _take(
        self, visit: Visit, cells: NDArray[np.intp], best: NDArray[np.intp]
    ) -> NDArray[np.intp]:
        """Return the first of `best` that are to be followed, and note their order."""
        keep, chosen = self._plan.keep_at(visit.place.region.level), self._chosen[visit]
        if self._plan.most_shared == 1:
            chosen += cells[best[:keep]].tolist()
            return best[:keep]
        taken: list[int] = []
        for i in best.tolist():
            if len(taken) == keep:
                break
            if self._stands_apart(visit, int(cells[i])):
                chosen.append(int(cells[i]))
                taken.append(i)
        return np.array(taken, np.intp)

    def _stands_apart(self, parent: Visit, cell: int) -> bool:
        """Say whether no sibling chosen so far shows too much of `cell`."""
        if self._told_of(parent) is not None:
            return True
        columns = self._grid.columns
        most = self._plan.most_shared * (1 + SAME)
        place = divmod(cell, columns)
        return all(
            self._grid.shared(*divmod(other, columns))[place] <= most
            for other in self._chosen[parent]
        )

    def _dead_end(self, visit: Visit, has_data: bool) -> Stop | None:
        region = visit.place.region
        cell, least = region.window.cell(self._grid, 0, 0), self._plan.least_side or 0.0
        if region.level >= self._plan.levels:
            return "levels"
        if self._told_of(visit) is None and max(cell.width, cell.height) < least * (1 - SAME):
            return "pixels"
        return None if has_data else "empty"

    def _noise(self, region: Region, cells: NDArray[np.intp]) -> NDArray[np.float64]:
        """Return a number for each of these cells, the same whatever others may be chosen."""
        random = np.random.default_rng([self._seed, *region.path.encode()])
        count = max(self._grid.rows * self._grid.columns, int(cells.max(initial=0)) + 1)
        return random.gumbel(size=count)[cells]

    def _choose_from_all(self) -> None:
        while self._candidates:
            _, _, cell, chance, parent = heapq.heappop(self._candidates)
            if self._plan.most_shared < 1 and not self._stands_apart(parent, cell):
                continue
            self._chosen[parent].append(cell)
            if self._choose(parent, cell, chance) not in self._numbers:
                break

    def _choose(self, parent: Visit, cell: int, attention: float) -> Visit:
        region = self._child(parent, cell)
        visit = self._find(region.window)
        if visit is None:
            visit = self._visit(region, attention, parent.joint * attention)
        elif visit in self._numbers:
            self._dead_ends.add("repeats")
        self._choices.append((parent, cell, visit))
        return visit

    def _child(self, parent: Visit, cell: int) -> Region:
        region = parent.place.region
        if (told := self._told_of(parent)) is not None:
            return region.told(told[cell].window, cell + 1)
        return region.child(self._grid, *divmod(cell, self._grid.columns))

    def _visit(self, region: Region, attention: float, joint: float) -> Visit:
        visit = Visit(Place(self.image, region), attention, joint)
        insort(self._known, (region.window.left, len(self._known), visit))
        return visit

    def _find(self, window: Window) -> Visit | None:
        """Return the visit that shows the same pixels, if there is one to be shared."""
        if not self._plan.once:
            return None
        across, down = SAME * window.width, SAME * window.height
        start = bisect_left(self._known, (window.left - across,))
        end = bisect_right(self._known, (window.left + across, math.inf))
        for _, _, visit in self._known[start:end]:
            other = visit.place.region.window
            same_rows = (
                abs(other.top - window.top) <= down and abs(other.bottom - window.bottom) <= down
            )
            if same_rows and abs(other.right - window.right) <= across:
                return visit
        return None

    def _link(self) -> None:
        """Tell parents which visits show the cells they chose."""
        for parent, cell, visit in self._choices:
            # And not left out for the budget; what was told is no cell.
            if visit in self._numbers and self._told_of(parent) is None:
                row, column = divmod(cell, self._grid.columns)
                order = self._chosen[parent].index(cell)
                shown = Followed(row, column, self._numbers[visit], order)
                followed = (*parent.followed, shown)
                parent.followed = tuple(sorted(followed, key=lambda cell: (cell.row, cell.column)))
