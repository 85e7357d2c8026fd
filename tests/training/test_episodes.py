import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
import torch

from tests.images import noise, write_geotiff
from tests.small_model import SmallModel
from tests.training.explore import (
    LABELS,
    THREE,
    TWO,
    Torn,
    explore,
    probabilities,
    tiny_model,
    views_of,
    write_readers,
)
from tests.traversal.world import ROOT, always, config, run
from tnetcli.geometry import Grid, Window
from tnetcli.models.base import EncoderOutput
from tnetcli.readers.detect import open_image
from tnetcli.tasks import Classification
from tnetcli.training.recipe import LossConfig
from tnetcli.training.reinforce import (
    Baselines,
    blocked_cells,
    draw_log_probability,
    entropy_share,
    independent_log_probability,
    label_terms,
    mix,
    policy_terms,
    total_loss,
)

ATTENTION = [0.3, 0.05, 0.1, 0.15, 0.0, 0.08, 0.2, 0.02, 0.1]
ALL = torch.ones(1, 9, dtype=torch.bool)
# In a row of five, a choice takes its neighbours along.
NEIGHBOURS = (torch.arange(5)[:, None] - torch.arange(5)).abs() <= 1
FIVE = [0.35, 0.05, 0.25, 0.15, 0.2]


def chain(weights, draw, allowed, blocked=None):
    """Return the probability of each draw after the ones before, by the book."""
    left, chances = {cell for cell, fine in enumerate(allowed) if fine}, []
    for cell in draw:
        chances.append(weights[cell] / sum(weights[other] for other in left))
        left -= {cell} | {other for other in left if blocked is not None and blocked[cell, other]}
    return chances


def all_draws(count, allowed, blocked=None, before=()):
    """Return every ordered draw of `count` cells, shorter where nothing is left."""
    gone = {
        other for cell in before for other in range(len(allowed)) if blocks(blocked, cell, other)
    }
    left = [cell for cell, fine in enumerate(allowed) if fine and cell not in gone]
    if len(before) == count or not left:
        return [before]
    return [draw for cell in left for draw in all_draws(count, allowed, blocked, (*before, cell))]


def blocks(blocked, cell, other):
    return cell == other or (blocked is not None and bool(blocked[cell, other]))


def padded(draws, most):
    return torch.tensor([[*draw, *[-1] * (most - len(draw))] for draw in draws])


def log_probability(attention, draws, allowed, most, **more):
    rows = torch.tensor([attention] * len(draws), dtype=torch.float64)
    fine = torch.tensor([allowed] * len(draws))
    return draw_log_probability(rows, padded(draws, most), fine, **more)


@pytest.mark.parametrize("blocked", [None, NEIGHBOURS])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 4.0])
def test_each_draw_is_as_probable_as_its_share_of_what_is_left(blocked, temperature):
    allowed = [True, True, True, False, True]
    draws = all_draws(3, allowed, blocked)
    found = log_probability(FIVE, draws, allowed, 3, temperature=temperature, blocked=blocked)
    weights = [chance ** (1 / temperature) for chance in FIVE]
    for row, draw in zip(found.exp().tolist(), draws, strict=True):
        expected = chain(weights, draw, allowed, blocked)
        assert row == pytest.approx([*expected, *[1.0] * (3 - len(draw))])


@pytest.mark.parametrize("blocked", [None, NEIGHBOURS])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("allowed", [[True] * 5, [True, False, True, True, False]])
def test_all_ordered_draws_sum_to_one(blocked, count, allowed):
    draws = all_draws(count, allowed, blocked)
    found = log_probability(FIVE, draws, allowed, count, temperature=0.7, blocked=blocked)
    assert found.sum(dim=1).exp().sum().item() == pytest.approx(1, abs=1e-12)


def test_cells_of_no_attention_come_last_and_all_alike():
    found = log_probability([0.6, 0.4, 0.0, 0.0], [(1, 0, 3, 2)], [True] * 4, 4, temperature=50.0)
    first = 0.4 ** (1 / 50) / (0.4 ** (1 / 50) + 0.6 ** (1 / 50))
    assert found.exp().tolist()[0] == pytest.approx([first, 1.0, 0.5, 1.0])


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-3, 1e3, 1e30])
@pytest.mark.parametrize(
    "attention",
    [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [1e-45, 1.0, 1e-38], [0.2, 0.5, 0.3]],
)
def test_no_attention_or_temperature_breaks_a_draw_in_its_order(attention, temperature):
    order = sorted(range(3), key=lambda cell: -attention[cell])
    chances = torch.tensor([attention], requires_grad=True)
    found = draw_log_probability(
        chances, torch.tensor([order]), ALL[:, :3], temperature=temperature
    )
    assert (found <= 1e-6).all()
    assert found.isfinite().all()
    if temperature >= 1e-3:
        found.sum().backward()
        assert chances.grad.isfinite().all()


@pytest.mark.parametrize("draw", [[0, 0], [3, 0], [0, 1]])
def test_a_draw_that_cannot_be_is_refused(draw):
    with pytest.raises(ValueError, match="a drawn cell"):
        draw_log_probability(
            torch.tensor([FIVE]),
            torch.tensor([draw]),
            torch.tensor([[True, True, True, False, True]]),
            blocked=NEIGHBOURS,
        )


def test_where_no_cell_is_allowed_nothing_is_learned():
    chances = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], requires_grad=True)
    found = draw_log_probability(
        chances,
        torch.tensor([[1, -1], [-1, -1]]),
        torch.tensor([[True] * 3, [False] * 3]),
        blocked=torch.ones(3, 3, dtype=torch.bool),
    )
    with torch.autograd.set_detect_anomaly(True):  # not even on the way
        found.sum().backward()
    assert found.exp().tolist() == [[pytest.approx(0.3), 1.0], [1.0, 1.0]]
    assert chances.grad[1].tolist() == [0, 0, 0]
    assert chances.grad.isfinite().all()


def test_an_empty_draw_has_an_empty_result():
    none, short = (torch.empty(*shape, dtype=torch.long) for shape in ((0, 2), (1, 0)))
    assert draw_log_probability(torch.empty(0, 5), none, ALL[:0, :5]).shape == (0, 2)
    assert draw_log_probability(torch.tensor([FIVE]), short, ALL[:, :5]).shape == (1, 0)


def test_half_precision_becomes_single():
    half = torch.tensor([FIVE], dtype=torch.float16)
    assert draw_log_probability(half, torch.tensor([[1]]), ALL[:, :5]).dtype == torch.float32
    assert mix(half, 0.1, ALL[:, :5]).dtype == torch.float32


def test_independent_probabilities_are_those_of_the_papers():
    found = independent_log_probability(torch.tensor([[0.5, 0.0]]), torch.tensor([[0, 1, -1]]))
    expected = [math.log(0.5 + 1e-10), math.log(1e-10), 0.0]
    assert found.tolist()[0] == pytest.approx(expected, rel=1e-6)


def test_a_mixture_has_its_uniform_share_whatever_is_allowed():
    allowed = torch.tensor([[True, True, False, True, True]])
    (found,) = mix(torch.tensor([FIVE]), 0.2, allowed).tolist()
    expected = [0.8 * chance / 0.75 + 0.2 / 4 for chance in FIVE]
    expected[2] = 0.0
    assert found == pytest.approx(expected)


def test_a_mixture_without_attention_or_cells_has_no_gradient():
    attention = torch.tensor([[0.0, 0.0, 1.0], [0.2, 0.3, 0.5]], requires_grad=True)
    found = mix(attention, 0.0, torch.tensor([[True, True, False], [False] * 3]))
    assert found.tolist() == [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]
    found.square().sum().backward()
    assert attention.grad.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_entropy_is_a_part_of_the_largest_possible():
    attention = torch.tensor([[0.25] * 4, [0.5, 0.25, 0.25, 0.0], [1.0, 0, 0, 0], [0.5, 0.5, 0, 0]])
    allowed = torch.tensor([[True] * 4, [True] * 4, [True] * 4, [True, True, False, False]])
    found = entropy_share(attention, allowed).tolist()
    assert found == pytest.approx([1.0, 1.5 / 2, 0.0, 1.0], abs=1e-6)


def test_entropy_of_no_choice_is_one_and_its_gradient_finite():
    attention = torch.tensor([[0.2, 0.8], [0.2, 0.8], [1.0, 0.0]], requires_grad=True)
    found = entropy_share(attention, torch.tensor([[False, True], [False, False], [True, True]]))
    assert found.tolist() == [1.0, 1.0, 0.0]
    found.sum().backward()
    assert attention.grad.isfinite().all()
    assert attention.grad[:2].eq(0).all()


@pytest.mark.parametrize("max_overlap", [0.0, 0.2, 0.3, 0.5])
def test_cells_are_blocked_as_the_traversal_passes_over_them(max_overlap):
    grid, blocked = Grid(3, 3, 0.5), blocked_cells(Grid(3, 3, 0.5), max_overlap)
    root = Window(0, 0, 64, 64)
    boxes = [root.cell(grid, row, column).box for row, column in grid.cells()]
    for one, other in permutations(range(9), 2):
        (x0, y0, x1, y1), (u0, v0, u1, v1) = boxes[one], boxes[other]
        common = max(min(x1, u1) - max(x0, u0), 0) * max(min(y1, v1) - max(y0, v0), 0)
        assert bool(blocked[one, other]) == (common / 32**2 > max_overlap)


def draw_by_traversals(attention, valid, own, times):
    """Return how often each ordered draw was made at level 1 of as many images."""
    encode = always(np.reshape(attention, (3, 3)), np.array(valid, float))
    found = run(own, encode, roots=[ROOT] * times)
    return Counter(
        tuple(edge.cell for edge in sorted(node.edges, key=lambda edge: edge.order))
        for node in found.nodes[:times]
    )


# At most this chi-square in 9999 of 10000 cases, by degrees of freedom (Wilson and Hilferty).
def most_chi_square(freedom):
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize(
    ("temperature", "max_overlap", "uniform"),
    [(0.5, 1.0, 0.1), (2.0, 0.3, 0.0), (1.0, 0.3, 0.1)],
)
def test_traversals_draw_as_often_as_their_probability(temperature, max_overlap, uniform):
    valid = [True, True, True, False, True, True, True, True, True]
    chances = mix(torch.tensor([ATTENTION], dtype=torch.float64), uniform, torch.tensor([valid]))
    chances = chances[0].tolist()
    blocked = blocked_cells(Grid(3, 3, 0.5), max_overlap)
    own = config(2, (2,), "sample", temperature=temperature, max_overlap=max_overlap)
    times = 1500
    counts = draw_by_traversals(chances, valid, own, times)
    draws = [
        draw
        for draw in all_draws(2, valid, blocked)
        if all(chances[cell] for cell in draw)  # a cell of no attention is never drawn early
    ]
    found = log_probability(chances, draws, valid, 2, temperature=temperature, blocked=blocked)
    expected = dict(zip(draws, (times * found.sum(dim=1).exp()).tolist(), strict=True))
    assert set(counts) <= set(expected)
    assert sum(expected.values()) == pytest.approx(times)
    rare = {draw for draw, count in expected.items() if count < 5}  # these are taken together
    pairs = [(counts[draw], expected[draw]) for draw in draws if draw not in rare]
    pairs += [(sum(counts[d] for d in rare), sum(expected[d] for d in rare))] if rare else []
    assert sum((seen - count) ** 2 / count for seen, count in pairs) < most_chi_square(
        len(pairs) - 1
    )


# Episodes of rollouts.


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    opened = write_readers(tmp_path_factory.mktemp("episodes"))
    yield opened
    for reader in opened:
        reader.close()


@pytest.fixture
def model():
    return tiny_model()


@pytest.fixture
def views(model):
    with views_of(model) as made:
        yield made


def loss_of(episodes, loss):
    """Return the loss of labels and rewards."""
    task = Classification(range(3), reward=loss.reward)
    terms = label_terms(episodes, task, loss)
    by_rewards, _ = policy_terms(episodes, task, loss, Baselines(loss.baseline, 3))
    return total_loss(terms | by_rewards)


def rows_of(episodes, image, level):
    own = (episodes.image == image) & (episodes.level == level)
    return own.nonzero().flatten().tolist()


def test_logits_of_each_level_are_those_of_the_regions_down_to_it(model, views, readers):
    explored = explore(model, views, readers)
    episodes, features = explored.episodes(), explored.found.features
    assert episodes.level_logits.shape == (3, 4, 3)
    for depth in (1, 2, 3):
        for image in range(4):
            own = (episodes.image == image) & (episodes.level <= depth)
            levels = episodes.level[own][None]
            alone = model.aggregate(features[own][None], levels > 0, levels)
            assert torch.allclose(
                episodes.level_logits[depth - 1, image], alone.logits[0], atol=1e-5
            )
            if depth == 3:
                assert torch.allclose(episodes.embedding[image], alone.embedding[0], atol=1e-5)
    assert torch.equal(episodes.logits, episodes.level_logits[-1])


def test_an_image_that_ends_early_keeps_its_logits(model, views, readers, tmp_path):
    own = THREE.changed(min_size=40)
    with open_image(write_geotiff(tmp_path / "small.tif", noise((60, 60)))) as small:
        episodes = explore(model, views, [small, readers[0]], own).episodes()
        alone = explore(model, views, [small], own).episodes()
    assert (episodes.image == 0).sum() == 1
    first, second = episodes.level_logits[:2]
    assert torch.equal(second[0], first[0])
    assert torch.allclose(episodes.logits[0], alone.logits[0], atol=1e-5)
    assert not torch.allclose(second[1], first[1])


def test_the_papers_probability_of_a_region_is_its_own_attention(model, views, readers):
    explored = explore(model, views, readers)
    episodes, found = explored.episodes(), explored.found
    assert episodes.log_p[episodes.level == 1].tolist() == [0.0] * 4
    number = {node: index for index, node in enumerate(found.nodes)}
    checked = 0
    for each in found.rounds:
        for node, chances in zip(each.nodes, probabilities(each), strict=True):
            for edge in node.edges:
                by_hand = math.log(chances[edge.cell] + 1e-10)
                log_p = episodes.log_p[number[edge.node]].item()
                assert log_p == pytest.approx(by_hand, abs=1e-5)
                checked += 1
    assert checked == 4 * (2 + 2)


def test_a_draw_is_as_probable_as_its_cells_in_the_order_they_were_drawn(model, views, readers):
    loss = LossConfig(selection="sample", uniform=0.2, temperature=1.7)
    explored = explore(model, views, readers, TWO, loss)
    episodes = explored.episodes()
    attention = probabilities(explored.found.rounds[0])
    for image in range(4):
        chances = 0.8 * attention[image] + 0.2 / 9
        gumbel = np.random.default_rng([10 + image, *b"root"]).gumbel(size=9)
        first, second = np.argsort(-(np.log(chances) + 1.7 * gumbel))[:2].tolist()
        weights = chances ** (1 / 1.7)
        by_hand = {
            first: math.log(weights[first] / weights.sum()),
            second: math.log(weights[second] / (weights.sum() - weights[first])),
        }
        edges = explored.found.nodes[image].edges
        assert [edge.cell for edge in edges] == sorted(by_hand)
        for edge, row in zip(edges, rows_of(episodes, image, 2), strict=True):
            assert episodes.log_p[row].item() == pytest.approx(by_hand[edge.cell], abs=1e-4)


class Channels(SmallModel):
    """Gives two channels of cell logits, or one with their log-sum."""

    def __init__(self, several):
        super().__init__()
        self.several, self.scale = several, torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, views, positions, score_cells=True):
        features, logits, _ = super().forward(views, positions)
        both = torch.cat([self.scale * logits, logits.flip(1)], dim=2)  # (n, places, 2)
        return EncoderOutput(features, both if self.several else both.logsumexp(2, True), {})


def test_channels_count_by_their_log_sum(readers):
    found = []
    for several in (True, False):
        model = Channels(several)
        with views_of(model) as views:
            explored = explore(model, views, readers, TWO, LossConfig(selection="sample"))
        episodes = explored.episodes()
        (gradient,) = torch.autograd.grad(episodes.log_p.sum(), model.scale)
        found.append((explored.regions(2), episodes.log_p, episodes.entropy, gradient))
    assert found[0][0] == found[1][0]
    for one, other in zip(found[0][1:], found[1][1:], strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def test_samples_of_an_image_lie_side_by_side(model, views, readers):
    loss = LossConfig(selection="sample", samples=3, uniform=0.9)
    explored = explore(model, views, readers[:2], TWO, loss)
    episodes = explored.episodes()
    assert episodes.samples == 3
    assert episodes.targets.tolist() == [0, 0, 0, 2, 2, 2]
    first = episodes.region_logits[episodes.level == 1]
    alone = explore(model, views, readers[:2], TWO).episodes().region_logits[:2]
    for sample in range(6):
        assert torch.allclose(first[sample], alone[sample // 3], atol=1e-5)
    chosen = {tuple(region.path for region in explored.regions(s)) for s in range(6)}
    assert len(chosen) > 2  # they are drawn one by one


def gradients(model, loss, episodes):
    """Return the gradient of each parameter, None where nothing reaches it."""
    names, weights = zip(*model.named_parameters(), strict=True)
    total, _ = loss_of(episodes, loss)
    found = torch.autograd.grad(total, weights, retain_graph=True, allow_unused=True)
    return dict(zip(names, found, strict=True))


def read_chunks(found, *parts):
    return {name: each for name, each in found.items() if name.split(".")[0] in parts}


@pytest.mark.parametrize("rule", ["paper", "free"])
def test_rewards_teach_the_location_module_alone_and_labels_all_the_rest(
    model, views, readers, rule
):
    loss = LossConfig(rule=rule, reinforce=0.0)
    episodes = explore(model.train(), views, readers, THREE, loss).episodes()
    by_labels = gradients(model, loss, episodes)
    by_both = gradients(model, loss.model_copy(update={"reinforce": 1000.0}), episodes)
    location = read_chunks(by_labels, "location")
    assert location
    assert all(each is None or not each.any() for each in location.values())
    rest = ("backbone", "position", "head", "aggregator")
    for name, each in read_chunks(by_labels, *rest).items():
        assert each is not None, name
        assert torch.equal(each, by_both[name]), name
    assert all(each.any() for each in read_chunks(by_labels, "head", "backbone").values())
    moved = [each for each in read_chunks(by_both, "location").values() if each is not None]
    assert sum(bool(each.any()) for each in moved) > len(location) / 2


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("width", [100, 50])
def test_an_image_that_fails_is_left_out_with_all_its_samples(
    model, views, readers, samples, width
):
    """Level 2 has a width of 100, level 3 of 50."""
    loss = LossConfig(selection="sample", samples=samples, reinforce=1.0, label_smoothing=0.1)
    torn = [readers[0], Torn(readers[1], width), readers[2], readers[3]]
    found = explore(model, views, torn, THREE, loss, seeds=[1, 2, 3, 4])
    assert set(found.found.errors) <= set(range(samples, 2 * samples))
    rest, labels = [torn[i] for i in (0, 2, 3)], [LABELS[i] for i in (0, 2, 3)]
    whole = explore(model, views, rest, THREE, loss, seeds=[1, 3, 4], labels=labels)
    one, other = found.episodes(), whole.episodes()
    assert one.targets.tolist() == other.targets.tolist()
    assert torch.equal(one.image, other.image)
    assert torch.equal(one.position, other.position)
    for key, (rows, values) in other.aux.items():
        assert torch.equal(one.aux[key][0], rows)
        assert torch.allclose(one.aux[key][1], values, atol=1e-5)
    (left, left_parts), (right, right_parts) = loss_of(one, loss), loss_of(other, loss)
    assert left_parts == pytest.approx(right_parts, abs=1e-5)
    first, second = gradients(model, loss, one), gradients(model, loss, other)
    for name, each in second.items():
        assert (each is None) == (first[name] is None), name
        assert each is None or torch.allclose(first[name], each, rtol=1e-3, atol=1e-5), name
    assert left.item() == pytest.approx(right.item(), abs=1e-5)


def test_entropy_counts_cells_with_data(model, views, tmp_path):
    image = noise((200, 200))
    image[:, :, 90:] = 0
    path = write_geotiff(tmp_path / "half.tif", image, nodata=0)
    loss = LossConfig(selection="sample", uniform=0.9)
    with open_image(path) as reader:
        explored = explore(model, views, [reader] * 2, TWO, loss)
    shares = probabilities(explored.found.rounds[0])[0] * np.array([1, 1, 0] * 3)
    shares = shares[shares > 0] / shares.sum()
    entropy = -(shares * np.log(shares)).sum() / math.log(6)
    assert explored.episodes().entropy[0].item() == pytest.approx(entropy, abs=1e-5)


def test_siblings_that_overlap_too_much_are_passed_over(model, views, readers):
    own = TWO.changed(keep=(4,), max_overlap=0.3)
    explored = explore(model, views, readers, own, LossConfig(selection="sample"))
    assert explored.episodes().log_p.isfinite().all()
    for image in range(4):
        boxes = [region.window for region in explored.regions(image)[1:]]
        for one, other in permutations(boxes, 2):
            width = min(one.right, other.right) - max(one.left, other.left)
            height = min(one.bottom, other.bottom) - max(one.top, other.top)
            shared = max(width, 0) * max(height, 0) / (one.width * one.height)
            assert shared <= 0.3 + 1e-6


class Prefers(SmallModel):
    """Prefers one cell of the first view, one of the second, and so on."""

    def __init__(self, cells):
        super().__init__()
        self.cells = cells

    def forward(self, views, positions, score_cells=True):
        out = super().forward(views, positions)
        logits = torch.zeros_like(out.cell_logits)
        for row, cell in zip(logits, self.cells, strict=False):
            row[cell] = 9.0
        return out._replace(cell_logits=logits)


@pytest.mark.parametrize(
    ("cells", "images", "keep", "expected"),
    [([4] * 4, 4, 2, 0.0), ([0, 3, 5, 7], 4, 1, 1.0), ([0, 0, 5, 7], 4, 1, 2 / 3), ([4], 1, 2, 1)],
)
def test_choices_are_distinct_as_far_as_images_differ(readers, cells, images, keep, expected):
    model = Prefers(cells)
    with views_of(model) as views:
        found = explore(model, views, readers[:images], TWO.changed(keep=(keep,)))
    assert found.distinct == pytest.approx(expected)
