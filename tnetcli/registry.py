"""Look up readers, families, policies, tasks and exporters by name, plug-ins included."""

from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from tnetcli.errors import MissingExtraError, TnetError, UsageError
from tnetcli.text import did_you_mean, first_line

T = TypeVar("T")


class Registry(Generic[T]):
    """Names mapped to objects that are imported on first use.

    `builtin` maps each name to `module:attribute`. Installed packages add entries with entry
    points of the group `tnetcli.<kind>s`; a built-in name cannot be replaced. `extras` maps an
    optional library to its pip extra and to what needs it.
    """

    def __init__(
        self,
        kind: str,
        builtin: Mapping[str, str],
        *,
        plural: str | None = None,
        error: type[TnetError] = UsageError,
        extras: Mapping[str, tuple[str, str]] | None = None,
    ) -> None:
        self.kind = kind
        self.group = f"tnetcli.{plural or f'{kind}s'}"
        self._builtin = dict(builtin)
        self._error = error
        self._extras = dict(extras or {})
        self._loaded: dict[str, T] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._builtin or name in self._plugins()

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())

    def names(self) -> list[str]:
        """Return all names: the built-in ones first, then those of plug-ins."""
        return [*self._builtin, *(name for name in self._plugins() if name not in self._builtin)]

    def load(self, name: str) -> T:
        """Return the object of a name; raise the registry's error if it is unknown or broken."""
        if name not in self._loaded:
            self._loaded[name] = self._import(name)
        return self._loaded[name]

    def _import(self, name: str) -> T:
        if (target := self._builtin.get(name)) is not None:
            entry = EntryPoint(name, target, self.group)
        elif (plugin := self._plugins().get(name)) is not None:
            entry = plugin
        else:
            names = self.names()
            hint = did_you_mean(name, names, f"choose one of: {', '.join(names)}")
            raise self._error(f"unknown {self.kind}: `{name}`", hint=hint)
        try:
            module = import_module(entry.module)
            found: T = getattr(module, entry.attr) if entry.attr else module  # type: ignore[assignment]
        except ModuleNotFoundError as error:
            if error.name in self._extras:
                raise MissingExtraError.of(*self._extras[error.name]) from error
            if name in self._builtin:
                raise
            raise self._broken(name, entry, error) from error
        except (ImportError, AttributeError) as error:
            if name in self._builtin:
                raise
            raise self._broken(name, entry, error) from error
        return found

    def _broken(self, name: str, entry: EntryPoint, error: Exception) -> TnetError:
        owner = entry.dist.name if entry.dist else entry.value
        return self._error(
            f"cannot load the {self.kind} `{name}` of `{owner}`: {first_line(error)}",
            hint=f"update or uninstall `{owner}`",
        )

    def _plugins(self) -> dict[str, EntryPoint]:
        return {entry.name: entry for entry in entry_points(group=self.group)}
