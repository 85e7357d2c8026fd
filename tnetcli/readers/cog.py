"""Write overviews and cloud-optimised GeoTIFFs (COGs) with GDAL."""

import multiprocessing
import os
import shutil
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import rasterio
import rasterio.shutil
import tifffile
from rasterio.enums import ColorInterp, MaskFlags, Resampling

from tnetcli.errors import ImageError, OutputError, UsageError
from tnetcli.files import is_remote, temporary_folder
from tnetcli.readers.detect import detect
from tnetcli.readers.gdal import GDAL_FAILURES, confined, open_checked, open_dataset
from tnetcli.readers.pyramid import check_unchanged, file_stamp
from tnetcli.readers.tiff_files import open_tiff
from tnetcli.readers.watch import watching
from tnetcli.text import one_line, reason

Kind = Literal["ovr", "internal", "cog"]
SMALLEST_OVERVIEW = 256  # pixels along the longer side, about
BLOCK = 512  # pixels a side of a COG's tiles
POLL_SECONDS = 0.2
CACHE_BYTES = 2**27
# Bytes that GDAL reads per byte of the source, measured on JPEG; for the progress bar only.
READ_FACTOR: dict[Kind, float] = {"ovr": 1.3, "internal": 1.3, "cog": 7.0}


def build_overviews(
    image: str,
    *,
    output: str | None = None,
    in_place: bool = False,
    resampling: str | None = None,
    overwrite: bool = False,
    advance: Callable[[float], None] = lambda fraction: None,
) -> str:
    """Write overviews beside `image`, into it, or with it into a new COG; return the file.

    The result appears complete or not at all. GDAL works in a process of its own: a call cannot
    be interrupted, and its memory is released at the end.
    """
    if output is not None and in_place:
        raise UsageError("-o and --in-place are both given", hint="give one of them")
    kind: Kind = "internal" if in_place else "ovr" if output is None else "cog"
    # With --in-place, overviews of a link belong into the file that it points to.
    beside = os.path.realpath(image) if in_place else f"{image}.ovr"
    target = beside if output is None else output
    with watching(image):
        _check(image, target, kind, overwrite)
    before = file_stamp(image)
    try:
        with temporary_folder(target, hint="choose another place with -o") as folder:
            made = folder / os.path.basename(target if kind == "cog" else image)
            _prepare(image, made, kind)
            _run(image, str(made), kind, resampling, advance)
            result = f"{made}.ovr" if kind == "ovr" else str(made)
            with open(result, "rb") as file:
                os.fsync(file.fileno())
            check_unchanged(image, before)
            os.replace(result, target)
    except OSError as error:
        raise OutputError(
            f"cannot write `{target}`: {reason(error)}", hint="check the free disk space"
        ) from error
    advance(1.0)
    return target


def copy_as_cog(
    source: str, target: str, *, resampling: str = "average", lossy: bool = False
) -> None:
    """Copy a dataset into a COG, in this process; raise GDAL's errors or OSError."""
    with open_dataset(source) as dataset:
        rasterio.shutil.copy(
            dataset, target, driver="COG", BLOCKSIZE=BLOCK, BIGTIFF="IF_SAFER",
            COMPRESS="JPEG" if lossy else "DEFLATE", PREDICTOR="NO" if lossy else "STANDARD",
            OVERVIEW_RESAMPLING=resampling.upper(), OVERVIEWS="IGNORE_EXISTING",
            NUM_THREADS="ALL_CPUS",
        )  # fmt: skip
    with tifffile.TiffFile(target) as file:
        ends = [
            start + count
            for page in file.pages
            for start, count in zip(page.dataoffsets, page.databytecounts, strict=True)
        ]
    if max(ends) > os.path.getsize(target):  # GDAL does not report a failed write at the end
        raise OSError("the file is truncated")


def _check(image: str, target: str, kind: Kind, overwrite: bool) -> None:
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
            hint="slides and OME files have their own overviews; see `tnet info`",
        ) from error
    if driver == "GTiff" and _has_unwritten_blocks(image):
        raise ImageError(
            f"`{image}` has blocks that were never written; overviews would show them as zeros",
            hint="declare them with `gdal_edit.py -a_nodata 0 IMAGE`, then try again",
        )
    if kind == "cog":
        return
    if stored and not overwrite:
        factors = ", ".join(map(str, stored))
        raise OutputError(
            f"`{image}` already has overviews: {factors}", hint="use --overwrite to replace them"
        )
    if driver != "GTiff":
        raise UsageError(f"{driver} files cannot hold overviews", hint="use -o OUT.tif")
    if side <= SMALLEST_OVERVIEW:
        raise UsageError(f"`{image}` is too small to need overviews", hint="use it as it is")


def _has_unwritten_blocks(path: str) -> bool:
    """Return True if a TIFF has missing blocks, but neither nodata nor a mask."""
    with open_tiff(path) as file:
        page = file.pages.first
        known = 42113 in page.tags or any(int(p.aspage().subfiletype) & 4 for p in file.pages)
        return not known and not all(page.databytecounts)


def _prepare(image: str, made: Path, kind: Kind) -> None:
    """Give GDAL a copy or a link to work on, so that the image is never half written."""
    source = os.path.abspath(image)
    if kind == "internal":
        shutil.copy2(source, made)
    elif kind == "ovr":
        os.symlink(source, made)  # GDAL writes the .ovr beside the path that it opened
    if kind != "cog":
        for suffix in (".msk", ".aux.xml"):
            if os.path.exists(source + suffix):
                shutil.copy2(source + suffix, f"{made}{suffix}")  # GDAL may write to them


def _run(
    image: str,
    made: str,
    kind: Kind,
    resampling: str | None,
    advance: Callable[[float], None],
) -> None:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    arguments = (theirs, image, made, kind, resampling)
    worker = context.Process(target=_work, args=arguments, daemon=True)
    worker.start()
    theirs.close()
    expected = READ_FACTOR[kind] * os.path.getsize(image)
    try:
        while worker.is_alive():
            worker.join(POLL_SECONDS)
            advance(min(_bytes_read(worker.pid) / expected, 0.99))
    finally:
        worker.kill()  # after Ctrl-C
        worker.join()
    try:
        raise ours.recv()
    except EOFError:  # no error, or the process died
        pass
    if worker.exitcode != 0:
        raise OutputError(
            f"GDAL died while making overviews of `{image}` (exit code {worker.exitcode})",
            hint="the image is unchanged; give the job more memory",
        )


def _bytes_read(process: int | None) -> int:
    try:
        with open(f"/proc/{process}/io") as counters:
            return int(counters.readline().split()[1])
    except (OSError, IndexError, ValueError):  # gone, or not Linux
        return 0


def _work(answer: Connection, image: str, made: str, kind: Kind, resampling: str | None) -> None:
    try:
        with confined(image), rasterio.Env(GDAL_CACHEMAX=CACHE_BYTES, GDAL_TIFF_INTERNAL_MASK=True):
            _write(image, made, kind, resampling)
    except (*GDAL_FAILURES, OSError) as error:
        problem = f"GDAL cannot make overviews of `{image}`: {one_line(error)}"
        answer.send(OutputError(problem, hint="check `tnet info IMAGE` and the free disk space"))


def _write(image: str, made: str, kind: Kind, resampling: str | None) -> None:
    with open_dataset(image) as dataset:
        # The mean of two palette indices is a third colour.
        has_palette = ColorInterp.palette in dataset.colorinterp
        method = resampling or ("nearest" if has_palette else "average")
        compression = dataset.tags(ns="IMAGE_STRUCTURE").get("COMPRESSION", "")
        has_mask = MaskFlags.per_dataset in dataset.mask_flag_enums[0]
        photometric = dataset.photometric
        side = max(dataset.width, dataset.height)
    lossy = "JPEG" in compression.upper()
    if kind == "cog":
        copy_as_cog(image, made, resampling=method, lossy=lossy)
        return
    factors = [2]
    while side / factors[-1] > SMALLEST_OVERVIEW:
        factors.append(factors[-1] * 2)
    settings: dict[str, Any] = {"GDAL_TIFF_OVR_BLOCKSIZE": 256, "BIGTIFF_OVERVIEW": "IF_SAFER"}
    # GDAL 3.10 averages masked pixels into external overviews if their compression is set.
    if kind == "internal" or not has_mask:
        settings["COMPRESS_OVERVIEW"] = "JPEG" if lossy else "DEFLATE"
        settings["INTERLEAVE_OVERVIEW"] = "PIXEL"
        if lossy and photometric is not None and "ycbcr" in photometric.name.lower():
            settings["PHOTOMETRIC_OVERVIEW"] = "YCBCR"
    if kind == "ovr":
        settings["TIFF_USE_OVR"] = True
    with (
        rasterio.Env(**settings),
        rasterio.open(made, "r+", driver="GTiff", sharing=False) as dataset,
    ):
        dataset.build_overviews(factors, Resampling[method])
