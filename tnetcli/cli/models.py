"""The `tnet models` command."""

import fnmatch
import math
import os
from collections.abc import Iterable
from typing import Any

import typer

from tnetcli.cli.options import Json, is_typed, print_report
from tnetcli.errors import ModelError, UsageError
from tnetcli.models.checkpoint import (
    SCHEMA,
    Description,
    bundled_models,
    describe,
    find_model_file,
    open_tensor_file,
    read_description,
)
from tnetcli.models.registry import BACKBONES, FAMILIES
from tnetcli.text import aligned, did_you_mean, format_bytes, join_some, printable

MOST_SHOWN = 20
LONGEST = 500  # characters of a line
STEP_COUNTER = "num_batches_tracked"  # of batch norm: not a parameter
CROPS = {
    "none": "",
    "box": "trained on boxes of images: --crop box",
    "context": "trained on boxes of images and their surroundings: --crop context",
}


def models(
    context: typer.Context,
    model: str | None = typer.Argument(
        None,
        metavar="FILE|NAME",
        help="A .safetensors file or the name of a bundled model.",
        show_default=False,
    ),
    backbones: str | None = typer.Option(
        None, metavar="PATTERN", help="List backbones by name, for example 'resnet*'; imports timm."
    ),
    json: Json = False,
) -> None:
    """List families, bundled models and backbones, or describe one model."""
    if model is not None and not is_typed(context, "backbones"):
        backbones = None  # set in the environment: the command line wins
    if model is not None and backbones is not None:
        raise UsageError("a model and --backbones are both given", hint="give one of them")
    if model == "" or backbones == "":
        raise UsageError("the name is empty", hint="see `tnet models --help`")
    if backbones is not None:
        matches = match_backbones(backbones)
        print_report(matches, "\n".join(matches["backbones"]), as_json=json)
        if not json:
            typer.echo(f"{len(matches['backbones'])} of {matches['total']} backbones", err=True)
    elif model is None:
        _list_models(as_json=json)
    else:
        facts, description = read_card(model)
        print_report(facts, _card_text(facts, description), as_json=json)


def _list_models(*, as_json: bool) -> None:
    """Print families, bundled models and tested backbones; imports no torch."""
    summaries = {name: FAMILIES.load(name).summary for name in FAMILIES}
    bundled = {name: read_description(path) for name, path in bundled_models().items()}
    found = {
        "families": {name: text.replace("\n", " ") for name, text in summaries.items()},
        "bundled": {
            name: each.summary or ", ".join(each.classes) for name, each in bundled.items()
        },
        "backbones": dict(BACKBONES),
    }
    lines = [
        "families",
        *aligned((name, text.split("\n")) for name, text in summaries.items()),
        "bundled models",
        *aligned((found["bundled"] or {"none": "no model is installed: give a file"}).items()),
        "tested backbones (timm has many more: --backbones PATTERN)",
        *aligned(BACKBONES.items()),
    ]
    print_report(found, "\n".join(lines), as_json=as_json)


def match_backbones(pattern: str) -> dict[str, Any]:
    """Return the names of timm's and our own backbones that match a glob."""
    import timm  # takes seconds: it imports torch

    known = sorted({*timm.list_models(), *BACKBONES})
    names = fnmatch.filter(known, pattern)
    if not names:
        wider = f"*{pattern}*"
        likely = [wider] if fnmatch.filter(known, wider) else known
        hint = did_you_mean(pattern, likely, "`*` matches any characters: 'resnet*'")
        raise ModelError(f"no backbone matches: `{pattern}`", hint=hint)
    return {"pattern": pattern, "backbones": names, "total": len(known)}


def read_card(name_or_path: str) -> tuple[dict[str, Any], Description]:
    """Return the facts about a model file and its description; loads no torch and no tensor."""
    path = find_model_file(name_or_path)
    with open_tensor_file(path) as file:
        description, size, sha256 = describe(file), file.size, file.sha256
        shapes = [each for name, each in file.shapes.items() if not name.endswith(STEP_COUNTER)]
    described, grid = description.model_dump(mode="json"), description.grid
    bundled_name = next((name for name, each in bundled_models().items() if each == path), None)
    facts = {
        "schema": SCHEMA,
        "file": os.fsencode(path).decode(errors="replace"),
        "file_bytes": size,
        "sha256": sha256,
        "name": described.pop("name") or bundled_name,
        "summary": described.pop("summary"),
        "family": described.pop("family"),
        "backbone": description.model_settings.backbone,
        "parameters": sum(math.prod(shape) for shape in shapes),
        "view_size": description.view_size,
        "grid": {"rows": grid.rows, "columns": grid.columns, "cell_fraction": grid.cell_fraction},
        **described,
    }
    return facts, description


def _card_text(facts: dict[str, Any], description: Description) -> str:
    scale, traversal = facts["normalisation"], facts["traversal"]
    keep = f", keep {_some(map(str, traversal['keep']), ',')}" if traversal["levels"] > 1 else ""
    metrics = (f"{name} {value:.6g}" for name, value in facts["metrics"].items())
    lines: dict[str, str | list[str]] = {
        "name": facts["name"] or "",
        "summary": facts["summary"] or "",
        "family": facts["family"],
        "  is": FAMILIES.load(facts["family"]).summary.split("\n"),
        "backbone": facts["backbone"],
        "parameters": f"{facts['parameters']}, running statistics included",
        "view size": f"{facts['view_size']} x {facts['view_size']} pixels",
        "grid": description.grid.describe(),
        "levels": f"{traversal['levels']}{keep}",
        "glimpses": str(facts["config"].get("glimpses", "")),
        "fit": traversal["fit"],
        "crop": CROPS[description.crop],
        "classes": f"{len(facts['classes'])}: {_some(facts['classes'])}",
        "bands": f"{len(facts['bands'])}: {_some(facts['bands'])}",
        "normalisation": f"of {scale['dtype']}",
        "  mean": _some(f"{value:.6g}" for value in scale["mean"]),
        "  std": _some(f"{value:.6g}" for value in scale["std"]),
        "pixel size": "" if facts["pixel_size"] is None else f"{facts['pixel_size']:g} metres",
        "metrics": _some(metrics) or "none",
        "data licence": facts["data_licence"] or "not stated",
        "made with": f"tnet {facts['tnet']}",
        "file": f"{format_bytes(facts['file_bytes'])} of {facts['weights']}",
        "sha256": facts["sha256"],
        "tensors": "not checked: `tnet profile --model FILE` loads them",
    }
    return "\n".join([printable(facts["file"], LONGEST), *aligned(lines.items())])


def _some(parts: Iterable[str], separator: str = ", ") -> str:
    shown = list(parts)
    more = "; --json shows all" if len(shown) > MOST_SHOWN else ""
    return join_some(shown, MOST_SHOWN, separator) + more
