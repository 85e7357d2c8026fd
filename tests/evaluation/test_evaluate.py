import json
import logging
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.flop_counter import FlopCounterMode

from tests.checkpoints import write_tiny
from tests.images import noise, write_geotiff
from tnetcli.errors import ImageError, ManifestError, RecipeError, UsageError
from tnetcli.evaluation.data import read_labelled
from tnetcli.evaluation.evaluate import choose_counts, evaluate
from tnetcli.evaluation.metrics import wilson
from tnetcli.evaluation.report import as_json, as_text, draw_picture, write_json
from tnetcli.geometry import Region, Size, Window
from tnetcli.models.checkpoint import load_model
from tnetcli.prediction.inference import Inference
from tnetcli.readers.detect import open_image
from tnetcli.traversal.policies import build_policy

CLASSES = ["river", "forest", "town"]
RGB = {
    "classes": CLASSES,
    "bands": ["red", "green", "blue"],
    "normalisation": {"dtype": "uint8", "mean": [120.0, 128.0, 110.0], "std": [60.0, 55.0, 50.0]},
}
BOX = Window(40, 30, 60, 50)
IMAGES = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models, scenes and the manifest that lists them: six to test on, one to train on."""
    folder = tmp_path_factory.mktemp("evaluate")
    write_tiny(folder / "tnet.safetensors", traversal={"levels": 3, "keep": [2, 1]}, **RGB)
    write_tiny(folder / "whole.safetensors", "whole", traversal={"levels": 1, "keep": []}, **RGB)
    rows = ["path,label,split,box"]
    for number in range(IMAGES + 1):
        image = noise((300 + 10 * number, 280), seed=number)
        write_geotiff(folder / f"{number}.tif", image, overviews=[2])
        box = "40 30 100 80" if number % 2 else ""
        split = "test" if number < IMAGES else "train"
        rows.append(f"{number}.tif,{CLASSES[number % 3]},{split},{box}")
    (folder / "scenes.csv").write_text("\n".join(rows) + "\n")
    return folder


def run(folder, model="tnet", data="scenes.csv", **options):
    options = {"device": "cpu", "threads": 1, **options}
    return evaluate(folder / f"{model}.safetensors", folder / data, **options)


@pytest.fixture(scope="module")
def found(folder):
    return run(folder)


def rows_of(evaluation, choice="attention", context=True):
    return {
        row.windows: row
        for row in evaluation.rows
        if (row.choice, row.context) == (choice, context)
    }


class ByHand:
    """Traverses one image with arrays and loops only, to compare with."""

    def __init__(self, checkpoint, path):
        self.model = checkpoint.model
        scale = checkpoint.description.normalisation
        self.mean = np.array(scale.mean)[:, None, None]
        self.std = np.array(scale.std)[:, None, None]
        self.path = path

    def encode(self, region):
        side = self.model.view_size
        with open_image(self.path) as reader:
            values = reader.read(region.window, Size(side, side)).values
        view = torch.tensor((values - self.mean) / self.std, dtype=torch.float32)
        with torch.no_grad():
            out = self.model.encoder(region.level)(view[None], torch.tensor([region.position]))
        return out.features[0], out.cell_logits[0, :, 0].softmax(dim=0).tolist()

    def windows(self, keep):
        """Return the features of regions: the whole image, then by level and joint probability."""
        with open_image(self.path) as reader:
            root = Region(Window.whole(reader.size))
        frontier, found, shown = [(1.0, root)], [], set()
        for level in range(len(keep) + 1):
            read = [(joint, region, *self.encode(region)) for joint, region in frontier]
            found += [each[2] for each in sorted(read, key=lambda each: -each[0])]
            frontier = []
            for joint, region, _, attention in read if level < len(keep) else ():
                best = sorted(range(9), key=lambda cell: -attention[cell])[: keep[level]]
                for cell in sorted(best):
                    child = region.child(self.model.grid, *divmod(cell, 3))
                    if child.window.box not in shown:
                        shown.add(child.window.box)
                        frontier.append((joint * attention[cell], child))
        return found

    def probabilities(self, features):
        together = torch.stack(features)[None]
        with torch.no_grad():
            levels = torch.ones(together.shape[:2], dtype=torch.long)  # TNet does not use them
            logits = self.model.aggregate(together, levels > 0, levels).logits
            return logits.softmax(dim=1)[0].numpy()


@pytest.fixture(scope="module")
def by_hand(folder):
    checkpoint = load_model(folder / "tnet.safetensors")
    return [(ByHand(checkpoint, folder / f"{number}.tif"), number % 3) for number in range(IMAGES)]


@pytest.fixture(scope="module")
def traversed(by_hand):
    return [(hand, hand.windows((2, 1)), label) for hand, label in by_hand]


@pytest.mark.parametrize("context", [True, False])
def test_each_number_of_windows_gives_what_a_traversal_by_hand_gives(found, traversed, context):
    rows = rows_of(found, context=context)
    assert list(rows) == ([0, 1, 2, 3, 4] if context else [1, 2, 3, 4])
    assert len({round(row.scores.log_loss, 4) for row in rows.values()}) == len(rows)
    for count, row in rows.items():
        shares = [
            hand.probabilities(windows[0 if context else 1 : count + 1])
            for hand, windows, _ in traversed
        ]
        labels = [label for _, _, label in traversed]
        right = [int(each.argmax()) == label for each, label in zip(shares, labels, strict=True)]
        truth = [each[label] for each, label in zip(shares, labels, strict=True)]
        assert row.scores.images == IMAGES
        assert row.scores.accuracy == wilson(sum(right), IMAGES)
        assert row.scores.log_loss == pytest.approx(-np.log(truth).mean(), abs=1e-4)
        distances = [
            ((each - np.eye(3)[label]) ** 2).sum()
            for each, label in zip(shares, labels, strict=True)
        ]
        assert row.scores.brier == pytest.approx(np.mean(distances), abs=1e-4)


def test_the_confusion_is_that_of_whole_traversals(found, traversed):
    expected = np.zeros((3, 3), int)
    for hand, windows, label in traversed:
        expected[label, hand.probabilities(windows).argmax()] += 1
    assert np.array_equal(found.confusion, expected)
    assert found.scores == rows_of(found)[4].scores


def test_no_window_is_the_same_however_windows_are_chosen(found):
    own = rows_of(found)[0].scores
    for choice in ("random", "oracle"):
        other = rows_of(found, choice)[0].scores
        assert other.accuracy == own.accuracy
        assert other.log_loss == pytest.approx(own.log_loss, abs=1e-5)


def test_multiplications_are_what_the_model_counts(folder, found):
    model = load_model(folder / "tnet.safetensors").model
    view, position = torch.zeros(1, 3, 64, 64), torch.zeros(1, 3, dtype=torch.long)
    for count, scored in ((0, 0), (1, 1), (2, 1), (3, 3), (4, 3)):
        with FlopCounterMode(display=False) as counted, torch.no_grad():
            features = [model(view, position, n < scored).features for n in range(count + 1)]
            levels = torch.ones(1, count + 1, dtype=torch.long)
            model.aggregate(torch.stack(features, 1), levels > 0, levels)
        assert rows_of(found)[count].multiplications == counted.get_total_flops() // 2
    assert found.cost.multiplications == rows_of(found)[4].multiplications


def test_the_cost_is_the_mean_of_what_single_images_take(folder, tmp_path):
    for name in ("a", "b"):  # of a file that was read before, some is remembered
        shutil.copytree(folder, tmp_path / name)
    found = run(tmp_path / "a")
    checkpoint = load_model(folder / "tnet.safetensors")
    fractions = []
    config = checkpoint.description.traversal_config()
    with Inference.of(checkpoint, device="cpu") as inference:
        for number in range(IMAGES):
            with open_image(tmp_path / "b" / f"{number}.tif") as reader:
                inference.run([reader], config, [build_policy(config)])
                fractions.append(reader.cost.pixels_decoded / reader.size.pixels)
    assert found.cost.windows == 4
    assert found.cost.fraction_decoded == pytest.approx(np.mean(fractions))
    assert found.cost.read_seconds > 0
    assert found.cost.model_seconds > 0


def test_results_do_not_depend_on_batches_or_threads(folder, found):
    other = run(folder, batch_size=4, threads=2)
    for ours, theirs in zip(found.rows, other.rows, strict=True):
        assert ours.scores.accuracy == theirs.scores.accuracy
        assert ours.scores.log_loss == pytest.approx(theirs.scores.log_loss, abs=1e-5)
    assert found.hit_rates == other.hit_rates


def test_another_seed_draws_other_windows_and_changes_nothing_else(folder, found):
    other = run(folder, seed=1)
    assert rows_of(other) == rows_of(found)
    assert rows_of(other, "oracle") == rows_of(found, "oracle")
    assert rows_of(other, "random") != rows_of(found, "random")


def test_true_boxes_are_hit_by_the_oracle(found):
    assert found.images_with_boxes == 3
    assert found.hit_rates["oracle"] == {2: wilson(3, 3), 3: wilson(3, 3)}


def test_hits_are_those_of_the_windows_by_hand(folder, found):
    checkpoint = load_model(folder / "tnet.safetensors")
    hit = {2: 0, 3: 0}
    config = checkpoint.description.traversal_config()
    with Inference.of(checkpoint, device="cpu") as inference:
        for number in (1, 3, 5):
            with open_image(folder / f"{number}.tif") as reader:
                (result,) = inference.run([reader], config, [build_policy(config)])
            for level in hit:
                own = [n.region.window for n in result.nodes if n.region.level == level]
                shared = [
                    max(0, min(BOX.right, each.right) - max(BOX.left, each.left))
                    * max(0, min(BOX.bottom, each.bottom) - max(BOX.top, each.top))
                    for each in own
                ]
                hit[level] += any(
                    area >= 1500 or area >= each.width * each.height / 4
                    for area, each in zip(shared, own, strict=True)
                )
    assert found.hit_rates["attention"] == {level: wilson(n, 3) for level, n in hit.items()}


def test_attention_is_checked_on_every_image_where_it_is_asked_for(folder, found):
    assert found.attention is None
    assert json.loads(as_json(found))["attention"] is None
    checked = run(folder, check_attention=True)
    assert checked.rows == found.rows
    told = checked.attention
    assert told.images == IMAGES
    checkpoint = load_model(folder / "tnet.safetensors")
    with Inference.of(checkpoint, device="cpu", threads=1) as inference:
        own = []
        for image in read_labelled(folder / "scenes.csv", "test", tuple(CLASSES)):
            with image.open() as reader:
                policies = [build_policy(checked.config)]
                (result,) = inference.run([reader], checked.config, policies)
            own.append(max(np.exp(result.logits) / np.exp(result.logits).sum()))
    assert told.own.value == pytest.approx(np.mean(own), rel=1e-5)
    assert 0 <= told.masked.low <= told.masked.value <= told.masked.high <= 1
    assert 0 <= told.random_changed.value <= 1
    assert "closest windows hidden" in as_text(checked)
    assert json.loads(as_json(checked))["attention"]["images"] == IMAGES


def test_another_traversal_can_be_asked_for(folder):
    found = run(folder, levels=2, keep=(3,), counts=[0, 2], random=False, oracle=False)
    assert [(row.windows, row.context) for row in found.rows] == [
        (0, True), (2, True), (3, True), (2, False), (3, False),
    ]  # fmt: skip
    assert {row.choice for row in found.rows} == {"attention"}
    assert (found.config.levels, found.config.keep) == (2, (3,))


def test_a_model_of_the_whole_image_has_no_windows(folder):
    found = run(folder, "whole")
    assert [(row.choice, row.windows) for row in found.rows] == [("attention", 0)]
    assert found.hit_rates == {"attention": {}}
    assert found.cost.windows == 0
    assert "windows" in as_text(found)


@pytest.mark.parametrize(
    ("asked", "most", "expected"),
    [
        (None, 0, [0]),
        (None, 4, [0, 1, 2, 3, 4]),
        (None, 9, [0, 1, 2, 4, 8, 9]),
        (None, 40, [0, 1, 2, 4, 8, 16, 32, 40]),
        ([3, 1], 4, [1, 3, 4]),
    ],
)
def test_numbers_of_windows_end_with_the_whole_traversal(asked, most, expected):
    assert choose_counts(asked, most) == tuple(expected)


@pytest.mark.parametrize("asked", [[0, 5], [-1]])
def test_numbers_of_windows_beyond_the_traversal_are_refused(asked):
    with pytest.raises(UsageError, match="not within 0 and 4"):
        choose_counts(asked, 4)


def test_images_that_end_early_are_aggregated_from_what_they_have(folder, tmp_path):
    # 100 px: a cell of 50 is finer than a view of 64, so nothing deeper is read.
    write_geotiff(tmp_path / "small.tif", noise((100, 100), seed=1))
    (tmp_path / "a.csv").write_text("path,label\nsmall.tif,river\n")
    found = evaluate(folder / "tnet.safetensors", tmp_path / "a.csv", device="cpu")
    scores = {row.scores for row in found.rows}
    assert len(scores) == 1
    assert {row.mean_windows for row in found.rows} == {0}


class TestFailures:
    @pytest.fixture
    def broken(self, folder, tmp_path):
        """Return a manifest with a sound image and two that are not."""
        (tmp_path / "text.tif").write_text("no image")
        write_geotiff(tmp_path / "bands.tif", noise((100, 90), bands=2))
        rows = ["path,label", f"{folder / '0.tif'},river", "text.tif,river", "bands.tif,town"]
        (tmp_path / "a.csv").write_text("\n".join(rows) + "\n")
        return tmp_path / "a.csv"

    def test_a_bad_image_is_named_and_the_rest_go_on(self, folder, broken, caplog):
        with caplog.at_level(logging.WARNING):
            found = evaluate(folder / "tnet.safetensors", broken, device="cpu")
        assert found.images == 1
        assert {failure.id for failure in found.failures} == {"text.tif", "bands.tif"}
        assert {failure.error.type for failure in found.failures} == {"ImageError"}
        for name in ("text.tif", "bands.tif"):
            assert name in caplog.text

    def test_what_is_said_of_the_rest_is_the_same(self, folder, broken, tmp_path):
        (tmp_path / "b.csv").write_text(f"path,label\n{folder / '0.tif'},river\n")
        with_bad = evaluate(folder / "tnet.safetensors", broken, device="cpu")
        without = evaluate(folder / "tnet.safetensors", tmp_path / "b.csv", device="cpu")
        assert with_bad.rows == without.rows

    def test_all_bad_is_an_error_that_names_the_first(self, folder, broken, tmp_path):
        lines = broken.read_text().splitlines()
        broken.write_text("\n".join([lines[0], *lines[2:]]) + "\n")
        with pytest.raises(ImageError, match=r"none of 2 images .*text\.tif"):
            evaluate(folder / "tnet.safetensors", broken, device="cpu")


class TestData:
    def test_a_split_is_chosen(self, folder):
        assert [each.id for each in read_labelled(folder / "scenes.csv", "train", tuple(CLASSES))]
        assert run(folder, split="train").images == 1

    def test_images_in_no_split_are_for_the_test(self, folder, tmp_path):
        (tmp_path / "a.csv").write_text(f"path,label\n{folder / '0.tif'},river\n")
        assert len(read_labelled(tmp_path / "a.csv", "test", tuple(CLASSES))) == 1

    def test_an_empty_split_is_an_error_that_tells_the_others(self, folder):
        with pytest.raises(ManifestError, match="`validation`") as raised:
            read_labelled(folder / "scenes.csv", "validation", tuple(CLASSES))
        assert "1 in train, 6 in test" in raised.value.hint

    def test_a_label_that_the_model_does_not_know_is_an_error(self, folder, tmp_path):
        (tmp_path / "a.csv").write_text(f"path,label\n{folder / '0.tif'},desert\n")
        with pytest.raises(ManifestError, match="desert"):
            read_labelled(tmp_path / "a.csv", "test", tuple(CLASSES))

    def test_labels_are_numbered_as_the_model_numbers_them(self, folder, tmp_path):
        (tmp_path / "a.csv").write_text(f"path,label\n{folder / '0.tif'},town\n")
        (image,) = read_labelled(tmp_path / "a.csv", "test", tuple(CLASSES))
        assert image.label == 2

    def test_a_folder_for_each_class_will_do(self, tmp_path):
        for name in ("forest", "river"):
            (tmp_path / name).mkdir()
            write_geotiff(tmp_path / name / "a.tif", noise((40, 40)))
        images = read_labelled(tmp_path, "test", tuple(CLASSES))
        assert sorted(CLASSES[image.label] for image in images) == ["forest", "river"]

    def test_a_recipe_divides_as_it_was_trained(self, tmp_path):
        rows = ["path,label"]
        for number in range(40):
            write_geotiff(tmp_path / f"{number}.tif", noise((40, 40)))
            rows.append(f"{number}.tif,{CLASSES[number % 3]}")
        (tmp_path / "a.csv").write_text("\n".join(rows) + "\n")
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(
            "model: {classes: [river, forest, town]}\n"
            "data: {path: a.csv, validation: 0.3, test: 0.3}\n"
        )
        ids = [
            {each.id for each in read_labelled(recipe, split, tuple(CLASSES))}
            for split in ("train", "validation", "test")
        ]
        assert sum(map(len, ids)) == len(set.union(*ids)) == 40
        assert all(ids)

    def test_a_recipe_without_data_is_an_error(self, tmp_path):
        (tmp_path / "a.yaml").write_text("model: {classes: 3}\n")
        with pytest.raises(RecipeError, match="no section `data`"):
            read_labelled(tmp_path / "a.yaml", "test", tuple(CLASSES))

    def test_bands_are_chosen_in_the_order_given(self, folder):
        (image, *_) = read_labelled(folder / "scenes.csv", "test", tuple(CLASSES), bands=("3", "1"))
        with image.open() as reader:
            assert len(reader.bands) == 2


MOSAIC = """\
model: {{classes: [none, town]}}
data:
  kind: mosaic
  path: tiles
  landscape: {{size: 256, sites: [{site}], background: [forest], empty: none, site_tiles: [2, 2],
              neighbours: 2, training: 3, validation: 4, test: 5}}
"""


class TestMosaic:
    @pytest.fixture
    def recipe(self, tmp_path):
        for number, name in enumerate(("forest", "town")):
            (tmp_path / "tiles" / name).mkdir(parents=True)
            for tile in range(24):
                image = noise((32, 32), seed=100 * number + tile).transpose(1, 2, 0)
                Image.fromarray(image).save(tmp_path / "tiles" / name / f"{tile}.png")
        recipe = tmp_path / "mosaic.yaml"
        recipe.write_text(MOSAIC.format(site="town"))
        return recipe

    def test_each_split_has_its_scenes(self, recipe):
        for split, count in (("train", 3), ("validation", 4), ("test", 5)):
            assert len(read_labelled(recipe, split, ("none", "town"))) == count

    def test_a_scene_opens_as_it_is_described(self, recipe):
        classes = ("town", "river", "none")
        for image in read_labelled(recipe, "test", classes):
            with image.open() as scene:
                assert scene.label == classes[image.label]
                assert scene.boxes == image.boxes
                assert bool(image.boxes) == (scene.label == "town")

    def test_a_class_that_the_model_does_not_know_is_an_error(self, recipe):
        with pytest.raises(ManifestError, match="town"):
            read_labelled(recipe, "test", ("none", "river"))

    def test_scenes_are_evaluated(self, recipe, tmp_path):
        told = {**RGB, "classes": ["none", "town"], "traversal": {"levels": 2, "keep": [2]}}
        write_tiny(tmp_path / "m.safetensors", **told)
        found = evaluate(tmp_path / "m.safetensors", recipe, device="cpu")
        images = read_labelled(recipe, "test", ("none", "town"))
        assert found.images == 5
        assert found.images_with_boxes == sum(bool(image.boxes) for image in images)
        assert found.hit_rates["oracle"][2].value == 1


class TestTelling:
    def test_json_holds_everything(self, found):
        record = json.loads(as_json(found))
        assert record["schema"] == "tnet.evaluation/1"
        assert (record["images"], record["images_with_boxes"], record["failed"]) == (6, 3, [])
        assert record["confusion"] == found.confusion.tolist()
        assert record["scores"]["accuracy"]["value"] == np.trace(found.confusion) / 6
        assert record["scores"]["macro_f1"]["low"] <= record["scores"]["macro_f1"]["value"]
        assert record["traversal"]["keep"] == [2, 1]
        assert {(row["choice"], row["context"], row["windows"]) for row in record["rows"]} == {
            (choice, context, count)
            for choice in ("attention", "random", "oracle")
            for context in (True, False)
            for count in range(5)
            if context or count
        }
        assert {(rate["choice"], rate["level"]) for rate in record["hit_rates"]} == {
            (choice, level) for choice in ("attention", "random", "oracle") for level in (2, 3)
        }

    def test_figures_by_class_are_those_of_the_confusion(self, found):
        matrix = found.confusion
        for number, told in enumerate(json.loads(as_json(found))["per_class"]):
            right, told_so = matrix[number, number], matrix[:, number].sum()
            assert told["class"] == CLASSES[number]
            assert told["images"] == 2
            assert told["recall"] == right / 2
            assert told["precision"] == (right / told_so if told_so else None)
            assert told["f1"] == 2 * right / (2 + told_so)

    def test_text_shows_what_json_holds(self, found):
        text = as_text(found)
        accuracy = found.scores.accuracy
        assert f"{100 * accuracy.value:.1f} %" in text
        for title in ("attention", "without whole image", "random", "oracle", "level", "river"):
            assert title in text
        assert max(map(len, text.splitlines())) <= 120
        assert "…" not in text  # no column was cut

    def test_names_cannot_steer_the_terminal(self, folder, tmp_path):
        classes = ["a\x1b[2J", "b\nc", "d" * 300]
        write_tiny(
            tmp_path / "m.safetensors",
            **{**RGB, "classes": classes},
            traversal={"levels": 2, "keep": [1]},
        )
        rows = f"path,label\n{folder / '0.tif'},{classes[2]}\n"
        (tmp_path / "a.csv").write_text(rows)
        found = evaluate(tmp_path / "m.safetensors", tmp_path / "a.csv", device="cpu")
        assert "\x1b" not in as_text(found)

    def test_files_are_written_whole(self, found, tmp_path):
        write_json(found, tmp_path / "a.json")
        draw_picture(found, tmp_path / "a.png")
        assert json.loads((tmp_path / "a.json").read_text()) == json.loads(as_json(found))
        with Image.open(tmp_path / "a.png") as picture:
            assert picture.format == "PNG"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["a.json", "a.png"]
