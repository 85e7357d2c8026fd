import colorsys
import math
import pickle
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tests.images import noise, write_constant_levels_tiff, write_geotiff
from tests.strategies import numbers, windows_near
from tnetcli.data.augment import Augmented, Pose, augment, draw_pose, move_boxes
from tnetcli.data.colour import AMOUNTS, ORDERS, Blur, Jitter, draw_jitter
from tnetcli.data.config import AugmentConfig
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Box, Cost, ImageInfo, Level, Pixels, Reader, Resolution
from tnetcli.readers.detect import open_image
from tnetcli.testing.reader import ReaderContract, area_mean, assert_equal, random_windows

SIZE = Size(90, 60)
WHOLE = Box(0, 0, 90, 60)
EVERYTHING = AugmentConfig(
    flip="both", turns=True, crop=(0.4, 0.9), shift=0.2, rotate=30, colour=True, blur=2
)


class ArrayReader(Reader):
    """Reads an array by the definition of the area mean, pixel by pixel; counts its reads."""

    name = "array"
    path = "array"

    def __init__(self, array, valid=None, microns=None):
        bands, height, width = array.shape
        self.array = array
        self.mask = np.ones((height, width), bool) if valid is None else valid
        names = tuple(str(number + 1) for number in range(bands))
        level = Level(Size(width, height), 1.0, 1.0, Size(16, 32))
        self.info = ImageInfo((level,), names, array.dtype, microns_per_pixel=microns)
        self.asked = []
        self.closed = False

    @property
    def cost(self):
        return Cost(len(self.asked), 0)

    def read(self, window, out_size):
        self.asked.append((window, out_size))
        seen = area_mean(self.mask[None] * 1.0, window, out_size)[0]
        total = area_mean(np.where(self.mask, self.array, 0), window, out_size)
        valid = seen > 1e-9
        values = np.divide(total, seen, out=np.zeros_like(total), where=valid)
        if self.dtype.kind != "f":
            values = np.rint(values)
        return Pixels(values.astype(self.dtype), valid)

    def estimate(self, window, out_size):
        return out_size.pixels

    def close(self):
        self.closed = True


class TestAugmentedReader(ReaderContract):
    """The image is stored lying on its side; the pose stands it up again."""

    def open(self, path):
        image = open_image(path)
        size = image.size
        return Augmented(image, Pose(Box(0, 0, size.width, size.height), across=True))

    @pytest.fixture
    def image(self, tmp_path_factory, truth):
        path = tmp_path_factory.mktemp("image") / "a.tif"
        return write_geotiff(path, truth.swapaxes(1, 2), overviews=[2, 4])

    @pytest.fixture
    def levels_image(self, tmp_path_factory):
        path = tmp_path_factory.mktemp("levels") / "a.tif"
        return write_constant_levels_tiff(path, (10, 20, 30)), (10, 20, 30)


def upright_poses():
    """Poses without an angle, within an image of `SIZE`."""

    @st.composite
    def build(draw):
        width, height = draw(st.integers(1, SIZE.width)), draw(st.integers(1, SIZE.height))
        left = draw(st.integers(0, SIZE.width - width))
        top = draw(st.integers(0, SIZE.height - height))
        flags = [draw(st.booleans()) for _ in range(3)]
        shifts = [draw(st.integers(-20, 20)), draw(st.integers(-20, 20))]
        return Pose(Box(left, top, width, height), *flags, *shifts)

    return build()


def brute_force(array, pose, fill=0):
    """Augment a fully decoded (..., height, width) array: crop, swap, flip, shift."""
    crop = pose.crop
    array = array[..., crop.top : crop.bottom, crop.left : crop.right]
    if pose.across:
        array = np.moveaxis(array, -1, -2)
    if pose.flip_x:
        array = np.flip(array, -1)
    if pose.flip_y:
        array = np.flip(array, -2)
    moved = np.full_like(array, fill)
    height, width = array.shape[-2:]
    for row in range(height):
        for column in range(width):
            y, x = row - pose.shift_y, column - pose.shift_x
            if 0 <= y < height and 0 <= x < width:
                moved[..., row, column] = array[..., y, x]
    return moved


def padded(array, window):
    """Cut whole pixels out of (..., height, width), with zeros outside."""
    left, top, width, height = (
        int(edge) for edge in (window.left, window.top, window.width, window.height)
    )
    margin = [(0, 0)] * (array.ndim - 2) + [(100, 100)] * 2
    rows, columns = slice(top + 100, top + 100 + height), slice(left + 100, left + 100 + width)
    return np.pad(array, margin)[..., rows, columns]


IMAGE = noise((90, 60), 3, seed=5)
HOLES = np.random.default_rng(6).random((60, 90)) > 0.2


@given(pose=upright_poses(), data=st.data())
@hypothesis_settings(max_examples=20)
def test_whole_pixels_of_an_upright_pose_are_those_of_the_decoded_image(pose, data):
    left, top = data.draw(st.integers(-15, 60)), data.draw(st.integers(-15, 60))
    size = Size(data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40)))
    window = Window(left, top, size.width, size.height)
    pixels = Augmented(ArrayReader(IMAGE, HOLES), pose).read(window, size)
    valid = brute_force(HOLES, pose)
    assert np.array_equal(pixels.valid, padded(valid, window))
    assert np.array_equal(
        pixels.values, padded(np.where(valid, brute_force(IMAGE, pose), 0), window)
    )


@given(pose=upright_poses(), data=st.data())
@hypothesis_settings(max_examples=20)
def test_any_window_within_an_upright_pose_is_the_mean_of_the_decoded_image(pose, data):
    still = Pose(pose.crop, pose.across, pose.flip_x, pose.flip_y)
    size = still.size
    width, height = data.draw(numbers(0.3, size.width)), data.draw(numbers(0.3, size.height))
    left = data.draw(numbers(0, size.width - width))
    top = data.draw(numbers(0, size.height - height))
    window, out_size = Window(left, top, width, height), Size(5, 7)
    pixels = Augmented(ArrayReader(IMAGE), still).read(window, out_size)
    expected = area_mean(brute_force(IMAGE, still), window, out_size)
    assert pixels.valid.all()
    assert np.abs(pixels.values - expected).max() <= 0.5 + 1e-6


@given(pose=upright_poses(), data=st.data())
@hypothesis_settings(max_examples=20)
def test_a_pixel_is_valid_where_any_of_the_pose_falls_into_it(pose, data):
    window = data.draw(windows_near(pose.size))
    out_size = Size(6, 5)
    pixels = Augmented(ArrayReader(IMAGE), pose).read(window, out_size)
    share = area_mean_total(brute_force(np.ones((1, 60, 90)), pose), window, out_size)
    clear = (share > 1e-3) | (share < 1e-9)  # in between, rounding decides
    assert np.array_equal(pixels.valid[clear], (share > 1e-3)[clear])
    assert not pixels.values[:, ~pixels.valid].any()


def area_mean_total(array, window, out_size):
    """Return the part of each output pixel that is covered by ones."""
    canvas = np.zeros((1, 500, 500))
    canvas[:, 200 : 200 + array.shape[1], 200 : 200 + array.shape[2]] = array
    moved = Window(window.left + 200, window.top + 200, window.width, window.height)
    return area_mean(canvas, moved, out_size)[0]


@given(pose=upright_poses())
@hypothesis_settings(max_examples=20)
def test_points_go_to_the_image_and_back(pose):
    turned = Pose(pose.crop, pose.across, pose.flip_x, pose.flip_y, 3, -4, 33.0)
    x, y = np.array([0.0, 1.5, 80.0]), np.array([2.0, -7.0, 30.25])
    for each in (pose, turned):
        back = each.from_image(*each.to_image(x, y))
        assert np.allclose(back, (x, y))


def smooth(x, y):
    """An image that is a function of the place, so that its value anywhere is known."""
    return np.stack([
        120 + 60 * np.sin(x / 17) + 40 * np.cos(y / 13),
        100 + 0.7 * x - 0.5 * y,
        90 + 50 * np.sin((x + y) / 23),
    ])  # fmt: skip


def smooth_image(dtype="float32", size=(180, 140)):
    y, x = np.mgrid[0 : size[1], 0 : size[0]] + 0.5
    values = smooth(x, y)
    return (values if dtype == "float32" else np.rint(values)).astype(dtype)


POSES = [
    Pose(Box(0, 0, 180, 140), angle=20.0),
    Pose(Box(0, 0, 180, 140), angle=-171.0),
    Pose(Box(20, 10, 120, 100), True, True, False, 7, -9, 33.0),
    Pose(Box(20, 10, 120, 100), False, True, True, -12, 5, 90.0),
]


def true_place(pose, x, y):
    """Undo an angle about the centre, the shift, flips, the swap and the crop, point by point."""
    width, height = pose.size.width, pose.size.height
    turn = complex(math.cos(math.radians(pose.angle)), math.sin(math.radians(pose.angle)))
    point = (complex(x, y) - complex(width, height) / 2) * turn + complex(width, height) / 2
    x, y = point.real - pose.shift_x, point.imag - pose.shift_y
    x, y = (width - x if pose.flip_x else x), (height - y if pose.flip_y else y)
    x, y = (y, x) if pose.across else (x, y)
    return x + pose.crop.left, y + pose.crop.top


@pytest.mark.parametrize("pose", POSES, ids=str)
@pytest.mark.parametrize("step", [0.5, 1.0, 2.0])
def test_a_turned_smooth_image_has_the_values_of_where_its_pixels_come_from(pose, step):
    reader = Augmented(ArrayReader(smooth_image()), pose)
    out = Size(30, 24)
    window = Window(31.3, 22.8, out.width * step, out.height * step)
    pixels = reader.read(window, out)
    checked = 0
    for row in range(out.height):
        for column in range(out.width):
            here = window.left + (column + 0.5) * step, window.top + (row + 0.5) * step
            x, y = true_place(pose, *here)
            crop = pose.crop
            edge = min(x - crop.left, y - crop.top, crop.right - x, crop.bottom - y)
            edge = min(edge, *here, pose.size.width - here[0], pose.size.height - here[1])
            if edge > 2 * step + 1:
                assert pixels.valid[row, column]
                error = np.abs(pixels.values[:, row, column] - smooth(np.array(x), np.array(y)))
                assert error.max() < 0.5
                checked += 1
            elif edge < -2 * step - 1:
                assert not pixels.valid[row, column]
    assert checked > 200


def test_outside_of_a_turned_image_and_its_holes_are_invalid():
    valid = np.ones((140, 180), bool)
    valid[50:90, 70:110] = False
    reader = Augmented(ArrayReader(smooth_image("uint8"), valid), POSES[0])
    pixels = reader.read(Window(-40, -40, 260, 220), Size(130, 110))
    outside = np.ones((110, 130), bool)
    outside[20:90, 20:110] = False
    assert not pixels.valid[outside].any()
    assert not pixels.valid[50:60, 60:70].any()  # the hole is about the centre
    assert not pixels.valid[20, 20]  # a corner turned away
    assert pixels.values[:, pixels.valid].min() > 10  # nothing is mixed with holes
    assert not pixels.values[:, ~pixels.valid].any()


def test_a_turned_view_reads_about_as_many_pixels_as_it_shows():
    image = ArrayReader(np.zeros((1, 600, 600), np.uint8))
    reader = Augmented(image, Pose(Box(0, 0, 600, 600), angle=45.0))
    for window in (Window(0, 0, 600, 600), Window(200, 200, 64, 64), Window(-5e4, 0, 1e5, 1e5)):
        reader.read(window, Size(64, 64))
    assert all(size.pixels < 2.5 * 64**2 for _, size in image.asked)


def test_outside_of_the_crop_nothing_is_read():
    image = ArrayReader(IMAGE)
    reader = Augmented(image, Pose(Box(10, 5, 70, 50)))
    pixels = reader.read(Window(71, 0, 5, 5), Size(5, 5))
    assert not pixels.valid.any()
    assert reader.estimate(Window(71, 0, 5, 5), Size(5, 5)) == 0
    assert image.asked == []
    reader.read(Window(2, 2, 20, 30), Size(10, 10))
    assert len(image.asked) == 1
    assert reader.cost == image.cost


def test_nothing_to_do_gives_the_reader_itself():
    image = ArrayReader(IMAGE)
    assert augment(image, AugmentConfig(), 7) is image
    assert move_boxes(image, [Window(1, 2, 3, 4)]) == (Window(1, 2, 3, 4),)


def test_a_seed_decides_everything_and_another_seed_otherwise():
    window, out_size = Window(5, 5, 30, 30), Size(20, 20)
    one, again, other = (
        augment(ArrayReader(IMAGE), EVERYTHING, seed).read(window, out_size) for seed in (3, 3, 4)
    )
    assert_equal(one, again)
    assert not np.array_equal(one.values, other.values)


@given(seed=st.integers(0, 2**32), data=st.data())
@hypothesis_settings(max_examples=20)
def test_any_augmented_image_keeps_the_promise_of_a_view(seed, data):
    reader = augment(ArrayReader(IMAGE, HOLES), EVERYTHING, seed)
    window = data.draw(windows_near(reader.size))
    out_size = Size(data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12)))
    pixels = reader.read(window, out_size)
    assert pixels.values.shape == (3, out_size.height, out_size.width)
    assert pixels.values.dtype == np.uint8
    assert (pixels.valid.shape, pixels.valid.dtype) == (pixels.values.shape[1:], np.bool_)
    assert pixels.values.flags.c_contiguous
    assert not pixels.values[:, ~pixels.valid].any()


@pytest.mark.parametrize("seed", range(6))
def test_a_child_window_is_a_part_of_its_parent_at_the_same_scale(seed):
    still = EVERYTHING.model_copy(update={"rotate": 0.0})
    reader = augment(ArrayReader(IMAGE, HOLES), still, seed)
    parent = reader.read(Window(-4, -2, 48, 40), Size(48, 40))
    child = reader.read(Window(8, 10, 24, 20), Size(24, 20))
    assert np.array_equal(child.valid, parent.valid[12:32, 12:36])
    assert np.array_equal(child.values, parent.values[:, 12:32, 12:36])


def test_an_augmented_image_can_be_pickled_and_read_by_threads(tmp_path):
    path = write_geotiff(tmp_path / "a.tif", noise((300, 200)), overviews=[2])
    reader = augment(open_image(path), EVERYTHING, 0)
    asked = random_windows(12, reader.size)
    expected = [reader.read(*each) for each in asked]
    with pickle.loads(pickle.dumps(reader)) as other, ThreadPoolExecutor(4) as pool:
        for pixels, wanted in zip(
            pool.map(lambda each: other.read(*each), asked), expected, strict=True
        ):
            assert_equal(pixels, wanted)
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.read(Window.whole(reader.size), Size(4, 4))


def test_name_path_bands_and_type_are_those_of_the_image():
    image = ArrayReader(IMAGE, microns=Resolution(0.25, 0.5, "made up"))
    reader = Augmented(image, Pose(Box(10, 5, 70, 50), across=True))
    assert (reader.name, reader.path, reader.bands) == (image.name, image.path, image.bands)
    assert (reader.dtype, reader.size) == (image.dtype, Size(50, 70))
    assert reader.microns_per_pixel == Resolution(0.5, 0.25, "made up")
    assert reader.georeference is None
    assert reader.info.levels[0].block == Size(32, 16)
    with reader:
        pass
    assert image.closed


@given(pose=upright_poses(), data=st.data())
@hypothesis_settings(max_examples=20)
def test_boxes_are_where_their_pixels_went(pose, data):
    left, top = data.draw(st.integers(0, 80)), data.draw(st.integers(0, 50))
    width, height = data.draw(st.integers(1, 90 - left)), data.draw(st.integers(1, 60 - top))
    marked = np.zeros((60, 90))
    marked[top : top + height, left : left + width] = 1
    rows, columns = np.nonzero(brute_force(marked, pose))
    boxes = move_boxes(Augmented(ArrayReader(IMAGE), pose), [Window(left, top, width, height)])
    if not len(rows):
        assert boxes == ()
    else:
        (box,) = boxes
        assert box.box == (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)


def test_the_box_of_a_turned_image_holds_what_was_marked():
    marked = np.zeros((1, 140, 180), np.float32)
    marked[:, 60:90, 40:120] = 1
    for pose in POSES:
        reader = Augmented(ArrayReader(marked), pose)
        (box,) = move_boxes(reader, [Window(40, 60, 80, 30)])
        seen = reader.read(Window.whole(reader.size), reader.size).values[0] > 0.5
        rows, columns = np.nonzero(seen)
        edges = columns.min(), rows.min(), columns.max() + 1, rows.max() + 1
        assert np.abs(np.array(box.box) - edges).max() <= 2


@pytest.mark.parametrize(
    ("settings", "fixed"),
    [
        (AugmentConfig(flip="horizontal"), {"flip_y": False, "across": False}),
        (AugmentConfig(flip="both"), {"across": False}),
        (AugmentConfig(turns=True), {}),
        (AugmentConfig(shift=0.1), {"across": False, "flip_x": False}),
    ],
)
def test_a_pose_varies_only_in_what_was_asked_for(settings, fixed):
    poses = [draw_pose(settings, SIZE, np.random.default_rng(seed)) for seed in range(200)]
    assert all(getattr(pose, name) == value for pose in poses for name, value in fixed.items())
    assert all(pose.crop == WHOLE and pose.angle == 0 for pose in poses)
    assert max(abs(pose.shift_x) for pose in poses) <= settings.shift * 90
    assert max(abs(pose.shift_y) for pose in poses) <= settings.shift * 60
    assert len(set(poses)) > 1


def test_quarter_turns_are_the_four_rotations_and_nothing_else():
    square = np.arange(25).reshape(5, 5)
    settings = AugmentConfig(turns=True)
    found = {
        draw_pose(settings, Size(5, 5), np.random.default_rng(seed)).turn(square).tobytes()
        for seed in range(60)
    }
    assert found == {np.rot90(square, k).tobytes() for k in range(4)}


def test_flips_and_turns_reach_all_eight_positions_of_a_square():
    square = np.arange(25).reshape(5, 5)
    settings = AugmentConfig(turns=True, flip="both")
    poses = [draw_pose(settings, Size(5, 5), np.random.default_rng(seed)) for seed in range(200)]
    assert len({pose.turn(square).tobytes() for pose in poses}) == 8


def test_crops_have_the_area_and_the_shape_asked_for_and_lie_anywhere():
    size = Size(1000, 800)
    settings = AugmentConfig(crop=(0.3, 0.6))
    crops = [draw_pose(settings, size, np.random.default_rng(seed)).crop for seed in range(300)]
    areas = np.array([crop.width * crop.height / size.pixels for crop in crops])
    shapes = np.array([crop.width / crop.height for crop in crops])
    assert 0.299 < areas.min() < 0.32
    assert 0.58 < areas.max() < 0.601
    assert 0.499 < shapes.min() < 0.6
    assert 1.6 < shapes.max() < 2.01
    assert all(crop.left >= 0 and crop.right <= 1000 for crop in crops)
    assert all(crop.top >= 0 and crop.bottom <= 800 for crop in crops)
    assert min(crop.left for crop in crops) < 20
    assert max(crop.right for crop in crops) > 980


def test_a_crop_that_fits_nowhere_leaves_the_image_whole():
    settings = AugmentConfig(crop=(0.9, 1.0), aspect=(5.0, 6.0))
    pose = draw_pose(settings, Size(100, 100), np.random.default_rng(0))
    assert pose.crop == Box(0, 0, 100, 100)


def test_one_setting_does_not_change_what_another_draws():
    plain = AugmentConfig(flip="both", turns=True)
    more = AugmentConfig(flip="both", turns=True, shift=0.1, rotate=10, colour=True)
    for seed in range(20):
        one, two = (draw_pose(each, SIZE, np.random.default_rng(seed)) for each in (plain, more))
        assert (one.across, one.flip_x, one.flip_y) == (two.across, two.flip_x, two.flip_y)


# Colours


def reference_jitter(pixel, steps, centre):
    """Change one pixel in [0, 1] with the standard library's colour model, where it is defined."""
    for name, amount in steps:
        if name == "brightness":
            pixel = [each + amount for each in pixel]
        elif name == "contrast":
            pixel = [
                (each - middle) * amount + middle
                for each, middle in zip(pixel, centre, strict=True)
            ]
        else:
            hue, saturation, value = colorsys.rgb_to_hsv(*pixel)
            if name == "hue":
                hue = (hue + amount) % 1
            else:
                saturation = min(saturation * amount, 1)
            pixel = colorsys.hsv_to_rgb(hue, saturation, value)
    return [min(max(each, 0), 1) for each in pixel]


def gentle_image():
    """Values far enough from both ends that no step leaves the range in between."""
    return np.rint(80 + 90 * np.random.default_rng(1).random((3, 40, 50))).astype(np.uint8)


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order[0])
def test_every_order_of_the_jitter_is_that_of_the_standard_library(order):
    amounts = {"brightness": 0.08, "saturation": 1.3, "hue": -0.17, "contrast": 0.8}
    steps = [(name, amounts[name]) for name in order]
    image = gentle_image()
    reader = Augmented(ArrayReader(image), Pose(Box(0, 0, 50, 40)), Jitter(tuple(steps), 0, 255))
    pixels = reader.read(Window(0, 0, 50, 40), Size(50, 40))
    unit = image.reshape(3, -1).T / 255
    before = steps[: order.index("contrast")]
    centre = np.mean([reference_jitter(pixel, before, None) for pixel in unit], axis=0)
    expected = np.array([reference_jitter(pixel, steps, centre) for pixel in unit]).T * 255
    error = np.abs(pixels.values.reshape(3, -1) - expected)
    assert error.max() <= 0.5 + 1e-3


def test_contrast_is_about_the_mean_of_the_image_in_every_window():
    image = np.zeros((1, 60, 60), np.uint8)
    image[:, :, :30] = 40
    image[:, :, 30:] = 120
    reader = Augmented(
        ArrayReader(image), Pose(Box(0, 0, 60, 60)), Jitter((("contrast", 0.5),), 0, 255)
    )
    assert (reader.read(Window(0, 0, 10, 10), Size(5, 5)).values == 60).all()
    assert (reader.read(Window(40, 0, 10, 10), Size(5, 5)).values == 100).all()


def test_the_mean_is_of_valid_pixels_and_read_once():
    image = np.full((1, 30, 30), 200, np.uint8)
    valid = np.zeros((30, 30), bool)
    image[:, :10], valid[:10] = 100, True
    source = ArrayReader(image, valid)
    reader = Augmented(source, Pose(Box(0, 0, 30, 30)), Jitter((("contrast", 0.5),), 0, 255))
    for _ in range(3):
        assert (reader.read(Window(0, 0, 8, 8), Size(4, 4)).values == 100).all()
    assert len(source.asked) == 4


@pytest.mark.parametrize(("amount", "values"), [(0.1, [28, 154, 255]), (-0.1, [0, 102, 226])])
def test_values_are_clipped_to_what_the_type_holds(amount, values):
    image = np.stack([np.full((8, 8), value, np.uint8) for value in (3, 128, 252)])
    jitter = Jitter((("brightness", amount),), 0, 255)
    reader = Augmented(ArrayReader(image), Pose(Box(0, 0, 8, 8)), jitter)
    assert reader.read(Window(0, 0, 8, 8), Size(1, 1)).values.ravel().tolist() == values


def test_brightness_of_16_bits_is_a_part_of_the_range_given():
    image = np.full((2, 8, 8), 1000, np.uint16)
    most = {None: 0, (0.0, 3000.0): 0}
    for seed in range(40):
        for limits in most:
            reader = augment(
                ArrayReader(image), AugmentConfig(colour=True), seed, value_range=limits
            )
            value = int(reader.read(Window(0, 0, 8, 8), Size(1, 1)).values[0, 0, 0])
            most[limits] = max(most[limits], abs(value - 1000))
    assert 250 < most[0.0, 3000.0] <= 3000 * 32 / 255 + 1
    assert 5000 < most[None] <= 65535 * 32 / 255 + 1


def test_saturation_and_hue_are_left_out_of_images_that_are_no_colours():
    for seed in range(30):
        jitter = draw_jitter(AugmentConfig(colour=True), 4, (0, 255), np.random.default_rng(seed))
        if jitter is not None:
            assert {name for name, _ in jitter.steps} == {"brightness", "contrast"}


def test_every_order_of_the_jitter_and_none_are_about_equally_likely():
    counts = {}
    for seed in range(500):
        jitter = draw_jitter(AugmentConfig(colour=True), 3, (0, 255), np.random.default_rng(seed))
        names = None if jitter is None else tuple(name for name, _ in jitter.steps)
        counts[names] = counts.get(names, 0) + 1
        for name, amount in jitter.steps if jitter else ():
            middle, reach = AMOUNTS[name]
            assert abs(amount - middle) <= reach
    assert set(counts) == {None, *ORDERS}
    assert min(counts.values()) > 70


def test_floats_need_a_range_for_their_colours():
    image = ArrayReader(np.zeros((3, 4, 4), np.float32))
    with pytest.raises(ValueError, match="value_range"):
        augment(image, AugmentConfig(colour=True), 0)
    augment(image, AugmentConfig(colour=True), 0, value_range=(0.0, 1.0))


def test_invalid_pixels_stay_zero_whatever_the_colours():
    jitter = Jitter((("brightness", 0.2), ("contrast", 0.5)), 0, 255)
    reader = Augmented(ArrayReader(IMAGE, HOLES), Pose(WHOLE), jitter, Blur(1.0))
    pixels = reader.read(Window.whole(SIZE), SIZE)
    assert np.array_equal(pixels.valid, HOLES)
    assert not pixels.values[:, ~HOLES].any()


# Blur


def test_blur_is_a_gaussian_in_pixels_of_the_view():
    point = np.zeros((1, 41, 41), np.float32)
    point[0, 20, 20] = 1000
    reader = Augmented(ArrayReader(point), Pose(Box(0, 0, 41, 41)), blur=Blur(1.5))
    values = reader.read(Window(0, 0, 41, 41), Size(41, 41)).values[0]
    away = np.arange(-4, 5)
    bell = np.exp(-(away**2) / (2 * 1.5**2))
    expected = 1000 * np.outer(bell, bell) / bell.sum() ** 2
    assert np.allclose(values[16:25, 16:25], expected, rtol=0.02, atol=0.5)
    assert values.sum() == pytest.approx(1000, rel=1e-5)


def test_blur_near_the_edge_and_holes_is_of_valid_pixels_only():
    image = np.full((1, 30, 30), 77, np.uint8)
    valid = np.ones((30, 30), bool)
    valid[10:14, 10:14] = False
    reader = Augmented(ArrayReader(image, valid), Pose(Box(0, 0, 30, 30)), blur=Blur(2.0))
    pixels = reader.read(Window(-3, -3, 36, 36), Size(36, 36))
    assert (pixels.values[:, pixels.valid] == 77).all()
    assert np.array_equal(pixels.valid[3:33, 3:33], valid)
