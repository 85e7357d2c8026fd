"""Slides and stacks made for tests, and ways to do them harm."""

import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio.shutil
import tifffile
from numpy.typing import NDArray

from tests.images import area_average, write_geotiff

DATA = Path(__file__).parents[2] / "shared" / "data"
TAG_TYPES = {"H": 3, "I": 4}


def real(name: str) -> Path:
    """Return a real file of the shared data; skip the test where it is not there."""
    path = DATA / name
    if not path.exists():
        pytest.skip(f"the real file {name} is not on this machine")
    return path


def copy_of_real(name: str, folder: Path) -> Path:
    """Copy a real file, so that a test may do it harm."""
    return Path(shutil.copy(real(name), folder))


def write_scn(
    path: Path | str,
    array: NDArray[Any],
    factors: Sequence[int] = (2,),
    *,
    slide: tuple[int, int] = (400, 300),
    offset: tuple[int, int] = (64, 48),
    nanometres: int = 500,
    tile: int = 64,
) -> Path:
    """Write (3, height, width) as a Leica scanner would: one area of a larger, empty slide."""
    height, width = array.shape[1:]
    levels = [array, *(area_average(array, factor) for factor in factors)]
    macro = np.full((slide[1] // 4, slide[0] // 4, 3), 200, np.uint8)
    whole = _scn_image([macro.shape[:2]], 0, slide, (0, 0), nanometres)
    area = _scn_image([each.shape[1:] for each in levels], 1, (width, height), offset, nanometres)
    text = (
        '<?xml version="1.0"?>'
        '<scn xmlns="http://www.leica-microsystems.com/scn/2010/10/01" uuid="urn:uuid:0">'
        f'<collection name="c" uuid="urn:uuid:1" sizeX="{slide[0] * nanometres}" '
        f'sizeY="{slide[1] * nanometres}">{whole}{area}</collection></scn>'
    )
    options: dict[str, Any] = {
        "tile": (tile, tile), "compression": "deflate", "photometric": "rgb",
        "metadata": None, "software": False,
    }  # fmt: skip
    with tifffile.TiffWriter(path) as writer:
        writer.write(macro, description=text, **options)
        for level in levels:
            writer.write(level.transpose(1, 2, 0), **options)
    return Path(path)


def _scn_image(
    shapes: Sequence[tuple[int, ...]],
    first: int,
    size: tuple[int, int],
    offset: tuple[int, int],
    nanometres: int,
) -> str:
    levels = "".join(
        f'<dimension sizeX="{width}" sizeY="{height}" r="{number}" ifd="{first + number}"/>'
        for number, (height, width) in enumerate(shapes)
    )
    height, width = shapes[0]
    return (
        '<image name="i" uuid="urn:uuid:2"><creationDate>2020-01-01T00:00:00Z</creationDate>'
        f'<device model="Leica SCN400" version="1"/><pixels sizeX="{width}" sizeY="{height}">'
        f'{levels}</pixels><view sizeX="{size[0] * nanometres}" sizeY="{size[1] * nanometres}" '
        f'offsetX="{offset[0] * nanometres}" offsetY="{offset[1] * nanometres}" spacingZ="0"/>'
        "<scanSettings><objectiveSettings><objective>20</objective></objectiveSettings>"
        "<illuminationSettings><numericalAperture>0.4</numericalAperture>"
        "<illuminationSource>brightfield</illuminationSource></illuminationSettings>"
        "</scanSettings></image>"
    )


def spoil_tile(path: Path, index: int, *, page: int = 0) -> None:
    """Overwrite the stored bytes of one tile with noise."""
    with tifffile.TiffFile(path) as file:
        place = file.pages[page].aspage()
        offset, count = place.dataoffsets[index], place.databytecounts[index]
    garbage = np.random.default_rng(0).integers(0, 255, count, np.uint8).tobytes()
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(garbage)


def forget_tile(path: Path, index: int, *, page: int = 0) -> None:
    """Make one tile of a page look as if it had never been written."""
    with tifffile.TiffFile(path) as file:
        tags = file.pages[page].aspage().tags
        sites = [(tags[name].valueoffset, tags[name].dtype) for name in TILE_TABLES]
        order = file.byteorder
    with path.open("r+b") as file:
        for start, kind in sites:
            code = {3: "H", 4: "I", 16: "Q"}[int(kind)]
            file.seek(start + index * struct.calcsize(code))
            file.write(struct.pack(order + code, 0))


TILE_TABLES = ("TileOffsets", "TileByteCounts")


def truncate(path: Path, share: float) -> Path:
    """Keep only the first part of a file."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    return path


def raw_tiff(path: Path, tags: dict[int, Sequence[int]], *, data: bytes = b"") -> Path:
    """Write a little-endian TIFF of one directory with exactly these tags, `data` at byte 8."""
    directory = 8 + len(data) + len(data) % 2
    extra = directory + 2 + 12 * len(tags) + 4
    entries, outside = b"", b""
    for code, values in sorted(tags.items()):
        packed = struct.pack(f"<{len(values)}I", *values)
        if len(packed) > 4:
            place = struct.pack("<I", extra + len(outside))
            outside += packed
        else:
            place = packed
        entries += struct.pack("<HHI", code, TAG_TYPES["I"], len(values)) + place
    head = struct.pack("<2sHI", b"II", 42, directory) + data + b"\0" * (len(data) % 2)
    path.write_bytes(head + struct.pack("<H", len(tags)) + entries + b"\0\0\0\0" + outside)
    return path


def write_ome_rgb(
    path: Path | str,
    levels: Sequence[NDArray[Any]],
    *,
    tile: int = 64,
    **options: Any,
) -> Path:
    """Write levels of (3, height, width) as one coloured OME-TIFF page, smaller ones in SubIFDs."""
    common: dict[str, Any] = {
        "tile": (tile, tile), "compression": "deflate", "photometric": "rgb",
    }  # fmt: skip
    first, *smaller = (level.transpose(1, 2, 0) for level in levels)
    with tifffile.TiffWriter(path, ome=True) as writer:
        writer.write(first, subifds=len(smaller), metadata={"axes": "YXS"}, **(common | options))
        for level in smaller:
            writer.write(level, subfiletype=1, metadata=None, **(common | options))
    return Path(path)


def write_pages(
    path: Path | str, levels: Sequence[NDArray[Any]], *, bigtiff: bool = False, **options: Any
) -> Path:
    """Write levels of (bands, height, width) as pages that nothing marks as belonging together."""
    common: dict[str, Any] = {"metadata": None, "software": False}
    with tifffile.TiffWriter(path, bigtiff=bigtiff) as writer:
        for level in levels:
            colour = "rgb" if len(level) == 3 else "minisblack"
            writer.write(
                level.transpose(1, 2, 0), planarconfig="contig", photometric=colour,
                **(common | options),
            )  # fmt: skip
    return Path(path)


def zeros_deflated(count: int) -> bytes:
    """Return the deflate stream of `count` zeros, a multiple of a million, in no time."""
    step = 2**20
    packer = zlib.compressobj(9)
    head = packer.compress(b"") + packer.flush(zlib.Z_FULL_FLUSH)
    first = packer.compress(bytes(step)) + packer.flush(zlib.Z_FULL_FLUSH)
    last = zlib.compressobj(9, wbits=-15).flush()
    # The checksum of zeros alone: one, and as many as there are.
    checksum = struct.pack(">I", (count % 65521) << 16 | 1)
    return head + first * (count // step) + last + checksum


def write_zarr(
    path: Path | str, array: NDArray[Any], factors: Sequence[int] = (2, 4), *, chunk: int = 64
) -> Path:
    """Write (bands, height, width) as an OME-Zarr 0.4 folder."""
    import zarr

    group = zarr.open_group(str(path), mode="w", zarr_format=2)
    datasets = []
    for number, factor in enumerate((1, *factors)):
        level = area_average(array, factor) if factor > 1 else array
        group.create_array(str(number), data=level, chunks=(1, chunk, chunk))
        scale = {"type": "scale", "scale": [1.0, 0.5 * factor, 0.5 * factor]}
        datasets.append({"path": str(number), "coordinateTransformations": [scale]})
    axes = [{"name": "c", "type": "channel"}]
    axes += [{"name": name, "type": "space", "unit": "micrometer"} for name in "yx"]
    group.attrs["multiscales"] = [{"version": "0.4", "axes": axes, "datasets": datasets}]
    return Path(path)


def write_zarr_zip(path: Path | str, array: NDArray[Any], factors: Sequence[int] = (2, 4)) -> Path:
    """Write the same as one zip file, uncompressed as zarr asks for."""
    path = Path(path)
    folder = write_zarr(path.with_name(f"{path.name}.folder"), array, factors)
    with zipfile.ZipFile(path, "w") as archive:
        for each in sorted(folder.rglob("*")):
            if each.is_file():
                archive.write(each, each.relative_to(folder))
    shutil.rmtree(folder)
    return path


def write_cog(path: Path | str, array: NDArray[Any], **creation: Any) -> Path:
    """Write (bands, height, width) with GDAL's COG driver: directories first, coarse tiles next."""
    path = Path(path)
    plain = write_geotiff(path.with_name(f"{path.name}.plain"), array)
    options = {"BLOCKSIZE": 128, "COMPRESS": "DEFLATE", "OVERVIEW_RESAMPLING": "AVERAGE"}
    rasterio.shutil.copy(plain, path, driver="COG", **(options | creation))
    plain.unlink()
    return path


class Once:
    """Writes images to a folder, each of them once, for tests that only read them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._written: dict[str, Path] = {}

    def __call__(self, name: str, write: Callable[[Path], Path]) -> Path:
        """Return the path of the image `name`, written by the first who asks."""
        if name not in self._written:
            self._written[name] = write(self._folder / name)
        return self._written[name]
