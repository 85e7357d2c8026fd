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
    check_unread,
    image_weights,
    init_bagnet,
    init_efficientnet,
)
from tnetcli.models.configs import Steps, StepVectors, TwoStreamConfig, TwoStreamObjective
from tnetcli.models.encoders import BAGNET, Stream
from tnetcli.models.location import normalised_logits
from tnetcli.models.nets import MapSize, Pool
from tnetcli.tasks import Task, at_least_single

WIDTH = 512  # of the inner layers of queries and answers


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
        self.global_stream = GlobalStream(
            config, classes=classes, bands=bands, pretrained=pretrained
        )
        self.local_stream = LocalStream(config, classes=classes, bands=bands, pretrained=pretrained)
        self.dropout = nn.Dropout(config.dropout)
        self.local_weight = config.local_weight
        self.min_view_size = config.seen_locally
        self.steps = self.local_stream.steps

    @property
    def feature_size(self) -> int:
        """Return the length of a feature vector."""
        return max(self.global_stream.feature_size, self.local_stream.feature_size)

    def encoder(self, level: int) -> nn.Module:
        """Return the stream of a level, which returns features of the common length."""
        stream = self.global_stream if level == 1 else self.local_stream
        return StreamEncoder(stream, self.feature_size, self.dropout)

    def view_size_of(self, region: Region) -> int:
        """Return the pixels a side at which a region is read: each stream has its own."""
        return self.view_size if region.level == 1 else self.local_stream.view_size

    def aggregate(
        self, features: Tensor, mask: Tensor, levels: Tensor, unread: Tensor | None = None
    ) -> Aggregated:
        """Add the logits of the whole image and, by their weight, the mean ones of the regions.

        Where only one stream has encoded something, its answer stands.
        """
        check_unread(unread)
        features = features.masked_fill(~mask.unsqueeze(-1), 0)  # as 0 times NaN is NaN
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
        """Return the logits of single regions, each by the stream of its level."""
        whole, near = self.global_stream, self.local_stream
        return torch.where(
            (levels > 1).unsqueeze(-1),
            near.head(self.dropout(features[..., : near.feature_size])),
            whole.head(self.dropout(features[..., : whole.feature_size])),
        )


class StreamEncoder(nn.Module):
    """One stream, with its feature vectors padded to the length that both streams share."""

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
    """A map of the whole image, its mean, and a dense classifier."""

    def __init__(
        self,
        config: TwoStreamConfig,
        *,
        classes: int,
        bands: int,
        pretrained: bool | Path = False,
    ) -> None:
        super().__init__()
        self.backbone = Stream(config, bands=bands, pretrained=pretrained)
        size, wide = self.backbone.map_size, config.widening
        self.widen: nn.Module = nn.Identity()
        if wide is not None:
            self.widen = nn.Sequential(
                nn.Conv2d(size.channels, wide, 1), nn.ReLU(), nn.Conv2d(wide, wide, 1), nn.ReLU()
            )
            size = size._replace(channels=wide)
        self.patches, self.temperature = config.patches, config.temperature
        self.pool_cells = Pool(size, config.grid, config.pooling)
        self.feature_size = self.pool_cells.channels
        self.head = nn.Linear(self.feature_size, classes)
        start = init_bagnet if config.backbone == BAGNET else init_efficientnet
        for part in (self.widen, self.head):
            start(part)

    def forward(self, views: Tensor, score_cells: bool = True) -> EncoderOutput:
        """Return the pooled map, and as cell logits the evidence for the most probable class."""
        maps = self.widen(self.backbone(views))  # (n, channels, height, width)
        vectors = self.backbone.pool(maps)  # (n, features)
        rows, columns = self.pool_cells.down.shape[0], self.pool_cells.across.shape[1]
        evidence = vectors.new_zeros(vectors.shape[0], rows, columns)
        if score_cells and self.patches == "cam":
            evidence = self.cell_evidence(maps.detach(), vectors.detach())
        logits = normalised_logits(evidence, centered=True, temperature=self.temperature)
        return EncoderOutput(vectors, logits.unsqueeze(2), {})

    def cell_evidence(self, maps: Tensor, vectors: Tensor) -> Tensor:
        """Return the class activation map of the most probable class, pooled (n, rows, columns).

        That is the logit that the class would have if the view were nothing but the cell, without
        the constant. It has no gradient.
        """
        label = self.head(vectors).argmax(dim=1)  # (n,)
        weights = self.head.weight.detach()[label]  # (n, features)
        cells: Tensor = self.pool_cells(maps)  # (n, features, rows, columns)
        return (weights[:, :, None, None] * cells).sum(dim=1)


class LocalStream(nn.Module):
    """A map of a region, the same vector fed at every step, attention over the steps."""

    def __init__(
        self,
        config: TwoStreamConfig,
        *,
        classes: int,
        bands: int,
        pretrained: bool | Path = False,
    ) -> None:
        super().__init__()
        name = config.local_backbone or config.backbone
        if isinstance(pretrained, Path) and name != config.backbone:
            raise ModelError(
                f"`{pretrained}` cannot hold the weights of `{config.backbone}` and `{name}`",
                hint="use one backbone for both streams, or the hub's weights: pretrained: true",
            )
        self.view_size, self.steps = config.seen_locally, config.steps_made
        self.each_step_learns = config.steps == "last"
        self.places = config.grid.rows * config.grid.columns
        built = config.model_copy(update={"backbone": name, "view_size": self.view_size})
        self.backbone = Stream(built, bands=bands, pretrained=pretrained)
        self.attend: SelfAttention | None = None
        self.feature_size = self.backbone.feature_size
        if self.steps:
            size = self.feature_size = config.state_size
            if config.self_attention:
                self.attend = SelfAttention(
                    self.backbone.map_size,
                    size,
                    keys=config.key_channels,
                    basis=config.basis_channels,
                )
            self.memory = Recurrence(size if self.attend else self.backbone.feature_size, size)
            self.weigh = build_step_shares(
                config.steps,
                self.steps,
                first=config.first_step,
                size=size,
                vectors=config.step_vectors,
            )
        self.head = nn.Linear(self.feature_size, classes)
        start = init_bagnet if name == BAGNET else init_efficientnet
        start(self.head)

    def forward(self, views: Tensor, score_cells: bool = True) -> EncoderOutput:
        """Return the vector to be classified; all cells are alike, as nothing is read below."""
        maps = self.backbone(views)  # (n, channels, height, width)
        cell_logits = maps.new_zeros(views.shape[0], self.places, 1).float()
        if not self.steps:
            return EncoderOutput(self.backbone.pool(maps), cell_logits, {})
        outputs: Tensor  # (n, steps, size)
        if self.attend is not None:
            outputs = self.attend(self.backbone.dropout(maps), self.memory, self.steps)
        else:
            outputs = self.memory(self.backbone.pool(maps), self.steps)
        weights = self.weigh(outputs)  # (n, steps)
        aux = {"step_weights": weights}
        if self.training and self.each_step_learns:
            aux["step_outputs"] = outputs
        return EncoderOutput(weigh_steps(outputs, weights), cell_logits, aux)


class State(NamedTuple):
    """State of one layer between steps."""

    output: Tensor  # (regions, size)
    cell: Tensor  # (regions, size)


class Memory(nn.Module):
    """One layer of long short-term memory; gates are in the order of torch: in, forget, new, out.

    Of dense layers and not of torch's own, so that what it multiplies is counted.
    """

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.enter = nn.Linear(inputs, 4 * size)
        self.recall = nn.Linear(size, 4 * size)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(size), 1 / math.sqrt(size))

    def forward(self, entered: Tensor, state: State) -> State:
        """Take what `enter` made of the input, (regions, 4 x size), and return the next state."""
        gates = entered + self.recall(state.output)
        enter, forget, new, out = gates.chunk(4, dim=1)  # (regions, size) each
        cell = forget.sigmoid() * state.cell + enter.sigmoid() * new.tanh()
        return State(out.sigmoid() * cell.tanh(), cell)


class Recurrence(nn.Module):
    """Layers of memory on top of each other; all begin with zeros."""

    def __init__(self, inputs: int, size: int, layers: int = 2) -> None:
        super().__init__()
        self.size = size
        self.layers = nn.ModuleList(
            Memory(size if layer else inputs, size) for layer in range(layers)
        )

    def start(self, like: Tensor) -> list[State]:
        """Return what is remembered before the first step of as many regions as `like` has."""
        zeros = like.new_zeros(like.shape[0], self.size)
        return [State(zeros, zeros) for _ in self.layers]

    def enter(self, inputs: Tensor) -> Tensor:
        """Return what the first layer makes of (regions, inputs), to be shared by equal steps."""
        first = self.layers[0]
        assert isinstance(first, Memory)
        entered: Tensor = first.enter(inputs)
        return entered

    def advance(self, entered: Tensor, states: list[State]) -> list[State]:
        """Make one step; the last state is that of the topmost layer."""
        after: list[State] = []
        for layer, state in zip(self.layers, states, strict=True):
            assert isinstance(layer, Memory)
            after.append(layer(layer.enter(after[-1].output) if after else entered, state))
        return after

    def forward(self, inputs: Tensor, steps: int) -> Tensor:
        """Show the same (regions, inputs) at every step -> outputs (regions, steps, size)."""
        entered, states, outputs = self.enter(inputs), self.start(inputs), []
        for _ in range(steps):
            states = self.advance(entered, states)
            outputs.append(states[-1].output)
        return torch.stack(outputs, dim=1)


class StepAttention(nn.Module):
    """Learn how much each step counts, from what it says."""

    def __init__(self, steps: int, size: int, vectors: StepVectors) -> None:
        super().__init__()
        self.vectors: nn.Parameter | None = None
        self.score: nn.Linear | None = None
        if vectors == "own":
            reach = 1 / math.sqrt(size)
            self.vectors = nn.Parameter(torch.empty(steps, size).uniform_(-reach, reach))
        else:
            self.score = nn.Linear(size, 1)

    def forward(self, outputs: Tensor) -> Tensor:
        """(regions, steps, size) -> shares (regions, steps), which sum to 1."""
        if self.vectors is not None:
            scores = (outputs * self.vectors).sum(dim=2)
        else:
            assert self.score is not None
            scores = self.score(outputs).squeeze(2)
        return scores.softmax(dim=1)


class FixedSteps(nn.Module):
    """Let some steps count by 1 and the others not at all."""

    shares: Tensor

    def __init__(self, steps: int, first: int, last: int) -> None:
        super().__init__()
        shares = torch.zeros(steps)
        shares[first - 1 : last] = 1.0
        self.register_buffer("shares", shares, persistent=False)  # (steps,)

    def forward(self, outputs: Tensor) -> Tensor:
        """(regions, steps, size) -> shares (regions, steps)."""
        return self.shares.to(outputs).expand(outputs.shape[0], -1)


def build_step_shares(
    steps: Steps, made: int, *, first: int, size: int, vectors: StepVectors
) -> StepAttention | FixedSteps:
    """Return what tells how much each of the steps that are made counts."""
    if steps == "attention":
        return StepAttention(made, size, vectors)
    return FixedSteps(made, first if steps == "sum" else made, made)


def weigh_steps(outputs: Tensor, shares: Tensor) -> Tensor:
    """(regions, steps, size), (regions, steps) -> their weighted sum (regions, size)."""
    return (shares.unsqueeze(2) * outputs).sum(dim=1)


def spatial_basis(channels: int, height: int, width: int) -> Tensor:
    """Return `channels` fixed waves (channels, height, width) that tell pixels of a map apart.

    Each is the product of one wave down and one across: cosine and sine of pi k y, k = 1, 2, ...,
    with y from 0 to 1 in the middle of pixels. Slow waves come first.
    """
    count = math.isqrt(max(channels - 1, 0)) + 1  # waves an axis: their pairs are enough
    down, across = _waves(count, height), _waves(count, width)
    pairs = sorted(
        ((row, column) for row in range(count) for column in range(count)),
        key=lambda pair: (max(pair), pair),
    )[:channels]
    rows = torch.tensor([row for row, _ in pairs], dtype=torch.long, device=down.device)
    columns = torch.tensor([column for _, column in pairs], dtype=torch.long, device=down.device)
    return down[rows].unsqueeze(2) * across[columns].unsqueeze(1)


def _waves(count: int, length: int) -> Tensor:
    """Return cosine and sine of slow, then of faster waves: (count, length)."""
    places = (torch.arange(length) + 0.5) / length  # (length,)
    frequencies = torch.arange(count) // 2 + 1  # (count,): 1, 1, 2, 2, ...
    angles = math.pi * frequencies.unsqueeze(1) * places
    is_cosine = (torch.arange(count) % 2 == 0).unsqueeze(1)
    return torch.where(is_cosine, angles.cos(), angles.sin())


def _two_layers(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, outputs))


class SelfAttention(nn.Module):
    """Compare a question with keys, and answer with the values under them.

    The first channels of the map are keys, the rest are values; both know their place.
    """

    basis: Tensor

    def __init__(
        self, size: MapSize, state_size: int, *, keys: int | None = None, basis: int = 64
    ) -> None:
        super().__init__()
        keys = size.channels // 2 if keys is None else keys
        if not 0 < keys < size.channels:
            raise ModelError(
                f"{keys} of {size.channels} channels are keys: none are left for questions or "
                "answers",
                hint=f"give key_channels between 1 and {size.channels - 1}",
            )
        self.keys = keys
        waves = spatial_basis(basis, size.height, size.width).flatten(1)
        self.register_buffer("basis", waves, persistent=False)  # (basis, pixels)
        self.ask = _two_layers(state_size, keys + basis)
        self.understand = _two_layers(size.channels - keys + basis, state_size)

    def split(self, seen: Tensor) -> tuple[Tensor, Tensor]:
        """(regions, channels, height, width) -> keys and values (regions, ..., pixels)."""
        pixels = seen.flatten(2)  # (regions, channels, pixels)
        basis = self.basis.to(pixels).expand(pixels.shape[0], -1, -1)
        keys = torch.cat([pixels[:, : self.keys], basis], dim=1)
        values = torch.cat([pixels[:, self.keys :], basis], dim=1)
        return keys, values

    def attend(self, state: Tensor, keys: Tensor) -> Tensor:
        """(regions, size), (regions, keys, pixels) -> attention (regions, pixels), sums to 1."""
        question = self.ask(state).unsqueeze(1)  # (regions, 1, keys)
        scores: Tensor = (question @ keys).squeeze(1) / math.sqrt(keys.shape[1])
        return scores.softmax(dim=1)

    def answer(self, attention: Tensor, values: Tensor) -> Tensor:
        """(regions, pixels), (regions, values, pixels) -> input of the memory (regions, size)."""
        answer: Tensor = self.understand((values @ attention.unsqueeze(2)).squeeze(2))
        return answer

    def forward(self, seen: Tensor, memory: Recurrence, steps: int) -> Tensor:
        """Ask `steps` times, first of a blank memory -> its outputs (regions, steps, size)."""
        keys, values = self.split(seen)
        states, outputs = memory.start(keys), []
        for _ in range(steps):
            answer = self.answer(self.attend(states[-1].output, keys), values)
            states = memory.advance(memory.enter(answer), states)
            outputs.append(states[-1].output)
        return torch.stack(outputs, dim=1)


def objective(episodes: Episodes, task: Task, config: TwoStreamObjective) -> Terms:
    """Return the labels of both streams and the ranking loss between them.

    Every image counts by its importance, whatever the number of its regions. Where each step has a
    loss of its own, their mean replaces the loss of the regions. `p_global` and `p_local`, the mean
    probabilities of the true class, are metrics only.
    """
    targets, images = episodes.targets, len(episodes.targets)
    whole, near = episodes.level == 1, episodes.level > 1  # (regions,)
    order = episodes.image[whole].argsort()
    overall = episodes.region_logits[whole][order]  # (images, classes)
    if len(order) != images:
        raise ValueError("not every image has exactly one view of the whole")
    closer, image = episodes.region_logits[near], episodes.image[near]  # (patches, ...)
    weights = image_weights(image, episodes, task)  # (patches,)
    truth = targets[image]  # (patches,)
    if "step_logits" in episodes.aux:
        region, logits = episodes.aux["step_logits"]
        steps = logits.shape[1]
        of_step = image_weights(episodes.image[region], episodes, task) / steps
        ce_local = task.loss(
            logits.flatten(0, 1),
            targets[episodes.image[region]].repeat_interleave(steps),
            of_step.repeat_interleave(steps),
        )
    else:
        ce_local = task.loss(closer, truth, weights)
    beside = overall[image].detach() if config.hold_global else overall[image]
    behind = ranking_loss(beside, closer, truth, margin=config.margin)  # (patches,)
    own = task.importance(targets) / images  # (images,)
    p_local = true_probability(closer, truth).sum() / max(len(truth), 1)
    return {
        "ce_global": (1.0, task.loss(overall, targets, own)),
        "ce_local": (config.local, ce_local),
        "ranking": (config.ranking, (behind * weights).sum()),
        "p_global": (None, true_probability(overall, targets).mean()),
        "p_local": (None, p_local),
    }


def ranking_loss(
    global_logits: Tensor, local_logits: Tensor, targets: Tensor, *, margin: float
) -> Tensor:
    """Return by how much the local probability fails to exceed the global one by the margin (n,).

    Both are probabilities of the true class, from logits (n, classes).
    """
    local = true_probability(local_logits, targets)
    return (true_probability(global_logits, targets) + margin - local).clamp(min=0)


def true_probability(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the probability (n,) that logits (n, classes) give to the targets."""
    probabilities = at_least_single(logits).softmax(dim=1)
    return probabilities.gather(1, targets.unsqueeze(1)).squeeze(1)
