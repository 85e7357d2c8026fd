"""Traversals without pixels: scores of cells that follow from the path of a region."""

from collections import Counter

import numpy as np
from hypothesis import strategies as st

from tests.strategies import grids
from tnetcli.geometry import Grid, Window
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import Fixed, TopK, build_policy
from tnetcli.traversal.tree import SAME, CellScores, traverse

GRID = Grid(3, 3, 0.5)
ROOT = Window(0, 0, 1024, 1024)
EVERY_POLICY = ("top_k", "sample", "best_first")
# Uneven, with a cell that is never chosen.
CHANCES = np.array([[0.30, 0.05, 0.10], [0.15, 0.00, 0.08], [0.20, 0.02, 0.10]])
FEW = st.integers(0, 10_000)


def config(levels=2, keep=(1,), policy="top_k", **more):
    return TraversalConfig(levels=levels, keep=keep, policy=policy, **more)


def scores(attention, valid=None):
    """Return scores whose softmax is proportional to `attention` (rows, columns)."""
    attention = np.asarray(attention)
    with np.errstate(divide="ignore"):
        logits = np.log(attention).reshape(-1, 1)
    return CellScores(logits, np.ones(attention.size) if valid is None else np.ravel(valid))


def always(attention=CHANCES, valid=None):
    """Return an encoder that gives every region the same scores."""
    own = scores(attention, valid)
    return lambda nodes: [own for _ in nodes]


def run(config, encode=None, *, grid=GRID, roots=(ROOT,), seeds=None, fixed=None, **more):
    """Traverse images by the policy of a configuration, or by fixed regions where there are any."""
    policies = [build_policy(config, seed) for seed in seeds or range(len(roots))]
    if fixed is not None:
        given = zip(policies, fixed, strict=True)
        policies = [inner if each is None else Fixed(inner, each) for inner, each in given]
    return traverse(roots, encode or always(), grid, config, policies, **more)


class World:
    """Images whose attention and data follow from their name and the path of a region."""

    def __init__(self, grid=GRID, names=(0,)):
        self.grid, self.names = grid, list(names)
        self.calls, self.known = [], {}

    def scores(self, name, path):
        if (name, path) not in self.known:
            random = np.random.default_rng([name, *path.encode()])
            shape = (self.grid.rows, self.grid.columns)
            # Ties, and cells that are never chosen; data or none.
            self.known[name, path] = scores(
                random.integers(0, 5, shape) / 8, random.integers(0, 5, shape) / 4
            )
        return self.known[name, path]

    def of(self, node):
        return self.scores(self.names[node.image], node.region.path)

    def encode(self, nodes):
        self.calls.append(nodes)
        return [self.of(node) for node in nodes]

    def run(self, config, *, root=ROOT):
        seeds = [name + 1 for name in self.names]
        roots = [root] * len(self.names)
        return run(config, self.encode, grid=self.grid, roots=roots, seeds=seeds)


def worlds():
    return st.builds(World, grids(most=3), st.lists(FEW, min_size=1, max_size=3))


def probabilities(scores):
    return TopK().probabilities(None, scores.logits)


def usable(scores, config):
    """Return the cells that hold enough data and have any attention."""
    has = (scores.valid > config.min_valid) & np.isfinite(scores.logits[:, 0])
    return np.flatnonzero(has).tolist()


def nodes_of(found, image=0):
    return [node for node in found.nodes if node.image == image]


def paths(found, image=0):
    return [node.region.path for node in nodes_of(found, image)]


def levels_of(found):
    return Counter(node.region.level for node in found.nodes)


def cells_of(node):
    return [edge.cell for edge in node.edges]


def edges(found, node):
    """Return the cells that were followed, and the numbers of the nodes that show them."""
    return [(edge.cell, found.nodes.index(edge.node)) for edge in node.edges]


def same_pixels(one, other):
    slack = SAME * np.array([one.width, one.height, one.width, one.height])
    return bool((np.abs(np.subtract(one.box, other.box)) <= slack).all())


def chi_square(counts, chances):
    expected = sum(counts.values()) * np.array(list(chances.values()))
    assert set(counts) <= set(chances)
    return float(((np.array([counts[key] for key in chances]) - expected) ** 2 / expected).sum())
