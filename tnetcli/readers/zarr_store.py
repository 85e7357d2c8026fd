"""Open zarr stores (folder, zip, URL) with limits, and record missing keys.

Sizes are bounded before reading: metadata by a constant, chunks by the maximum output of their
codecs. Only regular files inside the folder are opened.
"""

import asyncio
import errno
import json
import os
import threading
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import zarr
from numcodecs.abc import Codec as OldCodec  # type: ignore[import-untyped]
from zarr.abc.codec import BytesBytesCodec, Codec
from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.buffer import default_buffer_prototype
from zarr.codecs import ShardingCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import FsspecStore, LocalStore, WrapperStore, ZipStore

from tnetcli.errors import ImageError
from tnetcli.files import Archive, is_inside, open_descriptor
from tnetcli.readers.detect import ZIP_FAILURES
from tnetcli.readers.pyramid import PARSING_FAILURES
from tnetcli.readers.zarr_codecs import (
    DECODERS,
    check_array,
    chunk_size,
    codec_name,
    decode,
    encoded_sizes,
)
from tnetcli.text import MOST_DEPTH, is_deep, one_line, shorten

ZarrFormat = Literal[2, 3]

# zarr raises many kinds of errors for damaged metadata.
METADATA_FAILURES = (*ZIP_FAILURES, *PARSING_FAILURES, MemoryError)
FOLDER_HINT = "give the folder whose `zarr.json` or `.zattrs` lists `multiscales`"
METADATA_HINT = "check its metadata: no image needs this much"
GROUP_FILES = ("zarr.json", ".zgroup")
MOST_METADATA = 2**24  # bytes of all documents of one image
LONGEST_REASON = 500  # characters


@dataclass(frozen=True, slots=True)
class StoredSizes:
    """Maximum size in bytes of an object in the store, and of one chunk inside a shard."""

    whole: int
    part: int = 0


METADATA_SIZES = StoredSizes(MOST_METADATA)


class WatchedStore(WrapperStore[Store]):
    """Records missing keys and bytes read; raises errors for objects that are too large."""

    def __init__(self, store: Store, path: str) -> None:
        super().__init__(store)
        self._path = path
        self._document_bytes = 0
        self.watch(None)

    def watch(self, sizes: StoredSizes | None) -> None:
        """Reset the records; `sizes` limit the next chunks, None if metadata is read next."""
        self._sizes = sizes
        self.absent: set[str] = set()
        self.bytes_read = 0
        if isinstance(self._store, _Folder | _Zip):
            self._store.most = (sizes or METADATA_SIZES).whole

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return the object of `key`; raise OSError if it is larger or smaller than expected."""
        sizes = self._sizes
        wanted = 0
        if isinstance(byte_range, RangeByteRequest):
            wanted = byte_range.end - byte_range.start
            if sizes is None or byte_range.start < 0 or not 0 <= wanted <= sizes.part:
                raise OSError(f"a chunk in `{key}` claims {wanted:,} bytes")
        found = await super().get(key, prototype, byte_range)
        if found is None:
            self.absent.add(key)
            return None
        if byte_range is None and len(found) > (sizes or METADATA_SIZES).whole:
            raise OSError(f"`{key}` has {len(found):,} bytes")
        # zarr treats a chunk past the end of a truncated shard as missing.
        if len(found) < wanted:
            raise OSError(f"`{key}` is truncated: {len(found)} of {wanted} bytes")
        if sizes is None:
            self._check_document(key, found.to_bytes())
        self.bytes_read += len(found)
        return found

    def _check_document(self, key: str, content: bytes) -> None:
        """Raise ImageError for metadata that zarr must not parse; invalid JSON is left to zarr."""
        self._document_bytes += len(content)
        if self._document_bytes > MOST_METADATA:
            raise ImageError(
                f"the metadata of `{self._path}` has more than {MOST_METADATA:,} bytes",
                hint=METADATA_HINT,
            )
        try:
            document = json.loads(content)
        except RecursionError as error:
            raise self._nested_too_deeply(key) from error
        except ValueError:
            return
        if is_deep(document):
            raise self._nested_too_deeply(key)
        name = key.rsplit("/", 1)[-1]
        if isinstance(document, dict):
            if name == ".zarray":
                check_array(self._path, key, document, 2)
            elif name == "zarr.json" and document.get("node_type") == "array":
                check_array(self._path, key, document, 3)

    def _nested_too_deeply(self, key: str) -> ImageError:
        return ImageError(
            f"`{key}` of `{self._path}` is nested more than {MOST_DEPTH} levels deep",
            hint=METADATA_HINT,
        )

    def close(self) -> None:
        """Close the store if it was opened: closing an unopened zip fails."""
        if self._is_open:
            super().close()


class _Folder(LocalStore):
    """Regular files in a folder; links must not lead outside."""

    def __init__(self, path: str) -> None:
        super().__init__(path, read_only=True)
        self._top = os.path.realpath(path)
        self._inside: set[str] = set()
        self.most = MOST_METADATA

    async def get(
        self,
        key: str,
        prototype: BufferPrototype | None = None,
        byte_range: ByteRequest | None = None,
    ) -> Buffer | None:
        if prototype is None:
            prototype = default_buffer_prototype()
        if not self._is_open:
            await self._open()
        try:
            content = await asyncio.to_thread(self._read, key, byte_range)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return None
        return prototype.buffer.from_bytes(content)

    def _read(self, key: str, byte_range: ByteRequest | None) -> bytes:
        start, stop = _span(byte_range)
        path = os.path.join(self._top, key)
        descriptor = self._open_inside(path)
        try:
            size = os.fstat(descriptor).st_size
            if byte_range is None and size > self.most:
                raise OSError(f"`{key}` has {size:,} bytes, more than {self.most:,}")
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


class _Zip(ZipStore):
    """Members of a zip file."""

    _zf: Archive

    def __init__(self, path: str) -> None:
        super().__init__(path, mode="r")
        self.most = MOST_METADATA

    def _sync_open(self) -> None:
        self._lock = threading.RLock()
        self._zf = Archive(str(self.path))
        self._is_open = True

    def _get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        if not self._is_open:
            self._sync_open()
        try:
            return prototype.buffer.from_bytes(
                self._zf.read_part(key, self.most, *_span(byte_range))
            )
        except KeyError:
            return None


def _span(byte_range: ByteRequest | None) -> tuple[int, int | None]:
    """Return start and stop of a request; a negative start counts from the end."""
    if isinstance(byte_range, RangeByteRequest):
        return byte_range.start, byte_range.end
    if isinstance(byte_range, SuffixByteRequest):
        return -byte_range.suffix, None
    return byte_range.offset if isinstance(byte_range, OffsetByteRequest) else 0, None


def open_store(path: str) -> WatchedStore:
    """Open the folder, zip or URL at `path` read-only."""
    if "://" in path:
        if find_spec("fsspec") is None:
            raise ImageError(
                f"reading `{path}` needs fsspec",
                hint="pip install fsspec aiohttp   (s3fs for s3://, gcsfs for gs://)",
            )
        try:
            return WatchedStore(FsspecStore.from_url(path, read_only=True), path)
        except (*METADATA_FAILURES, ImportError) as error:
            raise refusal(path, error) from error
    if os.path.isdir(path):
        return WatchedStore(_Folder(path), path)
    if os.path.isfile(path) and zipfile.is_zipfile(path):
        return WatchedStore(_Zip(path), path)
    problem = "is neither a folder nor a zip file" if os.path.exists(path) else "does not exist"
    raise ImageError(f"`{path}` {problem}", hint="an OME-Zarr image is a folder `x.ome.zarr`")


def outermost_group(path: str) -> str:
    """Return the outermost group in the store: zip programs often add a folder."""
    if not os.path.isfile(path):
        return ""
    try:
        with Archive(path) as archive:
            names = archive.namelist()
    except ZIP_FAILURES as error:
        raise refusal(path, error) from error
    groups = [name for name in names if name.rsplit("/", 1)[-1] in GROUP_FILES]
    outermost = min(groups, key=lambda name: name.count("/"), default="")
    return outermost.rpartition("/")[0]


def open_level(
    path: str, store: WatchedStore, group: str, name: str, zarr_format: ZarrFormat
) -> Any:
    """Open an array that the metadata lists; raise ImageError if it is missing or empty."""
    try:
        array, _ = open_array(store, join(group, name), zarr_format)
        is_empty = min(array.shape, default=0) < 1 or min(array.chunks) < 1
    except METADATA_FAILURES as error:
        raise ImageError(
            f"cannot open level `{shorten(name)}` of `{path}`: {_reason(error)}",
            hint="the image is damaged or incomplete: copy it again",
        ) from error
    if is_empty:
        raise ImageError(f"level `{shorten(name)}` of `{path}` is empty", hint="write it again")
    return array


def open_array(store: WatchedStore, path: str, zarr_format: ZarrFormat) -> tuple[Any, StoredSizes]:
    """Open an array whose chunks decode at most to the size that its metadata states."""
    store.watch(None)
    array: Any = zarr.open_array(store, path=path, mode="r", zarr_format=zarr_format)
    metadata, shape = array.metadata, array.metadata.chunk_grid.chunk_shape
    if zarr_format == 2:
        is_compressed = metadata.compressor is not None
        plain = [*(metadata.filters or ()), *([metadata.compressor] if is_compressed else [])]
        written = [each.get_config() for each in plain]
        sizes = encoded_sizes(written, shape, array.dtype.itemsize)
        codecs = [
            _OldDecoder(each.codec_id, size) if each.codec_id in DECODERS else each
            for each, size in zip(plain, sizes, strict=False)
        ]
        compressor = codecs.pop() if is_compressed else None
        metadata = replace(metadata, filters=codecs or None, compressor=compressor)
    else:
        written = [each.to_dict() for each in metadata.codecs]
        sizes = encoded_sizes(written, shape, array.dtype.itemsize)
        codecs = _bounded(metadata.codecs, shape, array.dtype.itemsize)
        metadata = replace(metadata, codecs=codecs)
    part = chunk_size(written, shape, array.dtype.itemsize)
    bounded = zarr.Array(zarr.AsyncArray(metadata, array.store_path, array.config))
    return bounded, StoredSizes(sizes[-1], part)


def _bounded(codecs: Sequence[Codec], shape: Sequence[int], itemsize: int) -> list[Codec]:
    """Return codecs of zarr v3 that stop at the chunk size."""
    written = [each.to_dict() for each in codecs]
    bounded: list[Codec] = []
    for codec, record, size in zip(
        codecs, written, encoded_sizes(written, shape, itemsize), strict=False
    ):
        if isinstance(codec, ShardingCodec):
            inner = _bounded(codec.codecs, codec.chunk_shape, itemsize)
            bounded.append(
                _Shard(
                    chunk_shape=codec.chunk_shape,
                    codecs=inner,
                    index_codecs=codec.index_codecs,
                    index_location=codec.index_location,
                )
            )
        else:
            name = codec_name(record)
            bounded.append(_Decoder(name, size) if name in DECODERS else codec)
    return bounded


class _Shard(ShardingCodec):
    """Checks the index of a shard, where zarr would overflow 64 bits."""

    async def _decode_shard_index(
        self, index_bytes: Buffer, chunks_per_shard: tuple[int, ...]
    ) -> Any:
        index = await super()._decode_shard_index(index_bytes, chunks_per_shard)
        places = index.offsets_and_lengths
        is_stored = (places != np.iinfo(places.dtype).max).any(-1)
        if (is_stored & (places >> 62 > 0).any(-1)).any():
            raise ValueError("the index of a shard is damaged")
        return index


class _OldDecoder(OldCodec):  # type: ignore[misc]
    """Codec of zarr v2 that decodes at most `most` bytes."""

    codec_id = ""

    def __init__(self, name: str, most: int) -> None:
        self.codec_id, self._most = name, most

    def decode(self, buf: Any, out: Any = None) -> Any:
        return decode(self.codec_id, buf, self._most)

    def encode(self, buf: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class _Decoder(BytesBytesCodec):
    """Codec of zarr v3 that decodes at most `most` bytes."""

    name: str
    most: int
    is_fixed_size = False

    async def _decode_single(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        values = await asyncio.to_thread(decode, self.name, chunk_bytes.as_numpy_array(), self.most)
        return chunk_spec.prototype.buffer.from_bytes(values)

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name}

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        raise NotImplementedError


def join(group: str, name: str) -> str:
    """Return the path of `name` in `group`."""
    return f"{group}/{name}" if group else name


def refusal(path: str, error: Exception) -> ImageError:
    """Return the error for a path that is not an OME-Zarr image."""
    return ImageError(f"`{path}` is not an OME-Zarr image: {_reason(error)}", hint=FOLDER_HINT)


def _reason(error: Exception) -> str:
    # The message of zarr repeats its classes, store and path.
    if isinstance(error, FileNotFoundError):
        return "no metadata found"
    return one_line(error)[:LONGEST_REASON]
