"""Which files of a folder are images, by their endings and by what is in them."""

import os
from collections.abc import Iterator

from tnetcli.readers.detect import JPEG_2000_MAGIC, PHOTO_MAGIC, TIFF_MAGIC, ZARR_FILES

# Endings that mean an image even when the content is broken: it must not vanish from a batch.
IMAGE_ENDINGS = frozenset({
    "tif", "tiff", "svs", "ndpi", "mrxs", "scn", "vms", "vmu", "bif", "qptiff", "dcm",
    "jp2", "vrt", "img", "png", "jpg", "jpeg", "webp", "bmp", "gif",
})  # fmt: skip
SIDECAR_ENDINGS = (".ovr", ".msk", ".aux.xml")


def is_image_folder(path: str) -> bool:
    """Say whether a folder is itself an image: a zarr, a slide in DICOM files."""
    names = set(os.listdir(path)) if os.access(path, os.R_OK) else set()
    return bool(names.intersection(ZARR_FILES)) or any(
        name.lower().endswith(".dcm") for name in names
    )


def images_inside(folder: str, *, recursive: bool) -> Iterator[str]:
    """Yield the images of a folder by name; a folder that may not be listed yields itself."""
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError:
        yield folder  # so that it is reported, and does not end the batch
        return
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
            yield entry.path


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
        with open(entry.path, "rb") as file:
            head = file.read(132)
    except OSError:
        return False
    return head.startswith((*TIFF_MAGIC, *PHOTO_MAGIC, *JPEG_2000_MAGIC)) or head[128:] == b"DICM"
