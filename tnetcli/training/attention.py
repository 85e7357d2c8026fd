"""Signs that attention learns nothing: said in words, while there is time to stop."""

from collections.abc import Iterator, Mapping
from typing import Any

from tnetcli.sections.stages import Stage

FLAT = 0.995  # of the largest entropy
STUCK = 0.1  # of the cells chosen in a batch are different ones
SHARP = 0.05  # of the largest entropy


def judge(row: Mapping[str, Any], stage: Stage) -> Iterator[str]:
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
