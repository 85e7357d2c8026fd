"""What benchmarks/soak.py found: damage that once got past the readers."""

import json
import math
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import rasterio.shutil
import tifffile
from affine import Affine
from PIL import Image

from tests.images import area_average, noise, write_geotiff, write_pyramid_tiff
from tests.slides import truncate, write_ome_rgb, write_zarr, write_zarr_zip
from tnetcli.errors import ImageError
from tnetcli.geometry import Size, Window
from tnetcli.readers.detect import open_image
from tnetcli.readers.raster import RasterReader
from tnetcli.readers.slide import SlideReader

SCENE = noise((200, 150), 3, "uint8", seed=5)
WHOLE, FULL = Window(0, 0, 200, 150), Size(200, 150)
HALF = np.zeros((150, 200), bool)
HALF[:, 100:] = True


def read(path):
    with open_image(path) as reader:
        return reader.read(WHOLE, FULL)


def read_levels(path):
    with open_image(path) as reader:
        for scale in (1, 2, 4):
            reader.read(WHOLE, Size(200 // scale, 150 // scale))


# A place on the map


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 1e300])
def test_a_transform_that_is_not_finite_is_ignored_with_a_warning(tmp_path, number):
    path = write_geotiff(tmp_path / "a.tif", SCENE)
    data = path.read_bytes()
    tiepoint = struct.pack("<d", 399_960.0)
    assert data.count(tiepoint) == 1
    path.write_bytes(data.replace(tiepoint, struct.pack("<d", number)))
    with open_image(path) as reader:
        georeference, warnings = reader.georeference, reader.info.warnings
    if math.isfinite(number):
        assert georeference.transform[2] == number
    else:
        assert georeference is None
        assert "the transform is not invertible and is ignored" in warnings


def test_pixels_without_extent_are_no_place(tmp_path):
    line = Affine(10.0, 20.0, 399_960.0, 5.0, 10.0, 5_000_040.0)
    path = write_geotiff(tmp_path / "a.tif", SCENE, transform=line)
    with open_image(path) as reader:
        assert reader.georeference is None
        assert "the transform is not invertible and is ignored" in reader.info.warnings


# Sidecars


@pytest.mark.parametrize("keep", [0, 6, 100, 195, 300, 500])  # 195: its directory is there
@pytest.mark.parametrize("ending", ["msk", "ovr", "msk.ovr"])
def test_a_sidecar_that_is_cut_off_is_an_error(tmp_path, ending, keep):
    path = write_geotiff(
        tmp_path / "a.tif", SCENE, mask=HALF, external_mask=True,
        overviews=[2, 4], external_overviews=True,
    )  # fmt: skip
    sidecar = tmp_path / f"a.tif.{ending}"
    sidecar.write_bytes(sidecar.read_bytes()[:keep])
    with pytest.raises(ImageError) as caught:
        read_levels(path)
    assert "a.tif" in str(caught.value)
    assert caught.value.hint


def test_overviews_beside_an_image_that_has_its_own_are_no_part_of_it(tmp_path):
    path = write_geotiff(tmp_path / "a.tif", SCENE, overviews=[2, 4])
    write_geotiff(tmp_path / "a.tif.ovr", SCENE[:, ::2, ::2])
    assert np.array_equal(read(path).values, SCENE)


# Values of tags


@pytest.mark.parametrize("big_endian", [False, True])
@pytest.mark.parametrize("bigtiff", ["no", "yes"])
def test_a_value_past_the_end_is_not_passed_over(tmp_path, bigtiff, big_endian):
    scene = np.where(HALF, SCENE, 7).astype(np.float32)
    path = write_geotiff(
        tmp_path / "a.tif", scene, nodata=7.25, bigtiff=bigtiff, big_endian=big_endian
    )
    with rasterio.open(path, "r+") as dataset:
        dataset.nodata = -12345678.25  # longer: the directory moves to the end
    data = path.read_bytes()
    assert b"-12345678.25" in data[-200:]
    path.write_bytes(data[:-1])
    with pytest.raises(ImageError, match="truncated") as caught:
        open_image(path)
    assert caught.value.hint


def set_tag(path, code, value, *, level=0):
    """Write a short value over that of a tag of one level."""
    with tifffile.TiffFile(path) as file:
        place = file.series[0].levels[level].pages[0].tags[code].valueoffset
    with path.open("r+b") as file:
        file.seek(place)
        file.write(struct.pack("<H", value))


@pytest.mark.parametrize(("code", "value"), [(284, 65535), (277, 1)], ids=["planes", "samples"])
def test_an_overview_of_another_kind_is_not_read_as_if_it_were_the_image(tmp_path, code, value):
    levels = [SCENE, area_average(SCENE, 2)]
    path = write_ome_rgb(tmp_path / "a.ome.tif", levels)
    set_tag(path, code, value, level=1)
    with pytest.raises(ImageError) as caught:
        read_levels(path)
    assert caught.value.hint


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "gdal"])
@pytest.mark.parametrize(
    ("name", "value"), [("BitsPerSample", 1), ("SampleFormat", 2)], ids=["bits", "sign"]
)
def test_a_damaged_overview_of_a_raster_is_not_read_as_if_it_were_the_image(
    tmp_path, name, value, direct
):
    path = write_geotiff(tmp_path / "a.tif", noise((200, 150), 1, "uint16"), overviews=[2, 4])
    with tifffile.TiffFile(path) as file:
        place = file.pages[1].tags[name].valueoffset
    with path.open("r+b") as file:
        file.seek(place)
        file.write(struct.pack("<H", value))
    with pytest.raises(ImageError, match="overview 1") as caught:
        RasterReader(str(path), direct=direct)
    assert caught.value.hint


def write_twice(path, first, **options):
    """Write two tiled pages of one size, the first of which only the libraries read."""
    common = {"tile": (64, 64), "metadata": None, "compression": "deflate", "photometric": "rgb"}
    with tifffile.TiffWriter(path) as writer:
        writer.write(first, **{**common, **options})
        writer.write(255 - SCENE.transpose(1, 2, 0), subfiletype=1, **common)
    return str(path)


def test_a_later_page_of_the_same_size_is_not_taken_for_the_level(tmp_path):
    colours = SCENE.transpose(1, 2, 0)
    lossless = {"compression": "webp", "compressionargs": {"lossless": True}}
    with RasterReader(write_twice(tmp_path / "a.tif", colours, **lossless)) as reader:
        assert np.array_equal(reader.read(WHOLE, FULL).values, SCENE)
    opaque = np.dstack([colours, np.full((150, 200), 255, np.uint8)])
    with SlideReader(write_twice(tmp_path / "b.tif", opaque, extrasamples=(2,))) as reader:
        assert np.array_equal(reader.read(WHOLE, FULL).values, SCENE)


@pytest.mark.parametrize("extra", [(), (0, 0)], ids=["undeclared", "declared"])
def test_three_greys_are_not_read_as_colours(tmp_path, extra):
    path = write_pyramid_tiff(tmp_path / "a.tif", SCENE)
    if extra:
        options = {"planarconfig": "contig", "photometric": "minisblack", "extrasamples": extra}
        pages = [SCENE.transpose(1, 2, 0), area_average(SCENE, 2).transpose(1, 2, 0)]
        with tifffile.TiffWriter(path) as writer:
            for page in pages:
                writer.write(page, tile=(64, 64), metadata=None, **options)
    else:
        set_tag(path, 262, 1)  # OpenSlide gives other pixels then
    with pytest.raises(ImageError, match="OpenSlide reads wrongly"):
        SlideReader(str(path))
    assert np.array_equal(read(path).values, SCENE)


# PNG, read row by row


@pytest.fixture
def deep_png(tmp_path):
    plain = write_geotiff(tmp_path / "plain.tif", noise((200, 150), 3, "uint16"), crs=None)
    path = tmp_path / "a.png"
    rasterio.shutil.copy(plain, path, driver="PNG")
    (tmp_path / "a.png.aux.xml").unlink(missing_ok=True)
    return path


def test_no_row_of_a_png_with_a_wrong_checksum_is_given_out(deep_png):
    data = bytearray(deep_png.read_bytes())
    data[len(data) // 2] ^= 1
    deep_png.write_bytes(data)
    with open_image(deep_png) as reader:
        assert reader.name == "raster"
        with pytest.raises(ImageError, match="the checksum of the chunk at byte"):
            reader.read(Window(0, 0, 200, 60), Size(200, 60))


@pytest.mark.parametrize("share", [0.4, 0.7, 0.99])
def test_no_row_of_a_png_that_is_cut_off_is_given_out(deep_png, share):
    truncate(deep_png, share)
    with open_image(deep_png) as reader, pytest.raises(ImageError, match="truncated"):
        reader.read(Window(0, 0, 200, 10), Size(200, 10))


def test_a_gif_whose_next_frame_is_cut_off_is_an_image_error(tmp_path):
    path = tmp_path / "a.gif"
    Image.fromarray(SCENE.transpose(1, 2, 0)).convert("P").save(path)
    data = path.read_bytes()
    # A frame begins in place of the end, and is no longer than its first byte but nine.
    path.write_bytes(data[:-1] + b"," + bytes(8))
    with pytest.raises(ImageError) as caught:
        open_image(path)
    assert caught.value.hint


HUNGRY = """
import sys
from tests.commands import peak_memory
from tnetcli.geometry import Size, Window
from tnetcli.readers.image import ImageReader
with ImageReader(sys.argv[1]) as reader:
    before = peak_memory()
    reader.read(Window(0, 0, 8, 8), Size(8, 8))
    print((peak_memory() - before) / reader.size.pixels)
"""


def test_an_image_of_many_pixels_is_not_copied_more_often_than_needed(tmp_path):
    path = tmp_path / "a.png"
    Image.new("P", (5000, 5000)).save(path, transparency=3)
    done = subprocess.run(
        [sys.executable, "-c", HUNGRY, str(path)],
        capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-500:]
    assert float(done.stdout) < 6  # bytes a pixel: one in Pillow, four of ours


# Sizes that cannot be


def claim(path, size):
    source = write_geotiff(path.parent / "source.tif", SCENE)
    rasterio.shutil.copy(source, path, driver="VRT")
    text = path.read_text()
    wide, high = 'rasterXSize="200"', 'rasterYSize="150"'
    assert wide in text
    text = text.replace(wide, f'rasterXSize="{size[0]}"', 1)
    path.write_text(text.replace(high, f'rasterYSize="{size[1]}"', 1))
    return path


@pytest.mark.parametrize("size", [(2**31 - 1, 150), (200, 2**31 - 1), (2**31 - 1, 2**31 - 1)])
def test_a_flat_image_of_more_pixels_than_its_bytes_can_hold_is_refused(tmp_path, size):
    with pytest.raises(ImageError, match="gigapixels without overviews, in") as caught:
        open_image(claim(tmp_path / "a.vrt", size))
    assert "damaged" in caught.value.hint


def test_a_flat_image_that_is_almost_empty_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("TNET_CACHE", str(tmp_path / "cache"))
    with open_image(claim(tmp_path / "a.vrt", (6000, 5000))) as reader:
        pixels = reader.read(Window(0, 0, 200, 150), Size(200, 150))
        assert np.array_equal(pixels.values, SCENE)


# OME-Zarr


@pytest.mark.parametrize("keep", [1, 12, 15])
def test_a_chunk_cut_off_within_its_header_is_an_error(tmp_path, keep):
    path = write_zarr(tmp_path / "a.zarr", SCENE)
    chunk = path / "0" / "0.0.0"
    chunk.write_bytes(chunk.read_bytes()[:keep])
    with open_image(path) as reader, pytest.raises(ImageError, match="truncated"):
        reader.read(Window(0, 0, 64, 64), Size(64, 64))


@pytest.mark.parametrize("channels", [2**17, 2**31, 2**62])
def test_more_channels_than_any_image_has_are_refused(tmp_path, channels):
    path = write_zarr(tmp_path / "a.zarr", SCENE, ())
    edit(path / "0" / ".zarray", shape=[channels, 150, 200])
    with pytest.raises(ImageError, match=f"has {channels:,} bands") as caught:
        open_image(path)
    assert caught.value.hint


@pytest.mark.parametrize("shape", [[3, 150, 2**63], [3, 2**31, 200], [3, 2**62, 2**62]])
def test_a_side_that_no_image_has_is_refused(tmp_path, shape):
    path = write_zarr(tmp_path / "a.zarr", SCENE)
    edit(path / "0" / ".zarray", shape=shape)
    with pytest.raises(ImageError, match=f"claims {shape[2]} x {shape[1]} pixels") as caught:
        open_image(path)
    assert caught.value.hint


@pytest.mark.parametrize("shape", [[3, 150, 40_000], [3, 2**30, 200]])
def test_an_image_of_another_shape_than_its_overviews_is_refused(tmp_path, shape):
    path = write_zarr(tmp_path / "a.zarr", SCENE)
    edit(path / "0" / ".zarray", shape=shape)
    with pytest.raises(ImageError, match="but has an overview of 100 x 75") as caught:
        open_image(path)
    assert caught.value.hint


def test_a_fill_value_that_the_pixels_cannot_hold_is_an_error(tmp_path):
    import zarr

    write_zarr(tmp_path / "a.zarr", SCENE, ())
    group = zarr.open_group(str(tmp_path / "a.zarr"), mode="r")
    other = zarr.open_group(str(tmp_path / "b.zarr"), mode="w", zarr_format=3)
    other.create_array("0", data=SCENE, chunks=(3, 64, 64))
    other.attrs["ome"] = {"version": "0.5", "multiscales": group.attrs["multiscales"]}
    edit(tmp_path / "b.zarr" / "0" / "zarr.json", fill_value=2**31)
    with pytest.raises(ImageError, match="level `0`"):
        open_image(tmp_path / "b.zarr")


@pytest.mark.parametrize("version", [46, 90, 148, 255])
def test_an_archive_that_claims_to_be_newer_than_python_knows_is_an_image_error(tmp_path, version):
    path = write_zarr_zip(tmp_path / "a.zarr.zip", SCENE)
    data = bytearray(path.read_bytes())
    place = data.index(b"PK\x01\x02")  # the first entry of the directory
    data[place + 6] = version  # needed to extract
    path.write_bytes(data)
    if version == 46:
        assert np.array_equal(read(path).values, SCENE)
        return
    with pytest.raises(ImageError) as caught:
        open_image(path)
    assert caught.value.hint


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
