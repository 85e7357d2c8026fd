"""A plug-in of tnet: a reader of .npy files, a family, a policy, a task and an exporter."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tnetcli.config import Strict
from tnetcli.geometry import Region, Size
from tnetcli.models.configs import TNetConfig
from tnetcli.models.registry import Family
from tnetcli.prediction.record import Prediction
from tnetcli.readers.base import Block, Box, Cost, ImageInfo, Level, Source
from tnetcli.readers.pyramid import PyramidReader
from tnetcli.tasks import Classification, Decision
from tnetcli.traversal.policies import Policy

BANDS = ("red", "green", "blue")


class ToyReader(PyramidReader):
    """Reads arrays (3, height, width) of .npy files."""

    name = "toy"
    failures: ClassVar[tuple[type[Exception], ...]] = (OSError, ValueError)

    @classmethod
    def accepts(cls, path: str, head: bytes) -> bool:
        """Return True if the file is one for this reader."""
        return head.startswith(b"\x93NUMPY")

    def _inspect(self) -> ImageInfo:
        array = np.load(self.path, mmap_mode="r", allow_pickle=False)
        size = Size(array.shape[2], array.shape[1])
        return ImageInfo(
            levels=(Level(size, 1.0, 1.0, size),),
            bands=BANDS,
            dtype=array.dtype,
            file_bytes=os.path.getsize(self.path),
        )

    def _open(self) -> Source:
        return _ToySource(self)


class _ToySource:
    def __init__(self, reader: ToyReader) -> None:
        self._info = reader.info
        self._array = np.load(reader.path, mmap_mode="r", allow_pickle=False)

    def read(self, level: int, box: Box) -> Block:
        part = self._array[:, box.top : box.bottom, box.left : box.right]
        cost = Cost(self._info.levels[0].size.pixels, self._info.file_bytes)
        return Block(np.array(part.transpose(1, 2, 0)), None, cost)

    def close(self) -> None:
        del self._array


class ToyConfig(TNetConfig):
    """Configuration of the toy family."""


FAMILY = Family("a TNet under another name", ToyConfig, "tnet_toy_model:ToyModel")


class LastCells(Policy):
    """Follow the last cells in reading order, whatever their attention."""

    def preference(
        self, region: Region, cells: NDArray[np.intp], probs: NDArray[Any], joint: float
    ) -> NDArray[np.float64]:
        """Return the number of each cell."""
        return cells.astype(np.float64)


class SoftClassification(Classification):
    """Classification with probabilities of temperature 2."""

    name = "toy"

    def decide(self, logits: NDArray[np.floating]) -> Decision:
        """Return the most probable class."""
        return super().decide(logits / 2)


class ToyOptions(Strict):
    """Options of the toy exporter."""

    separator: str = " "


class ToyExporter:
    """Writes one line for each image: its id and its label."""

    name = "toy"
    suffixes = (".toy",)
    many = True
    options = ToyOptions

    def write(self, predictions: Iterable[Prediction], path: Path, options: ToyOptions) -> None:
        """Write a new file."""
        lines = (f"{each.id}{options.separator}{each.label}\n" for each in predictions)
        path.write_text("".join(lines), encoding="utf-8")


EXPORTER = ToyExporter()
