"""How well a model does on images that it does not learn from, and whether looking helps."""

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tnetcli.devices import Precision
from tnetcli.errors import ManifestError
from tnetcli.looking import Looker, Sight
from tnetcli.models.base import Model
from tnetcli.normalisation import Normalisation
from tnetcli.readers.base import Reader
from tnetcli.training.batches import take
from tnetcli.training.choices import by_chance
from tnetcli.training.distributed import ALONE, Ranks
from tnetcli.training.metrics import Outcomes, hit_levels, hit_rate
from tnetcli.training.pictures import Sample
from tnetcli.training.sources import Item, Source
from tnetcli.training.statistics import read_small
from tnetcli.traversal import Plan
from tnetcli.walks import Traversal

BATCH = 32
BY_CHANCE = 100  # images that are looked at by chance too
SHOWN = 8
THUMBNAIL = 320  # pixels a side


@dataclass(frozen=True, slots=True)
class Validation:
    """Figures of one validation, and a few of its images."""

    row: dict[str, Any]
    samples: list[Sample]

    @property
    def accuracy(self) -> float:
        """Return the accuracy at the deepest level."""
        return float(self.row["accuracy"][-1])

    @property
    def loss(self) -> float:
        """Return the mean loss of the conclusions."""
        return float(self.row["loss"])


def validate(
    model: Model,
    normalisation: Normalisation,
    source: Source,
    traversal: Traversal,
    plan: Plan,
    *,
    images: int | None,
    device: str,
    precision: Precision,
    threads: int,
    ranks: Ranks = ALONE,
) -> Validation:
    """Look at validation images as a prediction would, and at some by chance to compare.

    Processes that train together look at a part each; what they return is the same.
    """
    count = min(images or source.count("validation"), source.count("validation"))
    own = ranks.part(count)
    with Looker(
        model,
        normalisation,
        fit=traversal.fit,
        background=traversal.background,
        device=device,
        precision=precision,
        threads=threads,
    ) as looker:

        def look(until: int, *, at_random: bool = False) -> list[tuple[Item, Sight]]:
            stop = min(own.stop, until)
            return [
                pair
                for start in range(own.start, stop, BATCH)
                for pair in _look(
                    looker,
                    take(source, "validation", start, min(start + BATCH, stop)),
                    plan,
                    at_random=at_random,
                )
            ]

        found = look(count)
        compared = min(count, BY_CHANCE) if plan.levels > 1 else 0
        random = look(compared, at_random=True)
    seen = [each for part in ranks.gather([_check(*pair) for pair in found]) for each in part]
    chance = [each for part in ranks.gather([_check(*pair) for pair in random]) for each in part]
    if not seen:
        raise ManifestError("no image of the validation can be read", hint="see `tnet info`")
    levels = max(len(each["right"]) for each in seen)
    row: dict[str, Any] = {
        "images": len(seen),
        "loss": float(np.mean([each["loss"] for each in seen])),
        "accuracy": [_accuracy(seen, level) for level in range(levels)],
        "windows": float(np.mean([each["windows"] for each in seen])),
    }
    hits = hit_rate(dict(each["hits"]) for each in seen)
    if any(level > 1 for level in hits):
        row["hit"] = [hits[level].value for level in sorted(hits) if level > 1]
    if chance:
        same = {each["name"] for each in chance}
        learned = [each for each in seen if each["name"] in same]
        row["by_chance"] = _accuracy(chance, levels - 1)
        row["gain_over_chance"] = _accuracy(learned, levels - 1) - row["by_chance"]
    return Validation(row, [_sample(*pair, source.classes) for pair in found[:SHOWN]])


def _check(item: Item, sight: Sight) -> dict[str, Any]:
    """Return what is to be known of one image, as plain values."""
    return {
        "name": item.name,
        "loss": float(_outcome(item, sight).log_loss[0]),
        "right": [bool(scores.argmax() == item.label) for scores in sight.level_scores],
        "windows": len(sight.visits) - 1,
        "hits": [*hit_levels(_windows(sight), item.boxes).items()],
    }


def _look(
    looker: Looker, items: list[Item], plan: Plan, *, at_random: bool = False
) -> list[tuple[Item, Sight]]:
    seeds = [zlib.crc32(item.name.encode()) for item in items]
    attend = by_chance(seeds) if at_random else None
    told = None if at_random else [item.told for item in items]
    sights = looker.look(
        [item.reader for item in items], plan, seeds=seeds, attend=attend, told=told
    )
    return [
        (item, sight) for item, sight in zip(items, sights, strict=True) if isinstance(sight, Sight)
    ]


def _accuracy(seen: list[dict[str, Any]], level: int) -> float:
    """Return the part that is right had the looking ended at a level, or where it did."""
    return float(np.mean([each["right"][min(level, len(each["right"]) - 1)] for each in seen]))


def _outcome(item: Item, sight: Sight) -> Outcomes:
    return Outcomes.of(sight.scores[None], np.array([item.label]))


def _windows(sight: Sight) -> list[tuple[int, Any]]:
    return [(visit.place.region.level, visit.place.region.window) for visit in sight.visits]


def _sample(item: Item, sight: Sight, classes: tuple[str, ...]) -> Sample:
    outcome = _outcome(item, sight)
    return Sample(
        _thumbnail(item.reader),
        item.reader.size,
        [
            (visit.place.region.window, visit.place.region.level, visit.attention)
            for visit in sight.visits[1:]
        ],
        classes[item.label],
        classes[int(outcome.predicted[0])],
        float(outcome.confidence[0]),
        item.boxes,
    )


def _thumbnail(reader: Reader) -> NDArray[np.uint8]:
    """Return a small picture (height, width, 3), stretched from its darkest to its brightest."""
    pixels = read_small(reader, THUMBNAIL)
    values = pixels.values[[0, 1, 2] if len(pixels.values) >= 3 else [0, 0, 0]].astype(np.float64)
    known = values[:, pixels.valid & np.isfinite(values).all(axis=0)]
    if reader.dtype == np.uint8 or not known.size:
        low, high = 0.0, 255.0
    else:
        low, high = np.percentile(known, (1, 99)).tolist()
    with np.errstate(invalid="ignore"):
        scaled = np.clip((values - low) / max(high - low, 1e-12), 0, 1) * 255
    picture: NDArray[np.uint8] = np.nan_to_num(scaled).round().astype(np.uint8).transpose(1, 2, 0)
    return picture
