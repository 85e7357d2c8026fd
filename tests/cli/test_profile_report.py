import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.checkpoints import BACKBONE, VIEW_SIZE, write_tiny
from tnetcli.cli.profile import Timing, as_json, as_text, profile_checkpoint, profile_recipe
from tnetcli.errors import ModelError, UsageError
from tnetcli.geometry import Grid
from tnetcli.models import cost
from tnetcli.models.cost import Counter, Step, steps_of, steps_of_config
from tnetcli.text import table
from tnetcli.traversal.config import TraversalConfig

GRID = Grid(3, 3, 0.5)


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"model: {{classes: 4, backbone: {BACKBONE}, view_size: {VIEW_SIZE}, aggregator: gated}}\n"
        "traversal: {levels: 3, keep: [2, 1]}\n"
    )
    return path


def views(steps):
    return [step.views for step in steps]


def scored(steps):
    return sum(step.views for step in steps if step.scored)


def test_cells_are_scored_only_where_some_are_followed():
    assert steps_of(()) == (Step(1, 1, False),)
    assert steps_of((3,)) == (Step(1, 1, True), Step(2, 3, False))
    assert steps_of((2, 1)) == (Step(1, 1, True), Step(2, 2, True), Step(3, 2, False))


def test_the_root_is_scored_in_vain_only_if_asked_for():
    assert scored(steps_of((), root_always_scored=True)) == 1
    assert steps_of((2,), root_always_scored=True) == steps_of((2,))


@pytest.mark.parametrize(
    ("plan", "expected", "calls"),
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
def test_a_plan_becomes_the_most_it_can_cost(plan, expected, calls):
    steps = steps_of_config(plan, GRID)
    assert views(steps) == expected
    assert scored(steps) == calls


@pytest.mark.parametrize("plan", [
    TraversalConfig(levels=9, keep=(9,)),
    TraversalConfig(levels=9, keep=(), policy="best_first", budget=10**9),
])  # fmt: skip
def test_a_traversal_without_end_is_refused(plan):
    with pytest.raises(UsageError, match="more than 2000 regions"):
        steps_of_config(plan, GRID)


@pytest.mark.parametrize("is_scored", [True, False])
def test_views_shown_at_once_cost_as_much_as_one_by_one(is_scored):
    counter = Counter("tnet", {"backbone": BACKBONE, "view_size": VIEW_SIZE}, classes=4)
    step, model = Step(2, 5, is_scored), counter.model
    shown = torch.empty(5, 3, VIEW_SIZE, VIEW_SIZE, device="meta")
    with FlopCounterMode(display=False) as together, torch.no_grad():
        positions = torch.empty(5, 3, dtype=torch.long, device="meta")
        features = model.encoder(2)(shown, positions, is_scored).features
        levels = torch.ones(1, 5, dtype=torch.long, device="meta")
        model.aggregate(features.unsqueeze(0), levels > 0, levels)
    assert counter.count((step,)) == together.get_total_flops() // 2


def test_a_model_that_computes_while_it_is_built_is_counted_all_the_same(monkeypatch):
    def build(*arguments, real=cost.build_model, **options):
        if torch.empty(0).is_meta:
            raise NotImplementedError("meta tensors hold no numbers")
        return real(*arguments, **options)

    given = ("tnet", {"backbone": BACKBONE, "view_size": VIEW_SIZE})
    expected = Counter(*given, classes=4).count(steps_of((2,)))
    monkeypatch.setattr(cost, "build_model", build)
    assert Counter(*given, classes=4).count(steps_of((2,))) == expected


@pytest.mark.parametrize(
    "error", [ModelError("no stage `99`, not even on meta"), RuntimeError("shapes do not match")]
)
def test_a_model_that_cannot_be_built_takes_no_memory(monkeypatch, error):
    def build(*_, **__):
        assert torch.empty(0).is_meta
        raise error

    monkeypatch.setattr(cost, "build_model", build)
    with pytest.raises(type(error), match=str(error)):
        Counter("tnet", {}, classes=4)


def test_a_level_has_at_most_2000_windows(recipe):
    many = ["model.grid={rows: 50, columns: 50, cell_fraction: 0.5}", "model.view_size=64"]
    with pytest.raises(UsageError, match="--windows is more than 2000: `2001`"):
        profile_recipe(recipe, many, windows=[0, 2001])


def test_parts_add_up_to_the_whole(recipe):
    found = profile_recipe(recipe)
    assert list(found.parts) == [
        "backbone", "location", "position", "aggregator", "head", "baseline",
    ]  # fmt: skip
    assert sum(part.trainable for part in found.parts.values()) == found.parameters.trainable
    assert sum(part.total for part in found.parts.values()) == found.parameters.total
    assert found.parts["head"].trainable == (found.model.feature_size + 1) * 4


def test_rows_are_the_windows_asked_for_and_the_default(recipe):
    found = profile_recipe(recipe, windows=[3, 0, 3])
    assert [(row.windows, row.is_default) for row in found.rows] == [
        (0, False),
        (3, False),
        (4, True),
    ]
    assert views(found.rows[2].steps) == [1, 2, 2]
    assert all(row.milliseconds is None for row in found.rows)


def test_by_default_there_are_0_to_5_windows(recipe):
    found = profile_recipe(recipe)
    assert [row.windows for row in found.rows if not row.is_default] == [0, 1, 2, 3, 4, 5]


def test_a_default_that_is_a_row_already_is_marked_there(recipe):
    found = profile_recipe(recipe, ["traversal.levels=2"], windows=[2, 3])
    assert [(row.windows, row.is_default) for row in found.rows] == [(2, True), (3, False)]


def test_there_are_no_more_windows_than_cells(recipe):
    smaller = ["model.grid={rows: 1, columns: 3, cell_fraction: 0.5}"]
    assert (
        max(row.windows for row in profile_recipe(recipe, smaller).rows if not row.is_default) == 3
    )
    with pytest.raises(UsageError, match="3 cells: `4`"):
        profile_recipe(recipe, smaller, windows=[4])


def test_the_whole_image_has_no_windows(recipe):
    settings = ["model={family: whole, classes: 4, backbone: " + BACKBONE + "}", "traversal={}"]
    (row,) = profile_recipe(recipe, settings).rows
    assert (row.windows, row.is_default) == (0, True)
    with pytest.raises(UsageError, match="has one level: `1`"):
        profile_recipe(recipe, settings, windows=[0, 1])


def test_every_row_is_measured(recipe):
    found = profile_recipe(recipe, windows=[0, 2], timing=Timing("cpu", "fp32", 2))
    assert len(found.rows) == 3
    assert all(row.milliseconds > 0 for row in found.rows)
    assert found.measured["device"] == "cpu"
    assert found.measured["repeats"] == 2


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_the_width_can_be_measured(recipe, precision):
    found = profile_recipe(recipe, windows=[1], timing=Timing("cpu", precision, 1))
    assert json.loads(as_json(found))["measured"]["precision"] == precision


@pytest.mark.parametrize(("family", "expected"), [("tnet", [1, 2, 2]), ("whole", [1])])
def test_a_checkpoint_is_profiled_with_its_own_traversal(tmp_path, family, expected):
    path = write_tiny(tmp_path / "model.safetensors", family)
    found = profile_checkpoint(str(path), timing=Timing("cpu", "fp32", 1))
    (row,) = [row for row in found.rows if row.is_default]
    assert views(row.steps) == expected
    assert (found.model.bands, found.model.classes) == (4, 3)
    assert row.milliseconds > 0


def test_json_holds_everything_on_one_line(recipe):
    text = as_json(profile_recipe(recipe, windows=[0], timing=Timing("cpu", "fp32", 1)))
    assert "\n" not in text
    record = json.loads(text)
    assert record["schema"] == "tnet.profile/2"
    assert record["grid"] == [3, 3, 0.5]
    none, default = record["traversals"]
    assert (none["windows"], none["views"], none["scored"]) == (0, [1], 0)
    assert (default["windows"], default["views"], default["scored"]) == (4, [1, 2, 2], 3)
    assert 0 < none["multiplications"] < default["multiplications"]


@pytest.mark.parametrize("timing", [None, Timing("cpu", "fp32", 1)])
def test_text_is_readable_at_100_columns(recipe, timing):
    text = as_text(profile_recipe(recipe, windows=[0, 1], timing=timing))
    assert max(map(len, text.splitlines()[1:])) <= 100  # the first line is a path
    assert text.isascii()
    assert "4 (default)" in text
    assert "aggregator" in text
    assert ("median of 1 run after" in text) == (timing is not None)


def test_a_table_is_never_cut_off(monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    shown = table("title", ("a", "b"), [("x" * 40, "[red]1"), ("y", "2")])
    lines = shown.splitlines()
    assert lines[0] == "title"
    assert "x" * 40 in shown
    assert "[red]1" in shown
    assert len({len(line) for line in lines[2:]}) == 1


def test_the_whole_image_costs_what_its_own_network_does():
    arguments = {"backbone": "resnet18", "view_size": 128}
    counter = Counter("anchornet", arguments, classes=4)
    alone = Counter("whole", arguments, classes=4).count(steps_of(()))
    named = counter.count(steps_of(()))
    assert counter.count(steps_of((3,))) == named + 3 * alone
    # A step is one of a level, whichever was counted first.
    assert Counter("anchornet", arguments, classes=4).count((Step(2, 1, False),)) == alone


def test_no_more_windows_than_patches_that_can_be_named(tmp_path):
    path = tmp_path / "anchor.yaml"
    path.write_text(
        "model: {family: anchornet, classes: 4, backbone: resnet18, view_size: 224}\n"
        "traversal: {levels: 2, keep: [99]}\n"
    )
    found = profile_recipe(path, windows=[0, 24])
    assert [views(row.steps) for row in found.rows if row.is_default] == [[1, 24]]
    with pytest.raises(UsageError, match="at most 24 patches: `25`"):
        profile_recipe(path, windows=[25])
    with pytest.raises(UsageError, match="at most 5 patches: `6`"):
        profile_recipe(path, ["model.patches=strict"], windows=[6])
    text = as_text(found)
    assert "955 patches of 63, 95 and 111 pixels" in text  # 21^2 + 17^2 + 15^2


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("tnet", "backbone: compact, view_size: 64"),
        ("anchornet", "backbone: compact, view_size: 128"),
        ("two_stream", "backbone: compact, view_size: 64"),
        ("saccader", "view_size: 96, width: 0.125"),
        ("dram", "backbone: compact, view_size: 96, glimpse_size: 32"),
        ("whole", "backbone: compact, view_size: 64"),
    ],
)
def test_the_parts_of_a_model_add_up_to_all_of_it(family, more, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(f"model: {{family: {family}, classes: 4, {more}}}\n")
    found = profile_recipe(path, windows=[0])
    assert sum(part.trainable for part in found.parts.values()) == found.parameters.trainable
    assert sum(part.total for part in found.parts.values()) == found.parameters.total
