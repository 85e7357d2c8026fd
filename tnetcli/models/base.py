"""Interface of every model: encode views, propose cells, aggregate features."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from tnetcli.geometry import Grid, Region
from tnetcli.models.configs import Arguments


class EncoderOutput(NamedTuple):
    """Output of an encoder for n views.

    `cell_logits` are raw: policies take a softmax over places where they need probabilities.
    Places are the cells of the model's grid in reading order. Keys of `aux` that the rest of the
    program knows:

    - `pooled` (n, D): features before the positional encoding, for replay;
    - `step_weights` (n, steps): weight of each recurrent step;
    - `glimpse_boxes` (n, glimpses, 4): left, top, right, bottom; a view spans 0 to 1;
    - `glimpse_features` (n, glimpses, D): features of each glimpse, or after it.
    """

    features: Tensor  # (n, D)
    cell_logits: Tensor  # (n, places, channels)
    aux: dict[str, Tensor]


class Aggregated(NamedTuple):
    """Output of an aggregator.

    `parts` holds what the family computes on the way: logits of the `whole` view and of the
    `regions` (images, classes), and of `instances`, each region alone (images, regions, classes).
    """

    logits: Tensor  # (images, classes)
    weights: Tensor  # (images, regions), they sum to 1
    embedding: Tensor  # (images, D), the input of the head
    parts: dict[str, Tensor]


class Model(nn.Module, ABC):
    """Encoder, location module, positional encoding, aggregator and head.

    `encoder(level)` and `aggregate` are pure tensor functions that torch.export accepts. Level and
    mask are arguments; nothing about a region is hidden in its feature vector.
    """

    family: str
    most_levels: int | None  # None: no limit
    smallest_view: int  # pixels a side below which a region is finer than the image

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

    def encoder(self, level: int) -> nn.Module:
        """Return the module (views, positions, score_cells=True) -> EncoderOutput of a level.

        `views` (n, bands, side, side) are normalised, `positions` (n, 3) are those of the regions.
        Without `score_cells`, as at the last level, an encoder may skip its location module and
        return zeros. A family with one encoder implements it as its `forward`.
        """
        return self

    def view_size_of(self, region: Region) -> int:
        """Return the pixels a side at which a region is read."""
        return self.view_size

    def propose(
        self, cell_logits: NDArray[np.float32], aux: Mapping[str, NDArray[Any]]
    ) -> NDArray[np.float32]:
        """Return the logits (n, places, channels) that policies see; -inf is never chosen.

        It runs on the host, outside the exported encoder. By default all cells are proposed.
        """
        return cell_logits

    def embed(self, pooled: Tensor, positions: Tensor) -> Tensor:
        """Return features (n, D) from the pooled output of the backbone, for replay."""
        return pooled

    @abstractmethod
    def aggregate(
        self, features: Tensor, mask: Tensor, levels: Tensor, unread: Tensor | None = None
    ) -> Aggregated:
        """Combine the features (images, regions, D) that `mask` (images, regions) marks.

        `mask` is boolean and true at least once per image; masked features may hold anything.
        `levels` (images, regions) counts from 1. `unread` (images, classes + 1) is the log-sum of
        evidence in regions that were not read, per class, and their number; None without survey.
        """

    @abstractmethod
    def classify(self, features: Tensor, levels: Tensor) -> Tensor:
        """Return the logits of single regions: (..., D), (...) -> (..., classes)."""


def refuse_unread(unread: Tensor | None) -> None:
    """Raise a ValueError if unread evidence is given to an aggregator that does not use it."""
    if unread is not None:
        raise ValueError("this aggregator does not use unread evidence")
