"""Models of the papers without weights, and the multiplications of their traversals."""

import torch

from benchmarks.paper_tables import count_layers, multiply
from tnetcli.models.cost import Step, count_parameters
from tnetcli.models.registry import build_model

__all__ = ["billions", "count_layers", "count_parameters", "outline", "traverse"]


def outline(family, config, classes):
    with torch.device("meta"):
        return build_model(family, config, classes=classes).eval()


def traverse(model, *followed, scores_last=False):
    """Count what an image takes, with `followed` regions on each further level."""
    counts = (1, *followed)
    return multiply(
        model,
        tuple(
            Step(level, count, scores_last or level < len(counts))
            for level, count in enumerate(counts, 1)
        ),
    )


def billions(number, digits=4):
    return round(number / 1e9, digits)
