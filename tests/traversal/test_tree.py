from collections import Counter
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.strategies import configs, grids, numbers, windows
from tests.traversal.world import (
    CHANCES,
    EVERY_POLICY,
    FEW,
    GRID,
    ROOT,
    World,
    always,
    cells_of,
    config,
    edges,
    levels_of,
    nodes_of,
    paths,
    probabilities,
    run,
    same_pixels,
    scores,
    usable,
    worlds,
)
from tnetcli.geometry import Grid, Region, Window
from tnetcli.traversal.tree import SAME, traverse


def summary(found):
    """Return all of a traversal, image by image, without the numbers of nodes."""
    return [
        (
            stop,
            [
                (
                    node.region,
                    node.attention,
                    node.joint,
                    node.rank,
                    [
                        (edge.cell, edge.order, nodes_of(found, image).index(edge.node))
                        for edge in node.edges
                    ],
                )
                for node in nodes_of(found, image)
            ],
        )
        for image, stop in enumerate(found.stops)
    ]


def test_chosen_cells_are_read_in_reading_order_not_by_probability():
    found = run(config(2, (3,)))
    assert paths(found) == ["root", "root/0-0", "root/1-0", "root/2-0"]
    assert [node.rank for node in found.nodes[1:]] == [1, 3, 2]


def test_a_level_is_image_major_then_by_parent_then_by_cell():
    calls = []

    def encode(nodes):
        calls.append(nodes)
        return always()(nodes)

    run(config(3, (2,), deduplicate=False), encode, roots=[ROOT, ROOT])
    assert [(node.image, node.region.path) for node in calls[2]] == [
        (image, f"root/{first}/{second}")
        for image, first, second in product((0, 1), ("0-0", "2-0"), ("0-0", "2-0"))
    ]


@given(worlds(), configs())
def test_nodes_are_those_given_to_the_encoder(world, config):
    found = world.run(config)
    assert list(found.nodes) == [node for call in world.calls for node in call]


@given(worlds(), configs(("top_k", "sample")))
def test_a_level_of_all_images_is_encoded_at_once(world, config):
    found = world.run(config)
    assert [{node.region.level for node in call} for call in world.calls] == [
        {level} for level in range(1, len(world.calls) + 1)
    ]
    assert len(world.calls) == max(levels_of(found))


@given(worlds(), configs(("best_first",)))
def test_a_round_of_best_first_reads_one_region_of_every_image(world, config):
    found = world.run(config)
    for call in world.calls:
        assert len({node.image for node in call}) == len(call) > 0
    assert len(world.calls) == max(len(nodes_of(found, image)) for image in range(len(world.names)))


@given(worlds(), configs(min_size=None), numbers(1.0, 1e6), numbers(1.0, 1e6))
def test_a_traversal_does_not_depend_on_the_size_of_the_image(world, config, width, height):
    scaled = world.run(config, root=Window(3.7, -2.9, width, height))
    plain = world.run(config)
    for image in range(len(world.names)):
        assert paths(scaled, image) == paths(plain, image)


@given(worlds(), configs())
def test_probabilities_multiply_along_the_path(world, config):
    found = world.run(config)
    for node in found.nodes:
        joint, path, attention = 1.0, "root", 1.0
        for step in node.region.path.split("/")[1:]:
            own = probabilities(world.scores(world.names[node.image], path))
            row, column = map(int, step.split("-"))
            attention = own[row * world.grid.columns + column]
            joint, path = joint * attention, f"{path}/{step}"
        assert node.joint == pytest.approx(joint)
        assert node.attention == pytest.approx(attention)


@given(worlds(), configs())
def test_ranks_follow_joint_probability_within_an_image_and_level(world, config):
    found = world.run(config)
    for image, level in product(range(len(world.names)), range(1, 5)):
        peers = [node for node in nodes_of(found, image) if node.region.level == level]
        ranked = sorted(peers, key=lambda node: -node.joint)  # stable: ties by order
        assert [node.rank for node in ranked] == list(range(1, len(peers) + 1))


@given(worlds(), configs())
def test_edges_lead_to_the_nodes_that_show_their_cells(world, config):
    found = world.run(config)
    reached = Counter({nodes_of(found, image)[0]: 1 for image in range(len(world.names))})
    for node in found.nodes:
        assert cells_of(node) == sorted(cells_of(node))
        for edge in node.edges:
            child = node.region.child(world.grid, *divmod(edge.cell, world.grid.columns))
            assert edge.node.image == node.image
            assert same_pixels(edge.node.region.window, child.window)
            reached[edge.node] += 1
    assert set(reached) == set(found.nodes)
    assert config.deduplicate or set(reached.values()) == {1}


def topk_by_brute_force(world, config, name):
    found, level = [], [Region(ROOT)]
    for depth in range(1, config.levels + 1):
        found += level
        children = []
        for region in level:
            own = world.scores(name, region.path)
            best = sorted(usable(own, config), key=lambda cell, own=own: -own.logits[cell, 0])
            for cell in sorted(best[: config.keep_at(depth)]):
                children.append(region.child(world.grid, *divmod(cell, world.grid.columns)))
        level = children
    return [region.path for region in found]


@given(worlds(), configs(("top_k",), budget=None, min_size=None, deduplicate=False))
def test_top_k_is_what_brute_force_finds(world, config):
    found = world.run(config)
    for image, name in enumerate(world.names):
        assert paths(found, image) == topk_by_brute_force(world, config, name)


@given(grids(most=4), st.sampled_from(["top_k", "sample"]), st.integers(0, 3))
def test_all_cells_can_be_followed(grid, policy, more):
    encode = always(np.full((grid.rows, grid.columns), 0.5))
    own = config(2, (grid.rows * grid.columns + more,), policy, deduplicate=False)
    found = run(own, encode, grid=grid)
    assert paths(found)[1:] == [f"root/{row}-{column}" for row, column in grid.cells()]


@given(worlds(), configs(levels=1))
def test_one_level_is_one_round(world, config):
    found = world.run(config)
    assert len(world.calls) == 1
    assert set(found.stops) == {"max_level"}
    assert len(found.nodes) == len(world.names)


def test_a_third_level_has_the_index_arithmetic_of_the_reference():
    one = {"root": (1, 2), "root/1-2": (0, 1)}

    def encode(nodes):
        answers = []
        for node in nodes:
            attention = np.zeros((3, 3))
            attention[one.get(node.region.path, (0, 0))] = 1.0
            answers.append(scores(attention))
        return answers

    deepest = run(config(3), encode).nodes[-1].region
    assert (deepest.path, deepest.position) == ("root/1-2/0-1", (3, 7, 2))
    assert deepest.window == ROOT.cell(GRID, 1, 2).cell(GRID, 0, 1)


@given(worlds(), configs())
def test_cells_without_enough_data_or_attention_are_never_chosen(world, config):
    for node in world.run(config).nodes:
        assert set(cells_of(node)) <= set(usable(world.of(node), config))


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_a_single_valid_pixel_makes_a_cell_a_candidate(policy):
    valid = np.zeros((3, 3))
    valid[0, 1] = 1e-9
    found = run(config(2, (9,), policy, budget=9), always(valid=valid))
    assert paths(found) == ["root", "root/0-1"]


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_a_view_that_proposes_no_cell_is_a_dead_end(policy):
    found = run(config(2, (9,), policy, budget=10), always(np.zeros((3, 3))))
    assert (paths(found), found.stops) == (["root"], ("no_data",))


@given(worlds(), configs())
def test_an_image_alone_is_traversed_as_in_a_batch(world, config):
    together = summary(world.run(config))
    for name, found in zip(world.names, together, strict=True):
        assert summary(World(world.grid, [name]).run(config)) == [found]


def test_regions_are_made_for_chosen_cells_only(monkeypatch):
    made = Counter()

    def counted(method):
        def wrapper(self, *given):
            made[method.__name__] += 1
            return method(self, *given)

        return wrapper

    for method in (Region.child, Region.fixed):
        monkeypatch.setattr(Region, method.__name__, counted(method))
    grid = Grid(200, 200, 0.01)
    encode = always(np.full((200, 200), 1 / 40_000))
    found = run(config(3, (), "best_first", budget=6), encode, grid=grid)
    assert len(found.nodes) == 6
    assert made == {"child": 6}  # the last was chosen when the budget was spent
    made.clear()
    run(config(2, (5,)), encode, grid=grid)
    assert made == {"child": 5}


@given(worlds(), configs())
def test_no_image_gets_more_regions_than_its_budget(world, config):
    found = world.run(config)
    assert all(len(nodes_of(found, image)) <= config.budget for image in range(len(world.names)))


@given(worlds(), configs(("top_k", "sample"), min_size=None), FEW)
def test_a_level_over_budget_keeps_its_most_probable_regions_in_order(world, config, name):
    world.names = [name]
    free = world.run(config.changed(budget=None))
    expected, left = [], config.budget
    for level in range(1, config.levels + 1):
        peers = [node for node in free.nodes if node.region.level == level]
        kept = sorted(peers, key=lambda node: -node.joint)[:left]
        expected += [node.region.path for node in peers if node in kept]
        left -= len(kept)
    assert paths(world.run(config)) == expected


def test_a_budget_cuts_the_level_that_would_exceed_it():
    found = run(config(3, (3,), budget=3))
    assert (paths(found), found.stops) == (["root", "root/0-0", "root/2-0"], ("budget",))
    assert edges(found, found.nodes[0]) == [(0, 1), (6, 2)]
    assert found.nodes[1].edges == ()


def test_a_budget_stops_a_traversal_only_where_it_cuts():
    assert run(config(2, (3,), budget=3)).stops == ("budget",)
    assert run(config(2, (3,), budget=4)).stops == ("max_level",)


def test_sure_images_stop_and_the_others_continue():
    asked = []

    def confident(images):
        asked.append(list(images))
        return [image == 1 for image in images]

    found = run(config(3, (2,)), roots=[ROOT] * 3, confident=confident)
    assert asked == [[0, 1, 2], [0, 2]]  # and not after the last level: nothing would continue
    assert found.stops == ("max_level", "confidence", "max_level")
    assert [len(nodes_of(found, image)) for image in range(3)] == [7, 1, 7]
    assert found.nodes[1].edges == ()


def test_best_first_asks_for_confidence_after_every_round():
    asked = []

    def confident(images):
        asked.append(images)
        return [len(asked) == 3]

    run(config(3, (), "best_first", budget=5), confident=confident)
    assert asked == [[0], [0], [0]]


@pytest.mark.parametrize(("once", "third"), [(True, 49), (False, 81)])
@given(windows(), st.sampled_from(EVERY_POLICY))
def test_the_9_positions_of_the_third_level_are_7_different_ones(once, third, root, policy):
    own = config(3, (9,), policy, budget=1000, deduplicate=once)
    found = run(own, always(np.full((3, 3), 1 / 9)), roots=[root])
    assert levels_of(found) == {1: 1, 2: 9, 3: third}


@given(worlds(), configs(deduplicate=True))
def test_no_image_is_shown_the_same_pixels_twice(world, config):
    found = world.run(config)
    for image in range(len(world.names)):
        shown = [node.region.window for node in nodes_of(found, image)]
        assert not any(same_pixels(*pair) for pair in combinations(shown, 2))


@given(windows(), st.integers(2, 5), numbers(0.1, 0.9))
def test_only_regions_with_the_same_pixels_are_merged(root, count, fraction):
    grid, encode = Grid(1, count, fraction), always(np.full((1, count), 0.5))
    free = run(config(3, (count,), deduplicate=False), encode, grid=grid, roots=[root])
    once = run(config(3, (count,)), encode, grid=grid, roots=[root])
    lefts = [node.region.window.left for node in free.nodes if node.region.level == 3]
    different = np.diff(np.sort(lefts)) > SAME * root.width * fraction**2
    assert levels_of(once)[3] == 1 + np.count_nonzero(different)


def test_parents_share_a_node():
    attention = np.zeros((3, 3))
    attention[0, [0, 2]] = 0.5

    def encode(nodes):
        first = attention if len(nodes) > 1 else np.roll(attention, 1, axis=1)
        return [scores(first) for _ in nodes]

    # Level 2: cells 0 and 1 of the first row; the last cell of the one is the first of the other.
    found = run(config(3, (2,)), encode)
    assert paths(found)[3:] == ["root/0-0/0-0", "root/0-0/0-2", "root/0-1/0-2"]
    assert edges(found, found.nodes[1]) == [(0, 3), (2, 4)]
    assert edges(found, found.nodes[2]) == [(0, 4), (2, 5)]


def test_best_first_notes_a_region_that_was_read_and_takes_the_next():
    own = config(2, (), "best_first", budget=5)
    found = run(own, always(np.full((1, 2), 0.5)), grid=Grid(1, 2, 1.0))
    assert edges(found, found.nodes[0]) == [(0, 0), (1, 0)]
    assert found.stops == ("exhausted",)


@pytest.mark.parametrize("policy", EVERY_POLICY)
@pytest.mark.parametrize(
    ("once", "count", "stop"), [(True, 1, "exhausted"), (False, 4, "max_level")]
)
def test_a_1_x_1_grid_has_nothing_new(policy, once, count, stop):
    own = config(4, (1,), policy, budget=9, deduplicate=once)
    found = run(own, always([[1.0]]), grid=Grid(1, 1, 0.5))
    assert (len(found.nodes), found.stops) == (count, (stop,))
    assert edges(found, found.nodes[0]) == [(0, 0 if once else 1)]


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_an_image_without_data_is_one_region(policy):
    found = run(config(3, (2,), policy, budget=9), always(valid=np.zeros((3, 3))))
    assert (len(found.nodes), found.stops) == (1, ("no_data",))


@pytest.mark.parametrize("policy", EVERY_POLICY)
@pytest.mark.parametrize(("side", "depth"), [(1023.9, 1), (1024, 2), (2048, 3), (2047.9, 2)])
def test_levels_end_at_the_pixels_of_the_image(policy, side, depth):
    own = config(9, (1,), policy, budget=100, min_size=512)
    found = run(own, roots=[Window(0, 0, side, side)])
    assert (max(levels_of(found)), found.stops) == (depth, ("native_resolution",))


def test_the_longer_side_of_a_cell_decides_whether_it_is_read():
    found = run(config(9, min_size=512), roots=[Window(0, 0, 100, 2048)])
    assert (max(levels_of(found)), found.stops) == (3, ("native_resolution",))


@given(st.integers(8, 4096), numbers(0.05, 1.0))
def test_rounding_does_not_end_a_traversal_before_the_last_pixel(view_size, fraction):
    own, side = config(2, min_size=view_size, deduplicate=False), view_size / fraction
    encode, root = always(np.full((2, 2), 0.25)), Window(0, 0, side, side)
    assert len(run(own, encode, grid=Grid(2, 2, fraction), roots=[root]).nodes) == 2


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_an_image_that_fails_ends_and_the_others_continue(policy):
    def encode(nodes):
        return [
            None if node.image == 1 and node.region.level == 2 else scores(CHANCES)
            for node in nodes
        ]

    found = run(config(3, (2,), policy, budget=7, deduplicate=False), encode, roots=[ROOT] * 3)
    assert found.stops[1] == "failed"
    assert {found.stops[0], found.stops[2]} <= {"max_level", "budget"}
    assert [len(nodes_of(found, image)) for image in (0, 2)] == [7, 7]


def test_a_region_that_fails_ends_its_image_though_its_siblings_were_read():
    def encode(nodes):
        return [None if n.region.path == "root/2-0" else scores(CHANCES) for n in nodes]

    found = run(config(3, (2,)), encode)
    assert (paths(found), found.stops) == (["root", "root/0-0", "root/2-0"], ("failed",))
    failed = run(config(3, (2,)), lambda nodes: [None])
    assert (failed.stops, failed.nodes[0].edges) == (("failed",), ())


def test_best_first_ends_with_the_levels_or_its_budget():
    found = run(config(2, (), "best_first", budget=100))
    assert (len(found.nodes), found.stops) == (9, ("max_level",))
    assert run(config(2, (), "best_first", budget=8)).stops == ("budget",)


@pytest.mark.parametrize("policy", EVERY_POLICY)
def test_a_region_without_data_is_no_end_while_others_go_deeper(policy):
    def encode(nodes):
        empty = [node.region.path == "root/0-0" for node in nodes]
        return [scores(CHANCES, np.full((3, 3), 0.0 if each else 1.0)) for each in empty]

    found = run(config(3, (9,), policy, budget=1000), encode)
    assert (found.nodes[1].edges, found.stops) == ((), ("max_level",))


def test_every_image_has_its_own_stop_reason():
    def encode(nodes):
        given = {1: scores(CHANCES, np.zeros((3, 3))), 4: None}
        return [given.get(node.image, scores(CHANCES)) for node in nodes]

    found = run(
        config(2, (1,), min_size=50),
        encode,
        roots=[ROOT, ROOT, Window(0, 0, 40, 40), ROOT, ROOT],
        confident=lambda images: [image == 3 for image in images],
    )
    assert found.stops == ("max_level", "no_data", "native_resolution", "confidence", "failed")


@given(worlds(), configs())
def test_every_image_stops_for_a_reason_that_is_true(world, config):
    found = world.run(config)
    for image, stop in enumerate(found.stops):
        nodes = nodes_of(found, image)
        assert (stop == "max_level") <= (max(node.region.level for node in nodes) == config.levels)
        assert (stop == "no_data") <= any(not usable(world.of(node), config) for node in nodes)
        assert (stop == "budget") <= (len(nodes) == config.budget)
        assert (stop == "native_resolution") <= (config.min_size is not None)
        assert (stop == "exhausted") <= config.deduplicate
        assert stop not in ("failed", "confidence")


def overlap(one, other):
    """Return the fraction of `one` that `other` covers."""
    width = min(one.right, other.right) - max(one.left, other.left)
    height = min(one.bottom, other.bottom) - max(one.top, other.top)
    return max(width, 0) * max(height, 0) / (one.width * one.height)


@pytest.mark.parametrize("policy", EVERY_POLICY)
@pytest.mark.parametrize("grid", [Grid(7, 7, 0.25), Grid(3, 5, 0.5)])
def test_siblings_share_no_more_than_allowed(policy, grid):
    attention = np.random.default_rng(0).dirichlet(np.ones(grid.rows * grid.columns))
    encode = always(attention.reshape(grid.rows, grid.columns))
    own = config(2, (4,), policy, budget=6, max_overlap=0.3)
    found = run(own, encode, grid=grid, seeds=[3])
    shown = [node.region.window for node in found.nodes[1:]]
    assert len(shown) > 2
    assert all(overlap(a, b) <= 0.3 for a in shown for b in shown if a is not b)


def test_the_best_cell_that_stands_apart_is_next():
    encode = always([[0.3, 0.25, 0.02, 0.2, 0.15, 0.07, 0.01]])
    found = run(config(2, (3,), max_overlap=0.3), encode, grid=Grid(1, 7, 0.25))
    assert cells_of(found.nodes[0]) == [0, 3, 5]


@pytest.mark.parametrize("policy", ["top_k", "best_first"])
def test_edges_are_numbered_in_the_order_of_their_attention(policy):
    root = run(config(2, (4,), policy, budget=5)).nodes[0]
    by_order = sorted(root.edges, key=lambda edge: edge.order)
    attention = [CHANCES.ravel()[edge.cell] for edge in by_order]
    assert [edge.order for edge in by_order] == [0, 1, 2, 3]
    assert attention == sorted(attention, reverse=True)


def test_no_images_are_not_encoded_and_a_single_level_needs_no_keep():
    found = traverse([], None, GRID, config(3), [])
    assert (found.nodes, found.stops) == ((), ())
    found = run(config(1, ()))
    assert (paths(found), found.stops) == (["root"], ("max_level",))


def test_the_same_region_of_two_images_is_read_twice():
    found = run(config(2, (2,)), roots=[ROOT, ROOT])
    assert [len(nodes_of(found, image)) for image in range(2)] == [3, 3]


def test_half_precision_logits_choose_the_same_cells():
    half = run(config(3, (3,)), always(CHANCES.astype(np.float16)))
    assert paths(half) == paths(run(config(3, (3,))))
