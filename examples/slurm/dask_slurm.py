"""Predict on a Dask cluster that SLURM starts: uneven images, workers that come and go.

    python dask_slurm.py images.txt out.jsonl --workers 16

dask-jobqueue (pip install dask-jobqueue) hands in the jobs; PBSCluster or LSFCluster stand in its
place at other sites. `tnet` knows nothing of SLURM: it is told where the scheduler listens.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from dask_jobqueue import SLURMCluster


def main() -> int:
    """Start the cluster, predict, and leave nothing behind."""
    parser = argparse.ArgumentParser(description="Predict on a Dask cluster that SLURM starts.")
    parser.add_argument("images", type=Path, help="a list of images, one a line")
    parser.add_argument("output", help="the records, a .jsonl file")
    parser.add_argument("--workers", type=int, default=8, help="jobs at most")
    parser.add_argument("--cores", type=int, default=4, help="of each job")
    parser.add_argument("--memory", default="8GB", help="of each job")
    parser.add_argument("--walltime", default="04:00:00", help="of each job")
    given = parser.parse_args()
    life = lifetime(given.walltime)
    with SLURMCluster(
        cores=1,  # one image at a time: the model has the cores of the job to itself
        processes=1,
        memory=given.memory,
        walltime=given.walltime,
        job_cpu=given.cores,
        job_script_prologue=[f"export OMP_NUM_THREADS={given.cores}"],  # or Dask makes it 1
        # A worker that leaves before its time is up hands back what it has.
        worker_extra_args=["--lifetime", f"{life}s", "--lifetime-stagger", f"{life // 20}s"],
    ) as cluster:
        cluster.adapt(minimum=1, maximum=given.workers)
        words = ["tnet", "predict", "-", "-o", given.output]
        words += ["--scheduler", cluster.scheduler_address]
        with given.images.open() as listed:
            return subprocess.run(words, stdin=listed, check=False).returncode


def lifetime(walltime: str) -> int:
    """Return the seconds after which a worker leaves, before SLURM ends its job."""
    days, _, clock = walltime.rpartition("-")
    hours, minutes, seconds = (int(part) for part in clock.split(":"))
    return (((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds) * 9 // 10


if __name__ == "__main__":
    sys.exit(main())
