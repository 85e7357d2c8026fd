"""Throughput of prediction with worker processes and Dask, and an estimate for 100 nodes.

`python benchmarks/scale.py` predicts copies of one scene in this process, in worker processes and
on a local Dask cluster, with a small network (dominated by reading) and a larger one (dominated by
the network). It also times a task through the scheduler, writing a record and opening an image.
`--write` puts the result into benchmarks/RESULTS.md. Always exits with 0.
"""

import argparse
import datetime
import os
import platform
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from tempfile import gettempdir

from figures import write
from predict import make_scenes
from rich.console import Console
from rich.table import Table

from tnetcli.data.images import Image
from tnetcli.engines.dask import DaskEngine
from tnetcli.models.checkpoint import Description, load_model, save_checkpoint
from tnetcli.models.devices import limit_threads
from tnetcli.models.registry import build_model
from tnetcli.prediction.batch import ExecutionConfig, predict_images
from tnetcli.prediction.jsonl import PredictionFile
from tnetcli.prediction.record import Prediction
from tnetcli.readers.base import ReadOptions
from tnetcli.readers.detect import open_image
from tnetcli.system import available_cores

WORKERS = (1, 2, 4)
# Images per run and per batch. Processes return whole batches, so that a rate needs many batches.
COUNTS = {"reading": 320, "network": 64}
BATCHES = {"reading": 8, "network": 2}
TASKS = 400  # empty tasks through the scheduler
NODES, CORES = 100, 32
HEADINGS = ("engine", "workers", "reading: images/s", "", "network: images/s", "")


def nothing(piece: int) -> int:
    """Return the argument; an empty task."""
    return piece


def make_large_model(folder: Path) -> str:
    """Write a TNet on EfficientNet-B0 with random weights."""
    path = folder / "b0.safetensors"
    if not path.exists():
        described = load_model("default").description
        arguments = {"backbone": "tf_efficientnet_b0", "view_size": 224}
        large = described.model_copy(update={"config": arguments, "name": "b0"})
        large = Description.model_validate(large.model_dump())
        model = build_model("tnet", arguments, classes=len(large.classes), bands=3)
        save_checkpoint(path, model.eval(), large)
    return str(path)


@contextmanager
def engine(name: str, workers: int) -> Iterator[tuple[int, str | None]]:
    """Yield the engine; start and stop a cluster around it."""
    if name != "Dask":
        yield (workers if name == "processes" else 1), None
        return
    from distributed import LocalCluster

    with LocalCluster(  # type: ignore[no-untyped-call]
        n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None
    ) as cluster:
        yield 1, cluster.scheduler_address


def images_per_second(
    paths: list[Path], model: str, where: tuple[int, str | None], count: int, batch: int
) -> float:
    """Return the records per second after the first quarter of them.

    This excludes the time in which processes load torch and the model.
    """
    images = [
        Image(str(paths[number % len(paths)]), str(number), str(number), ReadOptions())
        for number in range(count)
    ]
    processes, scheduler = where
    threads = max(available_cores() // (processes if scheduler is None else 2), 1)
    execution = ExecutionConfig("cpu", threads, batch, processes, scheduler)
    arrived = [time.perf_counter() for _ in predict_images(images, model, execution=execution)]
    skipped = count // 4
    return (count - 1 - skipped) / (arrived[-1] - arrived[skipped])


def overheads(paths: list[Path], record: Prediction) -> dict[str, float]:
    """Return the milliseconds per task, per record written and per image opened."""
    with engine("Dask", 2) as where:
        scheduler = where[1]
        assert scheduler is not None
        batches = [[number] for number in range(TASKS)]
        done = DaskEngine(scheduler).map(nothing, batches, should_stop=lambda: False, lost=nothing)
        next(done)
        start = time.perf_counter()
        left = sum(1 for _ in done)
        task = (time.perf_counter() - start) / left
    with tempfile.TemporaryDirectory() as folder, PredictionFile(Path(folder) / "a.jsonl") as file:
        file.resume("", {}, lambda _: None)
        start = time.perf_counter()
        for number in range(TASKS):
            file.add(replace(record, id=str(number)))
        kept = (time.perf_counter() - start) / TASKS
    start = time.perf_counter()
    for path in paths:
        open_image(str(path)).close()
    opened = (time.perf_counter() - start) / len(paths)
    return {"task": 1000 * task, "record": 1000 * kept, "open": 1000 * opened}


def estimate_nodes(best: dict[str, float], cost: dict[str, float], size: int) -> list[str]:
    """Return an estimate for 100 nodes, and the bottlenecks in order."""
    cores = available_cores()
    each = {kind: rate / cores for kind, rate in best.items()}
    many = {kind: rate * NODES * CORES for kind, rate in each.items()}
    tasks = 1000 / cost["task"]
    return [
        f"**Estimate for {NODES} nodes of {CORES} such cores.** A core predicts "
        f"{each['reading']:.1f} images a second with the small network and {each['network']:.2f} "
        f"with the large one, so that {NODES * CORES} cores would predict {many['reading']:,.0f} "
        f"and {many['network']:,.0f} if they shared nothing. Shared resources, in the order in "
        "which they become the bottleneck:",
        "",
        f"1. **The Dask scheduler.** An empty task takes {cost['task']:.1f} ms here with two "
        f"workers, so that one scheduler distributes about {tasks:,.0f} images a second: "
        "enough for "
        f"{tasks / each['reading']:,.0f} cores with the small network and "
        f"{tasks / each['network']:,.0f} with the large one. Beyond that use a job array, whose "
        "shards are independent.",
        f"2. **The output file.** A record of {size / 1000:.1f} kB takes "
        f"{cost['record']:.2f} ms to append and flush: {1000 / cost['record']:,.0f} a second "
        "into one file on this disk. A Dask cluster writes one file, a job array one per task.",
        f"3. **File system metadata.** Opening an image takes {cost['open']:.1f} ms here, with its "
        "header in the page cache. A parallel file system has one metadata server, and "
        f"{many['reading']:,.0f} images a second are several times as many requests. Node-local "
        "scratch avoids them.",
        "4. **Start-up.** Every process loads torch from shared storage, which takes seconds: give "
        "tasks minutes of work.",
    ]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(gettempdir()) / "tnet-gigapixel")
    parser.add_argument("--write", action="store_true", help="update RESULTS.md")
    arguments = parser.parse_args()
    say = Console(stderr=True).print
    limit_threads(available_cores())
    paths = make_scenes(arguments.folder / "scenes")
    models = {"reading": "default", "network": make_large_model(arguments.folder)}
    runs = [("this process", 1), *(("processes", n) for n in WORKERS[1:])]
    runs += [("Dask", n) for n in WORKERS]
    rows, rates = [], dict[str, list[float]]()
    for name, workers in runs:
        cells = [name, str(workers)]
        with engine(name, workers) as where:
            for kind, model in models.items():
                rate = images_per_second(paths, model, where, COUNTS[kind], BATCHES[kind])
                rates.setdefault(kind, []).append(rate)
                cells += [f"{rate:.2f}", f"{rate / rates[kind][0]:.2f} x"]
        say(" | ".join(cells))
        rows.append(cells)
    image = Image(str(paths[0]), "a", "a", ReadOptions())
    (record,) = predict_images([image], "default")
    cost = overheads(paths, record)
    estimate = estimate_nodes(
        {kind: max(found) for kind, found in rates.items()}, cost, len(record.model_dump_json())
    )
    table = Table(*HEADINGS)
    for cells in rows:
        table.add_row(*cells)
    Console(width=120).print(table)
    print("\n".join(estimate))
    if arguments.write:
        libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "distributed"))
        write("scale", [
            "## Scale",
            "",
            f"`python benchmarks/scale.py --write`. {datetime.date.today()}; {os.cpu_count()} "
            f"cores; Python {platform.python_version()}; {libraries}. COGs of 4096 px, 8 regions "
            "per image with the bundled model (dominated by reading), 7 with a TNet on "
            f"EfficientNet-B0 (dominated by the network), in batches of {BATCHES['reading']} and "
            f"{BATCHES['network']}, on Dask one by one. Records per second after the first "
            "quarter; the factor is relative to this process alone, which uses all cores. A Dask "
            "worker uses one.",
            "",
            "| " + " | ".join(HEADINGS) + " |",
            "|---" * len(HEADINGS) + "|",
            *("| " + " | ".join(cells) + " |" for cells in rows),
            "",
            *estimate,
            "",
        ])  # fmt: skip


if __name__ == "__main__":
    main()
