"""How prediction grows with worker processes here, and what 100 nodes would do, on paper.

`python benchmarks/scale.py` predicts copies of one scene in this process, in worker processes and
on a local Dask cluster, with a small network (reading counts most) and a larger one (the network
does), and times what else a large run needs: a task through the scheduler, a record into the file,
the opening of an image. `--write` puts it into benchmarks/RESULTS.md. Exits with 0 whatever it
finds.
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
from tnetcli.devices import limit_threads
from tnetcli.engines.dask import DaskEngine
from tnetcli.models.checkpoint import Description, load_model, save_checkpoint
from tnetcli.models.registry import build_model
from tnetcli.prediction.batch import ExecutionConfig, predict_images
from tnetcli.prediction.jsonl import PredictionFile
from tnetcli.prediction.record import Prediction
from tnetcli.readers.base import ReadOptions
from tnetcli.readers.detect import open_image
from tnetcli.system import available_cores

WORKERS = (1, 2, 4)
# Images in a run, and in a batch: records come a batch at a time from every process, so that a rate
# means something only over many rounds of all of them.
COUNTS = {"reading": 320, "network": 64}
BATCHES = {"reading": 8, "network": 2}
TASKS = 400  # that do nothing, through the scheduler
NODES, CORES = 100, 32
HEADINGS = ("engine", "workers", "reading: images/s", "", "network: images/s", "")


def nothing(piece: int) -> int:
    """Do nothing, on a worker."""
    return piece


def make_large_model(folder: Path) -> str:
    """Write a TNet on EfficientNet-B0 with weights by chance: what it says means nothing."""
    path = folder / "b0.safetensors"
    if not path.exists():
        described = load_model("default").description
        arguments = {"backbone": "tf_efficientnet_b0", "view_size": 224}
        large = described.model_copy(update={"arguments": arguments, "name": "b0"})
        large = Description.model_validate(large.model_dump())
        model = build_model("tnet", arguments, classes=len(large.classes), bands=3)
        save_checkpoint(path, model.eval(), large)
    return str(path)


@contextmanager
def engine(name: str, workers: int) -> Iterator[tuple[int, str | None]]:
    """Yield the number of processes and the scheduler; a cluster is started and ended around it."""
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
    """Return how many records come in a second, once the first ones have come.

    Until then processes load torch and the model, which is over in seconds however long a run is.
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
    """Return the milliseconds of a task, of a record written, and of an image opened."""
    with engine("Dask", 2) as (_, scheduler):
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


def on_paper(best: dict[str, float], cost: dict[str, float], size: int) -> list[str]:
    """Say what 100 nodes would do by these figures, and what breaks first."""
    cores = available_cores()
    each = {kind: rate / cores for kind, rate in best.items()}
    many = {kind: rate * NODES * CORES for kind, rate in each.items()}
    tasks = 1000 / cost["task"]
    return [
        f"**On paper: {NODES} nodes of {CORES} such cores.** A core does {each['reading']:.1f} "
        f"images a second with the small network and {each['network']:.2f} with the large one, so "
        f"{NODES * CORES} of them would do {many['reading']:,.0f} and {many['network']:,.0f}, if "
        "nothing were shared. What is shared, in the order in which it breaks:",
        "",
        f"1. **The Dask scheduler.** A task that does nothing takes {cost['task']:.1f} ms here "
        f"with two workers, so one scheduler hands out about {tasks:,.0f} images a second: "
        "enough for "
        f"{tasks / each['reading']:,.0f} cores with the small network and "
        f"{tasks / each['network']:,.0f} with the large one. Beyond that use a job array: shards "
        "do not talk to one another.",
        f"2. **The file of records.** A record of {size / 1000:.1f} kB takes "
        f"{cost['record']:.2f} ms to append and flush: {1000 / cost['record']:,.0f} a second "
        "into one file on this disk. A cluster writes one file, a job array one a task.",
        f"3. **Metadata of the file system.** Opening an image takes {cost['open']:.1f} ms here, "
        "where its head is in the cache; a parallel file system has one metadata server, and "
        f"{many['reading']:,.0f} images a second are several times as many requests. Scratch on "
        "the nodes takes it away from there.",
        "4. **Start-up.** Every process loads torch from shared storage, seconds each: give tasks "
        "minutes of work.",
    ]


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(gettempdir()) / "tnet-gigapixel")
    parser.add_argument("--write", action="store_true", help="renew the section in RESULTS.md")
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
    paper = on_paper(
        {kind: max(found) for kind, found in rates.items()}, cost, len(record.model_dump_json())
    )
    table = Table(*HEADINGS)
    for cells in rows:
        table.add_row(*cells)
    Console(width=120).print(table)
    print("\n".join(paper))
    if arguments.write:
        libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "distributed"))
        write("scale", [
            "## Scale",
            "",
            f"`python benchmarks/scale.py --write`. {datetime.date.today()}; {os.cpu_count()} "
            f"cores; Python {platform.python_version()}; {libraries}. COGs of 4096 px, 8 windows "
            "an image with the bundled model (reading counts most), 7 with a TNet on "
            f"EfficientNet-B0 (the network does), in batches of {BATCHES['reading']} and "
            f"{BATCHES['network']}, on Dask one by one. Records a second once a quarter of them "
            "have come; the second number is by how much that is more than this process alone, "
            "which uses all cores itself, while a worker of Dask has one.",
            "",
            "| " + " | ".join(HEADINGS) + " |",
            "|---" * len(HEADINGS) + "|",
            *("| " + " | ".join(cells) + " |" for cells in rows),
            "",
            *paper,
            "",
        ])  # fmt: skip


if __name__ == "__main__":
    main()
