"""Hold what the papers print against what we count on the same models."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any, Literal

from tnetcli.models.counting import Multiplications, count_parameters
from tnetcli.models.papers import BILLION, MILLION, PAPERS, Keep, Published
from tnetcli.workflows.paper_maps import BRANCHES, count_tried, see_maps
from tnetcli.workflows.profile import Counter
from tnetcli.workflows.steps import steps_of
from tnetcli.workflows.tables import table

SCHEMA = "tnet.paper/1"
SAME = 1e-9  # a figure that is off by one in its last digit may round to a hair more
Quantity = Literal["trainable", "total", "multiplications", "side", "field", "patches"]
PARAMETERS: tuple[Quantity, ...] = ("trainable", "total")
MAPS: tuple[Quantity, ...] = ("side", "field")
WIDTH = 100  # of what is said in words
UNITS = {"trainable": MILLION, "total": MILLION, "multiplications": BILLION}
TITLES = {
    "published": "as the papers print them (ImageNet, fMoW)",
    "derived": "derived where the papers print none (CUB, NABirds)",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure to compare with, in its unit, beside what we count.

    `ours` is counted the way the other was. For multiplications, `both` has the other
    way too, and `keep` tells the walk. `of` names a layer, or a branch and what LSP is set to.
    """

    quantity: Quantity
    expected: float
    ours: int
    keep: Keep = ()
    both: Multiplications | None = None
    digits: int = 2  # after the point, as printed
    of: str = ""

    @property
    def unit(self) -> int:
        """Return what a figure of 1 stands for."""
        return UNITS.get(self.quantity, 1)

    @property
    def printed(self) -> str:
        """Return the other as it was printed."""
        return f"{self.expected:.{self.digits}f}"

    @property
    def difference(self) -> float:
        """Return ours less the other, in its unit."""
        return self.ours / self.unit - self.expected

    @property
    def agrees(self) -> str:
        """Return `digits`, if ours would print the same; `within 0.01`, if nearly; or `no`.

        Nearly is off by one in the last of the digits after the point.
        """
        if f"{self.ours / self.unit:.{self.digits}f}" == self.printed:
            return "digits"
        least = 10.0**-self.digits
        near = self.digits > 0 and abs(self.difference) <= least + SAME
        return f"within {least:g}" if near else "no"

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

    @property
    def is_met(self) -> bool:
        """Say whether every figure agrees, in its digits or nearly."""
        return all(figure.agrees != "no" for figure in self.figures)


def compare_all() -> Iterator[Comparison]:
    """Build and count every published model."""
    for name, published in PAPERS.items():
        yield compare(name, published)


def compare(name: str, published: Published) -> Comparison:
    """Build and count one."""
    counter = Counter(published.family, dict(published.arguments), classes=published.classes)
    parameters = count_parameters(counter.model)
    figures = []
    for quantity in PARAMETERS:
        printed = getattr(published, quantity)
        if printed is not None:
            ours = getattr(parameters, quantity)
            figures.append(Figure(quantity, printed, ours, digits=published.digits))
    for keep, expected in published.multiplications.items():
        steps = steps_of(keep, root_always_scored=published.root_always_scored)
        count = counter.count(steps)
        ours = count.total if published.scaling else count.layers
        figures.append(
            Figure("multiplications", expected, ours, keep, count, digits=published.cost_digits)
        )
    for layer, found in see_maps(counter.model, published.maps).items():
        for quantity, printed, ours in zip(MAPS, published.maps[layer], found, strict=True):
            figures.append(Figure(quantity, printed, ours, digits=0, of=layer))
    return Comparison(name, published, (*figures, *_patches(counter, published)))


def _patches(counter: Counter, published: Published) -> list[Figure]:
    """Compare how many patches each branch can name, and how many of these LSP goes through."""
    if not published.positions:
        return []
    seen = see_maps(counter.model, BRANCHES).values()
    branches, sides = [f"B{field}" for _, field in seen], [side for side, _ in seen]
    counts = {"positions": (published.positions, [side**2 for side in sides])}
    for setting, expected in published.tried.items():
        counts[f"tried, {setting}"] = (expected, count_tried(setting, sides))
    return [
        Figure("patches", printed, ours, digits=0, of=f"{branch} {count}")
        for count, (expected, found) in counts.items()
        for branch, printed, ours in zip(branches, expected, found, strict=True)
    ]


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
        "reason": None if compared.is_met else published.reason or None,
    }
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def _record(figure: Figure) -> dict[str, Any]:
    record: dict[str, Any] = {"quantity": figure.quantity}
    if figure.of:
        record["of"] = figure.of
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
        parts += _reasons(models)
    return "\n\n".join([*parts, _maps(compared), _patch_counts(compared), _summary(compared)])


def _parameters(models: Iterable[Comparison], source: str) -> str:
    return table(
        f"Parameters in millions, {TITLES[source]}",
        ("model", "counted", source, "ours", "off by", "%", "agrees"),
        [
            (
                model.name,
                "trainable" if figure.quantity == "trainable" else "with statistics",
                figure.printed,
                f"{figure.ours:,}",
                *_distance(figure),
            )
            for model in models
            for figure in model.figures
            if figure.quantity in PARAMETERS
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
                    figure.printed,
                    *(f"{n / BILLION:.4f}{star}" for n, star in zip(counts, stars, strict=True)),
                    *_distance(figure),
                ))  # fmt: skip
    return table(
        f"Multiplications in billions per image, {TITLES[source]}\n* is the count to compare with",
        ("model", "windows", source, "conv+linear", "+ scaling", "off by", "%", "agrees"),
        rows,
    )


def _distance(figure: Figure) -> tuple[str, str, str]:
    agrees = {"digits": "yes", "no": "no"}.get(figure.agrees, "nearly")
    percent = 100 * figure.difference / figure.expected
    return f"{figure.difference:+.4f}", f"{percent:+.2f}", agrees


def _reasons(models: Iterable[Comparison]) -> list[str]:
    """Say why some figures are not met, once for all models that it is true of."""
    names: dict[str, list[str]] = {}
    for model in models:
        if not model.is_met:
            reason = model.published.reason or "nobody knows why"
            names.setdefault(reason, []).append(model.name)
    told = [
        line
        for reason, of in names.items()
        for line in wrap(f"{', '.join(of)}: {reason}", WIDTH, initial_indent="  ",
                         subsequent_indent="    ")
    ]  # fmt: skip
    return ["\n".join(["Not met:", *told])] if told else []


def _maps(compared: Iterable[Comparison]) -> str:
    rows = []
    for model in compared:
        figures = [figure for figure in model.figures if figure.quantity in MAPS]
        for side, seen in zip(figures[::2], figures[1::2], strict=True):
            agrees = "yes" if {side.agrees, seen.agrees} == {"digits"} else "no"
            counts = (side.printed, str(side.ours), seen.printed, str(seen.ours))
            rows.append((model.name, side.of, *counts, agrees))
    return table(
        "Maps of layers, and what one of their pixels sees of the view, in pixels a side",
        ("model", "layer", "side", "ours", "sees", "ours", "agrees"),
        rows,
    )


def _patch_counts(compared: Iterable[Comparison]) -> str:
    return table(
        "Patches that a branch can name, and how many of them LSP tries",
        ("model", "count", "published", "ours", "agrees"),
        [
            (model.name, figure.of, figure.printed, str(figure.ours), _distance(figure)[2])
            for model in compared
            for figure in model.figures
            if figure.quantity == "patches"
        ],
    )


def _summary(compared: Iterable[Comparison]) -> str:
    found = [figure.agrees for model in compared for figure in model.figures]
    same, unlike = found.count("digits"), found.count("no")
    return (
        f"{same} of {len(found)} figures agree in every digit, "
        f"{len(found) - same - unlike} nearly, {unlike} do not"
    )
