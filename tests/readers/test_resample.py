import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.strategies import DTYPES, numbers, sizes, windows_near
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Box, Level
from tnetcli.readers.resample import (
    LEAST_SHARE,
    SCALE_TOLERANCE,
    AreaMean,
    area_mean,
    choose_level,
    chunks,
    copy_exact,
    place,
    touched_pixels,
)

BLOCK = Size(4, 4)


def flat_level(size: Size, scale: float = 1.0, block: Size = BLOCK) -> Level:
    return Level(size, scale, scale, block)


def random_image(seed, size, bands, dtype, *, signed=True):
    random = np.random.default_rng(seed)
    shape = (size.height, size.width, bands)
    if dtype.kind == "f":
        return (random.normal(size=shape) * 1000 if signed else random.random(shape)).astype(dtype)
    limits = np.iinfo(dtype)
    return random.integers(limits.min, limits.max, shape, dtype, endpoint=True)


def random_mask(seed, size):
    random = np.random.default_rng(seed)
    return random.random((size.height, size.width)) < random.choice([0.0, 0.2, 0.8, 1.0])


def shares(start, length, count, pixels):
    """Return how much of each of `pixels` every output covers, by plain arithmetic."""
    table = []
    for output in range(count):
        low = start + length * output / count
        high = start + length * (output + 1) / count
        table.append([max(0.0, min(high, p + 1) - max(low, p)) for p in range(pixels)])
    return table


def brute_force(image, mask, window, out_size):
    """Return mean and covered area per output pixel, one pixel after the other."""
    height, width, bands = image.shape
    rows = shares(window.top, window.height, out_size.height, height)
    columns = shares(window.left, window.width, out_size.width, width)
    mean = np.zeros((bands, out_size.height, out_size.width))
    area = np.zeros((out_size.height, out_size.width))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            for y in [y for y in range(height) if row[y] > 0]:
                for x in [x for x in range(width) if column[x] > 0 and mask[y, x]]:
                    area[i, j] += row[y] * column[x]
                    mean[:, i, j] += image[y, x].astype(np.float64) * row[y] * column[x]
            if area[i, j] > 0:
                mean[:, i, j] /= area[i, j]
    return mean, area


@given(
    st.data(), sizes(20), sizes(12), st.integers(1, 4), DTYPES, st.booleans(), st.integers(0, 9999)
)
def test_the_area_mean_is_that_of_plain_arithmetic(
    data, size, out_size, bands, dtype, masked, seed
):
    window = data.draw(windows_near(size))
    image = random_image(seed, size, bands, dtype)
    mask = random_mask(seed, size) if masked else np.ones((size.height, size.width), bool)
    expected, area = brute_force(image, mask, window, out_size)
    placement = place(window, flat_level(size), out_size)
    if placement is None:
        assert area.max() < 1e-4
        return
    box = placement.box
    inside = np.s_[box.top : box.bottom, box.left : box.right]
    mean = AreaMean(placement, bands, dtype)
    mean.add(box, image[inside], mask[inside] if masked else None)
    pixels = mean.finish()

    assert pixels.values.dtype == dtype
    assert pixels.values.shape == (bands, out_size.height, out_size.width)
    step = min(window.width / out_size.width, window.height / out_size.height)
    clear = (area == 0) | (area > 1e-3 * step**2)  # not a sliver that rounding decides
    assert np.array_equal(pixels.valid[clear], (area > 0)[clear])
    assert np.isfinite(pixels.values).all()
    assert not pixels.values[:, ~pixels.valid].any()
    solid = area > 0.01 * step**2
    slack = (0.5 if dtype.kind in "iu" else 0) + np.abs(image).max(initial=1.0).astype(float) * (
        1e-5 + 400 * LEAST_SHARE / step
    )
    assert np.abs(pixels.values.astype(float) - expected)[:, solid].max(initial=0) <= slack


@given(st.data(), sizes(20), sizes(12), DTYPES, st.booleans(), st.integers(0, 9999))
def test_adding_part_by_part_is_adding_at_once(data, size, out_size, dtype, masked, seed):
    placement = place(data.draw(windows_near(size)), flat_level(size), out_size)
    assume(placement is not None)
    image, mask = random_image(seed, size, 2, dtype), random_mask(seed, size)
    box = placement.box
    row_cuts = data.draw(st.sets(st.integers(box.top, box.bottom))) | {box.top, box.bottom}
    column_cuts = data.draw(st.sets(st.integers(box.left, box.right))) | {box.left, box.right}
    whole, parts = AreaMean(placement, 2, dtype), AreaMean(placement, 2, dtype)

    def add(mean, left, top, right, bottom):
        inside = np.s_[top:bottom, left:right]
        part = Box(left, top, right - left, bottom - top)
        mean.add(part, image[inside], mask[inside] if masked else None)

    add(whole, box.left, box.top, box.right, box.bottom)
    rows, columns = sorted(row_cuts), sorted(column_cuts)
    for top, bottom in pairwise(rows):
        for left, right in pairwise(columns):
            add(parts, left, top, right, bottom)
    one, other = whole.finish(), parts.finish()
    assert np.array_equal(one.valid, other.valid)
    slack = 1 if dtype.kind in "iu" else 1e-5 * float(np.abs(image).max())
    assert np.abs(one.values.astype(float) - other.values.astype(float)).max() <= slack


@given(st.data(), sizes(20), DTYPES, st.booleans(), st.integers(0, 9999))
def test_an_exact_copy_is_the_area_mean(data, size, dtype, masked, seed):
    left, top = data.draw(st.integers(-25, 25)), data.draw(st.integers(-25, 25))
    out_size = data.draw(sizes(20))
    window = Window(left, top, out_size.width, out_size.height)
    placement = place(window, flat_level(size), out_size)
    assume(placement is not None)
    assert placement.is_exact
    image, mask = random_image(seed, size, 3, dtype), random_mask(seed, size)
    box = placement.box
    inside = np.s_[box.top : box.bottom, box.left : box.right]
    valid = mask[inside] if masked else None
    mean = AreaMean(placement, 3, dtype)
    mean.add(box, image[inside], valid)
    copied, averaged = copy_exact(placement, image[inside], valid), mean.finish()
    assert np.array_equal(copied.valid, averaged.valid)
    assert np.array_equal(copied.values, averaged.values)


def whole_sums(image, out_size):
    """Return the sums under each output in whole units, and how many units an output has."""
    height, width, _ = image.shape

    def units(length, count):
        outputs, pixels = np.arange(count) * length, np.arange(length) * count
        ends = np.minimum.outer(outputs + length, pixels + count)
        return np.maximum(ends - np.maximum.outer(outputs, pixels), 0)

    rows, columns = units(height, out_size.height), units(width, out_size.width)
    return rows @ image.astype(np.int64).transpose(2, 0, 1) @ columns.T, height * width


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("bands", [1, 3, 13])
@pytest.mark.parametrize(
    ("size", "out_size"),
    [
        (Size(32, 16), Size(14, 7)),  # 16 pixels make 7, whose means are often halfway
        (Size(16, 16), Size(14, 14)),
        (Size(43, 59), Size(28, 28)),  # long patterns, one repetition
        (Size(600, 24), Size(400, 16)),  # several strips and products
        (Size(5, 6), Size(8, 9)),  # enlarged
        (Size(12, 12), Size(4, 8)),  # one axis in whole pixels
    ],
)
def test_means_by_shares_that_repeat_are_exact_to_the_half(size, out_size, bands, apart):
    image = random_image(3, size, bands, np.dtype(np.uint8))
    sums, units = whole_sums(image, out_size)
    whole, rest = np.divmod(sums, units)
    expected = whole + ((2 * rest > units) | ((2 * rest == units) & (whole % 2 == 1)))
    if apart:
        image = np.ascontiguousarray(image.transpose(2, 0, 1)).transpose(1, 2, 0)
    pixels = area_mean(
        place(Window(0, 0, size.width, size.height), flat_level(size), out_size), image, None
    )
    assert np.array_equal(pixels.values, expected)
    assert pixels.values.dtype == np.uint8
    assert pixels.valid.all()


@given(st.data(), sizes(20), sizes(12), DTYPES, st.booleans(), st.booleans(), st.integers(0, 9999))
def test_the_mean_of_one_box_is_that_of_its_parts(data, size, out_size, dtype, masked, near, seed):
    whole = Window(0, 0, size.width, size.height)
    window = data.draw(windows_near(size)) if near else whole
    placement = place(window, flat_level(size), out_size)
    assume(placement is not None)
    image, mask = random_image(seed, size, 2, dtype), random_mask(seed, size)
    box = placement.box
    inside = np.s_[box.top : box.bottom, box.left : box.right]
    valid = mask[inside] if masked else None
    mean = AreaMean(placement, 2, dtype)
    mean.add(box, image[inside], valid)
    one, other = area_mean(placement, image[inside], valid), mean.finish()
    assert one.values.dtype == other.values.dtype
    assert np.array_equal(one.valid, other.valid)
    slack = 1 if dtype.kind in "iu" else 0
    assert np.abs(one.values.astype(float) - other.values.astype(float)).max() <= slack


@pytest.mark.parametrize(
    ("window", "level", "shape"),
    [
        (Window(0, 0, 32, 32), Level(Size(32, 32), 1, 1, BLOCK), (7, 16)),
        (Window(16, 16, 16, 16), Level(Size(64, 64), 1, 1, BLOCK), (7, 8)),
        (Window(0.5, 0.5, 16, 16), Level(Size(64, 64), 1, 1, BLOCK), None),  # within a pixel
        (Window(-8, -8, 32, 32), Level(Size(64, 64), 1, 1, BLOCK), None),  # past the edge
        (Window(0, 0, 64, 64), Level(Size(16, 16), 4, 4, BLOCK, Size(63, 63)), None),
        (Window(0, 0, 71, 71), Level(Size(71, 71), 1, 1, BLOCK), None),  # never repeats
        (Window(0, 0, 28, 28), Level(Size(28, 28), 1, 1, BLOCK), None),  # two whole pixels each
    ],
)
def test_shares_repeat_only_where_a_span_is_of_whole_pixels(window, level, shape):
    pattern = place(window, level, Size(14, 14)).rows.pattern()
    assert (None if pattern is None else pattern.shape) == shape
    assert pattern is None or (pattern.sum(1) == shape[1]).all()


def test_an_exact_copy_does_not_share_memory_with_the_block():
    block = np.ones((4, 4, 1), np.uint8)
    placement = place(Window(0, 0, 4, 4), flat_level(Size(4, 4)), Size(4, 4))
    assert not np.shares_memory(copy_exact(placement, block, None).values, block)


def test_a_block_of_our_own_is_the_view_without_a_copy():
    block = np.arange(16, dtype=np.uint8).reshape(4, 4, 1)
    placement = place(Window(0, 0, 4, 4), flat_level(Size(4, 4)), Size(4, 4))
    view = copy_exact(placement, block, None, own=True)
    assert np.shares_memory(view.values, block)
    assert (view.values == copy_exact(placement, block, None).values).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_values_under_the_mask_never_leak(dtype):
    image = np.full((4, 4, 1), np.nan, dtype)
    image[:, 0] = 5
    mask = np.zeros((4, 4), bool)
    mask[:, 0] = True
    for out_size in (Size(2, 2), Size(4, 4), Size(7, 3)):
        placement = place(Window(0, 0, 4, 4), flat_level(Size(4, 4)), out_size)
        mean = AreaMean(placement, 1, np.dtype(dtype))
        mean.add(placement.box, image, mask)
        pixels = mean.finish()
        assert np.isfinite(pixels.values).all()
        assert np.allclose(pixels.values[0][pixels.valid], 5)


@pytest.mark.parametrize("out_size", [Size(3, 3), Size(8, 8), Size(20, 20)])
def test_an_infinite_pixel_spoils_only_the_outputs_it_falls_into(out_size):
    image = np.ones((8, 8, 1), np.float32)
    image[4, 4] = np.inf
    window = Window(0.25, 0.25, 7.5, 7.5)
    placement = place(window, flat_level(Size(8, 8)), out_size)
    mean = AreaMean(placement, 1, np.dtype(np.float32))
    mean.add(placement.box, image, None)
    rows = np.array(shares(0.25, 7.5, out_size.height, 8))[:, 4] > 0
    columns = np.array(shares(0.25, 7.5, out_size.width, 8))[:, 4] > 0
    values = mean.finish().values[0]
    assert np.allclose(values[~np.outer(rows, columns)], 1)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("uint8", 253), ("uint16", 65535), ("uint16", 50001), ("int16", -30001), ("float32", 0.1)],
)
def test_the_mean_of_a_large_constant_area_is_that_constant(dtype, value):
    side = 2500
    placement = place(
        Window(0.3, 0.3, side - 0.6, side - 0.6), flat_level(Size(side, side)), Size(1, 1)
    )
    mean = AreaMean(placement, 1, np.dtype(dtype))
    mean.add(placement.box, np.full((side, side, 1), value, dtype), None)
    assert mean.finish().values[0, 0, 0] == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("end", ["min", "max"])
def test_the_extremes_of_wide_integers_survive_a_mean(dtype, end):
    value = getattr(np.iinfo(dtype), end)
    placement = place(Window(0, 0, 3, 3), flat_level(Size(3, 3)), Size(2, 2))
    mean = AreaMean(placement, 1, np.dtype(dtype))
    mean.add(placement.box, np.full((3, 3, 1), value, dtype), None)
    difference = [abs(int(each) - value) for each in mean.finish().values.flat]
    assert max(difference) <= abs(value) * 1e-12


@given(st.lists(numbers(1.01, 6.0), max_size=6), numbers(0.01, 500), numbers(0.01, 500))
def test_the_coarsest_level_that_is_fine_enough_is_chosen(ratios, x, y):
    scales = [1.0, *np.cumprod(ratios).tolist()] if ratios else [1.0]
    levels = [flat_level(Size(1000, 1000), scale) for scale in scales]
    chosen = choose_level(levels, Window(0, 0, 100 * x, 100 * y), Size(100, 100))
    fine = [scale for scale in scales if scale <= min(x, y) * SCALE_TOLERANCE]
    assert levels[chosen].scale_x == (max(fine) if fine else 1.0)


@pytest.mark.parametrize(
    ("asked", "level"), [(0.5, 0), (1, 0), (1.9, 0), (2, 1), (3.9, 1), (4, 2), (64, 2)]
)
def test_a_level_serves_from_its_own_scale_upwards(asked, level):
    levels = [
        flat_level(Size(512, 512), 1),
        flat_level(Size(256, 256), 2),
        flat_level(Size(128, 128), 4),
    ]
    assert choose_level(levels, Window(0, 0, 64 * asked, 64 * asked), Size(64, 64)) == level


@given(st.data(), sizes(40), sizes(8))
def test_the_box_holds_every_pixel_the_window_touches_and_no_more(data, size, out_size):
    window = data.draw(windows_near(size))
    placement = place(window, flat_level(size), out_size)
    columns = [x for x in range(size.width) if window.left < x + 1 and window.right > x]
    rows = [y for y in range(size.height) if window.top < y + 1 and window.bottom > y]
    if placement is None:
        assert not rows or not columns or min(_cover(window, size)) < 1e-5
        return
    box = placement.box
    assert abs(box.left - columns[0]) <= (_hair(window.left) or 0)
    assert abs(box.right - 1 - columns[-1]) <= (_hair(window.right) or 0)
    assert abs(box.top - rows[0]) <= (_hair(window.top) or 0)
    assert abs(box.bottom - 1 - rows[-1]) <= (_hair(window.bottom) or 0)


def _hair(edge):
    return int(abs(edge - round(edge)) < LEAST_SHARE)


def _cover(window, size):
    return (
        min(window.right, size.width) - max(window.left, 0),
        min(window.bottom, size.height) - max(window.top, 0),
    )


@pytest.mark.parametrize("edge", [8 - 1e-9, 8.0, 8 + 1e-9])
def test_an_edge_a_hair_off_a_pixel_border_is_that_border(edge):
    level = flat_level(Size(64, 64))
    assert place(Window(0, 0, edge, 8), level, Size(4, 4)).box == Box(0, 0, 8, 8)


@given(st.data(), sizes(40), sizes(15))
def test_touched_pixels_are_those_of_the_blocks_touched(data, size, block):
    box = data.draw(boxes(size))
    expected = 0
    for top in range(0, size.height, block.height):
        for left in range(0, size.width, block.width):
            right, bottom = (
                min(left + block.width, size.width),
                min(top + block.height, size.height),
            )
            if left < box.right and right > box.left and top < box.bottom and bottom > box.top:
                expected += (right - left) * (bottom - top)
    assert touched_pixels(box, flat_level(size, block=block)) == expected


@st.composite
def boxes(draw, size):
    left, top = draw(st.integers(0, size.width - 1)), draw(st.integers(0, size.height - 1))
    width = draw(st.integers(1, size.width - left))
    return Box(left, top, width, draw(st.integers(1, size.height - top)))


@given(st.data(), sizes(60), sizes(12), st.integers(1, 2000))
def test_chunks_cover_the_box_once(data, size, block, most):
    box = data.draw(boxes(size))
    count = np.zeros((size.height, size.width), int)
    for part in chunks(box, block, most):
        assert part.width > 0
        assert part.height > 0
        count[part.top : part.bottom, part.left : part.right] += 1
    expected = np.zeros_like(count)
    expected[box.top : box.bottom, box.left : box.right] = 1
    assert np.array_equal(count, expected)


@given(st.data(), sizes(60), sizes(12), st.integers(1, 2000))
def test_chunks_are_cut_at_block_borders(data, size, block, most):
    box = data.draw(boxes(size))
    for part in chunks(box, block, most):
        assert part.left == box.left or part.left % block.width == 0
        assert part.right == box.right or part.right % block.width == 0
        assert part.top == box.top or part.top % block.height == 0
        assert part.bottom == box.bottom or part.bottom % block.height == 0


@given(st.data(), sizes(60), sizes(12), st.integers(1, 2000))
def test_a_chunk_is_bounded_by_the_limit_or_one_block(data, size, block, most):
    box = data.draw(boxes(size))
    for part in chunks(box, block, most):
        assert part.width * part.height <= max(most, block.pixels)


@pytest.mark.parametrize(
    "window", [Window(-10, 0, 10, 8), Window(8, 0, 5, 5), Window(0, -3, 8, 3), Window(0, 1e6, 9, 9)]
)
def test_a_window_wholly_outside_has_no_placement(window):
    assert place(window, flat_level(Size(8, 8)), Size(4, 4)) is None


def test_steps_are_counted_in_pixels_of_the_level():
    level = Level(Size(50, 25), 2.0, 4.0, BLOCK)
    placement = place(Window(10, 20, 40, 40), level, Size(10, 5))
    assert (placement.columns.start, placement.columns.stop) == (5.0, 25.0)
    assert (placement.rows.start, placement.rows.stop) == (5.0, 15.0)
    assert placement.box == Box(5, 5, 20, 10)
    assert math.isclose(placement.columns.step, 2.0)
