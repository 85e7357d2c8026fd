"""Two streams: one encodes the whole image, a recurrent one its regions.

"Search for Finer Attention Details for Fine-Grained Image Classification" (thesis).
"""

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from tnetcli.errors import ModelError
from tnetcli.geometry import Region
from tnetcli.models.base import (
    Aggregated,
    EncoderOutput,
    Episodes,
    Model,
    Terms,
    image_weights,
    init_weights,
    masked_features,
)
from tnetcli.models.configs import TwoStreamConfig, TwoStreamObjective
from tnetcli.models.encoders import Stream
from tnetcli.models.location import Pool, normalised_logits
from tnetcli.tasks import Task, at_least_single


class TwoStream(Model):
    """The global stream encodes level 1, the local stream level 2; they share no weights.

    Feature vectors of the shorter stream are padded with zeros.
    """

    family = "two_stream"

    def __init__(
        self,
        config: TwoStreamConfig,
        *,
        classes: int,
        bands: int = 3,
        pretrained: bool | Path = False,
    ) -> None:
        super().__init__(config, grid=config.grid, classes=classes, bands=bands)
        local_backbone = config.local_backbone or config.backbone
        if isinstance(pretrained, Path) and local_backbone != config.backbone:
            raise ModelError(
                f"`{pretrained}` cannot hold the weights of `{config.backbone}` and "
                f"`{local_backbone}`",
                hint="use one backbone for both streams, or the hub's weights: pretrained: true",
            )
        local = {"backbone": local_backbone, "view_size": config.local_view_size}
        self.global_stream = GlobalStream(
            config, Stream(config, bands=bands, pretrained=pretrained), classes
        )
        self.local_stream = LocalStream(
            config,
            Stream(config.model_copy(update=local), bands=bands, pretrained=pretrained),
            classes,
        )
        init_weights(local_backbone, self.local_stream.head)
        self.dropout = nn.Dropout(config.dropout)
        self.local_weight = config.local_weight
        self.local_size = self.min_view_size = config.local_view_size
        self.steps = self.local_stream.steps

    @property
    def feature_size(self) -> int:
        """Return the length of a feature vector."""
        return max(self.global_stream.feature_size, self.local_stream.feature_size)

    def encoder(self, level: int) -> nn.Module:
        """Return the stream of a level, with features of the common length."""
        stream = self.global_stream if level == 1 else self.local_stream
        return StreamEncoder(stream, self.feature_size, self.dropout)

    def view_size_of(self, region: Region) -> int:
        """Return the side in pixels at which a region is read: each stream has its own."""
        return self.view_size if region.level == 1 else self.local_size

    def aggregate(
        self, features: Tensor, mask: Tensor, levels: Tensor, unread: Tensor | None = None
    ) -> Aggregated:
        """Add the logits of the whole image and the weighted mean logits of its regions.

        If only one stream has features, its logits are returned.
        """
        features = masked_features(features, mask, unread)
        logits = self.classify(features, levels)  # (images, regions, classes)
        local = levels > 1
        streams = torch.stack([mask & ~local, mask & local], dim=1)  # (images, 2, regions)
        counts = streams.sum(dim=2, keepdim=True)  # (images, 2, 1)
        means = streams.to(logits) / counts.clamp(min=1)  # (images, 2, regions)
        some = counts > 0
        factors = logits.new_tensor([1.0, self.local_weight]).view(1, 2, 1)
        factors = torch.where(some.all(dim=1, keepdim=True), factors, some.to(logits))
        weights = (factors / factors.sum(dim=1, keepdim=True) * means).sum(dim=1)
        by_stream = means @ logits  # (images, 2, classes)
        total = (factors * by_stream).sum(dim=1)  # (images, classes)
        mean = (weights.unsqueeze(-1) * features).sum(dim=1)  # (images, D)
        parts = {"whole": by_stream[:, 0], "regions": by_stream[:, 1], "instances": logits}
        return Aggregated(total, weights, mean, parts)

    def classify(self, features: Tensor, levels: Tensor) -> Tensor:
        """Return the logits of single regions, each from the stream of its level."""
        whole, local = self.global_stream, self.local_stream
        return torch.where(
            (levels > 1).unsqueeze(-1),
            local.head(self.dropout(features[..., : local.feature_size])),
            whole.head(self.dropout(features[..., : whole.feature_size])),
        )


class StreamEncoder(nn.Module):
    """One stream with its feature vectors padded to the common length."""

    def __init__(self, stream: "GlobalStream | LocalStream", size: int, dropout: nn.Module) -> None:
        super().__init__()
        self.stream, self.dropout = stream, dropout
        self.padding = size - stream.feature_size

    def forward(self, views: Tensor, positions: Tensor, score_cells: bool = True) -> EncoderOutput:
        """Encode views (n, bands, side, side)."""
        features, cell_logits, aux = self.stream(views, score_cells)
        if "step_outputs" in aux:
            aux["step_logits"] = self.stream.head(self.dropout(aux.pop("step_outputs")))
        return EncoderOutput(functional.pad(features, (0, self.padding)), cell_logits, aux)


class GlobalStream(nn.Module):
    """A backbone and a head; cells are scored by the class activation map."""

    def __init__(self, config: TwoStreamConfig, backbone: Stream, classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.uses_cam, self.temperature = config.patches == "cam", config.temperature
        self.pool_cells = Pool(backbone.map_size, config.grid, config.pooling)
        self.feature_size = self.pool_cells.channels
        self.head = nn.Linear(self.feature_size, classes)
        init_weights(config.backbone, self.head)

    def forward(self, views: Tensor, score_cells: bool = True) -> EncoderOutput:
        """Return the pooled map, and as cell logits the evidence for the predicted class."""
        maps = self.backbone(views)  # (n, channels, height, width)
        vectors = self.backbone.pool(maps)  # (n, features)
        rows, columns = self.pool_cells.down.shape[0], self.pool_cells.across.shape[1]
        evidence = vectors.new_zeros(vectors.shape[0], rows, columns)
        if score_cells and self.uses_cam:
            evidence = self.cell_evidence(maps.detach(), vectors.detach())
        logits = normalised_logits(evidence, centered=True, temperature=self.temperature)
        return EncoderOutput(vectors, logits.unsqueeze(2), {})

    def cell_evidence(self, maps: Tensor, vectors: Tensor) -> Tensor:
        """Return the class activation map of the predicted class, pooled (n, rows, columns).

        That is the logit of the class, without its bias, if the view were only the cell. It has no
        gradient.
        """
        label = self.head(vectors).argmax(dim=1)  # (n,)
        weights = self.head.weight.detach()[label]  # (n, features)
        cells: Tensor = self.pool_cells(maps)  # (n, features, rows, columns)
        return (weights[:, :, None, None] * cells).sum(dim=1)


class LocalStream(nn.Module):
    """A backbone, recurrent steps on the same input, and attention over the steps."""

    def __init__(self, config: TwoStreamConfig, backbone: Stream, classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.steps = 0 if config.steps == "none" else config.step_count
        self.last_only = config.steps == "last"
        self.places = config.grid.rows * config.grid.columns
        self.feature_size = backbone.feature_size
        if self.steps:
            size = self.feature_size = config.state_size
            self.memory = Recurrence(backbone.feature_size, size)
            self.weigh: nn.Module = (
                LastStep() if self.last_only else StepAttention(self.steps, size)
            )
        self.head = nn.Linear(self.feature_size, classes)

    def forward(self, views: Tensor, score_cells: bool = True) -> EncoderOutput:
        """Return the features of views; all cell logits are 0, as no level follows."""
        maps = self.backbone(views)  # (n, channels, height, width)
        cell_logits = maps.new_zeros(views.shape[0], self.places, 1).float()
        if not self.steps:
            return EncoderOutput(self.backbone.pool(maps), cell_logits, {})
        outputs: Tensor = self.memory(self.backbone.pool(maps), self.steps)  # (n, steps, size)
        weights = self.weigh(outputs)  # (n, steps)
        aux = {"step_weights": weights}
        if self.training and self.last_only:
            aux["step_outputs"] = outputs
        return EncoderOutput((weights.unsqueeze(2) * outputs).sum(dim=1), cell_logits, aux)


class StepAttention(nn.Module):
    """Learned weights of the steps, with one vector per step."""

    def __init__(self, steps: int, size: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(size)
        self.vectors = nn.Parameter(torch.empty(steps, size).uniform_(-bound, bound))

    def forward(self, outputs: Tensor) -> Tensor:
        """(n, steps, size) -> weights (n, steps) with sum 1."""
        return (outputs * self.vectors).sum(dim=2).softmax(dim=1)


class LastStep(nn.Module):
    """Weight 1 for the last step."""

    def forward(self, outputs: Tensor) -> Tensor:
        """(n, steps, size) -> weights (n, steps)."""
        weights = outputs.new_zeros(outputs.shape[1])
        weights[-1] = 1
        return weights.expand(outputs.shape[0], -1)


class State(NamedTuple):
    """State of one LSTM layer."""

    output: Tensor  # (n, size)
    cell: Tensor  # (n, size)


class LstmLayer(nn.Module):
    """One LSTM layer; gates are in torch's order: input, forget, cell, output.

    It consists of dense layers, so that its multiplications are counted.
    """

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.enter = nn.Linear(inputs, 4 * size)
        self.recall = nn.Linear(size, 4 * size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(size), 1 / math.sqrt(size))

    def forward(self, entered: Tensor, state: State) -> State:
        """Return the next state from the output of `enter` (n, 4 x size)."""
        gates = entered + self.recall(state.output)
        enter, forget, new, out = gates.chunk(4, dim=1)  # (n, size) each
        cell = forget.sigmoid() * state.cell + enter.sigmoid() * new.tanh()
        return State(out.sigmoid() * cell.tanh(), cell)


class Recurrence(nn.Module):
    """Stacked LSTM layers with zero initial states."""

    def __init__(self, inputs: int, size: int, layers: int = 2) -> None:
        super().__init__()
        self.size = size
        self.layers = nn.ModuleList(
            LstmLayer(size if layer else inputs, size) for layer in range(layers)
        )

    def forward(self, inputs: Tensor, steps: int) -> Tensor:
        """Feed the same inputs (n, inputs) at every step; return outputs (n, steps, size)."""
        first, *others = self.layers
        assert isinstance(first, LstmLayer)
        entered = first.enter(inputs)  # the same at every step
        zeros = inputs.new_zeros(inputs.shape[0], self.size)
        states, outputs = [State(zeros, zeros) for _ in self.layers], []
        for _ in range(steps):
            states[0] = first(entered, states[0])
            for number, layer in enumerate(others, 1):
                assert isinstance(layer, LstmLayer)
                states[number] = layer(layer.enter(states[number - 1].output), states[number])
            outputs.append(states[-1].output)
        return torch.stack(outputs, dim=1)


def objective(episodes: Episodes, task: Task, config: TwoStreamObjective) -> Terms:
    """Return the losses of both streams and the ranking loss between them.

    Each image counts by its importance, whatever the number of its regions. With `step_logits`,
    the mean loss of the steps replaces the loss of the regions. `p_global` and `p_local`, the mean
    probabilities of the true class, are metrics only.
    """
    targets, images = episodes.targets, len(episodes.targets)
    whole, local = episodes.level == 1, episodes.level > 1  # (regions,)
    order = episodes.image[whole].argsort()
    if len(order) != images:
        raise ValueError("not every image has exactly one view of the whole")
    global_logits = episodes.region_logits[whole][order]  # (images, classes)
    local_logits, image = episodes.region_logits[local], episodes.image[local]  # (patches, ...)
    weights, truth = image_weights(image, episodes, task), targets[image]  # (patches,)
    if "step_logits" in episodes.aux:
        region, logits = episodes.aux["step_logits"]
        steps, step_image = logits.shape[1], episodes.image[region]
        step_weights = image_weights(step_image, episodes, task) / steps
        ce_local = task.loss(
            logits.flatten(0, 1),
            targets[step_image].repeat_interleave(steps),
            step_weights.repeat_interleave(steps),
        )
    else:
        ce_local = task.loss(local_logits, truth, weights)
    reference = global_logits[image].detach() if config.hold_global else global_logits[image]
    ranking = ranking_loss(reference, local_logits, truth, margin=config.margin)  # (patches,)
    importance = task.importance(targets) / images  # (images,)
    p_local = true_probability(local_logits, truth).sum() / max(len(truth), 1)
    return {
        "ce_global": (1.0, task.loss(global_logits, targets, importance)),
        "ce_local": (config.local, ce_local),
        "ranking": (config.ranking, (ranking * weights).sum()),
        "p_global": (None, true_probability(global_logits, targets).mean()),
        "p_local": (None, p_local),
    }


def ranking_loss(
    global_logits: Tensor, local_logits: Tensor, targets: Tensor, *, margin: float
) -> Tensor:
    """Return by how much the local probability misses the global one plus the margin (n,).

    Both are probabilities of the true class, from logits (n, classes).
    """
    local = true_probability(local_logits, targets)
    return (true_probability(global_logits, targets) + margin - local).clamp(min=0)


def true_probability(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the probability (n,) that logits (n, classes) give to the targets."""
    probabilities = at_least_single(logits).softmax(dim=1)
    return probabilities.gather(1, targets.unsqueeze(1)).squeeze(1)
