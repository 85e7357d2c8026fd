"""Where a zarr image is stored, a folder, a zip or a URL, and what zarr finds there in vain."""

import os
import zipfile
from importlib.util import find_spec
from typing import Any, Literal

import zarr
from zarr.abc.store import ByteRequest, RangeByteRequest, Store
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import FsspecStore, LocalStore, WrapperStore, ZipStore

from tnetcli.errors import ImageError
from tnetcli.readers.detect import ZIP_FAILURES
from tnetcli.readers.failures import PARSING_FAILURES
from tnetcli.wording import one_line

ZarrFormat = Literal[2, 3]

STORE_FAILURES = ZIP_FAILURES  # those of folders and URLs are among them
# zarr meets damaged metadata with whatever its parsing runs into.
METADATA_FAILURES = (*STORE_FAILURES, *PARSING_FAILURES)
FOLDER_HINT = "give the folder whose `zarr.json` or `.zattrs` lists `multiscales`"
GROUP_FILES = ("zarr.json", ".zgroup")
# Where a blosc chunk gives its own length, and how long its header is.
BLOSC_LENGTH, BLOSC_HEADER = slice(12, 16), 16


class WatchedStore(WrapperStore[Store]):
    """Notes what zarr asks for in vain and how much it gets, which it tells nobody."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.watch(is_blosc=False)

    def watch(self, *, is_blosc: bool) -> None:
        """Start anew; `is_blosc` says that each object to come is one blosc chunk."""
        self._is_blosc = is_blosc
        self.absent: set[str] = set()
        self.bytes_read = 0

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Return what is stored under `key`; less than what was promised is an error."""
        found = await super().get(key, prototype, byte_range)
        if found is None:
            self.absent.add(key)
            return None
        wanted = 0
        if isinstance(byte_range, RangeByteRequest):
            # zarr takes a chunk wholly past the end of a truncated shard for one never written.
            wanted = byte_range.end - byte_range.start
        elif self._is_blosc:
            # Blosc believes its header and decodes whatever lies past the end of the chunk.
            length = int.from_bytes(found[BLOSC_LENGTH].to_bytes(), "little")
            wanted = max(length, BLOSC_HEADER)
        if len(found) < wanted:
            raise OSError(f"`{key}` is cut off: {len(found)} of {wanted} bytes")
        self.bytes_read += len(found)
        return found

    def close(self) -> None:
        """Close the store beneath, if it was ever opened."""
        # A zip that was never opened fails on the attempt to close it.
        if self._is_open:
            super().close()


def open_store(path: str) -> WatchedStore:
    """Open the folder, zip or URL at `path`, for reading only."""
    if "://" in path:
        if find_spec("fsspec") is None:
            raise ImageError(
                f"reading `{path}` needs fsspec",
                hint="pip install fsspec aiohttp   (s3fs for s3://, gcsfs for gs://)",
            )
        try:
            return WatchedStore(FsspecStore.from_url(path, read_only=True))
        except (*METADATA_FAILURES, ImportError) as error:
            raise refusal(path, error) from error
    if os.path.isdir(path):
        return WatchedStore(LocalStore(path, read_only=True))
    if os.path.isfile(path) and zipfile.is_zipfile(path):
        return WatchedStore(ZipStore(path, mode="r"))
    problem = "is neither a folder nor a zip file" if os.path.exists(path) else "does not exist"
    raise ImageError(f"`{path}` {problem}", hint="an OME-Zarr image is a folder `x.ome.zarr`")


def outermost_group(path: str) -> str:
    """Return where in the store the image begins: zip programs like to add a folder around it."""
    if not os.path.isfile(path):
        return ""
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except ZIP_FAILURES as error:
        raise refusal(path, error) from error
    groups = [name for name in names if name.rsplit("/", 1)[-1] in GROUP_FILES]
    outermost = min(groups, key=lambda name: name.count("/"), default="")
    return outermost.rpartition("/")[0]


def open_level(
    path: str, store: WatchedStore, group: str, name: str, zarr_format: ZarrFormat
) -> Any:
    """Open an array that the metadata lists; a lost one means an incomplete copy."""
    try:
        array = zarr.open_array(store, path=join(group, name), mode="r", zarr_format=zarr_format)
        is_empty = min(array.shape, default=0) < 1 or min(array.chunks) < 1
    except METADATA_FAILURES as error:
        raise ImageError(
            f"cannot open level `{name}` of `{path}`: {_reason(error)}",
            hint="the image is damaged or not copied completely: copy it again",
        ) from error
    if is_empty:
        raise ImageError(f"level `{name}` of `{path}` is empty", hint="write it again")
    return array


def join(group: str, name: str) -> str:
    """Return the path in the store of what is called `name` in `group`."""
    return f"{group}/{name}" if group else name


def refusal(path: str, error: Exception) -> ImageError:
    """Return the error that says why nothing at `path` can be read as OME-Zarr."""
    return ImageError(f"`{path}` is no OME-Zarr image: {_reason(error)}", hint=FOLDER_HINT)


def _reason(error: Exception) -> str:
    # zarr names its classes, its store and its path once more.
    return "no metadata found" if isinstance(error, FileNotFoundError) else one_line(error)
