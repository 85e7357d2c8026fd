"""The `tnet info` command."""

import math
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray

from tnetcli.cli import options as opt
from tnetcli.cli.progress import show_error
from tnetcli.data.images import find_images
from tnetcli.errors import SomeFailedError, TnetError, UsageError, common_error_class
from tnetcli.geometry import Grid, Size, Window
from tnetcli.models.checkpoint import find_model_file, read_description
from tnetcli.prediction.record import Problem
from tnetcli.readers.base import Reader, ReadOptions
from tnetcli.readers.detect import open_image
from tnetcli.readers.overviews import OverviewReader
from tnetcli.readers.watch import READ_TIMEOUT, ReadingThreads, watching
from tnetcli.text import aligned, counted, format_bytes, printable, redacted
from tnetcli.traversal.config import TraversalConfig, warn_unused
from tnetcli.traversal.policies import build_policy
from tnetcli.traversal.tree import CellScores, Node, traverse

LARGE_BLOCK = 2048 * 2048  # pixels; decoding one for a 224 px view is mostly wasted
MAX_REGIONS = 2000
LONGEST = 10_000  # characters of a line


class Assumptions(NamedTuple):
    """The traversal whose cost is counted; the defaults are what the papers use."""

    config: TraversalConfig = TraversalConfig(levels=3, keep=(2, 1))
    view_size: int = 224
    grid: Grid = Grid(3, 3, 0.5)


def info(
    context: typer.Context,
    images: opt.Images = None,
    manifest: opt.Manifest = None,
    recursive: opt.Recursive = False,
    null: opt.NullSeparated = False,
    json: opt.Json = False,
    model: opt.Model = None,
    levels: opt.Levels = None,
    keep: opt.Keep = None,
    view_size: int | None = typer.Option(
        None, min=8, max=4096, help="Side of a view in pixels.", show_default="as trained"
    ),
    reader: opt.ReaderOption = None,
    bands: opt.Bands = None,
    option: opt.ReaderOptions = None,
    read_timeout: opt.ReadTimeout = READ_TIMEOUT,
) -> None:
    """Show what a reader finds in IMAGES and what a prediction would decode; reads no pixels.

    Without a model, the cost is counted for 3 levels, --keep 2,1 and views of 224 pixels.

    Exits with 0 when all images can be read, 8 when some cannot, 3 when none can.
    """
    options = opt.read_options(bands, option)
    if model is not None and opt.is_typed(context, "view_size"):
        problem = "--model and --view-size are both given"
        raise UsageError(problem, hint="a model has its own view size")
    kept = opt.parse_counts(keep)
    if model is not None:
        described = read_description(find_model_file(model))
        config = described.traversal_config(levels=levels, keep=kept)
        assumed = Assumptions(config, described.view_size, described.grid)
    else:
        usual = Assumptions()
        config = usual.config
        config = config.changed(levels=levels or config.levels, keep=kept or config.keep)
        assumed = usual._replace(config=config, view_size=view_size or usual.view_size)
        if kept is not None:
            warn_unused(config.levels, kept)
    opt.check_null(context, images or [])
    with watching("IMAGES"):
        found = find_images(images or [], manifest=manifest, recursive=recursive, null=null)
    failures: list[TnetError] = []
    with closing(ReadingThreads(1, read_timeout)) as threads:
        for image in found:
            record, text = dict[str, Any](image=redacted(image)), ""
            try:
                work = partial(inspect, image, reader, options, assumed)
                record |= {"status": "ok", **threads.run(image, work)}
                text = _text(record)
            except TnetError as error:
                failures.append(error)
                if len(found) > 1:  # a single one ends the command
                    show_error(error)
                record |= {"status": "failed", "error": asdict(Problem.of(error))}
            if json or record["status"] == "ok":
                opt.print_report(record, text, as_json=json)
    if failures and len(found) == 1:
        raise failures[0]
    if failures:
        all_failed = len(failures) == len(found)
        kind = common_error_class(map(type, failures)) if all_failed else SomeFailedError
        problem = f"{len(failures):,} of {counted(len(found), 'image')} cannot be read"
        raise kind(problem, hint="see the errors above")


def inspect(
    image: str, reader_name: str | None, options: ReadOptions, assumed: Assumptions
) -> dict[str, Any]:
    """Return facts about an image and warnings, as plain values; raise TnetError if it fails."""
    with closing(open_image(image, reader=reader_name, options=options)) as reader:
        layout, first = reader.info, reader.info.levels[0]
        georeference, microns = reader.georeference, reader.microns_per_pixel
        ground = georeference.ground_size(reader.size) if georeference else None
        return {
            "reader": reader.name,
            "width": reader.size.width,
            "height": reader.size.height,
            "gigapixels": reader.size.pixels / 1e9,
            "file_bytes": layout.file_bytes,
            "bands": list(reader.bands),
            "dtype": reader.dtype.name,
            "overviews": [
                {"factor": level.scale_x, "width": level.size.width, "height": level.size.height}
                for level in layout.levels[1:]
            ],
            "tiled": layout.tiled,
            "block": [first.block.width, first.block.height],
            "compression": layout.compression,
            "mask": layout.mask,
            "nodata": None if layout.nodata is None else _json_number(layout.nodata),
            "crs": georeference.crs if georeference else None,
            "transform": list(georeference.transform) if georeference else None,
            "georeference": georeference.source if georeference else None,
            "metres_per_pixel": list(ground) if ground else None,
            "microns_per_pixel": [microns.x, microns.y] if microns else None,
            "microns_source": microns.source if microns else None,
            "offset": list(layout.offset),
            "details": layout.details,
            "prediction": _prediction_cost(reader, assumed),
            "warnings": _warnings(reader),
        }


def _json_number(value: float) -> float | int | str:
    if not math.isfinite(value):
        return str(value)
    return int(value) if value == int(value) and abs(value) < 2**53 else value


def _prediction_cost(reader: Reader, assumed: Assumptions) -> dict[str, Any]:
    """Count what the costliest choice of cells would decode."""
    grid, view = assumed.grid, Size(assumed.view_size, assumed.view_size)
    ones = np.ones(grid.rows * grid.columns)
    read = 0

    def encode(nodes: Sequence[Node]) -> list[CellScores]:
        nonlocal read
        read += len(nodes)
        if read > MAX_REGIONS:
            raise UsageError(
                f"more than {MAX_REGIONS} regions would be read", hint="lower --keep or --levels"
            )
        return [CellScores(_costs(reader, node.region.window, grid, view), ones) for node in nodes]

    config = assumed.config.changed(
        policy="top_k" if assumed.config.policy == "sample" else assumed.config.policy,
        min_size=assumed.config.min_size or assumed.view_size,
        deduplicate=False,  # regions that coincide count each time
        confidence=None,
    )
    found = traverse([Window.whole(reader.size)], encode, grid, config, [build_policy(config)])
    regions = [node.region for node in found.nodes]
    pixels = sum(reader.estimate(region.window, view) for region in regions)
    return {
        "levels": max(region.level for region in regions),
        "view_size": assumed.view_size,
        "windows": len(regions),
        "pixels_decoded": pixels,
        "fraction_decoded": pixels / reader.size.pixels,
    }


def _costs(reader: Reader, window: Window, grid: Grid, view: Size) -> NDArray[np.float64]:
    """Return logits (cells, 1) that prefer the cells that decode the most pixels."""
    decoded = [reader.estimate(window.cell(grid, *cell), view) for cell in grid.cells()]
    logits = np.where(grid.choices().ravel(), np.log(np.maximum(decoded, 1)), -np.inf)
    return logits[:, None]


def _warnings(reader: Reader) -> list[str]:
    layout, first = reader.info, reader.info.levels[0]
    warnings = list(layout.warnings)
    if isinstance(reader, OverviewReader):
        state = "a small copy is cached" if reader.has_copy else "the first view decodes all pixels"
        warnings.append(f"no overviews: {state}; `tnet pyramid {reader.path}` adds them")
    if not layout.tiled and first.size.pixels > LARGE_BLOCK:
        warnings.append(
            f"stored in strips: every view decodes rows of {first.size.width} pixels; "
            "`tnet pyramid -o OUT.tif` rewrites it in tiles"
        )
    if first.block.pixels > LARGE_BLOCK:
        warnings.append(f"large blocks: every view decodes at least {first.block} pixels")
    if reader.name in ("slide", "tiff", "ome_zarr") and reader.microns_per_pixel is None:
        warnings.append("microns per pixel unknown: give `-O mpp=MICRONS`")
    return warnings


def _text(facts: dict[str, Any]) -> str:
    details, (width, height), cost = dict(facts["details"]), facts["block"], facts["prediction"]
    direct = details.pop("fast_levels", None)
    extra = [details.pop(name) for name in ("driver", "vendor") if name in details]
    if direct is not None:
        extra.append(f"{direct} of {len(facts['overviews']) + 1} levels read directly")
    nodata = "" if facts["nodata"] is None else f" {facts['nodata']}"
    microns, source = facts["microns_per_pixel"], facts["microns_source"]
    lines = [
        ("reader", f"{facts['reader']} ({', '.join(extra)})" if extra else facts["reader"]),
        ("size", f"{facts['width']} x {facts['height']} ({facts['gigapixels']:.3g} gigapixels)"),
        ("file", f"{format_bytes(facts['file_bytes'])}, {facts['compression']}"),
        ("bands", f"{len(facts['bands'])} of {facts['dtype']}: {_joined(facts['bands'])}"),
        ("blocks", f"{width} x {height} {'tiles' if facts['tiled'] else 'strips'}"),
        ("overviews", _joined(f"{each['factor']:g}" for each in facts["overviews"]) or "none"),
        ("mask", f"{facts['mask']}{nodata}"),
        ("place", _place(facts)),
        ("resolution", microns and f"{_size(microns)} microns per pixel, from {source}"),
        *((name.replace("_", " "), _detail(value)) for name, value in details.items()),
        (
            "prediction",
            f"{counted(cost['levels'], 'level')}, {counted(cost['windows'], 'region')} of "
            f"{cost['view_size']} px: decodes at most {cost['pixels_decoded'] / 1e6:.2f} million "
            f"pixels, {cost['fraction_decoded']:.3%} of the image",
        ),
        *(("warning", warning) for warning in facts["warnings"]),
    ]
    return "\n".join([printable(facts["image"], LONGEST), *aligned(lines, longest=LONGEST)])


def _place(facts: dict[str, Any]) -> str:
    if facts["transform"] is None:
        return ""
    crs, ground, source = facts["crs"] or "no CRS", facts["metres_per_pixel"], facts["georeference"]
    parts = [crs if len(crs) < 40 else crs.split('"')[1] + " (WKT)"]
    parts += [f"{_size(ground)} m per pixel"] if ground else []
    return _joined(parts + ([] if source == "transform" else [f"from {source}"]))


def _size(pair: Sequence[float]) -> str:
    return f"{pair[0]:.4g} x {pair[1]:.4g}"


def _joined(parts: Iterable[object]) -> str:
    return ", ".join(map(str, parts))


def _detail(value: Any) -> str:
    if isinstance(value, dict):
        value = [f"{name} {each}" for name, each in value.items()]
    return _joined(value) if isinstance(value, list) else str(value)
