"""Run today's package; the only golden module that knows its Python API, keys and options.

Results are told in the words of the JSON files. When a name of the package changes, translate it
here and leave the JSON files alone.
"""

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import UUID

import numpy as np
import torch
import yaml

from tests.golden.scenes import CLASSES, TILE_CLASSES
from tnetcli.cli.app import app
from tnetcli.data.normalize import Normalisation
from tnetcli.errors import TnetError
from tnetcli.models.base import Model
from tnetcli.models.checkpoint import Description, save_checkpoint
from tnetcli.models.registry import build_model
from tnetcli.prediction.inference import ImageResult, Inference
from tnetcli.prediction.predictor import RegionFile
from tnetcli.readers.detect import open_image
from tnetcli.training.data import derive
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import Fixed, build_policy

NORMALISATION = {"dtype": "uint8", "mean": [120.0, 130.0, 110.0], "std": [60.0, 50.0, 70.0]}
GRID = {"rows": 3, "columns": 3, "cell_fraction": 0.5}
MODELS: dict[str, dict[str, Any]] = {
    "tnet": {
        "backbone": "compact", "view_size": 32, "grid": GRID, "location_size": 8,
        "aggregator": "gated", "temperature": 0.2, "centered": True,
    },
    "anchornet": {"backbone": "compact", "view_size": 120},
    "two_stream": {
        "backbone": "compact", "view_size": 32, "grid": GRID, "state_size": 8, "step_count": 3,
    },
    "saccader": {"backbone": "bagnet77", "view_size": 85, "width": 0.0625, "glimpses": 2},
    "dram": {
        "backbone": "compact", "view_size": 48, "glimpse_size": 16, "glimpses": 3, "state_size": 12,
    },
    "whole": {"backbone": "compact", "view_size": 32},
}  # fmt: skip
# Three levels of tiny images, whatever the view size.
WALK = {"levels": 3, "keep": [2, 1], "min_size": 8}
POLICIES: dict[str, dict[str, Any]] = {
    "topk": {},
    "sample": {"policy": "sample"},
    "best_first": {"policy": "best_first", "budget": 6},
    "told": {"keep": [3, 1]},  # regions of regions.csv
}
# TNet with one more option each: the image, changes of the model, changes of the walk.
OPTIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "max_overlap": ("square", {}, {"max_overlap": 0.3, "keep": [3, 2]}),
    "min_valid": ("half", {}, {"min_valid": 0.5, "keep": [9, 1]}),
    "min_valid_empty": ("speck", {}, {"min_valid": 0.5}),
    "confidence": ("square", {}, {"confidence": 0.4}),
    "confidence_later": ("half", {}, {"confidence": 0.89}),
    "confidence_unmet": ("wide", {}, {"confidence": 0.999}),
    "budget": ("square", {}, {"budget": 6, "keep": [4, 3]}),
    "duplicates_once": ("square", {}, {"keep": [9, 3]}),
    "duplicates": ("square", {}, {"keep": [9, 3], "deduplicate": False}),
    "pad": ("wide", {}, {"fit": "pad"}),
    "native_resolution": ("square", {}, {"levels": 6, "min_size": None}),
    "repeats": ("square", {"grid": {"rows": 1, "columns": 1, "cell_fraction": 1.0}}, {}),
    "background": ("wide", {}, {"background": [20, 150], "min_valid": 0.8, "keep": [9, 1]}),
    "cool_sample": ("square", {}, {"policy": "sample", "temperature": 0.2, "budget": 5}),
    "best_first_apart": (
        "half", {}, {"policy": "best_first", "budget": 9, "max_overlap": 0.3, "levels": 4},
    ),
}  # fmt: skip
SEED = 7
# Parts of models: today's names as patterns, and those when results were frozen.
FROZEN_NAMES = {
    r"(^|_stream\.|branches\.\d\.)head\.": r"\1classifier.",
    r"^anchor\.trunk\.": "anchor.head.",
    r"^aggregator\.": "weighting.",
}
GAINS = {"saccader": 0.5}  # of the weights' variance: logits are to be near 1

# Recipes. Everything starts from the weights of `build`, except `from_seed`.
LANDSCAPE = {
    "size": 128, "background": list(TILE_CLASSES[:3]), "sites": list(TILE_CLASSES[3:]),
    "neighbours": 5, "site_tiles": [3, 6], "validation": 4, "gain": 0.2,
}  # fmt: skip
SCENE_CLASSES = ("none", *TILE_CLASSES[3:])
RUN = {"batch_size": 4, "threads": 1, "log_every": 1, "validate_every": 3, "device": "cpu"}
RECIPES: dict[str, dict[str, Any]] = {
    "landscape": {
        "model": {"family": "tnet", **MODELS["tnet"], "classes": list(SCENE_CLASSES)},
        "traversal": {"levels": 3, "keep": [2, 1], "min_size": 8},
        "data": {"kind": "mosaic", "path": "tiles", "landscape": LANDSCAPE},
        "optimizer": {"lr": 0.003, "weight_decay": 0.02, "clip": 5.0},
        "stages": [
            {
                "name": "tiles", "learn": "tiles", "steps": 3,
                "tiles": {"views": [6, 3, 2], "crowded": 0.6, "doubt": 0.4, "near": 0.6},
            },
            {
                "name": "look", "steps": 3, "freeze": ["backbone"], "replay": 2, "dropout": 0.2,
                "loss": {
                    "selection": "sample", "baseline": "per_class", "reward": "probability",
                    "reinforce": 1.0, "reinforce_sequence": 0.0, "sequence": 0.7,
                    "per_feature": "mixture",
                },
            },
            {
                "name": "conclude", "steps": 2, "freeze": ["backbone", "location"], "replay": 2,
                "replay_size": 8,
                "loss": {"selection": "top_k", "reinforce": 0.0, "sequence": 0.75},
            },
        ],
        "training": {**RUN, "average": 0.9},
    },
    "manifest": {
        "model": {"family": "tnet", **MODELS["tnet"], "classes": list(CLASSES)},
        "traversal": {"levels": 2, "keep": [2]},
        "data": {"path": "images.csv", "class_weights": "balanced"},
        "augmentation": {
            "flip": "both", "turns": True, "crop": [0.6, 1.0], "shift": 0.1, "rotate": 10,
            "colour": True, "blur": 0.5,
        },
        "loss": {
            "samples": 2, "baseline": "leave_one_out", "label_smoothing": 0.1, "l2": 1e-4,
            "entropy": 0.1, "contrastive": 0.1, "level_weights": [0.5, 1.0],
        },
        "optimizer": {"kind": "sgd", "lr": 0.01, "accumulate": 2, "clip": 1.0},
        "schedule": {"kind": "step", "drops": [0.5], "warmup": 0.2},
        "stages": [{"steps": 5}],
        "training": {**RUN, "best_by": "loss"},
    },
    "from_seed": {
        "seed": 3,
        "model": {"family": "tnet", **MODELS["tnet"], "classes": list(CLASSES), "dropout": 0.2},
        "traversal": {"levels": 2, "keep": [2], "min_size": 8},
        "data": {"path": "images.csv"},
        "loss": {"rule": "paper"},
        "optimizer": {"lr": 0.003},
        "stages": [{"steps": 3}],
        "training": RUN,
    },
    "saccader": {
        "model": {"family": "saccader", **MODELS["saccader"], "classes": list(CLASSES)},
        "traversal": {"levels": 1},
        "data": {"path": "images.csv"},
        "loss": {"sequence": 1, "reward": "correct", "baseline": "ema"},
        "stages": [
            {"name": "read", "steps": 2, "freeze": ["location"], "optimizer": {"lr": 0.01}},
            {
                "name": "imitate", "steps": 2, "freeze": ["backbone", "head"],
                "objective": {"imitation": 1, "glimpses": 0},
            },
            {"name": "look", "steps": 2, "objective": {"glimpses": 1}},
        ],
        "training": RUN,
    },
    **{
        f"family/{family}": {
            "model": {"family": family, **arguments, "classes": list(CLASSES)},
            "traversal": {
                "levels": {"tnet": 3, "anchornet": 2, "two_stream": 2}.get(family, 1),
                "keep": [2, 1], "min_size": 8,
            },
            "data": {"path": "images.csv"},
            "optimizer": {"lr": 0.003},
            "stages": [{"steps": 5}],
            "training": {**RUN, "validate_every": 5},
        }
        for family, arguments in MODELS.items()
    },
}  # fmt: skip
TIMES = ("seconds", "windows_per_second", "waiting")
# Metrics, and names that seeds are derived from, as they were when results were frozen.
METRICS = {"lr": "rate", "random_accuracy": "by_chance", "gain_over_random": "gain_over_chance"}
SEEDS = {"replay": "rehearse", "tile head": "lessons"}
# What differs between machines, versions and runs.
UNSTABLE = ("tnet", "model_sha256", "fingerprint", "schema", "version")
UNSTABLE_COSTS = ("bytes_read", "file_bytes", "read_seconds", "model_seconds", "seconds")


def build(
    family: str, changes: Mapping[str, Any] | None = None, classes: int = 3, bands: int = 3
) -> Model:
    """Build a model with weights that depend on their names alone, not on the order of drawing."""
    model = build_model(family, {**MODELS[family], **(changes or {})}, classes=classes, bands=bands)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            part = name.rpartition(".")[2]
            if part not in ("num_batches_tracked", "baseline"):
                values = _weights(name, tuple(tensor.shape), GAINS.get(family, 1.0))
                tensor.copy_(torch.from_numpy(values))
    return model.eval()


def _weights(name: str, shape: tuple[int, ...], gain: float) -> Any:
    """Return the values of one tensor, known by the name that it had when results were frozen."""
    for now, frozen in FROZEN_NAMES.items():
        name = re.sub(now, frozen, name)
    noise = np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape)
    part = name.rpartition(".")[2]
    if part == "running_var":
        return (1 + 0.2 * np.abs(noise)).astype(np.float32)
    if len(shape) > 1:
        return (noise * (2 * gain / np.prod(shape[1:])) ** 0.5).astype(np.float32)
    scale = 0.0 if "bias" in part or part == "running_mean" else 1.0
    return (scale + 0.1 * noise).astype(np.float32)


def save(path: Path, family: str, classes: Sequence[str], **traversal: Any) -> Path:
    """Save a model of `build` as a file that the commands take."""
    description = Description(
        family=family,
        config=MODELS[family],
        classes=tuple(classes),
        bands=("1", "2", "3"),
        normalisation=Normalisation(**NORMALISATION),
        traversal=TraversalConfig(**traversal),
    )
    save_checkpoint(path, build(family, classes=len(classes)), description, overwrite=True)
    return path


def rollout(
    model: Model, folder: Path, images: Sequence[str], walk: Mapping[str, Any], *, told: bool
) -> list[dict[str, Any]]:
    """Traverse images together and return what is frozen of each."""
    config = TraversalConfig(**{**WALK, **walk})
    readers = [open_image(str(folder / f"{name}.tif")) for name in images]
    policies = [build_policy(config, SEED) for _ in readers]
    if told:
        file = RegionFile(folder / "regions.csv")
        windows = [file.of(reader.path, reader.path, reader.size) for reader in readers]
        policies = [Fixed(*each) for each in zip(policies, windows, strict=True)]
    try:
        with Inference(
            model, Normalisation(**NORMALISATION), background=config.background, device="cpu"
        ) as inference:
            found = inference.run(readers, config, policies)
    finally:
        for reader in readers:
            reader.close()
    return [_told(each, folder) for each in found]


def _told(sight: ImageResult | TnetError, folder: Path) -> dict[str, Any]:
    if isinstance(sight, TnetError):
        return {
            "error": type(sight).__name__,
            "message": _frozen_message(str(sight)).replace(f"{folder}/", ""),
        }
    regions = []
    for number, visit in enumerate(sight.nodes):
        region = visit.region
        regions.append(
            {
                "path": region.path,
                "level": region.level,
                "box": list(region.window.box),
                "attention": float(visit.attention),
                "joint": float(visit.joint),
                "rank": visit.rank,
                "logits": sight.region_logits[number].tolist(),
                "weight": float(sight.weights[number]),
                "valid": float(sight.valid[number]),
                "steps": sight.steps[number].tolist(),
                "glimpses": sight.glimpses[number].tolist(),
                "glimpse_logits": sight.glimpse_logits[number].tolist(),
            }
        )
    return {
        "stop": STOPS.get(sight.stop, sight.stop),
        "logits": sight.logits.tolist(),
        "level_logits": sight.level_logits.tolist(),
        "regions": [{key: each for key, each in one.items() if each != []} for one in regions],
    }


def train(folder: Path, run: Path, name: str) -> list[dict[str, Any]]:
    """Train a recipe by `tnet train`, and return the rows of its metrics without times."""
    recipe = {**RECIPES[name]}
    data = recipe["data"]
    recipe["data"] = {**data, "path": str(folder / data["path"])}
    run.mkdir()
    if name != "from_seed":
        start = run / "start.safetensors"
        model = recipe["model"]
        levels = recipe["traversal"]["levels"]
        save(start, model["family"], model["classes"], levels=levels, keep=[2, 1])
        recipe["init"] = str(start)
    path = run / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    with (
        patch("tnetcli.training.replay.derive", _frozen_seed),
        patch("tnetcli.training.stages.derive", _frozen_seed),
    ):
        assert tnet("train", path, "-o", run / "run", "-q") == 0
    rows = map(json.loads, (run / "run" / "metrics.jsonl").read_text().splitlines())
    return [_frozen_metrics(row) for row in rows]


def _frozen_seed(seed: int, *names: object) -> int:
    return derive(seed, *(SEEDS.get(str(name), name) for name in names))


def _frozen_metrics(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        METRICS.get(key, key): _frozen_metrics(each) if isinstance(each, dict) else each
        for key, each in row.items()
        if key not in TIMES
    }


def tnet(*arguments: object) -> int:
    """Run `tnet` in this process and return its exit code."""
    try:
        code = app([str(each) for each in arguments], standalone_mode=False)
    except TnetError as error:
        return error.exit_code
    return int(code or 0)


def predict(model: Path, images: Sequence[str], output: Path) -> int:
    """Predict images of the current folder into a JSONL file, and return the exit code."""
    return tnet("predict", *images, "--model", model, "-o", output, "--device", "cpu", "-q")


STOPS = {
    "max_level": "levels", "native_resolution": "pixels", "exhausted": "repeats",
    "no_data": "empty",
}  # fmt: skip
ONLY_IF_KNOWN = ("reason", "outcome", "reading", "attention_check")


MESSAGES = {
    "has no valid pixels": "holds no valid pixel",
    "check its nodata value and mask with `tnet info`": (
        "is its nodata value or its mask right? see `tnet info`"
    ),
}
SETTINGS = {
    "min_valid": "least_valid", "min_size": "least_side", "max_overlap": "most_shared",
    "deduplicate": "once",
}  # fmt: skip


def _frozen_message(text: str) -> str:
    for now, before in MESSAGES.items():
        text = text.replace(now, before)
    return text


def _settings(config: dict[str, Any]) -> dict[str, Any]:
    config = {SETTINGS.get(key, key): each for key, each in config.items()}
    policy = {"top_k": "topk"}.get(config["policy"], config["policy"])
    return {**config, "policy": policy, "rescale": None, "check_attention": None}


def _in_frozen_words(data: dict[str, Any]) -> dict[str, Any]:
    """Return a record with the keys that it had when results were frozen."""
    made, place = data.pop("provenance"), data.pop("georeference")
    data |= {"model": made["model"], "model_sha256": made["sha256"], "tnet": made["version"]}
    data |= {"settings": _settings(made["config"]), "microns_per_pixel": data.pop("mpp")}
    stop = data.pop("stop_reason")
    data["stopped"] = STOPS.get(stop, stop)
    data["reader"] = {"image": "photo"}.get(data["reader"], data["reader"])
    for window in data["windows"]:
        window["weight"] = window.pop("share")
    assert data.pop("task") == "classification"
    data = {key: each for key, each in data.items() if each or key not in ONLY_IF_KNOWN}
    if data["status"] == "failed":  # only what is known
        return {key: each for key, each in data.items() if each and each != [0, 0]}
    del data["error"]
    return data | {
        "crs": place and place["crs"],
        "transform": place and place["transform"],
        "georeference": place and place["source"],
    }


def record(line: str) -> dict[str, Any]:
    """Return what is frozen of a record."""
    data = _in_frozen_words(json.loads(_frozen_message(line)))
    kept = {key: each for key, each in data.items() if key not in UNSTABLE}
    if kept.get("cost"):
        costs = kept["cost"].items()
        kept["cost"] = {key: each for key, each in costs if key not in UNSTABLE_COSTS}
    return kept


def geojson(records: Path, output: Path) -> dict[str, Any]:
    """Export records as GeoJSON by `tnet export`, and return what is frozen of it."""
    assert tnet("export", records, "-f", "geojson", "-o", output, "-q") == 0
    data: dict[str, Any] = json.loads(output.read_text())
    data["tnet"] = {key: each for key, each in data["tnet"].items() if key not in UNSTABLE}
    if "mpp" in data["tnet"]:
        data["tnet"]["microns_per_pixel"] = data["tnet"].pop("mpp")
    for feature in data["features"]:
        numbers = feature["properties"].get("measurements", feature["properties"])
        if "share" in numbers:
            numbers["weight"] = numbers.pop("share")
        with suppress(ValueError):  # QuPath's ids are hashes of the model file
            feature["id"] = f"a UUID, version {UUID(feature['id']).version}"
    return data
