"""The `tnet pyramid` command."""

import multiprocessing
import os
import shutil
from collections.abc import Callable
from enum import StrEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import rasterio
import rasterio.shutil
import typer
from rasterio.enums import ColorInterp, MaskFlags, Resampling

from tnetcli.cli.options import Overwrite, Quiet
from tnetcli.errors import ImageError, OutputError, UsageError
from tnetcli.files import is_remote, temporary_folder
from tnetcli.readers.detect import detect
from tnetcli.readers.gdal import GDAL_FAILURES, confined, open_checked, open_dataset
from tnetcli.readers.handles import check_unchanged, file_stamp
from tnetcli.readers.tiff_pages import has_unwritten_blocks
from tnetcli.readers.watch import watching
from tnetcli.text import format_bytes, one_line, reason

SMALLEST = 256
POLL_SECONDS = 0.2
CACHE_BYTES = 2**27
# How many times the size of the source GDAL reads, seen on JPEG: a COG reads its own temporary
# overviews again and again. Only the progress bar depends on it.
PASSES = {"ovr": 1.3, "internal": 1.3, "cog": 7.0}


def build_pyramid(
    image: str,
    *,
    output: str | None = None,
    in_place: bool = False,
    resampling: str | None = None,
    overwrite: bool = False,
    advance: Callable[[float], None] = lambda fraction: None,
) -> str:
    """Build overviews beside `image`, inside it, or in a new COG; return the file written.

    The result appears whole or not at all: it is made in a folder of its own and moved.
    """
    if output is not None and in_place:
        raise UsageError("both -o and --in-place are given", hint="choose one of them")
    kind = "internal" if in_place else "ovr" if output is None else "cog"
    # Overviews put into a link belong into the file it leads to.
    target = (
        output if output is not None else os.path.realpath(image) if in_place else f"{image}.ovr"
    )
    with watching(image):
        _check(image, target, kind, overwrite)
    before = file_stamp(image)
    try:
        with temporary_folder(target, hint="choose another place with -o") as folder:
            made = folder / os.path.basename(target if kind == "cog" else image)
            _prepare(image, made, kind)
            _run(image, str(made), kind, resampling, advance)
            result = f"{made}.ovr" if kind == "ovr" else str(made)
            if kind != "ovr":
                _sync(result)
            check_unchanged(image, before)
            os.replace(result, target)
    except OSError as error:
        raise OutputError(
            f"cannot write `{target}`: {reason(error)}", hint="is there space left?"
        ) from error
    advance(1.0)
    return target


def _check(image: str, target: str, kind: str, overwrite: bool) -> None:
    if is_remote(image):
        raise ImageError(f"`{image}` is not a local file", hint="download it first")
    reader = detect(image)
    if kind == "cog" and os.path.exists(target) and os.path.samefile(target, image):
        raise OutputError("-o names the image itself", hint="use --in-place, or another name")
    if kind == "cog" and (not target or os.path.isdir(target)):
        raise OutputError(f"-o is not a file: `{target}`", hint="give a name such as OUT.tif")
    if kind != "internal" and os.path.exists(target) and not overwrite:
        raise OutputError(f"`{target}` exists", hint="use --overwrite to replace it")
    try:
        with confined(image), open_checked(image) as dataset:
            stored, driver = dataset.overviews(1) if dataset.count else [], dataset.driver
            side = max(dataset.width, dataset.height)
    except GDAL_FAILURES as error:
        raise ImageError(
            f"GDAL cannot read `{image}` (reader: {reader}): {one_line(error)}",
            hint="slides and OME files carry overviews of their own; see `tnet info`",
        ) from error
    if driver == "GTiff" and has_unwritten_blocks(image):
        raise ImageError(
            f"blocks of `{image}` were never written: overviews would fill them with zeros",
            hint="declare what they are with `gdal_edit.py -a_nodata 0 IMAGE`, then try again",
        )
    if stored and not overwrite and kind != "cog":
        factors = ", ".join(map(str, stored))
        raise OutputError(
            f"`{image}` has overviews already: {factors}", hint="use --overwrite to make them anew"
        )
    if kind != "cog" and driver != "GTiff":
        raise UsageError(f"{driver} files cannot hold overviews", hint="use -o OUT.tif")
    if kind != "cog" and side <= SMALLEST:
        raise UsageError(f"`{image}` is too small to need overviews", hint="use it as it is")


def _prepare(image: str, made: Path, kind: str) -> None:
    """Lay out what GDAL works on, so that the image itself is never touched half-way."""
    source = os.path.abspath(image)
    if kind == "internal":
        needed, free = os.path.getsize(source), shutil.disk_usage(made.parent).free
        if needed > free:
            raise OutputError(
                f"--in-place needs {format_bytes(needed)} beside the image, "
                f"{format_bytes(free)} are free",
                hint="free some space, or leave --in-place away",
            )
        shutil.copy2(source, made)
    elif kind == "ovr":
        # GDAL writes IMAGE.ovr next to what it opened: here, next to a link.
        os.symlink(source, made)
    if kind != "cog":
        for tail in (".msk", ".aux.xml"):
            if os.path.exists(source + tail):
                shutil.copy2(source + tail, f"{made}{tail}")  # GDAL may write to them, too


def _run(
    image: str, made: str, kind: str, resampling: str | None, advance: Callable[[float], None]
) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    arguments = (theirs, image, made, kind, resampling)
    worker = context.Process(target=_work, args=arguments, daemon=True)
    worker.start()
    theirs.close()
    expected = PASSES[kind] * os.path.getsize(image)
    try:
        while worker.is_alive():
            worker.join(POLL_SECONDS)
            advance(min(_bytes_read(worker.pid) / expected, 0.99))
    finally:
        worker.kill()  # after Ctrl-C; nothing to kill otherwise
        worker.join()
    try:
        raise ours.recv()
    except EOFError:
        pass  # nothing to complain about, or no breath left to do so
    if worker.exitcode != 0:
        raise OutputError(
            f"GDAL died while making overviews of `{image}` (exit code {worker.exitcode})",
            hint="is there enough memory? the image itself is unchanged",
        )


def _bytes_read(process: int | None) -> int:
    """Return what the worker has read so far; 0 where the system does not tell."""
    try:
        with open(f"/proc/{process}/io") as counters:
            return int(counters.readline().split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def _work(answer: Connection, image: str, made: str, kind: str, resampling: str | None) -> None:
    try:
        with confined(image):
            _make(image, made, kind, resampling)
    except GDAL_FAILURES as error:
        problem = f"GDAL cannot make overviews of `{image}`: {one_line(error)}"
        answer.send(OutputError(problem, hint="check the image with `tnet info`, and the disk"))


def _make(image: str, made: str, kind: str, resampling: str | None) -> None:
    with open_dataset(image) as dataset:
        method = resampling or _default_resampling(dataset)
        compression = dataset.tags(ns="IMAGE_STRUCTURE").get("COMPRESSION", "")
        has_mask = MaskFlags.per_dataset in dataset.mask_flag_enums[0]
        photometric = dataset.photometric
        size = max(dataset.width, dataset.height)
    lossy = "JPEG" in compression.upper()
    with confined(image), rasterio.Env(GDAL_CACHEMAX=CACHE_BYTES, GDAL_TIFF_INTERNAL_MASK=True):
        if kind == "cog":
            with open_dataset(image) as dataset:
                rasterio.shutil.copy(
                    dataset, made, driver="COG", BLOCKSIZE=512, BIGTIFF="IF_SAFER",
                    COMPRESS="JPEG" if lossy else "DEFLATE",
                    PREDICTOR="NO" if lossy else "STANDARD",
                    OVERVIEW_RESAMPLING=method.upper(), OVERVIEWS="IGNORE_EXISTING",
                    NUM_THREADS="ALL_CPUS",
                )  # fmt: skip
        else:
            with (
                rasterio.Env(**_overview_settings(kind, lossy, photometric, has_mask)),
                rasterio.open(made, "r+", driver="GTiff", sharing=False) as dataset,
            ):
                dataset.build_overviews(_factors(size), Resampling[method])


def _overview_settings(kind: str, lossy: bool, photometric: Any, has_mask: bool) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "GDAL_TIFF_OVR_BLOCKSIZE": 256,
        "BIGTIFF_OVERVIEW": "IF_SAFER",
        "COMPRESS_OVERVIEW": "JPEG" if lossy else "DEFLATE",
        "INTERLEAVE_OVERVIEW": "PIXEL",
    }
    if lossy and photometric is not None and "ycbcr" in photometric.name.lower():
        settings["PHOTOMETRIC_OVERVIEW"] = "YCBCR"
    if kind == "ovr":
        settings["TIFF_USE_OVR"] = True
        if has_mask:
            # Told how to compress an external file, GDAL 3.10 averages masked pixels in.
            del settings["COMPRESS_OVERVIEW"], settings["INTERLEAVE_OVERVIEW"]
            settings.pop("PHOTOMETRIC_OVERVIEW", None)
    return settings


def _default_resampling(dataset: Any) -> str:
    # The mean of two colour numbers is a third colour.
    return "nearest" if ColorInterp.palette in dataset.colorinterp else "average"


def _factors(side: int) -> list[int]:
    factors = [2]
    while side / factors[-1] > SMALLEST:
        factors.append(factors[-1] * 2)
    return factors


def _sync(path: str) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


class ResamplingName(StrEnum):
    """How coarser pixels are made of finer ones."""

    average = "average"
    nearest = "nearest"
    mode = "mode"


def pyramid(
    image: Annotated[
        Path,
        typer.Argument(help="An image that GDAL reads.", show_default=False, metavar="IMAGE"),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Write a Cloud Optimized GeoTIFF here instead.",
            show_default="IMAGE.ovr",
        ),
    ] = None,
    in_place: Annotated[
        bool,
        typer.Option("--in-place", help="Put the overviews into the TIFF itself."),
    ] = False,
    resampling: Annotated[
        ResamplingName | None,
        typer.Option(
            help="How coarser pixels are made of finer ones.",
            show_default="average, or nearest for an image with a palette",
        ),
    ] = None,
    overwrite: Overwrite = False,
    quiet: Quiet = False,
) -> None:
    """Build overviews for IMAGE with GDAL, in bounded memory."""
    from tnetcli.cli.progress import progress_bar

    with progress_bar(f"overviews of {image.name}", quiet=quiet) as advance:
        written = build_pyramid(
            str(image),
            output=None if output is None else str(output),
            in_place=in_place,
            resampling=None if resampling is None else resampling.value,
            overwrite=overwrite,
            advance=advance,
        )
    typer.echo(written)
