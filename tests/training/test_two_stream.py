"""The two-stream family through the training loop: its recipes, ablations and fixed regions."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image

from tests.commands import ROOT
from tests.images import noise
from tests.runs import Ears
from tnetcli.data.images import Image as Named
from tnetcli.errors import ImageError, ManifestError, RecipeError
from tnetcli.evaluation.evaluate import evaluate
from tnetcli.models.checkpoint import load_checkpoint
from tnetcli.models.registry import build_model
from tnetcli.prediction.batch import predict_images
from tnetcli.prediction.predictor import PredictConfig
from tnetcli.readers.base import ReadOptions
from tnetcli.training import stages
from tnetcli.training.optim import build_optimizer
from tnetcli.training.recipe import check_recipe, read_recipe
from tnetcli.training.run import run_recipe

LABELS = ("dark", "light")
MODEL = {
    "family": "two_stream",
    "backbone": "compact",
    "view_size": 16,
    "classes": 2,
    "bands": 1,
    "state_size": 8,
    "step_count": 3,
}
MODEL_ARGUMENTS = {
    key: value for key, value in MODEL.items() if key not in ("family", "classes", "bands")
}
ABLATIONS = {
    "attention": {},
    "cnn only": {"steps": "none"},
    "lstm without attention": {"steps": "last"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four images to train on, two to validate and two to test with, and a list of them."""
    path = tmp_path_factory.mktemp("images")
    rows = [("path", "label", "split")]
    for number in range(8):
        split = ("train", "train", "validation", "test")[number // 2]
        Image.fromarray(noise((64, 64), 1, seed=number)[0]).save(path / f"{number}.png")
        rows.append((f"{number}.png", LABELS[number % 2], split))
    with (path / "images.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return path


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    for name in ("draw_curves", "draw_samples"):
        monkeypatch.setattr(f"tnetcli.training.run_dir.{name}", lambda *_: None)


def recipe_of(folder, data=None, augmentation=None, **model):
    return check_recipe(
        {
            "model": MODEL | model,
            "traversal": {"levels": 2, "keep": [1]},
            "data": {"path": folder / "images.csv", "statistics": "unit", **(data or {})},
            "augmentation": augmentation or {},
            "stages": [{"name": "train", "steps": 2}],
            "training": {"batch_size": 4, "threads": 1, "device": "cpu", "validate_every": 2},
        }
    )


def write_table(path, boxes):
    lines = ["path,left,top,right,bottom"]
    lines += [f"{number}.png,{box}" for number, found in boxes.items() for box in found]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("arguments", ABLATIONS.values(), ids=ABLATIONS)
def test_every_switch_can_be_trained(arguments, folder, tmp_path):
    heard = Ears()
    files = run_recipe(recipe_of(folder, **arguments), tmp_path / "run", heard)
    (row,) = heard.rows
    assert np.isfinite(row["loss"])
    assert {"ce_global", "ce_local", "ranking"} <= row.keys()
    loaded = load_checkpoint(files.model).model
    assert loaded.local_stream.steps == {"none": 0}.get(arguments.get("steps"), 3)


class TestFixedRegions:
    def test_training_reads_them_and_moves_them_with_the_image(self, folder, tmp_path, monkeypatch):
        nodes, usual = [], stages.rollout

        def rollout(*given, **options):
            found = usual(*given, **options)
            nodes.extend(found.nodes)
            return found

        monkeypatch.setattr(stages, "rollout", rollout)
        boxes = {number: ["0,0,20,64"] for number in range(8)}
        table = write_table(folder / "left.csv", boxes)
        flipped = {"flip": "horizontal"}
        recipe = recipe_of(folder, {"regions": table}, augmentation=flipped)
        run_recipe(recipe, tmp_path / "run", Ears())
        near = [node.region for node in nodes if node.region.level == 2]
        assert len(near) == 8  # 2 steps of 4 images
        assert {region.path for region in near} == {"root/w1"}
        # As it was, or in a mirror: never another place.
        assert {region.window.box for region in near} == {
            (0, 0, 20, 64),
            (44, 0, 64, 64),
        }

    def test_an_evaluation_reads_those_of_the_recipe(self, folder, tmp_path):
        boxes = {number: ["3,4,35,36", "0,0,9,9"] for number in range(8)}
        table = write_table(folder / "two.csv", boxes)
        recipe = recipe_of(folder, {"regions": table})
        files = run_recipe(recipe, tmp_path / "run", Ears())
        found = evaluate(files.model, recipe.data, oracle=False)
        assert found.images == 2
        assert found.failures == ()
        # Without test images in it, the file fails them; with none left that is an error.
        write_table(folder / "two.csv", {number: boxes[number] for number in range(6)})
        with pytest.raises(ImageError, match="has no regions of"):
            evaluate(files.model, recipe.data)

    def test_a_file_that_leaves_images_out_is_refused_before_the_first_step(self, folder, tmp_path):
        table = write_table(folder / "few.csv", {0: ["0,0,9,9"]})
        with pytest.raises(ManifestError, match="has no regions of 5 of 6 images"):
            run_recipe(recipe_of(folder, {"regions": table}), tmp_path / "run", Ears())

    @pytest.mark.parametrize(
        "data",
        [
            {"crop": "box"},
            {"kind": "mosaic", "landscape": {"sites": ["a"], "background": ["b", "c"]}},
        ],
    )
    def test_windows_are_of_whole_images(self, data, folder):
        with pytest.raises(RecipeError, match="`regions` apply to whole images"):
            recipe_of(folder, {"regions": folder / "w.csv", **data})

    def test_records_of_one_model_are_regions_for_another(self, folder, tmp_path):
        files = run_recipe(recipe_of(folder), tmp_path / "run", Ears())
        images = [
            Named(str(folder / f"{n}.png"), f"{n}.png", f"{n}.png", ReadOptions()) for n in range(3)
        ]
        first = list(predict_images(images, files.model, PredictConfig(keep=(2,))))
        table = tmp_path / "first.jsonl"
        table.write_text("".join(f"{each.model_dump_json()}\n" for each in first[:2]))
        again = list(predict_images(images, files.model, PredictConfig(keep=(2,), regions=table)))
        for one, other in zip(first[:2], again[:2], strict=True):
            assert other.status == "ok"
            boxes = {window.box for window in one.windows}
            assert {window.box for window in other.windows} == boxes
            assert [window.path for window in other.windows] == ["root", "root/w1", "root/w2"]
            assert other.probability == pytest.approx(one.probability, abs=1e-5)
            assert len(other.provenance.config["regions"]) == 64
            assert "regions" not in one.provenance.config
        assert again[2].status == "failed"
        assert again[2].error.message == f"`{table}` has no regions of `2.png`"
        steps = json.loads(again[0].model_dump_json())["windows"][1]["steps"]
        assert sum(steps) == pytest.approx(1, abs=1e-4)


class TestPublishedRecipe:
    recipe = read_recipe(ROOT / "recipes" / "two-stream-cub.yaml")

    def test_the_model_has_the_size_of_its_published_parts(self):
        with torch.device("meta"):
            built = build_model("two_stream", self.recipe.model.arguments, classes=200)
        # Two VGG19, two layers of LSTM, ten vectors, two heads.
        assert sum(p.numel() for p in built.parameters()) == (
            2 * 20_024_384 + 4_202_496 + 512 * 10 + 2 * (512 * 200 + 200)
        )

    def test_it_trains_as_published(self):
        (stage,) = self.recipe.stages
        streams, optimizer = stage.objective, stage.optimizer
        assert (streams.local, streams.ranking, streams.margin) == (1.0, 0.5, 0.5)
        assert (optimizer.lr, optimizer.lrs) == (0.01, {"global_stream": 0.001})
        schedule = stage.schedule
        assert [round(drop * stage.epochs) for drop in schedule.drops] == [40, 80]
        assert (schedule.kind, schedule.factor, schedule.warmup) == ("step", 0.1, 0)
        assert self.recipe.traversal.keep == (1,)
        assert stage.loss.selection == "sample"

    def test_the_streams_have_rates_of_their_own(self):
        small = build_model("two_stream", MODEL_ARGUMENTS, classes=2, bands=1)
        optimizer = build_optimizer([small], self.recipe.stages[0].optimizer)
        names = {id(weight): name for name, weight in small.named_parameters()}
        for group in optimizer.param_groups:
            for weight in group["params"]:
                is_global = names[id(weight)].startswith("global_stream.")
                assert group["lr_scale"] == pytest.approx(0.1 if is_global else 1.0)
