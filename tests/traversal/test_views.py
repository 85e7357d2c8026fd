import threading

import numpy as np
import pytest

from tests.images import noise, write_geotiff
from tnetcli.data.normalize import Normalisation
from tnetcli.errors import ImageError
from tnetcli.geometry import Grid, Region, Size, Window
from tnetcli.readers.base import Pixels
from tnetcli.readers.detect import open_image
from tnetcli.traversal.tree import Node
from tnetcli.traversal.views import View, root_window
from tnetcli.traversal.views import Views as ViewsBySize

UNIT = Normalisation.to_unit_range("uint8", 3)
GRID = Grid(2, 2, 0.5)


def Views(size, *given, **options):
    return ViewsBySize(lambda region: size, *given, **options)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (Size(300, 100), Window(0, -100, 300, 300)),
        (Size(101, 300), Window(-99.5, 0, 300, 300)),
        (Size(7, 7), Window(0, 0, 7, 7)),
    ],
)
def test_padding_reads_the_square_around_the_image(size, expected):
    assert root_window(size, "pad") == expected


def nodes(count, side=20.0):
    windows = [Window(7.0 * (count - i), 3.0 * i, side, side) for i in range(count)]
    return [Node(0, Region(window)) for window in windows]


@pytest.fixture
def reader(tmp_path):
    with open_image(write_geotiff(tmp_path / "scene.tif", noise((300, 200)))) as opened:
        yield opened


def test_views_come_in_the_order_asked_for(reader):
    wanted = nodes(9)
    with Views(16, GRID, UNIT, threads=3) as views:
        batches = list(views.read(wanted, [reader], 4))
    assert [len(batch) for batch in batches] == [4, 4, 1]
    found = [each for batch in batches for each in batch]
    assert [node for node, _ in found] == wanted
    for node, view in found:
        expected, _ = UNIT.apply(reader.read(node.region.window, Size(16, 16)))
        assert np.array_equal(view.values, expected)


class Slow:
    """A reader that counts how many views were asked for."""

    path = "slow"

    def __init__(self):
        self.reads = 0
        self.lock = threading.Lock()

    def read(self, window, out_size):
        with self.lock:
            self.reads += 1
        if window.left < 0:
            raise ImageError("torn")
        shape = (out_size.height, out_size.width)
        return Pixels(np.zeros((3, *shape), np.uint8), np.ones(shape, bool))


def test_no_more_than_one_batch_is_read_ahead():
    slow = Slow()
    with Views(8, GRID, UNIT, threads=2) as views:
        batches = views.read(nodes(100), [slow], 5)
        next(batches)
        views.close()  # waits for the reads that have begun, drops the others
        assert slow.reads <= 10
        batches.close()


def test_a_caller_that_goes_away_stops_the_reading():
    slow = Slow()
    with Views(8, GRID, UNIT, threads=1) as views:
        batches = views.read(nodes(10), [slow], 5)
        next(batches)
        batches.close()
    assert slow.reads <= 10


def test_a_region_that_fails_yields_its_error_and_the_rest_are_read():
    wanted = [Node(0, Region(Window(left, 0, 5, 5))) for left in (1, -1, 2)]
    with Views(8, GRID, UNIT) as views:
        (batch,) = views.read(wanted, [Slow()], 5)
    kinds = [type(view) for _, view in batch]
    assert kinds == [View, ImageError, View]


def test_the_valid_part_of_a_cell_is_counted_by_area(tmp_path):
    image = np.full((3, 64, 64), 9, np.uint8)
    image[:, :16] = 0
    path = write_geotiff(tmp_path / "scene.tif", image, nodata=0)
    with open_image(path) as opened, Views(64, GRID, UNIT) as views:
        ((_, view),) = next(views.read([Node(0, Region(Window(0, 0, 64, 64)))], [opened], 1))
    assert view.valid == pytest.approx(0.75)
    assert view.cell_valid == pytest.approx([0.5, 0.5, 1, 1])


def test_a_pixel_is_background_only_with_all_its_bands(tmp_path):
    image = np.full((3, 64, 64), 240, np.uint8)
    image[0, :, 32:] = 100  # stained
    path = write_geotiff(tmp_path / "scene.tif", image)
    with open_image(path) as opened, Views(64, GRID, UNIT, background=(230, 255)) as views:
        ((_, view),) = next(views.read([Node(0, Region(Window(0, 0, 64, 64)))], [opened], 1))
    assert view.valid == 1.0
    assert view.cell_valid == pytest.approx([0, 1, 0, 1])


def test_a_cell_does_not_count_what_only_its_edge_pixels_hold(tmp_path):
    image = np.zeros((3, 640, 640), np.uint8)
    image[:, :, 212:] = 9  # cells end at 192 and 213.3 of 640: within a pixel of the view
    path = write_geotiff(tmp_path / "scene.tif", image, nodata=0)
    grid = Grid(1, 3, 1 / 3)
    with open_image(path) as opened, Views(64, grid, UNIT) as views:
        ((_, view),) = next(views.read([Node(0, Region(Window(0, 0, 640, 640)))], [opened], 1))
    assert view.cell_valid[0] == 0
    assert view.cell_valid[1:] == pytest.approx([1, 1])


def test_cells_smaller_than_a_pixel_of_the_view_can_hold_data(reader):
    grid = Grid(2, 40, 0.02)
    with Views(8, grid, UNIT) as views:
        ((_, view),) = next(views.read([Node(0, Region(Window(0, 0, 300, 200)))], [reader], 1))
    assert view.cell_valid == pytest.approx(np.ones(80))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_is_no_number_is_not_valid(tmp_path, poison):
    image = np.ones((3, 64, 64), np.float32)
    image[:, :, 32:] = poison
    path = write_geotiff(tmp_path / "scene.tif", image)
    floats = Normalisation(dtype="float32", mean=(0.0,) * 3, std=(1.0,) * 3)
    with open_image(path) as opened, Views(64, GRID, floats) as views:
        ((_, view),) = next(views.read([Node(0, Region(Window(0, 0, 64, 64)))], [opened], 1))
    assert view.valid == pytest.approx(0.5)
    assert view.cell_valid == pytest.approx([1, 0, 1, 0])


def test_one_view_can_be_asked_for_and_fetched_later(reader):
    windows = [Window(0, 0, 300, 200), Window(40.5, 20, 90, 60), Window(-30, -20, 90, 90)]
    with Views(16, GRID, UNIT, threads=2) as views:
        asked = [views.submit(reader, Region(window)) for window in windows]
        found = [each.result() for each in reversed(asked)][::-1]
        (batch,) = views.read([Node(0, Region(window)) for window in windows], [reader], 3)
    for view, (_, expected) in zip(found, batch, strict=True):
        assert np.array_equal(view.values, expected.values)
        assert np.array_equal(view.cell_valid, expected.cell_valid)
        assert view.valid == expected.valid


def test_a_view_is_being_read_before_it_is_fetched():
    begun = threading.Event()

    class Noted(Slow):
        def read(self, window, out_size):
            begun.set()
            return super().read(window, out_size)

    with Views(8, GRID, UNIT, threads=1) as views:
        asked = views.submit(Noted(), Region(Window(0, 0, 5, 5)))
        assert begun.wait(timeout=60)
        assert isinstance(asked.result(), View)


def test_views_of_a_reading_that_was_given_up_do_not_stop_those_asked_for_alone():
    slow = Slow()
    with Views(8, GRID, UNIT, threads=1) as views:
        batches = views.read(nodes(10), [slow], 5)
        next(batches)
        asked = views.submit(slow, Region(Window(0, 0, 5, 5)))
        batches.close()
        assert isinstance(asked.result(), View)


def test_views_of_several_sizes_are_batched_by_size(reader):
    wanted = nodes(9)
    sizes = {node.region.window: 8 + 4 * (number % 3) for number, node in enumerate(wanted)}
    with ViewsBySize(lambda region: sizes[region.window], GRID, UNIT) as views:
        batches = list(views.read(wanted, [reader], 2))
        (alone,) = views.read(wanted[:1], [reader])
    shapes = [{view.values.shape for _, view in batch} for batch in batches]
    assert [len(batch) for batch in batches] == [2, 1] * 3
    assert shapes == [{(3, side, side)} for side in (8, 8, 12, 12, 16, 16)]
    assert {node for batch in batches for node, _ in batch} == set(wanted)
    assert np.array_equal(batches[0][0][1].values, alone[0][1].values)
    for _, view in (each for batch in batches for each in batch):
        assert view.cell_valid.shape == (4,)


def test_stretching_reads_the_image_itself():
    assert root_window(Size(300, 100), "stretch") == Window(0, 0, 300, 100)


def test_views_need_a_thread():
    with pytest.raises(ValueError, match="threads is below 1"):
        Views(8, GRID, UNIT, threads=0)
