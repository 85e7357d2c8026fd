"""Prediction from Python; tests/cli/test_predict.py has all that the command adds."""

import pytest

import tnetcli
from tests.images import noise, write_geotiff
from tnetcli.errors import ImageError, UsageError
from tnetcli.prediction.predictor import load_model


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
