"""The `tnet info` command."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated, Any, Self

import numpy as np
import typer
from numpy.typing import NDArray

from tnetcli.cli.options import (
    Bands,
    Images,
    Json,
    Manifest,
    NullSeparated,
    ReaderOption,
    ReaderOptions,
    ReadTimeout,
    Recursive,
    is_typed,
    parse_keep,
    read_options,
    refuse_lone_null,
)
from tnetcli.cli.progress import show_error, show_problem
from tnetcli.errors import ImageError, SomeFailedError, TnetError, UsageError, common_error_class
from tnetcli.geometry import Grid, Size, Window
from tnetcli.prediction.record import Problem
from tnetcli.readers.base import Reader, ReadOptions
from tnetcli.readers.detect import open_image
from tnetcli.readers.overviews import OverviewReader
from tnetcli.readers.watch import READ_TIMEOUT, ReadingThreads, watching
from tnetcli.text import aligned, counted, format_bytes, printable, redacted
from tnetcli.traversal.config import TraversalConfig, warn_unused
from tnetcli.traversal.policies import build_policy
from tnetcli.traversal.tree import CellScores, Node, traverse

# A larger block is decoded almost in vain for one 224 px window.
LARGE_BLOCK = 2048 * 2048
MOST_WINDOWS = 2000
MEGA, GIGA = 1e6, 1e9
LONGEST = 10_000  # characters of a line


# What the papers use on large images.
USUAL, USUAL_GRID, VIEW_SIZE = TraversalConfig(levels=3, keep=(2, 1)), Grid(3, 3, 0.5), 224


@dataclass(frozen=True, slots=True)
class Walk:
    """How a prediction would look."""

    config: TraversalConfig = USUAL
    view_size: int = VIEW_SIZE
    grid: Grid = USUAL_GRID

    @classmethod
    def usual(
        cls,
        *,
        levels: int | None = None,
        keep: tuple[int, ...] | None = None,
        view_size: int | None = None,
    ) -> Self:
        """Return how the papers look, or otherwise where that is told."""
        config = USUAL.changed(levels=levels or USUAL.levels, keep=keep or USUAL.keep)
        if keep is not None:
            warn_unused(config.levels, keep)
        return cls(config, view_size or VIEW_SIZE)

    @classmethod
    def of_model(
        cls, model: str, *, levels: int | None = None, keep: tuple[int, ...] | None = None
    ) -> Self:
        """Return how a trained model looks, or deeper, or at other numbers of cells."""
        from tnetcli.models.checkpoint import find_model_file, read_description

        told = read_description(find_model_file(model))
        return cls(told.config(levels=levels, keep=keep), told.view_size, told.grid)

    def costliest(self) -> TraversalConfig:
        """Return the same walk, to the most that it may cost."""
        config, least = self.config, self.config.least_side
        policy = "topk" if config.policy == "sample" else config.policy
        side = self.view_size if least is None else least
        # Windows that coincide count each time.
        return config.changed(policy=policy, least_side=side, once=False, confidence=None)


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found out about one image, or why nothing was."""

    image: str
    facts: dict[str, Any] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    error: TnetError | None = None


def inspect_all(
    images: Sequence[str],
    *,
    reader: str | None,
    options: ReadOptions,
    walk: Walk,
    read_timeout: float,
) -> Iterator[Inspection]:
    """Describe images one after the other; one whose file system does not answer is a failure."""
    with closing(ReadingThreads(1, read_timeout)) as threads:
        for image in images:
            work = partial(inspect, image, reader=reader, options=options, walk=walk)
            try:
                yield threads.run(image, work)
            except ImageError as error:
                yield Inspection(image, error=error)


def inspect(image: str, *, reader: str | None, options: ReadOptions, walk: Walk) -> Inspection:
    """Open `image` and describe it; a problem becomes part of the result."""
    try:
        opened = open_image(image, reader=reader, options=options)
    except TnetError as error:
        return Inspection(image, error=error)
    try:
        return Inspection(image, _facts(opened, walk), tuple(_warnings(opened)))
    except ImageError as error:
        return Inspection(image, error=error)
    finally:
        opened.close()


def _facts(reader: Reader, walk: Walk) -> dict[str, Any]:
    layout, first = reader.layout, reader.layout.levels[0]
    georeference, microns = reader.georeference, reader.microns_per_pixel
    ground = georeference.ground_size(reader.size) if georeference else None
    return {
        "reader": reader.name,
        "width": reader.size.width,
        "height": reader.size.height,
        "gigapixels": reader.size.pixels / GIGA,
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
        "nodata": None if layout.nodata is None else _plain(layout.nodata),
        "crs": georeference.crs if georeference else None,
        "transform": list(georeference.transform) if georeference else None,
        "georeference": georeference.source if georeference else None,
        "metres_per_pixel": list(ground) if ground else None,
        "microns_per_pixel": [microns.x, microns.y] if microns else None,
        "microns_source": microns.source if microns else None,
        "offset": list(layout.offset),
        "details": layout.details,
        "prediction": _prediction(reader, walk),
    }


def _plain(value: float) -> float | int | str:
    """Return a number that JSON can hold, whole where it is whole."""
    if not math.isfinite(value):
        return str(value)
    return int(value) if value == int(value) and abs(value) < 2**53 else value


def _prediction(reader: Reader, walk: Walk) -> dict[str, Any]:
    """Count what the costliest choice of cells would decode, level by level."""
    grid, view = walk.grid, Size(walk.view_size, walk.view_size)
    ones = np.ones(grid.rows * grid.columns)
    read = 0

    def encode(nodes: Sequence[Node]) -> list[CellScores]:
        nonlocal read
        read += len(nodes)
        if read > MOST_WINDOWS:
            raise UsageError(
                f"more than {MOST_WINDOWS} regions would be read", hint="lower --keep or --levels"
            )
        return [CellScores(_costs(reader, node.region.window, grid, view), ones) for node in nodes]

    config = walk.costliest()
    found = traverse([Window.whole(reader.size)], encode, grid, config, [build_policy(config)])
    regions = [node.region for node in found.nodes]
    pixels = sum(reader.decoded(region.window, view) for region in regions)
    return {
        "levels": max(region.level for region in regions),
        "view_size": walk.view_size,
        "windows": len(regions),
        "pixels_decoded": pixels,
        "fraction_decoded": pixels / reader.size.pixels,
    }


def _costs(reader: Reader, window: Window, grid: Grid, view: Size) -> NDArray[np.float64]:
    """Return logits (cells, 1) that prefer the cells that decode the most pixels."""
    decoded = [reader.decoded(window.cell(grid, *cell), view) for cell in grid.cells()]
    logits = np.where(grid.choices().ravel(), np.log(np.maximum(decoded, 1)), -np.inf)
    return logits[:, None]


def _warnings(reader: Reader) -> list[str]:
    layout = reader.layout
    warnings = list(layout.warnings)
    if isinstance(reader, OverviewReader):
        state = "a small copy is in the cache" if reader.has_copy else "the first view decodes all"
        warnings.append(f"no overviews: {state}; `tnet pyramid {reader.path}` adds them")
    block = layout.levels[0].block
    large = layout.levels[0].size.pixels > LARGE_BLOCK
    if not layout.tiled and large:
        warnings.append(f"stored in strips: every window decodes rows {layout.levels[0].size.width}"
                        " pixels wide; `tnet pyramid -o OUT.tif` rewrites it in tiles")  # fmt: skip
    if block.pixels > LARGE_BLOCK:
        warnings.append(f"large blocks: {block} pixels are decoded for any window")
    if reader.name in ("slide", "tiff", "ome_zarr") and reader.microns_per_pixel is None:
        warnings.append("microns per pixel unknown: give `-O mpp=MICRONS`")
    return warnings


def as_json(result: Inspection) -> str:
    """Return one line of JSON."""
    record: dict[str, Any] = {"image": redacted(result.image)}
    if result.error is None:
        record |= {"status": "ok", **result.facts, "warnings": list(result.warnings)}
    else:
        record |= {"status": "failed", "error": asdict(Problem.of(result.error))}
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def as_text(result: Inspection) -> str:
    """Return a few aligned lines to read."""
    facts = result.facts
    lines = [
        ("reader", _reader_line(facts)),
        ("size", f"{facts['width']} x {facts['height']} ({facts['gigapixels']:.3g} gigapixels)"),
        ("file", f"{format_bytes(facts['file_bytes'])}, {facts['compression']}"),
        ("bands", f"{len(facts['bands'])} of {facts['dtype']}: {', '.join(facts['bands'])}"),
        ("blocks", f"{facts['block'][0]} x {facts['block'][1]} "
                   f"{'tiles' if facts['tiled'] else 'strips'}"),
        ("overviews", ", ".join(f"{each['factor']:g}" for each in facts["overviews"]) or "none"),
        ("mask", facts["mask"] + _nodata_text(facts)),
        ("place", _place_line(facts)),
        ("resolution", _resolution_line(facts)),
        *[(name.replace("_", " "), _detail(value)) for name, value in facts["details"].items()
          if name not in ("driver", "vendor", "fast_levels")],
        ("prediction", _prediction_line(facts["prediction"])),
        *[("warning", warning) for warning in result.warnings],
    ]  # fmt: skip
    image = printable(redacted(result.image), LONGEST)
    return "\n".join([image, *aligned(lines, longest=LONGEST)])


def _reader_line(facts: dict[str, Any]) -> str:
    details = facts["details"]
    maker = details.get("driver") or details.get("vendor") or ""
    fast = details.get("fast_levels")
    levels = len(facts["overviews"]) + 1
    parts = [maker, f"{fast} of {levels} levels read directly" if fast is not None else ""]
    extra = ", ".join(part for part in parts if part)
    return f"{facts['reader']} ({extra})" if extra else str(facts["reader"])


def _nodata_text(facts: dict[str, Any]) -> str:
    return "" if facts["nodata"] is None else f" {facts['nodata']}"


def _place_line(facts: dict[str, Any]) -> str:
    if facts["transform"] is None:
        return ""
    crs = facts["crs"] or "no CRS"
    name = crs if len(crs) < 40 else crs.split('"')[1] + " (WKT)"
    ground = facts["metres_per_pixel"]
    size = f", {ground[0]:.4g} x {ground[1]:.4g} m per pixel" if ground else ""
    how = "" if facts["georeference"] == "transform" else f", from {facts['georeference']}"
    return f"{name}{size}{how}"


def _resolution_line(facts: dict[str, Any]) -> str:
    if facts["microns_per_pixel"] is None:
        return ""
    x, y = facts["microns_per_pixel"]
    return f"{x:.4g} x {y:.4g} microns per pixel, from {facts['microns_source']}"


def _detail(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return ", ".join(str(each) for each in value) if isinstance(value, list) else str(value)


def _prediction_line(prediction: dict[str, Any]) -> str:
    return (
        f"{counted(prediction['levels'], 'level')}, {counted(prediction['windows'], 'window')} of "
        f"{prediction['view_size']} px: at most {prediction['pixels_decoded'] / MEGA:.2f} million "
        f"pixels decoded, {prediction['fraction_decoded']:.3%} of the image"
    )


def failure(failed: int, total: int) -> str:
    """Return the closing line of a batch with failures."""
    return f"{failed:,} of {counted(total, 'image')} cannot be read"


def outcome(failures: Sequence[TnetError], total: int) -> int:
    """Return the exit code of a batch."""
    if not failures:
        return 0
    if len(failures) < total:
        return SomeFailedError.exit_code
    return common_error_class(map(type, failures)).exit_code


def info(
    context: typer.Context,
    images: Images = None,
    manifest: Manifest = None,
    recursive: Recursive = False,
    null: NullSeparated = False,
    json: Json = False,
    model: Annotated[
        str | None,
        typer.Option(
            envvar="TNET_MODEL",
            metavar="NAME|FILE",
            help="Count what this model would decode: with its levels, cells and views.",
        ),
    ] = None,
    levels: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=12,
            help="Levels to count with.",
            show_default="3, or the model's",
        ),
    ] = None,
    keep: Annotated[
        str | None,
        typer.Option(
            help="Cells followed per window when leaving each level.",
            show_default="2,1, or the model's",
        ),
    ] = None,
    view_size: Annotated[
        int | None,
        typer.Option(
            min=8,
            max=4096,
            help="Pixels a side of a view.",
            show_default="224, or the model's",
        ),
    ] = None,
    reader: ReaderOption = None,
    bands: Bands = None,
    option: ReaderOptions = None,
    read_timeout: ReadTimeout = READ_TIMEOUT,
) -> None:
    """Show what a reader sees in IMAGES and what a prediction would decode; reads no pixels.

    Exits with 0 when all images can be read, 8 when some cannot, 3 when none can.
    """
    from tnetcli.data.images import find_images

    options = read_options(bands, option)
    walk = _walk(context, model, levels, keep, view_size)
    refuse_lone_null(context, images)
    with watching("IMAGES"):
        found = find_images(images or [], manifest=manifest, recursive=recursive, null=null)
    failures = []
    for result in inspect_all(
        found, reader=reader, options=options, walk=walk, read_timeout=read_timeout
    ):
        if result.error is not None:
            failures.append(result.error)
            show_error(result.error)
        if json:
            typer.echo(as_json(result))
        elif result.error is None:
            typer.echo(as_text(result))
    if len(found) > 1 and failures:
        show_problem(failure(len(failures), len(found)), "the lines above say why")
    raise typer.Exit(outcome(failures, len(found)))


def _walk(
    context: typer.Context,
    model: str | None,
    levels: int | None,
    keep: str | None,
    view_size: int | None,
) -> "Walk":

    counts = None if keep is None else parse_keep(keep)
    if model is not None:
        if is_typed(context, "view_size"):
            raise UsageError(
                "--view-size is for counting without --model",
                hint="a model has a view size of its own: leave one of them out",
            )
        return Walk.of_model(model, levels=levels, keep=counts)
    return Walk.usual(levels=levels, keep=counts, view_size=view_size)
