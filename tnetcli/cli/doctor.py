"""The `tnet doctor` command."""

import os
import platform
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

from tnetcli import __version__
from tnetcli.cli.options import Json, print_report
from tnetcli.system import available_cores, memory
from tnetcli.text import aligned, first_line, format_bytes


def doctor(json: Json = False) -> None:
    """Show versions, cores, memory, devices, cache and extras.

    Include the output in bug reports.
    """
    facts = {
        "schema": "tnet.doctor/3",
        "tnet": __version__,
        "python": f"{platform.python_version()}, {sys.executable}",
        "platform": platform.platform(),
        "cores": f"{available_cores()} of {os.cpu_count()}",
        "memory": {name: size and format_bytes(size) for name, size in asdict(memory()).items()},
        "gdal": _ask("rasterio", lambda rasterio: str(rasterio.__gdal_version__)),
        "devices": _ask("torch", _devices),
        "cache": _ask("tnetcli.readers.overviews", lambda module: str(module.cache_folder())),
        **_libraries(),
    }
    print_report(facts, _text(facts), as_json=json)


def _ask(module: str, find: Callable[[Any], str]) -> str:
    try:
        return find(import_module(module))
    except Exception as error:  # a broken installation may raise anything
        return f"{module}: {type(error).__name__}: {first_line(error)}"


def _devices(torch: Any) -> str:
    cuda = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
    return ", ".join(["cpu", *cuda, *["mps"] * torch.backends.mps.is_available()])


def _libraries() -> dict[str, dict[str, str]]:
    """Return the versions of the required libraries, and of those of each extra in brackets."""
    found: dict[str, dict[str, str]] = {"libraries": {}}
    with suppress(PackageNotFoundError):  # a source tree that was never installed
        for line in requires("tnetcli") or []:
            name = re.split(r"[^\w.-]", line, maxsplit=1)[0]
            extra = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
            section = f"[{extra[1]}]" if extra else "libraries"
            found.setdefault(section, {})[name] = "not installed"
            with suppress(PackageNotFoundError):
                found[section][name] = version(name)
    return {name: each for name, each in found.items() if name not in ("[all]", "[test]")}


def _text(facts: dict[str, Any]) -> str:
    lines = {**facts, **facts["libraries"], "libraries": "", "schema": ""}
    for name, fact in facts.items():
        if isinstance(fact, dict) and name != "libraries":
            lines[name] = ", ".join(f"{key} {each}" for key, each in fact.items() if each)
    return "\n".join(aligned(lines.items(), indent=""))
