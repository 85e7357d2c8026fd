import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.checkpoints import BACKBONE, VIEW_SIZE
from tnetcli.errors import ModelError, UsageError
from tnetcli.geometry import Grid
from tnetcli.models import cost
from tnetcli.models.cost import Counter, Step, steps_of, steps_of_config
from tnetcli.traversal.config import TraversalConfig

GRID = Grid(3, 3, 0.5)


def views(steps):
    return [step.views for step in steps]


def scored(steps):
    return sum(step.views for step in steps if step.scored)


def test_cells_are_scored_only_where_some_are_followed():
    assert steps_of(()) == (Step(1, 1, False),)
    assert steps_of((3,)) == (Step(1, 1, True), Step(2, 3, False))
    assert steps_of((2, 1)) == (Step(1, 1, True), Step(2, 2, True), Step(3, 2, False))


def test_the_root_is_scored_without_need_only_on_request():
    assert scored(steps_of((), root_always_scored=True)) == 1
    assert steps_of((2,), root_always_scored=True) == steps_of((2,))


@pytest.mark.parametrize(
    ("config", "expected", "calls"),
    [
        (TraversalConfig(levels=1, keep=()), [1], 0),
        (TraversalConfig(levels=3, keep=(2, 1)), [1, 2, 2], 3),
        (TraversalConfig(levels=4, keep=(2,)), [1, 2, 4, 8], 7),
        (TraversalConfig(levels=2, keep=(20,)), [1, 9], 1),
        (TraversalConfig(levels=3, keep=(4, 2), budget=7), [1, 4, 2], 5),
        (TraversalConfig(levels=3, keep=(4, 2), budget=1), [1], 1),
        (TraversalConfig(levels=3, keep=(), policy="best_first", budget=4), [1, 1, 1, 1], 4),
        (TraversalConfig(levels=2, keep=(), policy="best_first", budget=99), [1] * 10, 1),
        (TraversalConfig(levels=1, keep=(), policy="best_first", budget=99), [1], 0),
    ],
)
def test_a_config_is_counted_at_its_most_expensive(config, expected, calls):
    steps = steps_of_config(config, GRID)
    assert views(steps) == expected
    assert scored(steps) == calls


@pytest.mark.parametrize("config", [
    TraversalConfig(levels=9, keep=(9,)),
    TraversalConfig(levels=9, keep=(), policy="best_first", budget=10**9),
])  # fmt: skip
def test_a_traversal_of_too_many_regions_is_an_error(config):
    with pytest.raises(UsageError, match="more than 2000 regions"):
        steps_of_config(config, GRID)


@pytest.mark.parametrize("is_scored", [True, False])
def test_a_batch_of_views_costs_as_much_as_single_views(is_scored):
    counter = Counter("tnet", {"backbone": BACKBONE, "view_size": VIEW_SIZE}, classes=4)
    step, model = Step(2, 5, is_scored), counter.model
    shown = torch.empty(5, 3, VIEW_SIZE, VIEW_SIZE, device="meta")
    with FlopCounterMode(display=False) as together, torch.no_grad():
        positions = torch.empty(5, 3, dtype=torch.long, device="meta")
        features = model.encoder(2)(shown, positions, is_scored).features
        levels = torch.ones(1, 5, dtype=torch.long, device="meta")
        model.aggregate(features.unsqueeze(0), levels > 0, levels)
    assert counter.count((step,)) == together.get_total_flops() // 2


def test_a_model_that_computes_while_it_is_built_is_counted(monkeypatch):
    def build(*arguments, real=cost.build_model, **options):
        if torch.empty(0).is_meta:
            raise NotImplementedError("meta tensors hold no numbers")
        return real(*arguments, **options)

    given = ("tnet", {"backbone": BACKBONE, "view_size": VIEW_SIZE})
    expected = Counter(*given, classes=4).count(steps_of((2,)))
    monkeypatch.setattr(cost, "build_model", build)
    assert Counter(*given, classes=4).count(steps_of((2,))) == expected


@pytest.mark.parametrize(
    "error", [ModelError("no stage `99`"), RuntimeError("shapes do not match")]
)
def test_a_model_that_cannot_be_built_allocates_no_memory(monkeypatch, error):
    def build(*_, **__):
        assert torch.empty(0).is_meta
        raise error

    monkeypatch.setattr(cost, "build_model", build)
    with pytest.raises(type(error), match=str(error)):
        Counter("tnet", {}, classes=4)


def test_anchornet_costs_as_much_as_its_two_networks():
    arguments = {"backbone": "resnet18", "view_size": 128}
    counter = Counter("anchornet", arguments, classes=4)
    alone = Counter("whole", arguments, classes=4).count(steps_of(()))
    named = counter.count(steps_of(()))
    assert counter.count(steps_of((3,))) == named + 3 * alone
    assert Counter("anchornet", arguments, classes=4).count((Step(2, 1, False),)) == alone
