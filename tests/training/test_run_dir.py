import json
import os

import pytest
import torch

from tests.runs import recipe_of
from tnetcli.errors import ModelError, OutputError
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
    with folder.claimed():
        assert "another tnet is training" in refused(enter, other)
        assert folder.claim.exists()
    assert not folder.claim.exists()
    with other.claimed():
        pass


def enter(folder):
    with folder.claimed():
        pass


def test_what_a_killed_training_left_keeps_nobody_out(folder):
    folder.path.mkdir(parents=True)
    folder.claim.touch()
    enter(folder)


def test_a_claim_that_was_just_taken_away_is_none(folder, monkeypatch):
    monkeypatch.setattr(
        "tnetcli.training.run_dir.try_lock", lambda file: folder.claim.unlink() or True
    )
    assert "another tnet is training" in refused(enter, folder)


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


def test_a_run_is_gone_on_with_by_the_same_recipe_only(folder, recipe):
    begin(folder, recipe)
    folder.metrics.write_text("{}\n")
    begin(folder, recipe, resume=True)
    assert folder.metrics.exists()
    other = recipe.model_copy(update={"seed": 5})
    assert "another recipe" in refused(begin, folder, other, resume=True)


def test_resuming_where_nothing_is_begins_a_run(folder, recipe):
    begin(folder, recipe, resume=True)
    assert folder.recipe.exists()


def test_a_folder_that_cannot_be_made_is_an_output_error(tmp_path, recipe):
    (tmp_path / "file").write_text("in the way")
    assert "cannot use the folder" in refused(begin, RunFolder(tmp_path / "file" / "run"), recipe)
    refused(begin, RunFolder(tmp_path / "file"), recipe)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_is_an_output_error(tmp_path, recipe):
    tmp_path.chmod(0o500)
    try:
        refused(begin, RunFolder(tmp_path / "run"), recipe)
    finally:
        tmp_path.chmod(0o700)


def test_checking_makes_and_removes_nothing(folder, recipe):
    folder.check(recipe)
    assert not folder.path.exists()
    begin(folder, recipe)
    folder.metrics.write_text("{}\n")
    refused(folder.check, recipe)
    folder.check(recipe, overwrite=True)
    assert folder.metrics.exists()


def rows(*steps):
    return [{"step": step, "loss": step / 3} for step in steps]


def test_figures_come_back_as_they_were_added(folder, recipe):
    begin(folder, recipe)
    assert folder.rows() == []
    for row in rows(1, 2):
        folder.add(row)
    assert folder.rows() == rows(1, 2)
    assert len(folder.metrics.read_text().splitlines()) == 2


def test_a_line_that_was_cut_off_is_no_line(folder, recipe):
    begin(folder, recipe)
    for row in rows(1, 2, 3):
        folder.add(row)
    text = folder.metrics.read_text()
    folder.metrics.write_text(text[:-7])
    assert folder.rows() == rows(1, 2)
    folder.forget_after(2)
    folder.add(rows(3)[0])
    assert [json.loads(line) for line in folder.metrics.read_text().splitlines()] == rows(1, 2, 3)


def test_figures_of_steps_that_are_done_again_are_forgotten(folder, recipe):
    begin(folder, recipe)
    for row in rows(1, 2, 3, 4):
        folder.add(row)
    folder.forget_after(2)
    assert folder.rows() == rows(1, 2)


def test_what_is_no_number_is_never_written(folder, recipe):
    begin(folder, recipe)
    with pytest.raises(ValueError, match="JSON"):
        folder.add({"step": 1, "loss": float("nan")})


def test_figures_that_cannot_be_written_are_an_output_error(folder, recipe):
    begin(folder, recipe)
    folder.metrics.mkdir()
    assert "metrics.jsonl" in refused(folder.add, rows(1)[0])


def test_a_state_comes_back_to_the_last_bit(folder, recipe):
    begin(folder, recipe)
    assert folder.load_state() is None
    base = torch.randn(2, 6, 3, 3, generator=torch.Generator().manual_seed(0))
    tensors = {
        "weight": base.to(memory_format=torch.channels_last),
        "part": base[:, 2:4],
        "step": torch.tensor(7.0),
        "count": torch.tensor(3),
        "empty": torch.zeros(0),
    }
    told = Progress(2, 17, best=1 / 3, since_best=4, untold=({"loss": 0.1 + 0.2},))
    folder.save_state(told, tensors)
    progress, found = folder.load_state()
    assert progress == told
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    assert all(found[name].dtype == value.dtype for name, value in tensors.items())


def test_a_new_state_takes_the_place_of_the_old(folder, recipe):
    begin(folder, recipe)
    folder.save_state(Progress(0, 1), {"a": torch.zeros(2)})
    folder.save_state(Progress(0, 2), {"a": torch.ones(2)})
    progress, found = folder.load_state()
    assert progress == Progress(0, 2)
    assert found["a"].tolist() == [1, 1]
    assert sorted(path.name for path in folder.path.iterdir()) == [
        "recipe.yaml", "state.safetensors",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["{}", "[1]", "nothing", '{"stage": 0, "step": 1, "more": 2}'])
def test_a_file_that_is_no_state_is_a_model_error(folder, recipe, text):
    from tnetcli.models.checkpoint import STATE_KEY as KEY
    from tnetcli.models.checkpoint import write_tensor_file

    begin(folder, recipe)
    write_tensor_file(folder.state, {"a": torch.zeros(1)}, (KEY, text))
    with pytest.raises(ModelError, match="not the state of a run") as caught:
        folder.load_state()
    assert "--overwrite" in caught.value.hint


def test_a_state_that_was_cut_off_is_a_model_error(folder, recipe):
    begin(folder, recipe)
    folder.save_state(Progress(0, 1), {"a": torch.zeros(100)})
    folder.state.write_bytes(folder.state.read_bytes()[:-50])
    with pytest.raises(ModelError, match="not a valid"):
        folder.load_state()


@pytest.mark.parametrize("name", ["recipe.yaml", "metrics.jsonl", ".training"])
def test_a_pipe_in_a_run_folder_is_refused_and_not_waited_for(folder, recipe, name):
    begin(folder, recipe)
    (folder.path / name).unlink(missing_ok=True)
    os.mkfifo(folder.path / name)

    def resume():
        folder.start(recipe, resume=True, overwrite=False)
        folder.forget_after(0)
        enter(folder)

    assert "regular file" in refused(resume)


@pytest.mark.parametrize("text", ["a: " + "[" * 100_000, "a: &a [*a]", "1" * 5000, "\udc00"])
def test_a_recipe_that_cannot_be_read_is_another_one(folder, recipe, text):
    begin(folder, recipe)
    folder.recipe.write_text(text, errors="surrogatepass")
    refused(begin, folder, recipe, resume=True)


def test_lines_that_are_no_figures_are_passed_over(folder, recipe):
    begin(folder, recipe)
    lines = ["[" * 100_000, "7", "{}", '{"step": "a"}', '{"step": NaN}', '{"step": 1, "loss": 2.5}']
    folder.metrics.write_text("\n".join(lines) + "\n")
    assert folder.rows() == [{"step": 1, "loss": 2.5}]
    folder.forget_after(1)
    assert folder.rows() == [{"step": 1, "loss": 2.5}]
