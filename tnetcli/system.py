"""Cores and memory of the job, and the GDAL drivers of this process."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
GROUPS_OF_PROCESS = Path("/proc/self/cgroup")
# The variable that Dask sets for its workers (distributed 2026.8), and parameters of glibc.
TRIMMING = ("MALLOC_TRIM_THRESHOLD_", "65536")
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
# GDAL drivers that write, fetch, or open other files that a file names.
UNUSED_DRIVERS = (
    *("BAG", "CEOS", "DAAS", "DIMAP", "ECRGTOC", "EEDA", "EEDAI", "ERS", "ESRIC", "GRIB", "GTI"),
    *("GenBin", "HDF5", "HDF5Image", "HTTP", "ILWIS", "ISIS2", "ISIS3", "JAXAPALSAR", "MBTiles"),
    *("KMLSUPEROVERLAY", "MFF", "MFF2", "MRF", "PAux", "PDF", "PDS", "PDS4", "PLMOSAIC", "RPFTOC"),
    *("RRASTER", "RS2", "Rasterlite", "S102", "S104", "S111", "SAFE", "SAR_CEOS", "SENTINEL2"),
    *("STACIT", "STACTA", "TIL", "TSX", "VICAR", "WCS", "WMS", "WMTS", "Zarr", "netCDF"),
)


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of the machine and the limit of this job, in bytes; None if unknown."""

    total: int | None
    limit: int | None


def available_cores() -> int:
    """Return the number of cores of this job, from SLURM or from affinity and container limits."""
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if given.isascii() and given.isdecimal() and int(given) > 0:
        return int(given)
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    for folder in _groups(""):  # a container has a quota, and all cores of the machine are visible
        quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):
            cores = min(cores, max(math.ceil(int(quota) / int(period)), 1))
    return cores


def memory() -> Memory:
    """Return the memory of the machine and the strictest limit of containers and jobs."""
    total = None
    with suppress(AttributeError, ValueError, OSError):
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    files = [folder / "memory.max" for folder in _groups("")]
    files += [folder / "memory.limit_in_bytes" for folder in _groups("memory")]
    limits = [int(text) for text in map(_text, files) if text.strip().isdecimal()]  # not `max`
    limits = [limit for limit in limits if total is not None and limit < total]
    return Memory(total, min(limits, default=None))


def reuse_freed_memory() -> None:
    """Let malloc keep freed memory in workers where Dask made it return memory at once.

    Otherwise the system maps new pages for every view and every layer, which takes half of the
    time of a network on a CPU. At most 128 MB stay unused.
    """
    name, by_dask = TRIMMING
    if os.environ.get(name) != by_dask:  # not set, or set by the user
        return
    import ctypes

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not glibc
        return
    mallopt(MMAP_THRESHOLD, 2**25)  # the maximum of glibc, which no longer adapts it
    mallopt(TRIM_THRESHOLD, 2**27)


def _groups(controller: str) -> Iterator[Path]:
    """Yield the control groups of this process, innermost first; each may set a limit.

    `controller` is empty for cgroup version 2, which has one tree.
    """
    root = CGROUPS / controller
    for line in _text(GROUPS_OF_PROCESS).splitlines():
        _, names, path = (*line.split(":", 2), "", "")[:3]
        if controller not in names.split(","):
            continue
        folder = root / path.lstrip("/")
        while folder.is_relative_to(root) and folder != root:
            yield folder
            folder = folder.parent
        yield root


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def confine_gdal() -> None:
    """Disable GDAL drivers that write, fetch or open other files, for this process.

    A second line of defence behind the checks of the readers. Only the `tnet` command calls it,
    before GDAL is loaded: the library changes no process-wide state.
    """
    given = os.environ.get("GDAL_SKIP", "")
    separator = "," if "," in given else None  # GDAL splits at spaces if there is no comma
    os.environ["GDAL_SKIP"] = ",".join([*given.split(separator), *UNUSED_DRIVERS])
