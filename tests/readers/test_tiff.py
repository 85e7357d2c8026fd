import struct
import subprocess
import sys

import numpy as np
import pytest
import tifffile

from tests.commands import ROOT
from tests.images import area_average, noise, write_ome_tiff, write_pyramid_tiff
from tests.slides import (
    Once,
    forget_tile,
    raw_tiff,
    real,
    spoil_tile,
    write_ome_rgb,
    write_pages,
    zeros_deflated,
)
from tnetcli.errors import ImageError
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import ReadOptions
from tnetcli.readers.pyramid import BLOCKS
from tnetcli.readers.tiff import TiffReader
from tnetcli.testing.reader import TRUTH, ReaderContract, area_mean, random_windows

SIDE = 150
WHOLE, FULL = Window(0, 0, SIDE, SIDE), Size(SIDE, SIDE)
CONSTANTS = (10, 20, 30)


def constant_levels():
    sides = [512 >> level for level in range(3)]
    return [np.full((3, s, s), c, np.uint8) for s, c in zip(sides, CONSTANTS, strict=True)]


def pyramid(truth):
    return [truth, area_average(truth, 2), area_average(truth, 4)]


def write_ome_planes(path, levels):
    """Write each band as a page of its own with smaller levels in SubIFDs."""
    options = {"tile": (64, 64), "compression": "deflate", "photometric": "minisblack"}
    with tifffile.TiffWriter(path, ome=True) as writer:
        writer.write(levels[0], subifds=len(levels) - 1, metadata={"axes": "CYX"}, **options)
        for level in levels[1:]:
            writer.write(level, subfiletype=1, metadata=None, **options)
    return path


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    return Once(tmp_path_factory.mktemp("once"))


class TiffContract(ReaderContract):
    def open(self, path):
        return TiffReader(str(path))

    def write(self, path, levels):
        raise NotImplementedError

    @pytest.fixture
    def image(self, once):
        name = f"{type(self).__name__}.tif"
        return once(name, lambda path: self.write(path, pyramid(TRUTH)))

    @pytest.fixture
    def levels_image(self, once):
        name = f"{type(self).__name__} levels.tif"
        return once(name, lambda path: self.write(path, constant_levels())), CONSTANTS


class TestTiffReaderOnPlanesWithSubdirectories(TiffContract):
    def write(self, path, levels):
        return write_ome_planes(path, levels)


class TestTiffReaderOnColoursWithSubdirectories(TiffContract):
    def write(self, path, levels):
        return write_ome_rgb(path, levels)


class TestTiffReaderOnPagesOfSeveralSizes(TiffContract):
    def write(self, path, levels):
        return write_pages(path, levels, tile=(64, 64), compression="deflate")


class TestTiffReaderOnCompressedStrips(TiffContract):
    block = Size(300, 16)

    def write(self, path, levels):
        return write_pages(path, levels, rowsperstrip=16, compression="deflate")


class TestTiffReaderOnRawStrips(TiffContract):
    block = Size(300, 1)

    def write(self, path, levels):
        return write_pages(path, levels, rowsperstrip=16)


@pytest.fixture
def path(tmp_path):
    BLOCKS.clear()
    return tmp_path / "a.tif"


def read(path, window=WHOLE, out_size=FULL, **options):
    with TiffReader(str(path), ReadOptions(**options)) as reader:
        return reader.read(window, out_size)


def info(path, **options):
    with TiffReader(str(path), ReadOptions(**options)) as reader:
        return reader.info


def scene(bands=3, dtype="uint8", seed=0):
    return noise((SIDE, SIDE), bands, dtype, seed)


# Every way to store pixels


@pytest.mark.parametrize(
    "blocks", [{"tile": (64, 64)}, {"rowsperstrip": 16}], ids=["tiles", "strips"]
)
@pytest.mark.parametrize("planar", ["contig", "separate"])
@pytest.mark.parametrize("compression", [None, "lzw", "deflate", "zstd", "packbits"])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32"])
def test_lossless_pixels_come_back_bit_for_bit(path, dtype, compression, planar, blocks):
    image = scene(3, dtype)
    stored = image if planar == "separate" else image.transpose(1, 2, 0)
    tifffile.imwrite(
        path, stored, planarconfig=planar, compression=compression, photometric="rgb",
        metadata=None, **blocks,
    )  # fmt: skip
    pixels = read(path)
    assert pixels.valid.all()
    assert np.array_equal(pixels.values, image)


@pytest.mark.parametrize(
    "blocks", [{"tile": (64, 64)}, {"rowsperstrip": 16}], ids=["tiles", "strips"]
)
@pytest.mark.parametrize("compression", [None, "deflate"])
@pytest.mark.parametrize("dtype", ["uint16", "float32"])
def test_big_endian_pixels_come_back_bit_for_bit(path, dtype, compression, blocks):
    image = scene(1, dtype)
    tifffile.imwrite(
        path, image[0], byteorder=">", compression=compression, metadata=None, **blocks
    )
    assert np.array_equal(read(path).values, image)


@pytest.mark.parametrize(("dtype", "predictor"), [("uint8", 2), ("uint16", 2), ("float32", 3)])
def test_a_predictor_is_undone(path, dtype, predictor):
    image = scene(1, dtype)
    tifffile.imwrite(
        path, image[0], tile=(64, 64), compression="deflate", predictor=predictor, metadata=None
    )
    assert np.array_equal(read(path).values, image)


@pytest.mark.parametrize(
    "blocks", [{"tile": (64, 64)}, {"rowsperstrip": 16}], ids=["tiles", "strips"]
)
@pytest.mark.parametrize("space", ["rgb", "ycbcr"])
def test_a_jpeg_is_near_the_truth(path, blocks, space):
    image = scene()
    tifffile.imwrite(
        path, image.transpose(1, 2, 0), photometric="rgb", compression="jpeg", metadata=None,
        compressionargs={"level": 95, "outcolorspace": space}, **blocks,
    )  # fmt: skip
    assert np.abs(read(path).values - image.astype(float)).mean() < 3


def test_the_bytes_read_are_those_of_the_tiles(path):
    tifffile.imwrite(path, scene()[0], tile=(64, 64), compression="lzw", metadata=None)
    with tifffile.TiffFile(path) as file:
        expected = file.pages.first.databytecounts[4]
    with TiffReader(str(path)) as reader:
        reader.read(Window(70, 70, 20, 20), Size(20, 20))
        assert reader.cost.bytes_read == expected


def test_levels_of_odd_sizes_keep_everything_in_its_place(path):
    image = noise((301, 203), 3, seed=6)
    write_ome_rgb(path, pyramid(image))
    with TiffReader(str(path)) as reader:
        assert reader.overviews == (2.0, 4.0)
        for left, top in ((0, 0), (96.5, 40), (33, 7.25)):
            window = Window(left, top, 160, 120)
            pixels = reader.read(window, Size(40, 30))
            assert np.abs(pixels.values - area_mean(image, window, Size(40, 30))).mean() < 2


# Bands


def test_channels_are_named_by_ome(path):
    write_ome_tiff(path, scene(), channels=("DAPI", "FITC", "Cy5"))
    assert info(path).bands == ("DAPI", "FITC", "Cy5")


@pytest.mark.parametrize(
    ("wanted", "indices"), [(("Cy5",), [2]), (("fitc", "1"), [1, 0]), (("3", "2", "1"), [2, 1, 0])]
)
def test_channels_are_chosen_by_name_and_by_number(path, wanted, indices):
    image = scene(3, "uint16")
    write_ome_tiff(path, image, channels=("DAPI", "FITC", "Cy5"))
    assert np.array_equal(read(path, bands=wanted).values, image[indices])


def test_a_qptiff_names_its_channels():
    assert info(real("wsi/small_vectra.qptiff")).bands == ("DAPI", "FITC", "Cy3")


def test_a_qptiff_is_read_as_tifffile_reads_it():
    path = real("wsi/small_vectra.qptiff")
    pixels = read(path, Window(300, 500, 200, 100), Size(200, 100))
    with tifffile.TiffFile(path) as file:
        known = file.series[0].asarray()
    assert np.array_equal(pixels.values, known[:, 500:600, 300:500])


@pytest.mark.parametrize("name", ["viv-multi-channel.ome.tif", "multi-channel-z-series.ome.tif"])
def test_a_real_ome_tiff_is_read_as_tifffile_reads_it(name):
    path = real(f"wsi/synthetic/{name}")
    with tifffile.TiffFile(path) as file:
        series = file.series[0]
        known = series.asarray()
        known = known[:, 3] if "Z" in series.axes else known
        chosen = {"z": 3} if "Z" in series.axes else {}
    pixels = read(path, Window(0, 0, 439, 167), Size(439, 167), **chosen)
    assert np.array_equal(pixels.values, known)


# Stacks


@pytest.fixture
def stack(path):
    image = np.stack([noise((100, 80), 1, "uint16", seed)[0] for seed in range(12)])
    write_ome_tiff(path, image.reshape(2, 3, 2, 80, 100), (2,))
    return path


@pytest.mark.parametrize("options", [{}, {"t": 0}, {"z": 1}])
def test_a_stack_is_not_read_without_a_choice(stack, options):
    with pytest.raises(ImageError, match="is a stack"):
        read(stack, Window(0, 0, 100, 80), Size(100, 80), **options)


@pytest.mark.parametrize(("z", "t"), [(0, 0), (2, 0), (1, 1), (2, 1)])
def test_the_plane_is_the_one_that_was_chosen(stack, z, t):
    pixels = read(stack, Window(0, 0, 100, 80), Size(100, 80), z=z, t=t)
    assert np.array_equal(pixels.values, tifffile.imread(stack)[t, z])


@pytest.mark.parametrize(
    ("chosen", "problem", "hint"),
    [
        ({"z": 3}, "z = 3", "z = 0..2"),
        ({"t": 2}, "t = 2", "t = 0..1"),
    ],
)
def test_a_plane_that_is_not_there_is_refused_with_the_range(stack, chosen, problem, hint):
    with pytest.raises(ImageError, match=problem) as caught:
        info(stack, **chosen)
    assert hint in caught.value.hint


@pytest.mark.parametrize("compression", [None, "deflate"])
def test_a_stack_of_imagej_is_read_plane_by_plane(path, compression):
    image = np.stack([noise((100, 80), 1, "uint16", seed)[0] for seed in range(3)])
    tifffile.imwrite(path, image, imagej=True, metadata={"axes": "ZYX"}, compression=compression)
    pixels = read(path, Window(0, 0, 100, 80), Size(100, 80), z=2)
    assert np.array_equal(pixels.values[0], image[2])


def test_a_stack_in_one_piece_is_refused_with_a_hint(path):
    image = np.stack([noise((100, 80), 1, "uint16", seed)[0] for seed in range(3)])
    tifffile.imwrite(path, image, metadata={"axes": "ZYX"}, truncate=True, photometric="minisblack")
    with pytest.raises(ImageError, match="not stored as pages") as caught:
        TiffReader(str(path))
    assert caught.value.hint


def test_a_stack_of_colours_is_read_plane_by_plane(path):
    image = np.stack([noise((100, 80), seed=seed) for seed in range(3)])
    tifffile.imwrite(
        path, image.transpose(0, 2, 3, 1), ome=True, photometric="rgb", metadata={"axes": "ZYXS"}
    )
    pixels = read(path, Window(0, 0, 100, 80), Size(100, 80), z=1)
    assert np.array_equal(pixels.values, image[1])


def test_a_larger_second_image_is_mentioned(path):
    with tifffile.TiffWriter(path, ome=True) as writer:
        writer.write(scene(1)[0, :50, :50], metadata={"axes": "YX"})
        writer.write(scene(1)[0], metadata={"axes": "YX"})
    assert any("2 images" in warning for warning in info(path).warnings)


# Resolution


@pytest.mark.parametrize(
    ("unit", "length"), [("µm", 0.5), ("nm", 500), ("mm", 0.0005), ("cm", 5e-5)]
)
def test_the_resolution_of_ome_is_turned_into_microns(path, unit, length):
    write_ome_tiff(path, scene(), microns=(length, length / 2), unit=unit)
    found = info(path).microns_per_pixel
    assert (found.x, found.y) == pytest.approx((0.5, 0.25))
    assert found.source == "OME metadata"


@pytest.mark.parametrize(("unit", "density"), [("CENTIMETER", 20_000), ("INCH", 50_800)])
def test_resolution_tags_are_turned_into_microns(path, unit, density):
    tifffile.imwrite(
        path, scene()[0], resolution=(density, density / 2), resolutionunit=unit, metadata=None
    )
    found = info(path).microns_per_pixel
    assert (found.x, found.y) == pytest.approx((0.5, 1.0))
    assert found.source == "TIFF resolution tags"


def test_ome_is_believed_before_the_tags(path):
    metadata = {"axes": "CYX", "PhysicalSizeX": 0.25, "PhysicalSizeY": 0.25}
    tifffile.imwrite(
        path, scene(), ome=True, metadata=metadata, resolution=(20_000, 20_000),
        resolutionunit="CENTIMETER",
    )  # fmt: skip
    assert info(path).microns_per_pixel.x == 0.25


# Validity


@pytest.mark.parametrize("planar", ["contig", "separate"])
def test_a_transparent_pixel_is_invalid_and_alpha_is_no_band(path, planar):
    image = scene(4)
    image[3, :, :70] = 0
    stored = image if planar == "separate" else image.transpose(1, 2, 0)
    tifffile.imwrite(
        path, stored, planarconfig=planar, photometric="rgb", extrasamples=["unassalpha"],
        tile=(64, 64), metadata=None,
    )  # fmt: skip
    pixels = read(path)
    assert info(path).bands == ("red", "green", "blue")
    assert np.array_equal(pixels.valid, image[3] > 0)
    assert np.array_equal(pixels.values, np.where(image[3] > 0, image[:3], 0))


def test_a_pixel_that_is_not_a_number_is_invalid(path):
    image = scene(2, "float32")
    image[1, 10, 10] = np.nan
    write_ome_tiff(path, image)
    pixels = read(path)
    assert np.argwhere(~pixels.valid).tolist() == [[10, 10]]
    assert np.isfinite(pixels.values).all()


@pytest.mark.parametrize("compression", [None, "deflate"])
def test_a_tile_that_was_never_written_is_invalid(path, compression):
    image = scene()
    write_pages(path, [image], tile=(64, 64), compression=compression)
    forget_tile(path, 1)
    expected = np.ones((SIDE, SIDE), bool)
    expected[:64, 64:128] = False
    pixels = read(path)
    assert np.array_equal(pixels.valid, expected)
    assert np.array_equal(pixels.values, np.where(expected, image, 0))


def test_a_tile_that_one_channel_lacks_is_invalid(path):
    write_ome_tiff(path, scene(), ())
    forget_tile(path, 0, page=1)
    pixels = read(path)
    assert not pixels.valid[:64, :64].any()
    assert pixels.valid[64:].all()
    assert not pixels.values[:, :64, :64].any()


# Damage and traps


@pytest.mark.parametrize("compression", ["deflate", "lzw", "zstd"])
def test_a_damaged_tile_fails_alone(path, compression):
    image = scene()
    write_pages(path, [image], tile=(64, 64), compression=compression)
    spoil_tile(path, 4)
    with TiffReader(str(path)) as reader:
        with pytest.raises(ImageError, match="pixels 70") as caught:
            reader.read(Window(70, 70, 20, 20), Size(20, 20))
        assert "damaged" in caught.value.hint
        pixels = reader.read(Window(0, 0, 60, 60), Size(60, 60))
        assert np.array_equal(pixels.values, image[:, :60, :60])


MEASURED = """
import sys
from tests.commands import peak_memory
from tnetcli.errors import ImageError
from tnetcli.readers.detect import open_image
from tnetcli.readers.tiff import TiffReader
for opener in (TiffReader, open_image):
    try:
        opener(sys.argv[1])
    except ImageError as error:
        print(bool(error.hint))
print(peak_memory() < 400e6)
"""


def test_one_huge_tile_is_refused_at_once_without_decoding(path):
    side = 32768
    raw_tiff(
        path,
        {256: [side], 257: [side], 258: [8], 259: [8], 262: [1], 277: [1], 322: [side],
         323: [side], 324: [8], 325: [len(zeros_deflated(side * side))]},
        data=zeros_deflated(side * side),
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(path)],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    assert done.stdout.split() == ["True"] * 3


def tiled(side, tile, offsets, counts, data):
    return {
        "tags": {256: [side], 257: [side], 258: [8], 259: [8], 262: [1], 277: [1], 322: [tile],
                 323: [tile], 324: offsets, 325: counts},
        "data": data,
    }  # fmt: skip


def test_an_image_with_too_few_tiles_is_refused(path):
    parts = tiled(4_000_000, 256, [8, 8], [100, 100], bytes(100))
    raw_tiff(path, parts["tags"], data=parts["data"])
    with pytest.raises(ImageError, match="lists only 2") as caught:
        TiffReader(str(path))
    assert caught.value.hint


def test_an_image_whose_tiles_share_the_same_bytes_is_refused(path):
    blob = np.random.default_rng(0).bytes(20_000)
    parts = tiled(128 * 256, 256, [8] * 128**2, [len(blob)] * 128**2, blob)
    raw_tiff(path, parts["tags"], data=parts["data"])
    with pytest.raises(ImageError, match="share the same bytes"):
        TiffReader(str(path))


def test_a_tile_past_the_end_of_the_file_is_refused(path):
    parts = tiled(512, 256, [8, 8, 8, 10_000_000], [100] * 4, bytes(100))
    raw_tiff(path, parts["tags"], data=parts["data"])
    with pytest.raises(ImageError, match="truncated"):
        TiffReader(str(path))


def test_a_tile_that_holds_too_few_pixels_is_an_image_error(path):
    data = zeros_deflated(2**20)
    parts = tiled(2048, 2048, [8], [len(data)], data)
    raw_tiff(path, parts["tags"], data=parts["data"])
    with pytest.raises(ImageError):
        read(path, Window(0, 0, 100, 100), Size(100, 100))


@pytest.mark.parametrize("bands", [4096, 4097])
def test_more_bands_than_an_image_can_have_are_refused(path, bands):
    tags = {256: [2], 257: [2], 258: [8], 259: [1], 262: [1], 273: [8], 277: [bands], 278: [2]}
    raw_tiff(path, {**tags, 279: [4 * bands]}, data=bytes(4 * bands))
    if bands == 4096:
        assert len(info(path).bands) == bands
    else:
        with pytest.raises(ImageError, match="4,097 bands"):
            info(path)


def test_directories_in_a_circle_are_refused(path):
    write_pages(path, [scene(), area_average(scene(), 2)], tile=(64, 64))
    with tifffile.TiffFile(path) as file:
        first, last = file.pages[0].offset, file.pages[1].aspage()
        end = last.offset + 2 + 12 * len(last.tags)
    with path.open("r+b") as file:
        file.seek(end)
        file.write(struct.pack("<I", first))
    with pytest.raises(ImageError, match="form a cycle"):
        TiffReader(str(path))


def test_subdirectories_that_are_lost_are_refused(path):
    write_ome_rgb(path, pyramid(scene()))
    with tifffile.TiffFile(path) as file:
        place = file.pages.first.tags["SubIFDs"].valueoffset
        order = file.byteorder
    with path.open("r+b") as file:
        file.seek(place)
        file.write(struct.pack(f"{order}I", 99_999_999))
    with pytest.raises(ImageError) as caught:
        read(path, WHOLE, Size(40, 40))
    assert caught.value.hint


def test_an_ndpi_is_refused_with_a_hint():
    with pytest.raises(ImageError, match="NDPI") as caught:
        TiffReader(str(real("wsi/test3-DAPI-2-387.ndpi")))
    assert "--reader slide" in caught.value.hint


@pytest.mark.parametrize(
    "content", [b"II*\0", b"II*\0\x08\0\0\0", b"II*\0\0\0\0\0", b"MM\0+\0\x08"]
)
def test_a_tiff_without_an_image_is_refused_with_a_hint(path, content):
    path.write_bytes(content)
    with pytest.raises(ImageError) as caught:
        TiffReader(str(path))
    assert caught.value.hint


def test_a_plain_pyramid_with_a_small_page_of_another_shape_ignores_that_page(path):
    image = noise((400, 200), 3)
    label = noise((50, 50), 3, seed=4)
    write_pages(path, [image, area_average(image, 2), label], tile=(64, 64))
    assert [level.size for level in info(path).levels] == [Size(400, 200), Size(200, 100)]


def test_a_pyramid_marked_by_subfile_types_is_read(path):
    image = scene()
    write_pyramid_tiff(path, image)
    assert info(path).levels[2].size == Size(38, 38)
    assert np.array_equal(read(path).values, image)


def test_a_bigtiff_is_read_with_its_levels(path):
    image = scene()
    write_pages(path, pyramid(image), tile=(64, 64), compression="zstd", bigtiff=True)
    assert info(path).levels[2].size == Size(38, 38)
    assert np.array_equal(read(path).values, image)


@pytest.mark.parametrize("planar", ["contig", "separate"])
def test_one_sample_of_several_is_read_alone(path, planar):
    image = scene(5, "uint16")
    stored = image if planar == "separate" else image.transpose(1, 2, 0)
    tifffile.imwrite(
        path, stored, planarconfig=planar, photometric="minisblack", tile=(64, 64), metadata=None
    )
    assert np.array_equal(read(path, bands=("4", "2")).values, image[[3, 1]])


@pytest.mark.parametrize(("z", "t"), [(0, 0), (2, 1)])
def test_the_plane_of_an_overview_is_the_one_that_was_chosen(stack, z, t):
    pixels = read(stack, Window(0, 0, 100, 80), Size(50, 40), z=z, t=t)
    assert np.array_equal(pixels.values, tifffile.imread(stack, level=1)[t, z])


def test_each_axis_of_ome_has_a_unit_of_its_own(path):
    metadata = {"axes": "CYX", "PhysicalSizeX": 0.5, "PhysicalSizeXUnit": "µm"}
    metadata |= {"PhysicalSizeY": 500.0, "PhysicalSizeYUnit": "nm"}
    tifffile.imwrite(path, scene(), ome=True, metadata=metadata, tile=(64, 64))
    found = info(path).microns_per_pixel
    assert (found.x, found.y) == pytest.approx((0.5, 0.5))


@pytest.mark.parametrize("dtype", ["int8", "uint32", "float16", "float64"])
def test_rarer_types_come_back_bit_for_bit(path, dtype):
    image = scene(1, "int8" if dtype == "int8" else "int16").astype(dtype)
    tifffile.imwrite(path, image[0], tile=(64, 64), compression="deflate", metadata=None)
    pixels = read(path)
    assert pixels.values.dtype == np.dtype(dtype)
    assert np.array_equal(pixels.values, image)


def test_any_view_of_a_striped_stack_is_the_area_mean(path):
    image = scene(2, "uint16")
    write_ome_tiff(path, image, ())
    with TiffReader(str(path)) as reader:
        for window, size in random_windows(20, reader.size, seed=1):
            pixels = reader.read(window, size)
            error = np.abs(pixels.values - area_mean(image, window, size))[:, pixels.valid]
            assert error.max() <= 0.51 + 1e-2


def test_a_stack_opens_and_warns_about_the_choice(stack):
    found = info(stack)
    assert found.details["planes"] == {"z": 3, "t": 2}
    assert any("`-O z=2`" in warning for warning in found.warnings)
    with pytest.raises(ImageError) as caught:
        read(stack, Window(0, 0, 100, 80), Size(100, 80))
    assert "`-O z=2`" in caught.value.hint
    assert "`-O t=1`" in caught.value.hint


def test_a_plane_of_an_image_without_depth_is_an_error(path):
    write_ome_tiff(path, scene())
    with pytest.raises(ImageError, match="no plane z = 1"):
        info(path, z=1)


def test_an_unnamed_colour_image_has_red_green_and_blue(path):
    write_ome_rgb(path, [scene()])
    assert info(path).bands == ("red", "green", "blue")


def test_resolution_tags_of_a_printer_and_units_of_no_length_are_no_resolution(path):
    tifffile.imwrite(path, scene()[0], resolution=(118, 118), resolutionunit="CENTIMETER",
                     metadata=None)  # fmt: skip
    assert info(path).microns_per_pixel is None
    assert "ignored" in info(path).warnings[0]
    write_ome_tiff(path, scene(), microns=(1, 1), unit="pixel")
    assert info(path).microns_per_pixel is None
