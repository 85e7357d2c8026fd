import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
import torch
from tnetcli.training.draws import (
    blocked_cells,
    chosen_log_probability,
    draw_log_probability,
    entropy_share,
    independent_log_probability,
    mix,
)
from tnetcli.visits import Seen

from tnetcli.geometry import Grid, Window
from tnetcli.sections import Loss
from tnetcli.traversal import Plan, traverse

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


def test_the_order_of_a_draw_matters():
    there, back = log_probability(FIVE, [(0, 1), (1, 0)], [True] * 5, 2).sum(dim=1).exp().tolist()
    assert there == pytest.approx(0.35 * 0.05 / 0.65)
    assert back == pytest.approx(0.05 * 0.35 / 0.95)


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


def test_where_everything_is_blocked_nothing_is_learned():
    chances = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.7]], requires_grad=True)
    allowed = torch.tensor([[True, True, True], [False, False, False]])
    found = draw_log_probability(
        chances,
        torch.tensor([[1, -1], [-1, -1]]),
        allowed,
        blocked=torch.ones(3, 3, dtype=torch.bool),
    )
    with torch.autograd.set_detect_anomaly(True):  # not even on the way
        found.sum().backward()
    assert found.exp().tolist() == [[pytest.approx(0.3), 1.0], [1.0, 1.0]]
    assert chances.grad[1].tolist() == [0, 0, 0]
    assert chances.grad.isfinite().all()


@pytest.mark.parametrize("draw", [[0, 0], [3, 0], [0, 1]])
def test_a_draw_that_cannot_be_is_refused(draw):
    with pytest.raises(ValueError, match="a cell was drawn"):
        draw_log_probability(
            torch.tensor([FIVE]),
            torch.tensor([draw]),
            torch.tensor([[True, True, True, False, True]]),
            blocked=NEIGHBOURS,
        )


def test_half_precision_is_not_kept():
    half = torch.tensor([FIVE], dtype=torch.float16)
    assert draw_log_probability(half, torch.tensor([[1]]), ALL[:, :5]).dtype == torch.float32
    assert mix(half, 0.1, ALL[:, :5]).dtype == torch.float32


def test_nothing_drawn_has_an_empty_answer():
    none = torch.empty(0, 2, dtype=torch.long)
    assert draw_log_probability(torch.empty(0, 5), none, torch.ones(0, 5).bool()).shape == (0, 2)
    short = torch.empty(1, 0, dtype=torch.long)
    assert draw_log_probability(torch.tensor([FIVE]), short, ALL[:, :5]).shape == (1, 0)


def test_independent_probabilities_are_those_of_the_papers():
    found = independent_log_probability(torch.tensor([[0.5, 0.0]]), torch.tensor([[0, 1, -1]]))
    expected = [math.log(0.5 + 1e-10), math.log(1e-10), 0.0]
    assert found.tolist()[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("settings", "second"), [({"rule": "paper"}, 0.35), ({"temperature": 1.0}, 0.35 / 0.95)]
)
def test_the_way_of_choosing_decides_what_a_choice_is_worth(settings, second):
    found = chosen_log_probability(
        torch.tensor([FIVE]), torch.tensor([[1, 0]]), ALL[:, :5], Loss(**settings)
    )
    assert found.exp().tolist()[0] == pytest.approx([0.05, second])


def test_a_mixture_has_its_uniform_share_whatever_is_allowed():
    allowed = torch.tensor([[True, True, False, True, True]])
    (found,) = mix(torch.tensor([FIVE]), 0.2, allowed).tolist()
    expected = [0.8 * chance / 0.75 + 0.2 / 4 for chance in FIVE]
    expected[2] = 0.0
    assert found == pytest.approx(expected)


def test_a_mixture_of_nothing_is_nothing_and_has_no_gradient():
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


@pytest.mark.parametrize("most_shared", [0.0, 0.2, 0.3, 0.5])
def test_cells_are_blocked_as_the_walk_passes_over_them(most_shared):
    grid, blocked = Grid(3, 3, 0.5), blocked_cells(Grid(3, 3, 0.5), most_shared)
    root = Window(0, 0, 64, 64)
    boxes = [root.cell(grid, row, column).box for row, column in grid.cells()]
    for one, other in permutations(range(9), 2):
        (x0, y0, x1, y1), (u0, v0, u1, v1) = boxes[one], boxes[other]
        common = max(min(x1, u1) - max(x0, u0), 0) * max(min(y1, v1) - max(y0, v0), 0)
        assert bool(blocked[one, other]) == (common / 32**2 > most_shared)


def test_nothing_is_blocked_where_all_may_be_shared():
    assert blocked_cells(Grid(3, 3, 0.5), 1.0) is None


def draw_with_the_walk(attention, valid, plan, times):
    """Return how often each ordered draw was made at level 1 of as many images."""
    grid = Grid(3, 3, 0.5)
    seen = Seen(np.array(attention).reshape(3, 3), np.array(valid, float).reshape(3, 3))
    roots = [Window(0, 0, 1024, 1024)] * times
    walk = traverse(roots, lambda places: [seen] * len(places), grid, plan, seeds=range(times))
    return Counter(
        tuple(3 * c.row + c.column for c in sorted(visit.followed, key=lambda c: c.order))
        for visit in walk.visits[:times]
    )


# At most this chi-square in 9999 of 10000 cases, by degrees of freedom (Wilson and Hilferty).
def most_chi_square(freedom):
    return freedom * (1 - 2 / (9 * freedom) + 3.719 * math.sqrt(2 / (9 * freedom))) ** 3


@pytest.mark.parametrize(
    ("temperature", "most_shared", "uniform"),
    [(0.5, 1.0, 0.1), (2.0, 0.3, 0.0), (1.0, 0.3, 0.1)],
)
def test_the_walk_draws_as_often_as_we_say(temperature, most_shared, uniform):
    valid = [True, True, True, False, True, True, True, True, True]
    chances = mix(torch.tensor([ATTENTION], dtype=torch.float64), uniform, torch.tensor([valid]))
    chances = chances[0].tolist()
    blocked = blocked_cells(Grid(3, 3, 0.5), most_shared)
    plan = Plan(2, (2,), "sample", temperature, most_shared=most_shared)
    times = 1500
    counts = draw_with_the_walk(chances, valid, plan, times)
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
