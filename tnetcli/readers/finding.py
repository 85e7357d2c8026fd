"""Which files of a folder are images, by their endings and by what is in them."""

import os
from collections.abc import Iterator

from tnetcli.files import open_regular
from tnetcli.readers.detect import DICOM_INDEX, JPEG_2000_MAGIC, PHOTO_MAGIC, TIFF_MAGIC, ZARR_FILES, series_of

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
