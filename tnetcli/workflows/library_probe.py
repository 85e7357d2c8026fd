"""Import libraries one after another and tell what is found; run as a process of its own.

Nothing of tnet is imported here, and nothing of this by tnet: a broken library may end the process.
"""

import importlib.metadata
import importlib.util
import json
import os
import re
import sys
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

MOST = 2000  # characters of a reason
CODECS = ("JPEG8", "JPEG2K", "JPEGXL", "JPEGXR", "LZW", "DEFLATE", "ZSTD", "WEBP", "LERC")
DRIVERS = ("GTiff", "COG", "VRT", "JPEG", "PNG", "JP2OpenJPEG")
GIGA = 1e9


def main(names: list[str]) -> None:
    """Print a line of JSON for each module, in order."""
    told = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print has no place between the lines
    for name in names:
        told.write(json.dumps(probe(name)) + "\n")
        told.flush()  # the next one may be the last


def probe(name: str) -> dict[str, Any]:
    """Import a module and use it a little: `state` is ok, missing or broken."""
    try:
        module = import_module(name)
        if module.__spec__ is None or module.__spec__.origin is None:  # a folder without code
            return {"state": "missing"}
        details = DETAILS.get(name, _nothing)(module)
    except ModuleNotFoundError as error:
        if error.name in (name, name.split(".")[0]):
            return {"state": "missing"}
        return _broken(error)
    except (Exception, SystemExit) as error:  # whatever a library does, the others are told of
        return _broken(error)
    version = getattr(module, "__version__", None)
    return {"state": "ok", "version": version and str(version), "details": details}


def _broken(error: BaseException) -> dict[str, Any]:
    return {"state": "broken", "reason": f"{type(error).__name__}: {error}"[:MOST]}


def _nothing(module: Any) -> dict[str, Any]:
    return {}


def _rasterio(rasterio: Any) -> dict[str, Any]:
    # Fails if PROJ_LIB or PROJ_DATA lead to the tables of another PROJ.
    import_module("rasterio.crs").CRS.from_epsg(32633)
    with rasterio.Env() as environment:
        drivers = environment.drivers()
    return {
        "GDAL": rasterio.__gdal_version__,
        "PROJ": getattr(rasterio, "__proj_version__", None),
        "without": [name for name in DRIVERS if name not in drivers],
    }


def _imagecodecs(imagecodecs: Any) -> dict[str, Any]:
    there = [
        name for name in CODECS if getattr(getattr(imagecodecs, name, None), "available", False)
    ]
    return {"codecs": there, "without": [name for name in CODECS if name not in there]}


def _openslide(openslide: Any) -> dict[str, Any]:
    try:
        source = f"openslide-bin {importlib.metadata.version('openslide-bin')}"
    except importlib.metadata.PackageNotFoundError:
        source = "the system"
    return {
        "OpenSlide": openslide.__library_version__,
        "from": source,
        "pixman": _version_in_memory("libpixman-1.so."),
    }


def _version_in_memory(library: str) -> str | None:
    """Return the version of a shared library that came along, by its file; Linux tells it."""
    try:
        loaded = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(re.escape(library) + r"(\d[\d.]*)", loaded)
    return found[1] if found else None


def _torch(torch: Any) -> dict[str, Any]:
    if importlib.util.find_spec("numpy"):
        # Fails if torch was built for another generation of numpy.
        torch.from_numpy(import_module("numpy").zeros(1))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        cards = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
        devices = [_card(torch.cuda.get_device_properties(index)) for index in cards]
    if torch.backends.mps.is_available():
        devices.append("mps")
    return {
        "built for": next((f"{kind} {version}" for kind, version in _builds(torch)), "cpu"),
        "devices": [*devices, "cpu"],
        "threads": torch.get_num_threads(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "warning": str(said[0].message)[:MOST] if said else None,
    }


def _builds(torch: Any) -> list[tuple[str, str]]:
    known = (("CUDA", torch.version.cuda), ("ROCm", getattr(torch.version, "hip", None)))
    return [(kind, version) for kind, version in known if version]


def _card(properties: Any) -> str:
    return f"{properties.name} with {properties.total_memory / GIGA:.1f} GB"


def _zarr(zarr: Any) -> dict[str, Any]:
    return {"numcodecs": import_module("numcodecs").__version__}


def _pillow(image: Any) -> dict[str, Any]:
    features = import_module("PIL.features")
    wanted = ("jpg", "jpg_2000", "zlib", "libtiff", "webp")
    return {"without": [name for name in wanted if not features.check(name)]}


DETAILS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "rasterio": _rasterio,
    "imagecodecs": _imagecodecs,
    "openslide": _openslide,
    "torch": _torch,
    "zarr": _zarr,
    "PIL.Image": _pillow,
}


if __name__ == "__main__":
    main(sys.argv[1:])
