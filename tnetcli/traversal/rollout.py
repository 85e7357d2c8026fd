"""rollout(): one traversal of a batch of images, shared by prediction, evaluation and training."""

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from tnetcli.errors import ImageError, TnetError
from tnetcli.geometry import Region
from tnetcli.models.base import Model
from tnetcli.readers.base import Reader
from tnetcli.traversal.config import StopReason, TraversalConfig
from tnetcli.traversal.policies import Policy
from tnetcli.traversal.runner import TorchRunner
from tnetcli.traversal.tree import CellScores, Node, traverse
from tnetcli.traversal.views import Read, View, Views, root_window


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """Regions that were encoded together, and the scores of their cells; training only."""

    nodes: list[Node]
    logits: Tensor  # (n, places, channels), with gradient in training
    cell_valid: NDArray[np.float64]  # (n, places)


@dataclass(slots=True, eq=False)
class Spent:
    """Time spent on one image, and its mean values."""

    read_seconds: float = 0.0  # of all reading threads together
    model_seconds: float = 0.0
    band_means: NDArray[np.float32] | None = None  # (bands,), of the whole view, normalised


@dataclass(slots=True, eq=False)
class Rollout:
    """Result of one traversal of a batch of images; arrays are aligned with `nodes`.

    `nodes` are those of the images that could be read; the others are in `errors`. `aux` holds for
    each of the model's auxiliary outputs the numbers of the nodes that have it, and its values.
    """

    images: int
    nodes: tuple[Node, ...]
    stops: tuple[StopReason, ...]  # (images,)
    errors: dict[int, TnetError]
    features: Tensor  # (nodes, D)
    image: Tensor  # (nodes,)
    level: Tensor  # (nodes,), from 1
    valid: NDArray[np.float32]  # (nodes,), the fraction of the view that holds data
    aux: dict[str, tuple[Tensor, Tensor]]
    rounds: list[Round]
    spent: list[Spent]  # (images,)
    waiting: float  # seconds spent waiting for reads


def effective(config: TraversalConfig, model: Model, *, scale: float = 1.0) -> TraversalConfig:
    """Return the configuration limited to the levels and the smallest view of a model.

    By default a cell is at least `scale` views wide, so that no view is finer than the image.
    """
    return config.changed(
        min_size=scale * model.min_view_size if config.min_size is None else config.min_size,
        levels=min(config.levels, model.max_levels or config.levels),
    )


def rollout(
    readers: Sequence[Reader],
    runner: TorchRunner,
    views: Views,
    config: TraversalConfig,
    policies: Sequence[Policy],
    *,
    errors: dict[int, TnetError] | None = None,
    first: "Sequence[Future[View | TnetError]] | None" = None,
) -> Rollout:
    """Read whole images, score cells, let policies choose, until every image has a stop reason.

    One round encodes the next regions of all images. Inference and training differ in the runner
    (gradients or not) and in what they do with the result. Images in `errors` are not read;
    `first` holds views of level 1 whose reads were already submitted.
    """
    state = _State(readers, runner, views, config, dict(errors or {}), first)
    traversal = traverse(
        [root_window(reader.size, config.fit) for reader in readers],
        state.encode,
        runner.model.grid,
        config,
        policies,
        confident=None if config.confidence is None else state.confident,
    )
    return state.result(traversal.nodes, traversal.stops)


@dataclass(slots=True, eq=False)
class _State:
    """Outputs for a batch of images while it is traversed."""

    readers: Sequence[Reader]
    runner: TorchRunner
    views: Views
    config: TraversalConfig
    errors: dict[int, TnetError]
    first: "Sequence[Future[View | TnetError]] | None"
    rows: dict[Node, int] = field(default_factory=dict)  # into features, as encoded
    features: list[Tensor] = field(default_factory=list)
    valid: list[float] = field(default_factory=list)
    aux: dict[str, list[tuple[list[Node], Tensor]]] = field(default_factory=dict)
    rounds: list[Round] = field(default_factory=list)
    spent: list[Spent] = field(default_factory=list)
    waiting: float = 0.0

    def __post_init__(self) -> None:
        self.spent = [Spent() for _ in self.readers]

    def encode(self, nodes: Sequence[Node]) -> list[CellScores | None]:
        """Read and encode regions; None for those of an image that has failed."""
        scores: dict[Node, CellScores] = {}
        batches = iter(self._read([node for node in nodes if node.image not in self.errors]))
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.waiting += time.perf_counter() - start
            if batch is None:
                break
            for node, view in batch:
                self._note(node, view)
            good = [(n, v) for n, v in batch if isinstance(v, View) and n.image not in self.errors]
            if good:
                scores |= self._encode(good)
        # An image may have failed after the first regions of the round were encoded.
        return [None if node.image in self.errors else scores[node] for node in nodes]

    def _read(self, nodes: list[Node]) -> Iterable[list[Read]]:
        if self.first is not None and nodes and nodes[0].region.level == 1:
            futures = self.first
            return [[(node, self.views.result(futures[node.image])) for node in nodes]]
        return self.views.read(nodes, self.readers, self.runner.max_batch)

    def _note(self, node: Node, view: View | TnetError) -> None:
        """Record the time of a read, or the error of the image."""
        if isinstance(view, TnetError):
            self.errors.setdefault(node.image, view)
            return
        spent = self.spent[node.image]
        spent.read_seconds += view.seconds
        if node.region.level > 1 or self.runner.grad:
            return
        if view.valid == 0:
            problem = f"`{self.readers[node.image].path}` has no valid pixels"
            hint = "check its nodata value and mask with `tnet info`"
            self.errors.setdefault(node.image, ImageError(problem, hint=hint))
        else:
            # Invalid pixels are zero: the mean of the rest is that of all by the valid fraction.
            spent.band_means = view.values.mean(axis=(1, 2)) / np.float32(view.valid)

    def _encode(self, good: list[tuple[Node, View]]) -> dict[Node, CellScores]:
        start = time.perf_counter()
        pixels = np.stack([view.values for _, view in good])  # (n, bands, side, side)
        regions = [node.region for node, _ in good]
        deeper = any(region.level < self.config.levels for region in regions)
        outputs = self.runner.encode(pixels, regions, score_cells=deeper)
        scores: dict[Node, CellScores] = {}
        for rows, out in outputs:
            nodes = [good[row][0] for row in rows]
            cell_valid = np.stack([good[row][1].cell_valid for row in rows])  # (n, places)
            numbers = np.zeros(out.cell_logits.shape, np.float32)  # of the last level, not used
            if deeper:
                numbers, logits = self.runner.propose(out)
                if self.runner.grad:  # inference needs no more than the choices
                    self.rounds.append(Round(nodes, logits, cell_valid))
            for node, row, own, valid in zip(nodes, rows, numbers, cell_valid, strict=True):
                self.rows[node] = len(self.rows)
                self.valid.append(good[row][1].valid)
                scores[node] = CellScores(own, valid)
            self.features.append(out.features)
            for name, value in out.aux.items():
                self.aux.setdefault(name, []).append((nodes, value))
        seconds = (time.perf_counter() - start) / len(good)
        for node, _ in good:
            self.spent[node.image].model_seconds += seconds
        return scores

    def confident(self, images: Sequence[int]) -> list[bool]:
        """Return for each image True if a class reaches `confidence`."""
        assert self.config.confidence is not None
        features = torch.cat(self.features)
        found = []
        for image in images:
            nodes = [node for node in self.rows if node.image == image]
            own = features[[self.rows[node] for node in nodes]].unsqueeze(0)
            levels = torch.tensor([[node.region.level for node in nodes]])
            logits = self.runner.aggregate(own, levels > 0, levels).logits
            found.append(float(logits.softmax(dim=1).max()) >= self.config.confidence)
        return found

    def result(self, nodes: tuple[Node, ...], stops: tuple[StopReason, ...]) -> Rollout:
        """Return the rollout of the images that have not failed."""
        kept = tuple(node for node in nodes if node.image not in self.errors)
        rows = [self.rows[node] for node in kept]
        features = torch.cat(self.features) if self.features else torch.zeros(0, 0)
        if rows != list(range(len(features))):
            features = features[rows]
        number = {node: index for index, node in enumerate(kept)}
        aux = {}
        for name, parts in self.aux.items():
            owners = [number.get(node, -1) for own, _ in parts for node in own]
            known = torch.tensor(owners, device=features.device)
            values = torch.cat([value for _, value in parts])
            if min(owners) < 0:
                values, known = values[known >= 0], known[known >= 0]
            aux[name] = known, values
        return Rollout(
            images=len(self.readers),
            nodes=kept,
            stops=stops,
            errors=self.errors,
            features=features,
            image=features.new_tensor([node.image for node in kept], dtype=torch.long),
            level=features.new_tensor([node.region.level for node in kept], dtype=torch.long),
            valid=np.array([self.valid[row] for row in rows], np.float32),
            aux=aux,
            rounds=self.rounds,
            spent=self.spent,
            waiting=self.waiting,
        )


def by_image(features: Tensor, image: Tensor, level: Tensor, images: int) -> tuple[Tensor, Tensor]:
    """Return features (images, most, D) and their levels (images, most), 0 where there is none."""
    order = torch.argsort(image, stable=True)
    counts = torch.bincount(image, minlength=images).tolist()
    padded = pad_sequence(list(features[order].split_with_sizes(counts)), batch_first=True)
    return padded, pad_sequence(list(level[order].split_with_sizes(counts)), batch_first=True)


def root(reader: Reader, config: TraversalConfig) -> Region:
    """Return the region of level 1."""
    return Region(root_window(reader.size, config.fit))
