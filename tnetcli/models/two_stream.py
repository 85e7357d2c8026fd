"""Two streams: one encodes the whole image, a recurrent one its regions.

"Search for Finer Attention Details for Fine-Grained Image Classification" (thesis).
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

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
    side_loss,
)
from tnetcli.models.configs import TwoStreamConfig, TwoStreamObjective, Weights
from tnetcli.models.encoders import Stream
from tnetcli.models.nets import Pool, normalised_logits
from tnetcli.tasks import Task, at_least_single


class TwoStream(Model):
    """The global stream encodes level 1, the local stream level 2; they share no weights."""

    family = "two_stream"

    def __init__(
        self, config: TwoStreamConfig, *, classes: int, bands: int = 3, pretrained: Weights = False
    ) -> None:
        super().__init__(config, grid=config.grid, classes=classes, bands=bands)
        self.local_size = self.min_view_size = config.local_view_size
        backbone = Stream(config, bands=bands, pretrained=pretrained)
        self.global_stream = GlobalStream(config, backbone, classes)
        of_regions = config.model_copy(update={"view_size": self.local_size})
        backbone = Stream(of_regions, bands=bands, pretrained=pretrained)
        self.local_stream = LocalStream(config, backbone, classes)
        init_weights(config.backbone, self.local_stream.head)
        streams = (self.global_stream, self.local_stream)
        self.feature_size = max(stream.feature_size for stream in streams)
        for stream in streams:
            stream.padding = self.feature_size - stream.feature_size

    def encoder(self, level: int) -> nn.Module:
        """Return the stream of a level."""
        return self.global_stream if level == 1 else self.local_stream

    def view_size_of(self, region: Region) -> int:
        """Return the side in pixels at which a region is read: each stream has its own."""
        return self.view_size if region.level == 1 else self.local_size

    def aggregate(
        self, features: Tensor, mask: Tensor, levels: Tensor, unread: Tensor | None = None
    ) -> Aggregated:
        """Add logits of the whole and mean logits of its regions; or take those that there are."""
        features = masked_features(features, mask, unread)
        logits = self.classify(features, levels)  # (images, regions, classes)
        local = levels > 1
        streams = torch.stack([mask & ~local, mask & local], dim=1)  # (images, 2, regions)
        counts = streams.sum(dim=2, keepdim=True)  # (images, 2, 1)
        means = streams.to(logits) / counts.clamp(min=1)  # (images, 2, regions)
        by_stream = means @ logits  # (images, 2, classes)
        some = (counts > 0).to(logits)
        weights = (some / some.sum(dim=1, keepdim=True) * means).sum(dim=1)  # (images, regions)
        mean = (weights.unsqueeze(-1) * features).sum(dim=1)  # (images, D)
        parts = {"whole": by_stream[:, 0], "regions": by_stream[:, 1], "instances": logits}
        return Aggregated(by_stream.sum(dim=1), weights, mean, parts)

    def classify(self, features: Tensor, levels: Tensor) -> Tensor:
        """Return the logits of single regions, each from the stream of its level."""
        local, whole = (
            stream.head(stream.dropout(features[..., : stream.feature_size]))
            for stream in (self.local_stream, self.global_stream)
        )
        return torch.where((levels > 1).unsqueeze(-1), local, whole)


class GlobalStream(nn.Module):
    """A backbone and a head; cells are scored by the class activation map."""

    def __init__(self, config: TwoStreamConfig, backbone: Stream, classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.uses_cam, self.temperature = config.patches == "cam", config.temperature
        self.pool_cells = Pool(backbone.map_size, config.grid, config.pooling)
        self.feature_size = self.pool_cells.channels
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(self.feature_size, classes)
        self.grid, self.padding = config.grid, 0  # zeros that are appended to a feature vector
        init_weights(config.backbone, self.head)

    def forward(self, views: Tensor, positions: Tensor, score_cells: bool = True) -> EncoderOutput:
        """Return the pooled map, and as cell logits the evidence for the predicted class."""
        maps, vectors = self.backbone(views)  # (n, channels, height, width), (n, features)
        evidence = vectors.new_zeros(vectors.shape[0], self.grid.rows, self.grid.columns)
        if score_cells and self.uses_cam:
            evidence = self.cell_evidence(maps.detach(), vectors.detach())
        logits = normalised_logits(evidence, centered=True, temperature=self.temperature)
        features = functional.pad(vectors, (0, self.padding))
        return EncoderOutput(features, logits.unsqueeze(2), {})

    def cell_evidence(self, maps: Tensor, vectors: Tensor) -> Tensor:
        """Return the class activation map of the predicted class, pooled (n, rows, columns).

        It is the class's logit, without bias or gradient, if the view were only the cell.
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
        self.feature_size, self.padding = backbone.feature_size, 0
        if self.steps:
            size = self.feature_size = config.state_size
            self.memory = Recurrence(backbone.feature_size, size)
            if not self.last_only:
                self.weigh = StepAttention(self.steps, size)
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(self.feature_size, classes)

    def forward(self, views: Tensor, positions: Tensor, score_cells: bool = True) -> EncoderOutput:
        """Return the features of views; all cell logits are 0, as no level follows."""
        _, vectors = self.backbone(views)  # (n, features)
        cell_logits, aux = vectors.new_zeros(views.shape[0], self.places, 1).float(), {}
        if self.steps:
            outputs: Tensor = self.memory(vectors, self.steps)  # (n, steps, size)
            if self.last_only:
                weights = functional.pad(outputs.new_ones(outputs.shape[0], 1), (self.steps - 1, 0))
            else:
                weights = self.weigh(outputs)  # (n, steps)
            vectors = (weights.unsqueeze(2) * outputs).sum(dim=1)
            aux["step_weights"] = weights
            if self.training and self.last_only:
                aux["step_logits"] = self.head(self.dropout(outputs))
        return EncoderOutput(functional.pad(vectors, (0, self.padding)), cell_logits, aux)


class StepAttention(nn.Module):
    """Learned weights of the steps, with one vector per step."""

    def __init__(self, steps: int, size: int) -> None:
        super().__init__()
        bound = 1 / math.sqrt(size)
        self.vectors = nn.Parameter(torch.empty(steps, size).uniform_(-bound, bound))

    def forward(self, outputs: Tensor) -> Tensor:
        """(n, steps, size) -> weights (n, steps) with sum 1."""
        return (outputs * self.vectors).sum(dim=2).softmax(dim=1)


class LstmLayer(nn.Module):
    """One LSTM layer, of dense layers, so that its multiplications are counted."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.enter = nn.Linear(inputs, 4 * size)
        self.recall = nn.Linear(size, 4 * size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(size), 1 / math.sqrt(size))

    def forward(self, entered: Tensor, output: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
        """Return the next output and cell (n, size) from the output of `enter` (n, 4 x size)."""
        enter, forget, new, out = (entered + self.recall(output)).chunk(4, dim=1)  # (n, size) each
        cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
        return out.sigmoid() * cell.tanh(), cell


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
        zeros = inputs.new_zeros(inputs.shape[0], self.size)
        layers = [each for each in self.layers if isinstance(each, LstmLayer)]
        states, outputs = [(zeros, zeros)] * len(layers), []
        first = layers[0].enter(inputs)  # the same at every step
        for _ in range(steps):
            for number, layer in enumerate(layers):
                entered = layer.enter(states[number - 1][0]) if number else first
                states[number] = layer(entered, *states[number])
            outputs.append(states[-1][0])
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
        steps = episodes.aux["step_logits"][1].shape[1]
        ce_local = side_loss(episodes, task, "step_logits") / steps
    else:
        ce_local = task.loss(local_logits, truth, weights)
    ranking = ranking_loss(global_logits[image], local_logits, truth, margin=config.margin)
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
    """Return by how much the local probability of the class misses the global one plus margin."""
    local = true_probability(local_logits, targets)
    return (true_probability(global_logits, targets) + margin - local).clamp(min=0)


def true_probability(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the probability (n,) that logits (n, classes) give to the targets."""
    probabilities = at_least_single(logits).softmax(dim=1)
    return probabilities.gather(1, targets.unsqueeze(1)).squeeze(1)
