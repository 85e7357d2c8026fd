"""OME-XML of TIFF files, compared with the directories before tifffile allocates its planes."""

import math
import os
from collections.abc import Callable, Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from tnetcli.errors import ImageError
from tnetcli.files import MOST_XML_BYTES, is_plain_name
from tnetcli.wording import reason

MOST_XML_TAGS = 2**19
# Planes that a file may declare without a directory for each: acquisitions are stopped early,
# and the other files of a set may be missing.
MOST_PLANES = 2**16
# Labels of one axis within another.
MOST_LABELS = 2**16
# Times that planes may refer to a directory, and some more for small files.
MOST_REFERENCES, SPARE_REFERENCES = 2, 256
MOST_FILES, MOST_DIRECTORIES_OF_SET = 10_000, 100_000

Check = Callable[[str], Sequence[int]]


def parse_xml(path: str, text: str) -> Element:
    """Parse XML of bounded size without a document type, which could define entities."""
    if len(text) > MOST_XML_BYTES or text.count("<") > MOST_XML_TAGS:
        raise _refused(path, f"has XML metadata of {len(text):,} characters")
    if "<!DOCTYPE" in text or "<!ENTITY" in text:
        raise _refused(path, "has XML metadata with a document type")
    try:
        return ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise ImageError(
            f"the XML metadata of `{path}` is damaged: {error}",
            hint="make or copy it again, or try --reader raster",
        ) from error


def first_pixels(root: Element) -> Element | None:
    """Return the `Pixels` of the first image."""
    return root.find("{*}Image/{*}Pixels")


def check_ome(path: str, text: str, check_directories: Check) -> None:
    """Compare the sizes in OME-XML with the directories of the file and of its companions.

    `check_directories` returns the number of values in each page of a file. ImageError where
    tifffile would allocate more planes than that, or open anything but a TIFF in the same folder.
    """
    root = parse_xml(path, text)
    for element in root.iter():
        if element.tag[:-1].endswith("Along") and "Start" in element.attrib:
            _check_labels(path, element)
    files = _Files(path, root.get("UUID"), check_directories)
    planes = sum(
        _planes(files, pixels)
        for image in root
        if image.tag.endswith("Image")
        for pixels in image
        if pixels.tag.endswith("Pixels")
    )
    if planes > max(MOST_PLANES, files.directories):
        raise _refused(path, f"declares {planes:,} planes, but holds {files.directories:,}")


class _Files:
    """The files of a set by UUID, with the number of values in each of their pages."""

    def __init__(self, path: str, uuid: str | None, check_directories: Check) -> None:
        self._path, self._check = path, check_directories
        self._own = check_directories(path)
        self._pages: dict[str | None, Sequence[int]] = {uuid: self._own}
        self.directories, self._references = len(self._own), 0

    def refer_to(self, count: int) -> None:
        """Count references to pages; ImageError once there are too many."""
        self._references += count
        if self._references > MOST_REFERENCES * self.directories + SPARE_REFERENCES:
            raise _refused(self._path, f"refers too often to its {self.directories:,} planes")

    def of(self, data: Element) -> Sequence[int] | None:
        """Return the pages that a `TiffData` is about; None if their file is missing."""
        uuid = next((child for child in data if child.tag.endswith("UUID")), None)
        if uuid is None:
            return self._own
        name = uuid.get("FileName", "")
        own = os.path.basename(self._path).lower()
        if None in self._pages and uuid.text is not None and name.lower() == own:
            self._pages[uuid.text] = self._pages.pop(None)
        if uuid.text not in self._pages:
            pages = self._companion(name)
            if pages is None:
                return None
            self._pages[uuid.text] = pages
            self.directories += len(pages)
            if len(self._pages) > MOST_FILES or self.directories > MOST_DIRECTORIES_OF_SET:
                raise _refused(self._path, f"names more than {len(self._pages):,} files")
        return self._pages[uuid.text]

    def _companion(self, name: str) -> Sequence[int] | None:
        if not is_plain_name(name):
            raise _refused(self._path, f"names `{name}` as a part of it, outside its folder")
        companion = os.path.join(os.path.dirname(os.path.abspath(self._path)), name)
        if not os.path.exists(companion):
            return None
        try:
            return self._check(companion)
        except OSError as error:
            raise ImageError(
                f"cannot open `{name}`, a part of `{self._path}`: {reason(error)}",
                hint="copy all files of the set into one folder",
            ) from error


def _planes(files: _Files, pixels: Element) -> int:
    """Return how many planes tifffile would make a list of for one image."""
    axes = pixels.attrib["DimensionOrder"][::-1]
    shape = [int(pixels.attrib[f"Size{axis}"]) for axis in axes]
    samples, listed, smallest = 0, 0, 0
    for child in pixels:
        if child.tag.endswith("Channel") and not samples:
            samples = max(int(child.get("SamplesPerPixel", 1)), 1)
            shape = [
                size // samples if axis == "C" else size
                for axis, size in zip(axes, shape, strict=True)
            ]
        start = _first_plane(child, axes[:-2], shape) if child.tag.endswith("TiffData") else None
        if start is None:
            continue
        pages = files.of(child)
        count = int(child.get("PlaneCount", child.get("NumPlanes", int("IFD" in child.attrib))))
        count = count or len(pages or ())
        listed = max(listed, start + count)
        place = int(child.get("IFD", 0))
        named = (pages or ())[place : place + max(count, 0)] if place >= 0 else pages or ()
        files.refer_to(len(named))
        smallest = min([*named, *([smallest] if smallest else [])], default=0)
    declared = math.prod(shape) * max(samples, 1) // smallest if smallest else 0
    return max(listed, declared)


def _first_plane(data: Element, axes: str, shape: Sequence[int]) -> int | None:
    """Return the plane that a `TiffData` begins with; None outside the image."""
    index = 0
    for axis, size in zip(axes, shape, strict=False):
        position = int(data.get(f"First{axis}", 0))
        if not 0 <= position < size:
            return None
        index = index * size + position
    return index


def _check_labels(path: str, along: Element) -> None:
    start, end = float(along.attrib["Start"]), float(along.attrib["End"])
    step = float(along.get("Step", 1))
    count = (end - start) / step if step else math.inf
    if not abs(count) <= MOST_LABELS:
        raise _refused(path, f"has an axis from {start:g} to {end:g} in steps of {step:g}")


def _refused(path: str, problem: str) -> ImageError:
    return ImageError(
        f"`{path}` {problem}",
        hint="its OME metadata are damaged or made to harm; try --reader raster",
    )
