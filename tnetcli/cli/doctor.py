"""`tnet doctor`: one screen about the installation, for a bug report."""

import json as json_module
import os
import platform
import re
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

import typer

from tnetcli import __version__
from tnetcli.cli.options import Json
from tnetcli.errors import OutputError
from tnetcli.text import first_line, in_bytes

SCHEMA = "tnet.doctor/2"
UNWANTED = ("all", "test")  # extras that are made of others, or for developers


def doctor(json: Json = False) -> None:
    """Show versions, cores, memory, devices, cache and extras.

    Include the output in bug reports.
    """
    found = examine()
    typer.echo(json_module.dumps(found) if json else as_text(found))


def examine() -> dict[str, Any]:
    """Return the facts as plain values; a library that cannot be imported is one of them."""
    from tnetcli.cli.recipes import recipe_files
    from tnetcli.system import available_cores, memory

    core, extras = _requirements()
    return {
        "schema": SCHEMA,
        "tnet": __version__,
        "python": f"{platform.python_version()}, {sys.executable}",
        "platform": platform.platform(),
        "cores": {"machine": os.cpu_count(), "available": available_cores()},
        "memory": asdict(memory()),
        "gdal": _gdal(),
        "devices": _devices(),
        "cache": _cache(),
        "recipes": len(recipe_files()),
        "libraries": {name: _version(name) for name in core},
        "extras": {
            extra: {name: _version(name) for name in names} for extra, names in extras.items()
        },
    }


def _requirements() -> tuple[list[str], dict[str, list[str]]]:
    """Return the names of required libraries, and those of each extra."""
    core: list[str] = []
    extras: dict[str, list[str]] = {}
    try:
        lines = requires("tnetcli") or []
    except PackageNotFoundError:  # a source tree that was never installed
        lines = []
    for line in lines:
        name = re.split(r"[^\w.-]", line, maxsplit=1)[0]
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if extra is None:
            core.append(name)
        elif extra[1] not in UNWANTED:
            extras.setdefault(extra[1], []).append(name)
    return core, extras


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _gdal() -> str:
    """Return the version of GDAL, or why rasterio cannot be imported."""
    try:
        import rasterio

        return str(rasterio.__gdal_version__)
    except Exception as error:  # whatever a broken installation raises
        return f"rasterio cannot be used: {type(error).__name__}: {first_line(error)}"


def _devices() -> list[str]:
    """Return the devices of torch, or why it cannot be imported."""
    try:
        import torch

        names = ["cpu"]
        names += [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
    except Exception as error:  # whatever a broken installation raises
        return [f"torch cannot be used: {type(error).__name__}: {first_line(error)}"]
    return names + ["mps"] * torch.backends.mps.is_available()


def _cache() -> str:
    from tnetcli.readers.overviews import cache_folder

    try:
        return str(cache_folder())
    except OutputError as error:
        return str(error)


def as_text(found: dict[str, Any]) -> str:
    """Return one line for each fact."""
    from tnetcli.text import aligned

    cores = found["cores"]
    memory = [f"{in_bytes(count)} {name}" for name, count in found["memory"].items() if count]
    lines = {
        **{name: found[name] for name in ("tnet", "python", "platform", "gdal")},
        "cores": f"{cores['available']} of {cores['machine']}",
        "memory": ", ".join(memory) or "unknown",
        "devices": ", ".join(found["devices"]),
        "cache": found["cache"],
        "recipes": str(found["recipes"]),
        **{name: _shown(each) for name, each in found["libraries"].items()},
        **{
            f"[{extra}]": ", ".join(f"{name} {_shown(each)}" for name, each in names.items())
            for extra, names in found["extras"].items()
        },
    }
    return "\n".join(aligned(lines.items(), indent=""))


def _shown(version: str | None) -> str:
    return version or "not installed"
