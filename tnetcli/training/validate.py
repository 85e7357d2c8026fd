"""Validate a model during training."""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tnetcli.data.normalize import Normalisation
from tnetcli.data.statistics import read_small
from tnetcli.errors import ManifestError
from tnetcli.evaluation.metrics import Outcomes, hit_levels, hit_rate
from tnetcli.models.base import Model
from tnetcli.models.devices import Precision
from tnetcli.prediction.inference import ImageResult, Inference
from tnetcli.readers.base import Reader
from tnetcli.training.config import StageConfig
from tnetcli.training.data import Item, Source, take
from tnetcli.training.distributed import ALONE, Ranks
from tnetcli.training.plots import Sample
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import Fixed, Policy, Random, build_policy

FLAT = 0.995  # of the largest entropy
STUCK = 0.1  # of the cells chosen in a batch are different ones
SHARP = 0.05  # of the largest entropy


def judge(row: Mapping[str, Any], stage: StageConfig) -> Iterator[str]:
    """Yield what is wrong with the attention of the last steps, in words."""
    if stage.learn != "scenes" or "entropy" not in row or "location" in stage.freeze:
        return
    if len(row["accuracy"]) < 2:  # nothing was chosen
        return
    if row["entropy"] > FLAT:
        yield (
            f"attention is flat (entropy {row['entropy']:.3f} of the largest): cells are chosen "
            "as by chance; try model.centered, a lower model.temperature, loss.baseline: per_level"
        )
    if row["distinct"] < STUCK:
        yield (
            f"attention is stuck: only {row['distinct']:.0%} of the chosen cells differ between "
            "images; try loss.selection: sample, loss.entropy, or augmentation"
        )
    elif row["entropy"] < SHARP:
        yield (
            f"attention has collapsed (entropy {row['entropy']:.3f} of the largest): nothing else "
            "is tried any more; try loss.uniform, loss.entropy or a higher model.temperature"
        )


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
    config: TraversalConfig,
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
    config = config.changed(confidence=None)  # every level is validated
    with Inference(
        model,
        normalisation,
        background=config.background,
        device=device,
        precision=precision,
        threads=threads,
    ) as inference:

        def run(until: int, *, at_random: bool = False) -> list[tuple[Item, ImageResult]]:
            stop = min(own.stop, until)
            return [
                pair
                for start in range(own.start, stop, BATCH)
                for pair in _run(
                    inference,
                    take(source, "validation", start, min(start + BATCH, stop)),
                    config,
                    at_random=at_random,
                )
            ]

        found = run(count)
        compared = min(count, BY_CHANCE) if config.levels > 1 else 0
        random = run(compared, at_random=True)
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
        row["random_accuracy"] = _accuracy(chance, levels - 1)
        row["gain_over_random"] = _accuracy(learned, levels - 1) - row["random_accuracy"]
    return Validation(row, [_sample(*pair, source.classes) for pair in found[:SHOWN]])


def _check(item: Item, result: ImageResult) -> dict[str, Any]:
    """Return what is to be known of one image, as plain values."""
    return {
        "name": item.name,
        "loss": float(_outcome(item, result).log_loss[0]),
        "right": [bool(scores.argmax() == item.label) for scores in result.level_logits],
        "windows": len(result.nodes) - 1,
        "hits": [*hit_levels(_windows(result), item.boxes).items()],
    }


def _run(
    inference: Inference, items: list[Item], config: TraversalConfig, *, at_random: bool = False
) -> list[tuple[Item, ImageResult]]:
    policies: list[Policy] = []
    for item in items:
        seed = zlib.crc32(item.name.encode())
        policy = build_policy(config, seed)
        if at_random:
            policy = Random(policy, inference.model.grid, seed)
        elif item.fixed is not None:
            policy = Fixed(policy, item.fixed)
        policies.append(policy)
    results = inference.run([item.reader for item in items], config, policies)
    return [
        (item, result)
        for item, result in zip(items, results, strict=True)
        if isinstance(result, ImageResult)
    ]


def _accuracy(seen: list[dict[str, Any]], level: int) -> float:
    """Return the part that is right had the looking ended at a level, or where it did."""
    return float(np.mean([each["right"][min(level, len(each["right"]) - 1)] for each in seen]))


def _outcome(item: Item, result: ImageResult) -> Outcomes:
    return Outcomes.of(result.logits[None], np.array([item.label]))


def _windows(result: ImageResult) -> list[tuple[int, Any]]:
    return [(node.region.level, node.region.window) for node in result.nodes]


def _sample(item: Item, result: ImageResult, classes: tuple[str, ...]) -> Sample:
    outcome = _outcome(item, result)
    return Sample(
        _thumbnail(item.reader),
        item.reader.size,
        [(node.region.window, node.region.level, node.attention) for node in result.nodes[1:]],
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
