"""What every model promises: look at views, conclude from what was seen."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from tnetcli.geometry import Grid, Region
from tnetcli.models.arguments import Arguments


class Within(NamedTuple):
    """Where a model looked inside of views, glimpse after glimpse."""

    boxes: Tensor  # (regions, glimpses, 4), left, top, right, bottom; a view goes from 0 to 1
    features: Tensor  # (regions, glimpses, features), of each glimpse, or after it


class Looked(NamedTuple):
    """What a model saw in some views."""

    features: Tensor  # (regions, features)
    attention: Tensor | None  # (regions, rows, columns), each region's cells sum to 1
    bare: Tensor | None = None  # (regions, features), before their places were mixed in
    within: Within | None = None  # of models that take glimpses


class Conclusion(NamedTuple):
    """What a model makes of all the views of an image."""

    scores: Tensor  # (images, classes), logits
    weights: Tensor  # (images, regions), how much each region counted; they sum to 1
    features: Tensor  # (images, features), what was classified: the weighted mean


@dataclass(frozen=True, slots=True, eq=False)
class Lessons:
    """What can be learned from views beside their features; a row belongs to one of `regions`."""

    regions: tuple[int, ...]  # their numbers among the views that were looked at
    scores: Tensor | None = None  # (views, several, classes), logits that each learn the label
    log_p: Tensor | None = None  # (views,), of all that was drawn inside of a view, with gradient
    own: Tensor | None = None  # (views,), a loss that needs no label


class Model(nn.Module, ABC):
    """A classifier that is shown views and asked where to look closer.

    One set of weights serves all levels, so a model can be walked to any depth, with any number
    of windows.
    """

    family: str
    most_levels: int | None  # None: as many as asked for
    smallest_view: int  # pixels a side that a view has to have at least; by itself all

    def __init__(self, arguments: Arguments, *, grid: Grid, classes: int, bands: int) -> None:
        super().__init__()
        if classes < 1 or bands < 1:
            raise ValueError(f"a model needs a class and a band: `{classes}`, `{bands}`")
        self.arguments = arguments
        self.most_levels = arguments.most_levels
        self.grid = grid
        self.classes = classes
        self.bands = bands
        self.view_size = self.smallest_view = arguments.view_size

    @property
    @abstractmethod
    def feature_size(self) -> int:
        """Return the length of a feature vector."""

    @abstractmethod
    def look(self, views: Tensor, regions: Sequence[Region], *, score_cells: bool = True) -> Looked:
        """See `views` (regions, bands, height, width), normalised; score the cells if asked to."""

    def study(
        self, views: Tensor, regions: Sequence[Region], *, score_cells: bool = True
    ) -> tuple[Looked, Lessons | None]:
        """Look as a model that learns, and return what else can be learned from it, if anything."""
        return self.look(views, regions, score_cells=score_cells), None

    @abstractmethod
    def conclude(self, features: Tensor, present: Tensor) -> Conclusion:
        """Weigh the features (images, regions, features) that are present (images, regions).

        `present` is boolean, true at least once for every image; the rest may hold anything.
        """

    @abstractmethod
    def classify(self, features: Tensor) -> Tensor:
        """Return the class scores of single feature vectors: (..., features) -> (..., classes)."""

    def step_shares(self, features: Tensor) -> Tensor | None:
        """Return how much each step counted: (..., features) -> (..., steps), None without steps.

        All zeros where a view was not thought about in steps.
        """
        return None
