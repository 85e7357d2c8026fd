import os
import random
import select
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.images import noise, write_geotiff, write_ome_tiff, write_pyramid_tiff, write_svs
from tests.slides import (
    Once,
    copy_of_real,
    real,
    truncate,
    write_cog,
    write_scn,
    write_zarr,
    write_zarr_zip,
)
from tnetcli.errors import ImageError, MissingExtraError, TnetError, UsageError
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import ReadOptions
from tnetcli.readers.detect import READERS, open_image
from tnetcli.readers.pyramid import BLOCKS
from tnetcli.testing.reader import assert_equal, random_windows

SCENE = noise((300, 200))
WHOLE, FULL = Window(0, 0, 300, 200), Size(300, 200)


def save(path, image=SCENE, **options):
    Image.fromarray(image.transpose(1, 2, 0)).save(path, **options)
    return path


def write_vrt(path, source, size=(300, 200)):
    path.write_text(
        f'<VRTDataset rasterXSize="{size[0]}" rasterYSize="{size[1]}">'
        '<VRTRasterBand dataType="Byte" band="1"><SimpleSource>'
        f"<SourceFilename>{source}</SourceFilename><SourceBand>1</SourceBand>"
        "</SimpleSource></VRTRasterBand></VRTDataset>"
    )
    return path


WRITERS = {
    "cog.tif": lambda path: write_cog(path, SCENE),
    "jpeg cog.tif": lambda path: write_cog(path, SCENE, COMPRESS="JPEG", QUALITY=90),
    "geotiff.tif": lambda path: write_geotiff(path, SCENE, overviews=[2, 4]),
    "aperio.svs": lambda path: write_svs(path, SCENE),
    "jpeg aperio.svs": lambda path: write_svs(path, SCENE, compression="jpeg"),
    "leica.scn": lambda path: write_scn(path, SCENE, slide=(600, 500)),
    "pyramid.tif": lambda path: write_pyramid_tiff(path, SCENE),
    "stack.ome.tif": lambda path: write_ome_tiff(path, SCENE),
    "photo.png": save,
    "photo.jpg": save,
    "image.zarr.zip": lambda path: write_zarr_zip(path, SCENE),
}
CMU = "wsi/CMU-1-Small-Region.svs"
LOSSLESS = [name for name in WRITERS if "jp" not in name and "scn" not in name]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a function that copies an image of a format, written once, to a path."""
    once = Once(tmp_path_factory.mktemp("once"))
    return lambda name, path: Path(shutil.copy(once(name, WRITERS[name]), path))


# Which reader


@pytest.mark.parametrize("name", LOSSLESS)
def test_an_image_is_read_right_whatever_its_format(tmp_path, made, name):
    with open_image(made(name, tmp_path)) as reader:
        assert np.array_equal(reader.read(WHOLE, FULL).values, SCENE)


def test_a_folder_is_read_right_too(tmp_path):
    with open_image(write_zarr(tmp_path / "a.zarr", SCENE)) as reader:
        assert np.array_equal(reader.read(WHOLE, FULL).values, SCENE)


def test_a_folder_of_dicom_files_is_opened_as_one_slide():
    folder = real("wsi/dicom_panimg/full_no_bot")
    with open_image(folder) as reader, open_image(folder / "full_no_bot.dcm") as same:
        window, out_size = Window(0, 0, 154, 290), Size(154, 290)
        assert_equal(reader.read(window, out_size), same.read(window, out_size))


@pytest.mark.parametrize("reader", ["raster", "slide", "tiff"])
def test_the_user_may_choose_another_reader(tmp_path, reader):
    path = write_pyramid_tiff(tmp_path / "a.tif", SCENE)
    with open_image(path, reader=reader) as opened:
        assert opened.name == reader
        assert np.array_equal(opened.read(WHOLE, FULL).values, SCENE)


@pytest.mark.parametrize("reader", sorted({*READERS} - {"raster", "image"}))
def test_a_reader_that_does_not_know_the_format_refuses_with_a_hint(tmp_path, reader):
    path = save(tmp_path / "a.png")
    with pytest.raises(ImageError) as caught:
        open_image(path, reader=reader)
    assert caught.value.hint


def test_an_unknown_reader_is_a_usage_error_with_the_nearest_name(tmp_path):
    with pytest.raises(UsageError, match="unknown reader: `rastr`") as caught:
        open_image(save(tmp_path / "a.png"), reader="rastr")
    assert caught.value.hint == "did you mean `raster`?"


def test_options_reach_the_reader(tmp_path):
    path = write_ome_tiff(tmp_path / "a.tif", SCENE)
    with open_image(path, options=ReadOptions(bands=("2",), mpp=0.3)) as reader:
        assert reader.bands == ("2",)
        assert reader.microns_per_pixel.x == 0.3


@pytest.mark.parametrize(
    "stem", ["with space", "Würzburg 雪 ñandú", "new\nline", "-o", "a;b'c\"d", "#?%20"]
)
@pytest.mark.parametrize("name", LOSSLESS)
def test_a_file_may_have_any_name(tmp_path, made, name, stem):
    path = made(name, tmp_path / f"{stem} {name}")
    with open_image(path) as reader:
        assert np.array_equal(reader.read(WHOLE, FULL).values, SCENE)


# Truncated files: an error or the right pixels, nothing else

SHARES = [0.1, 0.3, 0.6, 0.9, 0.99]


def views(size):
    whole = Window(0, 0, size.width, size.height)
    corners = [
        (Window(left, top, 64, 64), Size(64, 64))
        for left in (0, size.width - 64)
        for top in (0, size.height - 64)
    ]
    return [(whole, Size(20, 20)), *corners, *random_windows(3, size)]


def assert_error_or_right(path, share):
    with open_image(path) as reader:
        wanted = views(reader.size)
        known = [reader.read(*each) for each in wanted]
    truncate(path, share)
    BLOCKS.clear()
    try:
        opened = open_image(path)
    except ImageError:
        return
    with opened:
        for view, pixels in zip(wanted, known, strict=True):
            try:
                found = opened.read(*view)
            except ImageError:
                continue
            assert_equal(found, pixels)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", WRITERS)
def test_a_truncated_file_is_an_error_or_right(tmp_path, made, name, share):
    assert_error_or_right(made(name, tmp_path), share)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_a_truncated_chunk_is_an_error(tmp_path, share):
    path = write_zarr(tmp_path / "a.zarr", SCENE)
    chunk = next(each for each in (path / "0").rglob("*") if each.is_file() and each.name[0] != ".")
    truncate(chunk, share)
    with open_image(path) as reader, pytest.raises(ImageError):
        reader.read(WHOLE, FULL)


# Spoilt files: whatever the bytes say, only an ImageError comes out

MAGIC = {
    "TIFF": b"II*\0\x08\0\0\0", "big-endian TIFF": b"MM\0*\0\0\0\x08",
    "BigTIFF": b"II+\0\x08\0\0\0\x10\0\0\0\0\0\0\0", "PNG": b"\x89PNG\r\n\x1a\n",
    "JPEG": b"\xff\xd8\xff\xe0", "BMP": b"BM", "GIF": b"GIF89a", "RIFF": b"RIFF\x10\0\0\0WEBP",
    "JPEG 2000": b"\0\0\0\x0cjP  \r\n\x87\n", "zip": b"PK\x03\x04", "DICOM": bytes(128) + b"DICM",
    "VRT": b"<VRTDataset ",
}  # fmt: skip


@pytest.mark.parametrize("magic", MAGIC.values(), ids=MAGIC)
def test_noise_after_the_first_bytes_of_a_format_is_an_image_error(tmp_path, magic):
    path = tmp_path / "a"
    for seed in range(15):
        noisy = np.random.default_rng(seed).bytes(3000)
        # rasterio 1.4 prints a traceback over each message of GDAL that is not UTF-8.
        path.write_bytes(magic + (noisy.hex().encode() if magic[:1] == b"<" else noisy))
        with pytest.raises(ImageError) as caught:
            open_image(path)
        assert caught.value.hint


def metadata_bytes(path):
    """Return where the directories of a TIFF and the first bytes of their values lie."""
    spans = [(0, 8)]
    with tifffile.TiffFile(path) as file:
        for page in file.pages:
            tags = page.aspage().tags
            spans.append((page.offset, page.offset + 2 + 12 * len(tags) + 4))
            spans += [(t.valueoffset, t.valueoffset + min(t.valuebytecount, 64)) for t in tags]
    return [place for start, stop in spans for place in range(start, stop)]


SPOILING = """
import sys
from pathlib import Path
from tnetcli.errors import ImageError
from tnetcli.geometry import Size, Window
from tnetcli.readers.detect import open_image
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        with open_image(path) as reader:
            size = reader.size
            reader.read(Window.whole(size), Size(20, 20))
            reader.read(Window(size.width / 2, size.height / 2, 50, 50), Size(50, 50))
    except ImageError as error:
        assert error.hint
    except Exception as error:
        print(path.name, repr(error)[:100])
"""


def test_spoilt_metadata_are_an_image_error_or_harmless(tmp_path):
    folder = tmp_path / "spoilt"
    folder.mkdir()
    for name in ("cog.tif", "jpeg aperio.svs", "pyramid.tif", "stack.ome.tif"):
        path = WRITERS[name](tmp_path / name)
        places, data = metadata_bytes(path), path.read_bytes()
        for seed in range(40):
            chance, spoilt = random.Random(f"{name} {seed}"), bytearray(data)
            for _ in range(chance.choice([1, 1, 2])):
                spoilt[chance.choice(places)] = chance.choice([0, 1, 255, chance.randrange(256)])
            (folder / f"{seed:02} {name}").write_bytes(spoilt)
    # In a process of its own: a library may end the process instead of raising.
    done = subprocess.run(
        [sys.executable, "-c", SPOILING, str(folder)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout == ""


# Permissions

DENIED = """
import os, sys
from tnetcli.errors import TnetError
from tnetcli.readers.detect import open_image
if os.getuid() == 0:
    os.setuid(65534)
try:
    open_image(sys.argv[1])
except TnetError as error:
    print(type(error).__name__, error, error.hint, sep="|")
"""


@pytest.fixture
def public():
    """Yield a folder that other users may enter, unlike pytest's own."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)
        os.chmod(folder, 0o755)


def opened_by_another(path):
    done = subprocess.run(
        [sys.executable, "-c", DENIED, str(path)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr[-500:]
    return done.stdout.strip().split("|")


def test_a_file_in_a_folder_that_may_not_be_entered_is_said_to_be_so(public):
    (public / "closed").mkdir()
    path = save(public / "closed" / "a.png")
    (public / "closed").chmod(0)
    kind, problem, hint = opened_by_another(path)
    (public / "closed").chmod(0o755)
    assert (kind, "no permission" in problem, bool(hint)) == ("ImageError", True, True)


def test_a_folder_that_may_not_be_listed_is_said_to_be_so(public):
    path = write_zarr(public / "a.zarr", SCENE)
    path.chmod(0)
    kind, problem, hint = opened_by_another(path)
    path.chmod(0o755)
    assert (kind, "no permission" in problem, bool(hint)) == ("ImageError", True, True)


# No network unless a URL is given


class Listener:
    """Hears whether anybody calls, and never answers."""

    def __init__(self, server):
        self._server = server
        self.address = f"http://127.0.0.1:{server.getsockname()[1]}"

    @property
    def was_called(self):
        return bool(select.select([self._server], [], [], 0)[0])


@pytest.fixture
def listener(monkeypatch):
    monkeypatch.setenv("GDAL_HTTP_TIMEOUT", "1")
    monkeypatch.setenv("GDAL_HTTP_MAX_RETRY", "0")
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Listener(server)


def read_if_possible(path):
    with open_image(path) as reader:
        reader.read(Window.whole(reader.size), Size(8, 8))


def test_a_vrt_that_points_to_the_network_is_refused_with_a_hint(tmp_path, listener):
    path = write_vrt(tmp_path / "a.vrt", f"/vsicurl/{listener.address}/a.tif")
    with pytest.raises(ImageError, match="outside its folder") as caught:
        open_image(path)
    assert caught.value.hint
    assert not listener.was_called


def test_a_vrt_that_points_to_such_a_vrt_sends_no_request(tmp_path, listener):
    inner = write_vrt(tmp_path / "inner.vrt", f"/vsicurl/{listener.address}/a.tif")
    path = write_vrt(tmp_path / "a.vrt", inner)
    with pytest.raises(ImageError):
        read_if_possible(path)
    assert not listener.was_called


def test_a_vrt_with_an_encoded_address_sends_no_request(tmp_path, listener):
    hidden = f"/vsicurl/{listener.address}/a.tif".replace("v", "&#118;").replace("h", "&#104;")
    with pytest.raises(ImageError):
        read_if_possible(write_vrt(tmp_path / "a.vrt", hidden))
    assert not listener.was_called


def test_a_description_of_a_map_server_sends_no_request(tmp_path, listener):
    path = tmp_path / "a.xml"
    path.write_text(
        '<GDAL_WMS><Service name="TMS"><ServerUrl>'
        f"{listener.address}/${{z}}/${{x}}/${{y}}.png</ServerUrl></Service><DataWindow>"
        "<UpperLeftX>-180</UpperLeftX><UpperLeftY>90</UpperLeftY><LowerRightX>180</LowerRightX>"
        "<LowerRightY>-90</LowerRightY><TileLevel>4</TileLevel><TileCountX>2</TileCountX>"
        "<TileCountY>1</TileCountY></DataWindow><Projection>EPSG:4326</Projection>"
        "<BandsCount>3</BandsCount></GDAL_WMS>"
    )
    with pytest.raises(ImageError):
        read_if_possible(path)
    assert not listener.was_called


# Extras


@pytest.fixture
def without(monkeypatch):
    """Make a library appear not installed."""

    def forget(library, *modules):
        monkeypatch.setattr(READERS, "_loaded", {})
        monkeypatch.setitem(sys.modules, library, None)
        for module in modules:
            monkeypatch.delitem(sys.modules, module, raising=False)

    return forget


@pytest.mark.parametrize("name", ["aperio.svs", "leica.scn"])
def test_a_slide_without_openslide_names_the_pip_command(tmp_path, without, name):
    path = WRITERS[name](tmp_path / name)
    without("openslide", "tnetcli.readers.slide")
    with pytest.raises(MissingExtraError) as caught:
        open_image(path)
    assert caught.value.exit_code == 6
    assert caught.value.hint == "pip install 'tnetcli[slides]'"


def test_a_zarr_without_its_codecs_names_the_pip_command(tmp_path, without):
    path = write_zarr(tmp_path / "a.zarr", SCENE)
    without("numcodecs", "tnetcli.readers.zarr", "tnetcli.readers.zarr_store")
    with pytest.raises(MissingExtraError) as caught:
        open_image(path)
    assert caught.value.exit_code == 6
    assert caught.value.hint == "pip install 'tnetcli[zarr]'"


@pytest.mark.parametrize("name", ["pyramid.tif", "cog.tif", "photo.png", "stack.ome.tif"])
def test_what_needs_no_extra_is_read_without_any(tmp_path, without, name):
    path = WRITERS[name](tmp_path / name)
    without("openslide", "tnetcli.readers.slide")
    without("numcodecs", "tnetcli.readers.zarr", "tnetcli.readers.zarr_store")
    with open_image(path) as reader:
        assert np.array_equal(reader.read(WHOLE, FULL).values, SCENE)


def test_every_error_of_opening_is_one_that_a_user_can_fix(tmp_path):
    for name in ("missing.tif", "", "\0"):
        with pytest.raises(TnetError):
            open_image(str(tmp_path / name) if name else "")


def test_a_file_that_may_not_be_read_is_said_to_be_so(public):
    path = save(public / "a.png")
    path.chmod(0)
    kind, problem, hint = opened_by_another(path)
    assert (kind, "no permission" in problem, bool(hint)) == ("ImageError", True, True)


STATE = """
import logging, os, sys, warnings
from PIL import Image
loggers = [logging.getLogger(name) for name in ("", "rasterio", "rasterio._err", "tifffile", "PIL")]
def state():
    flags = [(each.propagate, each.level, each.disabled) for each in loggers]
    return flags, list(warnings.filters), Image.MAX_IMAGE_PIXELS, dict(os.environ)
import numcodecs, openslide, rasterio, simplejpeg, tifffile, zarr
before = state()
from tnetcli.geometry import Size, Window
from tnetcli.readers.detect import READERS, open_image
for name in READERS:
    READERS.load(name)
with open_image(sys.argv[1]) as reader:
    reader.read(Window.whole(reader.size), Size(8, 8))
for old, new in zip(before, state()):
    assert old == new, new
"""


def test_reading_changes_no_state_of_the_process(tmp_path):
    path = write_geotiff(tmp_path / "a.tif", SCENE)
    done = subprocess.run([sys.executable, "-c", STATE, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("share", [0.1, 0.99])
@pytest.mark.parametrize(
    "name",
    ["wsi/dicom_camelyon/camelyon_multiframe_jpeg.dcm", CMU, "wsi/test3-DAPI-2-387.ndpi",
     "wsi/zarr/large_image_sample_float32_8bit_range.zarr.zip", "wsi/small_vectra.qptiff",
     "geo/rasterio_RGB.byte.tif"],
)  # fmt: skip
def test_a_truncated_real_file_is_an_error_or_right(tmp_path, name, share):
    path = copy_of_real(name, tmp_path)
    path.chmod(0o644)
    assert_error_or_right(path, share)


@pytest.mark.parametrize("reader", ["slide", "tiff", "image", "raster"])
def test_a_folder_given_to_a_reader_of_files_is_an_error_with_a_hint(tmp_path, reader):
    with pytest.raises(ImageError) as caught:
        open_image(write_zarr(tmp_path / "a.zarr", SCENE), reader=reader)
    assert caught.value.hint


def test_a_vrt_of_a_missing_file_is_an_image_error(tmp_path):
    with pytest.raises(ImageError) as caught:
        read_if_possible(write_vrt(tmp_path / "a.vrt", tmp_path / "gone.tif"))
    assert caught.value.hint


def test_a_dicom_file_without_openslide_is_a_missing_extra(without):
    path = real("wsi/synthetic/boxes_0.dcm")
    without("openslide", "tnetcli.readers.slide")
    with pytest.raises(MissingExtraError):
        open_image(path)
