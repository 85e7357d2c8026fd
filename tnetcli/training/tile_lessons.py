"""Learning from the labels of tiles what a view shows at each scale, before where to look."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from tnetcli.devices import Precision, autocast
from tnetcli.geometry import Grid, Region, Window
from tnetcli.models.tnet import TNet
from tnetcli.scenes.landscape import AMBIGUOUS, LandscapeScene
from tnetcli.sections import Tiles
from tnetcli.training.sources import Landscapes, derive
from tnetcli.views import View, Views
from tnetcli.visits import Place


class Lesson(NamedTuple):
    """Views of one step, and what they show."""

    values: Tensor  # (views, bands, height, width)
    regions: list[Region]
    shares: Tensor  # (views, side, side, tile classes), of each class under a pixel of the map
    labels: Tensor  # (views,), AMBIGUOUS where no class can be told
    level: Tensor  # (views,)


class TileLessons(nn.Module):
    """Asks the map for the classes of tiles under it, and the features for the view's label.

    What reads the classes from the map is learned here and forgotten afterwards.
    """

    def __init__(
        self,
        model: TNet,
        source: Landscapes,
        views: Views,
        tiles: Tiles,
        *,
        seed: int,
        device: torch.device,
        precision: Precision,
    ) -> None:
        super().__init__()
        size = model.backbone.map_size()
        maker = source.makers["train"]
        self.dense = nn.Conv2d(size.channels, len(maker.tile_classes), 1).to(device)
        self._parts = (model, maker, views)  # hidden from `parameters`
        self._side, self._tiles, self._seed = size.height, tiles, seed
        self._device, self._precision = device, precision
        self._first_site = len(maker.landscape.background)
        self.windows = sum(tiles.views)

    def forward(self, step: int) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a step and its parts."""
        model, _, _ = self._parts
        lesson = self._prepare(step)
        with autocast(self._device, self._precision):
            seen, features = model.backbone(lesson.values)
            classes = self.dense(seen).permute(0, 2, 3, 1).float()  # (views, side, side, classes)
            scores = model.classify(model.position(features, lesson.regions)).float()
        dense = self._dense_loss(classes, lesson)
        known = lesson.labels != AMBIGUOUS
        count = known.sum().clamp(min=1)  # a small lesson may have none
        window = functional.cross_entropy(scores[known], lesson.labels[known], reduction="sum")
        window = window / count
        total = self._tiles.dense * dense + self._tiles.window * window
        right = (scores[known].argmax(dim=1) == lesson.labels[known]).sum() / count
        return total, {
            "dense": float(dense.detach()),
            "window": float(window.detach()),
            "window_accuracy": float(right),
        }

    def _dense_loss(self, classes: Tensor, lesson: Lesson) -> Tensor:
        """Return the mean over views; within a view, what is site counts more."""
        by_level = torch.tensor(self._tiles.site_weights, device=classes.device)
        extra = by_level[(lesson.level - 1).clamp(max=len(by_level) - 1)]  # (views,)
        site = lesson.shares[..., self._first_site :].sum(dim=-1)  # (views, side, side)
        weight = 1 + extra[:, None, None] * site
        wrong = -(lesson.shares * classes.log_softmax(dim=-1)).sum(dim=-1)  # (views, side, side)
        return ((wrong * weight).sum(dim=(1, 2)) / weight.sum(dim=(1, 2))).mean()

    def _prepare(self, step: int) -> Lesson:
        model, maker, views = self._parts
        random = np.random.default_rng(derive(self._seed, "tiles", step))
        scenes = [
            maker.scene(int(seed), training=True, crowd=self._tiles)
            for seed in random.integers(2**48, size=self._tiles.views[0])
        ]
        above = [Place(i, Region(Window.whole(scene.size))) for i, scene in enumerate(scenes)]
        pixels = [_read(views, above, scenes)]
        places = list(above)
        for level, count in enumerate(self._tiles.views[1:], start=2):
            doubted = random.binomial(count, self._tiles.doubt) if above else 0
            closer = self._doubt(above, pixels[-1], doubted, random) if doubted else []
            for image in random.integers(len(scenes), size=count - doubted):
                region = self._choose(scenes[image], level, model.grid, random)
                closer.append(Place(int(image), region))
            pixels.append(_read(views, closer, scenes))
            places += closer
            above = closer
        regions = [place.region for place in places]
        shown = [(scenes[place.image], place.region.window) for place in places]
        shares = [scene.fractions(window, self._side) for scene, window in shown]
        return Lesson(
            torch.cat(pixels).to(self._device, memory_format=torch.channels_last),
            regions,
            torch.from_numpy(np.stack(shares)).to(self._device),
            torch.tensor([scene.shown(window) for scene, window in shown], device=self._device),
            torch.tensor([region.level for region in regions], device=self._device),
        )

    def _doubt(
        self, above: Sequence[Place], pixels: Tensor, count: int, random: np.random.Generator
    ) -> list[Place]:
        """Return places within views of the level above, where the map itself sees a site.

        What it is wrong about is what the model would look at later, and mostly has no site.
        """
        grid = self._parts[0].grid
        drawn = random.integers(len(above), size=count)
        seen = self._sites(pixels[torch.from_numpy(drawn)]).astype(np.float64)
        # (views, rows, columns): what of each cell is taken for a site
        cells = grid.row_weights(self._side) @ seen @ grid.column_weights(self._side).T
        places = []
        for number, share in zip(drawn, cells.reshape(count, -1) ** 2, strict=True):
            cell = random.choice(share.size, p=share / share.sum())
            parent = above[number]
            region = parent.region.child(grid, *divmod(int(cell), grid.columns))
            places.append(Place(parent.image, region))
        return places

    @torch.no_grad()
    def _sites(self, pixels: Tensor) -> NDArray[np.float32]:
        """Return how probable a site is under each pixel of the map (views, side, side)."""
        backbone = self._parts[0].backbone
        learning = backbone.training
        backbone.eval()  # a look before the step leaves no trace in the running statistics
        try:
            with autocast(self._device, self._precision):
                views = pixels.to(self._device, memory_format=torch.channels_last)
                classes = self.dense(backbone(views)[0])  # (views, classes, side, side)
        finally:
            backbone.train(learning)
        probable = classes.float().softmax(dim=1)[:, self._first_site :].sum(dim=1)
        found: NDArray[np.float32] = probable.cpu().numpy()
        return found

    def _choose(
        self, scene: LandscapeScene, level: int, grid: Grid, random: np.random.Generator
    ) -> Region:
        """Return a window of a level: over a point of a site, or over any point."""
        target = Window.whole(scene.size)
        if scene.boxes and random.random() < self._tiles.near:
            target = scene.boxes[random.integers(len(scene.boxes))]
        x = target.left + target.width * random.random()
        y = target.top + target.height * random.random()
        region = Region(Window.whole(scene.size))
        for _ in range(level - 1):
            region = region.child(grid, *region.window.nearest_cell(grid, x, y))
        return region


def _read(views: Views, places: Sequence[Place], scenes: Sequence[LandscapeScene]) -> Tensor:
    """Return the views of places (places, bands, height, width)."""
    chunks = views.read(places, scenes, max(len(places), 1))
    seen = [view.values for chunk in chunks for _, view in chunk if isinstance(view, View)]
    return torch.from_numpy(np.stack(seen)) if seen else torch.empty(0)
