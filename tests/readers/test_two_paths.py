import numpy as np
import openslide
import pytest
import rasterio
import tifffile
from rasterio.enums import MaskFlags

from tests.slides import DATA, real
from tnetcli.geometry import Size, Window
from tnetcli.readers.pyramid import BLOCKS
from tnetcli.readers.raster import RasterReader
from tnetcli.readers.slide import SlideReader
from tnetcli.readers.tiff import TiffReader
from tnetcli.readers.zarr import OmeZarrReader
from tnetcli.testing.reader import area_mean, assert_equal, random_windows

CMU = "wsi/CMU-1-Small-Region.svs"
TCGA = "wsi/TCGA-CR-7395-01A-01-TS1.svs"
BOXES = "wsi/synthetic/boxes.tiff"
CROP = "wsi/zarr/CMU-1-Small-Region-crop1024.ome.zarr"
GEO = sorted(each.name for each in (DATA / "geo").glob("*.[tT][iI][fF]"))


@pytest.fixture(autouse=True)
def fresh():
    BLOCKS.clear()


def full_windows(count, size, seed=0, side=200):
    """Return windows of whole pixels with the size of their view."""
    random = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        width, height = (
            int(random.integers(1, min(side, each))) for each in (size.width, size.height)
        )
        left = int(random.integers(0, size.width - width + 1))
        top = int(random.integers(0, size.height - height + 1))
        found.append((Window(left, top, width, height), Size(width, height)))
    return found


def box(window):
    return (slice(int(window.top), int(window.bottom)), slice(int(window.left), int(window.right)))


# Slides


def slide_readers(path):
    return [SlideReader(path), SlideReader(path, direct=False), TiffReader(path)]


@pytest.mark.parametrize("name", [CMU, TCGA, BOXES])
def test_every_reader_of_a_slide_gives_the_same_pixels_at_full_resolution(name):
    path = str(real(name))
    first, *others = slide_readers(path)
    for window, out_size in full_windows(6, first.size):
        known = first.read(window, out_size)
        for other in others:
            assert_equal(other.read(window, out_size), known)
    for reader in (first, *others):
        reader.close()


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "openslide"])
@pytest.mark.parametrize("name", [CMU, TCGA, BOXES, "wsi/test3-DAPI-2-387.ndpi",
                                  "wsi/dicom_camelyon/camelyon_multiframe_jpeg.dcm"])  # fmt: skip
def test_a_slide_is_read_as_openslide_alone_reads_it(name, direct):
    path = str(real(name))
    with SlideReader(path, direct=direct) as reader, openslide.OpenSlide(path) as slide:
        for window, out_size in full_windows(4, reader.size, seed=1):
            corner = (int(window.left), int(window.top))
            rgba = np.asarray(slide.read_region(corner, 0, (out_size.width, out_size.height)))
            assert (rgba[..., 3] == 255).all()
            known = rgba[..., :3].transpose(2, 0, 1)
            assert np.array_equal(reader.read(window, out_size).values, known)


@pytest.mark.parametrize("name", [CMU, BOXES])
def test_every_reader_of_a_slide_gives_the_same_view_at_any_scale(name):
    path = str(real(name))
    first, *others = slide_readers(path)
    for window, out_size in random_windows(6, first.size, seed=2):
        known = first.read(window, out_size)
        for other in others:
            found = other.read(window, out_size)
            assert np.array_equal(found.valid, known.valid)
            # OpenSlide takes no fractions of a pixel where a level has an odd size.
            assert np.abs(found.values - known.values.astype(float)).mean() <= 4
    for reader in (first, *others):
        reader.close()


def test_a_plain_pyramid_reads_alike_through_gdal_openslide_and_tifffile():
    path = str(real(BOXES))
    readers = [RasterReader(path), RasterReader(path, direct=False), *slide_readers(path)]
    for window, out_size in full_windows(12, readers[0].size, seed=3):
        known = readers[0].read(window, out_size)
        for other in readers[1:]:
            assert_equal(other.read(window, out_size), known)
    for reader in readers:
        reader.close()


def test_a_zarr_made_of_a_slide_reads_like_the_slide():
    known = tifffile.imread(real(CMU), key=0)[768:1792, 512:1536].transpose(2, 0, 1)
    with OmeZarrReader(str(real(CROP))) as reader:
        for window, out_size in full_windows(8, reader.size, seed=4):
            rows, columns = box(window)
            found = reader.read(window, out_size).values.astype(int)
            assert np.abs(found - known[:, rows, columns]).max() <= 1


def test_a_zarr_made_of_a_slide_gives_the_same_views():
    with OmeZarrReader(str(real(CROP))) as crop, SlideReader(str(real(CMU))) as slide:
        for window, out_size in random_windows(10, crop.size, seed=5):
            if window.left < 0 or window.top < 0 or max(window.right, window.bottom) > 1024:
                continue
            there = Window(window.left + 512, window.top + 768, window.width, window.height)
            one, other = crop.read(window, out_size), slide.read(there, out_size)
            assert np.abs(one.values - other.values.astype(float)).mean() <= 4


# Rasters


def is_lossy(dataset):
    return "JPEG" in dataset.tags(ns="IMAGE_STRUCTURE").get("COMPRESSION", "")


@pytest.mark.parametrize("name", GEO)
def test_a_raster_reads_alike_directly_and_through_gdal(name):
    path = str(real(f"geo/{name}"))
    with rasterio.open(path) as dataset:
        lossy = is_lossy(dataset)
    with RasterReader(path) as fast, RasterReader(path, direct=False) as slow:
        windows = [*full_windows(3, fast.size), *random_windows(3, fast.size)]
        for window, out_size in windows:
            one, other = fast.read(window, out_size), slow.read(window, out_size)
            assert np.array_equal(one.valid, other.valid)
            if lossy:
                assert np.abs(one.values - other.values.astype(float)).mean() < 2
            else:
                assert np.array_equal(one.values, other.values)


@pytest.mark.parametrize("name", GEO)
def test_a_raster_is_read_as_rasterio_alone_reads_it(name):
    path = str(real(f"geo/{name}"))
    with RasterReader(path, direct=False) as reader, rasterio.open(path) as dataset:
        if "palette" in reader.info.details:
            pytest.skip("we give the colours of a palette, rasterio its numbers")
        bands = [
            i for i in range(1, dataset.count + 1) if dataset.colorinterp[i - 1].name != "alpha"
        ]
        for window, out_size in full_windows(3, reader.size, seed=1):
            known = dataset.read(bands, window=rasterio.windows.Window.from_slices(*box(window)))
            pixels = reader.read(window, out_size)
            assert np.array_equal(pixels.values, np.where(pixels.valid, known, 0))


@pytest.mark.parametrize("name", GEO)
def test_a_raster_is_valid_where_rasterio_says_so(name):
    path = str(real(f"geo/{name}"))
    with RasterReader(path) as reader, rasterio.open(path) as dataset:
        if "palette" in reader.info.details:
            pytest.skip("a palette may hold transparent colours, which rasterio calls valid")
        nodata = MaskFlags.nodata in dataset.mask_flag_enums[0]
        if nodata and dataset.nodata not in (None, 0) and dataset.count > 1:
            pytest.skip("we want data in every band, rasterio in any")
        for window, out_size in full_windows(3, reader.size, seed=2):
            here = rasterio.windows.Window.from_slices(*box(window))
            known = dataset.dataset_mask(window=here) > 0
            assert np.array_equal(reader.read(window, out_size).valid, known)


# Files whose overviews are no area means, which no reader can make good.
NEAREST = "overviews of nearest pixels"
CUBIC = "overviews of cubic sharpness, compressed once more"
NOT_AVERAGED = {
    "bluemarble_bmng_5400x2700_cog.tif": CUBIC,
    "rasterio_cogeo.tif": NEAREST,
    "riocogeo_image_geos.tif": CUBIC,
    "riotiler_cog.tif": NEAREST,
    "riotiler_cog_cmap.tif": "a palette has no mean",
    "riotiler_cog_fullearth.tif": NEAREST,
    "riotiler_cog_int16.tif": NEAREST,
    "riotiler_cog_scale.tif": NEAREST,
    "riotiler_cog_world.tif": NEAREST,
    "stars_L7_ETMs.tif": NEAREST,
    "titiler_TCI.tif": NEAREST,
    "rasterio_all-nodata.tif": "it holds no data at all",
    "riotiler_inverted_lat.tif": "it holds no data at all",
}


def part_with_data(reader, side=400):
    """Return a part of the image that holds data, small enough to average by brute force."""
    coarse = reader.read(Window.whole(reader.size), Size(64, 64)).valid
    row, column = np.argwhere(coarse)[len(np.argwhere(coarse)) // 2]
    width, height = min(side, reader.size.width), min(side, reader.size.height)
    left = min(int(column * reader.size.width / 64), reader.size.width - width)
    top = min(int(row * reader.size.height / 64), reader.size.height - height)
    return Window(left, top, width, height)


@pytest.mark.parametrize("name", [each for each in GEO if each not in NOT_AVERAGED])
def test_any_view_of_a_raster_is_near_the_area_mean(name):
    with RasterReader(str(real(f"geo/{name}"))) as reader:
        part = part_with_data(reader)
        size = Size(int(part.width), int(part.height))
        full = reader.read(part, size)
        grey = np.ptp(full.values[:, full.valid].astype(float)) / 256
        for window, out_size in random_windows(8, size, seed=6):
            if window.left < 0 or window.top < 0:
                continue
            if window.right > size.width or window.bottom > size.height:
                continue
            there = Window(
                part.left + window.left, part.top + window.top, window.width, window.height
            )
            pixels = reader.read(there, out_size)
            share = area_mean(full.valid[None].astype(float), window, out_size)
            sums = area_mean(full.values.astype(float), window, out_size)
            seen = pixels.valid & (share[0] > 0.5)
            if seen.any():
                error = np.abs(pixels.values[:, seen] - sums[:, seen] / share[:, seen]).mean()
                assert error <= max(2 * grey, 0.5)


@pytest.mark.parametrize("name", [CMU, TCGA])
def test_any_view_of_a_slide_is_near_the_area_mean(name):
    part = Window(601, 803, 500, 500)
    with SlideReader(str(real(name))) as reader:
        full = reader.read(part, Size(500, 500)).values
        for window, out_size in random_windows(12, Size(500, 500), seed=7):
            if window.left < 0 or window.top < 0 or max(window.right, window.bottom) > 500:
                continue
            there = Window(601 + window.left, 803 + window.top, window.width, window.height)
            expected = area_mean(full, window, out_size)
            assert np.abs(reader.read(there, out_size).values - expected).mean() <= 2
