"""Whether it mattered where a model looked: hide that, or look somewhere else."""

from collections.abc import Sequence

import numpy as np

from tnetcli.errors import TnetError
from tnetcli.geometry import Window
from tnetcli.looking import Looker, Sight
from tnetcli.prediction import AttentionCheck
from tnetcli.readers.base import Reader
from tnetcli.readers.masked import MaskedReader
from tnetcli.recording import softmax
from tnetcli.training.choices import by_chance
from tnetcli.traversal import Plan
from tnetcli.visits import Told

DRAWS = 3  # walks to windows drawn by chance


def check_attention(
    looker: Looker,
    readers: Sequence[Reader],
    sights: Sequence[Sight | TnetError],
    plan: Plan,
    *,
    classes: Sequence[str],
    seeds: Sequence[int],
    seed: int = 0,
    confidence: float | None = None,
    draws: int = DRAWS,
    told: Sequence[Sequence[Told]] | None = None,
) -> list[AttentionCheck | None]:
    """Return for each image how probable its answer is without what was looked at closest.

    The walk is done again with these windows hidden, at every level, and again to random windows.
    None for an image that failed or was seen as a whole only: nothing was chosen. `told` are the
    windows of each image that it was looked at by, if these were told; random ones are cells.
    """
    chosen = [
        (number, sight)
        for number, sight in enumerate(sights)
        if isinstance(sight, Sight) and len(sight.visits) > 1
    ]
    if not chosen:
        return [None] * len(sights)
    numbers = [number for number, _ in chosen]
    own = [readers[number] for number in numbers]
    hidden = [
        MaskedReader(reader, closest(sight)) for reader, (_, sight) in zip(own, chosen, strict=True)
    ]
    own_seeds = [seeds[number] for number in numbers]
    again = None if told is None else [told[number] for number in numbers]
    masked = looker.look(hidden, plan, seeds=own_seeds, confidence=confidence, told=again)
    drawn = [
        looker.look(
            own,
            plan,
            seeds=own_seeds,
            confidence=confidence,
            attend=by_chance([each + draw + 1 for each in own_seeds]),
        )
        for draw in range(draws)
    ]
    found: list[AttentionCheck | None] = [None] * len(sights)
    for place, (number, sight) in enumerate(chosen):
        answer = int(sight.scores.argmax())
        without = masked[place]
        others = [walk[place] for walk in drawn]
        scores = [each.scores for each in others if isinstance(each, Sight)]
        if len(scores) < draws:
            continue  # it could be read a moment ago, and no longer
        found[number] = AttentionCheck(
            masked=_probability(without, answer),
            masked_label=classes[int(without.scores.argmax())]
            if isinstance(without, Sight)
            else "",
            random=float(np.mean([softmax(each)[answer] for each in scores])),
            random_same=float(np.mean([int(each.argmax()) == answer for each in scores])),
            draws=draws,
            seed=seed,
        )
    return found


def closest(sight: Sight) -> list[Window]:
    """Return the windows below which no other was looked at."""
    paths = {visit.place.region.path for visit in sight.visits}
    parents = {path.rpartition("/")[0] for path in paths}
    return [
        visit.place.region.window
        for visit in sight.visits
        if visit.place.region.path not in parents
    ]


def _probability(sight: Sight | TnetError, answer: int) -> float | None:
    return float(softmax(sight.scores)[answer]) if isinstance(sight, Sight) else None
