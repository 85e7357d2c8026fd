"""Everything that a bug report needs to know of an installation, and what is wrong with it."""

import json
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from tnetcli import __version__
from tnetcli.errors import MissingExtraError, OutputError
from tnetcli.machine import available_cores, memory
from tnetcli.readers.cache import cache_folder, overview_folder
from tnetcli.workflows import environment
from tnetcli.workflows.libraries import (
    BROKEN,
    EXTRAS,
    MISSING,
    OK,
    Found,
    examine_libraries,
    misfits,
)
from tnetcli.workflows.recipes import recipe_files

SCHEMA = "tnet.doctor/1"
NVIDIA = Path("/proc/driver/nvidia/version")
AGAIN = "pip install --force-reinstall tnetcli"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that goes wrong, or may, and what to do about it."""

    problem: str
    hint: str


@dataclass(frozen=True, slots=True)
class Report:
    """What was found; `notes` are worth knowing, and no reason to fail."""

    facts: dict[str, Any]
    libraries: tuple[Found, ...]
    problems: tuple[Finding, ...]
    notes: tuple[Finding, ...]


def examine(advance: Callable[[float], None] = lambda fraction: None) -> Report:
    """Look at the package, the libraries, the machine and its settings; nothing ends this."""
    libraries = tuple(examine_libraries(advance))
    seen = memory()
    cache = _cache()
    package = _package()
    problems = [
        *_package_problems(package),
        *_library_problems(libraries),
        *(Finding(*each) for each in environment.judge(os.environ, seen.total)),
        *_cache_problems(cache),
    ]
    facts = {
        "schema": SCHEMA,
        "tnet": package,
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "executable": sys.executable,
        },
        "system": {
            "platform": platform.platform(),
            "libc": " ".join(filter(None, platform.libc_ver())),
            "file_names": sys.getfilesystemencoding(),
        },
        "cores": {"machine": os.cpu_count(), "available": available_cores()},
        "memory": asdict(seen),
        "cache": cache,
        "extras": {extra: _extra(extra, libraries) for extra in EXTRAS},
        "environment": environment.shown(os.environ),
    }
    return Report(facts, libraries, tuple(problems), tuple(_notes(libraries)))


def as_json(report: Report) -> str:
    """Return one line of JSON."""
    record = {
        **report.facts,
        "libraries": {each.library.name: _plain(each) for each in report.libraries},
        "problems": [asdict(each) for each in report.problems],
        "notes": [asdict(each) for each in report.notes],
    }
    return json.dumps(record, ensure_ascii=False, allow_nan=False)


def _plain(found: Found) -> dict[str, Any]:
    told = {"state": found.state, "version": found.version, "extra": found.library.extra}
    if found.reason:
        told["reason"] = found.reason
    return {**told, **({"details": found.details} if found.details else {})}


def _package() -> dict[str, Any]:
    folder = Path(str(files("tnetcli")))
    assets = folder / "assets"
    return {
        "version": __version__,
        "package": str(folder),
        "models": sorted(path.stem for path in assets.glob("*.safetensors")),
        "recipes": len(recipe_files()),
    }


def _package_problems(package: dict[str, Any]) -> Iterator[Finding]:
    for part in ("models", "recipes"):
        if not package[part]:
            yield Finding(f"the {part} that come with tnet are not there", AGAIN)


def _cache() -> dict[str, Any]:
    try:
        folder = cache_folder()
    except OutputError as error:
        return {"folder": None, "problem": str(error), "hint": error.hint}
    sizes = _sizes(overview_folder())
    return {
        "folder": os.fspath(folder),
        "files": len(sizes),
        "bytes": sum(sizes),
        "writable": _is_writable(folder),
    }


def _sizes(folder: Path) -> list[int]:
    """Return the sizes of what is in a folder; what goes away meanwhile counts for nothing."""
    sizes = []
    try:
        for entry in os.scandir(folder):
            if entry.is_file(follow_symlinks=False):
                sizes.append(entry.stat(follow_symlinks=False).st_size)
    except (OSError, ValueError):
        pass
    return sizes


def _is_writable(folder: Path) -> bool:
    """Say whether a folder can be written to, or made."""
    try:
        there = next(each for each in (folder, *folder.absolute().parents) if each.exists())
        return there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    except (OSError, ValueError):
        return False


def _cache_problems(cache: dict[str, Any]) -> Iterator[Finding]:
    if cache["folder"] is None:
        yield Finding(cache["problem"], cache["hint"])
    elif not cache["writable"]:
        yield Finding(
            f"cannot write to the cache `{cache['folder']}`: images without overviews fail",
            "set TNET_CACHE to a folder that you may write to",
        )


def _extra(extra: str, libraries: Sequence[Found]) -> dict[str, Any]:
    states = {each.state for each in libraries if each.library.extra == extra}
    return {
        "state": next(state for state in (BROKEN, MISSING, OK) if state in states),
        "purpose": EXTRAS[extra],
        "install": MissingExtraError.of(extra, EXTRAS[extra]).hint,
    }


def _library_problems(libraries: Sequence[Found]) -> Iterator[Finding]:
    for each in libraries:
        name = each.library.name
        if each.state == BROKEN:
            yield Finding(f"{name} is broken: {each.reason}", _mend(each))
        elif each.state == MISSING and each.library.extra is None:
            yield Finding(f"{name} is not installed, and tnet needs it", f"pip install {name}")
        elif name == "openslide-python":
            yield from _openslide_problems(each.details)
    versions = {each.library.name: each.version for each in libraries if each.version}
    for problem, needed in dict(misfits({"tnetcli": __version__, **versions})).items():
        yield Finding(problem, f"pip install '{needed}'")


def _mend(found: Found) -> str:
    if "PROJ" in found.reason:
        return "unset PROJ_LIB and PROJ_DATA: they lead to the tables of another PROJ"
    return f"pip install --force-reinstall {found.library.name}"


def _openslide_problems(details: dict[str, Any]) -> Iterator[Finding]:
    library, pixman = str(details.get("OpenSlide")), str(details.get("pixman"))
    if library.split(".")[0] in ("1", "2", "3"):
        yield Finding(f"OpenSlide {library} reads no DICOM", "pip install 'openslide-bin>=4'")
    if pixman.startswith("0.38."):
        yield Finding(
            f"pixman {pixman} garbles MIRAX slides (.mrxs)",
            "pip install openslide-bin, which has its own; or another pixman",
        )


def _notes(libraries: Sequence[Found]) -> Iterator[Finding]:
    threads, cores = os.environ.get("OMP_NUM_THREADS", ""), available_cores()
    if threads.isascii() and threads.isdecimal() and int(threads) > cores:
        yield Finding(
            f"OMP_NUM_THREADS={threads}, and {cores} cores may be used", "unset OMP_NUM_THREADS"
        )
    for each in libraries:
        if warning := each.details.get("warning"):
            yield Finding(f"{each.library.name} says: {warning}", "mend it, or use --device cpu")
    if NVIDIA.exists() and os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1"):
        torch = next((each for each in libraries if each.library.name == "torch"), None)
        if torch is not None and torch.details.get("devices") == ["cpu"]:
            yield Finding(
                "there is an NVIDIA driver, and torch sees no card",
                "install a torch that is built for CUDA and this driver",
            )
