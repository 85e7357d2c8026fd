"""Measure how much a prediction depends on the chosen regions."""

from collections.abc import Sequence

import numpy as np

from tnetcli.errors import TnetError
from tnetcli.geometry import Window
from tnetcli.prediction.inference import ImageResult, Inference
from tnetcli.prediction.record import AttentionCheck
from tnetcli.readers.base import Reader
from tnetcli.readers.wrappers import MaskedReader
from tnetcli.tasks import softmax
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import Policy, Random, build_policy

DRAWS = 3  # traversals with random regions


def check_attention(
    inference: Inference,
    readers: Sequence[Reader],
    results: Sequence[ImageResult | TnetError],
    config: TraversalConfig,
    policies: Sequence[Policy],
    *,
    classes: Sequence[str],
    seeds: Sequence[int],
    seed: int = 0,
    draws: int = DRAWS,
) -> list[AttentionCheck | None]:
    """Return for each image how probable its answer is without its deepest regions.

    The traversal is repeated with these regions hidden, at every level, and with random regions.
    None for an image that failed or has level 1 only: nothing was chosen.
    """
    chosen = [
        (number, result)
        for number, result in enumerate(results)
        if isinstance(result, ImageResult) and len(result.nodes) > 1
    ]
    if not chosen:
        return [None] * len(results)
    numbers = [number for number, _ in chosen]
    own = [readers[number] for number in numbers]
    hidden = [
        MaskedReader(reader, closest(result))
        for reader, (_, result) in zip(own, chosen, strict=True)
    ]
    own_seeds = [seeds[number] for number in numbers]
    masked = inference.run(hidden, config, [policies[number] for number in numbers])
    grid = inference.model.grid
    drawn = [
        inference.run(
            own,
            config,
            [Random(build_policy(config, seed), grid, seed + draw + 1) for seed in own_seeds],
        )
        for draw in range(draws)
    ]
    found: list[AttentionCheck | None] = [None] * len(results)
    for place, (number, result) in enumerate(chosen):
        answer = int(result.logits.argmax())
        without = masked[place]
        others = [run[place] for run in drawn]
        logits = [each.logits for each in others if isinstance(each, ImageResult)]
        if len(logits) < draws:
            continue  # it could be read a moment ago, and no longer
        found[number] = AttentionCheck(
            masked=_probability(without, answer),
            masked_label=classes[int(without.logits.argmax())]
            if isinstance(without, ImageResult)
            else "",
            random=float(np.mean([softmax(each)[answer] for each in logits])),
            random_same=float(np.mean([int(each.argmax()) == answer for each in logits])),
            draws=draws,
            seed=seed,
        )
    return found


def closest(result: ImageResult) -> list[Window]:
    """Return the windows below which no other was read."""
    paths = {node.region.path for node in result.nodes}
    parents = {path.rpartition("/")[0] for path in paths}
    return [node.region.window for node in result.nodes if node.region.path not in parents]


def _probability(result: ImageResult | TnetError, answer: int) -> float | None:
    return float(softmax(result.logits)[answer]) if isinstance(result, ImageResult) else None
