"""Contracts of policies, tasks and exporters, as tests that a test class inherits.

class TestMyPolicy(PolicyContract):
    @pytest.fixture
    def policy(self):
        return MyPolicy()
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import BaseModel, ValidationError

from tnetcli.exporters.base import Exporter
from tnetcli.geometry import Grid, Region, Window
from tnetcli.prediction.record import Prediction
from tnetcli.tasks import Task
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import Policy
from tnetcli.traversal.tree import CellScores, Node, traverse

GRID = Grid(3, 3, 0.5)
ROOT = Region(Window(0, 0, 4096, 4096))
BUDGET = 6
CONFIG = TraversalConfig(levels=3, keep=(2, 1), budget=BUDGET)
PREDICTION = {
    "schema": "tnet.prediction/2",
    "id": "scenes/a.tif",
    "image": "scenes/a.tif",
    "status": "ok",
    "label": "river",
    "probability": 0.9,
    "probabilities": {"forest": 0.1, "river": 0.9},
    "stop_reason": "max_level",
    "width": 4000,
    "height": 3000,
    "bands": 3,
    "georeference": {"crs": "EPSG:32633", "transform": [10, 0, 399960, 0, -10, 5000040]},
    "levels": [
        {"level": 1, "windows": 1, "label": "forest", "probability": 0.6},
        {"level": 2, "windows": 1, "label": "river", "probability": 0.9},
    ],
    "windows": [
        {"path": "root", "level": 1, "box": [0, 0, 4000, 3000], "attention": 1, "rank": 1,
         "share": 0.4, "label": "forest", "probability": 0.6, "valid": 1},
        {"path": "root/0-2", "level": 2, "box": [2000, 0, 4000, 1500], "attention": 0.7, "rank": 1,
         "share": 0.6, "label": "river", "probability": 0.95, "valid": 0.8},
    ],
}  # fmt: skip


class PolicyContract:
    """Inherit and override the fixture `policy`; every test is a promise of `Policy`."""

    @pytest.fixture
    def policy(self) -> Policy:
        """Return the policy under test, new for each test."""
        raise NotImplementedError

    @pytest.fixture
    def logits(self) -> NDArray[np.float64]:
        """Return raw scores of nine places in two channels."""
        return np.random.default_rng(0).normal(size=(9, 2))

    def test_probabilities_are_a_distribution(self, policy: Policy, logits: Any) -> None:
        probs = policy.probabilities(ROOT, logits)
        assert probs.shape == (9,)
        assert (probs >= 0).all()
        assert probs.sum() == pytest.approx(1)

        logits[3] = -np.inf
        assert policy.probabilities(ROOT, logits)[3] == 0
        assert not policy.probabilities(ROOT, np.full((9, 2), -np.inf)).any()

    def test_preferences_are_numbers_and_repeatable(self, policy: Policy, logits: Any) -> None:
        before = logits.copy()
        for cells in (np.array([0, 4, 7]), np.empty(0, np.intp)):
            probs = policy.probabilities(ROOT, logits)[cells]
            first = policy.preference(ROOT, cells, probs, 0.5)
            assert first.shape == cells.shape
            assert not np.isnan(first).any()
            assert np.array_equal(policy.preference(ROOT, cells, probs, 0.5), first)
        assert np.array_equal(logits, before)

    def test_a_traversal_ends_within_its_budget(self, policy: Policy, logits: Any) -> None:
        def encode(nodes: Sequence[Node]) -> list[CellScores]:
            return [CellScores(logits, np.ones(9)) for _ in nodes]

        found = traverse([ROOT.window], encode, GRID, CONFIG, [policy])
        paths = [node.region.path for node in found.nodes]
        assert len(found.stops) == 1
        assert 1 < len(paths) <= BUDGET
        assert len(set(paths)) == len(paths)
        assert max(node.region.level for node in found.nodes) <= CONFIG.levels


class TaskContract:
    """Inherit and override the fixtures; every test is a promise of `Task`."""

    @pytest.fixture
    def task(self) -> Task:
        """Return the task under test, not fitted."""
        raise NotImplementedError

    @pytest.fixture
    def targets(self, task: Task) -> list[int]:
        """Return targets of twelve training images."""
        return [index % task.outputs for index in range(12)]

    def test_importance_is_1_on_average(self, task: Task, targets: list[int]) -> None:
        import torch

        task.fit(targets)
        assert json.loads(json.dumps(task.state)) == task.state
        importance = task.importance(torch.tensor(targets))
        assert importance.shape == (len(targets),)
        assert importance.mean().item() == pytest.approx(1)

    def test_the_loss_has_a_gradient(self, task: Task, targets: list[int]) -> None:
        import torch

        task.fit(targets)
        logits = torch.randn(len(targets), task.outputs, requires_grad=True)
        loss = task.loss(logits, torch.tensor(targets))
        assert loss.shape == ()
        (gradient,) = torch.autograd.grad(loss, logits)
        assert torch.stack([loss.isfinite(), gradient.isfinite().all()]).all()
        reward = task.reward(logits, torch.tensor(targets))
        assert reward.shape == (len(targets),)
        assert ((reward >= 0) & (reward <= 1)).all()
        assert not reward.requires_grad

    def test_a_decision_has_a_label_and_probabilities(self, task: Task) -> None:
        logits = np.linspace(-1, 1, task.outputs)
        decision = task.decide(logits)
        assert decision.label in decision.probabilities
        assert decision.probability == decision.probabilities[decision.label]
        assert all(0 <= value <= 1 for value in decision.probabilities.values())
        assert task.decide(logits) == decision


class ExporterContract:
    """Inherit and override the fixture `exporter`; every test is a promise of `Exporter`."""

    @pytest.fixture
    def exporter(self) -> Exporter:
        """Return the exporter under test."""
        raise NotImplementedError

    @pytest.fixture
    def options(self, exporter: Exporter) -> BaseModel:
        """Return the options that the tests write with: the defaults."""
        return exporter.options()

    @pytest.fixture
    def predictions(self, exporter: Exporter) -> list[Prediction]:
        """Return two records, or one where a file holds one image."""
        first = Prediction.model_validate_json(json.dumps(PREDICTION))
        second = first.replace(id="scenes/b.tif", image="scenes/b.tif")
        return [first, second] if exporter.many else [first]

    def test_it_has_a_name_suffixes_and_options(self, exporter: Exporter) -> None:
        assert exporter.name
        assert exporter.suffixes
        assert all(each.startswith(".") for each in exporter.suffixes)
        with pytest.raises(ValidationError):
            exporter.options.model_validate({"no_such_option": 1})

    def test_the_same_predictions_give_the_same_bytes(
        self, exporter: Exporter, options: Any, predictions: list[Prediction], tmp_path: Path
    ) -> None:
        written = []
        for name in ("a", "b"):
            path = tmp_path / f"{name}{exporter.suffixes[0]}"
            exporter.write(iter(predictions), path, options)
            written.append(path.read_bytes())
        assert written[0] == written[1] != b""
