import os
import platform
import subprocess
import sys

import pytest

from tnetcli import system
from tnetcli.system import available_cores, memory


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Return a function that writes control groups of this process."""
    root, own = tmp_path / "cgroup", tmp_path / "own"
    monkeypatch.setattr(system, "CGROUPS", root)
    monkeypatch.setattr(system, "GROUPS_OF_PROCESS", own)

    def write(lines, **limits):
        own.write_text(lines)
        for name, text in limits.items():
            path = root / name.replace("__", "/").replace("_dot_", ".")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    return write


@pytest.fixture(autouse=True)
def _sixteen_cores(monkeypatch):
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(16), raising=False)


def test_slurm_sets_the_number_of_cores(monkeypatch, groups):
    groups("")
    assert available_cores() == 16
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "3")
    assert available_cores() == 3


@pytest.mark.parametrize("value", ["", "0", "²", "2(x3)"])
def test_an_invalid_number_of_cores_is_ignored(monkeypatch, groups, value):
    groups("")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", value)
    assert available_cores() == 16


def test_a_system_without_affinity_counts_its_cores(monkeypatch, groups):
    groups("")
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert available_cores() == 1


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("150000 100000", 2), ("1000 100000", 1), ("max 100000\n", 16), ("6400000 100000", 16),
     ("", 16), ("1 0", 16), ("x y z", 16)],
)  # fmt: skip
def test_the_quota_of_a_container_limits_the_cores(groups, quota, cores):
    groups("0::/", cpu_dot_max=quota)
    assert available_cores() == cores


def test_the_strictest_group_counts(groups):
    groups("0::/a/b\n", a__cpu_dot_max="300000 100000", a__b__cpu_dot_max="max 100000")
    assert available_cores() == 3


@pytest.mark.parametrize(
    ("lines", "limits"),
    [
        (
            "0::/job/step\n",
            {"job__memory_dot_max": "1000000\n", "job__step__memory_dot_max": "max"},
        ),
        ("4:memory:/job\n0::/\n", {"memory__job__memory_dot_limit_in_bytes": "1000000"}),
    ],
)
def test_the_memory_limit_of_a_job_is_found(groups, lines, limits):
    groups(lines, **limits)
    assert memory().limit == 1_000_000


def test_a_limit_beyond_the_machine_is_none(groups):
    groups("4:memory:/\n", memory__memory_dot_limit_in_bytes="9223372036854771712")
    assert memory().limit is None


def test_malformed_lines_are_ignored(groups):
    groups("nonsense\n::\n\n")
    assert available_cores() == 16


def test_unknown_memory_is_none(monkeypatch, groups):
    groups("")
    assert memory().total > 2**27

    def unsupported(name):
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "sysconf", unsupported)
    assert memory() == system.Memory(None, None)


FAULTS = """
import resource, sys
import numpy as np
from tnetcli.system import reuse_freed_memory

if sys.argv[1] == "reuse":
    reuse_freed_memory()
for _ in range(10):
    np.ones(2**17)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    np.ones(2**17)  # a megabyte
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc only")
@pytest.mark.parametrize(
    ("setting", "how", "fresh"),
    [("65536", "reuse", False), ("65536", "", True), ("1", "reuse", True)],
)
def test_memory_that_dask_would_return_is_reused(setting, how, fresh):
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": setting}
    done = subprocess.run(
        [sys.executable, "-c", FAULTS, how],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    pages = 100 * 2**20 // os.sysconf("SC_PAGE_SIZE")
    assert (int(done.stdout) > pages / 2) == fresh


def drivers_after_confining(**environment):
    script = (
        "from tnetcli.system import confine_gdal; confine_gdal(); import rasterio\n"
        "with rasterio.Env() as env: print(*env.drivers(), sep=',')"
    )
    run = [sys.executable, "-c", script]
    found = subprocess.run(
        run, capture_output=True, text=True, check=True, env=os.environ | environment
    )
    assert not found.stderr
    return set(found.stdout.strip().split(","))


def test_drivers_that_write_or_fetch_and_those_of_the_user_are_disabled():
    found = drivers_after_confining(GDAL_SKIP="GIF BMP")
    assert {"GTiff", "COG", "VRT", "JP2OpenJPEG", "PNG", "JPEG", "ENVI", "HFA", "NITF"} <= found
    assert not found & {"MRF", "WMS", "WCS", "WMTS", "HTTP", "STACTA", "netCDF", "Zarr", "PDS"}
    assert not found & {"GIF", "BMP"}
