"""The problems a user can fix, each with the exit code that names it.

TnetError
├── UsageError         2   the command line asks for something impossible
├── ImageError         3   an image cannot be opened or read
├── ManifestError      4   a list of images is wrong
├── RecipeError        4   a recipe is wrong
├── ModelError         5   a model cannot be built, or its file cannot be loaded
├── MissingExtraError  6   an optional dependency is not installed
├── OutputError        7   an output exists or cannot be written
├── SomeFailedError    8   some images failed, the rest are done
└── ClusterError      75   other processes of the work are gone; run again to go on
"""

from collections.abc import Iterable
from typing import ClassVar


class TnetError(Exception):
    """A problem the user can fix; shown as one line and a hint, without a traceback."""

    exit_code: ClassVar[int] = 1

    def __init__(self, problem: str, *, hint: str = "") -> None:
        super().__init__(problem)
        self.hint = hint

    def __reduce__(self) -> tuple[object, ...]:
        # The default would lose the hint on the way back from a worker process.
        return (_rebuild, (type(self), str(self), self.hint))


def error_class(name: str) -> type[TnetError]:
    """Return the kind of problem by its name; ImageError for what is no kind of ours."""
    kinds = {kind.__name__: kind for kind in TnetError.__subclasses__()}
    return kinds.get(name, ImageError)


def common_error_class(kinds: Iterable[type[TnetError]]) -> type[TnetError]:
    """Return the kind that all problems of a batch are of; ImageError where they differ."""
    found = set(kinds)
    return found.pop() if len(found) == 1 else ImageError


def _rebuild(kind: type[TnetError], problem: str, hint: str) -> TnetError:
    return kind(problem, hint=hint)


class UsageError(TnetError):
    """The command line asks for something impossible."""

    exit_code = 2


class ImageError(TnetError):
    """An image cannot be opened or read."""

    exit_code = 3


class ManifestError(TnetError):
    """A list of images is missing or malformed."""

    exit_code = 4


class RecipeError(TnetError):
    """A recipe is missing or malformed."""

    exit_code = 4


class ModelError(TnetError):
    """A model cannot be built, or its file cannot be loaded."""

    exit_code = 5


class MissingExtraError(TnetError):
    """An optional dependency is not installed."""

    exit_code = 6

    @classmethod
    def of(cls, extra: str, purpose: str) -> "MissingExtraError":
        """Name the pip command that installs `extra`."""
        return cls(
            f"{purpose} needs the `{extra}` extra",
            hint=f"pip install 'tnetcli[{extra}]'",
        )


class OutputError(TnetError):
    """An output exists already or cannot be written."""

    exit_code = 7


class ClusterError(TnetError):
    """Other processes of the work are gone; what is finished is kept: run again to go on."""

    exit_code = 75


class SomeFailedError(TnetError):
    """Some images failed; everything else is done."""

    exit_code = 8
