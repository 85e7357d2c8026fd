"""The input of exporters: a prediction, and which of its windows are exported."""

from collections.abc import Iterator
from dataclasses import dataclass

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
    """A prediction, and which of its windows are exported."""

    prediction: Prediction
    choice: Choice = EVERYTHING

    def chosen(self) -> Iterator[SeenWindow]:
        """Yield the windows that are wanted, and glimpses as windows of the level below."""
        return (window for window in self._with_glimpses() if self.choice.takes(window))

    def with_joint(self) -> Iterator[tuple[SeenWindow, float | None]]:
        """Yield the chosen windows and glimpses, each with the product of attention along its path.

        The product is None where a parent is not among the windows of the record.
        """
        joint: dict[str, float] = {"": 1.0}
        for window in self._with_glimpses():
            above = joint.get(window.path.rpartition("/")[0])
            if above is not None:
                # Sums of 32-bit numbers may exceed one a little.
                joint[window.path] = min(above * window.attention, 1.0)
            if self.choice.takes(window):
                yield window, joint.get(window.path)

    def _with_glimpses(self) -> Iterator[SeenWindow]:
        for window in self.prediction.windows:
            yield window
            if self.choice.attends(window):  # else they would be left alone
                yield from window.glimpsed()
