"""Open an image with the reader that matches its content."""

import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator

from tnetcli.errors import ImageError
from tnetcli.files import Archive, is_remote, open_regular
from tnetcli.readers.base import Reader, ReadOptions
from tnetcli.readers.watch import watching
from tnetcli.readers.wrappers import RescaledReader
from tnetcli.registry import Registry
from tnetcli.text import reason

BUILT_IN = {
    "raster": "tnetcli.readers.raster:RasterReader",
    "slide": "tnetcli.readers.slide:SlideReader",
    "tiff": "tnetcli.readers.tiff:TiffReader",
    "ome_zarr": "tnetcli.readers.zarr:OmeZarrReader",
    "image": "tnetcli.readers.image:ImageReader",
}
# A reader is a class that is called with a path and ReadOptions. A plug-in may have a class method
# `accepts(path, head: bytes) -> bool`, asked for files that no built-in reader recognises.
READERS: Registry[Callable[[str, ReadOptions], Reader]] = Registry(
    "reader",
    BUILT_IN,
    extras={
        "openslide": ("slides", "reading slides"),
        "google_crc32c": ("zarr", "reading OME-Zarr"),
        "numcodecs": ("zarr", "reading OME-Zarr"),
    },
)

TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
# Grey with alpha, RGB and RGBA of 16 bits, which Pillow reduces to 8.
DEEP_COLOURS = (b"\x02", b"\x04", b"\x06")
PILLOW_MAGIC = (PNG_MAGIC, b"\xff\xd8\xff", b"BM", b"GIF87a", b"GIF89a", b"RIFF")
JPEG_2000_MAGIC = (b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51")
ZARR_FILES = ("zarr.json", ".zgroup", ".zattrs", ".zarray")
# GDAL's own tags in a TIFF: metadata and nodata.
GDAL_TAGS = (42112, 42113)
SNIFF_BYTES = 4096
# Raised by `zipfile` for damaged archives, and for features that it does not support.
ZIP_FAILURES = (
    zipfile.BadZipFile, EOFError, OSError, OverflowError, RuntimeError, ValueError, struct.error,
    zlib.error,
)  # fmt: skip
DICOM_INDEX = "DICOMDIR"  # the table of contents of a medium, not an image
DICOM_HEAD_BYTES = 1 << 16  # the series is stored before the pixels
# The study and directly after it the series; references to other images have other neighbours.
DICOM_SERIES = re.compile(
    rb"\x20\x00\x0d\x00UI..[\d.\0 ]{1,64}\x20\x00\x0e\x00UI..([\d.]{1,64})", re.DOTALL
)


def detect(path: str) -> str:
    """Return the name of the reader for `path`; raise ImageError if there is none."""
    if is_remote(path):
        return "raster"
    head = _head(path)
    if head is None:
        return _detect_folder(path)
    if head.startswith(TIFF_MAGIC):
        return _detect_tiff(path)
    if head[128:132] == b"DICM" or _is_mirax(path, head):
        return "slide"
    if head.startswith(JPEG_2000_MAGIC) or b"<VRTDataset" in head:
        return "raster"
    if head.startswith(PILLOW_MAGIC):
        deep = head.startswith(PNG_MAGIC) and head[24:25] == b"\x10" and head[25:26] in DEEP_COLOURS
        return "raster" if deep or has_sidecar(path) or _is_large(path) else "image"
    if head.startswith(b"PK\x03\x04") and _zip_has_zarr(path):
        return "ome_zarr"
    return _detect_rest(path, head)


def _head(path: str) -> bytes | None:
    """Return the first bytes of a file, None for a folder."""
    try:
        if os.path.isdir(path):
            return None
        with open_regular(path) as file:
            head = file.read(SNIFF_BYTES)
    except FileNotFoundError as error:
        problem = "is a broken link" if os.path.islink(path) else "does not exist"
        raise ImageError(f"`{path}` {problem}", hint="check the path") from error
    except PermissionError as error:
        raise ImageError(f"no permission to read `{path}`", hint="check with `ls -l`") from error
    except (OSError, ValueError) as error:
        raise ImageError(f"cannot read `{path}`: {reason(error)}", hint="check the path") from error
    if not head:
        raise ImageError(f"`{path}` is empty", hint="copy or download it again")
    return head


def _detect_folder(path: str) -> str:
    try:
        if not set(ZARR_FILES).isdisjoint(os.listdir(path)):
            return "ome_zarr"
        has_dicom = first_dicom(path) is not None
        if has_dicom and holds_one_slide(path):
            return "slide"
    except OSError as error:
        raise ImageError(
            f"no permission to read the folder `{path}`", hint="check with `ls -l`"
        ) from error
    if (plugin := _accepting_plugin(path, b"")) is not None:
        return plugin
    raise ImageError(
        f"`{path}` is a folder{' of several images' if has_dicom else ''}, not an image",
        hint="give the images inside, or a glob such as 'folder/*.tif'",
    )


def first_dicom(folder: str) -> str | None:
    """Return the first DICOM file in `folder`, recognised by its content."""
    paths = (os.path.join(folder, name) for name in sorted(os.listdir(folder)))
    return next((path for path in paths if series_of(path) is not None), None)


def _detect_tiff(path: str) -> str:
    from tnetcli.readers.tiff_files import summarize_tiff

    tiff = summarize_tiff(path)
    if tiff.is_vendor_slide or _slide_vendor(path) not in (None, "generic-tiff"):
        return "slide"
    if tiff.is_stack:
        return "tiff"
    is_gdal = tiff.is_geographic or tiff.is_palette or tiff.tags.intersection(GDAL_TAGS)
    if is_gdal or has_sidecar(path) or tiff.levels == 1:
        return "raster"
    is_plain = tiff.is_rgb and tiff.is_tiled
    return "slide" if is_plain and _slide_vendor(path) == "generic-tiff" else "tiff"


def _slide_vendor(path: str) -> str | None:
    try:
        import openslide
    except ImportError:
        return None
    from tnetcli.readers.slide import check_slide_files

    check_slide_files(path)  # OpenSlide opens some of them to detect the vendor
    vendor: str | None = openslide.OpenSlide.detect_format(path)
    return vendor


def has_sidecar(path: str) -> bool:
    """Return True if files beside `path` hold its georeference, overviews or mask for GDAL."""
    stem, ending = os.path.splitext(path)
    ending = ending.lstrip(".").lower()
    worlds = {"wld", f"{ending}w", f"{ending[:1]}{ending[-1:]}w"} if ending else {"wld"}
    names = [f"{path}.{tail}" for tail in ("ovr", "msk", "aux.xml")]
    names += [f"{stem}.{tail}" for world in worlds for tail in (world, world.upper())]
    return any(os.path.exists(name) for name in names)


def _is_mirax(path: str, head: bytes) -> bool:
    folder = os.path.splitext(path)[0]
    return head.startswith(b"\xff\xd8\xff") and os.path.isfile(os.path.join(folder, "Slidedat.ini"))


def _is_large(path: str) -> bool:
    from tnetcli.readers.image import PILLOW_FAILURES, is_large, open_pillow

    try:
        with open_pillow(path) as image:
            return is_large(image)
    except PILLOW_FAILURES:
        return False  # the image reader reports what is wrong


def _zip_has_zarr(path: str) -> bool:
    try:
        with Archive(path) as archive:
            return any(name.rsplit("/", 1)[-1] in ZARR_FILES for name in archive.namelist())
    except ZIP_FAILURES:
        return False


def _detect_rest(path: str, head: bytes) -> str:
    if _slide_vendor(path) is not None:
        return "slide"
    from tnetcli.readers.gdal import driver_of

    if driver_of(path) is not None:
        return "raster"
    if (plugin := _accepting_plugin(path, head)) is not None:
        return plugin
    if b"\0" not in head and all(byte >= 9 for byte in head):
        raise ImageError(
            f"`{path}` is a text file",
            hint="pass a list of images with --manifest, or on standard input with `-`",
        )
    raise ImageError(
        f"no reader recognises the format of `{path}`",
        hint=f"check it with `file`; readers: {', '.join(READERS)}",
    )


def _accepting_plugin(path: str, head: bytes) -> str | None:
    for name in READERS:
        if name not in BUILT_IN:
            accepts = getattr(READERS.load(name), "accepts", None)
            if accepts is not None and accepts(path, head):
                return name
    return None


def series_of(path: str) -> str | None:
    """Return the series of a DICOM file, "" if it states none; None for any other file."""
    # Opening a pipe would block.
    if os.path.basename(path).upper() == DICOM_INDEX or not os.path.isfile(path):
        return None
    with open_regular(path) as file:
        if file.read(132)[128:] != b"DICM":
            return None
        found = DICOM_SERIES.search(file.read(DICOM_HEAD_BYTES))
    return found[1].decode() if found else ""


# A file with one of these endings is an image even if damaged: a batch must report it.
IMAGE_ENDINGS = frozenset({
    "tif", "tiff", "svs", "ndpi", "mrxs", "scn", "vms", "vmu", "bif", "qptiff", "dcm",
    "jp2", "vrt", "img", "png", "jpg", "jpeg", "webp", "bmp", "gif",
})  # fmt: skip
SIDECAR_ENDINGS = (".ovr", ".msk", ".aux.xml")


def is_image_folder(path: str) -> bool:
    """Return True if a folder is itself an image: a zarr, or one slide in DICOM files."""
    names = set(os.listdir(path)) if os.access(path, os.R_OK) else set()
    if names.intersection(ZARR_FILES):
        return True
    return any(name.lower().endswith(".dcm") for name in names) and holds_one_slide(path)


def holds_one_slide(folder: str) -> bool:
    """Return True if the images in a folder are DICOM files, all of the same slide."""
    with os.scandir(folder) as entries:
        files = [each for each in entries if not each.name.startswith(".") and not _is_folder(each)]
    slides = {_series(each) for each in files if _is_image_file(each)}
    return len(slides) == 1 and None not in slides


def images_inside(folder: str, *, recursive: bool) -> Iterator[str]:
    """Yield the images of a folder by name, or the folder itself if it cannot be listed."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        yield folder  # so that it is reported and the batch continues
        return
    slides: set[str] = set()
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if _is_folder(entry):
            if is_image_folder(entry.path):
                yield entry.path
            # A link may form a cycle; its target is found where it is.
            elif (
                recursive
                and not entry.is_symlink()
                and not os.path.exists(os.path.join(entry.path, "Slidedat.ini"))
            ):
                yield from images_inside(entry.path, recursive=recursive)
        elif _is_image_file(entry):
            series = _series(entry)
            if series and series in slides:
                continue  # another level of the same slide
            slides.add(series or "")
            yield entry.path


def _series(entry: "os.DirEntry[str]") -> str | None:
    ending = entry.name.lower().rsplit(".", 1)[-1]
    if ending in IMAGE_ENDINGS - {"dcm"}:
        return None  # opening ten thousand files would be slow
    try:
        return series_of(entry.path)
    except OSError:
        return None


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _is_image_file(entry: "os.DirEntry[str]") -> bool:
    name = entry.name.lower()
    if name.endswith(SIDECAR_ENDINGS) or name.upper() == DICOM_INDEX:
        return False
    if name.rsplit(".", 1)[-1] in IMAGE_ENDINGS or name.endswith(".zarr.zip"):
        return True
    try:
        with open_regular(entry.path) as file:
            head = file.read(132)
    except OSError:
        return False
    magic = (*TIFF_MAGIC, *PILLOW_MAGIC, *JPEG_2000_MAGIC)
    return head.startswith(magic) or head[128:] == b"DICM"


def open_image(
    path: str | os.PathLike[str],
    *,
    reader: str | None = None,
    options: ReadOptions | None = None,
    dtype: str | None = None,
) -> Reader:
    """Open `path` with the named reader, or with the one that matches its content.

    `options.rescale` maps values onto the range of `dtype`, by default that of the image.
    """
    name, options = os.fspath(path), options or ReadOptions()
    with watching(name):
        chosen = None if reader is None else READERS.load(reader)
        if reader is None or reader in BUILT_IN:
            # Detection also reports what is missing, empty, unreadable or truncated.
            detected = detect(name)
            chosen = chosen or READERS.load(detected)
            if (reader or detected) == "slide" and os.path.isdir(name):
                name = first_dicom(name) or name
        assert chosen is not None
        opened = chosen(name, options)
        if opened.name != "image":  # those are small, and read without GDAL
            from tnetcli.readers.overviews import with_overviews

            opened = with_overviews(opened, options)
    if options.rescale is None:
        return opened
    return RescaledReader(opened, *options.rescale, dtype or opened.dtype.name)
