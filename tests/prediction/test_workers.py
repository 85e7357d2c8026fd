import logging
import threading
from dataclasses import replace

import pytest
import torch

from tests.images import noise, write_geotiff
from tests.predicting import write_model
from tnetcli.data.images import Image
from tnetcli.models.checkpoint import load_model
from tnetcli.prediction import batch
from tnetcli.prediction.batch import (
    ExecutionConfig,
    WorkerConfig,
    predict_images,
    predict_in_worker,
)
from tnetcli.prediction.predictor import PredictConfig
from tnetcli.readers.base import ReadOptions


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
    for kept in (batch._predictor, batch._log_queue):
        kept.cache_clear()
    yield WorkerConfig(model, load_model(model).sha256, PredictConfig(), "cpu", 1, 60)
    for kept in (batch._predictor, batch._log_queue):
        kept.cache_clear()
    torch.set_num_threads(threads)


def named(*paths):
    return [Image(str(path), str(path), str(path), ReadOptions()) for path in paths]


def test_logs_of_workers_are_handled_here_once_with_the_names_as_given(
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
        batch, "load_checkpoint", lambda path: loads.append(path) or load_model(path)
    )
    found = []

    def ask(number):
        together.wait()
        found.extend(predict_in_worker(worker, named(folder / f"{number}.tif")).lines)

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
    predict_in_worker(replace(worker, threads=given), named(folder / "0.tif"))
    assert torch.get_num_threads() == threads


def test_a_log_that_somebody_reads_is_left_alone(folder, worker, caplog, monkeypatch):
    logger = logging.getLogger("tnetcli")
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    answer = predict_in_worker(worker, named(folder / "0.tif"))
    assert answer.logs == []
    assert "that of the training data" in caplog.text
