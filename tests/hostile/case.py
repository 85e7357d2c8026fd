"""What one attack consists of, and the sound images that most of them are built on."""

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from numpy.typing import NDArray
from PIL import Image

from tests.images import noise

VICTIM = b"# a file of the user\n"
GDAL_METADATA = 42112  # TIFF tag


@dataclass(frozen=True, slots=True)
class Place:
    """Folders of one case: everything but `work` must be the same after the commands."""

    root: Path
    url: str  # of the listener, without a slash at the end

    @property
    def images(self) -> Path:
        """Return the folder of the hostile files."""
        return self.root / "images"

    @property
    def victim(self) -> Path:
        """Return a folder of the user that no command is asked to touch."""
        return self.root / "victim"

    @property
    def work(self) -> Path:
        """Return the working folder of the commands: outputs, cache, home and temporary files."""
        return self.root / "work"

    def make(self) -> None:
        """Create the folders."""
        for folder in (self.images, self.victim, self.work):
            folder.mkdir(parents=True)
        (self.victim / "profile").write_bytes(VICTIM)

    def fill(self, text: str) -> str:
        """Put the names of this place into a word of a command."""
        names = {
            "images": self.images, "victim": self.victim, "work": self.work,
            "url": self.url, "host": self.url.removeprefix("http://"),
        }  # fmt: skip
        for name, value in names.items():
            text = text.replace(f"{{{name}}}", str(value))
        return text


@dataclass(frozen=True, slots=True)
class Step:
    """One command, the exit codes that are right for it and the words that stderr must hold."""

    words: tuple[str, ...]
    codes: frozenset[int]
    says: tuple[str, ...] = ()
    before: Callable[[Place], object] | None = None  # what an attacker does just before it


@dataclass(frozen=True, slots=True)
class Ended:
    """What one command came to."""

    words: tuple[str, ...]
    code: int | None  # None: the time limit ended it
    seconds: float
    megabytes: float  # above those of an idle command
    out: str = field(repr=False)
    err: str = field(repr=False)


Check = Callable[[Place, Sequence[Ended]], Iterable[str]]


@dataclass(frozen=True, slots=True)
class Case:
    """One attack: how to write its files, what is run on them and what is right."""

    name: str
    finding: str  # row of the audit
    make: Callable[[Place], object]
    steps: tuple[Step, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    may_request: str = ""  # paths on the listener that a command names begin like this
    check: Check | None = None
    entry: str = ""  # the image, where one can be put into a batch


def step(
    *words: str,
    codes: Iterable[int] = (3,),
    says: Sequence[str] = (),
    before: Callable[[Place], object] | None = None,
) -> Step:
    """Return a command with the exit codes that are right for it."""
    return Step(words, frozenset(codes), tuple(says), before)


def image(
    name: str,
    finding: str,
    entry: str,
    make: Callable[[Place], object],
    *,
    info: Iterable[int] = (3,),
    predict: Iterable[int] = (3,),
    **options: Any,
) -> Case:
    """Return the case of one hostile image, described first and then classified."""
    path = f"{{images}}/{entry}"
    steps = (
        step("info", path, codes=info),
        step("predict", path, "-o", "out.jsonl", "--quiet", codes=predict),
    )
    return Case(name, finding, make, steps, entry=entry, **options)


def pixels(side: int = 512) -> NDArray[np.uint8]:
    """Return (height, width, 3), smooth enough for any codec."""
    return np.ascontiguousarray(noise((side, side), seed=3).transpose(1, 2, 0))


def write_tiff(path: Path, side: int = 512, *, metadata: str = "", **options: Any) -> Path:
    """Write a tiled RGB TIFF without overviews, with GDAL's metadata tag where there is any."""
    tags = [(GDAL_METADATA, 2, 0, metadata, True)] if metadata else []
    options = {"tile": (64, 64), "photometric": "rgb", **options}
    tifffile.imwrite(path, pixels(side), metadata=None, extratags=tags, **options)
    return path


def write_png(path: Path, side: int = 512) -> Path:
    """Write an RGB photograph."""
    Image.fromarray(pixels(side)).save(path)
    return path


def vrt(
    source: str, side: int = 512, *, relative: bool = False, element: str = "SimpleSource"
) -> str:
    """Return a VRT whose three bands come from `source`."""
    rectangle = f'xOff="0" yOff="0" xSize="{side}" ySize="{side}"'
    filename = f'<SourceFilename relativeToVRT="{int(relative)}">{html.escape(source)}'
    bands = "".join(
        f'<VRTRasterBand dataType="Byte" band="{band}"><ColorInterp>{colour}</ColorInterp>'
        f"<{element}>{filename}</SourceFilename><SourceBand>{band}</SourceBand>"
        f"<SrcRect {rectangle}/><DstRect {rectangle}/></{element}></VRTRasterBand>"
        for band, colour in enumerate(("Red", "Green", "Blue"), 1)
    )
    return f'<VRTDataset rasterXSize="{side}" rasterYSize="{side}">{bands}</VRTDataset>'


def overview_tag(value: str) -> str:
    """Return GDAL's metadata tag that names the file of the overviews; it is decoded twice."""
    return (
        '<GDALMetadata><Item name="OVERVIEW_FILE" domain="OVERVIEWS">'
        f"{html.escape(html.escape(value))}</Item></GDALMetadata>"
    )


def overview_sidecar(value: str) -> str:
    """Return the `.aux.xml` that names the file of the overviews."""
    return (
        '<PAMDataset><Metadata domain="OVERVIEWS"><MDI key="OVERVIEW_FILE">'
        f"{html.escape(value)}</MDI></Metadata></PAMDataset>"
    )
