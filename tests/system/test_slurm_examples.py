"""The job scripts run with stand-ins for the commands of SLURM."""

import fcntl
import json
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.commands import ROOT
from tests.images import noise, write_geotiff

SLURM = ROOT / "examples" / "slurm"
SCRIPTS = sorted(SLURM.glob("*.sbatch"))
BIN = Path(sys.executable).parent
# Each stand-in logs its arguments.
NOTE = 'echo "$(basename "$0") $*" >> "$CALLS"\n'


@pytest.fixture
def cluster(tmp_path, commands):
    """A folder with images and stand-ins for the commands of SLURM."""
    stands = tmp_path / "bin"
    stands.mkdir()
    for name, more in (
        ("sbatch", ""),
        ("scontrol", '[ "$1" = show ] && echo localhost; exit 0\n'),
        ("srun", 'exec "$@"\n'),
    ):
        (stands / name).write_text(f"#!/bin/bash\n{NOTE}{more}")
        (stands / name).chmod(0o755)
    (stands / "tnet").symlink_to(commands / "tnet")
    for number in range(6):
        write_geotiff(tmp_path / f"{number}.tif", noise((64, 64), seed=number))
    (tmp_path / "images.txt").write_text("".join(f"{number}.tif\n" for number in range(6)))
    return tmp_path


def environment(cluster, **more):
    return {
        **os.environ,
        "PATH": f"{cluster / 'bin'}:{BIN}:{os.environ['PATH']}",
        "CALLS": str(cluster / "calls"),
        "OMP_NUM_THREADS": "1",
        **more,
    }


def task(cluster, number, count, **more):
    return environment(
        cluster,
        SLURM_ARRAY_JOB_ID="7",
        SLURM_ARRAY_TASK_ID=str(number),
        SLURM_ARRAY_TASK_COUNT=str(count),
        SLURM_ARRAY_TASK_MIN="1",
        SLURM_ARRAY_TASK_MAX=str(count),
        SLURM_CPUS_PER_TASK="1",
        **more,
    )


def run(words, cluster, env):
    return subprocess.run(
        list(map(str, words)), cwd=cluster, env=env, capture_output=True, text=True, check=False
    )


def calls(cluster):
    file = cluster / "calls"
    return file.read_text().splitlines() if file.exists() else []


def test_an_array_predicts_its_parts_and_submits_the_merge_job(cluster):
    for number in (1, 2):
        words = ["bash", SLURM / "predict_array.sbatch", "images.txt", "out.jsonl"]
        done = run(words, cluster, task(cluster, number, 2))
        assert done.returncode == 0, done.stderr
    (submitted,) = calls(cluster)  # by the first only
    assert "--dependency=afterany:7" in submitted
    merge = submitted.partition("--wrap=")[2]
    done = run(["bash", "-c", merge], cluster, environment(cluster))
    assert done.returncode == 0, done.stderr
    lines = (cluster / "out.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["id"] for line in lines) == [f"{n}.tif" for n in range(6)]


def test_file_names_and_task_numbers_are_arbitrary(cluster):
    listed, output = "list of images.txt", "it's out/recörds of $HOME.json"
    (cluster / "images.txt").rename(cluster / listed)
    (cluster / "it's out").mkdir()
    for number in (10, 14):
        words = ["bash", SLURM / "predict_array.sbatch", listed, output]
        more = {"SLURM_ARRAY_TASK_MIN": "10", "SLURM_ARRAY_TASK_STEP": "4"}
        done = run(words, cluster, {**task(cluster, number, 2), **more})
        assert done.returncode == 0, done.stderr
    (submitted,) = calls(cluster)
    merge = submitted.partition("--wrap=")[2]
    done = run(["sh", "-c", merge], cluster, environment(cluster))
    assert done.returncode == 0, done.stderr
    assert len((cluster / output).read_text().splitlines()) == 6


def test_some_tasks_of_an_array_run_alone(cluster):
    """SLURM counts the submitted tasks, not all parts."""
    env = {**task(cluster, 3, 1), "SLURM_ARRAY_TASK_MIN": "3", "PARTS": "3"}
    done = run(["bash", SLURM / "predict_array.sbatch", "images.txt", "out.jsonl"], cluster, env)
    assert done.returncode == 0, done.stderr
    lines = (cluster / "out.3-of-3.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == ["2.tif", "5.tif"]
    (submitted,) = calls(cluster)
    assert "-of-3" in submitted


def test_a_single_task_writes_the_output_without_a_merge_job(cluster):
    words = ["bash", SLURM / "predict_array.sbatch", "images.txt", "out.jsonl"]
    done = run(words, cluster, task(cluster, 1, 1))
    assert done.returncode == 0, done.stderr
    assert len((cluster / "out.jsonl").read_text().splitlines()) == 6
    assert not calls(cluster)


def test_a_node_without_sbatch_prints_the_merge_command(cluster):
    (cluster / "bin" / "sbatch").write_text("#!/bin/bash\nexit 1\n")
    words = ["bash", SLURM / "predict_array.sbatch", "images.txt", "out.jsonl"]
    done = run(words, cluster, task(cluster, 1, 6))
    assert done.returncode == 0, done.stderr
    assert "tnet merge 'out'.*-of-6'.jsonl' -o 'out.jsonl' --overwrite" in done.stdout


def test_a_task_with_a_failed_image_succeeds(cluster):
    (cluster / "0.tif").write_text("no image")
    words = ["bash", SLURM / "predict_array.sbatch", "images.txt", "out.jsonl"]
    done = run(words, cluster, task(cluster, 1, 1, SLURM_RESTART_COUNT="1"))
    assert done.returncode == 0
    assert "some images failed" in done.stdout
    assert not calls(cluster)  # a requeued task submits nothing


def test_a_signalled_task_stops_and_is_requeued(cluster):
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL  # otherwise the shell ignores it
    os.mkfifo(cluster / "never.txt")
    held = os.open(cluster / "never.txt", os.O_RDWR)  # keeps the list open
    words = ["bash", str(SLURM / "predict_array.sbatch"), "never.txt", "out.jsonl"]
    env = task(cluster, 2, 2)
    job = subprocess.Popen(
        words, cwd=cluster, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        os.write(held, b"0.tif\n")
        wait_until_read(held, job)
        job.send_signal(signal.SIGUSR1)
        printed, _ = job.communicate(timeout=60)
    finally:
        os.close(held)
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    assert job.returncode == 75
    assert "requeued" in printed
    assert calls(cluster) == ["scontrol requeue 7_2"]


def wait_until_read(pipe, job):
    """Wait until the job has read everything from a pipe."""
    while struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]:
        assert job.poll() is None
        time.sleep(0.05)


def job_number():
    """Return a job number whose port is free; these tests may run in parallel."""
    for number in random.SystemRandom().sample(range(10_000), 10_000):
        with socket.socket() as listening, suppress(OSError):
            listening.bind(("127.0.0.1", 20_000 + number))
            return 70_000 + number
    raise AssertionError("no port is free")


def node(cluster, steps):
    """Write a recipe of so many steps; return the environment of its job."""
    rows = "".join(f"{n}.tif,{n % 2},{'validation' if n > 3 else 'train'}\n" for n in range(6))
    (cluster / "images.csv").write_text("path,label,split\n" + rows)
    (cluster / "recipe.yaml").write_text(
        "model: {family: whole, classes: 2, backbone: compact, view_size: 32}\n"
        f"data: {{path: images.csv}}\nstages: [{{steps: {steps}}}]\n"
        "training: {batch_size: 1, threads: 1, device: cpu, log_every: 1, validate_every: 5}\n"
    )
    return environment(
        cluster,
        SLURM_JOB_ID=str(job_number()),
        SLURM_JOB_NODELIST="localhost",
        SLURM_JOB_NUM_NODES="1",
        SLURM_GPUS_ON_NODE="2",
        SLURM_CPUS_PER_TASK="2",
    )


@pytest.mark.slow
def test_a_training_runs_on_a_node(cluster):
    words = ["bash", SLURM / "train_ddp.sbatch", "recipe.yaml", "run"]
    done = run(words, cluster, node(cluster, steps=2))
    assert done.returncode == 0, done.stderr
    assert (cluster / "run" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_signalled_training_stops_and_is_requeued(cluster):
    words = ["bash", str(SLURM / "train_ddp.sbatch"), "recipe.yaml", "a run"]
    env = node(cluster, steps=100_000)
    job = subprocess.Popen(
        words, cwd=cluster, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 300
        while not (cluster / "a run" / "state.safetensors").exists():
            assert job.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        job.send_signal(signal.SIGUSR1)
        printed, _ = job.communicate(timeout=120)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    assert job.returncode == 75
    assert "requeued" in printed
    assert f"scontrol requeue {env['SLURM_JOB_ID']}" in calls(cluster)
    metrics = cluster / "a run" / "metrics.jsonl"
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    more = ["--set", f"stages.0.steps={steps[-1] + 5}"]
    done = run([*words, *more], cluster, env)
    assert done.returncode != 0  # a different recipe cannot be resumed
    assert "started with another recipe: `steps: " in done.stderr


def test_the_dask_example_has_help(cluster):
    pytest.importorskip("dask_jobqueue", reason="the example needs dask-jobqueue")
    done = run([sys.executable, SLURM / "dask_slurm.py", "--help"], cluster, environment(cluster))
    assert done.returncode == 0
    assert "--workers" in done.stdout


# Runs the script as SLURM does; a job is a process group.
SBATCH = """#!/bin/bash
cp "${@: -1}" job.sh
setsid bash job.sh > job.log 2>&1 &
echo "Submitted batch job $!"
"""


@pytest.mark.slow
def test_the_dask_example_predicts_with_slurm_workers(cluster):
    pytest.importorskip("dask_jobqueue", reason="the example needs dask-jobqueue")
    for name, text in (
        ("sbatch", SBATCH),
        ("scancel", '#!/bin/bash\nfor job; do kill -- "-$job"; done\n'),
    ):
        (cluster / "bin" / name).write_text(text)
        (cluster / "bin" / name).chmod(0o755)
    words = [sys.executable, SLURM / "dask_slurm.py", "images.txt", "the records.jsonl"]
    words += ["--workers", "2", "--cores", "1", "--memory", "2GB", "--walltime", "00:10:00"]
    done = run(words, cluster, environment(cluster))
    assert done.returncode == 0, done.stderr
    lines = (cluster / "the records.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["id"] for line in lines) == [f"{n}.tif" for n in range(6)]
    job = (cluster / "job.sh").read_text()
    assert "export OMP_NUM_THREADS=1" in job
    assert "--lifetime 540s" in job


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_pass_shellcheck(script):
    found = shutil.which("shellcheck", path=f"{BIN}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run([found, script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
