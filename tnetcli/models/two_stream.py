"""Two streams: one for the whole image, one that thinks in steps about its windows; SPEC 5."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from tnetcli.geometry import Region
from tnetcli.models.base import Conclusion, Lessons, Looked, Model
from tnetcli.models.global_stream import GlobalStream
from tnetcli.models.local_stream import LocalStream
from tnetcli.models.two_stream_arguments import TwoStreamArguments

GLOBAL, LOCAL = 0.0, 1.0  # the first number of a feature vector says which stream it is of


class TwoStream(Model):
    """Level 1 is seen by the global stream, level 2 by the local one; nothing is shared.

    Feature vectors say for themselves what they are, so that a conclusion needs no levels: the
    stream; the shares of the steps; the vector that is classified, with zeros up to the longer of
    the two streams; and where each step learns by itself, what each says.
    """

    family = "two_stream"

    def __init__(
        self,
        arguments: TwoStreamArguments,
        *,
        classes: int,
        bands: int = 3,
        pretrained: bool | Path = False,
    ) -> None:
        super().__init__(arguments, grid=arguments.grid, classes=classes, bands=bands)
        self.global_stream = GlobalStream(
            arguments, classes=classes, bands=bands, pretrained=pretrained
        )
        self.local_stream = LocalStream(
            arguments, classes=classes, bands=bands, pretrained=pretrained
        )
        self.dropout = nn.Dropout(arguments.dropout)
        self.local_weight = arguments.local_weight
        self.smallest_view = arguments.seen_locally
        self.steps = self.local_stream.steps
        self._vector_size = max(self.global_stream.feature_size, self.local_stream.feature_size)
        self._told = self.steps * self.local_stream.feature_size * (arguments.steps == "last")

    @property
    def feature_size(self) -> int:
        """Return the length of a feature vector."""
        return 1 + self.steps + self._vector_size + self._told

    def look(self, views: Tensor, regions: Sequence[Region], *, score_cells: bool = True) -> Looked:
        """See `views` (regions, bands, height, width), each by the stream of its level."""
        if len(regions) != len(views):
            raise ValueError(f"{len(regions)} regions for {len(views)} views")
        whole = [index for index, region in enumerate(regions) if region.level == 1]
        near = [index for index, region in enumerate(regions) if region.level > 1]
        if not near:
            return self._look_at_all(views, score_cells)
        if not whole:
            return self._look_closer(views, score_cells)
        parts = (
            self._look_at_all(views[whole], score_cells),
            self._look_closer(views[near], score_cells),
        )
        order = torch.tensor([*whole, *near], device=views.device).argsort()
        features = torch.cat([part.features for part in parts])[order]
        attention = [part.attention for part in parts if part.attention is not None]
        return Looked(features, torch.cat(attention)[order] if attention else None, features)

    def study(
        self, views: Tensor, regions: Sequence[Region], *, score_cells: bool = True
    ) -> tuple[Looked, Lessons | None]:
        """Look; where each step learns by itself, return their scores in the windows."""
        looked = self.look(views, regions, score_cells=score_cells)
        near = tuple(index for index, region in enumerate(regions) if region.level > 1)
        scores = self.step_scores(looked.features[list(near)]) if near else None
        return looked, None if scores is None else Lessons(near, scores=scores)

    def _look_at_all(self, views: Tensor, score_cells: bool) -> Looked:
        seen, vectors = self.global_stream(views)
        attention = self.global_stream.score_cells(seen, vectors) if score_cells else None
        shares = vectors.new_zeros(len(vectors), self.steps)
        features = self._fold(GLOBAL, shares, vectors, vectors.new_zeros(len(vectors), 0))
        return Looked(features, attention, features)

    def _look_closer(self, views: Tensor, score_cells: bool) -> Looked:
        vectors, shares, outputs = self.local_stream(views)
        told = outputs.flatten(1) if self._told else vectors.new_zeros(len(vectors), 0)
        features = self._fold(LOCAL, shares, vectors, told)
        attention = None
        if score_cells:  # of what lies deeper this stream knows nothing
            exact = torch.promote_types(vectors.dtype, torch.float32)
            rows, columns = self.grid.rows, self.grid.columns
            attention = torch.full(
                (len(views), rows, columns),
                1 / (rows * columns),
                dtype=exact,
                device=views.device,
            )
        return Looked(features, attention, features)

    def _fold(self, stream: float, shares: Tensor, vectors: Tensor, told: Tensor) -> Tensor:
        count = len(vectors)
        return torch.cat(
            [
                vectors.new_full((count, 1), stream),
                shares,
                vectors,
                vectors.new_zeros(count, self._vector_size - vectors.shape[1]),
                told,
                vectors.new_zeros(count, self._told - told.shape[1]),
            ],
            dim=1,
        )

    def conclude(self, features: Tensor, present: Tensor) -> Conclusion:
        """Add the scores of the whole image and, by their weight, the mean ones of the windows.

        Where only one stream has seen something, its answer stands.
        """
        features = features.masked_fill(~present.unsqueeze(-1), 0)  # as 0 times NaN is NaN
        scores = self.classify(features)  # (images, regions, classes)
        local = self.is_local(features)
        streams = torch.stack([present & ~local, present & local], dim=1)  # (images, 2, regions)
        counts = streams.sum(dim=2, keepdim=True)  # (images, 2, 1)
        means = streams.to(scores) / counts.clamp(min=1)  # (images, 2, regions)
        some = counts > 0
        factors = scores.new_ones(1, 2, 1)
        factors[:, 1] = self.local_weight
        factors = torch.where(some.all(dim=1, keepdim=True), factors, some.to(scores))
        weights = (factors / factors.sum(dim=1, keepdim=True) * means).sum(dim=1)
        answers = (factors * (means @ scores)).sum(dim=1)  # (images, classes)
        mean = (weights.unsqueeze(-1) * features).sum(dim=1)
        return Conclusion(answers, weights, mean)

    def classify(self, features: Tensor) -> Tensor:
        """Return the class scores of single feature vectors, each by the stream it is of."""
        vectors = features[..., 1 + self.steps : 1 + self.steps + self._vector_size]
        whole, near = self.global_stream, self.local_stream
        return torch.where(
            self.is_local(features).unsqueeze(-1),
            near.classifier(self.dropout(vectors[..., : near.feature_size])),
            whole.classifier(self.dropout(vectors[..., : whole.feature_size])),
        )

    def is_local(self, features: Tensor) -> Tensor:
        """Return which feature vectors are of windows: (..., features) -> (...)."""
        return features[..., 0] > (GLOBAL + LOCAL) / 2

    def step_shares(self, features: Tensor) -> Tensor | None:
        """Return how much each step counts: (..., features) -> (..., steps), None without steps.

        All zeros in the whole image. The shares of attention sum to 1; steps that are summed or
        picked have 1.
        """
        return features[..., 1 : 1 + self.steps] if self.steps else None

    def step_scores(self, features: Tensor) -> Tensor | None:
        """Return the class scores of each step (..., steps, classes), if each learns by itself.

        None otherwise; those of the whole image mean nothing.
        """
        if not self._told:
            return None
        shape = (*features.shape[:-1], self.steps, self.local_stream.feature_size)
        told = features[..., -self._told :].reshape(shape)
        scores: Tensor = self.local_stream.classifier(self.dropout(told))
        return scores
