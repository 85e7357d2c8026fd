"""The mean of the figures of some steps."""

from collections.abc import Sequence
from typing import Any

ADDED = ("windows",)  # of all processes together; the rest are means


class Gathered:
    """The mean of the figures of some steps."""

    def __init__(self, rows: Sequence[dict[str, Any]] = ()) -> None:
        self._rows = list(rows)

    @property
    def rows(self) -> tuple[dict[str, Any], ...]:
        """Return what was gathered since the last mean."""
        return tuple(self._rows)

    def add(self, row: dict[str, Any]) -> None:
        """Take the figures of one more step."""
        self._rows.append(row)

    def mean(self) -> dict[str, Any]:
        """Return the mean of all, list by list and number by number, and begin anew."""
        rows, self._rows = self._rows, []
        return {key: _mean([row[key] for row in rows if key in row]) for key in rows[-1]}


def _mean(values: list[Any]) -> Any:
    if isinstance(values[0], list):
        deepest = max(len(value) for value in values)
        return [
            _mean([value[level] for value in values if level < len(value)])
            for level in range(deepest)
        ]
    return sum(values) / len(values)


def merge(rows: Sequence[dict[str, Any]], weights: Sequence[float]) -> dict[str, Any]:
    """Return the figures of one step that several processes have made together."""
    if len(rows) == 1:
        return rows[0]
    keys = dict.fromkeys(key for row in rows for key in row)
    merged = {}
    for key in keys:
        having = [
            (row[key], weight) for row, weight in zip(rows, weights, strict=True) if key in row
        ]
        values = [value for value, _ in having]
        merged[key] = sum(values) if key in ADDED else _weighted(values, [w for _, w in having])
    return merged


def _weighted(values: list[Any], weights: list[float]) -> Any:
    if isinstance(values[0], list):
        deepest = max(len(value) for value in values)
        return [
            _weighted(
                [value[level] for value in values if level < len(value)],
                [w for value, w in zip(values, weights, strict=True) if level < len(value)],
            )
            for level in range(deepest)
        ]
    return sum(v * w for v, w in zip(values, weights, strict=True)) / sum(weights)
