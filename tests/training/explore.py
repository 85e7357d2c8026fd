"""Rollouts of a tiny model with gradients, as a stage makes them."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.images import noise, write_geotiff
from tests.runs import MODEL, UNIT
from tnetcli.errors import ImageError
from tnetcli.models.registry import build_model
from tnetcli.readers.detect import open_image
from tnetcli.training.data import Batch, Item
from tnetcli.training.recipe import LossConfig
from tnetcli.training.reinforce import blocked_cells, build_episodes
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import build_policy
from tnetcli.traversal.rollout import Rollout, rollout, root
from tnetcli.traversal.runner import TorchRunner
from tnetcli.traversal.views import Views

CPU = torch.device("cpu")
PAPER = LossConfig(rule="paper")
TWO = TraversalConfig(levels=2, keep=(2,), deduplicate=False)
THREE = TraversalConfig(levels=3, keep=(2, 1), deduplicate=False)
LABELS = [0, 2, 1, 2]


def write_readers(folder: Any, count: int = 4) -> list[Any]:
    """Open small images of noise."""
    made = [noise((200, 160), seed=number) for number in range(count)]
    paths = [write_geotiff(folder / f"{n}.tif", each) for n, each in enumerate(made)]
    return [open_image(path) for path in paths]


def tiny_model() -> Any:
    """Build a TNet of three classes whose running statistics are those of noise."""
    torch.manual_seed(3)
    arguments = {key: value for key, value in MODEL.items() if key != "classes"}
    made = build_model("tnet", arguments, classes=3)
    for _ in range(20):
        made.backbone(torch.randn(8, 3, 32, 32))
    return made.eval()


def views_of(model: Any) -> Views:
    return Views(model.view_size_of, model.grid, UNIT, threads=1)


def batch_of(readers: Any, views: Views, seeds: Any = None, labels: Any = None) -> Batch:
    labels = LABELS[: len(readers)] if labels is None else labels
    return Batch(
        [Item(*each, (), each[0].path) for each in zip(readers, labels, strict=True)],
        list(range(10, 10 + len(readers))) if seeds is None else seeds,
        [views.submit(reader, root(reader, TWO)) for reader in readers],
    )


@dataclass
class Explored:
    """A rollout, and the episodes it gives."""

    found: Rollout
    runner: TorchRunner
    batch: Batch
    loss: LossConfig
    config: TraversalConfig

    def episodes(self) -> Any:
        return self._built()[0]

    @property
    def distinct(self) -> float:
        return self._built()[1]

    def _built(self) -> Any:
        blocked = blocked_cells(self.runner.model.grid, self.config.max_overlap)
        return build_episodes(
            self.found,
            self.runner,
            [item.label for item in self.batch.items],
            self.loss,
            min_valid=self.config.min_valid,
            blocked=blocked,
        )

    def regions(self, image: int) -> list[Any]:
        return [node.region for node in self.found.nodes if node.image == image]


def explore(
    model: Any,
    views: Views,
    readers: Any,
    config: TraversalConfig = THREE,
    loss: LossConfig = PAPER,
    *,
    seeds: Any = None,
    labels: Any = None,
    precision: Any = "fp32",
) -> Explored:
    """Roll out with gradients by the policy of a loss."""
    config = config.changed(policy=loss.selection, temperature=loss.temperature)
    batch = batch_of(readers, views, seeds, labels).repeated(loss.samples)
    runner = TorchRunner(model, CPU, precision, grad=True)
    policies = [build_policy(config, seed, uniform=loss.uniform) for seed in batch.seeds]
    readers = [item.reader for item in batch.items]
    found = rollout(readers, runner, views, config, policies, first=batch.first)
    return Explored(found, runner, batch, loss, config)


class Torn:
    """A reader that fails at windows of some width and narrower ones."""

    def __init__(self, reader: Any, width: float) -> None:
        self._reader, self._width = reader, width

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    def read(self, window: Any, out_size: Any) -> Any:
        if window.width <= self._width:
            raise ImageError(f"`{self._reader.path}` is torn", hint="copy it again")
        return self._reader.read(window, out_size)


def probabilities(round_: Any) -> Any:
    """Return the attention (parents, cells) of a round."""
    logits = round_.logits.detach().double().numpy()
    powers = np.exp(logits).sum(axis=2)
    return powers / powers.sum(axis=1, keepdims=True)
