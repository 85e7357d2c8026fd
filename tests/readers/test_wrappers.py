import pickle

import numpy as np
import pytest
import rasterio
from affine import Affine
from hypothesis import given
from hypothesis import strategies as st

from tests.images import noise, write_geotiff
from tnetcli.geometry import Georeference, Size, Window
from tnetcli.readers.base import Box, Cost, Resolution
from tnetcli.readers.detect import open_image
from tnetcli.readers.pyramid import BLOCKS
from tnetcli.readers.wrappers import CroppedReader, MaskedReader, covered_pixels
from tnetcli.testing.reader import assert_equal

CROP = Box(37, 21, 120, 90)
TRUTH = noise((300, 200), 3, seed=4)
MASK = np.ones((200, 300), bool)
MASK[40:80, 60:140] = False


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("cropped") / "a.tif"
    return write_geotiff(path, TRUTH, overviews=[2, 4], mask=MASK)


@pytest.fixture
def image(path):
    BLOCKS.clear()
    with open_image(path) as reader:
        yield reader


@pytest.fixture(scope="module")
def shared(path):
    with open_image(path) as reader:
        yield reader


def test_it_is_as_large_as_the_crop_and_otherwise_the_image(image):
    cropped = CroppedReader(image, CROP)
    assert cropped.size == Size(120, 90)
    assert (cropped.path, cropped.name, cropped.bands) == (image.path, image.name, image.bands)
    assert (cropped.dtype, cropped.overviews) == (image.dtype, image.overviews)
    assert [level.size for level in cropped.info.levels] == [
        Size(120, 90), Size(60, 45), Size(30, 23),
    ]  # fmt: skip


def test_at_full_resolution_it_is_the_pixels_of_the_file(image):
    pixels = CroppedReader(image, CROP).read(Window(0, 0, 120, 90), Size(120, 90))
    rows, columns = slice(21, 111), slice(37, 157)
    assert np.array_equal(pixels.valid, MASK[rows, columns])
    assert np.array_equal(pixels.values, np.where(pixels.valid, TRUTH[:, rows, columns], 0))


sides = st.floats(1, 120)


@given(st.floats(0, 1), st.floats(0, 1), sides, sides, st.integers(1, 20), st.integers(1, 20))
def test_a_window_inside_is_that_of_the_image(shared, x, y, width, height, wide, high):
    height = min(height, 90.0)
    window, out = Window(x * (120 - width), y * (90 - height), width, height), Size(wide, high)
    moved = Window(window.left + 37, window.top + 21, width, height)
    cropped = CroppedReader(shared, CROP)
    assert_equal(cropped.read(window, out), shared.read(moved, out))
    assert cropped.estimate(window, out) == shared.estimate(moved, out)


@given(
    st.integers(-80, 140), st.integers(-80, 140), st.integers(1, 160), st.integers(1, 160),
    st.integers(1, 12), st.integers(1, 12),
)  # fmt: skip
def test_of_a_window_across_the_edge_what_lies_beyond_is_not_valid(
    shared, left, top, width, height, wide, high
):
    window, out = Window(left, top, width, height), Size(wide, high)
    found = CroppedReader(shared, CROP).read(window, out)
    whole = shared.read(Window(left + 37, top + 21, width, height), out)
    x = left + width / wide * np.arange(wide + 1)
    y = top + height / high * np.arange(high + 1)
    across = (x[1:] > 1e-5) & (x[:-1] < 120 - 1e-5)
    down = (y[1:] > 1e-5) & (y[:-1] < 90 - 1e-5)
    reached = np.outer(down, across)
    assert found.values.dtype == whole.values.dtype
    assert np.array_equal(found.valid, whole.valid & reached)
    # The same pixels by other sums: a rounded mean may fall to the other side.
    difference = found.values.astype(int) - np.where(found.valid, whole.values, 0).astype(int)
    assert np.abs(difference).max() <= 1


@pytest.mark.parametrize(
    "window", [Window(-9, 0, 9, 9), Window(120, 3, 5, 5), Window(3, 90, 5, 5), Window(1e7, 0, 9, 9)]
)
def test_outside_of_the_crop_is_invalid_and_free_though_the_image_goes_on(image, window):
    cropped = CroppedReader(image, CROP)
    pixels = cropped.read(window, Size(4, 3))
    assert pixels.values.shape == (3, 3, 4)
    assert not pixels.valid.any()
    assert not pixels.values.any()
    assert cropped.estimate(window, Size(4, 3)) == 0
    assert cropped.cost == Cost(0, 0)


def test_only_what_the_crop_reaches_is_decoded(path):
    with open_image(path) as image:
        BLOCKS.clear()
        cropped = CroppedReader(image, Box(0, 0, 40, 40))
        asked = Window(-20, -20, 320, 220), Size(320, 220)
        expected = cropped.estimate(*asked)
        cropped.read(*asked)
        assert cropped.cost.pixels_decoded == expected == 64 * 64


def test_it_lies_where_a_translation_moves_the_corner(image, path):
    cropped = CroppedReader(image, CROP)
    with rasterio.open(path) as dataset:
        expected = dataset.transform @ Affine.translation(37, 21)
    assert cropped.georeference.transform == tuple(expected)[:6]
    assert cropped.georeference.crs == image.georeference.crs


def test_a_turned_image_is_moved_along_its_own_axes(image):
    turned = Georeference("EPSG:32633", (3.0, 1.0, 500.0, 2.0, -4.0, 900.0))
    image.info = type(image.info)(
        **{name: getattr(image.info, name) for name in image.info.__slots__}
        | {"georeference": turned, "microns_per_pixel": Resolution(0.5, 0.25, "given")}
    )
    cropped = CroppedReader(image, CROP)
    assert cropped.georeference.to_map(7, 5) == turned.to_map(7 + 37, 5 + 21)
    assert cropped.microns_per_pixel == image.microns_per_pixel


def test_what_is_taken_off_of_pixels_leads_back_to_the_whole_image(image):
    cropped = CroppedReader(image, CROP)
    assert cropped.info.offset == (-37, -21)
    assert cropped.info.details["crop"] == [37, 21, 120, 90]
    assert "crop" not in image.info.details


def test_a_crop_of_a_crop_is_a_crop(image):
    inner = CroppedReader(CroppedReader(image, CROP), Box(10, 20, 50, 40))
    direct = CroppedReader(image, Box(47, 41, 50, 40))
    asked = Window(-3, 2, 40, 30), Size(13, 9)
    assert_equal(inner.read(*asked), direct.read(*asked))
    assert inner.georeference == direct.georeference
    assert inner.info.offset == direct.info.offset


def test_closing_it_closes_the_image(path):
    cropped = CroppedReader(open_image(path), CROP)
    cropped.close()
    with pytest.raises(ValueError, match="closed"):
        cropped.read(Window(0, 0, 8, 8), Size(8, 8))


@pytest.mark.parametrize(
    "crop",
    [Box(-1, 0, 9, 9), Box(0, 0, 0, 9), Box(0, 0, 9, 0), Box(295, 0, 9, 9), Box(0, 195, 9, 9)],
)
def test_a_crop_that_is_no_part_of_the_image_is_a_callers_mistake(image, crop):
    with pytest.raises(ValueError, match="not a part of 300 x 200 pixels"):
        CroppedReader(image, crop)


@pytest.mark.parametrize(
    ("box", "expected"),
    [
        # 500 of 1000: 15 %, 37.5 at each end. 80 of 800, a tenth: 100 %, 40 at each end.
        (Window(100, 300, 500, 80), Box(62, 260, 576, 160)),
        # 400 of 1000: 20 %. 240 of 800, 0.3: 30 %.
        (Window(300, 300, 400, 240), Box(260, 264, 480, 312)),
        # 200 of 1000, 0.2: 50 %. 40 of 800, below 0.1: 200 %.
        (Window(300, 300, 200, 40), Box(250, 260, 300, 120)),
        # Cut at the edges of the image.
        (Window(0, 700, 500, 100), Box(0, 650, 538, 150)),
        (Window(-100, -100, 2000, 2000), Box(0, 0, 1000, 800)),
        # Whole pixels around what is not whole.
        (Window(300.5, 300.5, 200, 200), Box(250, 250, 301, 301)),
        (Window(300, 300, 2, 50), None),
        (Window(300, 300, 50, 1.5), None),
        (Window(1000, 0, 50, 50), None),
        (Window(0, -60, 50, 60), None),
    ],
)
def test_a_box_grows_the_more_the_less_of_the_image_it_covers(box, expected):
    assert covered_pixels(box, Size(1000, 800), context=True) == expected


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    path = tmp_path_factory.mktemp("masked") / "a.tif"
    write_geotiff(path, noise((64, 48)), overviews=[2])
    with open_image(path) as reader:
        yield reader


def touched(hidden, window, out):
    """By brute force: which output pixels share any ground with a hidden window."""
    found = np.zeros((out.height, out.width), bool)
    for row in range(out.height):
        for column in range(out.width):
            left = window.left + column * window.width / out.width
            top = window.top + row * window.height / out.height
            right, bottom = left + window.width / out.width, top + window.height / out.height
            for each in hidden:
                x0, y0, x1, y1 = each.box
                found[row, column] |= left < x1 and x0 < right and top < y1 and y0 < bottom
    return found


boxes = st.builds(
    Window,
    st.integers(-20, 70),
    st.integers(-20, 50),
    st.integers(1, 60),
    st.integers(1, 60),
)


@given(st.lists(boxes, max_size=3), boxes, st.integers(1, 9), st.integers(1, 9))
def test_what_a_hidden_window_touches_is_not_valid_and_the_rest_is_as_it_was(
    shown, hidden, window, width, height
):
    out = Size(width, height)
    whole, masked = shown.read(window, out), MaskedReader(shown, hidden).read(window, out)
    gone = touched(hidden, window, out)
    np.testing.assert_array_equal(masked.valid, whole.valid & ~gone)
    np.testing.assert_array_equal(masked.values, np.where(masked.valid, whole.values, 0))
    assert masked.values.dtype == whole.values.dtype


def test_closing_it_leaves_the_image_open(shown):
    with MaskedReader(shown, [Window(0, 0, 9, 9)]) as masked:
        assert (masked.size, masked.bands, masked.path) == (shown.size, shown.bands, shown.path)
        assert masked.estimate(Window(0, 0, 8, 8), Size(4, 4)) > 0
    assert shown.read(Window(0, 0, 8, 8), Size(4, 4)).valid.all()
    assert masked.cost == shown.cost


def test_a_pickled_crop_reads_the_same_pixels(image):
    cropped = CroppedReader(image, CROP)
    window = Window(3, 4, 55, 66), Size(10, 11)
    with pickle.loads(pickle.dumps(cropped)) as other:
        assert_equal(other.read(*window), cropped.read(*window))


def test_a_crop_of_an_image_without_a_place_has_none(tmp_path):
    path = write_geotiff(tmp_path / "a.tif", TRUTH, crs=None, transform=None)
    with CroppedReader(open_image(path), CROP) as cropped:
        assert (cropped.georeference, cropped.microns_per_pixel) == (None, None)
