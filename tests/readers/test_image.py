import os

import numpy as np
import pytest
from PIL import Image

from tests.images import noise
from tests.slides import Once, truncate
from tnetcli.errors import ImageError
from tnetcli.geometry import Size, Window
from tnetcli.readers import image as image_reader
from tnetcli.readers import pyramid as blocks
from tnetcli.readers.base import ReadOptions
from tnetcli.readers.detect import open_image
from tnetcli.readers.image import ImageReader
from tnetcli.readers.pyramid import BLOCKS
from tnetcli.readers.raster import RasterReader
from tnetcli.readers.slide import SlideReader
from tnetcli.readers.tiff import TiffReader
from tnetcli.testing.reader import TRUTH, ReaderContract, area_mean, random_windows

WHOLE, FULL = Window(0, 0, 60, 40), Size(60, 40)


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    return Once(tmp_path_factory.mktemp("once"))


class TestImageReader(ReaderContract):
    block = Size(300, 200)

    def open(self, path):
        return ImageReader(str(path))

    @pytest.fixture
    def image(self, once):
        return once("a.png", lambda path: save(path, interleaved(TRUTH)))

    @pytest.fixture
    def levels_image(self, once):
        constant = interleaved(np.full((3, 100, 100), 10, np.uint8))
        return once("b.png", lambda path: save(path, constant)), (10,)

    def test_there_is_a_single_level(self, reader):
        assert reader.overviews == ()

    def test_an_image_is_decoded_once_and_as_a_whole(self, reader):
        for window, out_size in random_windows(5, reader.size):
            reader.read(window, out_size)
        assert reader.cost.pixels_decoded == reader.size.pixels


@pytest.fixture(autouse=True)
def fresh():
    BLOCKS.clear()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.png"


def save(path, image, **options):
    image.save(path, **options)
    return path


def read(path, window=WHOLE, out_size=FULL, **options):
    with ImageReader(str(path), ReadOptions(**options)) as reader:
        return reader.read(window, out_size)


def info(path, **options):
    with ImageReader(str(path), ReadOptions(**options)) as reader:
        return reader.info


def scene(bands=3, dtype="uint8"):
    return noise((60, 40), bands, dtype)


def interleaved(array):
    return Image.fromarray(array.transpose(1, 2, 0))


# Modes


@pytest.mark.parametrize("bands", [2, 4])
def test_a_transparent_pixel_is_invalid_and_alpha_is_no_band(path, bands):
    image = scene(bands)
    image[-1, :, :25] = 0
    save(path, interleaved(image))
    pixels = read(path)
    assert len(info(path).bands) == bands - 1
    assert np.array_equal(pixels.valid, image[-1] > 0)
    assert np.array_equal(pixels.values, np.where(image[-1] > 0, image[:-1], 0))


def test_transparent_pixels_take_no_part_in_a_mean(path):
    image = np.full((4, 40, 60), 100, np.uint8)
    image[:, :, ::2] = 0
    save(path, interleaved(image))
    pixels = read(path, out_size=Size(7, 5))
    assert pixels.valid.all()
    assert (pixels.values == 100).all()


def test_a_palette_becomes_colours(path):
    image = Image.fromarray(np.arange(2400, dtype=np.uint8).reshape(40, 60) % 3, "P")
    image.putpalette([255, 0, 0, 0, 128, 0, 1, 2, 3])
    save(path, image)
    pixels = read(path)
    expected = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
    assert np.array_equal(pixels.values, expected)
    assert pixels.valid.all()


def test_the_transparent_colour_of_a_palette_is_invalid(path):
    index = np.arange(2400, dtype=np.uint8).reshape(40, 60) % 3
    image = Image.fromarray(index, "P")
    image.putpalette([255, 0, 0, 0, 128, 0, 1, 2, 3])
    save(path, image, transparency=1)
    pixels = read(path)
    assert np.array_equal(pixels.valid, index != 1)
    assert pixels.values[:, 0, 2].tolist() == [1, 2, 3]


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_the_transparent_colour_of_a_png_is_invalid(path, mode):
    image = scene(3 if mode == "RGB" else 1)
    image[:, 5, 7] = 1
    pillow = interleaved(image) if mode == "RGB" else Image.fromarray(image[0])
    save(path, pillow, transparency=(1, 1, 1) if mode == "RGB" else 1)
    assert np.argwhere(~read(path).valid).tolist() == [[5, 7]]


def test_sixteen_bits_stay_sixteen_bits(path):
    image = scene(1, "uint16")
    save(path, Image.fromarray(image[0]))
    pixels = read(path)
    assert pixels.values.dtype == np.uint16
    assert np.array_equal(pixels.values, image)


def test_sixteen_bits_with_a_transparent_value_stay_sixteen_bits(path):
    image = scene(1, "uint16")
    image[0, 5, 7] = 3
    save(path, Image.fromarray(image[0]), transparency=3)
    pixels = read(path)
    assert pixels.values.dtype == np.uint16
    assert np.array_equal(pixels.values[:, pixels.valid], image[:, pixels.valid])


def test_cmyk_becomes_colours(tmp_path):
    path = tmp_path / "a.jpg"
    image = interleaved(scene()).convert("CMYK")
    save(path, image, quality=95)
    with Image.open(path) as stored:
        expected = np.asarray(stored.convert("RGB")).transpose(2, 0, 1)
    assert info(path).bands == ("red", "green", "blue")
    assert np.array_equal(read(path).values, expected)


@pytest.mark.parametrize("ending", ["jpg", "webp", "bmp", "gif"])
def test_other_formats_are_near_the_truth(tmp_path, ending):
    path = save(tmp_path / f"a.{ending}", interleaved(scene()))
    assert np.abs(read(path).values - scene().astype(float)).mean() < 16


# Limits and damage


def test_an_image_past_the_limit_is_refused_with_a_way_out(path, monkeypatch):
    save(path, interleaved(scene()))
    monkeypatch.setattr(image_reader, "MOST_PIXELS", 2399)
    with pytest.raises(ImageError, match="million pixels") as caught:
        ImageReader(str(path))
    assert "--reader raster" in caught.value.hint


def test_an_image_at_the_limit_is_read(path, monkeypatch):
    save(path, interleaved(scene()))
    monkeypatch.setattr(image_reader, "MOST_PIXELS", 2400)
    assert read(path).valid.all()


def test_an_image_too_large_to_share_is_read_all_the_same(path, monkeypatch):
    save(path, interleaved(scene()))
    monkeypatch.setattr(image_reader, "BLOCKS", blocks.BlockCache(100))
    with ImageReader(str(path)) as reader:
        for _ in range(2):
            assert np.array_equal(reader.read(WHOLE, FULL).values, scene())
        assert reader.cost.pixels_decoded == reader.size.pixels


@pytest.mark.parametrize("ending", ["png", "jpg", "webp", "bmp", "gif"])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_a_truncated_image_is_an_image_error(tmp_path, ending, share):
    image = noise((300, 200))
    path = truncate(save(tmp_path / f"a.{ending}", interleaved(image)), share)
    with pytest.raises(ImageError) as caught:
        read(path)
    assert caught.value.hint


def test_what_is_no_image_is_refused_with_a_hint(path):
    path.write_bytes(b"RIFF no picture at all")
    with pytest.raises(ImageError, match="cannot parse") as caught:
        ImageReader(str(path))
    assert caught.value.hint


# Information and warnings


def test_an_orientation_in_exif_is_mentioned_and_not_applied(tmp_path):
    exif = Image.Exif()
    exif[image_reader.EXIF_ORIENTATION] = 6
    path = save(tmp_path / "a.jpg", interleaved(scene()), exif=exif, quality=95)
    found = info(path)
    assert any("orientation" in warning for warning in found.warnings)
    assert found.levels[0].size == Size(60, 40)


@pytest.mark.parametrize("kind", ["jpeg", "progressive", "grey", "png"])
@pytest.mark.parametrize("harm", ["hole", "cut"])
def test_damage_in_the_middle_is_an_image_error(tmp_path, kind, harm):
    image = Image.fromarray(noise((200, 200)).transpose(1, 2, 0))
    path = tmp_path / "a"
    image = image.convert("L") if kind == "grey" else image
    image.save(path, "PNG" if kind == "png" else "JPEG", progressive=kind == "progressive")
    data = bytearray(path.read_bytes())
    half = len(data) // 2
    data[half : half + 500] = bytes(500)
    path.write_bytes(data if harm == "hole" else data[:half] + data[-2:])
    with ImageReader(str(path)) as reader, pytest.raises(ImageError):
        reader.read(Window(0, 0, 200, 200), Size(200, 200))


@pytest.mark.parametrize("nodata", [300.0, -1.0, 1.5, float("inf")])
def test_a_nodata_that_cannot_occur_keeps_the_mask_of_the_file(tmp_path, nodata):
    image = np.full((20, 20, 4), 255, np.uint8)
    image[:10, :, 3] = 0
    Image.fromarray(image).save(tmp_path / "a.png")
    with ImageReader(str(tmp_path / "a.png"), ReadOptions(nodata=nodata)) as reader:
        assert any("nodata" in warning for warning in reader.info.warnings)
        assert reader.read(Window(0, 0, 20, 20), Size(20, 20)).valid.mean() == 0.5


# Files that are made to harm


def test_a_jpeg_whose_stream_has_another_size_is_an_image_error(tmp_path):
    path = save(tmp_path / "a.jpg", interleaved(scene()))
    data = path.read_bytes()
    frame = data.index(b"\xff\xc0")
    # A second frame, of which Pillow takes the last and libjpeg the first.
    second = bytearray(data[frame : frame + 19])
    second[5:9] = (40).to_bytes(2, "big") * 2
    path.write_bytes(data[: frame + 19] + second + data[frame + 19 :])
    with pytest.raises(ImageError):
        read(path, Window(0, 0, 40, 40), Size(40, 40))


def test_a_jpeg_of_too_many_scans_is_an_image_error(tmp_path):
    path = save(tmp_path / "a.jpg", interleaved(scene()), progressive=True)
    data = path.read_bytes()
    last = data.rindex(b"\xff\xda")
    path.write_bytes(data[:last] + data[last:-2] * 120 + data[-2:])
    with pytest.raises(ImageError, match="too many scans"):
        read(path)


def test_formats_that_run_programs_are_not_opened(tmp_path):
    path = tmp_path / "a.eps"
    interleaved(scene()).save(path)
    with pytest.raises(ImageError, match="not PNG, JPEG"):
        ImageReader(str(path))


@pytest.mark.parametrize(("name", "options"), [("a.jpg", {"progressive": True}), ("a.png", {})])
def test_a_large_image_that_is_decoded_as_a_whole_is_refused(tmp_path, monkeypatch, name, options):
    values = np.zeros((64, 64, 3), np.uint8)
    Image.fromarray(values).save(tmp_path / name, **options)
    monkeypatch.setattr(image_reader, "MOST_PIXELS", 64 * 64 - 1)
    if name == "a.jpg":
        with pytest.raises(ImageError, match="progressive JPEG"):
            open_image(tmp_path / name)
    else:  # not interlaced
        with open_image(tmp_path / name) as reader:
            assert reader.name == "raster"


def test_black_and_white_become_0_and_255(path):
    image = scene(1)[0] > 128
    save(path, Image.fromarray(image))
    assert np.array_equal(read(path).values[0], image * np.uint8(255))


def test_further_frames_are_mentioned(tmp_path):
    frames = [interleaved(noise((60, 40), seed=seed)) for seed in range(3)]
    path = save(tmp_path / "a.gif", frames[0], save_all=True, append_images=frames[1:])
    assert any("3 frames" in warning for warning in info(path).warnings)


def test_grey_and_colour_have_their_bands_and_no_warning(path):
    save(path, Image.fromarray(scene(1)[0]))
    assert (info(path).bands, info(path).warnings) == (("1",), ())
    assert np.array_equal(read(path).values, scene(1))
    save(path, interleaved(scene()))
    found = info(path)
    assert found.bands == ("red", "green", "blue")
    assert (found.compression, found.tiled) == ("png", False)
    assert found.file_bytes == path.stat().st_size


def test_alpha_can_be_read_as_a_band(path):
    image = scene(4)
    save(path, interleaved(image))
    assert np.array_equal(read(path, bands=("alpha", "red")).values, image[[3, 0]])


def test_the_users_nodata_is_invalid(path):
    image = scene()
    image[:, 5, 7] = 0
    save(path, interleaved(image))
    assert np.argwhere(~read(path, nodata=0).valid).tolist() == [[5, 7]]


def test_any_view_of_sixteen_bits_is_the_area_mean(path):
    image = scene(1, "uint16")
    save(path, Image.fromarray(image[0]))
    with ImageReader(str(path)) as reader:
        for window, size in random_windows(20, reader.size, seed=1):
            pixels = reader.read(window, size)
            error = np.abs(pixels.values - area_mean(image, window, size))[:, pixels.valid]
            assert error.max() <= 0.51


@pytest.mark.parametrize("reader", [ImageReader, TiffReader, SlideReader, RasterReader])
def test_a_pipe_given_to_a_reader_is_an_image_error(tmp_path, reader):
    os.mkfifo(tmp_path / "a")
    with pytest.raises(ImageError, match="is a named pipe"):
        reader(str(tmp_path / "a"))
