"""Measure how much a prediction depends on the chosen regions."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tnetcli.errors import TnetError
from tnetcli.geometry import Window
from tnetcli.prediction.inference import ImageResult, Inference
from tnetcli.readers.base import Reader
from tnetcli.readers.wrappers import MaskedReader
from tnetcli.tasks import softmax
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import Policy, Random, build_policy

DRAWS = 3  # traversals with random regions


@dataclass(frozen=True, slots=True)
class AttentionCheck:
    """The probability of the predicted class when other pixels are read.

    `own` is that of the prediction. `masked` hides the deepest regions; 0 if no pixel is left.
    `random` is the mean of traversals with as many random regions. `masked_changed` and
    `random_changed` are the fractions with another predicted class.
    """

    own: float
    masked: float
    masked_changed: float
    random: float
    random_changed: float


def check_attention(
    inference: Inference,
    readers: Sequence[Reader],
    results: Sequence[ImageResult | TnetError],
    config: TraversalConfig,
    policies: Sequence[Policy],
    *,
    seeds: Sequence[int],
    draws: int = DRAWS,
) -> list[AttentionCheck | None]:
    """Repeat traversals with the deepest regions hidden, and with random regions.

    Return None for an image that failed or has level 1 only, where nothing was chosen.
    """
    found: list[AttentionCheck | None] = [None] * len(results)
    chosen = {
        number: result
        for number, result in enumerate(results)
        if isinstance(result, ImageResult) and len(result.nodes) > 1
    }
    if not chosen:
        return found
    own = [readers[number] for number in chosen]
    hidden = [MaskedReader(readers[n], deepest_windows(each)) for n, each in chosen.items()]
    masked = inference.run(hidden, config, [policies[number] for number in chosen])
    grid = inference.model.grid
    drawn = [
        inference.run(
            own,
            config,
            [Random(build_policy(config, seeds[n]), grid, seeds[n] + draw + 1) for n in chosen],
        )
        for draw in range(draws)
    ]
    for place, (number, result) in enumerate(chosen.items()):
        answer = int(result.logits.argmax())
        others = [each for run in drawn if isinstance(each := run[place], ImageResult)]
        if len(others) < draws:
            continue  # the image cannot be read any more
        without = masked[place]
        logits = without.logits if isinstance(without, ImageResult) else None
        found[number] = AttentionCheck(
            own=float(softmax(result.logits)[answer]),
            masked=0.0 if logits is None else float(softmax(logits)[answer]),
            masked_changed=1.0 if logits is None else float(int(logits.argmax()) != answer),
            random=float(np.mean([softmax(each.logits)[answer] for each in others])),
            random_changed=float(np.mean([int(each.logits.argmax()) != answer for each in others])),
        )
    return found


def deepest_windows(result: ImageResult) -> list[Window]:
    """Return the windows below which no other was read."""
    parents = {node.region.path.rpartition("/")[0] for node in result.nodes}
    return [node.region.window for node in result.nodes if node.region.path not in parents]
