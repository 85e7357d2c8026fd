from collections import Counter

import numpy as np
import pytest
from tnetcli.training.choices import by_boxes, by_chance
from tnetcli.visits import Place, Seen

from tnetcli.geometry import Grid, Region, Window
from tnetcli.training.metrics import hits
from tnetcli.traversal import Plan, traverse

GRID = Grid(3, 4, 0.4)
IMAGES = 1000
ROOT = Window(0, 0, 1000, 1000)
OWN = np.arange(1.0, 13).reshape(3, 4) / 78  # the last cell is the best


def walk(attend, images=1, plan=None):
    def look(places):
        return [Seen(attend(place, OWN), np.ones((3, 4))) for place in places]

    return traverse([ROOT] * images, look, GRID, plan or Plan(2, (2,)))


def followed(walk):
    """Return the cells of whole images that were followed."""
    roots = [visit for visit in walk.visits if visit.place.region.level == 1]
    return [(cell.row, cell.column) for root in roots for cell in root.followed]


@pytest.fixture(scope="module")
def by_luck():
    return walk(by_chance(range(IMAGES)), IMAGES)


def test_chance_prefers_no_cell(by_luck):
    count = Counter(followed(by_luck))
    expected = IMAGES * 2 / 12
    surprise = sum((count[cell] - expected) ** 2 / expected for cell in GRID.cells())
    assert surprise < 31.3  # chi-squared of 11 degrees: one in a thousand


def test_chance_puts_windows_of_a_level_in_no_order(by_luck):
    windows = by_luck.visits[IMAGES:]  # two of each image
    first = [visit.rank == 1 for visit in windows[::2]]
    assert np.mean(first) == pytest.approx(0.5, abs=0.06)


def test_chance_depends_on_the_seed_and_the_place_alone():
    attend = by_chance([5, 6])
    child = Region(ROOT).child(GRID, 0, 0)
    same = by_chance([9, 9, 5])
    assert np.array_equal(attend(Place(0, child), OWN), same(Place(2, child), OWN))
    assert not np.array_equal(attend(Place(0, child), OWN), attend(Place(1, child), OWN))
    assert not np.array_equal(attend(Place(0, child), OWN), attend(Place(0, Region(ROOT)), OWN))


@pytest.mark.parametrize("attend", [by_chance([1]), by_boxes([[Window(1, 1, 9, 9)]], GRID)])
def test_other_choices_are_probabilities(attend):
    found = attend(Place(0, Region(ROOT)), OWN)
    assert found.shape == (3, 4)
    assert found.min() >= 0
    assert found.sum() == pytest.approx(1)


def test_boxes_lead_to_the_cells_that_show_them():
    boxes = [[Window(20, 30, 50, 50)], [Window(930, 20, 40, 40)]]
    found = walk(by_boxes(boxes, GRID), 2, Plan(3, (1, 1)))
    for image, true in enumerate(boxes):
        own = [found.visits[number].place.region for number in found.of(image)]
        assert [region.level for region in own] == [1, 2, 3]
        assert all(hits(region.window, true) for region in own)


def test_a_large_box_leads_to_cells_that_it_fills():
    true = [Window(600, 600, 400, 400)]
    found = walk(by_boxes([true], GRID), 1, Plan(3, (1, 2)))
    last = [visit.place.region.window for visit in found.visits[2:]]
    assert len(last) == 2
    assert all(window.left >= 599 and window.top >= 599 for window in last)


def test_where_boxes_leave_it_open_the_model_chooses():
    attend = by_boxes([[Window(0, 0, 10, 10)]], GRID)
    region = Region(ROOT).child(GRID, 2, 3)  # far from the box
    assert attend(Place(0, region), OWN) == pytest.approx(OWN)


def test_images_without_boxes_are_walked_as_the_model_does():
    assert followed(walk(by_boxes([[]], GRID))) == [(2, 2), (2, 3)]
