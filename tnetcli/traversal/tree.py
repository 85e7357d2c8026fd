"""The tree of regions and the loop that grows it, from whole images to the chosen cells.

Numbers only: `traverse` takes a function that encodes regions, and handles no pixels or tensors.
"""

import math
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tnetcli.geometry import Grid, Region, Window
from tnetcli.traversal.config import StopReason, TraversalConfig
from tnetcli.traversal.policies import Policy

# Reasons why a region has no next regions; where several hold, an image stops for the first.
DEAD_ENDS: tuple[StopReason, ...] = ("max_level", "native_resolution", "exhausted", "no_data")
# Edges that differ by this fraction of a window's side or less are equal: far below a pixel of any
# view, far above the rounding errors along a path.
SAME = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Edge:
    """A cell that was followed, and the node that shows it.

    `order` counts from 0 in the order in which the cells of a region were chosen.
    """

    cell: int  # in reading order
    node: "Node"
    order: int


@dataclass(slots=True, eq=False)
class Node:
    """One region of the tree of `image`, an index into the images of the traversal.

    `attention` is the probability that its parent gave the cell, `joint` the product along the
    path; both are 1 for the whole image. `rank` 1 is the most probable of its image and level by
    `joint`; ties go to the earlier. `edges` lead to the cells that were read, in reading order, not
    to fixed regions. Parents may share a node, which keeps path and attention of the first.
    """

    image: int
    region: Region
    attention: float = 1.0
    joint: float = 1.0
    rank: int = 0
    edges: tuple[Edge, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class CellScores:
    """Scores of the cells of one region, in reading order."""

    logits: NDArray[np.floating]  # (places, channels), raw; -inf is never chosen
    valid: NDArray[np.floating]  # (places,), the fraction that holds data


Encode: TypeAlias = Callable[[Sequence[Node]], Sequence[CellScores | None]]


@dataclass(frozen=True, slots=True, eq=False)
class Traversal:
    """All nodes in the order they were read, and one stop reason per image."""

    nodes: tuple[Node, ...]
    stops: tuple[StopReason, ...]


def traverse(
    roots: Sequence[Window],
    encode: Encode,
    grid: Grid,
    config: TraversalConfig,
    policies: Sequence[Policy],
    *,
    confident: Callable[[Sequence[int]], Sequence[bool]] | None = None,
) -> Traversal:
    """Encode whole images, then cells of what was encoded, until every image has a stop reason.

    `encode` is called once per round with the new nodes of all images and returns the scores of
    each; None stops that image while the others continue. Nodes are ordered image by image, parents
    in their own order, the cells of a parent in reading order. A round is a level, or for
    persistent policies the next regions at any level. A level that would overspend the budget keeps
    its best regions by joint probability. After every round `confident` returns which of the images
    that would continue may stop.
    """
    nodes: list[Node] = []
    trees = [
        _Tree(image, Region(root), grid, config, policy)
        for image, (root, policy) in enumerate(zip(roots, policies, strict=True))
    ]
    active = trees
    while active:
        rounds = [tree.enter() for tree in active]
        fresh = [node for own in rounds for node in own]
        nodes += fresh
        answers = iter(encode(fresh))
        for tree, own in zip(active, rounds, strict=True):
            tree.choose(list(islice(answers, len(own))))
        active = [tree for tree in active if tree.stop is None]
        if confident is not None and active:
            sure = confident([tree.image for tree in active])
            for tree, is_sure in zip(active, sure, strict=True):
                tree.stop = "confidence" if is_sure else None
            active = [tree for tree in active if tree.stop is None]
    _rank(nodes)
    return Traversal(tuple(nodes), tuple(tree.stop for tree in trees if tree.stop is not None))


def _rank(nodes: Iterable[Node]) -> None:
    levels: defaultdict[tuple[int, int], list[Node]] = defaultdict(list)
    for node in nodes:
        levels[node.image, node.region.level].append(node)
    for peers in levels.values():
        for rank, node in enumerate(_by_joint(peers), 1):
            node.rank = rank


def _by_joint(nodes: Iterable[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: -node.joint)


class _Pool:
    """Candidates of one image as a struct of arrays; regions exist only for those chosen."""

    def __init__(self) -> None:
        self.parent = np.empty(0, np.intp)  # (n,), number of the node
        self.cell = np.empty(0, np.intp)  # (n,)
        self.prob = np.empty(0)  # (n,), attention
        self.key = np.empty(0)  # (n,), what the policy orders them by

    def add(
        self, parent: int, cells: NDArray[np.intp], probs: NDArray[Any], keys: NDArray[Any]
    ) -> None:
        """Append the candidates of one node."""
        self.parent = np.concatenate([self.parent, np.full(len(cells), parent)])
        self.cell = np.concatenate([self.cell, cells])
        self.prob = np.concatenate([self.prob, probs])
        self.key = np.concatenate([self.key, keys])

    def pop_best(self) -> tuple[int, int, float] | None:
        """Remove and return parent, cell and attention of the best, if any; ties: the earlier."""
        best = int(self.key.argmax()) if self.key.size else -1
        if best < 0 or self.key[best] == -np.inf:
            return None
        self.key[best] = -np.inf
        return int(self.parent[best]), int(self.cell[best]), float(self.prob[best])


class _Tree:
    """The regions of one image that were read, and those to be read next."""

    def __init__(
        self, image: int, root: Region, grid: Grid, config: TraversalConfig, policy: Policy
    ) -> None:
        self.image = image
        self.stop: StopReason | None = None
        self._grid, self._config, self._policy = grid, config, policy
        self._read: list[Node] = []
        self._numbers: dict[Node, int] = {}  # of what was read
        self._fresh: list[Node] = []
        self._known: list[tuple[float, int, Node]] = []  # sorted by left edge
        self._pool = _Pool()
        self._dead_ends: set[StopReason] = set()
        self._cut = False  # whether the budget was too small for all that was chosen
        self._choices: list[tuple[Node, int, Node]] = []  # parent, cell, the node that shows it
        self._chosen: defaultdict[Node, list[int]] = defaultdict(list)  # cells of a parent
        self._next = [self._node(root, 1.0, 1.0)]

    def enter(self) -> list[Node]:
        """Return the nodes to be read now."""
        self._fresh, self._next = self._next, []
        for node in self._fresh:
            self._numbers[node] = len(self._read)
            self._read.append(node)
        self._link()
        return self._fresh

    def choose(self, scores: Sequence[CellScores | None]) -> None:
        """Choose the nodes to be read next, or set the stop reason."""
        self._choices = []
        for node, own in zip(self._fresh, scores, strict=True):
            if own is None:
                self.stop = "failed"
                return
            self._open(node, own)
        if self._policy.persistent:
            self._choose_from_pool()
        # A dict is a set that keeps the order: two parents may have chosen the same region.
        chosen = dict.fromkeys(node for _, _, node in self._choices)
        new = [node for node in chosen if node not in self._numbers]
        budget = self._config.budget
        left = math.inf if budget is None else budget - len(self._read)
        if not new or left < 1:
            dead_ends = (reason for reason in DEAD_ENDS if reason in self._dead_ends)
            self.stop = "budget" if new or self._cut else next(dead_ends)
            self._link()
        elif len(new) > left:
            self._cut = True
            best = set(_by_joint(new)[: int(left)])
            new = [node for node in new if node in best]
        self._next = new

    def _open(self, node: Node, scores: CellScores) -> None:
        """Follow the chosen cells of a node or add them to the pool; note a dead end."""
        region, fixed = node.region, self._policy.fixed(node.region)
        if region.level >= self._config.levels:
            self._dead_ends.add("max_level")
            return
        if fixed is not None:
            cells = np.arange(len(fixed))
            probs = np.array([each.attention for each in fixed], np.float64)
        else:
            probs = self._policy.probabilities(region, scores.logits.astype(np.float64))
            cells = np.flatnonzero((scores.valid > self._config.min_valid) & (probs > 0))
            probs = probs[cells]
        cell, least = region.window.cell(self._grid, 0, 0), self._config.min_size or 0.0
        is_fine = fixed is None and max(cell.width, cell.height) < least * (1 - SAME)
        if is_fine or not cells.size:
            self._dead_ends.add("native_resolution" if is_fine else "no_data")
            return
        keys = self._policy.preference(region, cells, probs, node.joint)
        if self._policy.persistent:
            self._pool.add(self._numbers[node], cells, probs, keys)
            return
        keep, taken = self._config.keep_at(region.level), list[int]()
        for i in np.argsort(-keys, kind="stable").tolist():
            if len(taken) == keep:
                break
            if self._stands_apart(node, int(cells[i])):
                self._chosen[node].append(int(cells[i]))
                taken.append(i)
        for i in sorted(taken):
            self._follow(node, int(cells[i]), float(probs[i]))

    def _choose_from_pool(self) -> None:
        new: set[Node] = set()  # two candidates may show the same pixels
        while len(new) < self._policy.batch and (best := self._pool.pop_best()) is not None:
            number, cell, attention = best
            parent = self._read[number]
            if not self._stands_apart(parent, cell):
                continue
            self._chosen[parent].append(cell)
            node = self._follow(parent, cell, attention)
            if node not in self._numbers:
                new.add(node)

    def _stands_apart(self, parent: Node, cell: int) -> bool:
        """Return True if no sibling chosen so far covers too much of `cell`."""
        most = self._config.max_overlap
        if most == 1 or self._policy.fixed(parent.region) is not None:
            return True
        others = [divmod(other, self._grid.columns) for other in self._chosen[parent]]
        place = divmod(cell, self._grid.columns)
        return all(self._grid.overlap(*other)[place] <= most * (1 + SAME) for other in others)

    def _follow(self, parent: Node, cell: int, attention: float) -> Node:
        if (fixed := self._policy.fixed(parent.region)) is not None:
            region = parent.region.fixed(self._grid, fixed[cell].window, cell + 1)
        else:
            region = parent.region.child(self._grid, *divmod(cell, self._grid.columns))
        node = self._find(region.window)
        if node is None:
            node = self._node(region, attention, parent.joint * attention)
        elif node in self._numbers:
            self._dead_ends.add("exhausted")
        self._choices.append((parent, cell, node))
        return node

    def _node(self, region: Region, attention: float, joint: float) -> Node:
        node = Node(self.image, region, attention, joint)
        insort(self._known, (region.window.left, len(self._known), node))
        return node

    def _find(self, window: Window) -> Node | None:
        """Return the node that shows the same pixels, if there is one to be shared."""
        if not self._config.deduplicate:
            return None
        across, down = SAME * window.width, SAME * window.height
        start = bisect_left(self._known, (window.left - across,))
        end = bisect_right(self._known, (window.left + across, math.inf))
        for _, _, node in self._known[start:end]:
            other = node.region.window
            moved = max(abs(other.top - window.top), abs(other.bottom - window.bottom))
            if moved <= down and abs(other.right - window.right) <= across:
                return node
        return None

    def _link(self) -> None:
        """Add edges from parents to the nodes that show the cells they chose."""
        for parent, cell, node in self._choices:
            # Not to nodes left out for the budget; fixed regions are no cells.
            if node in self._numbers and self._policy.fixed(parent.region) is None:
                edge = Edge(cell, node, self._chosen[parent].index(cell))
                parent.edges = tuple(sorted((*parent.edges, edge), key=lambda each: each.cell))
