import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tnetcli.errors import MissingExtraError
from tnetcli.training.config import StageConfig
from tnetcli.training.run_dir import Events


class Listener:
    def __init__(self):
        self.heard = []

    def stage(self, stage, steps):
        self.heard.append(("stage", stage.name, steps))

    def step(self, row, done, steps):
        self.heard.append(("step", done, steps))

    def validation(self, row, is_best):
        self.heard.append(("validation", is_best))

    def warn(self, text):
        self.heard.append(("warn", text))

    def should_stop(self):
        return True


def test_figures_can_be_read_by_tensorboard_and_are_passed_on(tmp_path):
    listener = Listener()
    events = Events(listener, tmp_path)
    events.stage(StageConfig(steps=9), 9)
    events.step({"step": 7, "stage": "train", "loss": 0.5, "accuracy": [0.25, 0.75]}, 7, 9)
    events.validation({"loss": 0.4, "hit": [0.9]}, True)
    events.warn("flat")
    assert events.should_stop()
    events.close()

    found = EventAccumulator(str(tmp_path)).Reload()
    values = {
        tag: [(e.step, e.value) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]
    }
    assert values == {
        "train/loss": [(7, 0.5)],
        "train/accuracy-1": [(7, 0.25)],
        "train/accuracy-2": [(7, 0.75)],
        "validation/loss": [(7, pytest.approx(0.4))],
        "validation/hit-1": [(7, pytest.approx(0.9))],
    }
    assert listener.heard == [
        ("stage", "train", 9), ("step", 7, 9), ("validation", True), ("warn", "flat"),
    ]  # fmt: skip


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match="tensorboard") as caught:
        Events(Listener(), tmp_path)
    assert "tnetcli[tensorboard]" in caught.value.hint
