"""Accuracy and cost of training: three seeds each, with the commands of the command line.

`python benchmarks/learning.py` trains with `tnet train`, evaluates with `tnet evaluate` on held-out
images, and prints tables; `--write` puts them into benchmarks/RESULTS.md. Finished runs are kept in
`--folder` with their CPU seconds and are not repeated, so that parts (`--seeds 1 --only
landscapes`) can run separately. Always exits with 0.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import gettempdir
from typing import Any

import yaml
from figures import Figure, markdown, show, write
from rich.console import Console

ROOT = Path(__file__).parents[1]
TILES = ROOT.parent / "shared" / "data" / "labelled" / "EuroSAT_RGB.zip"
LANDSCAPES = ROOT / "recipes" / "default.yaml"
DIGITS = ROOT / "recipes" / "tnet-digits.yaml"
PARTS = ("tiles", "landscapes", "whole", "paper", "sweep", "digits")
say = Console(stderr=True).print
# The whole-image model: the same network and warm-up, then end to end on one view of the scene.
WHOLE = """[{name: whole, levels: 1, steps: 350, batch_size: 40,
  optimizer: {rate: 0.001, weight_decay: 0.02}, loss: {sequence: 1.0}}]"""
AT_THE_END = "training.validate_every=10000"  # keep the model of the last step
# A block of small digits among clutter; unreadable when downsampled by 4.
IMAGES_OF_DIGITS = [
    "--kind", "digits", "--protocol", "site", "--images", "1000", "--size", "512",
    "--cells", "8,12", "--hidden-from", "4", "--split", "0.6,0.1,0.3", "--seed", "1",
    "--format", "png",
]  # fmt: skip
LEVEL_1 = """[{name: whole, levels: 1, steps: 150, optimizer: {rate: 0.003, weight_decay: 0.02},
  loss: {sequence: 1.0}}]"""


class Runs:
    """Runs each command once; keeps its output, time and memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def train(self, name: str, recipe: Path, seed: int, settings: Sequence[str]) -> Path:
        """Train once; return the run folder."""
        run = self.folder / name
        changes = [f"seed={seed}", *settings]
        arguments = [word for change in changes for word in ("--set", change)]
        self._once(name, ["train", str(recipe), "-o", str(run), "--overwrite", *arguments])
        return run

    def evaluate(self, name: str, model: Path, data: Path, *options: str) -> dict[str, Any]:
        """Evaluate once on held-out images."""
        arguments = ["evaluate", "--model", str(model), "--data", str(data), "--json", *options]
        found: dict[str, Any] = json.loads(self._once(f"{name}-test", arguments)["stdout"])
        return found

    def synth(self, name: str, arguments: Sequence[str]) -> Path:
        """Make images once; return their folder."""
        self._once(f"{name}-made", ["synth", str(self.folder / name), *arguments, "--overwrite"])
        return self.folder / name

    def cpu(self, name: str) -> float:
        """Return the CPU seconds of a training."""
        return float(json.loads((self.folder / f"{name}.json").read_text())["cpu_seconds"])

    def has(self, name: str) -> bool:
        """Return True if a command was run."""
        return (self.folder / f"{name}.json").exists()

    def _once(self, name: str, arguments: Sequence[str]) -> dict[str, Any]:
        kept = self.folder / f"{name}.json"
        if not kept.exists():
            say(f"{name}: tnet {' '.join(arguments)}")
            start = time.time()
            process = subprocess.Popen(
                [sys.executable, "-m", "tnetcli", *arguments],
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},  # seeds run side by side
            )
            assert process.stdout is not None
            output = process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
            if status:
                sys.exit(f"{name} failed: {status}")
            record = {
                "command": ["tnet", *arguments],
                "cpu_seconds": usage.ru_utime + usage.ru_stime,
                "seconds": time.time() - start,
                "peak_mb": usage.ru_maxrss / 1024,
                "stdout": output,
            }
            kept.write_text(json.dumps(record))
        found: dict[str, Any] = json.loads(kept.read_text())
        return found


def accuracy(found: dict[str, Any], windows: int, choice: str = "attention") -> float:
    """Return the accuracy in percent with at most `windows` regions."""
    rows = [row for row in found["rows"] if row["choice"] == choice and row["context"]]
    row = [row for row in rows if row["windows"] <= windows][-1]
    return 100 * float(row["scores"]["accuracy"]["value"])


def hit(found: dict[str, Any], level: int, choice: str = "attention") -> float:
    """Return the hit rate of a level in percent."""
    (rate,) = (
        rate for rate in found["hit_rates"] if rate["choice"] == choice and rate["level"] == level
    )
    return 100 * float(rate["value"])


def stages(*names: str) -> str:
    """Return the setting that keeps only these stages of the recipe."""
    chosen = [stage for stage in recipe_stages() if stage["name"] in names]
    return f"stages={json.dumps(chosen)}"


def recipe_stages() -> list[dict[str, Any]]:
    """Return the stages of the recipe."""
    found: list[dict[str, Any]] = yaml.safe_load(LANDSCAPES.read_text())["stages"]
    return found


def tiles(runs: Runs, seed: int) -> None:
    """Pre-train on tiles, once for all parts that start from it."""
    settings = [f"data.path={TILES}", stages("tiles"), "training.half=false"]
    runs.train(f"tiles-{seed}", LANDSCAPES, seed, settings)


def warmed_up(runs: Runs, seed: int) -> list[str]:
    """Return the settings that start from the pre-trained model; bit-equal to a single run."""
    return [f"data.path={TILES}", f"init={runs.folder / f'tiles-{seed}' / 'last.safetensors'}"]


def landscapes(runs: Runs, seed: int) -> None:
    """Train and evaluate the model."""
    settings = [*warmed_up(runs, seed), stages("look", "head")]
    run = runs.train(f"landscapes-{seed}", LANDSCAPES, seed, settings)
    runs.evaluate(
        f"landscapes-{seed}", run / "model.safetensors", run / "recipe.yaml",
        "--windows", "0,1,2,4,8",
    )  # fmt: skip


def whole(runs: Runs, seed: int) -> None:
    """Train and evaluate a whole-image model of the same view size, from the same warm-up."""
    settings = [*warmed_up(runs, seed), f"stages={WHOLE}", "traversal.levels=1", AT_THE_END]
    run = runs.train(f"whole-{seed}", LANDSCAPES, seed, settings)
    runs.evaluate(f"whole-{seed}", run / "model.safetensors", run / "recipe.yaml")


def paper(runs: Runs, seed: int) -> None:
    """Train and evaluate with the loss of the papers, everything else unchanged."""
    attention, head = (found for found in recipe_stages() if found["name"] != "tiles")
    chosen = [{**attention, "loss": {"rule": "paper"}}, head]
    settings = [*warmed_up(runs, seed), f"stages={json.dumps(chosen)}", AT_THE_END]
    run = runs.train(f"paper-{seed}", LANDSCAPES, seed, settings)
    runs.evaluate(
        f"paper-{seed}", run / "model.safetensors", run / "recipe.yaml", "--windows", "0,1,2,4,8"
    )


def sweep(runs: Runs, seed: int) -> None:
    """Classify all full-resolution windows of every scene with the same network."""
    from sweeping import sweep_scenes

    kept = runs.folder / f"sweep-{seed}.json"
    if not kept.exists():
        run = runs.folder / f"landscapes-{seed}"
        kept.write_text(json.dumps(sweep_scenes(run / "model.safetensors", run / "recipe.yaml")))


def digits(runs: Runs, seed: int) -> None:
    """Train and evaluate on digits that are readable at full resolution only; also level 1 alone.

    All seeds use the same images.
    """
    images = runs.synth("digits-images", IMAGES_OF_DIGITS) / "manifest.csv"
    run = runs.train(f"digits-{seed}", DIGITS, seed, [f"data.path={images}"])
    runs.evaluate(f"digits-{seed}", run / "model.safetensors", images)
    settings = [f"data.path={images}", f"stages={LEVEL_1}", "traversal.levels=1"]
    run = runs.train(f"digits-level-1-{seed}", DIGITS, seed, settings)
    runs.evaluate(f"digits-level-1-{seed}", run / "model.safetensors", images)


def spread(values: Sequence[float]) -> str:
    """Return the values of all seeds as text."""
    return ", ".join(f"{value:.1f}" for value in values)


def landscape_figures(runs: Runs, seeds: Sequence[int]) -> list[Figure]:
    """Return the results on EuroSAT landscapes with their targets."""

    def tests(name: str) -> list[dict[str, Any]]:
        return [
            json.loads(json.loads((runs.folder / f"{name}-{seed}-test.json").read_text())["stdout"])
            for seed in seeds
            if runs.has(f"{name}-{seed}-test")
        ]

    ours, one_view, by_paper = tests("landscapes"), tests("whole"), tests("paper")
    eight = [accuracy(each, 8) for each in ours]
    cpu = [
        (runs.cpu(f"tiles-{seed}") + runs.cpu(f"landscapes-{seed}")) / 60
        for seed in seeds
        if runs.has(f"landscapes-{seed}")
    ]
    by = "EuroSAT landscapes"
    figures = [
        Figure(by, "accuracy, 8 regions", statistics.mean(eight), 85, False, " %", spread(eight)),
        Figure(by, "spread of the seeds", max(eight) - min(eight), 5, True, " points", ""),
    ]
    for level in (2, 3):
        rates = [hit(each, level) for each in ours]
        target = 85 if level == 3 else None
        figures.append(
            Figure(by, f"hits, level {level}", statistics.mean(rates), target, False, " %",
                   spread(rates))
        )  # fmt: skip
    for windows in (0, 1, 2, 4):
        found = [accuracy(each, windows) for each in ours]
        figures.append(
            Figure(by, f"accuracy, {windows} regions", statistics.mean(found), None, False, " %",
                   spread(found))
        )  # fmt: skip
    for choice, target in (("random", None), ("oracle", 12)):
        found = [accuracy(each, 8, choice) for each in ours]
        name = f"accuracy, 8 {choice} regions"
        figures.append(Figure(by, name, statistics.mean(found), None, False, " %", spread(found)))
        if target:
            below = statistics.mean(found) - statistics.mean(eight)
            figures.append(
                Figure(by, f"points below {choice} regions", below, target, True, "", "")
            )
    if one_view:
        found = [accuracy(each, 0) for each in one_view]
        above = statistics.mean(eight) - statistics.mean(found)
        figures += [
            Figure(by, "accuracy, whole image", statistics.mean(found), None, False, " %",
                   spread(found)),
            Figure(by, "points above the whole image", above, 12, False, "", ""),
        ]  # fmt: skip
    if by_paper:
        found = [accuracy(each, 8) for each in by_paper]
        rates = [hit(each, 3) for each in by_paper]
        figures += [
            Figure(by, "accuracy, rule: paper", statistics.mean(found), None, False, " %",
                   spread(found)),
            Figure(by, "hits at level 3, rule: paper", statistics.mean(rates), None, False, " %",
                   spread(rates)),
        ]  # fmt: skip
    swept = [
        json.loads((runs.folder / f"sweep-{seed}.json").read_text())
        for seed in seeds
        if runs.has(f"sweep-{seed}")
    ]
    if swept:
        found = [100 * each["accuracy"] for each in swept]
        ratio = statistics.mean(each["windows"] for each in swept) / 9
        figures += [
            Figure(by, "accuracy, full sweep", statistics.mean(found), None, False, " %",
                   f"{spread(found)}; {swept[0]['scenes']} scenes"),
            Figure(by, "views of a full sweep / ours", ratio, None, False, "",
                   spread([each["cpu_seconds"] for each in swept]) + " CPU s"),
        ]  # fmt: skip
    figures.append(Figure(by, "training of a seed", max(cpu), 45, True, " CPU min", spread(cpu)))
    return figures


def digit_figures(runs: Runs, seeds: Sequence[int]) -> list[Figure]:
    """Return the results on generated digits, which have no targets."""

    def tests(name: str) -> list[dict[str, Any]]:
        return [
            json.loads(json.loads((runs.folder / f"{name}-{seed}-test.json").read_text())["stdout"])
            for seed in seeds
            if runs.has(f"{name}-{seed}-test")
        ]

    ours, one_view = tests("digits"), tests("digits-level-1")
    if not ours:
        return []
    keep = ours[0]["traversal"]["keep"]
    level_2, all_regions = keep[0], keep[0] + keep[0] * keep[-1]
    found = {
        "accuracy, level 1": [accuracy(each, 0) for each in ours],
        f"accuracy, {level_2} regions of level 2": [accuracy(each, level_2) for each in ours],
        f"accuracy, {all_regions} regions": [accuracy(each, all_regions) for each in ours],
        f"accuracy, {all_regions} random regions": [
            accuracy(each, all_regions, "random") for each in ours
        ],
        f"accuracy, {all_regions} oracle regions": [
            accuracy(each, all_regions, "oracle") for each in ours
        ],
        "accuracy, trained on level 1 only": [accuracy(each, 0) for each in one_view],
    }
    for level in (2, 3):
        for choice in ("attention", "random"):
            by = "" if choice == "attention" else ", random regions"
            found[f"hits, level {level}{by}"] = [hit(each, level, choice) for each in ours]
    cpu = [runs.cpu(f"digits-{seed}") / 60 for seed in seeds if runs.has(f"digits-{seed}")]
    figures = [
        Figure("digits", what, statistics.mean(values), None, False, " %", spread(values))
        for what, values in found.items()
        if values
    ]
    training = Figure(
        "digits", "training of a seed", max(cpu), None, False, " CPU min", spread(cpu)
    )
    return [*figures, training]


def section(figures: Sequence[Figure], seeds: Sequence[int]) -> list[str]:
    """Return the lines of RESULTS.md."""
    libraries = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy"))
    return [
        "## Learning",
        "",
        f"`python benchmarks/learning.py --write`, seeds {', '.join(map(str, seeds))}. "
        f"{datetime.date.today()}; {os.cpu_count()} cores; Python {platform.python_version()}; "
        f"{libraries}.",
        "",
        *markdown(figures),
        "",
    ]


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path(gettempdir()) / "tnet-learning")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", choices=PARTS, help="run one part, without a table")
    parser.add_argument("--write", action="store_true", help="update RESULTS.md")
    arguments = parser.parse_args()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    runs = Runs(arguments.folder)
    for name in [arguments.only] if arguments.only else PARTS:
        for seed in seeds:
            globals()[name](runs, seed)
    if arguments.only:
        return
    figures = [*landscape_figures(runs, seeds), *digit_figures(runs, seeds)]
    show(figures)
    if arguments.write:
        write("learning", section(figures, seeds))


if __name__ == "__main__":
    main()
