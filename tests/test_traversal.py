import math
from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tnetcli.visits import Seen, Told

from tests.strategies import grids, numbers, plans, windows
from tnetcli.geometry import Grid, Region, Window
from tnetcli.traversal import SAME, Plan, traverse

GRID = Grid(3, 3, 0.5)
ROOT = Window(0, 0, 1024, 1024)
EVERY_POLICY = ("topk", "sample", "best_first")
# Uneven, with a cell that is never drawn by chance.
CHANCES = np.array([[0.30, 0.05, 0.10], [0.15, 0.00, 0.08], [0.20, 0.02, 0.10]])
FEW = st.integers(0, 10_000)


class World:
    """Images whose attention and data follow from their name and the path of a region."""

    def __init__(self, grid=GRID, names=(0,)):
        self.grid, self.names = grid, list(names)
        self.calls, self.known = [], {}

    def seen(self, name, path):
        if (name, path) not in self.known:
            self.known[name, path] = self.imagine(name, path)
        return self.known[name, path]

    def imagine(self, name, path):
        random = np.random.default_rng([name, *path.encode()])
        shape = (self.grid.rows, self.grid.columns)
        attention = random.integers(0, 5, shape) / 8  # ties, and cells of no interest at all
        valid = random.integers(0, 5, shape) / 4
        return Seen(attention, valid)

    def look(self, places):
        self.calls.append(places)
        return [self.seen(self.names[place.image], place.region.path) for place in places]

    def walk(self, plan, *, root=ROOT, **more):
        seeds = [name + 1 for name in self.names]
        return traverse([root] * len(self.names), self.look, self.grid, plan, seeds=seeds, **more)


def worlds():
    return st.builds(World, grids(most=3), st.lists(FEW, min_size=1, max_size=3))


def always(attention=CHANCES, valid=None):
    """Return a look that sees the same everywhere."""
    attention = np.asarray(attention, float)
    seen = Seen(attention, np.ones(attention.shape) if valid is None else np.asarray(valid))
    return lambda places: [seen for _ in places]


def paths(walk, image=0):
    return [walk.visits[i].place.region.path for i in walk.of(image)]


def levels_of(walk):
    return Counter(visit.place.region.level for visit in walk.visits)


def cells_of(visit):
    return [(cell.row, cell.column) for cell in visit.followed]


def usable(seen, plan):
    """Return the cells that hold enough data, in reading order."""
    return [(int(row), int(column)) for row, column in np.argwhere(seen.valid > plan.least_valid)]


def same_pixels(one, other):
    slack = SAME * np.array([one.width, one.height, one.width, one.height])
    return bool((np.abs(np.subtract(one.box, other.box)) <= slack).all())


def told(walk):
    """Return all that a walk tells, for one image each, without the numbers of visits."""
    return [
        (
            stop,
            [
                (
                    visit.place.region,
                    visit.attention,
                    visit.joint,
                    visit.rank,
                    [(*cell, walk.of(image).index(number)) for *cell, number in followed(visit)],
                )
                for visit in (walk.visits[i] for i in walk.of(image))
            ],
        )
        for image, stop in enumerate(walk.stops)
    ]


def followed(visit):
    return [(cell.row, cell.column, cell.visit) for cell in visit.followed]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"levels": 0}, "levels is below 1"),
        ({"keep": (2, 0)}, "keep is below 1"),
        ({"keep": ()}, "keep is empty"),
        ({"policy": "worst"}, "unknown policy: `worst`"),
        ({"temperature": 0.0}, "temperature is not above 0"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"budget": 0}, "budget is below 1"),
        ({"policy": "best_first"}, "best_first needs a budget"),
        ({"least_valid": 1.0}, "least_valid is not in"),
        ({"least_valid": -0.1}, "least_valid is not in"),
        ({"least_side": -1.0}, "least_side is below 0"),
        ({"least_side": math.nan}, "least_side"),
        ({"most_shared": 1.1}, "most_shared"),
        ({"most_shared": math.nan}, "most_shared"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(settings, problem):
    with pytest.raises(ValueError, match=problem):
        Plan(**({"levels": 2, "keep": (1,)} | settings))


def test_the_last_keep_repeats():
    assert [Plan(5, (4, 2)).keep_at(level) for level in (1, 2, 3, 4)] == [4, 2, 2, 2]


def test_a_single_level_needs_no_keep():
    walk = traverse([ROOT], always(), GRID, Plan(1, ()))
    assert (paths(walk), walk.stops) == (["root"], ("levels",))
    assert Plan(1, ()).keep_at(1) == 0


def test_chosen_cells_are_followed_in_reading_order_not_by_probability():
    walk = traverse([ROOT], always(), GRID, Plan(2, (3,)))
    assert paths(walk) == ["root", "root/0-0", "root/1-0", "root/2-0"]
    assert [visit.rank for visit in walk.visits[1:]] == [1, 3, 2]


def test_a_level_is_image_major_then_by_parent_then_by_cell():
    calls = []
    traverse(
        [ROOT, ROOT],
        lambda places: calls.append(places) or always()(places),
        GRID,
        Plan(3, (2,), once=False),
    )
    assert [(place.image, place.region.path) for place in calls[2]] == [
        (image, f"root/{first}/{second}")
        for image, first, second in product((0, 1), ("0-0", "2-0"), ("0-0", "2-0"))
    ]


@given(worlds(), plans())
def test_the_visits_are_the_places_that_look_was_asked_for(world, plan):
    walk = world.walk(plan)
    assert [visit.place for visit in walk.visits] == [p for call in world.calls for p in call]


@given(worlds(), plans(("topk", "sample")))
def test_every_level_is_one_look_for_all_images(world, plan):
    walk = world.walk(plan)
    assert [{place.region.level for place in call} for call in world.calls] == [
        {level} for level in range(1, len(world.calls) + 1)
    ]
    assert len(world.calls) == max(levels_of(walk))


@given(worlds(), plans(("best_first",)))
def test_every_round_of_best_first_takes_one_window_of_every_image(world, plan):
    walk = world.walk(plan)
    for call in world.calls:
        assert len({place.image for place in call}) == len(call) > 0
    assert len(world.calls) == max(len(walk.of(image)) for image in range(len(world.names)))


def test_nothing_to_look_at_is_no_look():
    walk = traverse([], None, GRID, Plan(3, (1,)), seeds=[], confident=None)
    assert (walk.visits, walk.stops) == ((), ())


@given(worlds(), plans(least_side=None), numbers(1.0, 1e6), numbers(1.0, 1e6))
def test_the_walk_does_not_depend_on_the_size_of_the_image(world, plan, width, height):
    scaled = world.walk(plan, root=Window(3.7, -2.9, width, height))
    plain = world.walk(plan)
    assert [paths(scaled, i) for i in range(len(world.names))] == [
        paths(plain, i) for i in range(len(world.names))
    ]


@given(worlds(), plans())
def test_probabilities_multiply_along_the_path(world, plan):
    walk = world.walk(plan)
    for visit in walk.visits:
        joint, region = 1.0, visit.place.region
        while region.parent is not None:
            seen = world.seen(world.names[visit.place.image], region.parent.path)
            row, column = map(int, region.path.rsplit("/", 1)[1].split("-"))
            joint, region = joint * seen.attention[row, column], region.parent
        assert visit.joint == pytest.approx(joint)
    roots = [walk.visits[walk.of(image)[0]] for image in range(len(world.names))]
    assert {(root.attention, root.joint, root.rank) for root in roots} == {(1.0, 1.0, 1)}


@given(worlds(), plans())
def test_ranks_follow_joint_probability_within_an_image_and_level(world, plan):
    walk = world.walk(plan)
    for image, level in product(range(len(world.names)), range(1, 5)):
        visits = [walk.visits[i] for i in walk.of(image)]
        peers = [visit for visit in visits if visit.place.region.level == level]
        ranked = sorted(peers, key=lambda visit: -visit.joint)  # stable: ties by order of visit
        assert [visit.rank for visit in ranked] == list(range(1, len(peers) + 1))


@given(worlds(), plans())
def test_followed_cells_lead_to_the_visits_that_show_them(world, plan):
    walk = world.walk(plan)
    reached = Counter({walk.of(image)[0]: 1 for image in range(len(world.names))})
    for visit in walk.visits:
        assert cells_of(visit) == sorted(cells_of(visit))
        for cell in visit.followed:
            child = visit.place.region.child(world.grid, cell.row, cell.column)
            assert walk.visits[cell.visit].place.image == visit.place.image
            assert same_pixels(walk.visits[cell.visit].place.region.window, child.window)
            reached[cell.visit] += 1
    assert set(reached) == set(range(len(walk.visits)))
    assert plan.once or set(reached.values()) == {1}


@given(worlds(), plans())
def test_each_visit_keeps_what_was_seen(world, plan):
    for visit in world.walk(plan).visits:
        seen = world.seen(world.names[visit.place.image], visit.place.region.path)
        assert np.array_equal(visit.seen.attention, seen.attention)


def walk_by_brute_force(world, plan, name=0):
    found, level = [], [Region(ROOT)]
    for depth in range(1, plan.levels + 1):
        found += level
        children = []
        for region in level:
            seen = world.seen(name, region.path)
            best = sorted(usable(seen, plan), key=lambda cell, s=seen: -s.attention[cell])
            for cell in sorted(best[: plan.keep_at(depth)]):
                children.append(region.child(world.grid, *cell))
        level = children
    return [region.path for region in found]


@given(worlds(), plans(("topk",), budget=None, least_side=None, once=False))
def test_topk_is_what_brute_force_finds(world, plan):
    walk = world.walk(plan)
    for image, name in enumerate(world.names):
        assert paths(walk, image) == walk_by_brute_force(world, plan, name)


@given(grids(most=4), st.sampled_from(["topk", "sample"]), st.integers(0, 3))
def test_all_cells_can_be_followed(grid, policy, more):
    look = always(np.full((grid.rows, grid.columns), 0.5))
    plan = Plan(2, (grid.rows * grid.columns + more,), policy, once=False)
    walk = traverse([ROOT], look, grid, plan, seeds=[1])
    assert paths(walk)[1:] == [f"root/{row}-{column}" for row, column in grid.cells()]


@given(worlds(), plans(levels=1))
def test_one_level_is_one_look(world, plan):
    walk = world.walk(plan)
    assert len(world.calls) == 1
    assert set(walk.stops) == {"levels"}
    assert len(walk.visits) == len(world.names)


def test_a_third_level_has_the_index_arithmetic_of_the_reference():
    one = {"root": (1, 2), "root/1-2": (0, 1)}

    def look(places):
        answers = []
        for place in places:
            attention = np.zeros((3, 3))
            attention[one.get(place.region.path, (0, 0))] = 1.0
            answers.append(Seen(attention, np.ones((3, 3))))
        return answers

    deepest = traverse([ROOT], look, GRID, Plan(3, (1,))).visits[-1].place.region
    steps = [tuple(map(int, step.split("-"))) for step in deepest.path.split("/")[1:]]
    row, column = (
        sum(3 ** (1 - i) * step[axis] for i, step in enumerate(steps)) for axis in (0, 1)
    )
    assert (row, column, deepest.level - 1) == (3, 7, 2)
    assert deepest.window == ROOT.cell(GRID, 1, 2).cell(GRID, 0, 1)


@given(worlds(), plans())
def test_cells_without_enough_data_are_never_chosen(world, plan):
    for visit in world.walk(plan).visits:
        assert set(cells_of(visit)) <= set(usable(visit.seen, plan))


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_a_single_valid_pixel_makes_a_cell_worth_a_look(policy):
    valid = np.zeros((3, 3))
    valid[1, 1] = 1e-9
    plan = Plan(2, (9,), policy, budget=9)
    walk = traverse([ROOT], always(valid=valid), GRID, plan, seeds=[0])
    assert paths(walk) == ["root", "root/1-1"]


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_cells_of_no_interest_come_last_but_come(policy):
    walk = traverse([ROOT], always(), GRID, Plan(2, (8,), policy, budget=9), seeds=[0])
    assert "root/1-1" not in paths(walk)
    walk = traverse([ROOT], always(), GRID, Plan(2, (9,), policy, budget=10), seeds=[0])
    assert "root/1-1" in paths(walk)


def test_ties_go_to_the_first_in_reading_order():
    walk = traverse([ROOT], always(np.full((3, 3), 1 / 9)), GRID, Plan(2, (4,)))
    assert cells_of(walk.visits[0]) == [(0, 0), (0, 1), (0, 2), (1, 0)]


@given(worlds(), plans(("sample",), budget=None, least_side=None, once=False))
def test_a_draw_is_without_replacement(world, plan):
    for visit in world.walk(plan).visits:
        if visit.place.region.level < plan.levels:
            most = plan.keep_at(visit.place.region.level)
            assert len(set(cells_of(visit))) == min(most, len(usable(visit.seen, plan)))


def chi_square(counts, chances):
    expected = sum(counts.values()) * np.array(list(chances.values()))
    assert set(counts) <= set(chances)
    return float(((np.array([counts[key] for key in chances]) - expected) ** 2 / expected).sum())


def chances_at(temperature, valid):
    weights = {
        cell: CHANCES[cell] ** (1 / temperature)
        for cell in GRID.cells()
        if valid[cell] and CHANCES[cell]
    }
    return {cell: weight / sum(weights.values()) for cell, weight in weights.items()}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_the_first_draw_follows_attention_and_temperature_over_seeds(temperature):
    valid = np.ones((3, 3))
    valid[2, 0] = 0.0
    plan = Plan(2, (1,), "sample", temperature)
    walk = traverse([ROOT] * 2000, always(valid=valid), GRID, plan, seeds=range(2000))
    counts = Counter(cells_of(visit)[0] for visit in walk.visits[:2000])
    # 99.99 % of a chi-square of 6 degrees of freedom lies below.
    assert chi_square(counts, chances_at(temperature, valid)) < 27.9


def test_the_first_draw_follows_attention_over_the_paths_of_one_image():
    plan = Plan(5, (9, 9, 9, 1), "sample", once=False)
    walk = traverse([ROOT], always(), GRID, plan, seeds=[7])
    fourth = [visit for visit in walk.visits if visit.place.region.level == 4]
    counts = Counter(cells_of(visit)[0] for visit in fourth)
    assert len(fourth) == 729
    # 99.99 % of 7 degrees of freedom.
    assert chi_square(counts, chances_at(1.0, np.ones((3, 3)))) < 29.9


def test_two_draws_are_as_probable_as_one_after_the_other():
    single = chances_at(1.0, np.ones((3, 3)))
    pairs = {
        (a, b): single[a] * single[b] / (1 - single[a]) + single[b] * single[a] / (1 - single[b])
        for a, b in product(single, single)
        if a < b
    }
    plan = Plan(2, (2,), "sample")
    walk = traverse([ROOT] * 3000, always(), GRID, plan, seeds=range(3000))
    counts = Counter(tuple(cells_of(visit)) for visit in walk.visits[:3000])
    # 99.99 % of 27 degrees of freedom.
    assert chi_square(counts, pairs) < 62.0


@pytest.mark.parametrize("temperature", [1e-300, 1e-12])
def test_a_cold_draw_is_topk(temperature):
    attention = np.array([[0.3, 0.05, 0.1], [0.15, 0.0, 0.08], [0.2, 0.02, 1e-300]])
    cold = Plan(3, (8, 3), "sample", temperature)
    drawn = traverse([ROOT], always(attention), GRID, cold, seeds=[3])
    assert paths(drawn) == paths(traverse([ROOT], always(attention), GRID, Plan(3, (8, 3))))


def test_other_seeds_draw_other_cells():
    plan = Plan(2, (3,), "sample")
    walk = traverse([ROOT] * 20, always(), GRID, plan, seeds=range(20))
    assert len({tuple(cells_of(visit)) for visit in walk.visits[:20]}) > 5


def test_sampling_needs_seeds():
    with pytest.raises(ValueError, match="needs a seed"):
        traverse([ROOT], always(), GRID, Plan(2, (1,), "sample"))


def test_there_is_one_seed_per_image():
    with pytest.raises(ValueError, match="2 seeds for 1 images"):
        traverse([ROOT], always(), GRID, Plan(2, (1,), "sample"), seeds=[1, 2])


@given(worlds(), plans())
def test_an_image_alone_is_walked_as_in_a_batch(world, plan):
    together = told(world.walk(plan))
    for name, found in zip(world.names, together, strict=True):
        assert told(World(world.grid, [name]).walk(plan)) == [found]


@given(worlds(), plans(), st.randoms(use_true_random=False))
def test_the_order_of_images_changes_nothing(world, plan, random):
    order = list(range(len(world.names)))
    random.shuffle(order)
    shuffled = World(world.grid, [world.names[i] for i in order])
    together = told(world.walk(plan))
    assert told(shuffled.walk(plan)) == [together[i] for i in order]


def best_first_by_brute_force(world, plan, name=0):
    root = Region(ROOT)
    visited, tried = [(root, 1.0)], set()
    while len(visited) < plan.budget:
        options = []
        for order, (region, joint) in enumerate(visited):
            seen = world.seen(name, region.path)
            if region.level < plan.levels:
                for cell in usable(seen, plan):
                    child = region.child(world.grid, *cell)
                    if child.path not in tried:
                        chance = joint * seen.attention[cell]
                        options.append((-chance, order, cell, child, chance))
        if not options:
            break
        _, _, _, child, chance = min(options, key=lambda option: option[:3])
        tried.add(child.path)
        if not (plan.once and any(same_pixels(r.window, child.window) for r, _ in visited)):
            visited.append((child, chance))
    return [region.path for region, _ in visited]


@given(worlds(), plans(("best_first",), least_side=None))
def test_best_first_is_what_brute_force_finds(world, plan):
    walk = world.walk(plan)
    for image, name in enumerate(world.names):
        assert paths(walk, image) == best_first_by_brute_force(world, plan, name)


def test_best_first_goes_deep_before_it_goes_wide_where_that_is_more_probable():
    attention = np.full((3, 3), 0.01)
    attention[1, 1] = 0.92
    plan = Plan(9, (), "best_first", budget=4)
    walk = traverse([ROOT], always(attention), GRID, plan)
    assert paths(walk)[-1] == "root/1-1/1-1/1-1"


def test_best_first_lists_followed_cells_in_reading_order():
    walk = traverse([ROOT], always(), GRID, Plan(2, (), "best_first", budget=4))
    assert paths(walk) == ["root", "root/0-0", "root/2-0", "root/1-0"]
    assert followed(walk.visits[0]) == [(0, 0, 1), (1, 0, 3), (2, 0, 2)]


@given(worlds(), plans())
def test_no_image_gets_more_windows_than_its_budget(world, plan):
    walk = world.walk(plan)
    assert all(len(walk.of(image)) <= plan.budget for image in range(len(world.names)))


@given(worlds(), plans(("topk", "sample"), least_side=None), FEW)
def test_a_level_over_budget_keeps_its_most_probable_windows_in_order(world, plan, name):
    world.names = [name]
    free = world.walk(Plan(plan.levels, plan.keep, plan.policy, plan.temperature, None,
                           plan.least_valid, None, plan.once))  # fmt: skip
    bound = world.walk(plan)
    expected, left = [], plan.budget
    for level in range(1, plan.levels + 1):
        peers = [v for v in free.visits if v.place.region.level == level]
        kept = sorted(peers, key=lambda visit: -visit.joint)[:left]
        expected += [visit.place.region.path for visit in peers if visit in kept]
        left -= len(kept)
    assert paths(bound) == expected


def test_a_budget_cuts_the_level_that_would_exceed_it():
    walk = traverse([ROOT], always(), GRID, Plan(3, (3,), budget=3))
    assert (paths(walk), walk.stops) == (["root", "root/0-0", "root/2-0"], ("budget",))
    assert followed(walk.visits[0]) == [(0, 0, 1), (2, 0, 2)]
    assert walk.visits[1].followed == ()


def test_a_budget_that_cuts_the_last_level_is_why_a_walk_ended():
    assert traverse([ROOT], always(), GRID, Plan(2, (3,), budget=3)).stops == ("budget",)


def test_a_budget_that_is_just_enough_does_not_stop_a_walk():
    assert traverse([ROOT], always(), GRID, Plan(2, (3,), budget=4)).stops == ("levels",)


def test_sure_images_stop_and_the_others_go_on():
    asked = []

    def confident(images):
        asked.append(list(images))
        return [image == 1 for image in images]

    walk = traverse([ROOT] * 3, always(), GRID, Plan(3, (2,)), confident=confident)
    assert asked == [[0, 1, 2], [0, 2]]  # and not after the last level: nothing would go on
    assert walk.stops == ("levels", "confidence", "levels")
    assert [len(walk.of(image)) for image in range(3)] == [7, 1, 7]
    assert walk.visits[1].followed == ()


def test_best_first_asks_for_confidence_after_every_round():
    asked = []
    traverse(
        [ROOT],
        always(),
        GRID,
        Plan(3, (), "best_first", budget=5),
        confident=lambda images: asked.append(images) or [len(asked) == 3],
    )
    assert asked == [[0], [0], [0]]


def test_numpy_may_say_who_is_sure():
    plan = Plan(2, (1,))
    walk = traverse([ROOT] * 2, always(), GRID, plan, confident=lambda _: np.array([True, False]))
    assert walk.stops == ("confidence", "levels")


def test_confidence_answers_for_every_image():
    with pytest.raises(ValueError, match="confident gave 1 answers for 2 images"):
        traverse([ROOT] * 2, always(), GRID, Plan(2, (1,)), confident=lambda _: [True])


@given(windows(), st.sampled_from(EVERY_POLICY))
def test_the_9_positions_of_the_third_level_are_7_different_ones(root, policy):
    look = always(np.full((3, 3), 1 / 9))
    plan = Plan(3, (9,), policy, budget=1000)
    assert levels_of(traverse([root], look, GRID, plan, seeds=[0])) == {1: 1, 2: 9, 3: 49}


@given(windows(), st.sampled_from(EVERY_POLICY))
def test_without_once_nothing_is_merged(root, policy):
    plan = Plan(3, (9,), policy, budget=1000, once=False)
    look = always(np.full((3, 3), 1 / 9))
    assert levels_of(traverse([root], look, GRID, plan, seeds=[0])) == {1: 1, 2: 9, 3: 81}


@given(worlds(), plans(once=True))
def test_no_image_is_shown_the_same_pixels_twice(world, plan):
    walk = world.walk(plan)
    for image in range(len(world.names)):
        seen = [walk.visits[i].place.region.window for i in walk.of(image)]
        assert not any(same_pixels(*pair) for pair in combinations(seen, 2))


@given(windows(), st.integers(2, 5), numbers(0.1, 0.9))
def test_only_windows_with_the_same_pixels_are_merged(root, count, fraction):
    grid = Grid(1, count, fraction)
    look = always(np.full((1, count), 0.5))
    free = traverse([root], look, grid, Plan(3, (count,), once=False))
    once = traverse([root], look, grid, Plan(3, (count,)))
    lefts = [v.place.region.window.left for v in free.visits if v.place.region.level == 3]
    different = np.diff(np.sort(lefts)) > SAME * root.width * fraction**2
    assert levels_of(once)[3] == 1 + np.count_nonzero(different)


def test_a_parent_refers_to_the_visit_that_another_parent_made():
    attention = np.zeros((3, 3))
    attention[0, [0, 2]] = 0.5

    def look(places):
        first = attention if len(places) > 1 else np.roll(attention, 1, axis=1)
        return [Seen(first, np.ones((3, 3))) for _ in places]

    # Level 2: cells 0 and 1 of the first row; the last cell of the one is the first of the other.
    walk = traverse([ROOT], look, GRID, Plan(3, (2,)))
    assert paths(walk)[3:] == ["root/0-0/0-0", "root/0-0/0-2", "root/0-1/0-2"]
    assert followed(walk.visits[1]) == [(0, 0, 3), (0, 2, 4)]
    assert followed(walk.visits[2]) == [(0, 0, 4), (0, 2, 5)]


def test_the_same_place_in_two_images_is_looked_at_twice():
    walk = traverse([ROOT, ROOT], always(), GRID, Plan(2, (2,)))
    assert len(walk.of(0)) == len(walk.of(1)) == 3


def test_best_first_notes_a_window_that_it_has_seen_and_takes_the_next():
    walk = traverse([ROOT], always(np.full((1, 2), 0.5)), Grid(1, 2, 1.0),
                    Plan(2, (), "best_first", budget=5))  # fmt: skip
    assert followed(walk.visits[0]) == [(0, 0, 0), (0, 1, 0)]
    assert walk.stops == ("repeats",)


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_a_1_x_1_grid_shows_nothing_new(policy):
    plan = Plan(4, (1,), policy, budget=9)
    walk = traverse([ROOT], always([[1.0]]), Grid(1, 1, 0.5), plan, seeds=[0])
    assert (len(walk.visits), walk.stops) == (1, ("repeats",))
    assert followed(walk.visits[0]) == [(0, 0, 0)]


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_a_1_x_1_grid_goes_down_all_levels_if_told_to(policy):
    plan = Plan(4, (1,), policy, budget=9, once=False)
    walk = traverse([ROOT], always([[1.0]]), Grid(1, 1, 0.5), plan, seeds=[0])
    assert (len(walk.visits), walk.stops) == (4, ("levels",))


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_an_image_without_data_is_looked_at_once(policy):
    plan = Plan(3, (2,), policy, budget=9)
    walk = traverse([ROOT], always(valid=np.zeros((3, 3))), GRID, plan, seeds=[0])
    assert (len(walk.visits), walk.stops) == (1, ("empty",))


@pytest.mark.parametrize("policy", EVERY_POLICY)
@pytest.mark.parametrize(("side", "depth"), [(1023.9, 1), (1024, 2), (2048, 3), (2047.9, 2)])
def test_looking_ends_at_the_pixels_of_the_image(policy, side, depth):
    plan = Plan(9, (1,), policy, budget=100, least_side=512)
    walk = traverse([Window(0, 0, side, side)], always(), GRID, plan, seeds=[0])
    assert (max(levels_of(walk)), walk.stops) == (depth, ("pixels",))


def test_the_longer_side_of_a_cell_decides_whether_it_is_entered():
    walk = traverse([Window(0, 0, 100, 2048)], always(), GRID, Plan(9, (1,), least_side=512))
    assert (max(levels_of(walk)), walk.stops) == (3, ("pixels",))


@given(st.integers(8, 4096), numbers(0.05, 1.0))
def test_rounding_does_not_end_a_walk_before_the_last_pixel(view_size, fraction):
    grid = Grid(2, 2, fraction)
    plan = Plan(2, (1,), least_side=view_size, once=False)
    side = view_size / fraction
    walk = traverse([Window(0, 0, side, side)], always(np.full((2, 2), 0.25)), grid, plan)
    assert len(walk.visits) == 2


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_an_image_that_fails_ends_and_the_others_go_on(policy):
    def look(places):
        return [
            None if place.image == 1 and place.region.level == 2 else always()([place])[0]
            for place in places
        ]

    plan = Plan(3, (2,), policy, budget=7, once=False)
    walk = traverse([ROOT] * 3, look, GRID, plan, seeds=[0, 1, 2])
    assert walk.stops[1] == "failed"
    assert {walk.stops[0], walk.stops[2]} <= {"levels", "budget"}
    assert [len(walk.of(image)) for image in (0, 2)] == [7, 7]
    assert [walk.visits[i].seen is None for i in walk.of(1)][:2] == [False, True]


def test_a_window_that_fails_ends_its_image_though_its_sisters_were_read():
    def look(places):
        return [None if p.region.path == "root/2-0" else always()([p])[0] for p in places]

    walk = traverse([ROOT], look, GRID, Plan(3, (2,)))
    assert (paths(walk), walk.stops) == (["root", "root/0-0", "root/2-0"], ("failed",))
    assert [visit.seen is None for visit in walk.visits] == [False, False, True]


def test_failing_at_once_leaves_a_visit_that_saw_nothing():
    walk = traverse([ROOT], lambda places: [None], GRID, Plan(3, (2,)), confident=None)
    assert (walk.stops, walk.visits[0].seen, walk.visits[0].followed) == (("failed",), None, ())


def test_best_first_that_has_seen_everything_ends_with_the_levels():
    plan = Plan(2, (), "best_first", budget=100)
    walk = traverse([ROOT], always(), GRID, plan)
    assert (len(walk.visits), walk.stops) == (10, ("levels",))


def test_best_first_ends_with_its_budget_while_there_is_more_to_see():
    plan = Plan(2, (), "best_first", budget=9)
    assert traverse([ROOT], always(), GRID, plan).stops == ("budget",)


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_a_window_without_data_is_no_end_while_others_go_deeper(policy):
    def look(places):
        empty = [place.region.path == "root/0-0" for place in places]
        return [Seen(CHANCES, np.full((3, 3), 0.0 if each else 1.0)) for each in empty]

    plan = Plan(3, (9,), policy, budget=1000)
    walk = traverse([ROOT], look, GRID, plan, seeds=[0])
    assert (walk.visits[1].followed, walk.stops) == ((), ("levels",))


def test_every_image_has_its_own_end():
    valid = {0: np.ones((3, 3)), 1: np.zeros((3, 3)), 2: np.ones((3, 3)), 3: np.ones((3, 3))}

    def look(places):
        return [None if p.image == 4 else Seen(CHANCES, valid[p.image]) for p in places]

    walk = traverse(
        [ROOT, ROOT, Window(0, 0, 40, 40), ROOT, ROOT],
        look,
        GRID,
        Plan(2, (1,), least_side=50),
        confident=lambda images: [image == 3 for image in images],
    )
    assert walk.stops == ("levels", "empty", "pixels", "confidence", "failed")


@given(worlds(), plans())
def test_every_image_stops_for_a_reason_that_is_true(world, plan):
    walk = world.walk(plan)
    for image, stop in enumerate(walk.stops):
        visits = [walk.visits[i] for i in walk.of(image)]
        deepest = max(visit.place.region.level for visit in visits)
        assert (stop == "levels") <= (deepest == plan.levels)
        assert (stop == "empty") <= any(not usable(visit.seen, plan) for visit in visits)
        assert (stop == "budget") <= (len(visits) == plan.budget)
        assert (stop == "pixels") <= (plan.least_side is not None)
        assert (stop == "repeats") <= plan.once
        assert stop not in ("failed", "confidence")


@pytest.mark.parametrize("policy", EVERY_POLICY)
@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        ([], "look gave 0 answers for 1 places"),
        ([None, None], "look gave 2 answers for 1 places"),
        ([Seen(np.ones((2, 3)), np.ones((3, 3)))], "attention of image 0, `root` has shape"),
        ([Seen(np.ones((3, 3)), np.ones(9))], "valid of image 0, `root` has shape"),
        ([Seen(np.full((3, 3), np.nan), np.ones((3, 3)))], "attention .* holds a negative"),
        ([Seen(np.full((3, 3), np.inf), np.ones((3, 3)))], "attention .* holds a negative"),
        ([Seen(np.full((3, 3), -0.1), np.ones((3, 3)))], "attention .* holds a negative"),
        ([Seen(np.ones((3, 3)), np.full((3, 3), np.nan))], "valid .* holds a negative"),
    ],
)
def test_an_answer_that_makes_no_sense_is_refused(policy, answer, problem):
    plan = Plan(2, (1,), policy, budget=3)
    with pytest.raises(ValueError, match=problem):
        traverse([ROOT], lambda places: answer, GRID, plan, seeds=[0])


def test_half_precision_attention_is_fine():
    half = traverse([ROOT], always(CHANCES.astype(np.float16)), GRID, Plan(3, (3,)))
    assert paths(half) == paths(traverse([ROOT], always(), GRID, Plan(3, (3,))))


@pytest.mark.parametrize(
    "wrong",
    [{"levels": float("nan")}, {"levels": 2.5}, {"keep": (1.5,)}, {"budget": 2.5}],
)
def test_a_plan_counts_in_whole_numbers(wrong):
    with pytest.raises(ValueError, match="not whole numbers"):
        Plan(**{"levels": 2, "keep": (2,), **wrong})


def test_a_seed_below_zero_is_refused_before_anything_is_looked_at():
    plan = Plan(2, (2,), policy="sample")
    with pytest.raises(ValueError, match="seed is below 0"):
        traverse([Window(0, 0, 9, 9)], lambda places: 1 / 0, Grid(3, 3, 0.5), plan, seeds=[-1])


def overlap(one, other):
    """Return the part of `one` that `other` covers."""
    width = min(one.right, other.right) - max(one.left, other.left)
    height = min(one.bottom, other.bottom) - max(one.top, other.top)
    return max(width, 0) * max(height, 0) / (one.width * one.height)


@pytest.mark.parametrize("policy", ["topk", "sample", "best_first"])
@pytest.mark.parametrize("grid", [Grid(7, 7, 0.25), Grid(3, 5, 0.5)])
def test_siblings_share_no_more_than_allowed(policy, grid):
    attention = np.random.default_rng(0).dirichlet(np.ones(grid.rows * grid.columns))
    look = always(attention.reshape(grid.rows, grid.columns))
    plan = Plan(2, (4,), policy, budget=6, most_shared=0.3)
    walk = traverse([ROOT], look, grid, plan, seeds=[3])
    windows = [visit.place.region.window for visit in walk.visits[1:]]
    assert len(windows) > 2
    assert all(overlap(a, b) <= 0.3 for a in windows for b in windows if a is not b)


def test_the_best_cell_that_stands_apart_is_next():
    attention = np.zeros((1, 7)) + np.array([[0.3, 0.25, 0.02, 0.2, 0.15, 0.07, 0.01]])
    walk = traverse([ROOT], always(attention), Grid(1, 7, 0.25), Plan(2, (3,), most_shared=0.3))
    assert cells_of(walk.visits[0]) == [(0, 0), (0, 3), (0, 5)]


@pytest.mark.parametrize("policy", ["topk", "best_first"])
def test_followed_cells_tell_the_order_of_their_attention(policy):
    plan = Plan(2, (4,), policy, budget=5)
    root = traverse([ROOT], always(), GRID, plan).visits[0]
    by_order = sorted(root.followed, key=lambda cell: cell.order)
    attention = [CHANCES[cell.row, cell.column] for cell in by_order]
    assert [cell.order for cell in by_order] == [0, 1, 2, 3]
    assert attention == sorted(attention, reverse=True)


def test_a_draw_of_two_has_the_probability_of_its_order():
    attention = np.array([[0.5, 0.3, 0.2]])
    seeds = range(4000)
    plan = Plan(2, (2,), "sample")
    walk = traverse([ROOT] * len(seeds), always(attention), Grid(1, 3, 0.4), plan, seeds=seeds)
    orders = Counter(
        tuple(c.column for c in sorted(visit.followed, key=lambda cell: cell.order))
        for visit in walk.visits
        if visit.followed
    )
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    chances = {(i, j): attention[0, i] * attention[0, j] / (1 - attention[0, i]) for i, j in pairs}
    assert chi_square(orders, chances) < 20.5  # p = 0.001, 5 degrees of freedom


class TestTold:
    """Windows that stand in for the cells of the whole image."""

    told = tuple(
        Told(Window(left, 100, 50, 30), attention)
        for left, attention in ((10, 0.1), (300, 0.4), (500, 0.2), (700, 0.3))
    )

    def walk(self, told=told, look=None, grid=GRID, seeds=(1,), **plan):
        plan = Plan(**{"levels": 2, "keep": (2,)} | plan)
        return traverse([ROOT], look or always(), grid, plan, seeds=seeds, told=[told])

    def test_the_most_attended_are_looked_at_in_their_own_order(self):
        walk = self.walk()
        assert paths(walk) == ["root", "root/w2", "root/w4"]
        assert [visit.place.region.window for visit in walk.visits[1:]] == [
            self.told[1].window,
            self.told[3].window,
        ]
        assert [(each.attention, each.joint, each.rank) for each in walk.visits[1:]] == [
            (0.4, 0.4, 1),
            (0.3, 0.3, 2),
        ]
        assert walk.stops == ("levels",)

    def test_windows_of_one_attention_come_in_the_order_of_the_file(self):
        even = [Told(each.window, 0.25) for each in self.told]
        assert paths(self.walk(even)) == ["root", "root/w1", "root/w2"]

    def test_fewer_windows_than_are_kept_are_all_looked_at(self):
        assert paths(self.walk(keep=(9,))) == ["root", "root/w1", "root/w2", "root/w3", "root/w4"]

    def test_their_own_cells_are_followed_as_usual(self):
        walk = self.walk(levels=3, keep=(1, 2), least_side=1.0)
        assert paths(walk) == ["root", "root/w2", "root/w2/0-0", "root/w2/2-0"]
        assert walk.visits[2].place.region.window == self.told[1].window.cell(GRID, 0, 0)
        assert walk.visits[2].joint == pytest.approx(0.4 * 0.30)

    def test_they_are_no_cells_that_were_followed(self):
        walk = self.walk(levels=3, keep=(1, 2), least_side=1.0)
        assert walk.visits[0].followed == ()
        assert cells_of(walk.visits[1]) == [(0, 0), (2, 0)]

    def test_neither_their_size_nor_data_nor_shared_pixels_matter(self):
        nothing = always(valid=np.zeros((3, 3)))
        same = [Told(Window(0, 0, 50, 50), 0.6), Told(Window(1, 1, 50, 50), 0.4)]
        walk = self.walk(same, look=nothing, least_side=1000.0, most_shared=0.0)
        assert paths(walk) == ["root", "root/w1", "root/w2"]

    def test_the_same_pixels_are_looked_at_once(self):
        twice = [Told(Window(0, 0, 50, 50), 0.6), Told(Window(0, 0, 50, 50), 0.4)]
        assert paths(self.walk(twice)) == ["root", "root/w1"]
        assert paths(self.walk(twice, once=False)) == ["root", "root/w1", "root/w2"]

    def test_nothing_told_is_nothing_more_to_see(self):
        walk = self.walk(())
        assert (paths(walk), walk.stops) == (["root"], ("empty",))

    def test_other_images_keep_their_cells(self):
        plan = Plan(levels=2, keep=(1,))
        walk = traverse([ROOT, ROOT], always(), GRID, plan, told=[self.told, None])
        assert paths(walk, 0) == ["root", "root/w2"]
        assert paths(walk, 1) == ["root", "root/0-0"]

    def test_a_draw_follows_attention(self):
        drawn = Counter(
            paths(self.walk(policy="sample", keep=(1,), seeds=(seed,)))[1] for seed in range(4000)
        )
        for number, each in enumerate(self.told, start=1):
            # Four standard deviations of a share of 4000 draws.
            spread = 4 * math.sqrt(each.attention * (1 - each.attention) / 4000)
            assert drawn[f"root/w{number}"] / 4000 == pytest.approx(each.attention, abs=spread)

    def test_more_windows_than_a_grid_has_cells_can_be_drawn_from(self):
        many = [Told(Window(left, 0, 5, 5), 1 / 40) for left in range(40)]
        found = {
            paths(self.walk(many, policy="sample", keep=(1,), seeds=(seed,)))[1]
            for seed in range(300)
        }
        assert len(found) > 30

    def test_the_best_of_all_may_be_told_or_a_cell(self):
        walk = self.walk(policy="best_first", budget=4, levels=3, most_shared=0.0)
        # 0.4 first; then 0.3 before 0.2, before the best cell of the first, 0.4 * 0.3.
        assert paths(walk) == ["root", "root/w2", "root/w4", "root/w3"]

    def test_a_budget_keeps_the_most_attended(self):
        assert paths(self.walk(keep=(4,), budget=3)) == ["root", "root/w2", "root/w4"]

    def test_as_many_are_told_as_there_are_images(self):
        with pytest.raises(ValueError, match="windows are told of 2 images, there are 1"):
            traverse([ROOT], always(), GRID, Plan(levels=2, keep=(1,)), told=[None, None])

    @pytest.mark.parametrize("attention", [-0.1, 1.1, math.nan])
    def test_attention_is_a_share(self, attention):
        with pytest.raises(ValueError, match="attention is not within"):
            Told(ROOT, attention)


def test_a_grid_may_leave_out_cells_without_attention():
    class Sparse(Grid):
        only_attended = True

    attention = [[0, 0.6, 0], [0, 0, 0.4], [0, 0, 0]]
    walk = traverse([ROOT], always(attention), Sparse(3, 3, 0.5), Plan(levels=2, keep=(9,)))
    assert [visit.place.region.path for visit in walk.visits] == ["root", "root/0-1", "root/1-2"]
