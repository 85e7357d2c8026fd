import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from tests.checkpoints import write_tiny
from tests.exporters.records import replace, window
from tests.images import noise
from tnetcli.checkpoint import load_checkpoint
from tnetcli.errors import ImageError, ModelError, OutputError, UsageError
from tnetcli.exporters.looked import Looked
from tnetcli.models.step_cam import step_cam
from tnetcli.workflows import explain
from tnetcli.workflows.explain import Explained, Heat, open_explained, spread
from tnetcli.workflows.export_formats import FORMATS, How
from tnetcli.workflows.export_formats import Explain as Wanted
from tnetcli.workflows.imagery import open_imagery
from tnetcli.workflows.predict import predict

TOLD = {
    "bands": ["1", "2", "3"],
    "normalisation": {"dtype": "uint8", "mean": [120.0, 130.0, 90.0], "std": [60.0, 50.0, 70.0]},
    "traversal": {"levels": 2, "keep": [2]},
}
STREAMS = {"backbone": "compact", "view_size": 32, "state_size": 8, "step_count": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return write_tiny(folder / "m.safetensors", "two_stream", arguments=STREAMS, **TOLD)


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    path = tmp_path_factory.mktemp("image") / "a.png"
    Image.fromarray(noise((128, 128), seed=5).transpose(1, 2, 0)).save(path)
    return path


@pytest.fixture(scope="module")
def looked(model, image):
    return Looked(predict(image, model=model, levels=2, keep=(2,)))


def opened(looked, model, step=None, root=None):
    return open_explained(looked, model=str(model), step=step, root=root)


class TestSpread:
    heat = Heat((10.0, 20.0, 30.0, 40.0), 1, np.array([[0.0, 1.0], [0.5, 0.25]], np.float32))

    def test_between_the_middles_of_cells_it_is_linear(self):
        found = spread(self.heat, self.heat.box, 8, 8)
        expected = torch.nn.functional.interpolate(
            torch.from_numpy(self.heat.values)[None, None], (8, 8), mode="bilinear"
        )[0, 0]
        np.testing.assert_allclose(found, expected, atol=1e-6)

    def test_outside_of_its_window_there_is_none(self):
        found = spread(self.heat, (0.0, 0.0, 100.0, 100.0), 100, 100)
        assert found[20:40, 10:30].any()
        found[20:40, 10:30] = 0
        assert not found.any()


class TestExplained:
    class Grey:
        def show(self, box, width, height):
            shown = np.full((height, width, 4), 100, np.uint8)
            shown[:, : width // 2, 3] = 0
            shown[:, width // 2 :, 3] = 255
            return shown

    def test_what_is_hot_is_bright_and_what_is_cold_as_it_was(self):
        hot = Heat((0.0, 0.0, 10.0, 10.0), 1, np.ones((1, 1), np.float32))
        shown = Explained(self.Grey(), (hot,), "").show((0.0, 0.0, 20.0, 20.0), 20, 20)
        assert (shown[10:, 10:, :3] == 100).all()
        shown = Explained(self.Grey(), (hot,), "").show((0.0, 0.0, 10.0, 10.0), 10, 10)
        red, green, blue = (round(0.3 * 100 + 0.7 * each) for each in (252, 255, 164))
        assert (shown[:, 5:] == (red, green, blue, 255)).all()
        assert not shown[:, :5].any()  # no data stays no data

    def test_a_window_shows_its_own_heat_and_the_whole_that_of_all(self):
        left = Heat((0.0, 0.0, 10.0, 10.0), 1, np.zeros((1, 1), np.float32))
        same = Heat((5.0, 0.0, 15.0, 10.0), 1, np.ones((1, 1), np.float32))
        explained = Explained(self.Grey(), (left, same), "")
        assert (explained.show(left.box, 10, 10)[:, 5:, :3] == 100).all()
        assert (explained.show((0.0, 0.0, 20.0, 10.0), 20, 10)[:, 10:15, 0] > 200).all()


def test_the_heat_of_a_window_is_that_of_the_step_which_counted_most(looked, model, image):
    checkpoint = load_checkpoint(model)
    record = looked.prediction
    label = checkpoint.description.classes.index(record.label)
    pixels = np.asarray(Image.open(image), np.float32).transpose(2, 0, 1)
    with opened(looked, model) as explained:
        heats = explained.heats
    near = [each for each in record.windows if each.level == 2]
    assert len(heats) == len(near) == 2
    for heat, seen in zip(heats, sorted(near, key=lambda each: each.rank), strict=True):
        assert heat.step == 1 + int(np.argmax(seen.steps))
        x0, y0, x1, y1 = map(int, seen.box)
        part = pixels[:, y0:y1, x0:x1].reshape(3, 32, 2, 32, 2).mean(axis=(2, 4))
        mean, std = (np.array(TOLD["normalisation"][key])[:, None, None] for key in ("mean", "std"))
        view = torch.from_numpy((part - mean) / std).float()
        expected = step_cam(checkpoint.model, view, heat.step, label)
        assert expected.max() > 0
        np.testing.assert_allclose(heat.values, expected / expected.max(), atol=1e-3)


def test_a_step_can_be_chosen_and_is_told(looked, model):
    with opened(looked, model, step=2) as explained:
        assert [heat.step for heat in explained.heats] == [2, 2]
        assert "at step 2 of 3;" in explained.note


def test_pixels_without_heat_are_those_of_the_image(looked, model):
    box = (0.0, 0.0, 128.0, 128.0)
    with opened(looked, model) as explained, open_imagery(looked.prediction) as plain:
        cold = replace(explained, heats=())
        assert np.array_equal(cold.show(box, 64, 64), plain.show(box, 64, 64))
        assert not np.array_equal(explained.show(box, 64, 64), plain.show(box, 64, 64))


def test_a_picture_shows_it(looked, model, tmp_path):
    problems = []

    def write(name, how):
        FORMATS["picture"].write(tmp_path / name, [looked], how, problems.append, False)
        return np.asarray(Image.open(tmp_path / name))

    plain = write("plain.png", How(size=600))
    explained = write("explained.png", How(size=600, explain=Wanted(str(model))))
    assert not problems
    assert plain.shape[1] == explained.shape[1] == 600
    assert plain.shape != explained.shape or not np.array_equal(plain, explained)


class TestProblems:
    def test_another_model_did_not_make_the_record(self, looked, tmp_path):
        other = write_tiny(
            tmp_path / "o.safetensors", "two_stream", arguments=STREAMS | {"step_count": 4}, **TOLD
        )
        with (
            pytest.raises(ModelError, match="was not predicted by") as caught,
            opened(looked, other),
        ):
            pass
        assert "predict again" in caught.value.hint

    @pytest.mark.parametrize(
        ("family", "arguments"), [("tnet", None), ("two_stream", STREAMS | {"steps": "none"})]
    )
    def test_a_model_without_steps_has_none_to_explain(self, family, arguments, looked, tmp_path):
        more = {} if arguments is None else {"arguments": arguments, **TOLD}
        other = write_tiny(tmp_path / "o.safetensors", family, **more)
        with pytest.raises(ModelError, match="does not think in steps"), opened(looked, other):
            pass

    def test_a_model_that_is_not_bundled_has_to_be_given(self, looked):
        with (
            pytest.raises(UsageError, match="which model is") as caught,
            open_explained(looked, model=None, step=None, root=None),
        ):
            pass
        assert "--model FILE" in caught.value.hint

    def test_there_are_only_so_many_steps(self, looked, model):
        with (
            pytest.raises(UsageError, match="there is no step 4: the model makes 3"),
            opened(looked, model, step=4),
        ):
            pass

    def test_an_image_that_is_gone_cannot_be_explained(self, looked, model):
        gone = Looked(replace(looked.prediction, image="gone.png"))
        with pytest.raises(ImageError, match="the image is gone"), opened(gone, model):
            pass

    def test_a_record_that_tells_no_steps_wants_one_chosen(self, looked, model):
        bare = tuple(replace(each, steps=()) for each in looked.prediction.windows)
        old = Looked(replace(looked.prediction, windows=bare))
        with pytest.raises(OutputError, match="does not tell the steps"), opened(old, model):
            pass
        with opened(old, model, step=1) as explained:
            assert len(explained.heats) == 2

    def test_a_record_of_the_whole_alone_says_so(self, looked, model):
        whole = replace(looked.prediction, windows=looked.prediction.windows[:1])
        with opened(Looked(whole), model) as explained:
            assert explained.heats == ()
            assert "no step to explain" in explained.note


def test_an_export_that_explains_nothing_loads_no_torch():
    code = "import sys, tnetcli.workflows.export, tnetcli.exporters.picture\n"
    code += "from tnetcli.workflows.export_formats import FORMATS, Explain\n"
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_many_windows_are_explained_only_as_far_as_they_are_shown(looked, model, monkeypatch):
    monkeypatch.setattr(explain, "step_cam", lambda *_: torch.ones(2, 2))
    box = looked.prediction.windows[1].box
    many = tuple(window(f"root/w{n}", box, 0.5, rank=n, steps=(1.0,)) for n in range(1, 200))
    record = replace(looked.prediction, windows=many)
    with opened(Looked(record), model) as explained:
        assert len(explained.heats) == 48
