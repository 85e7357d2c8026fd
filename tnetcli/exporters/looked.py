"""What exporters are given: a prediction, its windows in any number, and which are wanted."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

from tnetcli.exporters.joint import JointProbabilities
from tnetcli.prediction import Prediction, SeenWindow


@dataclass(frozen=True, slots=True)
class Choice:
    """Which windows are wanted: of these levels, None for all, and with this attention at least."""

    levels: frozenset[int] | None = None
    least_attention: float = 0.0

    def takes(self, window: SeenWindow) -> bool:
        """Say whether a window is wanted."""
        return (self.levels is None or window.level in self.levels) and self.attends(window)

    def attends(self, window: SeenWindow) -> bool:
        """Say whether a window has the attention that is asked for, if any is."""
        return not self.least_attention or window.attention >= self.least_attention


EVERYTHING = Choice()


@dataclass(frozen=True, slots=True)
class Looked:
    """A prediction and all its windows, parents before children.

    `windows` stand for those of the record, which may have been too many to hold; they can be
    walked again and again.
    """

    prediction: Prediction
    windows: Iterable[SeenWindow]
    choice: Choice = EVERYTHING

    @classmethod
    def of(cls, prediction: Prediction, choice: Choice = EVERYTHING) -> Self:
        """Take the windows of the record itself."""
        return cls(prediction, prediction.windows, choice)

    def chosen(self) -> Iterator[SeenWindow]:
        """Yield the windows that are wanted, and glimpses as windows of the level below."""
        return (window for window in self._with_glimpses() if self.choice.takes(window))

    def with_joint(self) -> Iterator[tuple[SeenWindow, float | None]]:
        """Yield the wanted windows and glimpses, each with the product of attention along its path.

        The product is None where a parent is not among the windows of the record.
        """
        with JointProbabilities() as joint:
            for window in self._with_glimpses():
                product = joint.of(window)
                if self.choice.takes(window):
                    yield window, product

    def _with_glimpses(self) -> Iterator[SeenWindow]:
        for window in self.windows:
            yield window
            if self.choice.attends(window):  # else they would be left alone
                yield from window.glimpsed()
