import json
import logging

import numpy as np
import pytest
import torch
from PIL import Image

from tests.images import noise, write_geotiff
from tests.runs import (
    CLASSES,
    MODEL,
    Ears,
    changed,
    copied,
    recipe_of,
    without_times,
    write_images,
)
from tests.synth.test_landscape import BACKGROUND, RULES, SITES, tile_files
from tests.synth.test_tiles import write_zip
from tnetcli.errors import ImageError, ManifestError, ModelError, OutputError, RecipeError
from tnetcli.models.checkpoint import (
    Description,
    load_checkpoint,
    read_description,
    save_checkpoint,
)
from tnetcli.models.registry import build_model
from tnetcli.training.recipe import read_recipe
from tnetcli.training.run import run_recipe
from tnetcli.training.run_dir import StoppedError

FILES = {
    "model.safetensors",
    "last.safetensors",
    "stage-train.safetensors",
    "state.safetensors",
    "recipe.yaml",
    "metrics.jsonl",
    "curves.png",
    "samples.png",
    ".training",
}
BANDS = ["B02", "B03", "B04", "B08"]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("images"))


def small(images, **sections):
    """Return a recipe of three steps, with all that is left to chance."""
    sections = {
        "stages": [{"steps": 3, "dropout": 0.3}],
        "training": {"batch_size": 4, "validate_every": 3, "average": 0.9, "log_every": 1},
        "augmentation": {"flip": "both"},
        "data": {"path": str(images), "licence": "CC0", "pixel_size": 10, "statistics": "estimate"},
        "name": "colours",
        **sections,
    }
    return recipe_of(images, **sections)


@pytest.fixture(scope="module")
def done(images, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "deep" / "one"
    return run_recipe(small(images), folder, Ears())


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch):
    """Draw figures only for the shared run: they take longer than the training."""
    for name in ("draw_curves", "draw_samples"):
        monkeypatch.setattr(f"tnetcli.training.run_dir.{name}", lambda *_: None)


def test_a_run_leaves_all_its_files(done):
    assert {path.name for path in done.path.iterdir()} == FILES
    for path in (done.curves, done.samples):
        with Image.open(path) as picture:
            assert picture.format == "PNG"
            assert picture.width > 200


def test_the_recipe_is_there_as_run(done, images):
    assert read_recipe(done.recipe) == small(images)


def test_the_model_tells_what_it_was_trained_on(done, images):
    reported = read_description(done.model)
    assert reported.classes == CLASSES
    assert reported.bands == ("red", "green", "blue")
    assert (reported.name, reported.data_licence, reported.pixel_size) == ("colours", "CC0", 10)
    assert reported.recipe["data"]["path"] == "images.csv"
    assert reported.recipe["stages"][0]["steps"] == 3
    assert reported.traversal == small(images).traversal
    row = json.loads(done.metrics.read_text().splitlines()[-1])["validation"]
    assert reported.metrics["validation_accuracy"] == row["accuracy"][-1]
    assert reported.metrics["validation_loss"] == row["loss"]
    assert reported.metrics["validation_images"] == 4


def test_the_models_can_be_loaded(done):
    best, last = load_checkpoint(done.model), load_checkpoint(done.last)
    assert not changed(copied(best.model), copied(last.model))  # one validation, at the end
    assert last.description.metrics == {}
    assert best.model.baseline.item() != 0.5


def test_statistics_are_those_of_the_training_images(done, images):
    pixels = [
        np.array(Image.open(images.parent / f"{number}.png")).reshape(-1, 3) for number in range(8)
    ]
    together = np.concatenate(pixels).astype(np.float64)
    reported = read_description(done.model).normalisation
    assert reported.dtype == "uint8"
    assert reported.mean == pytest.approx(together.mean(0))
    assert reported.std == pytest.approx(together.std(0))


def test_a_run_that_is_stopped_and_resumed_gives_the_same_files(done, images, tmp_path):
    with pytest.raises(StoppedError):
        run_recipe(small(images), tmp_path / "run", Ears(1))
    assert not (tmp_path / "run" / "last.safetensors").exists()
    again = run_recipe(small(images), tmp_path / "run", Ears(), resume=True)
    for name in ("model.safetensors", "last.safetensors", "state.safetensors"):
        assert (again.path / name).read_bytes() == (done.path / name).read_bytes(), name
    assert without_times(again.rows()) == without_times(done.rows())


def test_a_folder_that_is_taken_is_refused_before_anything_is_read(done, tmp_path):
    lost = small(tmp_path / "none.csv")
    for options in ({}, {"resume": True}):  # it holds another recipe's run
        with pytest.raises(OutputError) as caught:
            run_recipe(lost, done.path, Ears(), **options)
        assert caught.value.exit_code == 7
    with pytest.raises(ManifestError):
        run_recipe(lost, done.path, Ears(), overwrite=True)
    assert done.model.exists()  # nothing is removed for a run that cannot begin


class BegunError(Exception):
    """Holds a run that was about to begin."""


@pytest.fixture
def begin(monkeypatch, tmp_path):
    """Return a function that prepares a run, and gives it back instead of training."""

    def give_back(run, *, resume):
        raise BegunError(run)

    def prepare(recipe):
        monkeypatch.setattr("tnetcli.training.trainer.train", give_back)
        with pytest.raises(BegunError) as caught:
            run_recipe(recipe, tmp_path / "begun", Ears(), overwrite=True)
        return caught.value.args[0]

    return prepare


@pytest.fixture(scope="module")
def cogs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cogs")
    lines = ["path,label,split"]
    for number in range(4):
        image = noise((128, 96), 4, "uint16", seed=number)
        write_geotiff(folder / f"{number}.tif", image, overviews=(2,), descriptions=BANDS)
        split = "train" if number < 2 else "validation"
        lines.append(f"{number}.tif,{CLASSES[number % 2]},{split}")
    (folder / "images.csv").write_text("\n".join(lines) + "\n")
    return folder / "images.csv"


def of_cogs(cogs, bands=4, **sections):
    return recipe_of(
        None,
        model={"bands": bands},
        data={"path": str(cogs)},
        stages=[{"steps": 1}],
        **sections,
    )


def test_a_model_of_16_bits_and_4_bands_knows_their_names_and_statistics(cogs, tmp_path):
    files = run_recipe(of_cogs(cogs), tmp_path / "run", Ears())
    reported = load_checkpoint(files.model).description
    assert reported.bands == tuple(BANDS)
    pixels = np.concatenate(
        [noise((128, 96), 4, "uint16", seed=number).reshape(4, -1) for number in (0, 1)], axis=1
    ).astype(np.float64)
    assert reported.normalisation.dtype == "uint16"
    assert reported.normalisation.mean == pytest.approx(pixels.mean(1), rel=1e-6)
    assert reported.normalisation.std == pytest.approx(pixels.std(1), rel=1e-6)


@pytest.mark.parametrize("bands", [3, ["red", "green", "blue"]])
def test_images_with_other_bands_than_the_model_are_a_recipe_error(cogs, tmp_path, bands):
    with pytest.raises(RecipeError, match="3 bands") as caught:
        run_recipe(of_cogs(cogs, bands=bands), tmp_path / "run", Ears())
    assert "model.bands: 4" in caught.value.hint


def test_a_recipe_chooses_among_bands(cogs, begin):
    recipe = of_cogs(cogs, bands=2)
    data = recipe.data.model_copy(update={"bands": ("B08", "B03")})
    run = begin(recipe.model_copy(update={"data": data}))
    assert run.checkpointer._description.bands == ("B08", "B03")
    assert len(run.normalisation.mean) == 2


def test_floats_have_no_range_to_be_scaled_from(tmp_path):
    lines = ["path,label,split"]
    for number in range(4):
        write_geotiff(tmp_path / f"{number}.tif", noise((96, 96), 3, "float32", seed=number))
        split = "train" if number < 2 else "validation"
        lines.append(f"{number}.tif,{CLASSES[number % 2]},{split}")
    (tmp_path / "images.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(RecipeError, match="unit"):
        run_recipe(recipe_of(tmp_path / "images.csv"), tmp_path / "run", Ears())


def test_a_recipe_without_images_cannot_be_trained(tmp_path):
    with pytest.raises(RecipeError, match="no section `data`") as caught:
        run_recipe(recipe_of(None), tmp_path / "run", Ears())
    assert caught.value.hint
    assert not (tmp_path / "run").exists()


def trained(path, classes=CLASSES, dtype="uint8", **arguments):
    """Write a model whose weights, statistics and baseline are like no others."""
    own = {key: value for key, value in MODEL.items() if key != "classes"}
    torch.manual_seed(99)
    model = build_model("tnet", {**own, **arguments}, classes=len(classes))
    model.train().backbone(torch.randn(8, 3, 32, 32))
    model.baseline.fill_(0.875)
    description = Description(
        family="tnet",
        config=model.config.model_dump(mode="json"),
        classes=classes,
        bands=("red", "green", "blue"),
        normalisation={"dtype": dtype, "mean": [90.5, 91.0, 92.0], "std": [40.0, 41.0, 42.0]},
        traversal={"levels": 2, "keep": [2]},
    )
    save_checkpoint(path, model, description)
    return copied(model)


def test_a_run_may_start_from_a_trained_model(images, begin, tmp_path, caplog):
    weights = trained(tmp_path / "start.safetensors")
    run = begin(small(images, init=str(tmp_path / "start.safetensors")))
    assert not changed(weights, copied(run.model))
    assert run.model.baseline.item() == 0.875
    assert run.normalisation.mean == (90.5, 91.0, 92.0)
    assert "anew" not in caplog.text


@pytest.mark.parametrize("classes", [("a", "b"), ("light", "dark"), ("dark", "light", "red")])
def test_with_other_classes_the_head_is_not_loaded(images, begin, tmp_path, caplog, classes):
    weights = trained(tmp_path / "start.safetensors", classes)
    with caplog.at_level(logging.WARNING, "tnetcli"):
        run = begin(small(images, init=str(tmp_path / "start.safetensors")))
    own = copied(run.model)
    fresh = copied(begin(small(images)).model)
    same = {name for name in weights if not name.startswith("head.")}
    assert not changed({n: weights[n] for n in same}, {n: own[n] for n in same})
    assert torch.equal(own["head.weight"], fresh["head.weight"])
    assert "the head is not loaded" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"location_size": 16}, "location."),
        ({"aggregator": "mean"}, "aggregator."),
        ({"location": "context"}, "location."),
    ],
)
def test_a_model_that_is_built_differently_is_no_start(images, tmp_path, arguments, name):
    trained(tmp_path / "start.safetensors", **arguments)
    recipe = small(images, init=str(tmp_path / "start.safetensors"))
    with pytest.raises(ModelError, match=f"another architecture: `{name}") as caught:
        run_recipe(recipe, tmp_path / "run", Ears())
    assert caught.value.exit_code == 5
    assert caught.value.hint
    assert not (tmp_path / "run").exists()


def test_a_start_that_saw_other_pixels_is_refused(images, tmp_path):
    trained(tmp_path / "start.safetensors", dtype="uint16")
    with pytest.raises(ImageError, match="uint16"):
        run_recipe(
            small(images, init=str(tmp_path / "start.safetensors")), tmp_path / "run", Ears()
        )


def test_where_nothing_is_validated_the_last_model_is_the_best(tmp_path):
    tiles = write_zip(tmp_path / "tiles.zip", tile_files())
    stage = {"learn": "tiles", "steps": 1, "tiles": {"views": [2]}}
    recipe = recipe_of(
        None,
        model={"classes": list(RULES.classes)},
        data={
            "kind": "mosaic",
            "path": str(tiles),
            "landscape": {"size": 128, "background": BACKGROUND, "sites": SITES},
            "statistics_images": 2,
        },
        stages=[{"name": "one", **stage}, {"name": "two", **stage}],
    )
    files = run_recipe(recipe, tmp_path / "run", Ears())
    assert files.model.read_bytes() == files.of_stage("two").read_bytes()
    assert files.model.read_bytes() != files.of_stage("one").read_bytes()
    assert read_description(files.model).classes == RULES.classes


def test_weights_may_take_16_bits(images, tmp_path):
    recipe = small(images, training={"half": True, "validate_every": 3}, stages=[{"steps": 1}])
    files = run_recipe(recipe, tmp_path / "run", Ears())
    assert read_description(files.model).weights == "float16"
    assert files.model.stat().st_size < 0.6 * files.state.stat().st_size


def test_one_torn_image_is_left_out_with_a_warning(tmp_path):
    path = write_images(tmp_path / "images")
    image = write_geotiff(tmp_path / "images" / "torn.tif", noise((96, 96)), blocksize=None)
    content = bytearray(image.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    image.write_bytes(content)
    with path.open("a") as file:
        file.write("torn.tif,dark,train,\n")
    ears = Ears()
    recipe = recipe_of(path, stages=[{"steps": 1, "batch_size": 9}])
    files = run_recipe(recipe, tmp_path / "run", ears)
    (warning,) = [text for text in ears.warnings if "skipped" in text]
    assert "`torn.tif`" in warning
    assert files.model.exists()
