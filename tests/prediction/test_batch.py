"""Prediction from Python; tests/cli/test_predict.py has all that the command adds."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import tnetcli
from tests.images import noise, write_geotiff
from tests.predicting import write_model
from tnetcli.data.images import Image
from tnetcli.errors import ImageError, UsageError
from tnetcli.models.checkpoint import load_checkpoint
from tnetcli.prediction import batch
from tnetcli.prediction.batch import (
    ExecutionConfig,
    Shard,
    WorkerConfig,
    missing_shards,
    parse_shard,
    predict_images,
    predict_in_worker,
    shard_of_job,
)
from tnetcli.prediction.predictor import PredictConfig, load_model
from tnetcli.readers.base import ReadOptions


@pytest.fixture
def scene(tmp_path):
    path = tmp_path / "a.tif"
    write_geotiff(path, noise((1024, 1024)), overviews=[2, 4, 8])
    return path


def test_one_image_gives_one_prediction(scene):
    prediction = tnetcli.predict(scene, levels=2, keep=[2], device="cpu")
    assert prediction.status == "ok"
    assert prediction.image == str(scene)
    assert {window.level for window in prediction.windows} == {1, 2}
    assert len(prediction.windows) == 3


def test_a_model_that_is_loaded_serves_many_images(scene):
    model = load_model("default", device="cpu")
    first, second = tnetcli.predict_many([scene, scene], model=model, levels=1)
    assert first.probabilities == second.probabilities


def test_one_bad_image_raises_and_of_many_it_is_a_record(tmp_path, scene):
    bad = tmp_path / "bad.tif"
    bad.write_text("no image")
    with pytest.raises(ImageError, match="text file"):
        tnetcli.predict(bad)
    good, failed = tnetcli.predict_many([scene, bad], levels=1)
    assert (good.status, failed.status) == ("ok", "failed")
    assert "text file" in failed.error.message


def test_an_impossible_setting_is_a_usage_error(scene):
    with pytest.raises(UsageError, match="no such policy"):
        tnetcli.predict(scene, policy="topk")


def images(*groups):
    return [Image(f"{i}.tif", f"{i}", group, ReadOptions()) for i, group in enumerate(groups)]


@pytest.mark.parametrize("count", [1, 3, 20])
def test_every_image_is_in_one_shard_and_shards_are_even(count):
    everything = images(*map(str, range(13)))
    parts = [Shard(number, count).take(everything) for number in range(1, count + 1)]
    assert sorted(each.id for part in parts for each in part) == sorted(e.id for e in everything)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_images_of_a_group_stay_together_and_in_order():
    everything = images("a", "b", "a", "c", "b", "a")
    parts = [[each.id for each in Shard(number, 2).take(everything)] for number in (1, 2)]
    assert parts == [["0", "2", "3", "5"], ["1", "4"]]


def test_every_shard_has_its_own_file():
    assert Shard(2, 4).name(Path("out/a.jsonl")) == Path("out/a.2-of-4.jsonl")


def test_missing_shards_follow_from_the_names():
    files = [Path("out/a.1-of-3.jsonl"), Path("out/a.3-of-3.jsonl"), Path("b.jsonl")]
    assert missing_shards(files) == [Path("out/a.2-of-3.jsonl")]
    assert missing_shards(files[-1:]) == []


@pytest.mark.parametrize("text", ["1/1", " 3 / 8 ", "8/8"])
def test_a_shard_is_parsed(text):
    number, count = map(int, text.split("/"))
    assert parse_shard(text) == Shard(number, count)


@pytest.mark.parametrize("text", ["", "0/4", "5/4", "1/0", "a/b"])
def test_a_wrong_shard_is_a_usage_error(text):
    with pytest.raises(UsageError, match="--shard") as caught:
        parse_shard(text)
    assert "1/8" in caught.value.hint


@pytest.mark.parametrize(
    ("task", "count", "first", "step", "number"),
    [(0, 4, 0, 1, 1), (3, 4, 0, 1, 4), (1, 4, 1, 1, 1), (4, 4, 1, 1, 4), (14, 3, 10, 2, 3)],
)
def test_a_job_array_sets_the_shard(task, count, first, step, number):
    values = {"ID": task, "COUNT": count, "MIN": first, "STEP": step}
    environment = {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in values.items()}
    assert shard_of_job(environment) == Shard(number, count)


def test_outside_of_a_job_array_there_is_no_shard():
    assert shard_of_job({}) is None


@pytest.mark.parametrize("values", [("9", "4"), ("x", "4"), ("1", "many")])
def test_an_array_that_makes_no_sense_is_an_error(values):
    task, count = values
    environment = {"SLURM_ARRAY_TASK_ID": task, "SLURM_ARRAY_TASK_COUNT": count}
    with pytest.raises(UsageError, match="SLURM_ARRAY_TASK_ID"):
        shard_of_job(environment)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("elsewhere")
    # Whatever is shown is far brighter than what this one was trained on.
    write_model(
        folder / "m.safetensors",
        normalisation={"dtype": "uint8", "mean": [10.0] * 3, "std": [5.0] * 3},
    )
    for number in range(3):
        write_geotiff(folder / f"{number}.tif", noise((120, 120), seed=number), overviews=[2])
    (folder / "bad.tif").write_text("no image")
    return folder


@pytest.fixture
def worker(folder):
    """Return the configuration of a worker; this process forgets its model afterwards."""
    model = str(folder / "m.safetensors")
    threads = torch.get_num_threads()
    batch._predictor.cache_clear()
    yield WorkerConfig(
        model, load_checkpoint(model).sha256, PredictConfig(), ExecutionConfig("cpu")
    )
    batch._predictor.cache_clear()
    torch.set_num_threads(threads)


def named(*paths):
    return [Image(str(path), str(path), str(path), ReadOptions()) for path in paths]


def test_warnings_of_workers_are_logged_here_once_with_the_names_as_given(
    folder, monkeypatch, caplog, capfd
):
    monkeypatch.chdir(folder)
    execution = ExecutionConfig("cpu", 1, 1, workers=2)
    listed = named("0.tif", "1.tif", "bad.tif", "gone.tif")
    records = {
        each.id: each for each in predict_images(listed, "m.safetensors", execution=execution)
    }
    assert sorted(each.image for each in records.values()) == sorted(records)
    assert records["0.tif"].warnings
    logged = sorted(each.getMessage() for each in caplog.records)
    assert [each.partition(": the mean of")[0] for each in logged] == ["0.tif", "1.tif"]
    assert capfd.readouterr().err == ""
    for name in ("bad.tif", "gone.tif"):
        assert f"`{name}`" in records[name].error.message


def test_threads_of_a_worker_share_one_model(folder, worker, monkeypatch):
    loads, together = [], threading.Barrier(3, timeout=60)
    monkeypatch.setattr(
        batch, "load_checkpoint", lambda path: loads.append(path) or load_checkpoint(path)
    )
    found = []

    def ask(number):
        together.wait()
        found.extend(predict_in_worker(worker, named(folder / f"{number}.tif")))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(loads) == 1


@pytest.mark.parametrize(("given", "cores", "threads"), [(2, 8, 2), (None, 8, 3), (None, 2, 2)])
def test_a_worker_uses_the_threads_it_is_given(folder, worker, monkeypatch, given, cores, threads):
    torch.set_num_threads(3)  # as with OMP_NUM_THREADS=3
    monkeypatch.setattr(batch, "available_cores", lambda: cores)
    execution = ExecutionConfig("cpu", given)
    predict_in_worker(replace(worker, execution=execution), named(folder / "0.tif"))
    assert torch.get_num_threads() == threads
