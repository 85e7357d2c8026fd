"""Validate a model during training."""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from tnetcli.errors import ManifestError
from tnetcli.evaluation.metrics import Outcomes, hit_levels, hit_rate
from tnetcli.exporters.imagery import Imagery
from tnetcli.models.base import Model
from tnetcli.prediction.inference import ImageResult, Inference
from tnetcli.tasks import softmax
from tnetcli.training.data import Item, Source, open_items
from tnetcli.training.plots import Sample
from tnetcli.training.recipe import StageConfig
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import Fixed, Policy, Random, build_policy

if TYPE_CHECKING:
    from tnetcli.training.run_dir import Run

BATCH = 32
COMPARED = 100  # images that are traversed by the random policy, too
SAMPLES = 8  # images in samples.png
THUMBNAIL = 320  # pixels a side
MAX_ENTROPY = 0.995  # relative to the maximum; above it attention is flat
MIN_ENTROPY = 0.05  # below it attention has collapsed
MIN_DISTINCT = 0.1  # of the cells chosen in a batch


@dataclass(frozen=True, slots=True)
class Validation:
    """Metrics of one validation, and a few of its images."""

    row: dict[str, Any]
    samples: list[Sample]

    @property
    def accuracy(self) -> float:
        """Return the accuracy at the deepest level."""
        return float(self.row["accuracy"][-1])

    @property
    def loss(self) -> float:
        """Return the mean loss of the predictions."""
        return float(self.row["loss"])


def attention_warnings(row: Mapping[str, Any], stage: StageConfig) -> Iterator[str]:
    """Yield warnings about attention that is flat, stuck or collapsed."""
    if stage.learn != "scenes" or "entropy" not in row or "location" in stage.freeze:
        return
    if len(row["accuracy"]) < 2:  # no cell was chosen
        return
    if row["entropy"] > MAX_ENTROPY:
        yield (
            f"attention is flat (entropy {row['entropy']:.3f} of the maximum): cells are chosen "
            "at random; try model.centered, a lower model.temperature, loss.baseline: per_level"
        )
    if row["distinct"] < MIN_DISTINCT:
        yield (
            f"attention is stuck: only {row['distinct']:.0%} of the chosen cells differ between "
            "images; try loss.selection: sample, loss.entropy, or augmentation"
        )
    elif row["entropy"] < MIN_ENTROPY:
        yield (
            f"attention has collapsed (entropy {row['entropy']:.3f} of the maximum): no other "
            "cells are explored; try loss.uniform, loss.entropy or a higher model.temperature"
        )


def validate(run: "Run", model: Model, config: TraversalConfig, device: str) -> Validation:
    """Traverse the validation images as in prediction, and some of them with a random policy.

    Each process traverses its part; the result is the same in all of them.
    """
    training, source = run.recipe.training, run.source
    images = source.count("validation")
    count = min(training.validation_images or images, images)
    compared = min(count, COMPARED) if config.levels > 1 else 0
    own = run.group.shard(count)
    config = config.changed(confidence=None)  # every level is validated
    with Inference(
        model, run.normalisation, background=config.background, device=device,
        precision=training.precision, threads=training.threads,
    ) as inference:  # fmt: skip
        scores: list[dict[str, Any]] = []
        samples: list[Sample] = []
        for item, result in _run(inference, source, range(own.start, own.stop), config):
            scores.append(_score(item, result))
            if len(samples) < SAMPLES:  # a source closes images after a while
                samples.append(_sample(item, result, source.classes))
        numbers = range(own.start, min(own.stop, compared))
        random = [
            _score(*pair) for pair in _run(inference, source, numbers, config, at_random=True)
        ]
    scores, baseline = (
        list(chain.from_iterable(run.group.gather(each))) for each in (scores, random)
    )
    if not scores:
        raise ManifestError("no validation image can be read", hint="check them with `tnet info`")
    levels = max(len(each["right"]) for each in scores)
    row: dict[str, Any] = {
        "images": len(scores),
        "loss": float(np.mean([each["loss"] for each in scores])),
        "accuracy": [_accuracy(scores, level) for level in range(levels)],
        "windows": float(np.mean([each["windows"] for each in scores])),
    }
    hits = hit_rate(dict(each["hits"]) for each in scores)
    if any(level > 1 for level in hits):
        row["hit"] = [hits[level].value for level in sorted(hits) if level > 1]
    if baseline:
        names = {each["name"] for each in baseline}
        same = [each for each in scores if each["name"] in names]
        row["random_accuracy"] = _accuracy(baseline, levels - 1)
        row["gain_over_random"] = _accuracy(same, levels - 1) - row["random_accuracy"]
    return Validation(row, samples)


def _run(
    inference: Inference,
    source: Source,
    numbers: range,
    config: TraversalConfig,
    *,
    at_random: bool = False,
) -> Iterator[tuple[Item, ImageResult]]:
    """Yield the validation images that can be read, and their results."""
    for start in range(0, len(numbers), BATCH):
        items, _ = open_items(source, "validation", numbers[start : start + BATCH])
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
        for item, result in zip(items, results, strict=True):
            if isinstance(result, ImageResult):
                yield item, result


def _score(item: Item, result: ImageResult) -> dict[str, Any]:
    """Return what the metrics need of one image."""
    windows = [(node.region.level, node.region.window) for node in result.nodes]
    return {
        "name": item.name,
        "loss": float(Outcomes.of(result.logits[None], np.array([item.label])).log_loss[0]),
        "right": [bool(scores.argmax() == item.label) for scores in result.level_logits],
        "windows": len(result.nodes) - 1,
        "hits": [*hit_levels(windows, item.boxes).items()],  # keys of JSON are strings
    }


def _accuracy(scores: list[dict[str, Any]], level: int) -> float:
    """Return the accuracy at a level, or at the last level of an image that has fewer."""
    return float(np.mean([each["right"][min(level, len(each["right"]) - 1)] for each in scores]))


def _sample(item: Item, result: ImageResult, classes: tuple[str, ...]) -> Sample:
    size, probabilities = item.reader.size, softmax(result.logits)
    small = size.within(THUMBNAIL)
    return Sample(
        Imagery(item.reader).show((0, 0, size.width, size.height), small.width, small.height),
        size,
        [(node.region.window, node.region.level, node.attention) for node in result.nodes[1:]],
        classes[item.label],
        classes[int(probabilities.argmax())],
        float(probabilities.max()),
        item.boxes,
    )
