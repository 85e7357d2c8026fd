"""How well a model tells labels, by the number of windows, and how well it places them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from os import PathLike

import numpy as np
from numpy.typing import NDArray

from tnetcli.checkpoint import load_model
from tnetcli.errors import UsageError
from tnetcli.inference import Inference
from tnetcli.readers.cropped import CropKind
from tnetcli.sections.data import Data
from tnetcli.sections.fields import Split
from tnetcli.training.metrics import (
    Interval,
    Scores,
    bootstrap,
    confusion_matrix,
    macro_f1,
    summarise,
)
from tnetcli.traversal.config import TraversalConfig
from tnetcli.workflows.cost import steps_of_config
from tnetcli.workflows.labelled import read_labelled, read_told
from tnetcli.workflows.tally import AttentionSummary, Choice, Failure, MeanCost, Row, Tally

EVERY_COUNT = 8  # windows; of a longer walk only some numbers are told
MOST_CONFUSED = 2000  # classes; a table of more would fill the memory


@dataclass(frozen=True, slots=True, eq=False)
class Evaluation:
    """All that was found out; `scores`, `macro_f1` and `confusion` are of whole walks."""

    model: str
    model_sha256: str
    data: str
    split: Split
    classes: tuple[str, ...]
    config: TraversalConfig
    seed: int
    images: int
    images_with_boxes: int
    failures: tuple[Failure, ...]
    scores: Scores
    macro_f1: Interval
    confusion: NDArray[np.int64] | None  # (true, predicted); None for too many classes
    rows: tuple[Row, ...]
    hit_rates: dict[Choice, dict[int, Interval]]  # by level, from 2
    attention: AttentionSummary | None
    cost: MeanCost
    seconds: float


def evaluate(
    model: str | PathLike[str],
    data: str | PathLike[str] | Data,
    *,
    split: Split = "test",
    levels: int | None = None,
    keep: tuple[int, ...] | None = None,
    counts: Sequence[int] | None = None,
    random: bool = True,
    oracle: bool = True,
    check_attention: bool = False,
    seed: int = 0,
    bands: tuple[str, ...] | None = None,
    crop: CropKind | None = None,
    device: str = "auto",
    threads: int = 4,
    batch_size: int = 8,
    advance: Callable[[float], None] | None = None,
) -> Evaluation:
    """Look at every image of a split, once for each way to choose windows, and tell what came out.

    `counts` are numbers of windows beside the whole image. `random` compares with windows drawn
    by chance, `oracle` with those that true boxes choose, where any image has boxes, and
    `check_attention` with what is left when the closest windows are hidden. An image that fails
    is named and left out; if all do, that is an error.
    """
    start = time.perf_counter()
    checkpoint = load_model(model)
    description, grid = checkpoint.description, checkpoint.model.grid
    config = description.config(levels=levels, keep=keep)
    most = sum(step.views for step in steps_of_config(config, grid)) - 1
    chosen = choose_counts(counts, most)
    if crop is None and description.crop != "none":
        crop = description.crop
    images = read_labelled(data, split, description.classes, bands=bands, crop=crop)
    with_boxes = any(image.boxes for image in images)
    choices: list[Choice] = ["attention"]
    choices += ["random"] if random and most else []
    choices += ["oracle"] if oracle and most and with_boxes else []
    with Inference.of(checkpoint, device=device, threads=threads) as inference:
        checked = description.classes if check_attention else None
        tally = Tally(
            inference, config, choices, chosen, seed, classes=checked, windows=read_told(data)
        )
        for first in range(0, len(images), batch_size):
            tally.add(images[first : first + batch_size])
            if advance is not None:
                advance(min(1.0, (first + batch_size) / len(images)))
    tally.check()
    outcomes, classes = tally.outcomes("attention", most), len(description.classes)
    labels, predicted = outcomes.labels, outcomes.predicted
    return Evaluation(
        model=str(model),
        model_sha256=checkpoint.sha256,
        data=str(data.path if isinstance(data, Data) else data),
        split=split,
        classes=description.classes,
        config=config,
        seed=seed,
        images=tally.images,
        images_with_boxes=tally.images_with_boxes,
        failures=tuple(tally.failures),
        scores=summarise(outcomes, classes),
        macro_f1=bootstrap(partial(macro_f1, classes=classes), labels, predicted, seed=seed),
        confusion=None if classes > MOST_CONFUSED else confusion_matrix(labels, predicted, classes),
        rows=tuple(tally.rows()),
        hit_rates=tally.hit_rates(),
        attention=tally.attention(),
        cost=tally.cost(),
        seconds=time.perf_counter() - start,
    )


def choose_counts(counts: Sequence[int] | None, most: int) -> tuple[int, ...]:
    """Return the numbers of windows to tell of, always with the whole walk as the last."""
    if counts is None:
        doubling = [0, *(2**power for power in range(most.bit_length()))]
        counts = range(most) if most <= EVERY_COUNT else doubling
    if counts and not 0 <= min(counts) <= max(counts) <= most:
        wrong = min(counts) if min(counts) < 0 else max(counts)
        raise UsageError(
            f"--windows is not within 0 and {most}, as many as the walk has: `{wrong}`",
            hint="--levels and --keep make it longer" if most else "this model looks no closer",
        )
    return tuple(sorted({*counts, most}))
