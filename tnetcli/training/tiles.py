"""Pre-training of the encoder on the labels of tiles."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from tnetcli.data.config import TilesConfig
from tnetcli.geometry import Grid, Region, Window
from tnetcli.models.base import Model
from tnetcli.models.devices import Precision, autocast
from tnetcli.synth.landscape import AMBIGUOUS, LandscapeMaker, LandscapeScene
from tnetcli.training.data import derive
from tnetcli.traversal.tree import Node
from tnetcli.traversal.views import View, Views


class TileBatch(NamedTuple):
    """Views of one step and their labels."""

    values: Tensor  # (views, bands, height, width)
    regions: list[Region]
    shares: Tensor  # (views, side, side, tile classes), under each pixel of the feature map
    labels: Tensor  # (views,), AMBIGUOUS for several classes
    level: Tensor  # (views,)


class TilePretraining:
    """Classifies the tiles under the feature map with a temporary head, and views by features."""

    def __init__(
        self,
        model: Model,
        maker: LandscapeMaker,
        views: Views,
        tiles: TilesConfig,
        *,
        seed: int,
        device: torch.device,
        precision: Precision,
    ) -> None:
        backbone: Any = model.backbone
        size = backbone.map_size
        self.dense = nn.Conv2d(size.channels, len(maker.tile_classes), 1).to(device)
        self._model, self._backbone = model, backbone
        self._maker, self._views, self._tiles = maker, views, tiles
        self._side, self._seed = size.height, seed
        self._device, self._precision = device, precision
        self._first_site = len(maker.landscape.background)

    def loss(self, step: int) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a step and its metrics."""
        batch = self._prepare(step)
        with autocast(self._device, self._precision):
            maps, pooled = self._backbone(batch.values)
            classes = self.dense(maps).permute(0, 2, 3, 1).float()  # (views, side, side, classes)
            positions = [region.position for region in batch.regions]
            features = self._model.embed(pooled, torch.tensor(positions, device=pooled.device))
            scores = self._model.classify(features, batch.level).float()
        dense = self._dense_loss(classes, batch)
        known = batch.labels != AMBIGUOUS
        count = known.sum().clamp(min=1)  # a small batch may have none
        window = functional.cross_entropy(scores[known], batch.labels[known], reduction="sum")
        window = window / count
        right = (scores[known].argmax(dim=1) == batch.labels[known]).sum() / count
        parts = {"dense": dense, "window": window, "window_accuracy": right}
        total = self._tiles.dense * dense + self._tiles.window * window
        return total, {name: float(value.detach()) for name, value in parts.items()}

    def _dense_loss(self, classes: Tensor, batch: TileBatch) -> Tensor:
        """Return the mean over views; within a view, sites have a larger weight."""
        by_level = torch.tensor(self._tiles.site_weights, device=classes.device)
        extra = by_level[(batch.level - 1).clamp(max=len(by_level) - 1)]  # (views,)
        site = batch.shares[..., self._first_site :].sum(dim=-1)  # (views, side, side)
        weight = 1 + extra[:, None, None] * site
        wrong = -(batch.shares * classes.log_softmax(dim=-1)).sum(dim=-1)  # (views, side, side)
        return ((wrong * weight).sum(dim=(1, 2)) / weight.sum(dim=(1, 2))).mean()

    def _prepare(self, step: int) -> TileBatch:
        grid = self._model.grid
        random = np.random.default_rng(derive(self._seed, "tiles", step))
        scenes = [
            self._maker.scene(int(seed), training=True, crowd=self._tiles)
            for seed in random.integers(2**48, size=self._tiles.views[0])
        ]
        above = [Node(i, Region(Window.whole(scene.size))) for i, scene in enumerate(scenes)]
        pixels = [self._read(above, scenes)]
        nodes = list(above)
        for level, count in enumerate(self._tiles.views[1:], start=2):
            doubted = random.binomial(count, self._tiles.doubt) if above else 0
            closer = self._doubt(above, pixels[-1], doubted, random) if doubted else []
            for image in random.integers(len(scenes), size=count - doubted):
                region = self._choose(scenes[image], level, grid, random)
                closer.append(Node(int(image), region))
            pixels.append(self._read(closer, scenes))
            nodes += closer
            above = closer
        regions = [node.region for node in nodes]
        shown = [(scenes[node.image], node.region.window) for node in nodes]
        shares = [scene.fractions(window, self._side) for scene, window in shown]
        return TileBatch(
            torch.cat(pixels).to(self._device, memory_format=torch.channels_last),
            regions,
            torch.from_numpy(np.stack(shares)).to(self._device),
            torch.tensor([scene.shown(window) for scene, window in shown], device=self._device),
            torch.tensor([region.level for region in regions], device=self._device),
        )

    def _doubt(
        self, above: Sequence[Node], pixels: Tensor, count: int, random: np.random.Generator
    ) -> list[Node]:
        """Return regions drawn where the coarser views predict a site: hard negatives, mostly."""
        grid = self._model.grid
        drawn = random.integers(len(above), size=count)
        seen = self._sites(pixels[torch.from_numpy(drawn)]).astype(np.float64)
        # (views, rows, columns): predicted fraction of a site
        cells = grid.row_weights(self._side) @ seen @ grid.column_weights(self._side).T
        places = []
        for number, share in zip(drawn, cells.reshape(count, -1) ** 2, strict=True):
            cell = random.choice(share.size, p=share / share.sum())
            parent = above[number]
            region = parent.region.child(grid, *divmod(int(cell), grid.columns))
            places.append(Node(parent.image, region))
        return places

    @torch.no_grad()
    def _sites(self, pixels: Tensor) -> NDArray[np.float32]:
        """Return the probability of a site under each pixel of the map (views, side, side)."""
        learning = self._backbone.training
        self._backbone.eval()  # running statistics stay as they are
        with autocast(self._device, self._precision):
            views = pixels.to(self._device, memory_format=torch.channels_last)
            classes = self.dense(self._backbone(views)[0])  # (views, classes, side, side)
        self._backbone.train(learning)
        probable = classes.float().softmax(dim=1)[:, self._first_site :].sum(dim=1)
        found: NDArray[np.float32] = probable.cpu().numpy()
        return found

    def _choose(
        self, scene: LandscapeScene, level: int, grid: Grid, random: np.random.Generator
    ) -> Region:
        """Return a region of a level over a random point of a site, or of the scene."""
        target = Window.whole(scene.size)
        if scene.boxes and random.random() < self._tiles.near:
            target = scene.boxes[random.integers(len(scene.boxes))]
        x = target.left + target.width * random.random()
        y = target.top + target.height * random.random()
        region = Region(Window.whole(scene.size))
        for _ in range(level - 1):
            region = region.child(grid, *region.window.nearest_cell(grid, x, y))
        return region

    def _read(self, nodes: Sequence[Node], scenes: Sequence[LandscapeScene]) -> Tensor:
        """Return the views of nodes (nodes, bands, height, width)."""
        read = []
        for _, view in chain.from_iterable(self._views.read(nodes, scenes)):
            if not isinstance(view, View):
                raise view
            read.append(view.values)
        return torch.from_numpy(np.stack(read)) if read else torch.empty(0)
