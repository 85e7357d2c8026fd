"""Open an image with the reader that its content asks for."""

import os
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Iterator
from importlib import import_module

from tnetcli.errors import ImageError, MissingExtraError, UsageError
from tnetcli.files import Archive, is_remote, open_regular
from tnetcli.readers.base import Reader, ReadOptions
from tnetcli.readers.watch import watching
from tnetcli.readers.wrappers import RescaledReader
from tnetcli.text import did_you_mean, reason

TIFF_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"
# Grey with alpha, RGB and RGBA of 16 bits, which Pillow reads as 8.
DEEP_COLOURS = (b"\x02", b"\x04", b"\x06")
PHOTO_MAGIC = (PNG_MAGIC, b"\xff\xd8\xff", b"BM", b"GIF87a", b"GIF89a", b"RIFF")
JPEG_2000_MAGIC = (b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51")
ZARR_FILES = ("zarr.json", ".zgroup", ".zattrs", ".zarray")
# GDAL's own tags in a TIFF: metadata and nodata.
GDAL_TAGS = (42112, 42113)
SNIFF_BYTES = 4096
# What Python raises over damaged archives, and those that it takes for newer than itself.
ZIP_FAILURES = (
    zipfile.BadZipFile, EOFError, OSError, OverflowError, RuntimeError, ValueError, struct.error,
    zlib.error,
)  # fmt: skip
DICOM_INDEX = "DICOMDIR"  # of a medium: a DICOM file that is no image
DICOM_HEAD_BYTES = 1 << 16  # the series is told before the pixels
# The study and right behind it the series; those of other images that a file refers to stand apart.
DICOM_SERIES = re.compile(
    rb"\x20\x00\x0d\x00UI..[\d.\0 ]{1,64}\x20\x00\x0e\x00UI..([\d.]{1,64})", re.DOTALL
)


def detect(path: str) -> str:
    """Return the name of the reader for `path`; ImageError where there is none."""
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
    if head.startswith(PHOTO_MAGIC):
        deep = head.startswith(PNG_MAGIC) and head[24:25] == b"\x10" and head[25:26] in DEEP_COLOURS
        return "raster" if deep or has_sidecar(path) or _is_large(path) else "photo"
    if head.startswith(b"PK\x03\x04") and _zip_has_zarr(path):
        return "ome_zarr"
    return _detect_rest(path, head)


def _head(path: str) -> bytes | None:
    """Return the first bytes of a file, None for a folder."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            return None
        if not stat.S_ISREG(mode):
            raise ImageError(f"`{path}` is not a regular file", hint="copy it to a file first")
        with open_regular(path) as file:
            head = file.read(SNIFF_BYTES)
    except FileNotFoundError as error:
        dangling = os.path.islink(path)
        problem = "is a link to nothing" if dangling else "does not exist"
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
        names = os.listdir(path)
    except PermissionError as error:
        raise ImageError(f"no permission to list `{path}`", hint="check with `ls -ld`") from error
    if any(name in names for name in ZARR_FILES):
        return "ome_zarr"

    try:
        if first_dicom(path):
            if holds_one_slide(path):
                return "slide"
            raise ImageError(
                f"`{path}` is a folder of several images",
                hint="give the images inside, of a slide in DICOM files one of its files",
            )
    except OSError as error:
        raise ImageError(
            f"no permission to read what is in `{path}`", hint="check with `ls -l`"
        ) from error
    raise ImageError(
        f"`{path}` is a folder, not an image",
        hint="give the images inside, or a glob such as 'folder/*.tif'",
    )


def first_dicom(folder: str) -> str | None:
    """Return a DICOM file of `folder`, by content; a slide is a folder of them."""
    for name in sorted(os.listdir(folder)):
        path = os.path.join(folder, name)
        if series_of(path) is not None:
            return path
    return None


def _detect_tiff(path: str) -> str:
    from tnetcli.readers.tiff_files import look_at_tiff

    look = look_at_tiff(path)
    if look.is_vendor_slide or _slide_vendor(path) not in (None, "generic-tiff"):
        return "slide"
    if look.is_stack:
        return "tiff"
    if (
        look.is_geographic
        or look.is_palette
        or look.tags.intersection(GDAL_TAGS)
        or has_sidecar(path)
    ):
        return "raster"
    if look.levels > 1:
        plain = look.is_rgb and look.is_tiled
        return "slide" if plain and _slide_vendor(path) == "generic-tiff" else "tiff"
    return "raster"


def _slide_vendor(path: str) -> str | None:
    try:
        import openslide
    except ImportError:
        return None
    from tnetcli.readers.slide import check_slide_files

    check_slide_files(path)  # to find out, OpenSlide opens some of them
    vendor: str | None = openslide.OpenSlide.detect_format(path)
    return vendor


def has_sidecar(path: str) -> bool:
    """Say whether files beside `path` tell GDAL where it lies or hold its overviews or mask."""
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
    from tnetcli.readers.image import PHOTO_FAILURES, is_large, open_photo

    try:
        with open_photo(path) as image:
            return is_large(image)
    except PHOTO_FAILURES:
        return False  # the photo reader says what is wrong with it


def _zip_has_zarr(path: str) -> bool:
    try:
        with Archive(path) as archive:
            return any(name.rsplit("/", 1)[-1] in ZARR_FILES for name in archive.namelist())
    except ZIP_FAILURES:
        return False


def _detect_rest(path: str, head: bytes) -> str:
    if _slide_vendor(path) is not None:
        return "slide"
    from tnetcli.readers.companions import driver_of

    if driver_of(path) is not None:
        return "raster"
    kind = "a text file" if _is_text(head) else "of no format that a reader knows"
    hint = (
        "a list of images goes to --manifest, or to standard input with `-`"
        if _is_text(head)
        else "check it with `file`; readers: raster, slide, tiff, ome_zarr, photo"
    )
    raise ImageError(f"`{path}` is {kind}", hint=hint)


def _is_text(head: bytes) -> bool:
    return b"\0" not in head and sum(byte < 9 for byte in head) == 0


def series_of(path: str) -> str | None:
    """Return the series of a DICOM file, "" where it tells none; None of any other file."""
    # A pipe would be waited for.
    if os.path.basename(path).upper() == DICOM_INDEX or not os.path.isfile(path):
        return None
    with open_regular(path) as file:
        if file.read(132)[128:] != b"DICM":
            return None
        found = DICOM_SERIES.search(file.read(DICOM_HEAD_BYTES))
    return found[1].decode() if found else ""


# Endings that mean an image even when the content is broken: it must not vanish from a batch.
IMAGE_ENDINGS = frozenset({
    "tif", "tiff", "svs", "ndpi", "mrxs", "scn", "vms", "vmu", "bif", "qptiff", "dcm",
    "jp2", "vrt", "img", "png", "jpg", "jpeg", "webp", "bmp", "gif",
})  # fmt: skip
SIDECAR_ENDINGS = (".ovr", ".msk", ".aux.xml")


def is_image_folder(path: str) -> bool:
    """Say whether a folder is itself an image: a zarr, one slide in DICOM files."""
    names = set(os.listdir(path)) if os.access(path, os.R_OK) else set()
    if names.intersection(ZARR_FILES):
        return True
    return any(name.lower().endswith(".dcm") for name in names) and holds_one_slide(path)


def holds_one_slide(folder: str) -> bool:
    """Say whether the images in a folder are DICOM files, and all of the same slide."""
    slides = set()
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(".") or _is_folder(entry):
                continue
            series = _series(entry)
            if series is not None:
                slides.add(series)
            elif _looks_like_an_image(entry):
                return False
    return len(slides) == 1


def images_inside(folder: str, *, recursive: bool) -> Iterator[str]:
    """Yield the images of a folder by name; a folder that may not be listed yields itself."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        yield folder  # so that it is reported, and does not end the batch
        return
    slides: set[str] = set()
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if _is_folder(entry):
            if is_image_folder(entry.path):
                yield entry.path
            # A link may lead back up; what it leads to is found where it is.
            elif (
                recursive
                and not entry.is_symlink()
                and not os.path.exists(os.path.join(entry.path, "Slidedat.ini"))
            ):
                yield from images_inside(entry.path, recursive=recursive)
        elif _looks_like_an_image(entry):
            series = _series(entry)
            if series and series in slides:
                continue  # another level of a slide that is named already
            slides.add(series or "")
            yield entry.path


def _series(entry: "os.DirEntry[str]") -> str | None:
    """Return the series of a DICOM file; None of any other, and of what cannot be read."""
    ending = entry.name.lower().rsplit(".", 1)[-1]
    if ending in IMAGE_ENDINGS - {"dcm"}:
        return None  # without a look into each of ten thousand
    try:
        return series_of(entry.path)
    except OSError:
        return None


def _is_folder(entry: "os.DirEntry[str]") -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False


def _looks_like_an_image(entry: "os.DirEntry[str]") -> bool:
    name = entry.name.lower()
    if name.endswith(SIDECAR_ENDINGS):
        return False
    if name.rsplit(".", 1)[-1] in IMAGE_ENDINGS or name.endswith(".zarr.zip"):
        return True
    try:
        with open_regular(entry.path) as file:
            head = file.read(132)
    except OSError:
        return False
    if head.startswith((*TIFF_MAGIC, *PHOTO_MAGIC, *JPEG_2000_MAGIC)):
        return True
    return head[128:] == b"DICM" and name.upper() != DICOM_INDEX


READERS = {
    "raster": "tnetcli.readers.raster:RasterReader",
    "slide": "tnetcli.readers.slide:SlideReader",
    "tiff": "tnetcli.readers.tiff:TiffReader",
    "ome_zarr": "tnetcli.readers.zarr:OmeZarrReader",
    "photo": "tnetcli.readers.image:ImageReader",
}
EXTRAS = {
    "openslide": ("slides", "reading slides"),
    "zarr": ("zarr", "reading OME-Zarr"),
    "numcodecs": ("zarr", "reading OME-Zarr"),
}


def open_image(
    path: str | os.PathLike[str],
    *,
    reader: str | None = None,
    options: ReadOptions | None = None,
    dtype: str | None = None,
) -> Reader:
    """Open `path` with the named reader, or with the one its content asks for.

    `options.rescale` maps values onto the range of `dtype`, by default that of the image.
    """
    name, options = os.fspath(path), options or ReadOptions()
    with watching(name):
        opened = _open(name, reader, options)
    if options.rescale is None:
        return opened
    return RescaledReader(opened, *options.rescale, dtype or opened.dtype.name)


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
    from tnetcli.readers.overviews import OverviewReader, is_flat, refuse_false_claims

    if not is_flat(opened) or is_remote(opened.path):
        return opened
    try:
        refuse_false_claims(opened)
    except ImageError:
        opened.close()
        raise
    if options.overviews == "require":
        opened.close()
        raise ImageError(
            f"`{opened.path}` has no overviews: {opened.size.pixels / 1e9:.2f} gigapixels would "
            "have to be decoded to see it whole",
            hint=f"tnet pyramid {opened.path}   (or -O overviews=build)",
        )
    return OverviewReader(opened, options)
