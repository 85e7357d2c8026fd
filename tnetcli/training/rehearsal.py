"""Walks that are remembered, so that what follows a frozen backbone can learn from them again."""

import math

import torch
from torch import Tensor

from tnetcli.models.tnet import TNet
from tnetcli.sections import Stage
from tnetcli.training.losses import Walked, label_loss
from tnetcli.training.sources import derive
from tnetcli.training.walking import Sights, by_image
from tnetcli.traversal import Plan


class Rehearsal:
    """Keeps what the backbone saw in the latest images, and concludes from it anew.

    Reading and seeing are all the cost of a step; concluding takes a hundredth of it, and needs
    many more examples to be learned. Attention does not learn here: it has to be tried out.
    """

    def __init__(
        self, model: TNet, plan: Plan, stage: Stage, *, images: int, seed: int, device: torch.device
    ) -> None:
        most = sum(
            math.prod(plan.keep_at(above) for above in range(1, level))
            for level in range(1, plan.levels + 1)
        )
        size = stage.remember
        self._model, self._loss, self._seed = model, stage.loss, seed
        self._images = images  # in each rehearsal
        self.times = stage.rehearse
        self._features = torch.zeros(size, most, model.feature_size, device=device)
        self._places = torch.zeros(size, most, 3, dtype=torch.long, device=device)
        self._levels = torch.zeros(size, most, dtype=torch.long, device=device)
        self._labels = torch.zeros(size, dtype=torch.long, device=device)
        self._count = 0  # remembered so far, also those that were forgotten since

    def remember(self, walked: Walked, sights: Sights) -> None:
        """Keep the images of a step in place of the oldest."""
        images, size = len(walked.labels), len(self._labels)
        seen = torch.cat(sights.features)  # (windows, features)
        features, levels = by_image(seen, walked.image, walked.level, images)
        where = self._model.position.places(sights.regions).to(seen.device)
        places, _ = by_image(where, walked.image, walked.level, images)
        slots = (self._count + torch.arange(images, device=levels.device)) % size
        most = levels.shape[1]
        self._levels[slots] = 0
        self._features[slots, :most] = features
        self._places[slots, :most] = places
        self._levels[slots, :most] = levels
        self._labels[slots] = walked.labels
        self._count += images

    def loss(self, step: int, time: int, class_weights: Tensor | None) -> Tensor:
        """Return the loss by labels of some remembered images, chosen by chance."""
        generator = torch.Generator().manual_seed(derive(self._seed, "rehearse", step, time))
        known = min(self._count, len(self._labels))
        chosen = torch.randint(known, (self._images,), generator=generator).to(self._labels.device)
        levels, labels = self._levels[chosen], self._labels[chosen]  # (images, most), (images,)
        present = levels > 0
        flat = self._model.position.mix(
            self._features[chosen][present], self._places[chosen][present]
        )  # (windows, features)
        features = flat.new_zeros(*levels.shape, flat.shape[1])
        features[present] = flat
        conclusion = self._model.conclude(features, present)
        image = torch.arange(len(labels), device=labels.device)[:, None].expand_as(levels)[present]
        nothing = flat.new_zeros(0)
        walked = Walked(
            labels=labels,
            scores=conclusion.scores,
            level_scores=conclusion.scores[None],
            concluded=conclusion.features,
            window_scores=self._model.classify(flat),
            image=image,
            level=levels[present],
            log_p=nothing,
            entropy=nothing,
        )
        return label_loss(walked, self._loss, class_weights=class_weights)[0]

    def state(self) -> dict[str, Tensor]:
        """Return what has to be stored to go on."""
        return {
            "features": self._features,
            "places": self._places,
            "levels": self._levels,
            "labels": self._labels,
            "count": torch.tensor(self._count),
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        self._features.copy_(state["features"])
        self._places.copy_(state["places"])
        self._levels.copy_(state["levels"])
        self._labels.copy_(state["labels"])
        self._count = int(state["count"])
