import os
import subprocess
import sys

import numpy as np
import openslide
import pytest
import tifffile
from PIL import Image

from tests.images import noise, write_constant_levels_tiff, write_pyramid_tiff, write_svs
from tests.slides import DATA, Once, copy_of_real, real, spoil_tile, write_scn
from tnetcli.errors import ImageError
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import ReadOptions
from tnetcli.readers.pyramid import BLOCKS
from tnetcli.readers.slide import SlideReader, check_slide_files
from tnetcli.testing.reader import (
    TRUTH,
    ReaderContract,
    area_mean,
    assert_equal,
    random_windows,
)

JPEG = {"level": 95, "outcolorspace": "rgb"}
HOSTILE = sorted(each for each in (DATA / "wsi" / "hostile").glob("*") if each.is_file())


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    return Once(tmp_path_factory.mktemp("once"))


class TestSlideReader(ReaderContract):
    direct = True

    def open(self, path):
        return SlideReader(str(path), direct=self.direct)

    @pytest.fixture
    def image(self, once):
        return once("a.tif", lambda path: write_pyramid_tiff(path, TRUTH))

    @pytest.fixture
    def levels_image(self, once):
        constants = (10, 20, 30)
        return once("b.tif", lambda path: write_constant_levels_tiff(path, constants)), constants


class TestSlideReaderThroughOpenSlide(TestSlideReader):
    direct = False


class TestSlideReaderOnJpeg(TestSlideReader):
    tolerance = 16.0

    @pytest.fixture
    def image(self, once):
        jpeg = {"compression": "jpeg", "compressionargs": JPEG}
        return once("c.tif", lambda path: write_pyramid_tiff(path, TRUTH, **jpeg))


class TestSlideReaderOnAperio(TestSlideReader):
    @pytest.fixture
    def image(self, once):
        return once("a.svs", lambda path: write_svs(path, TRUTH, (2, 4)))


@pytest.fixture(params=[True, False], ids=["direct", "openslide"])
def direct(request):
    BLOCKS.clear()
    return request.param


def info(path, **options):
    with SlideReader(str(path), ReadOptions(**options)) as reader:
        return reader.info


def read(path, window, out_size, *, direct=True, **options):
    with SlideReader(str(path), ReadOptions(**options), direct=direct) as reader:
        return reader.read(window, out_size)


def with_properties(monkeypatch, **changed):
    """Make OpenSlide tell something else about every slide."""
    original = openslide.OpenSlide.properties.fget

    def properties(self):
        return {**original(self), **{name: str(value) for name, value in changed.items()}}

    monkeypatch.setattr(openslide.OpenSlide, "properties", property(properties))


# Resolution


def test_the_resolution_is_the_scanners(tmp_path):
    path = write_svs(tmp_path / "a.svs", noise((200, 150)), mpp=0.25)
    found = info(path).microns_per_pixel
    assert (found.x, found.y, found.source) == (0.25, 0.25, "aperio metadata")


def test_the_power_of_the_objective_is_not_a_resolution(tmp_path):
    path = write_svs(tmp_path / "a.svs", noise((200, 150)), mpp=None, magnification=40)
    found = info(path)
    assert found.microns_per_pixel is None
    assert found.details["objective_power"] == "40"


def test_resolution_tags_of_a_plain_tiff_are_used(tmp_path):
    path = write_pyramid_tiff(tmp_path / "a.tif", noise((200, 150)), resolution=(20_000, 40_000))
    found = info(path).microns_per_pixel
    assert (found.x, found.y) == pytest.approx((0.5, 0.25))
    assert found.source == "TIFF resolution tags"


@pytest.mark.parametrize("text", ["", "unknown", "nan", "0", "-1", "inf", "1e999"])
def test_a_resolution_that_is_no_length_is_not_believed(tmp_path, monkeypatch, text):
    path = write_svs(tmp_path / "a.svs", noise((200, 150)))
    with_properties(monkeypatch, **{"openslide.mpp-x": text, "openslide.mpp-y": text})
    assert info(path).microns_per_pixel is None


# Bounds and transparency

AREA = noise((200, 150), seed=5)


def scanned(level=1):
    """Return which pixels of the Leica slide were scanned."""
    mask = np.zeros((300, 400), bool)
    mask[48:198, 64:264] = True
    return mask[::level, ::level]


def test_the_bounds_of_a_slide_give_the_offset(tmp_path):
    found = info(write_scn(tmp_path / "a.scn", AREA))
    assert found.offset == (64, 48)
    assert found.details["bounds"] == [64, 48, 200, 150]


def test_the_offset_is_the_one_openslide_tells(tmp_path, monkeypatch):
    path = write_svs(tmp_path / "a.svs", AREA)
    names = ("x", "y", "width", "height")
    bounds = dict(
        zip((f"openslide.bounds-{each}" for each in names), (30, 20, 90, 80), strict=True)
    )
    with_properties(monkeypatch, **bounds)
    assert info(path).offset == (30, 20)


@pytest.mark.parametrize("value", ["-5", "99999999999999", "nan", "1e400", ""])
def test_bounds_outside_the_slide_are_ignored_with_a_warning(tmp_path, monkeypatch, value):
    path = write_scn(tmp_path / "a.scn", AREA)
    with_properties(monkeypatch, **{"openslide.bounds-x": value})
    found = info(path)
    assert found.offset == (0, 0)
    assert "bounds" not in found.details
    assert any("bounds" in warning for warning in found.warnings)


def test_coordinates_are_those_of_the_uncropped_slide(tmp_path):
    path = write_scn(tmp_path / "a.scn", AREA)
    assert info(path).levels[0].size == Size(400, 300)
    pixels = read(path, Window(64, 48, 200, 150), Size(200, 150))
    assert pixels.valid.all()
    assert np.array_equal(pixels.values, AREA)


def test_what_was_not_scanned_is_invalid(tmp_path):
    path = write_scn(tmp_path / "a.scn", AREA)
    pixels = read(path, Window(0, 0, 400, 300), Size(400, 300))
    assert np.array_equal(pixels.valid, scanned())
    assert not pixels.values[:, ~scanned()].any()
    pixels = read(path, Window(0, 0, 400, 300), Size(200, 150))
    assert np.array_equal(pixels.valid, scanned(2))


def test_what_was_not_scanned_takes_no_part_in_a_mean(tmp_path):
    path = write_scn(tmp_path / "a.scn", np.full_like(AREA, 100), factors=())
    pixels = read(path, Window(0, 0, 400, 300), Size(13, 11))
    assert (pixels.values[:, pixels.valid] == 100).all()


def with_pixels(monkeypatch, colours):
    """Make OpenSlide return these rows of red, green, blue and alpha, and then transparency."""

    def read_region(self, location, level, size):
        rgba = np.zeros((size[1], size[0], 4), np.uint8)
        part = np.array(colours, np.uint8)[location[1] :, location[0] :][: size[1], : size[0]]
        rgba[: part.shape[0], : part.shape[1]] = part
        return Image.fromarray(rgba)

    monkeypatch.setattr(openslide.OpenSlide, "read_region", read_region)


COLOURS = [[(10, 20, 30, 0), (10, 20, 30, 128), (10, 20, 30, 255)]]


@pytest.mark.parametrize(
    ("background", "expected"),
    [(None, (132, 137, 142)), ("FF8000", (132, 74, 15))],
    ids=["white", "orange"],
)
def test_half_transparent_pixels_are_laid_over_the_background(
    tmp_path, monkeypatch, background, expected
):
    path = write_svs(tmp_path / "a.svs", AREA)
    if background:
        with_properties(monkeypatch, **{"openslide.background-color": background})
    with_pixels(monkeypatch, COLOURS)
    pixels = read(path, Window(0, 0, 3, 1), Size(3, 1), direct=False)
    assert tuple(pixels.values[:, 0, 1]) == expected
    assert tuple(pixels.values[:, 0, 2]) == (10, 20, 30)


# Levels


def inside(size):
    windows = random_windows(60, size, seed=7)
    return [
        (window, out_size)
        for window, out_size in windows
        if min(window.left, window.top) >= 0
        and window.right <= size.width
        and window.bottom <= size.height
    ]


@pytest.mark.parametrize("size", [(301, 203), (259, 331), (200, 150)])
def test_levels_of_odd_sizes_keep_everything_in_its_place(tmp_path, direct, size):
    truth = noise(size, seed=6)
    path = write_svs(tmp_path / "a.svs", truth, (2, 4))
    with SlideReader(str(path), direct=direct) as reader:
        assert reader.overviews == (2.0, 4.0)
        for window, out_size in inside(reader.size):
            pixels = reader.read(window, out_size)
            assert np.abs(pixels.values - area_mean(truth, window, out_size)).mean() <= 3


def test_outside_is_invalid_although_an_overview_was_rounded_up(tmp_path, direct):
    path = write_svs(tmp_path / "a.svs", noise((305, 201)), (8,))
    pixels = read(path, Window(225, 121, 160, 160), Size(20, 20), direct=direct)
    expected = np.zeros((20, 20), bool)
    expected[:10, :10] = True
    assert np.array_equal(pixels.valid, expected)


@pytest.mark.parametrize("size", [(301, 203), (259, 331)])
def test_both_ways_of_reading_nearly_agree_in_levels_of_odd_sizes(tmp_path, size):
    path = write_svs(tmp_path / "a.svs", noise(size, seed=6), (2, 4))
    with SlideReader(str(path)) as fast, SlideReader(str(path), direct=False) as slow:
        for level in (2, 4):
            for left, top in ((0, 0), (37 * level, 11 * level), (13 * level, 29 * level)):
                window = Window(left, top, 20 * level, 20 * level)
                one, other = (each.read(window, Size(20, 20)) for each in (fast, slow))
                # OpenSlide takes no fractions of a pixel, and its scale is that of rounded sizes.
                assert np.abs(one.values - other.values.astype(float)).mean() <= 3


def test_the_thumbnail_of_a_slide_is_no_level(tmp_path):
    path = write_svs(tmp_path / "a.svs", noise((600, 450)), (4,))
    assert [level.size for level in info(path).levels] == [Size(600, 450), Size(150, 113)]


# Damage


@pytest.mark.parametrize("compression", ["deflate", "jpeg"])
def test_a_damaged_tile_fails_alone(tmp_path, direct, compression):
    path = write_svs(tmp_path / "a.svs", noise((200, 150)), compression=compression)
    good = read(path, Window(130, 10, 60, 60), Size(60, 60), direct=direct)
    spoil_tile(path, 0)
    BLOCKS.clear()
    with SlideReader(str(path), direct=direct) as reader:
        with pytest.raises(ImageError, match="pixels 5") as caught:
            reader.read(Window(5, 5, 20, 20), Size(20, 20))
        assert "damaged" in caught.value.hint
        assert_equal(reader.read(Window(130, 10, 60, 60), Size(60, 60)), good)


@pytest.mark.parametrize(
    "image",
    [noise((300, 200), 3, "uint16"), noise((300, 200), 4, "uint8"), noise((300, 200), 4, "uint16")],
    ids=["16 bits", "4 bands", "16 bits of 4 bands"],
)
def test_what_openslide_reads_wrongly_is_refused_with_a_way_out(tmp_path, image):
    path = write_pyramid_tiff(
        tmp_path / "a.tif", image, extrasamples=["unspecified"] * (len(image) - 3)
    )
    with pytest.raises(ImageError, match="bands of") as caught:
        SlideReader(str(path))
    assert "--reader" in caught.value.hint


ABORTING = """
import sys
from tnetcli.errors import ImageError
from tnetcli.geometry import Size, Window
from tnetcli.readers.slide import SlideReader
for path in sys.argv[1:]:
    try:
        with SlideReader(path) as reader:
            reader.read(Window(70, 50, 20, 20), Size(20, 20))
    except ImageError as error:
        print(bool(error.hint))
"""


def test_a_slide_with_huge_tiles_is_refused_and_does_not_end_the_process(tmp_path):
    paths = []
    for tile in [(32_768, 32_768), (2_030_043_200, 64), (64, 2_030_043_200)]:
        paths.append(write_scn(tmp_path / f"{len(paths)}.scn", AREA))
        with tifffile.TiffFile(paths[-1], mode="r+") as file:
            for name, side in zip(("TileWidth", "TileLength"), tile, strict=True):
                file.pages[1].aspage().tags[name].overwrite(side, dtype="I")
    done = subprocess.run(
        [sys.executable, "-c", ABORTING, *map(str, paths)],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "True\n" * 3)


def test_a_mirax_without_its_folder_is_an_image_error(tmp_path):
    path = copy_of_real("wsi/hostile/Mirax2-Fluorescence-1.mrxs", tmp_path)
    with pytest.raises(ImageError) as caught:
        SlideReader(str(path))
    assert "companion" in caught.value.hint


# Real files


@pytest.mark.parametrize(
    ("name", "size", "overviews", "mpp"),
    [
        ("CMU-1-Small-Region.svs", (2220, 2967), (), 0.499),
        ("TCGA-CR-7395-01A-01-TS1.svs", (4443, 3567), (2,), None),
        ("test3-DAPI-2-387.ndpi", (3968, 4864), (2, 4, 8, 16, 32, 64), 0.2281750559),
        ("dicom_camelyon/camelyon_multiframe_jpeg.dcm", (1152, 700), (), 28.969),
        ("dicom_panimg/full_no_bot/full_no_bot.dcm", (154, 290), (), 124.1778),
        ("dicom_panimg/sparse_with_bot/sparse_with_bot.dcm", (154, 290), (), 124.1778),
        ("synthetic/boxes.tiff", (300, 250), (2, 4, 8), None),
        ("synthetic/small.svs", (16, 16), (), 0.499),
    ],
)  # fmt: skip
def test_a_real_slide_has_its_size_levels_and_resolution(name, size, overviews, mpp):
    with SlideReader(str(real(f"wsi/{name}"))) as reader:
        assert reader.size == Size(*size)
        assert reader.overviews == overviews
        found = reader.microns_per_pixel
        assert (None if found is None else found.x) == pytest.approx(mpp)


def test_files_of_one_dicom_series_are_levels_of_one_slide(tmp_path):
    for name in ("boxes_0.dcm", "boxes_1.dcm"):
        copy_of_real(f"wsi/synthetic/{name}", tmp_path)
    with SlideReader(str(tmp_path / "boxes_0.dcm")) as reader:
        known = openslide.OpenSlide(tmp_path / "boxes_0.dcm").level_dimensions
        assert [(each.size.width, each.size.height) for each in reader.info.levels] == list(known)


def test_a_real_slide_with_a_damaged_tile_is_still_read_elsewhere(tmp_path, direct):
    path = copy_of_real("wsi/CMU-1-Small-Region.svs", tmp_path)
    spoil_tile(path, 0)
    with SlideReader(str(path), direct=direct) as reader:
        with pytest.raises(ImageError):
            reader.read(Window(10, 10, 100, 100), Size(100, 100))
        pixels = reader.read(Window(1000, 1000, 100, 100), Size(100, 100))
    with openslide.OpenSlide(real("wsi/CMU-1-Small-Region.svs")) as slide:
        known = np.asarray(slide.read_region((1000, 1000), 0, (100, 100)))[..., :3]
    assert np.array_equal(pixels.values, known.transpose(2, 0, 1))


def test_the_size_on_disk_counts_the_folder_of_a_mirax(tmp_path, monkeypatch):
    path = write_svs(tmp_path / "a.svs", AREA)
    with_properties(monkeypatch, **{"openslide.vendor": "mirax"})
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "Data0000.dat").write_bytes(b"0" * 1000)
    assert info(path).file_bytes == path.stat().st_size + 1000


SLIDEDAT = """\ufeff[GENERAL]
SLIDE_ID=A
[HIERARCHICAL]
INDEXFILE={index}
[DATAFILE]
FILE_COUNT={count}
FILE_0={data}
"""
HAMAMATSU = """[{kind} Microscope Specimen]
NoLayers=1
NoJpegColumns={columns}
NoJpegRows={rows}
ImageFile={image}
ImageFile(1,0)=b.jpg
MapFile=map.jpg
"""


@pytest.fixture
def mirax(tmp_path):
    """Return the path of a slide, and a function that writes its index."""
    path, folder = tmp_path / "a.mrxs", tmp_path / "a"
    path.write_bytes(b"\xff\xd8\xff")
    folder.mkdir()

    def write(index="Index.dat", data="Data0000.dat", count="1"):
        text = SLIDEDAT.format(index=index, data=data, count=count).replace("\n", "\r\n")
        (folder / "Slidedat.ini").write_bytes(text.encode())
        return str(path)

    return write


def test_companions_in_the_folder_pass(mirax, tmp_path):
    (tmp_path / "a" / "Index.dat").write_bytes(b"")
    (tmp_path / "a" / "Other.dat").write_bytes(b"")
    (tmp_path / "a" / "Data0000.dat").symlink_to("Other.dat")
    check_slide_files(mirax())


@pytest.mark.parametrize("key", ["index", "data"])
@pytest.mark.parametrize("name", ["../x.dat", "/dev/zero", "..", "b/x.dat", "..\\x.dat"])
def test_a_companion_elsewhere_is_refused(mirax, key, name):
    with pytest.raises(ImageError, match="outside its folder") as caught:
        SlideReader(mirax(**{key: name}))
    assert f"`{name}`" in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["Slidedat.ini", "Index.dat", "Data0000.dat"])
def test_a_companion_that_is_a_pipe_is_refused_without_waiting(mirax, tmp_path, name):
    path = mirax()
    (tmp_path / "a" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "a" / name)
    with pytest.raises(ImageError, match=f"`{name}`.*is a named pipe"):
        SlideReader(path)


@pytest.mark.parametrize("name", ["Slidedat.ini", "Index.dat"])
def test_a_link_out_of_the_folder_is_refused(mirax, tmp_path, name):
    path, place = mirax(), tmp_path / "a" / name
    (tmp_path / "elsewhere").write_text(SLIDEDAT.format(index="x", data="y", count=1))
    place.unlink(missing_ok=True)
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ImageError, match=f"link `{name}` to a file outside"):
        SlideReader(path)


def test_more_data_files_than_named_are_refused(mirax):
    with pytest.raises(ImageError, match="declares 2,000,000,000 files, but names 2"):
        SlideReader(mirax(count="2000000000"))


@pytest.mark.parametrize("kind", ["Virtual", "Uncompressed Virtual"])
def test_the_files_of_hamamatsu_are_checked(tmp_path, kind):
    path = tmp_path / "a.vms"
    path.write_text(HAMAMATSU.format(kind=kind, columns=2, rows=1, image="a.jpg"))
    check_slide_files(str(path))
    os.mkfifo(tmp_path / "a.jpg")
    with pytest.raises(ImageError, match=r"`a.jpg`.*is a named pipe"):
        SlideReader(str(path))
    path.write_text(HAMAMATSU.format(kind=kind, columns=2, rows=1, image="../a.jpg"))
    with pytest.raises(ImageError, match=r"`../a.jpg`"):
        SlideReader(str(path))
    path.write_text(HAMAMATSU.format(kind=kind, columns=9999, rows=9999, image="b.jpg"))
    with pytest.raises(ImageError, match="declares 99,980,001 files"):
        SlideReader(str(path))


def test_a_pipe_beside_a_dicom_slide_is_refused_without_waiting(tmp_path):
    path = copy_of_real("wsi/dicom_panimg/full_no_bot/full_no_bot.dcm", tmp_path)
    check_slide_files(str(path))
    os.mkfifo(tmp_path / "b.dcm")
    with pytest.raises(ImageError, match=r"`b.dcm`.*is a named pipe"):
        SlideReader(str(path))


def test_a_pipe_in_place_of_an_overview_is_refused_without_waiting(tmp_path):
    (tmp_path / "a.tif").write_bytes(b"II*\0")
    os.mkfifo(tmp_path / "a.Full")
    with pytest.raises(ImageError, match=r"`a.Full`.*is a named pipe"):
        SlideReader(str(tmp_path / "a.tif"))


@pytest.mark.parametrize("value", ["0", "inf", "x"])
def test_a_tile_without_a_size_counts_as_the_usual_one(tmp_path, monkeypatch, value):
    path = write_scn(tmp_path / "a.scn", AREA)
    with_properties(monkeypatch, **{"openslide.level[0].tile-width": value})
    assert info(path).levels[0].block.width == 256


def test_only_transparent_pixels_are_invalid(tmp_path, monkeypatch):
    path = write_svs(tmp_path / "a.svs", AREA)
    with_pixels(monkeypatch, COLOURS)
    pixels = read(path, Window(0, 0, 3, 1), Size(3, 1), direct=False)
    assert pixels.valid.tolist() == [[False, True, True]]
    assert not pixels.values[:, 0, 0].any()


def test_colours_are_chosen_by_name_and_by_number(tmp_path, direct):
    path = write_svs(tmp_path / "a.svs", AREA)
    pixels = read(path, Window(0, 0, 200, 150), Size(200, 150), direct=direct, bands=("blue", "1"))
    assert np.array_equal(pixels.values, AREA[[2, 0]])


def test_a_damaged_tile_fails_every_time(tmp_path, direct):
    path = write_svs(tmp_path / "a.svs", noise((200, 150)))
    spoil_tile(path, 0)
    with SlideReader(str(path), direct=direct) as reader:
        for _ in range(3):
            with pytest.raises(ImageError):
                reader.read(Window(5, 5, 20, 20), Size(20, 20))


def test_a_text_file_is_an_error_with_a_hint(tmp_path):
    path = tmp_path / "a.svs"
    path.write_text("no slide")
    with pytest.raises(ImageError, match="OpenSlide cannot open") as caught:
        SlideReader(str(path))
    assert caught.value.hint


def test_half_of_an_odd_width_has_the_scale_two():
    level = info(real("wsi/TCGA-CR-7395-01A-01-TS1.svs")).levels[1]
    assert (level.size, level.scale_x, level.scale_y) == (Size(2221, 1783), 2.0, 2.0)


@pytest.mark.parametrize("path", HOSTILE, ids=lambda path: path.name)
def test_a_hostile_real_file_is_an_image_error(path, direct):
    with pytest.raises(ImageError) as caught:
        read(path, Window(0, 0, 16, 16), Size(16, 16), direct=direct)
    assert caught.value.hint
