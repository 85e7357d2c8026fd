"""AnchorNet: name the patches that hold the evidence, then classify these; SPEC 4."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tnetcli.errors import ModelError
from tnetcli.geometry import Region
from tnetcli.models.anchor_arguments import ANCHORNET, AnchorArguments
from tnetcli.models.anchor_decision import Decision, decide, share_out
from tnetcli.models.anchor_grid import AnchorGrid
from tnetcli.models.anchor_parts import Anchors, BranchSeen
from tnetcli.models.backbone import BAGNET, build_backbone
from tnetcli.models.base import Conclusion, Lessons, Looked, Model
from tnetcli.models.initial import start_as_bagnet, start_as_efficientnet
from tnetcli.models.lsp import LOCALISATIONS
from tnetcli.models.weighting import Mean, weigh

IS_PATCH = 0.5  # above it, the last number of a feature vector says that it is of a patch


class AnchorNet(Model):
    """AnchorNet sees the whole image; its patches are seen by a classifier of their own.

    The features of a window are its class logits, and whether it is a patch. With a classifier
    for patches there are two levels; AnchorNet that sees its patches itself can go on.
    """

    family = "anchornet"
    grid: AnchorGrid

    def __init__(
        self,
        arguments: AnchorArguments,
        *,
        classes: int,
        bands: int = 3,
        pretrained: bool | Path = False,
    ) -> None:
        super().__init__(arguments, grid=arguments.grid, classes=classes, bands=bands)
        self.anchor = Anchors(arguments, classes=classes, bands=bands)
        self.mean = Mean()
        self.attended = arguments.heat == "attended"
        self.localisation = LOCALISATIONS[arguments.patches]
        self.most_named = self.localisation.most_of(arguments.view_size)
        self.sees_patches = arguments.backbone == ANCHORNET
        if self.sees_patches:
            _check_nothing_to_load(pretrained)
            return
        self.backbone = build_backbone(arguments, bands=bands, pretrained=pretrained)
        self.dropout = nn.Dropout(arguments.dropout)
        self.classifier = nn.Linear(self.backbone.feature_size, classes)
        start = start_as_bagnet if arguments.backbone == BAGNET else start_as_efficientnet
        start(self.classifier)

    @property
    def feature_size(self) -> int:
        """Return the length of a feature vector: a logit a class, and whether it is a patch."""
        return self.classes + 1

    def look(self, views: Tensor, regions: Sequence[Region], *, score_cells: bool = True) -> Looked:
        """See `views` (regions, bands, height, width); LSP names the cells if asked to."""
        return self.study(views, regions, score_cells=score_cells)[0]

    def study(
        self, views: Tensor, regions: Sequence[Region], *, score_cells: bool = True
    ) -> tuple[Looked, Lessons | None]:
        """Look, and return what else labels can teach, None where AnchorNet saw none of it."""
        own = [i for i, region in enumerate(regions) if self.sees_patches or region.level == 1]
        rest = [i for i in range(len(regions)) if i not in set(own)]
        attention = views.new_zeros(len(regions), self.grid.rows, self.grid.columns)
        parts: list[Tensor] = []
        lessons = None
        if own:
            seen: list[BranchSeen] = self.anchor(_rows(views, own))
            scores = torch.stack([branch.scores for branch in seen], dim=1)  # (own, 3, classes)
            decisions = _decide(scores)
            parts.append(scores[range(len(own)), [each.branch for each in decisions]])
            lessons = Lessons(tuple(own), scores=_with_auxiliary(scores, seen))
            if score_cells and not views.is_meta:
                named = torch.from_numpy(self._name_cells(seen, decisions))
                attention[own] = named.to(attention)
        if rest:
            parts.append(self._classify_patches(_rows(views, rest)))
        order = np.argsort(own + rest).tolist()
        scores = _rows(torch.cat(parts), order)  # (regions, classes)
        is_patch = torch.tensor([[float(region.level > 1)] for region in regions])
        features = torch.cat([scores, is_patch.to(scores)], dim=1)
        return Looked(features, attention if score_cells else None, features), lessons

    def conclude(self, features: Tensor, present: Tensor) -> Conclusion:
        """Add up the probabilities of the patches; without any, AnchorNet's own answer stands."""
        features = features.masked_fill(~present.unsqueeze(-1), 0)  # as 0 times NaN is NaN
        patches = present & (features[..., -1] > IS_PATCH)  # (images, regions)
        counted = torch.where(patches.any(dim=1, keepdim=True), patches, present)
        logs = self.classify(features)  # (images, regions, classes)
        total = logs.masked_fill(~counted.unsqueeze(-1), -torch.inf).logsumexp(dim=1)
        scores = total - counted.sum(dim=1, keepdim=True).log()  # (images, classes)
        flag, weights = weigh(self.mean, features[..., -1:], counted)
        return Conclusion(scores, weights.detach(), torch.cat([scores, flag], dim=1))

    def classify(self, features: Tensor) -> Tensor:
        """Return the logarithms of the class probabilities of single feature vectors."""
        return features[..., : self.classes].log_softmax(dim=-1)

    def _classify_patches(self, views: Tensor) -> Tensor:
        _, features = self.backbone(views)
        scores: Tensor = self.classifier(self.dropout(features))
        return scores

    def _name_cells(
        self, seen: Sequence[BranchSeen], decisions: Sequence[Decision]
    ) -> NDArray[np.float32]:
        """Return the attention (views, rows, columns): 0 for all that LSP did not take."""
        labels = torch.tensor([each.label for each in decisions], device=seen[0].scores.device)
        heats = [
            branch.heat(labels, attended=self.attended).detach().float().cpu().numpy()
            for branch in seen
        ]  # of each branch (views, height, width)
        grid = self.grid
        attention = np.zeros((len(decisions), grid.rows, grid.columns), np.float32)
        for view, decision in enumerate(decisions):
            heat = heats[decision.branch][view]
            positions = self.localisation.localise(heat, decision.branch)
            block = grid.block_of(decision.branch)
            own = attention[view, block, block]  # a part of it, not a copy
            own[positions[:, 0], positions[:, 1]] = share_out(heat, positions)
        return attention


def _check_nothing_to_load(pretrained: bool | Path) -> None:
    if pretrained:
        raise ModelError(
            f"`{ANCHORNET}` has no backbone to load weights for",
            hint="start from a trained model: init: FILE, or give another backbone",
        )


def _decide(scores: Tensor) -> list[Decision]:
    """Return a decision a view from (views, branches, classes)."""
    if scores.is_meta:  # only the cost is wanted
        return [Decision(0, 0)] * len(scores)
    # Logarithms, as probabilities near 1 round to 1, where no branch is surer than another.
    sureness = scores.detach().float().cpu().double().log_softmax(dim=-1).numpy()
    return [decide(each) for each in sureness]


def _with_auxiliary(scores: Tensor, seen: Sequence[BranchSeen]) -> Tensor:
    more = [branch.auxiliary for branch in seen if branch.auxiliary is not None]
    return torch.cat([scores, torch.stack(more, dim=1)], dim=1) if more else scores


def _rows(values: Tensor, numbers: list[int]) -> Tensor:
    """Return the rows of these numbers; all of them in order are the tensor itself."""
    return values if numbers == list(range(len(values))) else values[numbers]
