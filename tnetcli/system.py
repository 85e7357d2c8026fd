"""Cores, memory, and the GDAL drivers of this process."""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
GROUPS_OF_PROCESS = Path("/proc/self/cgroup")
MEMORY = Path("/proc/meminfo")
# What Dask gives its workers (distributed 2026.8), and what glibc calls its parameters.
TRIMMING = ("MALLOC_TRIM_THRESHOLD_", "65536")
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
# Drivers of GDAL that write, fetch, or read what a file names.
UNUSED_DRIVERS = (
    *("BAG", "CEOS", "DAAS", "DIMAP", "ECRGTOC", "EEDA", "EEDAI", "ERS", "ESRIC", "GRIB", "GTI"),
    *("GenBin", "HDF5", "HDF5Image", "HTTP", "ILWIS", "ISIS2", "ISIS3", "JAXAPALSAR", "MBTiles"),
    *("KMLSUPEROVERLAY", "MFF", "MFF2", "MRF", "PAux", "PDF", "PDS", "PDS4", "PLMOSAIC", "RPFTOC"),
    *("RRASTER", "RS2", "Rasterlite", "S102", "S104", "S111", "SAFE", "SAR_CEOS", "SENTINEL2"),
    *("STACIT", "STACTA", "TIL", "TSX", "VICAR", "WCS", "WMS", "WMTS", "Zarr", "netCDF"),
)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes there are, free ones, and what this process may have; None where nobody says."""

    total: int | None
    available: int | None
    limit: int | None


def available_cores() -> int:
    """Return how many cores this job may use: as SLURM says, or as system and container do."""
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")
    if given.isascii() and given.isdecimal() and int(given) > 0:
        return int(given)
    return min([_seen_cores(), *_granted_cores()])


def _seen_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _granted_cores() -> Iterator[int]:
    """Yield what containers grant: all cores can be seen there, and only some be used."""
    for folder in _groups(""):
        quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
        if quota.isdecimal() and period.isdecimal() and int(period):
            yield max(math.ceil(int(quota) / int(period)), 1)


def memory() -> Memory:
    """Return what the system says of memory, limits of containers, jobs and shells included."""
    total = _total()
    limits = [] if total is None else [limit for limit in _limits() if limit < total]
    return Memory(total, _available(), min(limits, default=None))


def reuse_freed_memory() -> None:
    """Let malloc keep what is freed for the next time, where Dask has told it to give it back.

    Every view and every layer would have its pages made anew by the system, which takes a network
    on a processor half of its time. At most 128 MB stay unused.
    """
    name, by_dask = TRIMMING
    if os.environ.get(name) != by_dask:  # or a user has said so
        return
    import ctypes

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # not of glibc
        return
    mallopt(MMAP_THRESHOLD, 2**25)  # the most that glibc takes; told to trim, it learns no other
    mallopt(TRIM_THRESHOLD, 2**27)


def _total() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _available() -> int | None:
    for line in _text(MEMORY).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _limits() -> Iterator[int]:
    for controller, name in (("", "memory.max"), ("memory", "memory.limit_in_bytes")):
        for folder in _groups(controller):
            text = _text(folder / name).strip()
            if text.isdecimal():  # the other word is `max`
                yield int(text)
    try:
        import resource  # no such thing on Windows

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    except (ImportError, OSError, ValueError):
        return
    if soft != resource.RLIM_INFINITY:
        yield soft


def _groups(controller: str) -> Iterator[Path]:
    """Yield the control groups of this process, its own first: each may set a limit.

    The empty name is that of version 2, which has one tree for all.
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
    """Keep GDAL's drivers that write, fetch or follow names out of this process.

    Readers check what GDAL opens for an image; this holds where a check has a gap. Only `tnet`
    calls it, before GDAL starts: a process of somebody else keeps its drivers.
    """
    given = os.environ.get("GDAL_SKIP", "")
    separator = "," if "," in given else None  # GDAL takes spaces where there is no comma
    os.environ["GDAL_SKIP"] = ",".join([*given.split(separator), *UNUSED_DRIVERS])
    # Megabytes. The default is 5 % of the machine, which the jobs of an array share.
    os.environ.setdefault("GDAL_CACHEMAX", "128")
