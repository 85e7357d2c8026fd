"""Errors that a user can fix, each with the exit code of the command that raises it."""

from collections.abc import Iterable
from functools import partial
from typing import ClassVar


class TnetError(Exception):
    """Base class; shown as one line and a hint, without a traceback."""

    exit_code: ClassVar[int] = 1

    def __init__(self, problem: str, *, hint: str = "") -> None:
        super().__init__(problem)
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        # The default would lose the hint on the way back from a worker process.
        return partial(type(self), hint=self.hint), (str(self),)


def error_class(name: str) -> type[TnetError]:
    """Return the error class of a name; ImageError if there is none."""
    kinds = {kind.__name__: kind for kind in TnetError.__subclasses__()}
    return kinds.get(name, ImageError)


def common_error_class(kinds: Iterable[type[TnetError]]) -> type[TnetError]:
    """Return the class that all errors of a batch share; ImageError if they differ."""
    found = set(kinds)
    return found.pop() if len(found) == 1 else ImageError


class UsageError(TnetError):
    """The command line is wrong."""

    exit_code = 2


class ImageError(TnetError):
    """An image cannot be opened or read."""

    exit_code = 3


class ManifestError(TnetError):
    """A list of images is missing or wrong."""

    exit_code = 4


class RecipeError(TnetError):
    """A recipe is missing or wrong."""

    exit_code = 4


class ModelError(TnetError):
    """A model cannot be built or loaded."""

    exit_code = 5


class MissingExtraError(TnetError):
    """An optional dependency is not installed."""

    exit_code = 6

    @classmethod
    def of(cls, extra: str, purpose: str) -> "MissingExtraError":
        """Return an error whose hint is the pip command that installs `extra`."""
        hint = f"pip install 'tnetcli[{extra}]'"
        return cls(f"{purpose} needs the `{extra}` extra", hint=hint)


class OutputError(TnetError):
    """An output exists or cannot be written."""

    exit_code = 7


class SomeFailedError(TnetError):
    """Some images failed; the rest are done."""

    exit_code = 8


class ClusterError(TnetError):
    """Other processes of a distributed run are gone; finished work is saved, run it to resume."""

    exit_code = 75
