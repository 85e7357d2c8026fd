"""Hypothesis strategies for places in images."""

import math

import numpy as np
from hypothesis import strategies as st

from tnetcli.geometry import Georeference, Grid, Size, Window
from tnetcli.traversal.config import TraversalConfig


def numbers(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high, allow_nan=False, allow_infinity=False)


def sizes(most: int = 20) -> st.SearchStrategy[Size]:
    return st.builds(Size, st.integers(1, most), st.integers(1, most))


def grids(most: int = 6) -> st.SearchStrategy[Grid]:
    return st.builds(Grid, st.integers(1, most), st.integers(1, most), numbers(0.01, 1.0))


def windows(reach: float = 1e6, least: float = 1.0) -> st.SearchStrategy[Window]:
    """Windows anywhere, of any shape, mostly fractional."""
    return st.builds(
        Window,
        numbers(-reach, reach),
        numbers(-reach, reach),
        numbers(least, reach),
        numbers(least, reach),
    )


@st.composite
def windows_near(draw: st.DrawFn, size: Size) -> Window:
    """Windows inside, across the edge of, around and wholly outside an image of `size`."""
    left, width = draw(_spans(size.width))
    top, height = draw(_spans(size.height))
    return Window(left, top, width, height)


def _spans(length: int) -> st.SearchStrategy[tuple[float, float]]:
    fractional = st.tuples(numbers(-1.5 * length, 1.5 * length), numbers(0.05, 3.0 * length))
    whole = st.tuples(
        st.integers(-length, length).map(float), st.integers(1, 2 * length).map(float)
    )
    return st.one_of(fractional, whole)


@st.composite
def paths(draw: st.DrawFn, grid: Grid, deepest: int = 4) -> list[tuple[int, int]]:
    """Lists of (row, column) steps down the traversal tree."""
    step = st.tuples(st.integers(0, grid.rows - 1), st.integers(0, grid.columns - 1))
    return draw(st.lists(step, max_size=deepest))


def configs(
    policies: tuple[str, ...] = ("top_k", "sample", "best_first"), **fixed: object
) -> st.SearchStrategy[TraversalConfig]:
    """Small traversals of any policy; `fixed` names what is not to vary."""
    varied: dict[str, st.SearchStrategy[object]] = {
        "levels": st.integers(1, 4),
        "keep": st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
        "policy": st.sampled_from(policies),
        "temperature": numbers(0.1, 10.0),
        "budget": st.integers(1, 30),
        "min_valid": st.sampled_from([0.0, 0.25, 0.5]),
        "min_size": st.none() | numbers(0.1, 500.0),
        "deduplicate": st.booleans(),
    }
    fields = varied | {name: st.just(value) for name, value in fixed.items()}
    return st.builds(TraversalConfig, **fields)


@st.composite
def georeferences(draw: st.DrawFn, crs: str | None = None) -> Georeference:
    """Transforms with any rotation, both orientations and pixels that need not be square."""
    angle = draw(numbers(-math.pi, math.pi))
    across, down = draw(numbers(0.1, 100.0)), draw(numbers(0.1, 100.0))
    flip = draw(st.sampled_from([-1.0, 1.0]))
    cosine, sine = math.cos(angle), math.sin(angle)
    return Georeference(
        crs,
        (
            across * cosine,
            -flip * down * sine,
            draw(numbers(-1e6, 1e6)),
            across * sine,
            flip * down * cosine,
            draw(numbers(-1e6, 1e6)),
        ),
    )


DTYPES = st.sampled_from(["uint8", "uint16", "int16", "float32", "float64"]).map(np.dtype)
