"""What is no regular file where one is expected: pipes, devices and links (S7)."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tifffile

from tests.hostile.bombs import write_files, zarr_v2, zarr_v3
from tests.hostile.case import Case, Place, Step, image, step, vrt, write_tiff

ENDLESS = "/dev/zero"
RGB = 3 * 256 * 256  # bytes of a chunk
SLIDEDAT = """[GENERAL]
SLIDE_VERSION = 01.02
SLIDE_ID = 7C691E3F2DC6412781AECA3E3B3213C1
IMAGENUMBER_X = 4
IMAGENUMBER_Y = 4
OBJECTIVE_MAGNIFICATION = 20
CameraImageDivisionsPerSide = 1
[HIERARCHICAL]
INDEXFILE = {index}
HIER_COUNT = 1
NONHIER_COUNT = 0
HIER_0_NAME = Slide zoom level
HIER_0_COUNT = 1
HIER_0_SECTION = LAYER_0_SECTION
HIER_0_VAL_0 = ZoomLevel_0
HIER_0_VAL_0_SECTION = LAYER_0_LEVEL_0_SECTION
[DATAFILE]
FILE_COUNT = 1
FILE_0 = Data0000.dat
[LAYER_0_LEVEL_0_SECTION]
IMAGE_FILL_COLOR_BGR = 16777215
MICROMETER_PER_PIXEL_X = 0.25
MICROMETER_PER_PIXEL_Y = 0.25
DIGITIZER_WIDTH = 256
DIGITIZER_HEIGHT = 256
OVERLAP_X = 0
OVERLAP_Y = 0
IMAGE_CONCAT_FACTOR = 0
IMAGE_FORMAT = JPEG
"""


def _ome(companion: str, pipe: Callable[[Place], Path]) -> Callable[[Place], object]:
    """Return how to write a set of OME-TIFF files one of which is a pipe."""

    def make(place: Place) -> None:
        uuids = [f"urn:uuid:00000000-0000-0000-0000-00000000000{number}" for number in (0, 1)]
        planes = "".join(
            f'<TiffData FirstZ="{z}" IFD="0" PlaneCount="1"><UUID FileName="{name}">{uuid}</UUID>'
            "</TiffData>"
            for z, (name, uuid) in enumerate(zip(("a.ome.tif", companion), uuids, strict=True))
        )
        text = (
            '<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06" '
            f'UUID="{uuids[0]}"><Image ID="Image:0"><Pixels ID="Pixels:0" DimensionOrder="XYZCT" '
            'Type="uint8" SizeX="64" SizeY="64" SizeZ="2" SizeC="1" SizeT="1">'
            f"{planes}</Pixels></Image></OME>"
        )
        tifffile.imwrite(
            place.images / "a.ome.tif", np.ones((64, 64), np.uint8), description=text,
            metadata=None,
        )  # fmt: skip
        os.mkfifo(pipe(place))

    return make


def _mirax(index: str, pipe: str) -> Callable[[Place], object]:
    """Return how to write a MIRAX slide one file of which is a pipe."""

    def make(place: Place) -> None:
        folder = place.images / "a"
        folder.mkdir()
        (place.images / "a.mrxs").write_bytes(b"\xff\xd8\xff\xe0\0\x10JFIF\0\1\1\0\0\1\0\1\0\0")
        (folder / "Slidedat.ini").write_text(SLIDEDAT.replace("{index}", index))
        for name in ("Index.dat", "Data0000.dat"):
            (folder / name).write_bytes(bytes(404))
        target = folder / pipe
        target.unlink(missing_ok=True)
        os.mkfifo(target)

    return make


def _zarr2(name: str, replace: Callable[[Place, Path], object]) -> Callable[[Place], object]:
    """Return how to write a zarr with something else in the place of one of its files."""
    return _replaced(lambda: zarr_v2(None, bytes(RGB)), name, replace)


def _zarr3(name: str, replace: Callable[[Place, Path], object]) -> Callable[[Place], object]:
    return _replaced(lambda: zarr_v3([{"name": "bytes"}], bytes(RGB)), name, replace)


def _replaced(
    files: Callable[[], dict[str, bytes]], name: str, replace: Callable[[Place, Path], object]
) -> Callable[[Place], object]:
    def make(place: Place) -> None:
        target = write_files(place.images / "a.ome.zarr", files()) / name
        target.unlink()
        replace(place, target)

    return make


def _fifo(place: Place, path: Path) -> None:
    os.mkfifo(path)


def _device(place: Place, path: Path) -> None:
    path.symlink_to(ENDLESS)


def _secret(place: Place, path: Path) -> None:
    (place.victim / "secret").write_bytes(bytes(range(256)) * (RGB // 256))
    path.symlink_to(place.victim / "secret")


def _folder(place: Place, path: Path) -> None:
    path.mkdir()


def _sparse(place: Place, path: Path) -> None:
    """Write a file that goes on for gigabytes that no disk holds."""
    with path.open("wb") as file:
        file.write(b"<PAMDataset>")
        file.truncate(3 * 2**30)


def _beside(name: str) -> Callable[[Place], object]:
    def make(place: Place) -> None:
        write_tiff(place.images / "a.tif")
        os.mkfifo(place.images / name)

    return make


def _sidecar(ending: str, replace: Callable[[Place, Path], object]) -> Callable[[Place], object]:
    def make(place: Place) -> None:
        write_tiff(place.images / "a.tif")
        replace(place, place.images / f"a.tif{ending}")

    return make


def _beside_good(name: str) -> Callable[[Place], object]:
    def make(place: Place) -> None:
        write_tiff(place.images / "good.tif")
        os.mkfifo(place.images / name)

    return make


def _scan(*codes: int) -> tuple[Step, ...]:
    return (
        step("info", "{images}", codes=codes),
        step("predict", "{images}", "-o", "out.jsonl", "--quiet", codes=codes),
    )


def _lone(place: Place) -> None:
    write_tiff(place.images / "good.tif")
    os.mkfifo(place.images / "pipe")


def _given(name: str, codes: tuple[int, ...], *words: str) -> Case:
    """Return the case of a pipe that lies where a file is named."""
    return Case(name, "S7", _lone, (step(*words, codes=codes),))


def _vrt(place: Place) -> None:
    os.mkfifo(place.images / "source.tif")
    (place.images / "a.vrt").write_text(vrt("source.tif", relative=True))


CASES: tuple[Case, ...] = (
    image("pipe-image", "S7", "a.tif", lambda place: os.mkfifo(place.images / "a.tif")),
    image("pipe-ome-companion", "S7", "a.ome.tif",
          _ome("b.ome.tif", lambda place: place.images / "b.ome.tif")),
    image("pipe-ome-companion-above", "S7", "a.ome.tif",
          _ome("../victim/b.ome.tif", lambda place: place.victim / "b.ome.tif")),
    image("pipe-vrt-source", "S7", "a.vrt", _vrt),
    image("pipe-mrxs-index-above", "S7", "a.mrxs", _mirax("../pipe", "../pipe")),
    image("pipe-mrxs-index", "S7", "a.mrxs", _mirax("Index.dat", "Index.dat")),
    image("pipe-mrxs-slidedat", "S7", "a.mrxs", _mirax("Index.dat", "Slidedat.ini")),
    image("pipe-zarr2-chunk", "S7", "a.ome.zarr", _zarr2("0/0.0.0", _fifo), info=(0, 3)),
    image("pipe-zarr2-zattrs", "S7", "a.ome.zarr", _zarr2(".zattrs", _fifo)),
    image("pipe-zarr2-zarray", "S7", "a.ome.zarr", _zarr2("0/.zarray", _fifo)),
    image("pipe-zarr3-chunk", "S7", "a.ome.zarr", _zarr3("0/c/0/0/0", _fifo), info=(0, 3)),
    image("pipe-zarr3-json", "S7", "a.ome.zarr", _zarr3("zarr.json", _fifo)),
    image("endless-zarr2-chunk", "S7", "a.ome.zarr", _zarr2("0/0.0.0", _device), info=(0, 3)),
    image("endless-zarr2-zattrs", "S7", "a.ome.zarr", _zarr2(".zattrs", _device)),
    image("link-zarr2-chunk", "S7", "a.ome.zarr", _zarr2("0/0.0.0", _secret), info=(0, 3)),
    image("pipe-aux-xml", "S7", "a.tif", _sidecar(".aux.xml", _fifo)),
    image("pipe-ovr", "S7", "a.tif", _sidecar(".ovr", _fifo)),
    image("pipe-msk", "S7", "a.tif", _sidecar(".msk", _fifo)),
    image("endless-aux-xml", "S7", "a.tif", _sidecar(".aux.xml", _device)),
    image("endless-ovr", "S7", "a.tif", _sidecar(".ovr", _device)),
    image("sparse-aux-xml", "S7", "a.tif", _sidecar(".aux.xml", _sparse)),
    image("folder-as-ovr", "S7", "a.tif", _sidecar(".ovr", _folder), info=(0, 3), predict=(0, 3)),
    image("folder-as-aux-xml", "S7", "a.tif", _sidecar(".aux.xml", _folder), info=(0, 3),
          predict=(0, 3)),
    image("pipe-world-file", "S7", "a.tif", _beside("a.tfw")),
    image("pipe-rpc", "S7", "a.tif", _beside("a_rpc.txt")),
    image("pipe-metadata", "S7", "a.tif", _beside("a.IMD")),
    image("pipe-aux", "S7", "a.tif", _beside("a.aux")),
    Case("pipe-in-folder", "S7", _beside_good("x.tif"), _scan(8)),
    Case("pipe-without-ending-in-folder", "S7", _beside_good("notes"), _scan(0, 8)),
    Case("pipe-dicom-in-folder", "S7", _beside_good("x.dcm"), _scan(8)),
    _given("pipe-manifest", (2, 4), "predict", "--manifest", "{images}/pipe", "-o", "out.jsonl"),
    _given("pipe-recipe", (4,), "train", "{images}/pipe", "-o", "run"),
    _given("pipe-model", (5,), "info", "{images}/good.tif", "--model", "{images}/pipe"),
    _given("pipe-model-predict", (5,), "predict", "{images}/good.tif", "--model",
           "{images}/pipe"),
    _given("pipe-windows", (2, 4, 7), "predict", "{images}/good.tif", "--regions",
           "{images}/pipe"),
    _given("pipe-predictions-export", (2, 4, 7), "export", "{images}/pipe", "-o", "out.csv"),
    _given("pipe-predictions-merge", (2, 4, 7), "merge", "{images}/pipe", "-o", "out.jsonl"),
    _given("pipe-labels", (2, 4), "evaluate", "--model", "default", "--data", "{images}/pipe"),
)  # fmt: skip
