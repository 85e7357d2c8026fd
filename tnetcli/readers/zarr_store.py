"""Read arrays of zarr v2 and v3 from a folder, a zip file or a URL.

An untrusted image names its own sizes and decoders. Documents, stored chunks and decoded chunks
therefore have limits, codecs are allow-listed, and only regular files inside the folder are opened.
"""

import errno
import itertools
import json
import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import google_crc32c
import numpy as np
from numcodecs import blosc, zstd  # type: ignore[import-untyped]
from numpy.typing import NDArray

from tnetcli.errors import ImageError
from tnetcli.files import Archive, is_inside, open_descriptor
from tnetcli.readers.detect import ZIP_FAILURES
from tnetcli.readers.pyramid import PARSING_FAILURES
from tnetcli.readers.resample import cuts
from tnetcli.text import MOST_DEPTH, is_deep, reason, shorten

# Raised for damaged files, by fsspec and by codecs.
FAILURES = (*ZIP_FAILURES, *PARSING_FAILURES, MemoryError)
MISSING = (FileNotFoundError, IsADirectoryError, NotADirectoryError, KeyError)
MOST_METADATA = 2**24  # bytes of all documents of one image
NUMBERS = re.compile(r"[<>|=]?[biuf]\d{1,2}|bool|u?int(8|16|32|64)|float(16|32|64)")
MOST_AXES = 16
MOST_CODECS = 8
MOST_CHUNKS = 2**20  # in one shard, whose index has 16 bytes for each
SHARDING = "sharding_indexed"
CHECKSUM_BYTES = 4
NOT_STORED = 2**64 - 1  # in the index of a shard

# Returns bytes from a start to a stop of an object; a negative start counts from its end.
Fetch = Callable[[int, int | None], bytes | None]


class Store:
    """Objects of one image by key, for one thread."""

    root = ""  # path of the outermost group

    def __init__(self, path: str) -> None:
        self.path = path
        self.bytes_read = 0
        self._document_bytes = 0

    def _read(self, key: str, most: int, start: int, stop: int | None) -> bytes:
        """Return a part of an object; raise one of `MISSING` if there is none."""
        raise NotImplementedError

    def get(self, key: str, most: int, start: int = 0, stop: int | None = None) -> bytes | None:
        """Return an object or a part of it; None if missing, OSError if larger than `most`."""
        try:
            content = self._read(key, most, start, stop)
        except MISSING:
            return None
        if len(content) > most:
            raise OSError(f"`{shorten(key)}` has {len(content):,} bytes, more than {most:,}")
        self.bytes_read += len(content)
        return content

    def document(self, key: str) -> dict[str, Any] | None:
        """Return a JSON object, None if it is missing."""
        content = self.get(key, MOST_METADATA)
        if content is None:
            return None
        self._document_bytes += len(content)
        if self._document_bytes > MOST_METADATA:
            raise ValueError(f"its metadata has more than {MOST_METADATA:,} bytes")
        try:
            document = json.loads(content)
            too_deep = is_deep(document)
        except RecursionError:
            too_deep = True
        if too_deep:
            raise ValueError(f"`{key}` is nested more than {MOST_DEPTH} levels deep")
        return dict(document)

    def close(self) -> None:
        """Release the file."""


class _Folder(Store):
    """Regular files in a folder; links must not lead outside."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._top = os.path.realpath(path)
        self._inside: set[str] = set()

    def _read(self, key: str, most: int, start: int, stop: int | None) -> bytes:
        descriptor = self._open_inside(os.path.join(self._top, key))
        try:
            size = os.fstat(descriptor).st_size
            if (start, stop) == (0, None) and size > most:
                raise OSError(f"`{shorten(key)}` has {size:,} bytes, more than {most:,}")
            first = max(0, size + start) if start < 0 else start
            last = size if stop is None else min(stop, size)
            return os.pread(descriptor, max(0, last - first), first)
        finally:
            os.close(descriptor)

    def _open_inside(self, path: str) -> int:
        """Return a descriptor of a regular file; raise OSError if a link leads outside."""
        folder = os.path.dirname(path)
        if folder not in self._inside:
            self._check_inside(folder)
            self._inside.add(folder)
        try:
            return open_descriptor(path, follow_links=False)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
        self._check_inside(path)
        return open_descriptor(path)

    def _check_inside(self, path: str) -> None:
        if not is_inside(path, self._top, follow_links=True):
            name, target = os.path.relpath(path, self._top), os.path.realpath(path)
            raise OSError(f"`{name}` is a link to `{target}`, outside of the image")


class _Zip(Store):
    """Members of a zip file."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._archive = Archive(path)
        names = [name.rpartition("/") for name in self._archive.namelist()]
        groups = [folder for folder, _, name in names if name in ("zarr.json", ".zgroup")]
        # Zip programs often add a folder.
        self.root = min(groups, key=lambda folder: folder.count("/") + bool(folder), default="")

    def _read(self, key: str, most: int, start: int, stop: int | None) -> bytes:
        return self._archive.read_part(key, most, start, stop)

    def close(self) -> None:
        self._archive.close()


class _Url(Store):
    """Objects below a URL."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        try:
            from fsspec.core import url_to_fs  # type: ignore[import-untyped]

            self._files, self._top = url_to_fs(path)
        except ImportError as error:
            raise ImageError(
                f"reading `{path}` needs fsspec",
                hint="pip install fsspec aiohttp   (s3fs for s3://, gcsfs for gs://)",
            ) from error

    def _read(self, key: str, most: int, start: int, stop: int | None) -> bytes:
        content: bytes = self._files.cat_file(f"{self._top}/{key}", start or None, stop)
        return content


def open_store(path: str) -> Store:
    """Open the folder, zip or URL at `path`."""
    if "://" in path:
        return _Url(path)
    if os.path.isdir(path):
        return _Folder(path)
    if os.path.isfile(path) and zipfile.is_zipfile(path):
        return _Zip(path)
    problem = "is neither a folder nor a zip file" if os.path.exists(path) else "does not exist"
    raise ImageError(f"`{path}` {problem}", hint="an OME-Zarr image is a folder `x.ome.zarr`")


def join(group: str, name: str) -> str:
    """Return the path of `name` in `group`; ValueError if it leads out of the group."""
    parts = name.strip("/").split("/")
    if {"", ".", ".."} & set(parts):
        raise ValueError(f"`{shorten(name)}` is not inside the image")
    return "/".join([group, *parts] if group else parts)


@dataclass(frozen=True, slots=True)
class Chunk:
    """How a chunk is stored."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]  # in the byte order of the file
    order: tuple[int, ...]  # the axes as they are stored
    decoders: tuple[tuple[str, int], ...]  # in the order of writing; maximum size once decoded
    most: int  # bytes stored

    def fill(self, out: NDArray[Any], wanted: Sequence[range], fetch: Fetch) -> bool:
        """Copy a part of the chunk to `out`; return False if the chunk is missing."""
        content: Any = fetch(0, None)
        if content is None:
            return False
        for name, most in reversed(self.decoders):
            content = DECODERS[name](content, most)
        values = np.frombuffer(content, self.dtype)
        stored = values.reshape([self.shape[axis] for axis in self.order])
        inside = tuple(slice(each.start, each.stop) for each in wanted)
        out[...] = stored.transpose(np.argsort(self.order))[inside]
        return True


@dataclass(frozen=True, slots=True)
class Shard:
    """How an object of several chunks is stored, with an index of their places."""

    shape: tuple[int, ...]
    counts: tuple[int, ...]  # of chunks along each axis
    inner: Chunk
    index_first: bool
    has_checksum: bool
    fill_value: np.generic  # of chunks that the index calls empty

    @property
    def _index_bytes(self) -> int:
        return 16 * math.prod(self.counts) + CHECKSUM_BYTES * self.has_checksum

    @property
    def most(self) -> int:
        """Return the maximum size in bytes."""
        return math.prod(self.counts) * self.inner.most + self._index_bytes

    def fill(self, out: NDArray[Any], wanted: Sequence[range], fetch: Fetch) -> bool:
        """Copy a part of the shard to `out`; return False if the shard is missing."""
        if tuple(map(len, wanted)) == self.shape:  # one request in place of one for each chunk
            fetch = partial(_part, fetch(0, None))
        size = self._index_bytes
        index = fetch(0, size) if self.index_first else fetch(-size, None)
        if index is None:
            return False
        if len(index) < size:
            raise ValueError(f"a shard is truncated to {len(index):,} bytes")
        if self.has_checksum:
            index = _crc32c(index, size)
        places = np.frombuffer(index, "<u8").reshape(*self.counts, 2)
        for number, inside, target in _pieces(wanted, self.inner.shape):
            offset, length = map(int, places[number])
            if offset == length == NOT_STORED:
                out[target] = self.fill_value
                continue
            if length > self.inner.most:
                raise ValueError(f"a chunk in a shard claims {length:,} bytes")
            content = fetch(offset, offset + length)
            if content is None or len(content) < length:
                raise ValueError(f"a chunk in a shard is truncated from {length:,} bytes")
            self.inner.fill(out[target], inside, partial(_part, content))
        return True


def _part(content: bytes | None, start: int, stop: int | None) -> bytes | None:
    return None if content is None else content[start:stop]


def _pieces(
    wanted: Sequence[range], lengths: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[range, ...], tuple[slice, ...]]]:
    """Yield the index of each chunk, which part of it is wanted, and where it goes."""
    axes = [
        [
            (
                first // length,
                range(first % length, first % length + last - first),
                slice(first - each.start, last - each.start),
            )
            for first, last in cuts(each.start, each.stop, length)
        ]
        for each, length in zip(wanted, lengths, strict=True)
    ]
    for piece in itertools.product(*axes):
        numbers, inside, targets = zip(*piece, strict=True)
        yield numbers, inside, targets


@dataclass(frozen=True, slots=True)
class ZarrArray:
    """An array of numbers; it describes how to read, and holds no file."""

    path: str
    shape: tuple[int, ...]
    chunk: Chunk | Shard  # the object in the store
    key_start: tuple[str, ...]
    separator: str

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.chunk.shape) or self.separator not in ("/", "."):
            raise ValueError(f"its shape or its chunks are `{self.shape}`, `{self.chunk.shape}`")

    @property
    def unit(self) -> Chunk:
        """Return the unit of decoding: a chunk, or the chunk inside a shard."""
        return self.chunk.inner if isinstance(self.chunk, Shard) else self.chunk

    def read(
        self, store: Store, wanted: Sequence[range]
    ) -> tuple[NDArray[Any], list[tuple[slice, ...]]]:
        """Return a part of the array, and which parts of it are zero since chunks are missing."""
        out = np.empty([len(each) for each in wanted], self.unit.dtype)
        missing = []
        for index, inside, target in _pieces(wanted, self.chunk.shape):
            key = self.separator.join((*self.key_start, *map(str, index)))
            fetch = partial(store.get, f"{self.path}/{key}", self.chunk.most)
            if not self.chunk.fill(out[target], inside, fetch):
                out[target] = 0
                missing.append(target)
        return out, missing


def open_level(store: Store, group: str, name: str, zarr_format: int) -> ZarrArray:
    """Return an array that the metadata lists; raise ImageError if it cannot be decoded."""
    try:
        path = join(group, name)
        record = store.document(f"{path}/{'.zarray' if zarr_format == 2 else 'zarr.json'}")
        if record is None:
            raise ValueError("no metadata found")
        return (_old_array if zarr_format == 2 else _new_array)(path, record)
    except FAILURES as error:
        raise ImageError(
            f"cannot open level `{shorten(name)}` of `{store.path}`: {reason(error)}",
            hint="if it is damaged or incomplete, copy it again; otherwise export it as numbers, "
            f"with one of the codecs {', '.join(DECODERS)}",
        ) from error


def _old_array(path: str, record: Mapping[str, Any]) -> ZarrArray:
    """Return an array from the metadata of zarr v2."""
    shape, chunk = _lengths(record.get("shape")), _lengths(record.get("chunks"))
    filters, compressor = record.get("filters"), record.get("compressor")
    written = [*(filters or ()), *([] if compressor is None else [compressor])]
    codecs = [{"name": str(_options(each).get("id", each))} for each in written]
    stored = _encoded(codecs, chunk, _dtype(record.get("dtype")), record.get("order") == "F")
    return ZarrArray(path, shape, stored, (), record.get("dimension_separator", "."))


def _new_array(path: str, record: Mapping[str, Any]) -> ZarrArray:
    """Return an array from the metadata of zarr v3."""
    grid, grid_options = _named(record.get("chunk_grid"))
    keys, key_options = _named(record.get("chunk_key_encoding", "default"))
    if record.get("node_type") != "array" or grid != "regular" or keys not in ("default", "v2"):
        raise ValueError(f"its chunks are `{shorten(grid)}` and `{shorten(keys)}`")
    dtype, codecs = _dtype(record.get("data_type")), record.get("codecs") or []
    shape, chunk = _lengths(record.get("shape")), _lengths(grid_options.get("chunk_shape"))
    fill = record.get("fill_value")
    fill_value = np.array([float(fill) if isinstance(fill, str) else fill or 0], dtype)[0]
    name, options = _named(codecs[0])
    stored: Chunk | Shard
    if name != SHARDING:
        stored = _encoded(codecs, chunk, dtype)
    elif len(codecs) > 1:  # every read would decode the whole shard
        raise ValueError(f"codec `{SHARDING}` is combined with others")
    else:
        stored = _shard(options, chunk, dtype, fill_value)
    start, separator = (("c",), "/") if keys == "default" else ((), ".")
    return ZarrArray(path, shape, stored, start, key_options.get("separator", separator))


def _lengths(value: Any) -> tuple[int, ...]:
    """Return the lengths of an array or a chunk; raise ValueError if malformed or empty."""
    lengths = tuple(value) if isinstance(value, list) else ()
    if not 0 < len(lengths) <= MOST_AXES or not all(
        isinstance(each, int) and 1 <= each < 2**64 for each in lengths
    ):
        raise ValueError(f"its shape or its chunks are `{shorten(value)}`")
    return lengths


def _dtype(value: Any) -> np.dtype[Any]:
    if not isinstance(value, str) or not NUMBERS.fullmatch(value):
        raise ValueError(f"it has `{shorten(value)}` values")
    return np.dtype(value)


def _shard(
    options: Mapping[str, Any], shape: tuple[int, ...], dtype: np.dtype[Any], fill: np.generic
) -> Shard:
    inner = _encoded(options.get("codecs"), _lengths(options.get("chunk_shape")), dtype)
    counts = tuple(length // part for length, part in zip(shape, inner.shape, strict=True))
    if any(length % part for length, part in zip(shape, inner.shape, strict=True)):
        raise ValueError(f"its shape or its chunks are `{shape}`, `{inner.shape}`")
    if math.prod(counts) > MOST_CHUNKS:
        raise ValueError(f"one shard has {math.prod(counts):,} chunks, more than {MOST_CHUNKS:,}")
    index = [_named(each)[0] for each in options.get("index_codecs", ())]
    if unknown := set(index) - {"bytes", "crc32c"}:
        raise ValueError(f"codec `{shorten(unknown.pop())}` is not supported in an index")
    is_first = options.get("index_location") == "start"
    return Shard(shape, counts, inner, is_first, "crc32c" in index, fill)


def _encoded(
    codecs: Any, shape: tuple[int, ...], dtype: np.dtype[Any], turned: bool = False
) -> Chunk:
    """Return how chunks are stored that codecs have written, with the axes reversed if `turned`."""
    order = tuple(range(len(shape)))[:: -1 if turned else 1]
    size = math.prod(shape) * dtype.itemsize
    decoders: list[tuple[str, int]] = []
    for name, options in map(_named, codecs):
        if name == "transpose":
            axes = options.get("order")
            if not isinstance(axes, list) or sorted(axes) != list(range(len(shape))):
                raise ValueError(f"codec `transpose` has the order `{shorten(axes)}`")
            order = tuple(order[axis] for axis in axes)
        elif name == "bytes":
            dtype = dtype.newbyteorder(">" if options.get("endian") == "big" else "<")
        elif name in DECODERS and len(decoders) < MOST_CODECS:
            decoders.append((name, size))
            size += size // 4 + 1024  # incompressible data grows by less
        else:
            raise ValueError(f"codec `{shorten(name)}` is not supported")
    return Chunk(shape, dtype, order, tuple(decoders), size)


def _named(value: Any) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the configuration of an extension of zarr v3."""
    record = _options(value)
    name = str(record.get("name", value)).removeprefix("numcodecs.")
    return name, _options(record.get("configuration"))


def _options(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _inflate(window: int, data: bytes, most: int) -> bytes:
    stream = zlib.decompressobj(window)
    values = stream.decompress(data, most + 1)
    _check_size(len(values), most)
    if not stream.eof:
        raise ValueError(f"a chunk is truncated after {len(data):,} bytes")
    return values


def _blosc(data: bytes, most: int) -> Any:
    # Blosc trusts its header and decodes memory past the end of the chunk.
    wanted = max(int.from_bytes(data[12:16], "little"), 16)
    if len(data) < wanted:
        raise ValueError(f"a chunk is truncated: {len(data):,} of {wanted:,} bytes")
    _check_size(int.from_bytes(data[4:8], "little"), most)
    return blosc.decompress(data)


def _zstd(data: bytes, most: int) -> Any:
    stated = _zstd_size(data[:18])
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


def _crc32c(data: bytes, _: int) -> bytes:
    values = bytes(data[:-CHECKSUM_BYTES])
    if google_crc32c.value(values) != int.from_bytes(data[-CHECKSUM_BYTES:], "little"):
        raise ValueError("a checksum is wrong")
    return values


def _check_size(size: int, most: int) -> None:
    if size > most:
        raise ValueError(f"a chunk decodes to more than its {most:,} bytes")


# Raise ValueError if a chunk decodes to more than a number of bytes, or is truncated.
DECODERS: dict[str, Callable[[bytes, int], Any]] = {
    "blosc": _blosc,
    "zstd": _zstd,
    "gzip": partial(_inflate, zlib.MAX_WBITS | 16),
    "zlib": partial(_inflate, zlib.MAX_WBITS),
    "crc32c": _crc32c,
}
