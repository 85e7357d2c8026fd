"""Open any image with the reader that suits it."""

import os
from importlib import import_module

from tnetcli.errors import ImageError, MissingExtraError, UsageError
from tnetcli.readers.base import Reader, ReadOptions
from tnetcli.readers.detect import detect, first_dicom
from tnetcli.files import is_remote
from tnetcli.readers.watch import watching
from tnetcli.wording import did_you_mean

READERS = {
    "raster": "tnetcli.readers.raster:RasterReader",
    "slide": "tnetcli.readers.slide:SlideReader",
    "tiff": "tnetcli.readers.tiff:TiffReader",
    "ome_zarr": "tnetcli.readers.ome_zarr:OmeZarrReader",
    "photo": "tnetcli.readers.photo:PhotoReader",
}
EXTRAS = {
    "openslide": ("slides", "reading slides"),
    "zarr": ("zarr", "reading OME-Zarr"),
    "numcodecs": ("zarr", "reading OME-Zarr"),
}


def open_image(
    path: str | os.PathLike[str], *, reader: str | None = None, options: ReadOptions | None = None
) -> Reader:
    """Open `path` with the named reader, or with the one its content asks for."""
    name = os.fspath(path)
    with watching(name):
        return _open(name, reader, options or ReadOptions())


def _open(name: str, reader: str | None, options: ReadOptions) -> Reader:
    if reader is not None and reader not in READERS:
        hint = did_you_mean(reader, READERS, f"choose one of: {', '.join(READERS)}")
        raise UsageError(f"unknown reader: `{reader}`", hint=hint)
    # Looking at the content first also finds what is missing, empty, unreadable or cut off.
    detected = detect(name)
    chosen = reader or detected
    if chosen == "slide" and os.path.isdir(name):
        name = first_dicom(name) or name
    opened = _load(chosen)(name, options)
    return _with_overviews(opened, options)


def _load(reader: str) -> type:
    module, name = READERS[reader].split(":")
    try:
        found: type = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name in EXTRAS:
            raise MissingExtraError.of(*EXTRAS[error.name]) from error
        raise
    return found


def _with_overviews(opened: Reader, options: ReadOptions) -> Reader:
    from tnetcli.readers.flat import FlatReader, is_flat, refuse_false_claims

    if not is_flat(opened) or is_remote(opened.path):
        return opened
    try:
        refuse_false_claims(opened)
    except ImageError:
        opened.close()
        raise
    if options.flat == "refuse":
        opened.close()
        raise ImageError(
            f"`{opened.path}` has no overviews: {opened.size.pixels / 1e9:.2f} gigapixels would "
            "have to be decoded to see it whole",
            hint=f"tnet pyramid {opened.path}   (or --flat stream)",
        )
    return FlatReader(opened, options)
