"""Check the metadata of zarr arrays, and decode their chunks to a bounded size.

Metadata is checked before zarr creates codecs from it, which can import code. Each decoder stops
at the chunk size that the metadata states.
"""

import bz2
import lzma
import math
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numcodecs import blosc, lz4, zstd  # type: ignore[import-untyped]
from numcodecs.compat import ensure_contiguous_ndarray  # type: ignore[import-untyped]
from numpy.typing import NDArray

from tnetcli.errors import ImageError
from tnetcli.text import shorten

NUMBERS = re.compile(
    r"[<>|=]?[biufc]\d{1,2}|bool|u?int(8|16|32|64)|float(16|32|64)|complex(64|128)"
)
MOST_AXES = 16
MOST_CODECS = 8
MOST_CHUNKS = 2**20  # in one shard, whose index has 16 bytes for each
LZMA_MEMORY = 2**27  # bytes; the highest preset needs half
SHARDING = "sharding_indexed"
KEEPING = ("bytes", "transpose", "shuffle", "bitround")  # do not change the size
CHECKSUMS = ("crc32c", "crc32", "adler32", "fletcher32")
CHECKSUM_BYTES = 4

Bytes = NDArray[np.uint8]


def check_array(path: str, key: str, metadata: Mapping[str, Any], zarr_format: int) -> None:
    """Raise ImageError unless the array holds numbers in chunks that can be decoded safely."""
    is_old = zarr_format == 2
    dtype = metadata.get("dtype" if is_old else "data_type")
    if not isinstance(dtype, str) or not NUMBERS.fullmatch(dtype):
        raise ImageError(
            f"`{key}` of `{path}` has `{shorten(dtype)}` values",
            hint="export it as numbers first",
        )
    try:
        _lengths(metadata.get("shape"))
        if is_old:
            codecs: Any = _old_codecs(metadata)
            chunks = metadata.get("chunks")
        else:
            codecs, grid = metadata.get("codecs"), _record(metadata.get("chunk_grid"))
            chunks = _record(grid.get("configuration")).get("chunk_shape")
            _check_name(metadata.get("chunk_key_encoding", "default"), ("default", "v2"))
        encoded_sizes(codecs, _lengths(chunks), np.dtype(dtype).itemsize)
    except (TypeError, ValueError) as error:
        raise ImageError(
            f"`{key}` of `{path}` cannot be decoded: {error}",
            hint=f"supported codecs: {', '.join([*DECODERS, *KEEPING])}",
        ) from error


def _old_codecs(metadata: Mapping[str, Any]) -> list[Any]:
    """Return the codecs of a zarr v2 array in the order of writing."""
    filters, compressor = metadata.get("filters"), metadata.get("compressor")
    if filters is not None and not isinstance(filters, list | tuple):
        raise ValueError(f"its filters are `{shorten(filters)}`")
    return [*(filters or ()), *([] if compressor is None else [compressor])]


def encoded_sizes(codecs: Any, shape: Sequence[int], itemsize: int) -> list[int]:
    """Return the maximum size of a chunk in bytes: decoded, then after each codec.

    Raises ValueError if a codec is not supported, or does not fit those before it.
    """
    if not isinstance(codecs, list | tuple) or len(codecs) > MOST_CODECS:
        raise ValueError(f"its codecs are `{shorten(codecs)}`")
    size = math.prod(shape) * itemsize
    sizes, is_compressed = [size], False
    for name, options in map(_named, codecs):
        if name == SHARDING:
            if len(codecs) > 1:
                # Every read would decode the whole shard.
                raise ValueError(f"codec `{SHARDING}` is combined with others")
            size = _shard_sizes(options, shape, itemsize)[1]
        elif name in DECODERS:
            # Incompressible data grows by less than this.
            size += 0 if is_compressed else size // 4 + 1024
            is_compressed = True
        elif name in CHECKSUMS:
            size += CHECKSUM_BYTES
        elif name not in KEEPING:
            raise ValueError(f"codec `{shorten(name)}` is not supported")
        sizes.append(size)
    return sizes


def chunk_size(codecs: Any, shape: Sequence[int], itemsize: int) -> int:
    """Return the maximum stored size of one chunk inside a shard; 0 without shards."""
    name, options = _named(codecs[0]) if codecs else ("", {})
    return _shard_sizes(options, shape, itemsize)[0] if name == SHARDING else 0


def _shard_sizes(
    options: Mapping[str, Any], shape: Sequence[int], itemsize: int
) -> tuple[int, int]:
    """Return the maximum stored size of a chunk in a shard, and of the shard."""
    for codec in options.get("index_codecs", ()):
        _check_name(codec, ("bytes", "crc32c"))
    chunk = _lengths(options.get("chunk_shape"))
    count = math.prod(length // max(1, inner) for length, inner in zip(shape, chunk, strict=True))
    if count > MOST_CHUNKS:
        raise ValueError(f"one shard has {count:,} chunks, more than {MOST_CHUNKS:,}")
    size = encoded_sizes(options.get("codecs"), chunk, itemsize)[-1]
    return size, count * (size + 16) + CHECKSUM_BYTES


def _named(codec: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the options of a codec as zarr v2 or v3 writes it."""
    if isinstance(codec, str):
        return codec, {}
    record = _record(codec)
    # zarr v2 uses the id and v3 the name: a codec with both is ambiguous.
    name = record.get("name", record.get("id"))
    if not isinstance(name, str) or ("name" in record and "id" in record):
        raise ValueError(f"`{shorten(codec)}` is not a codec")
    if "id" in record:
        return name, record
    return name.removeprefix("numcodecs."), _record(record.get("configuration"))


def codec_name(codec: Any) -> str:
    """Return the name of a codec in zarr v2 or v3, without the name of its library."""
    return _named(codec)[0]


def _check_name(codec: Any, known: Sequence[str]) -> None:
    if (name := _named(codec)[0]) not in known:
        raise ValueError(f"`{shorten(name)}` is not supported")


def _record(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _lengths(value: Any) -> list[int]:
    """Return the lengths of an array or a chunk; raise ValueError if malformed."""
    if not isinstance(value, list | tuple) or len(value) > MOST_AXES:
        raise ValueError(f"its shape or its chunks are `{shorten(value)}`")
    if not all(isinstance(each, int) and 0 <= each < 2**64 for each in value):
        raise ValueError(f"its shape or its chunks are `{shorten(value)}`")
    return list(value)


def decode(name: str, data: Any, most: int) -> Any:
    """Decode a chunk; raise ValueError if it exceeds `most` bytes or is truncated."""
    return DECODERS[name](ensure_contiguous_ndarray(data).view(np.uint8), most)


def _streamed(start: Callable[[], Any]) -> Callable[[Bytes, int], bytes]:
    def decode_stream(data: Bytes, most: int) -> bytes:
        stream = start()
        values: bytes = stream.decompress(data.data, most + 1)
        _check_size(len(values), most)
        if not stream.eof:
            raise ValueError(f"a chunk is truncated after {len(data):,} bytes")
        return values

    return decode_stream


def _blosc(data: Bytes, most: int) -> Any:
    # Blosc trusts its header and decodes memory past the end of the chunk.
    wanted = max(int.from_bytes(data[12:16].tobytes(), "little"), 16)
    if len(data) < wanted:
        raise ValueError(f"a chunk is truncated: {len(data):,} of {wanted:,} bytes")
    _check_size(int.from_bytes(data[4:8].tobytes(), "little"), most)
    return blosc.decompress(data)


def _lz4(data: Bytes, most: int) -> Any:
    _check_size(int.from_bytes(data[:4].tobytes(), "little"), most)
    return lz4.decompress(data)


def _zstd(data: Bytes, most: int) -> Any:
    stated = _zstd_size(data[:18].tobytes())
    if stated is not None:
        _check_size(stated, most)
    # With a known size, a second frame is an error.
    return zstd.decompress(data, np.empty(most if stated is None else stated, np.uint8))


def _zstd_size(header: bytes) -> int | None:
    """Return the size that a zstd frame states, None if it states none (RFC 8878, 3.1.1.1)."""
    if len(header) < 6 or header[:4] != b"\x28\xb5\x2f\xfd":
        return None
    is_single = header[4] >> 5 & 1
    length = (is_single, 2, 4, 8)[header[4] >> 6]
    if length == 0:
        return None
    start = 6 - is_single + (0, 1, 2, 4)[header[4] & 3]
    return int.from_bytes(header[start : start + length], "little") + 256 * (length == 2)


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise ValueError(f"a chunk decodes to more than its {most:,} bytes")


DECODERS: dict[str, Callable[[Bytes, int], Any]] = {
    "blosc": _blosc,
    "zstd": _zstd,
    "gzip": _streamed(lambda: zlib.decompressobj(zlib.MAX_WBITS | 16)),
    "zlib": _streamed(zlib.decompressobj),
    "lz4": _lz4,
    "bz2": _streamed(bz2.BZ2Decompressor),
    "lzma": _streamed(lambda: lzma.LZMADecompressor(memlimit=LZMA_MEMORY)),
}
