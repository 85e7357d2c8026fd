import json
import os
import sys

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.runs import recipe_of
from tnetcli.errors import MissingExtraError, ModelError, OutputError
from tnetcli.training.recipe import read_recipe
from tnetcli.training.run_dir import Progress, RunFolder


@pytest.fixture
def recipe(tmp_path):
    return recipe_of(tmp_path / "images.csv")


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "runs" / "one")


def begin(folder, recipe, resume=False, overwrite=False):
    folder.start(recipe, resume=resume, overwrite=overwrite)


def refused(call, *arguments, **options):
    with pytest.raises(OutputError) as caught:
        call(*arguments, **options)
    assert caught.value.exit_code == 7
    assert caught.value.hint
    return str(caught.value)


def test_a_new_folder_holds_the_recipe_as_run(folder, recipe):
    begin(folder, recipe)
    assert read_recipe(folder.recipe) == recipe


def test_the_recipe_in_the_folder_finds_its_files_from_anywhere(folder, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    begin(folder, recipe_of("images.csv"))
    monkeypatch.chdir(tmp_path)
    again = read_recipe(folder.recipe)
    assert again.data.path == tmp_path / "here" / "images.csv"
    begin(folder, recipe_of("here/images.csv"), resume=True)


def test_two_do_not_train_into_one_folder(folder):
    other = RunFolder(folder.path)
    with folder.locked():
        assert "another process is training" in refused(enter, other)
    with other.locked():
        pass


def enter(folder):
    with folder.locked():
        pass


def test_the_lock_file_of_a_killed_run_does_not_block(folder):
    folder.path.mkdir(parents=True)
    (folder.path / ".training").touch()
    enter(folder)


def test_a_folder_with_a_run_is_refused(folder, recipe):
    begin(folder, recipe)
    assert "holds a run already" in refused(begin, folder, recipe)


@pytest.mark.parametrize("resume", [False, True])
def test_somebody_elses_model_is_not_removed_unasked(folder, recipe, resume):
    folder.path.mkdir(parents=True)
    folder.model.write_bytes(b"mine")
    refused(begin, folder, recipe, resume=resume)
    assert folder.model.read_bytes() == b"mine"
    begin(folder, recipe, overwrite=True)
    assert not folder.model.exists()


def test_overwriting_removes_all_of_the_old_run_and_nothing_else(folder, recipe):
    begin(folder, recipe)
    notes = folder.path / "notes.txt"
    folder.events.mkdir()
    notes.write_text("mine")
    for path in (folder.model, folder.last, folder.metrics, folder.curves, folder.samples,
                 folder.state, folder.of_stage("look"),
                 folder.events / "events.out.tfevents.1.host"):  # fmt: skip
        path.write_bytes(b"old")
    begin(folder, recipe_of(None, seed=3), overwrite=True)
    assert set(folder.path.rglob("*")) == {folder.recipe, notes, folder.events}
    assert read_recipe(folder.recipe).seed == 3


def test_a_run_is_resumed_by_the_same_recipe_only(folder, recipe):
    begin(folder, recipe)
    folder.metrics.write_text("{}\n")
    begin(folder, recipe, resume=True)
    assert folder.metrics.exists()
    other = recipe.model_copy(update={"seed": 5})
    assert "another recipe" in refused(begin, folder, other, resume=True)


def test_a_file_in_place_of_the_folder_is_an_output_error(tmp_path, recipe):
    (tmp_path / "file").touch()
    assert "cannot use the folder" in refused(begin, RunFolder(tmp_path / "file" / "run"), recipe)
    refused(begin, RunFolder(tmp_path / "file"), recipe)


def test_resuming_in_an_empty_folder_starts_a_run(folder, recipe):
    begin(folder, recipe, resume=True)
    assert folder.recipe.exists()


def test_a_check_creates_and_removes_nothing(folder, recipe):
    folder.check(recipe)
    assert not folder.path.exists()
    begin(folder, recipe)
    refused(folder.check, recipe)
    folder.check(recipe, overwrite=True)
    assert folder.recipe.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_an_output_error(tmp_path, recipe):
    tmp_path.chmod(0o500)
    try:
        refused(begin, RunFolder(tmp_path / "run"), recipe)
    finally:
        tmp_path.chmod(0o700)


def rows(*steps):
    return [{"step": step, "loss": step / 3} for step in steps]


def test_a_line_that_was_cut_off_is_no_line(folder, recipe):
    begin(folder, recipe)
    for row in rows(1, 2, 3):
        folder.append(row)
    text = folder.metrics.read_text()
    folder.metrics.write_text(text[:-7])
    assert folder.rows() == rows(1, 2)
    folder.truncate(2)
    folder.append(rows(3)[0])
    assert [json.loads(line) for line in folder.metrics.read_text().splitlines()] == rows(1, 2, 3)


def test_lines_that_are_no_metrics_are_left_out(folder, recipe):
    begin(folder, recipe)
    lines = ["[" * 100_000, "7", "{}", '{"step": "a"}', '{"step": NaN}', '{"step": 1, "loss": 2.5}']
    folder.metrics.write_text("\n".join(lines) + "\n")
    assert folder.rows() == [{"step": 1, "loss": 2.5}]
    folder.truncate(1)
    assert folder.rows() == [{"step": 1, "loss": 2.5}]


def test_what_is_no_number_is_never_written(folder, recipe):
    begin(folder, recipe)
    with pytest.raises(ValueError, match="JSON"):
        folder.append({"step": 1, "loss": float("nan")})


def test_figures_that_cannot_be_written_are_an_output_error(folder, recipe):
    begin(folder, recipe)
    folder.metrics.mkdir()
    assert "metrics.jsonl" in refused(folder.append, rows(1)[0])


def test_a_state_comes_back_to_the_last_bit(folder, recipe):
    begin(folder, recipe)
    assert folder.load_state() == (Progress(), {})
    base = torch.randn(2, 6, 3, 3, generator=torch.Generator().manual_seed(0))
    tensors = {
        "weight": base.to(memory_format=torch.channels_last),
        "part": base[:, 2:4],
        "step": torch.tensor(7.0),
        "count": torch.tensor(3),
        "empty": torch.zeros(0),
    }
    reported = Progress(2, 17, best=1 / 3, since_best=4, pending=({"loss": 0.1 + 0.2},))
    folder.save_state(reported, tensors)
    progress, found = folder.load_state()
    assert progress == reported
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    assert all(found[name].dtype == value.dtype for name, value in tensors.items())


def test_a_truncated_state_is_a_model_error(folder, recipe):
    begin(folder, recipe)
    folder.save_state(Progress(0, 1), {"a": torch.zeros(100)})
    folder.state.write_bytes(folder.state.read_bytes()[:-50])
    with pytest.raises(ModelError, match="not a valid"):
        folder.load_state()


def test_a_new_state_replaces_the_old(folder, recipe):
    begin(folder, recipe)
    folder.save_state(Progress(0, 1), {"a": torch.zeros(2)})
    folder.save_state(Progress(0, 2), {"a": torch.ones(2)})
    progress, found = folder.load_state()
    assert (progress, found["a"].tolist()) == (Progress(0, 2), [1, 1])
    assert set(folder.path.iterdir()) == {folder.recipe, folder.state}


@pytest.mark.parametrize("text", ["{}", "[1]", "nothing", '{"stage": 0, "step": 1, "more": 2}'])
def test_a_file_that_is_no_state_is_a_model_error(folder, recipe, text):
    from tnetcli.models.checkpoint import STATE_KEY as KEY
    from tnetcli.models.checkpoint import write_tensor_file

    begin(folder, recipe)
    write_tensor_file(folder.state, {"a": torch.zeros(1)}, (KEY, text))
    with pytest.raises(ModelError, match="not the state of a run") as caught:
        folder.load_state()
    assert "--overwrite" in caught.value.hint


@pytest.mark.parametrize("name", ["recipe.yaml", "metrics.jsonl", ".training"])
def test_a_pipe_in_a_run_folder_is_refused_and_not_waited_for(folder, recipe, name):
    begin(folder, recipe)
    (folder.path / name).unlink(missing_ok=True)
    os.mkfifo(folder.path / name)

    def resume():
        folder.start(recipe, resume=True, overwrite=False)
        folder.truncate(0)
        enter(folder)

    assert "regular file" in refused(resume)


@pytest.mark.parametrize("text", ["a: " + "[" * 100_000, "a: &a [*a]", "1" * 5000, "\udc00"])
def test_a_recipe_that_cannot_be_read_is_another_one(folder, recipe, text):
    begin(folder, recipe)
    folder.recipe.write_text(text, errors="surrogatepass")
    refused(begin, folder, recipe, resume=True)


def test_metrics_are_written_for_tensorboard_as_well(folder, recipe):
    begin(folder, recipe)
    with folder.tensorboard():
        folder.append({"stage": "train", "step": 7, "loss": 0.5, "accuracy": [0.25, 0.75]})
        folder.append({"stage": "train", "step": 7, "validation": {"loss": 0.25, "hit": [0.5]}})
    found = EventAccumulator(str(folder.events)).Reload()
    values = {
        tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]
    }
    assert values == {
        "train/loss": [(7, 0.5)],
        "train/accuracy-1": [(7, 0.25)],
        "train/accuracy-2": [(7, 0.75)],
        "validation/loss": [(7, 0.25)],
        "validation/hit-1": [(7, 0.5)],
    }


def test_without_the_package_the_extra_is_named(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match="tensorboard") as caught, folder.tensorboard():
        pass
    assert "tnetcli[tensorboard]" in caught.value.hint
