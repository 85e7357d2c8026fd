"""The sections of a recipe that say what is learned from, and how; plain values, no torch."""

from tnetcli.sections.data import Augmentation, Data, Landscape
from tnetcli.sections.fields import File
from tnetcli.sections.learning import Loss, Optimizer, Schedule
from tnetcli.sections.stages import Stage, Tiles, Training

__all__ = [
    "Augmentation",
    "Data",
    "File",
    "Landscape",
    "Loss",
    "Optimizer",
    "Schedule",
    "Stage",
    "Tiles",
    "Training",
]
