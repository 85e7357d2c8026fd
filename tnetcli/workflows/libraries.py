"""The libraries that tnet stands on: which are there, work, and fit together."""

import importlib.metadata
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

PROBE = Path(__file__).with_name("library_probe.py")
SECONDS = 300.0  # that all imports together may take; a cold network disk is slow
OK, MISSING, BROKEN = "ok", "missing", "broken"
# What each extra is for; what is in it, and the order, is as in pyproject.toml.
EXTRAS = {
    "slides": "reading slides",
    "zarr": "reading and writing OME-Zarr",
    "tables": "tables in Parquet",
    "dask": "a Dask cluster",
    "tensorboard": "`training.tensorboard`",
}


@dataclass(frozen=True, slots=True)
class Library:
    """A library by the name that pip knows and the one that Python imports."""

    name: str
    module: str
    extra: str | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """What there is of a library: `state` is ok, missing or broken, `reason` says why."""

    library: Library
    state: str
    version: str | None = None
    reason: str = ""
    details: dict[str, Any] = field(default_factory=dict)


LIBRARIES = (
    Library("numpy", "numpy"),
    Library("rasterio", "rasterio"),
    Library("tifffile", "tifffile"),
    Library("imagecodecs", "imagecodecs"),
    Library("simplejpeg", "simplejpeg"),
    Library("pillow", "PIL.Image"),
    Library("typer", "typer"),
    Library("rich", "rich"),
    Library("torch", "torch"),
    Library("torchvision", "torchvision"),
    Library("timm", "timm"),
    Library("huggingface-hub", "huggingface_hub"),
    Library("pydantic", "pydantic"),
    Library("pyyaml", "yaml"),
    Library("matplotlib", "matplotlib.figure"),
    Library("safetensors", "safetensors"),
    Library("jsonschema", "jsonschema"),
    Library("packaging", "packaging"),
    Library(
        "openslide-python", "openslide", "slides"
    ),  # brings openslide-bin, or the system has it
    Library("zarr", "zarr", "zarr"),
    Library("pyarrow", "pyarrow", "tables"),
    Library("distributed", "distributed", "dask"),
    Library("tensorboard", "tensorboard", "tensorboard"),
)


def examine_libraries(
    advance: Callable[[float], None], libraries: Sequence[Library] = LIBRARIES
) -> list[Found]:
    """Import each library in another process, so that none can end this one."""
    found: list[Found] = []
    while len(found) < len(libraries):
        with TemporaryFile() as said:
            for answer in _answers(libraries[len(found) :], said):
                found.append(_judge(libraries[len(found)], answer))
                advance(len(found) / len(libraries))
                if found[-1].state == BROKEN:  # what is left of it might break the next
                    break
            else:
                if len(found) < len(libraries):  # this one ended the process
                    ended = {"state": BROKEN, "reason": _last_words(said)}
                    found.append(_judge(libraries[len(found)], ended))
    return found


def _answers(libraries: Sequence[Library], said: IO[bytes]) -> Iterator[dict[str, Any]]:
    """Yield what the process tells, until it is done or comes to a bad end."""
    # -P: files of the folder that the user is in are no libraries.
    command = [sys.executable, "-P", str(PROBE), *(each.module for each in libraries)]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=said
        )
    except OSError as error:
        said.write(f"no process can be started, {error.strerror}".encode())
        return
    too_late = threading.Timer(SECONDS, process.kill)
    with process:
        try:
            too_late.start()
            for line in process.stdout or ():
                if line.endswith(b"\n"):  # it may have ended in the middle of a line
                    yield json.loads(line)
            process.wait()
        finally:
            too_late.cancel()
            process.kill()
    said.write(f"\nthe process ended with {_ending(process.returncode)}".encode())


def _ending(code: int) -> str:
    if code == -signal.SIGKILL:
        return f"SIGKILL, for want of memory or of an answer in {SECONDS:.0f} s"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def _last_words(said: IO[bytes]) -> str:
    said.seek(0)
    lines = [line for line in said.read().decode(errors="replace").splitlines() if line.strip()]
    return ": ".join(reversed(lines[-2:]))


def _judge(library: Library, answer: dict[str, Any]) -> Found:
    version = version_of(library.name)
    state = answer["state"]
    reason = (answer.get("reason", "").strip().splitlines() or [""])[0]
    if state == MISSING and version is not None:
        state, reason = BROKEN, "it is installed, and its files are not there"
    details = {key: value for key, value in answer.get("details", {}).items() if value}
    # A library's own word says more, such as 2.6.0+cpu.
    return Found(library, state, answer.get("version") or version, reason, details)


def version_of(name: str) -> str | None:
    """Return the version that is installed, None if pip knows of none."""
    try:
        found: str | None = importlib.metadata.version(name)
    except (importlib.metadata.PackageNotFoundError, KeyError):
        return None
    return found


def misfits(versions: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Yield what does not fit together, and the requirement that would mend it.

    `versions` are by the names that pip knows; what each asks of the others is in its metadata.
    """
    try:
        from packaging.requirements import InvalidRequirement, Requirement
        from packaging.utils import canonicalize_name
        from packaging.version import InvalidVersion, Version
    except ImportError:  # which is told of already
        return
    for name, version in versions.items():
        for text in _requirements(name):
            try:
                asked = Requirement(text)
                other = canonicalize_name(asked.name)
                there = versions.get(other)
                if there is None or not _concerns(asked.marker):
                    continue
                if asked.specifier.contains(Version(there), prereleases=True):
                    continue
            except (InvalidRequirement, InvalidVersion):
                continue
            needed = f"{other}{asked.specifier}"
            yield f"{name} {version} needs {needed}, and {other} {there} is installed", needed


def _requirements(name: str) -> list[str]:
    try:
        return importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def _concerns(marker: Any) -> bool:
    """Say whether a requirement holds here, for one of our extras or for all."""
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *EXTRAS))
