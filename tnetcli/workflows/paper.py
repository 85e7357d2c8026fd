"""Hold what the papers print against what we count on the same models."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tnetcli.models.counting import Multiplications, count_parameters
from tnetcli.models.papers import BILLION, DIGITS, MILLION, PAPERS, Keep, Published
from tnetcli.workflows.profile import Counter
from tnetcli.workflows.steps import steps_of
from tnetcli.workflows.tables import table

SCHEMA = "tnet.paper/1"
TOLERANCE = 0.01  # one in the last digit of a figure
Quantity = Literal["trainable", "total", "multiplications"]
TITLES = {
    "published": "as the papers print them (ImageNet, fMoW)",
    "derived": "derived where the papers print none (CUB, NABirds)",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure to compare with, in millions or billions of two digits, beside what we count.

    `ours` is counted the way the other was. For multiplications, `both` has the other
    way too, and `keep` tells the walk.
    """

    quantity: Quantity
    expected: float
    ours: int
    keep: Keep = ()
    both: Multiplications | None = None

    @property
    def unit(self) -> int:
        """Return what a figure of 1 stands for."""
        return BILLION if self.quantity == "multiplications" else MILLION

    @property
    def difference(self) -> float:
        """Return ours less the other, in its unit."""
        return self.ours / self.unit - self.expected

    @property
    def agrees(self) -> str:
        """Return `digits`, if ours would print the same; `within 0.01`, if nearly; or `no`."""
        if f"{self.ours / self.unit:.{DIGITS}f}" == f"{self.expected:.{DIGITS}f}":
            return "digits"
        return f"within {TOLERANCE}" if abs(self.difference) <= TOLERANCE else "no"

    @property
    def windows(self) -> int:
        """Return how many windows are looked at beside the whole image."""
        return sum(step.views for step in steps_of(self.keep)) - 1


@dataclass(frozen=True, slots=True)
class Comparison:
    """All figures of one model."""

    name: str
    published: Published
    figures: tuple[Figure, ...]


def compare_all() -> Iterator[Comparison]:
    """Build and count every published model."""
    for name, published in PAPERS.items():
        yield compare(name, published)


def compare(name: str, published: Published) -> Comparison:
    """Build and count one."""
    counter = Counter(published.family, dict(published.arguments), classes=published.classes)
    parameters = count_parameters(counter.model)
    figures = []
    if published.trainable is not None:
        figures.append(Figure("trainable", published.trainable, parameters.trainable))
    if published.total is not None:
        figures.append(Figure("total", published.total, parameters.total))
    for keep, expected in published.multiplications.items():
        steps = steps_of(keep, root_always_scored=published.root_always_scored)
        count = counter.count(steps)
        ours = count.total if published.scaling else count.layers
        figures.append(Figure("multiplications", expected, ours, keep, count))
    return Comparison(name, published, tuple(figures))


def as_json(compared: Comparison) -> str:
    """Return one line of JSON."""
    published = compared.published
    record = {
        "schema": SCHEMA,
        "name": compared.name,
        "source": published.source,
        "family": published.family,
        "arguments": published.arguments,
        "classes": published.classes,
        "image_size": published.image_size,
        "counts_scaling": published.scaling,
        "root_always_scored": published.root_always_scored,
        "figures": [_record(figure) for figure in compared.figures],
    }
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def _record(figure: Figure) -> dict[str, Any]:
    record: dict[str, Any] = {"quantity": figure.quantity}
    if figure.both is not None:
        record |= {
            "windows": figure.windows,
            "keep": list(figure.keep),
            "layers": figure.both.layers,
            "scaling": figure.both.scaling,
        }
    return record | {
        "unit": figure.unit,
        "expected": figure.expected,
        "ours": figure.ours,
        "difference": round(figure.difference, 6),
        "percent": round(100 * figure.difference / figure.expected, 4),
        "agrees": figure.agrees,
    }


def as_text(compared: Sequence[Comparison]) -> str:
    """Return tables to read, and in the end how many figures agree."""
    parts = []
    for source in TITLES:
        models = [each for each in compared if each.published.source == source]
        parts += [_parameters(models, source), _multiplications(models, source)]
    return "\n\n".join([*parts, _summary(compared)])


def _parameters(models: Iterable[Comparison], source: str) -> str:
    return table(
        f"Parameters in millions, {TITLES[source]}",
        ("model", "counted", source, "ours", "off by", "%", "agrees"),
        [
            (
                model.name,
                "trainable" if figure.quantity == "trainable" else "with statistics",
                f"{figure.expected:.{DIGITS}f}",
                f"{figure.ours:,}",
                *_distance(figure),
            )
            for model in models
            for figure in model.figures
            if figure.both is None
        ],
    )


def _multiplications(models: Iterable[Comparison], source: str) -> str:
    """Show both counts; a star marks the one to compare with."""
    rows = []
    for model in models:
        stars = (" ", "*") if model.published.scaling else ("*", " ")
        for figure in model.figures:
            if figure.both is not None:
                counts = (figure.both.layers, figure.both.total)
                rows.append((
                    model.name,
                    "+".join(str(step.views) for step in steps_of(figure.keep)[1:]) or "0",
                    f"{figure.expected:.{DIGITS}f}",
                    *(f"{n / BILLION:.4f}{star}" for n, star in zip(counts, stars, strict=True)),
                    *_distance(figure),
                ))  # fmt: skip
    return table(
        f"Multiplications in billions per image, {TITLES[source]}\n* is the count to compare with",
        ("model", "windows", source, "conv+linear", "+ scaling", "off by", "%", "agrees"),
        rows,
    )


def _distance(figure: Figure) -> tuple[str, str, str]:
    agrees = "yes" if figure.agrees == "digits" else figure.agrees
    percent = 100 * figure.difference / figure.expected
    return f"{figure.difference:+.4f}", f"{percent:+.2f}", agrees


def _summary(compared: Iterable[Comparison]) -> str:
    found = [figure.agrees for model in compared for figure in model.figures]
    same, near = found.count("digits"), found.count(f"within {TOLERANCE}")
    return (
        f"{same} of {len(found)} figures agree in every digit, "
        f"{near} within {TOLERANCE}, {len(found) - same - near} do not"
    )
