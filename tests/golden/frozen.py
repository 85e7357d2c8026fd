"""Frozen results: read, compare and rewrite the JSON files of this folder."""

import json
import math
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DIGITS = 9  # significant, of every number
MOST_LINES = 20  # of differences that are shown


class Golden:
    """The cases of one JSON file, each a line of it."""

    def __init__(self, name: str, *, update: bool) -> None:
        self.path = HERE / f"{name}.json"
        self.update = update

    def cases(self) -> dict[str, Any]:
        """Return all stored cases by name."""
        return json.loads(self.path.read_text()) if self.path.exists() else {}

    def check(self, name: str, found: Any, *, atol: float = 0.0, rtol: float = 0.0) -> None:
        """Assert that a result equals the stored one; store it with `--update-goldens`."""
        found = rounded(found)
        if self.update:
            self._write(self.cases() | {name: found})
            return
        stored = self.cases()
        assert name in stored, f"{self.path.name} has no case {name}: run with --update-goldens"
        lines = differences(stored[name], found, atol=atol, rtol=rtol)
        assert not lines, "\n".join([f"{len(lines)} differences in {name}", *lines[:MOST_LINES]])

    def keep(self, names: set[str]) -> None:
        """Assert that the file holds these cases and no others."""
        if self.update:
            self._write({name: each for name, each in self.cases().items() if name in names})
        assert set(self.cases()) == names

    def _write(self, cases: dict[str, Any]) -> None:
        lines = (
            f"{json.dumps(name)}: {json.dumps(cases[name], sort_keys=True, separators=(',', ':'))}"
            for name in sorted(cases)
        )
        self.path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def rounded(value: Any) -> Any:
    """Return plain JSON values with numbers of `DIGITS` significant digits."""
    if isinstance(value, dict):
        return {str(key): rounded(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    assert value is None or isinstance(value, bool | int | str), repr(value)
    return value


def differences(
    stored: Any, found: Any, *, atol: float = 0.0, rtol: float = 0.0, where: str = ""
) -> list[str]:
    """Return one line per difference; only floats are compared with tolerances."""
    pairs: list[tuple[str, Any, Any]] = []
    if isinstance(stored, dict) and isinstance(found, dict):
        if stored.keys() != found.keys():
            return [f"{where}: keys differ: {sorted(stored.keys() ^ found.keys())}"]
        pairs = [(f"{where}.{key}", stored[key], found[key]) for key in stored]
    elif isinstance(stored, list) and isinstance(found, list):
        if len(stored) != len(found):
            return [f"{where}: {len(stored)} stored, {len(found)} found"]
        pairs = [(f"{where}[{i}]", *each) for i, each in enumerate(zip(stored, found, strict=True))]
    elif isinstance(stored, float) and isinstance(found, float):
        # Both sides were rounded.
        allowed = atol + (rtol + 10.0 ** (1 - DIGITS)) * abs(stored)
        if not (stored == found or math.isclose(stored, found, rel_tol=0, abs_tol=allowed)):
            return [f"{where}: {stored} stored, {found} found"]
    elif type(stored) is not type(found) or stored != found:
        return [f"{where}: {stored!r} stored, {found!r} found"]
    return [
        line
        for place, one, other in pairs
        for line in differences(one, other, atol=atol, rtol=rtol, where=place)
    ]
