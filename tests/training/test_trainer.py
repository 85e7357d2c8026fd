import math
from dataclasses import replace

import pytest
import torch

from tests.runs import (
    Ears,
    changed,
    copied,
    prepare,
    recipe_of,
    without_times,
    write_images,
)
from tests.small_model import SmallModel
from tests.synth.test_landscape import BACKGROUND, RULES, SITES, tile_files
from tests.synth.test_tiles import write_zip
from tnetcli.errors import ManifestError, ModelError, UsageError
from tnetcli.training import stages
from tnetcli.training.run_dir import StoppedError
from tnetcli.training.trainer import StageState, mean_rows, merge_processes, train

pytestmark = pytest.mark.usefixtures("small_family")
# All that could differ between a run and one that is gone on with.
RICH = {
    "augmentation": {"flip": "both", "crop": [0.6, 1.0], "colour": True},
    "loss": {"selection": "sample", "samples": 2, "baseline": "per_level", "l2": 1e-4},
    "optimizer": {"kind": "adamw", "accumulate": 2, "clip": 1.0},
    "training": {
        "batch_size": 2,
        "threads": 1,
        "log_every": 2,
        "validate_every": 2,
        "average": 0.9,
        "device": "cpu",
    },
    "stages": [
        {"name": "near", "steps": 3, "levels": 2, "dropout": 0.5},
        {"name": "far", "steps": 3, "levels": 3, "keep": [2, 1], "freeze": ["position"]},
    ],
}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    return write_zip(tmp_path_factory.mktemp("tiles") / "tiles.zip", tile_files())


@pytest.fixture(scope="module")
def rich(images, tmp_path_factory):
    """Return the recipe of everything, and a run of it that nothing has disturbed."""
    recipe = recipe_of(images, **RICH)
    run = prepare(recipe, tmp_path_factory.mktemp("whole"))
    train(run)
    return recipe, run


def mosaic(tiles, **sections):
    return recipe_of(
        None,
        model={**recipe_of(None).as_data()["model"], "classes": list(RULES.classes)},
        data={
            "kind": "mosaic",
            "path": str(tiles),
            "landscape": {"size": 128, "background": BACKGROUND, "sites": SITES, "validation": 2},
        },
        **sections,
    )


def finished(recipe, folder, **options):
    run = prepare(recipe, folder, **options)
    train(run)
    return run


def go_on(recipe, folder, stop_after=None, checkpointer=None):
    """Resume as a new process would: from what is on disk, whatever the weights were."""
    run = prepare(recipe, folder, ears=Ears(stop_after))
    if checkpointer is not None:
        run = replace(run, checkpointer=checkpointer)
    with torch.no_grad():
        for weight in run.model.parameters():
            weight.add_(1.0)
    torch.manual_seed(12345)
    train(run, resume=True)
    return run


def stopped(recipe, folder, after):
    run = prepare(recipe, folder, ears=Ears(after))
    with pytest.raises(StoppedError):
        train(run)
    return run


def same_runs(one, other):
    assert not changed(one.checkpointer.best, other.checkpointer.best)
    assert one.checkpointer.stages.keys() == other.checkpointer.stages.keys()
    for stage, weights in one.checkpointer.stages.items():
        assert not changed(weights, other.checkpointer.stages[stage])
    assert without_times(one.folder.rows()) == without_times(other.folder.rows())


def test_metrics_are_reported_as_they_are_written(rich):
    _, run = rich
    rows = run.folder.rows()
    assert run.callback.stages == ["near", "far"]
    assert [row["step"] for row in rows if "loss" in row] == [2, 3, 5, 6]
    assert [row["step"] for row in rows if "validation" in row] == [2, 3, 5, 6]
    assert [row for row in rows if "loss" in row] == run.callback.rows
    assert [row["validation"] for row in rows if "validation" in row] == run.callback.validations
    assert [len(row["accuracy"]) for row in run.callback.rows] == [2, 2, 3, 3]
    for row in run.callback.rows:
        assert {"loss", "entropy", "distinct", "lr", "windows_per_second"} <= row.keys()
    # 2 images, 2 samples of each: 1 + 2 windows, or 1 + 2 + 2
    assert [row["windows"] for row in run.callback.rows] == [12, 12, 20, 20]


def test_stopping_after_every_single_step_changes_nothing(rich, tmp_path):
    recipe, whole = rich
    run = stopped(recipe, tmp_path, 1)
    for _ in range(3):  # at the end of a stage the next begins
        with pytest.raises(StoppedError):
            go_on(recipe, tmp_path, 1, run.checkpointer)
    last = go_on(recipe, tmp_path, 1, run.checkpointer)  # the last step ends the run
    same_runs(whole, last)
    assert last.folder.state.read_bytes() == whole.folder.state.read_bytes()


@pytest.mark.parametrize(
    ("family", "arguments", "levels"),
    [
        ("anchornet", {"backbone": "compact", "view_size": 119}, 2),
        ("two_stream", {"backbone": "compact", "view_size": 32, "state_size": 8}, 2),
        ("saccader", {"view_size": 93, "width": 1 / 16, "glimpses": 2}, 1),
        (
            "dram",
            {"backbone": "compact", "view_size": 48, "glimpse_size": 24, "state_size": 8},
            1,
        ),
        ("whole", {"backbone": "compact", "view_size": 32}, 1),
    ],
    ids=["anchornet", "two_stream", "saccader", "dram", "whole"],
)
def test_every_family_resumes_as_if_never_stopped(images, tmp_path, family, arguments, levels):
    recipe = recipe_of(
        images,
        model={"family": family, "classes": 2, "dropout": 0.5, **arguments},
        traversal={"levels": levels, "keep": [1], "min_size": 16},
        training={"batch_size": 2},
        stages=[{"steps": 3}],
    )
    whole = finished(recipe, tmp_path / "whole")
    run = stopped(recipe, tmp_path / "parts", 2)
    same_runs(whole, go_on(recipe, tmp_path / "parts", checkpointer=run.checkpointer))


class Crash(Exception):
    pass


def test_a_run_that_crashed_goes_on_from_its_last_state(rich, tmp_path, monkeypatch):
    recipe, whole = rich
    run = prepare(recipe, tmp_path)

    def crash(row, done, steps):
        if row["step"] == 5:
            raise Crash

    monkeypatch.setattr(run.callback, "step", crash)
    with pytest.raises(Crash):
        train(run)
    assert run.folder.rows()[-1]["step"] == 5  # which is done again
    with run.folder.metrics.open("a") as file:
        file.write('{"stage": "far", "step": 6, "lo')  # and a line was cut off
    same_runs(whole, go_on(recipe, tmp_path, checkpointer=run.checkpointer))


def test_a_run_that_crashed_before_its_first_state_starts_again(images, tmp_path):
    recipe = recipe_of(images, stages=[{"steps": 2}], training={"validate_every": 2})
    run = prepare(recipe, tmp_path / "run")
    run.folder.metrics.write_text('{"stage": "train", "step": 1, "loss": 1.0}\n')
    train(run, resume=True)
    same_runs(finished(recipe, tmp_path / "whole"), run)


def test_flat_attention_is_warned_about_and_another_seed_gives_other_weights(images, tmp_path):
    recipe = recipe_of(images, stages=[{"steps": 1}], model={"temperature": 100.0})
    run = finished(recipe, tmp_path / "0")
    assert any("attention is flat" in text for text in run.callback.warnings)
    other = finished(recipe.model_copy(update={"seed": 1}), tmp_path / "1")
    assert changed(run.checkpointer.best, other.checkpointer.best)


def test_going_on_with_a_finished_run_changes_nothing(rich, tmp_path):
    recipe, whole = rich
    run = finished(recipe, tmp_path)
    rows = run.folder.rows()
    again = go_on(recipe, tmp_path, checkpointer=run.checkpointer)
    same_runs(whole, again)
    assert again.folder.rows() == rows
    assert again.callback.rows == []


@pytest.mark.parametrize("kind", ["adam", "sgd"])
def test_every_optimizer_can_be_resumed(images, tmp_path, kind):
    recipe = recipe_of(images, stages=[{"steps": 3}], optimizer={"kind": kind})
    whole = finished(recipe, tmp_path / "whole")
    run = stopped(recipe, tmp_path / "run", 2)
    same_runs(whole, go_on(recipe, tmp_path / "run", checkpointer=run.checkpointer))


def test_stages_of_tiles_and_of_scenes_can_be_resumed(tiles, tmp_path):
    recipe = mosaic(
        tiles,
        stages=[
            {"name": "tiles", "learn": "tiles", "steps": 2, "tiles": {"views": [3, 2]}},
            {"name": "look", "steps": 2, "freeze": ["backbone"], "replay": 2, "batch_size": 2},
        ],
    )
    whole = finished(recipe, tmp_path / "whole")
    run = stopped(recipe, tmp_path / "run", 1)
    with pytest.raises(StoppedError):
        go_on(recipe, tmp_path / "run", 2, run.checkpointer)
    same_runs(whole, go_on(recipe, tmp_path / "run", checkpointer=run.checkpointer))
    first, second = whole.checkpointer.stages["tiles"], whole.checkpointer.stages["look"]
    start = copied(prepare(recipe, tmp_path / "start").model)
    assert parts_of(changed(start, first)) == {"backbone", "position", "head"}
    assert "backbone" not in parts_of(changed(first, second))
    assert "location" in parts_of(changed(first, second))
    tile_row, scene_row = whole.callback.rows[0], whole.callback.rows[-1]
    assert {"dense", "window", "window_accuracy"} <= tile_row.keys()
    assert "entropy" in scene_row
    assert len(whole.callback.validations) == 2  # a stage of tiles has none


def parts_of(names):
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("part", ["backbone", "location"])
def test_a_frozen_part_stays_as_it_is_with_its_statistics(images, tmp_path, part):
    recipe = recipe_of(
        images, stages=[{"steps": 2, "freeze": [part]}], training={"validate_every": 2}
    )
    run = prepare(recipe, tmp_path)
    before = copied(run.model)
    train(run)
    moved = parts_of(changed(before, copied(run.model)))
    assert moved == {"backbone", "location", "position", "aggregator", "head", "baseline"} - {part}


@pytest.mark.parametrize("average", [0.9])
def test_the_baseline_is_kept_with_the_model(images, tmp_path, average):
    recipe = recipe_of(images, stages=[{"steps": 2}], training={"average": average})
    run = finished(recipe, tmp_path)
    _, tensors = run.folder.load_state()
    sequence, _, cells = tensors["module.1.0.values"].flatten().tolist()
    assert changed(copied(run.model), run.checkpointer.stages["train"])  # that is the average
    found = run.checkpointer.stages["train"]["baseline"].item()
    assert found == pytest.approx((sequence + cells) / 2)
    assert found != 0.5


def test_steps_follow_the_schedule(images, tmp_path):
    recipe = recipe_of(
        images,
        stages=[{"steps": 4}],
        optimizer={"lr": 0.02, "backbone_lr": 0.001},
        schedule={"kind": "step", "warmup": 0.5, "drops": [0.75], "factor": 0.1},
    )
    rows = finished(recipe, tmp_path).callback.rows
    assert [row["lr"] for row in rows] == pytest.approx([0.01, 0.02, 0.02, 0.002])


SGD = {"kind": "sgd", "lr": 0.05, "momentum": 0.0, "weight_decay": 0.0}
PLAIN = {"schedule": {"kind": "constant", "warmup": 0.0}, "loss": {"rule": "paper"}}


def small_run(images, folder, ears=None, **sections):
    """Return a run of a model that has no batch norm."""
    sections = {"optimizer": SGD, **PLAIN, **sections}
    recipe = recipe_of(images, **sections)
    return prepare(recipe, folder, model=SmallModel(classes=2), ears=ears)


@pytest.mark.parametrize("levels", [1, 2])
def test_two_batches_a_step_are_one_of_twice_the_size(images, tmp_path, levels):
    weights = []
    for size, accumulate in ((4, 1), (2, 2)):
        run = small_run(
            images,
            tmp_path / str(size),
            stages=[{"steps": 3, "levels": levels, "batch_size": size}],
            optimizer={**SGD, "accumulate": accumulate},
        )
        train(run)
        weights.append(run.checkpointer.stages["train"]["head.weight"])
    assert torch.allclose(*weights, atol=1e-6)
    assert changed({"w": SmallModel(classes=2).head.weight}, {"w": weights[0]})


@pytest.mark.parametrize(("clip", "longest"), [(0.01, 0.05 * 0.01), (None, math.inf)])
def test_clipping_bounds_the_step(images, tmp_path, clip, longest):
    run = small_run(images, tmp_path, stages=[{"steps": 1}], optimizer={**SGD, "clip": clip})
    before = [weight.detach().clone() for weight in run.model.parameters()]
    train(run)
    moved = (
        torch.cat(
            [
                (after.detach() - start).flatten()
                for start, after in zip(before, run.model.parameters(), strict=True)
            ]
        )
        .norm()
        .item()
    )
    assert moved <= longest * (1 + 1e-4)
    assert moved >= 0.05 * 0.01 * (1 - 1e-4)


@pytest.mark.parametrize("levels", [1, 2])
def test_a_loss_that_is_no_number_ends_the_run_and_the_last_model_survives(
    images, tmp_path, levels
):
    recipe = recipe_of(
        images,
        traversal={"levels": levels},
        stages=[{"name": "good", "steps": 2}, {"name": "bad", "steps": 6}],
    )
    explosive = recipe.stages[1].model_copy(
        update={"optimizer": recipe.stages[1].optimizer.model_copy(update={"lr": 1e30})}
    )
    recipe = recipe.model_copy(update={"stages": (recipe.stages[0], explosive)})
    run = prepare(recipe, tmp_path)
    with pytest.raises(ModelError, match="not a number") as caught:
        train(run)
    assert caught.value.exit_code == 5
    assert caught.value.hint
    _, tensors = run.folder.load_state()
    assert all(value.isfinite().all() for value in tensors.values())
    assert all(value.isfinite().all() for value in run.checkpointer.best.values())
    assert all(math.isfinite(row["loss"]) for row in run.folder.rows() if "loss" in row)


def test_weights_that_are_no_numbers_are_never_kept(images, tmp_path, monkeypatch):
    run = prepare(recipe_of(images, stages=[{"steps": 2}]), tmp_path)
    apply_gradients, calls = StageState.apply_gradients, []

    def poison(state):
        apply_gradients(state)
        calls.append(state)
        if len(calls) == 2:  # the loss is finite, the gradient is not
            with torch.no_grad():
                run.model.head.weight[0, 0] = float("nan")

    monkeypatch.setattr(StageState, "apply_gradients", poison)
    with pytest.raises(ModelError, match="step 2 of stage `train`"):
        train(run)
    progress, tensors = run.folder.load_state()
    assert progress.step == 1
    assert tensors["module.0.0.head.weight"].isfinite().all()


def worse_and_worse(monkeypatch, losses):
    given, usual = iter(losses), stages.validate

    def validate(*arguments, **options):
        found = usual(*arguments, **options)
        return replace(found, row={**found.row, "loss": next(given), "accuracy": [0.5]})

    monkeypatch.setattr(stages, "validate", validate)


def test_the_best_model_is_kept_and_patience_ends_a_stage(images, tmp_path, monkeypatch):
    worse_and_worse(monkeypatch, [0.5, 0.4, 0.6, 0.7, 0.3])
    recipe = recipe_of(
        images,
        stages=[{"name": "long", "steps": 9}, {"name": "next", "steps": 1}],
        training={"validate_every": 1, "patience": 2, "best_by": "loss"},
    )
    run = finished(recipe, tmp_path)
    assert run.callback.best == [True, True, False, False, True]
    assert any("no gain in 2 validations" in text for text in run.callback.warnings)
    assert [row["step"] for row in run.callback.rows] == [1, 2, 3, 4, 10]


def test_a_stage_that_patience_ended_is_not_resumed(images, tmp_path, monkeypatch):
    worse_and_worse(monkeypatch, [0.5, 0.6, 0.7])
    recipe = recipe_of(
        images,
        stages=[{"steps": 9}],
        training={"validate_every": 1, "patience": 2, "best_by": "loss"},
    )
    run = finished(recipe, tmp_path)
    again = go_on(recipe, tmp_path, checkpointer=run.checkpointer)
    assert again.callback.rows == []
    assert len(again.folder.rows()) == 6


def test_the_best_by_accuracy_is_not_the_best_by_loss(images, tmp_path, monkeypatch):
    worse_and_worse(monkeypatch, [0.5, 0.4])
    recipe = recipe_of(images, stages=[{"steps": 2}], training={"validate_every": 1})
    assert finished(recipe, tmp_path).callback.best == [True, False]  # 50 % both times


def test_an_epoch_is_as_many_steps_as_there_are_whole_batches(images, tmp_path):
    recipe = recipe_of(
        images,
        stages=[{"epochs": 2, "batch_size": 3}, {"name": "b", "epochs": 3}],
        optimizer={"accumulate": 2},
    )
    run = finished(recipe, tmp_path)  # 8 images: 2 x 2 batches of 3, and 3 x 2 of 4
    assert [row["step"] for row in run.callback.rows] == [1, 2, 3, 4, 5]


def test_epochs_are_not_resumed_by_steps_of_other_sizes(images, tmp_path):
    """As with another number of processes: figures would be of other steps than their numbers."""
    stages = [{"epochs": 2}]
    stopped(recipe_of(images, stages=stages), tmp_path, after=1)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(UsageError, match="a step had 4 images and would have 2 now") as caught:
        go_on(recipe_of(images, stages=[{"epochs": 2, "batch_size": 2}]), tmp_path)
    assert "as many processes as before" in caught.value.hint
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_steps_of_other_sizes_are_warned_of(images, tmp_path):
    stopped(recipe_of(images, stages=[{"steps": 3}]), tmp_path, after=1)
    run = go_on(recipe_of(images, stages=[{"steps": 3, "batch_size": 2}]), tmp_path)
    assert run.callback.warnings[0].startswith("a step had 4 images and would have 2 now")
    assert [row["step"] for row in run.folder.rows() if "validation" not in row] == [1, 2, 3]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_on_a_processor(images, tmp_path, precision):
    recipe = recipe_of(
        images, stages=[{"steps": 2}], training={"precision": precision, "validate_every": 2}
    )
    run = prepare(recipe, tmp_path)
    before = copied(run.model)
    train(run)
    assert parts_of(changed(before, copied(run.model))) >= {"backbone", "location", "head"}
    assert all(value.dtype != torch.float16 for value in run.model.state_dict().values())
    assert all(math.isfinite(row["loss"]) for row in run.callback.rows)


def test_the_scale_of_gradients_in_half_precision_is_resumed(images, tmp_path):
    recipe = recipe_of(images, stages=[{"steps": 3}], training={"precision": "fp16"})
    whole = finished(recipe, tmp_path / "whole")
    run = stopped(recipe, tmp_path / "run", 2)
    same_runs(whole, go_on(recipe, tmp_path / "run", checkpointer=run.checkpointer))


def test_attention_alone_may_learn_even_where_there_is_nothing_to_choose(images, tmp_path):
    parts = ["backbone", "position", "aggregator", "head"]
    recipe = recipe_of(
        images,
        stages=[
            {"steps": 1, "freeze": parts},
            {"name": "one", "steps": 1, "freeze": parts, "levels": 1},
        ],
    )
    run = prepare(recipe, tmp_path)
    before = copied(run.model)
    train(run)
    assert parts_of(changed(before, run.checkpointer.stages["train"])) == {"location", "baseline"}
    assert run.callback.rows[1]["accuracy"]


def test_metrics_are_averaged_over_the_rows_that_have_them():
    rows = [
        {"loss": 9.0},
        {"loss": 1.0, "accuracy": [0.0, 1.0], "entropy": 0.5},
        {"loss": 2.0, "accuracy": [1.0]},
        {"loss": 4.0, "accuracy": [0.5, 0.5], "entropy": 0.25},
    ]
    assert mean_rows(rows) == {"loss": 4.0, "accuracy": [0.5, 0.75], "entropy": 0.375}


def test_metrics_of_processes_are_weighted_by_their_images():
    one = {"loss": 1.0, "accuracy": [0.5, 1.0], "windows": 6}
    two = {"loss": 3.0, "accuracy": [1.0], "windows": 2, "entropy": 0.25}
    merged = {"loss": 1.5, "accuracy": [0.625, 1.0], "windows": 8, "entropy": 0.25}
    assert merge_processes([(one, 3), (two, 1), ({}, 0)]) == merged
    assert merge_processes([(one, 3)]) is one
    with pytest.raises(ManifestError, match="no process can read any image of a step"):
        merge_processes([({}, 0), ({}, 0)])
