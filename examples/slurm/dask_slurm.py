"""Predict on a Dask cluster started by SLURM: for images of very different cost.

    python dask_slurm.py images.txt out.jsonl --workers 16

dask-jobqueue (pip install dask-jobqueue) submits the jobs; use PBSCluster or LSFCluster for other
queues. `tnet` needs the address of the scheduler only.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from dask_jobqueue import SLURMCluster


def main() -> int:
    """Start the cluster, predict, and stop the cluster."""
    parser = argparse.ArgumentParser(description="Predict on a Dask cluster started by SLURM.")
    parser.add_argument("images", type=Path, help="list of images, one per line")
    parser.add_argument("output", help="output .jsonl file")
    parser.add_argument("--workers", type=int, default=8, help="maximum number of jobs")
    parser.add_argument("--cores", type=int, default=4, help="cores per job")
    parser.add_argument("--memory", default="8GB", help="memory per job")
    parser.add_argument("--walltime", default="04:00:00", help="time limit per job")
    given = parser.parse_args()
    life = lifetime(given.walltime)
    with SLURMCluster(
        cores=1,  # one image at a time, with all cores of the job
        processes=1,
        memory=given.memory,
        walltime=given.walltime,
        job_cpu=given.cores,
        job_script_prologue=[f"export OMP_NUM_THREADS={given.cores}"],  # Dask would set 1
        # A worker that leaves before its time limit returns its tasks.
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
