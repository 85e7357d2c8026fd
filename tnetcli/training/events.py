"""The figures of a training as TensorBoard shows them."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tnetcli.errors import MissingExtraError
from tnetcli.sections.stages import Stage

if TYPE_CHECKING:
    from tnetcli.training.run import Listener


class Events:
    """Listens to a training, writes down what it hears, and passes it on."""

    def __init__(self, listener: "Listener", folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtraError.of("tensorboard", "`training.tensorboard`") from error
        self._listener = listener
        self._writer: Any = SummaryWriter(folder)
        self._step = 0

    def stage(self, stage: Stage, steps: int) -> None:
        """Hear that a stage begins."""
        self._listener.stage(stage, steps)

    def step(self, row: Mapping[str, Any], done: int, steps: int) -> None:
        """Write the figures of some steps."""
        self._step = int(row["step"])
        self._write("train", row)
        self._listener.step(row, done, steps)

    def validation(self, row: Mapping[str, Any], is_best: bool) -> None:
        """Write the figures of a validation."""
        self._write("validation", row)
        self._listener.validation(row, is_best)

    def warn(self, text: str) -> None:
        """Write what goes wrong."""
        self._writer.add_text("warnings", text, self._step)
        self._listener.warn(text)

    def should_stop(self) -> bool:
        """Pass on whether the run is to end."""
        return self._listener.should_stop()

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()

    def _write(self, kind: str, row: Mapping[str, Any]) -> None:
        for name, value in _numbers(row):
            self._writer.add_scalar(f"{kind}/{name}", value, self._step)
        self._writer.flush()


def _numbers(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield single figures; one of a list is named by its place, from 1."""
    for name, value in row.items():
        if isinstance(value, list):
            yield from ((f"{name}-{number}", float(each)) for number, each in enumerate(value, 1))
        elif isinstance(value, int | float) and name != "step":
            yield name, float(value)
