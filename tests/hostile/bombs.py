"""Small images that ask for all memory or for hours: S5, S6, S9, S10, S17."""

import bz2
import gzip
import json
import lzma
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import imagecodecs
import numcodecs
import numpy as np
import simplejpeg
import tifffile

from tests.hostile.case import Case, Place, image, pixels, step
from tests.slides import zeros_deflated

GIGABYTES = 3 * 2**30  # of zeros that a chunk decodes to
SIDE = 256
TILE = 64
AXES = [{"name": "c", "type": "channel"}] + [
    {"name": name, "type": "space", "unit": "micrometer"} for name in "yx"
]
MULTISCALE = {
    "version": "0.4",
    "axes": AXES,
    "datasets": [
        {"path": "0", "coordinateTransformations": [{"type": "scale", "scale": [1, 1, 1]}]}
    ],
}
Files = dict[str, bytes]


def _repeated(compress: Callable[[bytes], bytes], step: int) -> bytes:
    """Compress many zeros: a file may be several streams, one after another."""
    return compress(bytes(step)) * (GIGABYTES // step)


def _zstd() -> bytes:
    """Return one frame whose blocks say how often a zero is repeated."""
    step, last = 2**17, 1
    blocks = [(step << 3 | 1 << 1).to_bytes(3, "little") + b"\0"] * (GIGABYTES // step)
    blocks[-1] = (step << 3 | 1 << 1 | last).to_bytes(3, "little") + b"\0"
    return b"\x28\xb5\x2f\xfd\xc0\x50" + struct.pack("<Q", GIGABYTES) + b"".join(blocks)


def _blosc() -> bytes:
    """Return a chunk of 31 blocks of 64 MiB that are all the same bytes."""
    step, count = 2**26, 31
    packed = numcodecs.Blosc("zstd", 9, numcodecs.Blosc.NOSHUFFLE, step).encode(bytes(step))
    head, block = packed[:4], packed[20:]
    start = 16 + 4 * count
    sizes = struct.pack("<III", step * count, step, start + len(block))
    return head + sizes + struct.pack("<I", start) * count + block


MADE: dict[str, Callable[[], bytes]] = {
    "zlib": lambda: zeros_deflated(GIGABYTES),
    "gzip": lambda: _repeated(lambda data: gzip.compress(data, 9), 2**24),
    "bz2": lambda: _repeated(bz2.compress, 2**26),
    "lzma": lambda: _repeated(lzma.compress, 2**26),
    "zstd": _zstd,
    "blosc": _blosc,
}


@cache
def bomb(codec: str) -> bytes:
    """Return a few bytes that a decoder makes gigabytes of."""
    return MADE[codec]()


V2 = {
    "zlib": {"id": "zlib", "level": 1},
    "gzip": {"id": "gzip", "level": 1},
    "bz2": {"id": "bz2", "level": 1},
    "lzma": {"id": "lzma", "format": 1, "check": -1, "preset": None, "filters": None},
    "zstd": {"id": "zstd", "level": 0},
    "blosc": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 0, "blocksize": 0},
}
V3 = {
    "zlib": {"name": "numcodecs.zlib", "configuration": {"level": 1}},
    "gzip": {"name": "gzip", "configuration": {"level": 1}},
    "zstd": {"name": "zstd", "configuration": {"level": 0, "checksum": False}},
    "blosc": {
        "name": "blosc",
        "configuration": {
            "typesize": 1, "cname": "lz4", "clevel": 5, "shuffle": "noshuffle", "blocksize": 0,
        },
    },
}  # fmt: skip


def zarr_v2(compressor: dict[str, Any] | None, chunk: bytes, **changes: Any) -> Files:
    """Return the files of an OME-Zarr 0.4 of one chunk."""
    array = {
        "zarr_format": 2, "shape": [3, SIDE, SIDE], "chunks": [3, SIDE, SIDE], "dtype": "|u1",
        "compressor": compressor, "fill_value": 0, "order": "C", "filters": None, **changes,
    }  # fmt: skip
    return {
        ".zgroup": b'{"zarr_format": 2}',
        ".zattrs": json.dumps({"multiscales": [MULTISCALE]}).encode(),
        "0/.zarray": json.dumps(array).encode(),
        "0/0.0.0": chunk,
    }


def zarr_v3(codecs: list[dict[str, Any]], chunk: bytes, chunk_side: int = SIDE) -> Files:
    """Return the files of an OME-Zarr 0.5 of one chunk, or of one shard."""
    group = {
        "zarr_format": 3, "node_type": "group",
        "attributes": {"ome": {"version": "0.5", "multiscales": [MULTISCALE]}},
    }  # fmt: skip
    array = {
        "zarr_format": 3, "node_type": "array", "shape": [3, SIDE, SIDE], "data_type": "uint8",
        "chunk_grid": {
            "name": "regular", "configuration": {"chunk_shape": [3, chunk_side, chunk_side]}
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0, "codecs": codecs, "attributes": {},
    }  # fmt: skip
    return {
        "zarr.json": json.dumps(group).encode(),
        "0/zarr.json": json.dumps(array).encode(),
        "0/c/0/0/0": chunk,
    }


def _sharded() -> Files:
    """Return a shard whose only inner chunk is a bomb."""
    chunk = _zstd()
    index = struct.pack("<QQ", 0, len(chunk))
    codec = {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": [3, SIDE, SIDE], "codecs": [{"name": "bytes"}, V3["zstd"]],
            "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            "index_location": "end",
        },
    }  # fmt: skip
    return zarr_v3([codec], chunk + index)


def write_files(folder: Path, files: Files) -> Path:
    """Write the files of a zarr into a folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def _folder(files: Callable[[], Files]) -> Callable[[Place], object]:
    return lambda place: write_files(place.images / "a.ome.zarr", files())


def _zip(files: Callable[[], Files], padding: str = "") -> Callable[[Place], object]:
    """Return how to write a zarr as a zip, with half a gigabyte of spaces in one of its files."""

    def make(place: Place) -> None:
        with zipfile.ZipFile(
            place.images / "a.zarr.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1
        ) as archive:
            for name, content in files().items():
                with archive.open(name, "w") as member:
                    member.write(content)
                    for _ in range(512 if name == padding else 0):
                        member.write(b" " * 2**20)

    return make


def _sparse(name: str, files: Callable[[], Files]) -> Callable[[Place], object]:
    """Return how to write a zarr one file of which goes on for gigabytes that no disk holds."""

    def make(place: Place) -> None:
        with (write_files(place.images / "a.ome.zarr", files()) / name).open("r+b") as file:
            file.truncate(GIGABYTES)

    return make


class _Owns:
    """Creates a file of the victim when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (str(self._path), "w"))


def _pickled(place: Place) -> None:
    chunk = pickle.dumps(_Owns(place.victim / "owned"))
    write_files(place.images / "a.ome.zarr", zarr_v2({"id": "pickle", "protocol": 5}, chunk))


def _plain() -> Files:
    return zarr_v2(None, bytes(3 * SIDE * SIDE))


ZARR = (
    *(
        image(f"zarr2-{name}", "S5", "a.ome.zarr", info=(0, 3),
              make=_folder(lambda name=name: zarr_v2(V2[name], bomb(name))))
        for name in V2
    ),
    *(
        image(f"zarr3-{name}", "S5", "a.ome.zarr", info=(0, 3),
              make=_folder(lambda name=name: zarr_v3([{"name": "bytes"}, V3[name]],
                                                     bomb(name))))
        for name in V3
    ),
    image("zarr3-shard", "S5", "a.ome.zarr", _folder(_sharded), info=(0, 3)),
    image("zarr-zip-chunk", "S5", "a.zarr.zip",
          _zip(lambda: zarr_v2(V2["zstd"], bomb("zstd"))), info=(0, 3)),
    image("zarr-zip-zattrs", "S5", "a.zarr.zip", _zip(_plain, ".zattrs")),
    image("zarr-zip-zarray", "S5", "a.zarr.zip", _zip(_plain, "0/.zarray")),
    image("zarr-zip-plain-chunk", "S5", "a.zarr.zip", _zip(_plain, "0/0.0.0"), info=(0, 3)),
    image("zarr-sparse-zattrs", "S5", "a.ome.zarr", _sparse(".zattrs", _plain)),
    image("zarr-sparse-chunk", "S5", "a.ome.zarr", _sparse("0/0.0.0", _plain), info=(0, 3)),
    image("zarr-pickle", "S5", "a.ome.zarr", _pickled),
)  # fmt: skip


def _ome(size_z: int) -> Callable[[Place], object]:
    """Return how to write an OME-TIFF of one page that claims many."""

    def make(place: Place) -> None:
        text = (
            '<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06">'
            '<Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYZCT" Type="uint8" '
            f'SizeX="8" SizeY="8" SizeZ="{size_z}" SizeC="1" SizeT="1"><TiffData IFD="0" '
            'PlaneCount="1"/></Pixels></Image></OME>'
        )
        tifffile.imwrite(
            place.images / "a.ome.tif", np.zeros((8, 8), np.uint8), description=text, metadata=None
        )

    return make


def _nested_ome(place: Place) -> None:
    """Write an OME-TIFF whose XML is a hundred thousand elements deep."""
    depth = 100_000
    text = f"<?xml version='1.0'?><OME>{'<Image>' * depth}{'</Image>' * depth}</OME>"
    tifffile.imwrite(
        place.images / "a.ome.tif", np.zeros((8, 8), np.uint8), description=text, metadata=None
    )


def _jpeg(width: int, height: int, claimed: tuple[int, int] | None = None) -> bytes:
    """Return a JPEG of some size, whose header may claim another one."""
    values = pixels(512)[:height, :width]
    data = simplejpeg.encode_jpeg(np.ascontiguousarray(values), 90, "RGB", "444")
    if claimed is None:
        return bytes(data)
    place = data.index(b"\xff\xc0") + 5  # of the height, after length and precision
    return bytes(data[:place] + struct.pack(">HH", *claimed[::-1]) + data[place + 4 :])


def _jpeg_2000(width: int, height: int, claimed: tuple[int, int] | None = None) -> bytes:
    """Return a JPEG 2000 codestream of some size, whose header may claim another one."""
    values = np.ascontiguousarray(pixels(512)[:height, :width])
    data = imagecodecs.jpeg2k_encode(values, codecformat="j2k", level=90)
    if claimed is None:
        return bytes(data)
    place = data.index(b"\xff\x51") + 6  # Xsiz, Ysiz; the tile's own size is 16 bytes on
    size = struct.pack(">II", *claimed)
    return bytes(data[:place] + size + data[place + 8 : place + 16] + size + data[place + 24 :])


def _webp(width: int, height: int) -> bytes:
    return bytes(imagecodecs.webp_encode(np.ascontiguousarray(pixels(512)[:height, :width])))


def _png(width: int, height: int) -> bytes:
    return bytes(imagecodecs.png_encode(np.ascontiguousarray(pixels(512)[:height, :width])))


def _png_of_zeros(side: int) -> bytes:
    """Return a large black PNG: one stream of zeros."""
    data = zeros_deflated(-(-(3 * side + 1) * side // 2**20) * 2**20)
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", data), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(content)) + kind + content
        + struct.pack(">I", zlib.crc32(kind + content))
        for kind, content in chunks
    )  # fmt: skip


def _tiles(codec: str, tile: Callable[[], bytes], name: str = "a.tif") -> Callable[[Place], object]:
    """Return how to write a TIFF of 2 x 2 tiles, all of them the same bytes."""

    def make(place: Place) -> None:
        ome = name.endswith(".ome.tif")
        tifffile.imwrite(
            place.images / name, iter([tile()] * 4), shape=(2 * TILE, 2 * TILE, 3),
            dtype=np.uint8, tile=(TILE, TILE), compression=codec, photometric="rgb", ome=ome,
            metadata={"axes": "YXS"} if ome else None,
        )  # fmt: skip

    return make


def _ome_tiles(name: str, codec: str, tile: Callable[[], bytes]) -> Case:
    """Return the case of tiles that GDAL has no decoder for: tifffile reads an OME-TIFF."""
    return image(name, "S9", "a.ome.tif", _tiles(codec, tile, "a.ome.tif"), info=(0, 3))


def _photo(place: Place) -> None:
    (place.images / "a.jpg").write_bytes(_jpeg(TILE, TILE, (30_000, 30_000)))


def _many_bands(place: Place) -> None:
    values = np.zeros((1, 1, 65_535), np.uint8)
    tifffile.imwrite(
        place.images / "a.tif", values, planarconfig="contig", photometric="minisblack",
        compression="zlib", metadata=None,
    )  # fmt: skip


def _overflowing(place: Place) -> None:
    """Write values so large that their sum is none."""
    values = np.full((TILE, TILE, 3), np.finfo(np.float32).max, np.float32)
    values[::2] *= -1
    values[0] = np.inf
    tifffile.imwrite(place.images / "a.tif", values, photometric="rgb", metadata=None)


TIFF = (
    image("ome-size-z-3e8", "S6", "a.ome.tif", _ome(300_000_000)),
    image("ome-size-z-1e9", "S6", "a.ome.tif", _ome(1_000_000_000)),
    image("ome-size-z-1e18", "S6", "a.ome.tif", _ome(10**18)),
    image("ome-deep-xml", "S17", "a.ome.tif", _nested_ome, info=(0, 3)),
    image("jpeg-tile-too-large", "S9", "a.tif", _tiles("jpeg", lambda: _jpeg(2 * TILE, 2 * TILE)),
          info=(0, 3)),
    image("jpeg-tile-too-wide", "S9", "a.tif", _tiles("jpeg", lambda: _jpeg(TILE + 8, TILE)),
          info=(0, 3)),
    image("jpeg-tile-too-small", "S9", "a.tif", _tiles("jpeg", lambda: _jpeg(TILE, TILE // 2)),
          info=(0, 3)),
    image("jpeg-tile-30000", "S9", "a.tif",
          _tiles("jpeg", lambda: _jpeg(TILE, TILE, (30_000, 30_000))), info=(0, 3)),
    image("jpeg-photo-30000", "S9", "a.jpg", _photo, info=(0, 3)),
    _ome_tiles("jpeg-ome-tile-30000", "jpeg", lambda: _jpeg(TILE, TILE, (30_000, 30_000))),
    _ome_tiles("jpeg2000-tile-too-large", "jpeg2000", lambda: _jpeg_2000(2 * TILE, 2 * TILE)),
    _ome_tiles("jpeg2000-tile-30000", "jpeg2000", lambda: _jpeg_2000(TILE, TILE, (30_000, 30_000))),
    _ome_tiles("webp-tile-too-large", "webp", lambda: _webp(2 * TILE, 2 * TILE)),
    _ome_tiles("png-tile-too-large", "png", lambda: _png(2 * TILE, 2 * TILE)),
    _ome_tiles("png-tile-20000", "png", lambda: _png_of_zeros(20_000)),
    image("deflate-tile", "S9", "a.tif", _tiles("zlib", lambda: bomb("zlib")), info=(0, 3),
          predict=(0, 3)),
    image("zstd-tile", "S9", "a.tif", _tiles("zstd", lambda: bomb("zstd")), info=(0, 3),
          predict=(0, 3)),
    image("lzma-tile", "S9", "a.tif", _tiles("lzma", lambda: bomb("lzma")), info=(0, 3),
          predict=(0, 3)),
    Case(
        "float-overflow", "S17", _overflowing,
        (
            step("info", "{images}/a.tif", codes=(0, 3)),
            step("predict", "{images}/a.tif", "-O", "rescale=0,1e-38", codes=(0, 3)),
            step("predict", "{images}/a.tif", "-O", "rescale=-3e38,3e38", codes=(0, 3)),
        ),
    ),
    image("bands-65535", "S10", "a.tif", _many_bands),
)  # fmt: skip

CASES: tuple[Case, ...] = (*ZARR, *TIFF)
