import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given

from tests.strategies import configs
from tests.traversal.world import (
    CHANCES,
    GRID,
    ROOT,
    always,
    cells_of,
    chi_square,
    config,
    edges,
    nodes_of,
    paths,
    probabilities,
    run,
    same_pixels,
    usable,
    worlds,
)
from tnetcli.evaluation.metrics import hits
from tnetcli.geometry import Grid, Region, Window
from tnetcli.traversal.policies import (
    BestFirst,
    Fixed,
    Oracle,
    Random,
    Sample,
    ScoredRegion,
    TopK,
    build_policy,
)
from tnetcli.traversal.tree import CellScores, traverse


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"levels": 0}, "levels"),
        ({"levels": math.nan}, "levels"),
        ({"levels": 2.5}, "levels"),
        ({"keep": (2, 0)}, "keep"),
        ({"keep": (1.5,)}, "keep"),
        ({"keep": ()}, "keep is empty"),
        ({"policy": "worst"}, "policy"),
        ({"temperature": 0.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"budget": 0}, "budget"),
        ({"budget": 2.5}, "budget"),
        ({"policy": "best_first"}, "best_first needs a budget"),
        ({"confidence": 0.0}, "confidence"),
        ({"confidence": 1.1}, "confidence"),
        ({"confidence": math.nan}, "confidence"),
        ({"min_valid": 1.0}, "min_valid"),
        ({"min_valid": -0.1}, "min_valid"),
        ({"min_size": -1.0}, "min_size"),
        ({"min_size": math.nan}, "min_size"),
        ({"max_overlap": 1.1}, "max_overlap"),
        ({"max_overlap": math.nan}, "max_overlap"),
        ({"background": (5, -5)}, "background ends before it begins"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(settings, problem):
    with pytest.raises(ValueError, match=problem):
        config(**settings)
    with pytest.raises(ValueError, match=problem):
        config().changed(**settings)


def test_the_last_keep_repeats():
    own = config(5, (4, 2))
    assert [own.keep_at(level) for level in (1, 2, 3, 4)] == [4, 2, 2, 2]
    assert config(1, ()).keep_at(1) == 0


def test_a_configuration_names_its_policy():
    assert type(build_policy(config())) is TopK
    assert type(build_policy(config(policy="best_first", budget=3))) is BestFirst
    own = config(policy="sample", temperature=2.0)
    assert vars(build_policy(own, 7, uniform=0.1)) == vars(Sample(7, 2.0, 0.1))
    with pytest.raises(ValueError, match="seed is below 0"):
        build_policy(own, -1)


def test_ties_go_to_the_first_in_reading_order():
    found = run(config(2, (4,)), always(np.full((3, 3), 1 / 9)))
    assert cells_of(found.nodes[0]) == [0, 1, 2, 3]


def test_channels_of_a_place_are_added_up_before_the_softmax():
    logits = np.random.default_rng(0).normal(size=(9, 4)) * 3
    powers = np.exp(logits)
    expected = powers.sum(axis=1) / powers.sum()
    assert TopK().probabilities(Region(ROOT), logits) == pytest.approx(expected)
    one = np.log(powers.sum(axis=1, keepdims=True))
    encoders = [lambda nodes, own=own: [CellScores(own, np.ones(9))] * len(nodes)
                for own in (logits, one)]  # fmt: skip
    several, single = (run(config(3, (3, 2)), encode) for encode in encoders)
    assert paths(several) == paths(single)
    for node, other in zip(several.nodes, single.nodes, strict=True):
        assert node.joint == pytest.approx(other.joint)


def test_large_logits_do_not_overflow():
    logits = np.array([[1e30], [1e30], [-1e30]])
    assert TopK().probabilities(Region(ROOT), logits).tolist() == [0.5, 0.5, 0.0]


@given(worlds(), configs(("sample",), budget=None, min_size=None, deduplicate=False))
def test_a_draw_is_without_replacement(world, config):
    for node in world.run(config).nodes:
        if node.region.level < config.levels:
            most = config.keep_at(node.region.level)
            assert len(set(cells_of(node))) == min(most, len(usable(world.of(node), config)))


def chances_at(temperature, valid):
    weights = {
        cell: chance ** (1 / temperature)
        for cell, chance in enumerate(CHANCES.ravel())
        if valid.ravel()[cell] and chance
    }
    return {cell: weight / sum(weights.values()) for cell, weight in weights.items()}


@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_the_first_draw_follows_attention_and_temperature_over_seeds(temperature):
    valid = np.ones((3, 3))
    valid[2, 0] = 0.0
    own = config(2, (1,), "sample", temperature=temperature)
    found = run(own, always(valid=valid), roots=[ROOT] * 1000)
    counts = Counter(cells_of(node)[0] for node in found.nodes[:1000])
    # 99.99 % of a chi-square of 6 degrees of freedom lies below.
    assert chi_square(counts, chances_at(temperature, valid)) < 27.9


def test_a_part_of_the_draw_ignores_attention():
    valid, cells = np.ones((3, 3)), np.flatnonzero(CHANCES)
    probs = CHANCES.ravel()[cells]
    keys = [Sample(seed, uniform=0.4).preference(Region(ROOT), cells, probs, 1.0)
            for seed in range(1000)]  # fmt: skip
    counts = Counter(int(cells[each.argmax()]) for each in keys)
    own = chances_at(1.0, valid)
    assert chi_square(counts, {cell: 0.6 * own[cell] + 0.4 / 8 for cell in own}) < 29.9


def test_a_draw_of_two_has_the_probability_of_its_order():
    chances = np.array([0.5, 0.3, 0.2])
    found = run(config(2, (2,), "sample"), always(chances[None]), grid=Grid(1, 3, 0.4),
                roots=[ROOT] * 1200)  # fmt: skip
    orders = Counter(
        tuple(edge.cell for edge in sorted(node.edges, key=lambda edge: edge.order))
        for node in found.nodes
        if node.edges
    )
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    expected = {(i, j): chances[i] * chances[j] / (1 - chances[i]) for i, j in pairs}
    assert chi_square(orders, expected) < 20.5  # p = 0.001, 5 degrees of freedom


@pytest.mark.parametrize("temperature", [1e-300, 1e-12])
def test_a_cold_draw_is_top_k(temperature):
    encode = always([[0.3, 0.05, 0.1], [0.15, 0.0, 0.08], [0.2, 0.02, 1e-300]])
    drawn = run(config(3, (8, 3), "sample", temperature=temperature), encode, seeds=[3])
    assert paths(drawn) == paths(run(config(3, (8, 3)), encode))


def test_other_seeds_draw_other_cells():
    found = run(config(2, (3,), "sample"), roots=[ROOT] * 20)
    assert len({tuple(cells_of(node)) for node in found.nodes[:20]}) > 5


def best_first_by_brute_force(world, config, name):
    read, tried = [(Region(ROOT), 1.0)], set()
    while len(read) < config.budget:
        options = []
        for order, (region, joint) in enumerate(read):
            own = world.scores(name, region.path)
            if region.level < config.levels:
                for cell in usable(own, config):
                    child = region.child(world.grid, *divmod(cell, world.grid.columns))
                    if child.path not in tried:
                        chance = joint * probabilities(own)[cell]
                        options.append((-chance, order, cell, child, chance))
        if not options:
            break
        _, _, _, child, chance = min(options, key=lambda option: option[:3])
        tried.add(child.path)
        if not (config.deduplicate and any(same_pixels(r.window, child.window) for r, _ in read)):
            read.append((child, chance))
    return [region.path for region, _ in read]


@given(worlds(), configs(("best_first",), min_size=None))
def test_best_first_is_what_brute_force_finds(world, config):
    found = world.run(config)
    for image, name in enumerate(world.names):
        assert paths(found, image) == best_first_by_brute_force(world, config, name)


def test_best_first_goes_deep_before_it_goes_wide_where_that_is_more_probable():
    attention = np.full((3, 3), 0.01)
    attention[1, 1] = 0.92
    found = run(config(9, (), "best_first", budget=4), always(attention))
    assert paths(found)[-1] == "root/1-1/1-1/1-1"


@pytest.mark.parametrize(
    ("batch", "budget", "rounds"), [(3, 8, [1, 3, 3, 1]), (4, 9, [1, 4, 4]), (50, 9, [1, 8])]
)
def test_best_first_reads_several_regions_a_round(batch, budget, rounds):
    calls = []

    def encode(nodes):
        calls.append([node.region.path for node in nodes])
        return always()(nodes)

    own = config(2, (), "best_first", budget=budget)
    found = traverse([ROOT], encode, GRID, own, [BestFirst(batch)])
    assert [len(call) for call in calls] == rounds
    # Two levels: what a round reads changes no candidate of the next.
    assert paths(found) == paths(run(own))


def test_a_round_of_several_regions_spends_no_more_than_the_budget():
    own = config(3, (), "best_first", budget=6, deduplicate=False)
    found = traverse([ROOT], always(), GRID, own, [BestFirst(4)])
    assert (len(found.nodes), found.stops) == (6, ("budget",))
    # The second round: 0.30 * 0.30 leads, then what is left of level 2.
    assert paths(found)[1:5] == ["root/0-0", "root/2-0", "root/1-0", "root/0-2"]
    assert "root/2-2" in paths(found)


class TestFixed:
    """Fixed regions take the place of the cells of the whole image."""

    regions = tuple(
        ScoredRegion(Window(left, 100, 50, 30), attention)
        for left, attention in ((10, 0.1), (300, 0.4), (500, 0.2), (700, 0.3))
    )

    def run(self, regions=regions, encode=None, seeds=(1,), **changes):
        own = config(**{"levels": 2, "keep": (2,)} | changes)
        return run(own, encode, seeds=seeds, fixed=[regions])

    def test_the_most_attended_are_read_in_their_own_order(self):
        found = self.run()
        assert paths(found) == ["root", "root/w2", "root/w4"]
        assert [node.region.window for node in found.nodes[1:]] == [
            self.regions[1].window,
            self.regions[3].window,
        ]
        assert [(each.attention, each.joint, each.rank) for each in found.nodes[1:]] == [
            (0.4, 0.4, 1),
            (0.3, 0.3, 2),
        ]
        assert found.stops == ("max_level",)

    def test_regions_of_equal_attention_come_in_the_order_of_the_file(self):
        even = [ScoredRegion(each.window, 0.25) for each in self.regions]
        assert paths(self.run(even)) == ["root", "root/w1", "root/w2"]

    def test_their_own_cells_are_followed_as_usual(self):
        found = self.run(levels=3, keep=(1, 2), min_size=1.0)
        assert paths(found) == ["root", "root/w2", "root/w2/0-0", "root/w2/2-0"]
        assert found.nodes[2].region.window == self.regions[1].window.cell(GRID, 0, 0)
        assert found.nodes[2].joint == pytest.approx(0.4 * 0.30)
        assert found.nodes[0].edges == ()  # fixed regions are no cells
        assert cells_of(found.nodes[1]) == [0, 6]

    def test_neither_their_size_nor_data_nor_shared_pixels_matter(self):
        nothing = always(np.zeros((3, 3)), valid=np.zeros((3, 3)))
        near = [ScoredRegion(Window(left, left, 50, 50), 0.5) for left in (0, 1)]
        found = self.run(near, nothing, min_size=1000.0, max_overlap=0.0)
        assert paths(found) == ["root", "root/w1", "root/w2"]

    def test_the_same_pixels_are_read_once(self):
        twice = [ScoredRegion(Window(0, 0, 50, 50), share) for share in (0.6, 0.4)]
        assert paths(self.run(twice)) == ["root", "root/w1"]
        assert paths(self.run(twice, deduplicate=False)) == ["root", "root/w1", "root/w2"]

    def test_all_are_read_if_few_and_a_budget_keeps_the_most_attended(self):
        every = ["root", "root/w1", "root/w2", "root/w3", "root/w4"]
        assert paths(self.run(keep=(9,))) == every
        assert paths(self.run(keep=(4,), budget=3)) == ["root", "root/w2", "root/w4"]

    def test_images_without_fixed_regions_keep_their_cells(self):
        found = run(config(2, (1,)), roots=[ROOT, ROOT], fixed=[self.regions, None])
        assert paths(found, 0) == ["root", "root/w2"]
        assert paths(found, 1) == ["root", "root/0-0"]

    def test_more_regions_than_a_grid_has_cells_can_be_drawn_from(self):
        many = [ScoredRegion(Window(left, 0, 5, 5), 1 / 40) for left in range(40)]
        drawn = [self.run(many, policy="sample", keep=(1,), seeds=(seed,)) for seed in range(120)]
        assert len({paths(found)[1] for found in drawn}) > 30

    def test_no_regions_are_a_dead_end(self):
        found = self.run(())
        assert (paths(found), found.stops) == (["root"], ("no_data",))

    def test_a_draw_follows_attention(self):
        drawn = Counter(
            paths(self.run(policy="sample", keep=(1,), seeds=(seed,)))[1] for seed in range(800)
        )
        for number, each in enumerate(self.regions, start=1):
            # Four standard deviations of a share of 800 draws.
            spread = 4 * math.sqrt(each.attention * (1 - each.attention) / 800)
            assert drawn[f"root/w{number}"] / 800 == pytest.approx(each.attention, abs=spread)

    def test_the_best_of_all_may_be_fixed_or_a_cell(self):
        found = self.run(policy="best_first", budget=4, levels=3, max_overlap=0.0)
        # 0.4 first; then 0.3 before 0.2, before the best cell of the first, 0.4 * 0.3.
        assert paths(found) == ["root", "root/w2", "root/w4", "root/w3"]

    @pytest.mark.parametrize("attention", [-0.1, 1.1, math.nan])
    def test_attention_is_a_probability(self, attention):
        with pytest.raises(ValueError, match="attention is not within"):
            ScoredRegion(ROOT, attention)


UNEVEN = Grid(3, 4, 0.4)
IMAGES = 400
WHOLE = Region(Window(0, 0, 1000, 1000))
OWN = np.arange(1.0, 13) / 78  # the last cell is the best
LOGITS = np.log(OWN)[:, None]


def compare(policies, own=None):
    roots = [WHOLE.window] * len(policies)
    encode = always(OWN.reshape(3, 4))
    return traverse(roots, encode, UNEVEN, own or config(2, (2,)), policies)


class TestRandom:
    @pytest.fixture(scope="class")
    @classmethod
    def found(cls):
        return compare([Random(TopK(), UNEVEN, seed) for seed in range(IMAGES)])

    def test_no_cell_is_preferred(self, found):
        count = Counter(cell for root in found.nodes[:IMAGES] for cell in cells_of(root))
        # Chi-squared of 11 degrees: one in a thousand.
        assert chi_square(count, dict.fromkeys(range(12), 1 / 12)) < 31.3

    def test_probabilities_depend_on_the_seed_and_the_path_alone(self):
        child = WHOLE.child(UNEVEN, 0, 0)
        one, other = (Random(TopK(), UNEVEN, seed) for seed in (5, 6))
        found = one.probabilities(child, LOGITS)
        assert np.array_equal(found, one.probabilities(child, -LOGITS))
        assert not np.array_equal(found, other.probabilities(child, LOGITS))
        assert not np.array_equal(found, one.probabilities(WHOLE, LOGITS))

    def test_the_inner_policy_chooses(self):
        own = config(3, (), "best_first", budget=5)
        found = compare([Random(BestFirst(), UNEVEN, 1)], own)
        assert len(found.nodes) == 5
        best = max(found.nodes[1:], key=lambda node: node.joint)
        assert found.nodes[1] is best


@pytest.mark.parametrize(
    "policy", [Random(TopK(), UNEVEN, 1), Oracle(TopK(), UNEVEN, [Window(1, 1, 9, 9)])]
)
def test_wrapped_policies_give_probabilities(policy):
    found = policy.probabilities(WHOLE, LOGITS)
    assert found.shape == (12,)
    assert found.min() >= 0
    assert found.sum() == pytest.approx(1)


class TestOracle:
    def test_boxes_lead_to_the_cells_that_show_them(self):
        boxes = [[Window(20, 30, 50, 50)], [Window(930, 20, 40, 40)]]
        found = compare([Oracle(TopK(), UNEVEN, each) for each in boxes], config(3, (1, 1)))
        for image, true in enumerate(boxes):
            own = [node.region for node in nodes_of(found, image)]
            assert [region.level for region in own] == [1, 2, 3]
            assert all(hits(region.window, true) for region in own)

    def test_a_large_box_leads_to_cells_that_it_fills(self):
        true = [Window(600, 600, 400, 400)]
        found = compare([Oracle(TopK(), UNEVEN, true)], config(3, (1, 2)))
        last = [node.region.window for node in found.nodes[2:]]
        assert len(last) == 2
        assert all(window.left >= 599 and window.top >= 599 for window in last)

    def test_where_boxes_do_not_distinguish_cells_the_model_chooses(self):
        policy = Oracle(TopK(), UNEVEN, [Window(0, 0, 10, 10)])
        region = WHOLE.child(UNEVEN, 2, 3)  # far from the box
        assert policy.probabilities(region, LOGITS) == pytest.approx(OWN)

    def test_images_without_boxes_are_traversed_as_the_model_does(self):
        assert cells_of(compare([Oracle(TopK(), UNEVEN, [])]).nodes[0]) == [10, 11]


def test_wrappers_can_be_nested():
    policy = Fixed(Random(BestFirst(3), UNEVEN, 1), [ScoredRegion(WHOLE.window, 0.5)])
    assert (policy.persistent, policy.batch) == (True, 3)
    assert policy.fixed(WHOLE) == [ScoredRegion(WHOLE.window, 0.5)]
    assert policy.fixed(WHOLE.child(UNEVEN, 0, 0)) is None


def test_best_first_lists_edges_in_reading_order():
    found = run(config(2, (), "best_first", budget=4))
    assert paths(found) == ["root", "root/0-0", "root/2-0", "root/1-0"]
    assert edges(found, found.nodes[0]) == [(0, 1), (3, 3), (6, 2)]
