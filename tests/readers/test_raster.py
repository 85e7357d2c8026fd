import os
import struct
from pathlib import Path

import numpy as np
import pytest
import rasterio
import tifffile
from affine import Affine
from rasterio.control import GroundControlPoint
from rasterio.crs import CRS
from rasterio.drivers import raster_driver_extensions

from tests.images import (
    TRANSFORM,
    UTM_33N,
    area_average,
    noise,
    write_constant_levels_tiff,
    write_geotiff,
    write_pyramid_tiff,
)
from tnetcli.errors import ImageError
from tnetcli.geometry import Size, Window
from tnetcli.readers import pyramid
from tnetcli.readers import pyramid as levels
from tnetcli.readers.base import ReadOptions
from tnetcli.readers.pyramid import BLOCKS
from tnetcli.readers.raster import RasterReader
from tnetcli.readers.tiff_files import check_directories
from tnetcli.testing.reader import ReaderContract, area_mean, assert_equal, random_windows

REAL = Path(__file__).parents[3] / "shared" / "data" / "geo"
SIDE = 160
WHOLE = Window(0, 0, SIDE, SIDE)
FULL = Size(SIDE, SIDE)


class TestRasterReader(ReaderContract):
    direct = True

    def open(self, path):
        return RasterReader(str(path), direct=self.direct)

    @pytest.fixture
    def image(self, tmp_path, truth):
        return write_geotiff(tmp_path / "a.tif", truth, overviews=[2, 4])

    @pytest.fixture
    def levels_image(self, tmp_path):
        return write_constant_levels_tiff(tmp_path / "levels.tif", (10, 20, 30)), (10, 20, 30)


class TestRasterReaderThroughGdal(TestRasterReader):
    direct = False


@pytest.fixture(params=[True, False], ids=["direct", "gdal"])
def direct(request):
    BLOCKS.clear()
    return request.param


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.tif"


def read(path, window=WHOLE, out_size=FULL, *, direct=True, **options):
    with RasterReader(str(path), ReadOptions(**options), direct=direct) as reader:
        return reader.read(window, out_size)


def info(path, **options):
    with RasterReader(str(path), ReadOptions(**options)) as reader:
        return reader.info


def scene(bands=3, dtype="uint8", seed=0):
    return noise((SIDE, SIDE), bands, dtype, seed)


def left_half():
    mask = np.zeros((SIDE, SIDE), bool)
    mask[:, : SIDE // 2] = True
    return mask


# Masks


@pytest.mark.parametrize("external", [False, True], ids=["internal", "msk"])
def test_a_mask_becomes_valid(path, direct, external):
    write_geotiff(path, scene(), mask=left_half(), external_mask=external)
    assert Path(f"{path}.msk").exists() == external
    pixels = read(path, direct=direct)
    assert np.array_equal(pixels.valid, left_half())
    assert np.array_equal(pixels.values, np.where(left_half(), scene(), 0))


@pytest.mark.parametrize("external", [False, True], ids=["internal", "msk"])
def test_the_mask_of_an_overview_is_used_with_it(path, direct, external):
    write_geotiff(path, scene(), mask=left_half(), external_mask=external, overviews=[2, 4])
    pixels = read(path, out_size=Size(40, 40), direct=direct)
    assert np.array_equal(pixels.valid, left_half()[::4, ::4])


@pytest.mark.parametrize("external", [False, True], ids=["internal", "msk"])
@pytest.mark.parametrize("side", [SIDE, SIDE - 1, SIDE - 3])
def test_an_overview_without_a_mask_takes_that_of_full_resolution(path, direct, side, external):
    write_geotiff(path, noise((side, side)), overviews=[4])
    with (
        rasterio.Env(GDAL_TIFF_INTERNAL_MASK=not external),
        rasterio.open(path, "r+") as dataset,
    ):
        dataset.write_mask(left_half()[:side, :side])
    whole, count = Window(0, 0, side, side), -(-side // 4)
    pixels = read(path, whole, Size(count, count), direct=direct)
    assert pixels.valid[:, :20].all()
    assert not pixels.valid[:, 21:].any()
    corner = read(path, Window(side - 40, side - 40, 40, 40), Size(10, 10), direct=direct)
    assert not corner.valid.any()


def test_a_transparent_pixel_is_invalid_and_alpha_is_no_band(path, direct):
    image = scene(4)
    image[3] = np.where(left_half(), 255, 0)
    write_geotiff(path, image, alpha=True)
    pixels = read(path, direct=direct)
    assert np.array_equal(pixels.valid, left_half())
    assert np.array_equal(pixels.values, np.where(left_half(), image[:3], 0))
    assert info(path).bands == ("red", "green", "blue")


def test_zero_as_nodata_empties_only_pixels_that_are_zero_in_all_bands(path, direct):
    image = scene()
    image[0, 10, 10] = 0
    image[:, 20, 20] = 0
    write_geotiff(path, image, nodata=0)
    pixels = read(path, direct=direct)
    assert np.argwhere(~pixels.valid).tolist() == [[20, 20]]
    assert np.array_equal(pixels.values, image)


@pytest.mark.parametrize(
    ("dtype", "nodata"), [("int16", -9999), ("uint16", 65535), ("float32", -9999), ("uint8", 255)]
)
def test_any_other_nodata_in_one_band_empties_the_pixel(path, direct, dtype, nodata):
    image = scene(3, dtype)
    image[1, 10, 10] = nodata
    write_geotiff(path, image, nodata=nodata)
    pixels = read(path, direct=direct)
    assert np.argwhere(~pixels.valid).tolist() == [[10, 10]]
    assert not pixels.values[:, 10, 10].any()


def test_nodata_takes_no_part_in_a_mean(path, direct):
    image = np.full((1, SIDE, SIDE), 100, np.int16)
    image[:, ::2] = -9999
    write_geotiff(path, image, nodata=-9999)
    pixels = read(path, out_size=Size(16, 16), direct=direct)
    assert pixels.valid.all()
    assert (pixels.values == 100).all()


@pytest.mark.parametrize("nodata", [None, float("nan"), -9999.0])
def test_a_pixel_that_is_not_a_number_is_invalid(path, direct, nodata):
    image = scene(2, "float32")
    image[1, 10, 10] = np.nan
    write_geotiff(path, image, nodata=nodata)
    for out_size in (FULL, Size(40, 40), Size(333, 333)):
        pixels = read(path, out_size=out_size, direct=direct)
        assert np.isfinite(pixels.values).all()
    assert np.argwhere(~read(path, direct=direct).valid).tolist() == [[10, 10]]


def test_the_users_nodata_wins_over_that_of_the_file(path, direct):
    image = scene(1, "int16")
    image[0, 10, 10], image[0, 20, 20] = -9999, -6000
    write_geotiff(path, image, nodata=-9999)
    pixels = read(path, direct=direct, nodata=-6000)
    assert np.argwhere(~pixels.valid).tolist() == [[20, 20]]


def test_the_nodata_of_one_band_counts_where_the_others_have_none(tmp_path, path):
    image = scene(2)
    image[0, 10, 10] = 255
    write_geotiff(path, image)
    vrt = write_vrt(tmp_path / "a.vrt", path, bands=2, nodata={1: 255})
    assert np.argwhere(~read(vrt).valid).tolist() == [[10, 10]]


@pytest.mark.parametrize("nodata", [None, 7])
def test_a_tile_that_was_never_written_is_invalid(path, direct, nodata):
    written = np.array([[True, False, True]] * 3)
    write_geotiff(path, scene(), written=written, sparse=True, nodata=nodata)
    pixels = read(path, direct=direct)
    expected = np.ones((SIDE, SIDE), bool)
    expected[:, 64:128] = False
    assert np.array_equal(pixels.valid, expected)
    assert np.array_equal(pixels.values, np.where(expected, scene(), 0))


# Overviews


def test_overviews_in_a_sidecar_are_used(path, direct):
    write_geotiff(path, scene(), overviews=[2, 4], external_overviews=True)
    assert Path(f"{path}.ovr").exists()
    BLOCKS.clear()
    with RasterReader(str(path), direct=direct) as reader:
        assert reader.overviews == (2.0, 4.0)
        pixels = reader.read(WHOLE, Size(40, 40))
        assert reader.cost.pixels_decoded == 40 * 40
    assert np.abs(pixels.values.astype(int) - area_average(scene(), 4)).max() <= 1


@pytest.mark.parametrize("size", [(301, 203), (257, 127), (1000, 3)])
def test_overviews_of_odd_sizes_keep_everything_in_its_place(path, direct, size):
    image = noise(size)
    write_geotiff(path, image, overviews=[2, 4])
    errors = []
    with RasterReader(str(path), direct=direct) as reader:
        for window, out_size in random_windows(20, reader.size, seed=8):
            pixels = reader.read(window, out_size)
            difference = pixels.values - area_mean(image, window, out_size)
            errors.append(np.abs(difference[:, pixels.valid]).mean())
    assert np.mean(errors) <= 2


def test_a_cog_with_a_mask_is_read_level_by_level(path, direct):
    image = noise((600, 500))
    mask = np.arange(600)[None, :] < np.full((500, 1), 256)
    write_geotiff(path, image, mask=mask, driver="COG", blocksize=128, compress="deflate")
    with RasterReader(str(path), direct=direct) as reader:
        assert reader.overviews
        assert_same(
            reader.read(Window(100, 100, 90, 80), Size(90, 80)).values, image[:, 100:180, 100:190]
        )
        scale = reader.overviews[-1]
        small = reader.read(Window(0, 0, 600, 500), Size(round(600 / scale), round(500 / scale)))
        assert small.valid.mean() == pytest.approx(256 / 600, abs=0.02)


def assert_same(one, other):
    assert np.array_equal(one, other)


def test_a_large_window_is_read_in_parts_with_the_same_result(path, direct, monkeypatch):
    write_geotiff(path, scene())
    windows = [(WHOLE, FULL), (WHOLE, Size(31, 17)), (Window(-9.5, 3.2, 120, 140), Size(40, 40))]
    at_once = [read(path, *each, direct=direct) for each in windows]
    monkeypatch.setattr(levels, "CHUNK_SAMPLES", 64 * 64 * 3)
    for each, expected in zip(windows, at_once, strict=True):
        pixels = read(path, *each, direct=direct)
        assert np.array_equal(pixels.valid, expected.valid)
        assert np.abs(pixels.values.astype(int) - expected.values).max() <= 1


def test_an_image_of_one_huge_block_is_refused_with_a_way_out(path, monkeypatch):
    write_geotiff(path, scene(), blocksize=None, blockysize=SIDE)
    monkeypatch.setattr(pyramid, "MOST_BLOCK_BYTES", 1000)
    with pytest.raises(ImageError, match="one block") as caught:
        info(path)
    assert "gdal_translate" in caught.value.hint


# Place


def test_the_georeference_is_that_of_the_file(path):
    write_geotiff(path, scene())
    found = info(path).georeference
    assert (found.crs, found.transform, found.source) == (
        UTM_33N,
        tuple(TRANSFORM)[:6],
        "transform",
    )


def test_a_crs_without_a_code_is_kept_as_text(path):
    custom = "+proj=laea +lat_0=47.3 +lon_0=8.1 +x_0=10 +y_0=20 +datum=WGS84 +units=m"
    write_geotiff(path, scene(), crs=custom)
    assert CRS.from_user_input(info(path).georeference.crs) == CRS.from_user_input(custom)


def test_ground_control_points_place_an_image_that_has_no_transform(path):
    corners = [(0, 0), (0, SIDE), (SIDE, SIDE), (SIDE, 0)]
    points = [
        GroundControlPoint(row, column, *(TRANSFORM @ (column, row))) for row, column in corners
    ]
    write_geotiff(path, scene(), transform=None, gcps=points)
    found = info(path).georeference
    assert (found.crs, found.source) == (UTM_33N, "gcps")
    assert found.transform == pytest.approx(tuple(TRANSFORM)[:6])


def test_a_png_with_a_world_file_is_placed(tmp_path):
    path = write_geotiff(tmp_path / "a.png", scene(), crs=None, transform=None, driver="PNG")
    (tmp_path / "a.pgw").write_text("10\n0\n0\n-10\n399965\n5000035\n")
    assert info(path).georeference.transform == tuple(TRANSFORM)[:6]
    assert_same(read(path).values, scene())


# Formats and layouts


def write_vrt(path, source, *, bands=3, dtypes=None, nodata=None):
    kinds = {"uint8": "Byte", "uint16": "UInt16"}
    parts = []
    for band in range(1, bands + 1):
        kind = kinds[dtypes[band - 1]] if dtypes else "Byte"
        value = (nodata or {}).get(band)
        parts.append(
            f'<VRTRasterBand dataType="{kind}" band="{band}">'
            + (f"<NoDataValue>{value}</NoDataValue>" if value is not None else "")
            + f'<SimpleSource><SourceFilename relativeToVRT="1">{source.name}</SourceFilename>'
            f"<SourceBand>{band}</SourceBand></SimpleSource></VRTRasterBand>"
        )
    size = f'rasterXSize="{SIDE}" rasterYSize="{SIDE}"'
    path.write_text(f"<VRTDataset {size}>{''.join(parts)}</VRTDataset>")
    return path


def test_bands_of_different_types_are_refused_with_a_way_out(tmp_path, path):
    write_geotiff(path, scene(2))
    vrt = write_vrt(tmp_path / "a.vrt", path, bands=2, dtypes=["uint8", "uint16"])
    with pytest.raises(ImageError, match="different types") as caught:
        info(vrt)
    assert "--bands" in caught.value.hint
    assert_same(read(vrt, bands=("2",)).values[0], scene(2)[1])


@pytest.mark.skipif(
    "jp2" not in raster_driver_extensions(), reason="this GDAL has no JP2OpenJPEG driver"
)
def test_a_jpeg_2000_is_read_through_its_resolutions(tmp_path):
    image = noise((512, 512))
    path = write_geotiff(
        tmp_path / "a.jp2", image, driver="JP2OpenJPEG", quality="100", reversible="yes",
        blockxsize=128, blockysize=128, resolutions=4,
    )  # fmt: skip
    with RasterReader(str(path)) as reader:
        assert 4.0 in reader.overviews
        assert reader.georeference.crs == UTM_33N
        assert_same(
            reader.read(Window(100, 100, 64, 64), Size(64, 64)).values, image[:, 100:164, 100:164]
        )
        reader.read(Window(0, 0, 512, 512), Size(64, 64))
        assert reader.cost.pixels_decoded < 512 * 512


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int16", "int32", "float32", "float64"])
@pytest.mark.parametrize("interleave", ["pixel", "band"])
def test_every_type_comes_back_as_it_was_written(path, direct, dtype, interleave):
    image = scene(3, dtype)
    write_geotiff(path, image, interleave=interleave)
    pixels = read(path, direct=direct)
    assert pixels.values.dtype == dtype
    assert_same(pixels.values, image)


@pytest.mark.parametrize("interleave", ["pixel", "band"])
@pytest.mark.parametrize("blocksize", [64, None], ids=["tiles", "strips"])
@pytest.mark.parametrize("dtype", ["uint16", "float64"])
def test_big_endian_files_are_read(path, direct, interleave, blocksize, dtype):
    image = scene(3, dtype)
    write_geotiff(
        path, image, big_endian=True, interleave=interleave, blocksize=blocksize, compress=None
    )
    assert path.read_bytes()[:2] == b"MM"
    assert_same(read(path, direct=direct).values, image)


def test_one_plane_of_several_costs_a_share(path):
    write_geotiff(path, scene(4), interleave="band")
    BLOCKS.clear()
    with RasterReader(str(path), ReadOptions(bands=("2",))) as reader:
        reader.read(Window(0, 0, 64, 64), Size(64, 64))
        assert 0 < reader.cost.pixels_decoded <= 64 * 64


PREDICTED = ("lzw", "zstd")
LOSSLESS = [
    {"compress": compress, "dtype": dtype, "interleave": interleave, **extra}
    for compress in ("deflate", "lzw", "zstd", "packbits", "lzma", None)
    for dtype, interleave, extra in [
        ("uint8", "pixel", {}),
        ("uint16", "band", {}),
        ("uint8", "pixel", {"blocksize": None}),
        ("uint16", "pixel", {"predictor": 2}),
        ("int16", "pixel", {"predictor": 2, "big_endian": True}),
        ("float32", "pixel", {"predictor": 3}),
        ("float64", "band", {"predictor": 3, "blocksize": None}),
        ("uint8", "band", {"bigtiff": "yes"}),
    ]
    if compress == "deflate" or not extra or (extra == {"predictor": 2} and compress in PREDICTED)
]


@pytest.mark.parametrize("info", LOSSLESS, ids=lambda each: "-".join(map(str, each.values())))
def test_both_ways_of_reading_give_the_same_lossless_pixels(path, info):
    arguments = dict(info)
    image = scene(3, arguments.pop("dtype"))
    write_geotiff(path, image, **arguments)
    with RasterReader(str(path)) as reader:
        assert reader.info.details["fast_levels"] == 1
    for window, out_size in [(WHOLE, FULL), (Window(50, 60, 40, 70), Size(40, 70))]:
        assert_equal(read(path, window, out_size), read(path, window, out_size, direct=False))
    assert_same(read(path).values, image)


@pytest.mark.parametrize(
    "unusual",
    [{"nbits": 1}, {"nbits": 4}, {"nbits": 12, "dtype": "uint16"},
     {"nbits": 16, "dtype": "float32"}, {"compress": "webp", "webp_lossless": "yes"},
     {"compress": "lerc", "dtype": "float32"}, {"photometric": "MINISWHITE", "bands": 1},
     {"photometric": "CMYK", "bands": 4}, {"dtype": "int8"}],
    ids=lambda each: "-".join(map(str, each.values())),
)  # fmt: skip
def test_unusual_layouts_read_alike_both_ways(path, unusual):
    arguments = dict(unusual)
    image = scene(arguments.pop("bands", 3), arguments.pop("dtype", "uint8"))
    if "nbits" in arguments and image.dtype.kind != "f":
        image = image % (1 << arguments["nbits"])
    write_geotiff(path, image, **arguments)
    assert_equal(read(path), read(path, direct=False))


def test_both_ways_give_the_same_pixels_of_a_jpeg_that_keeps_its_colours(path):
    write_geotiff(path, scene(), compress="jpeg", photometric="RGB", overviews=[2])
    with RasterReader(str(path)) as reader:
        assert reader.info.details["fast_levels"] == 2
    assert_equal(read(path), read(path, direct=False))
    assert_equal(read(path, out_size=Size(80, 80)), read(path, out_size=Size(80, 80), direct=False))


def test_both_ways_nearly_agree_on_a_jpeg_with_coarse_colours(path):
    # GDAL repeats the coarser colours, libjpeg interpolates them: brightness must not notice.
    write_geotiff(path, scene(), compress="jpeg", photometric="YCBCR", jpeg_quality=90)
    luma = np.array([0.299, 0.587, 0.114])
    one, other = (np.tensordot(luma, read(path, direct=way).values, 1) for way in (True, False))
    assert abs((one - other).mean()) < 1
    assert np.abs(one - other).mean() < 2


def test_a_palette_is_expanded_to_colours(path, direct):
    colours = {index: (index, 255 - index, index // 2, 255) for index in range(256)}
    image = scene(1)
    write_geotiff(path, image, colormap=colours)
    pixels = read(path, direct=direct)
    assert_same(pixels.values, np.stack([image[0], 255 - image[0], image[0] // 2]))
    found = info(path)
    assert (found.bands, found.dtype) == (("red", "green", "blue"), np.uint8)
    assert "palette" in found.details


def test_nodata_of_a_palette_is_an_index_and_not_a_colour(path, direct):
    colours = dict.fromkeys(range(256), (255, 255, 255, 255))
    image = scene(1)
    image[0, 10, 10] = 3
    write_geotiff(path, image, colormap=colours, nodata=3)
    assert np.argwhere(~read(path, direct=direct).valid).tolist() == [[10, 10]]


# Bands and details


def test_bands_are_named_by_their_description(path):
    write_geotiff(path, scene(), descriptions=["B04", "B03", "B02"])
    assert info(path).bands == ("B04", "B03", "B02")


@pytest.mark.parametrize(
    ("wanted", "indices"),
    [(("3", "1"), [2, 0]), (("b02", "B04"), [2, 0]), (("B03", "B03"), [1, 1]), (("1",), [0])],
)
def test_bands_are_chosen_by_number_and_by_description(path, direct, wanted, indices):
    write_geotiff(path, scene(), descriptions=["B04", "B03", "B02"])
    assert_same(read(path, direct=direct, bands=wanted).values, scene()[indices])


def test_scale_and_offset_are_reported_and_not_applied(path):
    image = scene(2, "uint16")
    write_geotiff(path, image, scales=(0.0001, 0.0002), offsets=(-0.1, 0.0))
    details = info(path).details
    assert details["scales"] == [0.0001, 0.0002]
    assert details["offsets"] == [-0.1, 0.0]
    assert_same(read(path).values, image)


def test_the_bytes_read_are_those_of_the_tiles(path):
    write_geotiff(path, scene())
    with tifffile.TiffFile(path) as file:
        expected = file.pages[0].databytecounts[0]
    BLOCKS.clear()
    with RasterReader(str(path)) as reader:
        reader.read(Window(0, 0, 10, 10), Size(10, 10))
        assert reader.cost.bytes_read == expected


def test_a_block_that_was_just_decoded_costs_nothing_again(path):
    write_geotiff(path, scene())
    BLOCKS.clear()
    with RasterReader(str(path)) as reader:
        reader.read(Window(0, 0, 10, 10), Size(10, 10))
        once = reader.cost
        reader.read(Window(20, 20, 10, 10), Size(10, 10))
        assert reader.cost == once


# Damage


def spoil(path, tile, *, part):
    """Overwrite the stored bytes of one tile, all of them or only their second half."""
    with tifffile.TiffFile(path) as file:
        offset, count = file.pages[0].dataoffsets[tile], file.pages[0].databytecounts[tile]
    start = 0 if part == "all" else count // 2
    garbage = np.random.default_rng(0).integers(0, 255, count - start, np.uint8)
    with open(path, "r+b") as file:
        file.seek(offset + start)
        file.write(garbage.tobytes())


@pytest.mark.parametrize("part", ["all", "half"])
@pytest.mark.parametrize(
    "compression",
    [{"compress": "deflate"}, {"compress": "lzw"}, {"compress": "zstd"},
     {"compress": "jpeg", "photometric": "RGB"}, {"compress": "jpeg", "photometric": "YCBCR"},
     {"compress": "jpeg", "photometric": "MINISBLACK", "bands": 1},
     {"compress": "jpeg", "photometric": "MINISBLACK", "bands": 4}],
    ids=lambda each: "-".join(map(str, each.values())),
)  # fmt: skip
def test_a_damaged_tile_fails_alone(path, direct, compression, part):
    if (direct, compression["compress"], part) == (False, "deflate", "half"):
        pytest.skip("libtiff stops before the checksum: GDAL cannot notice")
    arguments = dict(compression)
    write_geotiff(path, scene(arguments.pop("bands", 3)), **arguments)
    good = read(path, Window(130, 130, 20, 20), Size(20, 20), direct=direct)
    spoil(path, 4, part=part)
    BLOCKS.clear()
    with RasterReader(str(path), direct=direct) as reader:
        with pytest.raises(ImageError, match="pixels 70") as caught:
            reader.read(Window(70, 70, 57, 57), Size(57, 57))
        assert "damaged" in caught.value.hint
        assert_equal(reader.read(Window(130, 130, 20, 20), Size(20, 20)), good)
        assert_same(reader.read(Window(0, 0, 20, 20), Size(20, 20)).valid, np.ones((20, 20), bool))


def test_a_handle_that_fails_once_is_opened_anew(path, direct, monkeypatch):
    write_geotiff(path, scene())
    with RasterReader(str(path), direct=direct) as reader:
        open_source, opened = reader._open, []

        def open_flaky():
            source = open_source()
            opened.append(source)
            if len(opened) == 1:
                monkeypatch.setattr(source, "read", fail)
            return source

        def fail(level, box):
            raise OSError("lost the connection")

        reader._handles._open = open_flaky
        assert_same(reader.read(WHOLE, FULL).values, scene())
        assert len(opened) == 2


def test_a_directory_lost_at_the_end_is_noticed(path):
    write_geotiff(path, scene(), overviews=[2, 4])
    with tifffile.TiffFile(path) as file:
        last = max(page.offset for page in file.pages)
    os.truncate(path, last + 20)
    with pytest.raises(ImageError, match="truncated") as caught:
        check_directories(str(path))
    assert caught.value.hint


def test_a_first_directory_that_is_lost_is_noticed(path):
    write_geotiff(path, scene())
    with rasterio.open(path, "r+") as dataset:
        dataset.update_tags(NOTE="x" * 500)  # makes GDAL write the directory anew, at the end
    start = struct.unpack("<I", path.read_bytes()[4:8])[0]
    assert start > path.stat().st_size // 2
    os.truncate(path, start - 100)
    with pytest.raises(ImageError, match="truncated"):
        check_directories(str(path))
    with pytest.raises(ImageError) as caught:
        info(path)
    assert caught.value.hint


def write_circle(path):
    """A TIFF whose only directory says that it follows itself."""
    write_geotiff(path, scene())
    with tifffile.TiffFile(path) as file:
        first, entries = file.pages[0].offset, len(file.pages[0].tags)
    with open(path, "r+b") as file:
        file.seek(first + 2 + 12 * entries)
        file.write(struct.pack("<I", first))


@pytest.mark.timeout(10)  # it would never end
def test_directories_in_a_circle_do_not_catch_the_reader(path):
    write_circle(path)
    with pytest.raises(ImageError, match="form a cycle"):
        RasterReader(str(path))


def test_an_overview_directory_lost_at_the_end_is_an_image_error(path, direct):
    write_geotiff(path, scene(), overviews=[2, 4])
    with tifffile.TiffFile(path) as file:
        last = max(page.offset for page in file.pages)
    os.truncate(path, last + 20)
    with pytest.raises(ImageError, match="truncated"):
        read(path, direct=direct)


@pytest.mark.parametrize("sidecar", ["ovr", "msk", "msk.ovr"])
def test_a_sidecar_that_is_no_image_is_passed_over_or_named(path, direct, sidecar):
    write_geotiff(path, scene())
    Path(f"{path}.{sidecar}").write_text("not an image")
    try:
        pixels = read(path, direct=direct)
    except ImageError as error:
        assert sidecar in str(error)  # noqa: PT017
    else:
        assert_same(pixels.values, scene())


def test_tiles_lost_at_the_end_are_noticed_on_opening(path):
    write_pyramid_tiff(path, scene(), factors=())
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(ImageError, match="truncated") as caught:
        info(path)
    assert caught.value.hint


def test_tiles_lost_at_the_end_fail_alone_where_gdal_reads(path):
    write_pyramid_tiff(path, scene(), factors=())
    os.truncate(path, path.stat().st_size // 2)
    with RasterReader(str(path), direct=False) as reader:
        with pytest.raises(ImageError, match="cannot read"):
            reader.read(Window(130, 130, 20, 20), Size(20, 20))
        assert_same(reader.read(Window(0, 0, 20, 20), Size(20, 20)).values, scene()[:, :20, :20])


def test_what_is_no_image_is_refused_with_a_hint(tmp_path):
    path = tmp_path / "a.tif"
    path.write_text("not an image")
    with pytest.raises(ImageError, match="cannot parse") as caught:
        info(path)
    assert caught.value.hint


# Real files


def real(name):
    path = REAL / name
    if not path.exists():
        pytest.skip(f"no {path}: the real images are not part of the repository")
    return path


def test_the_georeference_of_a_landsat_scene_is_that_of_rasterio():
    path = real("rasterio_RGB.byte.tif")
    found = info(path).georeference
    with rasterio.open(path) as dataset:
        assert CRS.from_user_input(found.crs) == dataset.crs
        assert found.transform == tuple(dataset.transform)[:6]
        corner = dataset.xy(0, 0, offset="ul")
    assert found.to_map(0, 0) == pytest.approx(corner)


def test_a_damaged_real_file_is_an_image_error():
    path = real("hostile/rasterio_corrupt.tif")
    with pytest.raises(ImageError) as caught, RasterReader(str(path)) as reader:
        reader.read(Window.whole(reader.size), reader.size)
    assert caught.value.hint


@pytest.mark.parametrize("nodata", [300.0, -1.0, 1.5, float("nan")])
def test_a_users_nodata_that_cannot_occur_keeps_the_mask_of_the_file(path, nodata):
    write_geotiff(path, scene(), mask=left_half())
    assert np.array_equal(read(path, nodata=nodata).valid, left_half())
    assert any("nodata" in warning for warning in info(path, nodata=nodata).warnings)


@pytest.mark.parametrize("nodata", [-(2**63), 2**53 + 1])
def test_wide_integers_are_compared_as_integers(path, nodata):
    image = np.full((1, 8, 8), 2**53, np.int64)
    image[0, :4] = nodata
    write_geotiff(path, image)
    with RasterReader(str(path), ReadOptions(nodata=nodata)) as reader:
        pixels = reader.read(Window(0, 0, 8, 8), Size(8, 8))
    assert np.array_equal(pixels.valid, image[0] != nodata)


def test_a_large_exact_window_is_copied_and_not_averaged(path, monkeypatch, direct):
    monkeypatch.setattr("tnetcli.readers.pyramid.CHUNK_SAMPLES", 64 * 64)
    image = np.random.default_rng(0).integers(2**53, 2**62, (2, SIDE, SIDE), np.int64)
    write_geotiff(path, image)
    pixels = read(path, Window(-10, -7, SIDE, SIDE), FULL, direct=direct)
    assert np.array_equal(pixels.values[:, 7:, 10:], image[:, : SIDE - 7, : SIDE - 10])
    assert not pixels.valid[:7].any()


def test_a_raw_file_that_is_cut_off_is_an_image_error(tmp_path):
    path = write_geotiff(tmp_path / "a.img", scene(), driver="ENVI", blocksize=None, compress=None)
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(ImageError, match="truncated"):
        RasterReader(str(path))


def test_overviews_older_than_the_image_are_warned_of(path):
    write_geotiff(path, scene(), overviews=[2], external_overviews=True)
    assert info(path).warnings == ()
    os.utime(f"{path}.ovr", (1, 1))
    assert any("older" in warning for warning in info(path).warnings)


def test_alpha_masks_also_when_bands_are_chosen(path, direct):
    image = scene(4)
    image[3] = np.where(left_half(), 255, 0)
    write_geotiff(path, image, alpha=True)
    pixels = read(path, direct=direct, bands=("blue", "red"))
    assert np.array_equal(pixels.valid, left_half())
    assert np.array_equal(pixels.values[0], np.where(left_half(), image[2], 0))


def test_the_resolution_tags_count_only_without_a_place(path):
    write_pyramid_tiff(path, scene(), resolution=(20_000, 20_000))
    assert info(path).microns_per_pixel.x == pytest.approx(0.5)


@pytest.mark.parametrize("setting", ["EMPTY_DIR", "TRUE"])
def test_gdal_settings_do_not_hide_sidecars(path, direct, setting):
    write_geotiff(path, scene(), mask=left_half(), external_mask=True)
    with rasterio.Env(GDAL_DISABLE_READDIR_ON_OPEN=setting):
        assert np.array_equal(read(path, direct=direct).valid, left_half())


def test_nan_is_invalid_where_the_mask_is_valid(path, direct):
    image = scene(1, "float32")
    image[0, 10, 10] = np.nan
    write_geotiff(path, image, mask=left_half())
    pixels = read(path, direct=direct)
    assert np.isfinite(pixels.values).all()
    assert not pixels.valid[10, 10]


def test_the_users_nodata_wins_over_a_mask(path, direct):
    image = scene()
    image[:, 20, 20] = 0
    write_geotiff(path, image, mask=left_half())
    assert np.argwhere(~read(path, direct=direct, nodata=0).valid).tolist() == [[20, 20]]


def test_nodata_beyond_the_range_of_the_type_is_ignored(path):
    write_geotiff(path, scene(1, "float32"))
    assert read(path, nodata=-1.7976931348623157e308).valid.all()


def test_a_rotated_transform_a_missing_crs_and_a_missing_place_are_kept(path):
    rotated = Affine.translation(5e5, 5e6) @ Affine.rotation(30) @ Affine.scale(10, -10)
    write_geotiff(path, scene(), transform=rotated, crs=None)
    found = info(path).georeference
    assert found.crs is None
    assert found.transform == pytest.approx(tuple(rotated)[:6])
    write_geotiff(path, scene(), crs=None, transform=None)
    assert info(path).georeference is None


@pytest.mark.parametrize("interleave", ["pixel", "band"])
def test_some_bands_of_several_come_in_the_given_order(path, direct, interleave):
    write_geotiff(path, scene(4, "uint16"), interleave=interleave)
    pixels = read(path, direct=direct, bands=("3", "1"))
    assert_same(pixels.values, scene(4, "uint16")[[2, 0]])


def test_info_has_compression_tiling_and_size_on_disk(path):
    write_geotiff(path, scene(), compress="lzw")
    found = info(path)
    assert (found.compression, found.tiled) == ("lzw", True)
    assert (found.file_bytes, found.levels[0].block) == (path.stat().st_size, Size(64, 64))
    write_geotiff(path, scene(), blocksize=None, blockysize=16)
    assert not info(path).tiled


@pytest.mark.parametrize("keep", [3, 6])
def test_a_truncated_header_is_an_error(path, keep):
    write_geotiff(path, scene())
    os.truncate(path, keep)
    with pytest.raises(ImageError, match="truncated"):
        check_directories(str(path))


@pytest.mark.parametrize("side", [1e-3, 1e-9])
def test_a_window_within_a_pixel_is_that_pixel(path, side):
    pixels = read(write_geotiff(path, scene()), Window(10.2, 20.3, side, side), Size(7, 7))
    assert pixels.valid.all()
    assert np.array_equal(pixels.values, np.broadcast_to(scene()[:, 20:21, 10:11], (3, 7, 7)))
