"""The `tnet models` command."""

import difflib
import fnmatch
import json
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from tnetcli.cli.options import Json, is_typed
from tnetcli.errors import ModelError, UsageError
from tnetcli.models.checkpoint import (
    SCHEMA,
    bundled_models,
    describe,
    find_model_file,
    open_tensor_file,
    read_description,
)
from tnetcli.models.registry import BACKBONES, FAMILIES
from tnetcli.readers.wrappers import CropKind
from tnetcli.text import aligned, format_bytes, printable

MOST_SHOWN = 20
LONGEST = 500  # characters of a line in a card
# Batch norm counts its steps; that is no number of the model.
STEPS = "num_batches_tracked"
CROPS: dict[CropKind, str] = {
    "none": "",
    "box": "trained on the boxes of images: --crop box",
    "context": "trained on the boxes of images with what is around them: --crop context",
}
USES = {
    "tnet models FILE": "shows what a model file holds",
    "tnet models --backbones 'resnet*'": "lists the backbones of timm by name",
    "tnet profile --model FILE": "counts what it holds and measures what it takes",
    "tnet profile --recipe FILE": "does so for a model that is not trained yet",
}


@dataclass(frozen=True, slots=True)
class Overview:
    """What there is to choose from, each by name with what it is."""

    families: dict[str, str]
    bundled: dict[str, str]
    backbones: dict[str, str]


@dataclass(frozen=True, slots=True)
class Matches:
    """The backbones whose names match, among how many."""

    pattern: str
    names: tuple[str, ...]
    total: int


@dataclass(frozen=True, slots=True)
class Card:
    """What a model file says and holds, as plain values; `cells` says what it chooses from.

    `crop` is which part of images it was trained on.
    """

    facts: dict[str, Any]
    cells: str
    crop: CropKind = "none"


def survey() -> Overview:
    """Return what there is; loads neither torch nor timm."""
    bundled = {name: read_description(path) for name, path in bundled_models().items()}
    return Overview(
        {name: family.summary for name, family in FAMILIES.items()},
        {name: each.summary or ", ".join(each.classes) for name, each in bundled.items()},
        dict(BACKBONES),
    )


def match_backbones(pattern: str) -> Matches:
    """Return the backbones whose names match a glob: timm's, and our own."""
    import timm  # takes seconds: it loads torch

    known = sorted({*timm.list_models(), *BACKBONES})
    names = fnmatch.filter(known, pattern)
    if not names:
        wider = f"*{pattern}*"
        close = difflib.get_close_matches(pattern, known, n=1)
        hint = (
            f"did you mean `{wider}`?" if fnmatch.filter(known, wider)
            else f"did you mean `{close[0]}`?" if close
            else "`*` stands for any letters: 'resnet*'"
        )  # fmt: skip
        raise ModelError(f"no backbone matches: `{pattern}`", hint=hint)
    return Matches(pattern, tuple(names), len(known))


def read_card(name_or_path: str) -> Card:
    """Return the card of a bundled model or a file; loads neither torch nor any tensor."""
    path = find_model_file(name_or_path)
    with open_tensor_file(path) as file:
        description, size, sha256 = describe(file), file.size, file.sha256
        parameters = sum(
            math.prod(shape) for name, shape in file.shapes.items() if not name.endswith(STEPS)
        )
    told = description.model_dump(mode="json")
    grid = description.grid
    return Card(
        {
            "schema": SCHEMA,
            "file": os.fsencode(path).decode(errors="replace"),
            "file_bytes": size,
            "sha256": sha256,
            "name": told.pop("name") or _bundled_name(path),
            "summary": told.pop("summary"),
            "family": told.pop("family"),
            "backbone": description.model_arguments.backbone,
            "parameters": parameters,
            "view_size": description.view_size,
            "grid": {
                "rows": grid.rows,
                "columns": grid.columns,
                "cell_fraction": grid.cell_fraction,
            },
            **told,
        },
        grid.describe(),
        description.crop,
    )


def _bundled_name(path: Path) -> str | None:
    return next((name for name, each in bundled_models().items() if each == path), None)


def as_json(result: Overview | Matches | Card) -> str:
    """Return one line of JSON."""
    if isinstance(result, Card):
        record = result.facts
    elif isinstance(result, Matches):
        record = {"pattern": result.pattern, "backbones": result.names, "total": result.total}
    else:
        record = {
            "families": {name: text.replace("\n", " ") for name, text in result.families.items()},
            "bundled": result.bundled,
            "backbones": result.backbones,
        }
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def as_text(result: Overview | Matches | Card) -> str:
    """Return lines to read."""
    if isinstance(result, Matches):
        return "\n".join(result.names)
    if isinstance(result, Card):
        return _card_text(result)
    nothing = {"none": "this version comes without a model: give the path of a file"}
    families = {name: text.split("\n") for name, text in result.families.items()}
    return "\n".join(
        [
            *("families", *aligned(families.items())),
            *("bundled models", *aligned((result.bundled or nothing).items())),
            *("tested backbones, among many of timm's", *aligned(result.backbones.items())),
            *("use", *aligned(USES.items())),
        ]
    )


def _card_text(card: Card) -> str:
    facts = card.facts
    scale, walk = facts["normalisation"], facts["traversal"]
    lines: dict[str, str | list[str]] = {
        "name": facts["name"] or "",
        "summary": facts["summary"] or "",
        "family": facts["family"],
        "  is": FAMILIES[facts["family"]].summary.split("\n"),
        "backbone": facts["backbone"],
        "parameters": f"{facts['parameters']}, running statistics included",
        "view size": f"{facts['view_size']} x {facts['view_size']} pixels",
        "grid": card.cells,
        "levels": str(walk["levels"])
        + (f", keep {_some(map(str, walk['keep']), ',')}" if walk["levels"] > 1 else ""),
        "glimpses": str(facts["arguments"].get("glimpses", "")),
        "fit": walk["fit"],
        "crop": CROPS[card.crop],
        "classes": _listed(facts["classes"]),
        "bands": _listed(facts["bands"]),
        "normalisation": f"of {scale['dtype']}",
        "  mean": _numbers(scale["mean"]),
        "  std": _numbers(scale["std"]),
        "pixel size": "" if facts["pixel_size"] is None else f"{facts['pixel_size']:g} metres",
        "metrics": _some(f"{name} {value:.6g}" for name, value in facts["metrics"].items())
        or "none",
        "data licence": facts["data_licence"] or "not stated",
        "made with": f"tnet {facts['tnet']}",
        "file": f"{format_bytes(facts['file_bytes'])} of {facts['weights']}",
        "sha256": facts["sha256"],
        "tensors": "not checked: `tnet profile --model FILE` loads them",
    }
    return "\n".join([printable(facts["file"], LONGEST), *aligned(lines.items())])


def _listed(names: list[str]) -> str:
    return f"{len(names)}: {_some(names)}"


def _numbers(values: list[float]) -> str:
    return _some(f"{value:.6g}" for value in values)


def _some(parts: Iterable[str], separator: str = ", ") -> str:
    shown, more = list(parts), ""
    if len(shown) > MOST_SHOWN:
        more = f" and {len(shown) - MOST_SHOWN} more; --json has all"
    return separator.join(shown[:MOST_SHOWN]) + more


def models(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE|NAME",
            help="A .safetensors file or the name of a bundled model.",
            show_default=False,
        ),
    ] = None,
    backbones: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN",
            help="List backbones by name, for example 'resnet*'; loads timm.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """List families, bundled models and backbones, or show the card of one model."""
    if model is not None and not is_typed(context, "backbones"):
        backbones = None  # the environment does not stand in the way of what is typed
    if model is not None and backbones is not None:
        raise UsageError("both a model and --backbones are given", hint="choose one of them")
    if model == "" or backbones == "":
        raise UsageError("an empty name is given", hint="see `tnet models --help`")
    if backbones is not None:
        result: Overview | Matches | Card = match_backbones(backbones)
    else:
        result = survey() if model is None else read_card(model)
    typer.echo(as_json(result) if json else as_text(result))
    if isinstance(result, Matches) and not json:
        typer.echo(f"{len(result.names)} of {result.total} backbones", err=True)
