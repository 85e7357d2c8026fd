"""The `tnet doctor` command."""

import os
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from tnetcli import __version__
from tnetcli.cli.options import Json, print_report
from tnetcli.cli.recipes import recipe_files
from tnetcli.errors import OutputError
from tnetcli.system import available_cores, memory
from tnetcli.text import aligned, first_line, format_bytes

SCHEMA = "tnet.doctor/2"
HIDDEN_EXTRAS = ("all", "test")  # a union of others, and one for developers


def doctor(json: Json = False) -> None:
    """Show versions, cores, memory, devices, cache and extras.

    Include the output in bug reports.
    """
    extras = _versions()
    facts = {
        "schema": SCHEMA,
        "tnet": __version__,
        "python": f"{platform.python_version()}, {sys.executable}",
        "platform": platform.platform(),
        "cores": {"machine": os.cpu_count(), "available": available_cores()},
        "memory": asdict(memory()),
        "gdal": _ask("rasterio", lambda rasterio: [str(rasterio.__gdal_version__)])[0],
        "devices": _ask("torch", _devices),
        "cache": _cache(),
        "recipes": len(recipe_files()),
        "libraries": extras.pop("", {}),
        "extras": {name: extras[name] for name in extras if name not in HIDDEN_EXTRAS},
    }
    print_report(facts, _text, as_json=json)


def _versions() -> dict[str, dict[str, str | None]]:
    """Return the versions of the libraries of each extra; "" holds the required ones."""
    found: dict[str, dict[str, str | None]] = {}
    try:
        lines = requires("tnetcli") or []
    except PackageNotFoundError:  # a source tree that was never installed
        lines = []
    for line in lines:
        name = re.split(r"[^\w.-]", line, maxsplit=1)[0]
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        try:
            installed = version(name)
        except PackageNotFoundError:
            installed = None
        found.setdefault("" if extra is None else extra[1], {})[name] = installed
    return found


def _ask(library: str, find: Callable[[Any], list[str]]) -> list[str]:
    try:
        return find(import_module(library))
    except Exception as error:  # a broken installation may raise anything
        return [f"cannot import {library}: {type(error).__name__}: {first_line(error)}"]


def _devices(torch: Any) -> list[str]:
    cuda = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
    return ["cpu", *cuda, *["mps"] * torch.backends.mps.is_available()]


def _cache() -> str:
    from tnetcli.readers.overviews import cache_folder

    try:
        return str(cache_folder())
    except OutputError as error:
        return str(error)


def _text(facts: dict[str, Any]) -> str:
    cores, sizes = facts["cores"], facts["memory"].items()
    lines = {name: facts[name] for name in ("tnet", "python", "platform", "gdal")}
    lines["cores"] = f"{cores['available']} of {cores['machine']}"
    lines["memory"] = ", ".join(f"{format_bytes(each)} {name}" for name, each in sizes if each)
    lines["devices"] = ", ".join(facts["devices"])
    lines |= {"cache": facts["cache"], "recipes": str(facts["recipes"])}
    lines |= {name: each or "not installed" for name, each in facts["libraries"].items()}
    for extra, libraries in facts["extras"].items():
        versions = [f"{name} {each or 'not installed'}" for name, each in libraries.items()]
        lines[f"[{extra}]"] = ", ".join(versions)
    return "\n".join(aligned(lines.items(), indent=""))
