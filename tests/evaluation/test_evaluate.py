import json
import logging
import shutil

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from tests.evaluation.conftest import IMAGES, run
from tests.images import noise, write_geotiff
from tnetcli.errors import ImageError, UsageError
from tnetcli.evaluation.evaluate import choose_counts, evaluate
from tnetcli.evaluation.metrics import wilson
from tnetcli.evaluation.report import as_json, as_text
from tnetcli.geometry import Region, Size, Window
from tnetcli.models.checkpoint import load_model
from tnetcli.prediction.inference import Inference
from tnetcli.readers.detect import open_image
from tnetcli.traversal.policies import build_policy

BOX = Window(40, 30, 60, 50)


def rows_of(evaluation, choice="attention", context=True):
    return {
        row.windows: row
        for row in evaluation.rows
        if (row.choice, row.context) == (choice, context)
    }


class ByHand:
    """An independent traversal of one image with arrays and loops."""

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
def test_each_number_of_regions_scores_as_a_traversal_by_hand(found, traversed, context):
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


def test_without_regions_all_choices_are_equal(found):
    own = rows_of(found)[0].scores
    for choice in ("random", "oracle"):
        other = rows_of(found, choice)[0].scores
        assert other.accuracy == own.accuracy
        assert other.log_loss == pytest.approx(own.log_loss, abs=1e-5)


def test_multiplications_are_those_of_the_model(folder, found):
    model = load_model(folder / "tnet.safetensors").model
    view, position = torch.zeros(1, 3, 64, 64), torch.zeros(1, 3, dtype=torch.long)
    for count, scored in ((0, 0), (1, 1), (2, 1), (3, 3), (4, 3)):
        with FlopCounterMode(display=False) as counted, torch.no_grad():
            features = [model(view, position, n < scored).features for n in range(count + 1)]
            levels = torch.ones(1, count + 1, dtype=torch.long)
            model.aggregate(torch.stack(features, 1), levels > 0, levels)
        assert rows_of(found)[count].multiplications == counted.get_total_flops() // 2
    assert found.cost.multiplications == rows_of(found)[4].multiplications


def test_the_cost_is_the_mean_of_single_images(folder, tmp_path):
    for name in ("a", "b"):  # a file that was read before is partly cached
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


def test_another_seed_changes_random_regions_only(folder, found):
    other = run(folder, seed=1)
    assert rows_of(other) == rows_of(found)
    assert rows_of(other, "oracle") == rows_of(found, "oracle")
    assert rows_of(other, "random") != rows_of(found, "random")


def test_the_oracle_hits_true_boxes(found):
    assert found.images_with_boxes == 3
    assert found.hit_rates["oracle"] == {2: wilson(3, 3), 3: wilson(3, 3)}


def test_hits_are_those_of_regions_by_hand(folder, found):
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


def test_attention_is_checked_on_every_image(folder, found):
    assert found.attention is None
    checked = run(folder, check_attention=True)
    assert checked.rows == found.rows
    attention = checked.attention
    assert attention.images == IMAGES
    checkpoint = load_model(folder / "tnet.safetensors")
    own = []
    with Inference.of(checkpoint, device="cpu", threads=1) as inference:
        for number in range(IMAGES):
            with open_image(folder / f"{number}.tif") as reader:
                policies = [build_policy(checked.config)]
                (result,) = inference.run([reader], checked.config, policies)
            own.append(max(np.exp(result.logits) / np.exp(result.logits).sum()))
    assert attention.own.value == pytest.approx(np.mean(own), rel=1e-5)
    assert 0 <= attention.masked.low <= attention.masked.value <= attention.masked.high <= 1
    assert 0 <= attention.random_changed.value <= 1
    assert "deepest regions hidden" in as_text(checked)
    assert json.loads(as_json(checked))["attention"]["images"] == IMAGES
    assert json.loads(as_json(found))["attention"] is None


def test_another_traversal_is_evaluated(folder):
    found = run(folder, levels=2, keep=(3,), counts=[0, 2], random=False, oracle=False)
    assert [(row.windows, row.context) for row in found.rows] == [
        (0, True), (2, True), (3, True), (2, False), (3, False),
    ]  # fmt: skip
    assert {row.choice for row in found.rows} == {"attention"}
    assert (found.config.levels, found.config.keep) == (2, (3,))


def test_a_model_of_the_whole_image_has_no_regions(folder):
    found = run(folder, "whole")
    assert [(row.choice, row.windows) for row in found.rows] == [("attention", 0)]
    assert found.hit_rates == {"attention": {}}
    assert found.cost.windows == 0
    assert "level 1 only" in as_text(found)


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
def test_counts_end_with_the_full_traversal(asked, most, expected):
    assert choose_counts(asked, most) == tuple(expected)


@pytest.mark.parametrize("asked", [[0, 5], [-1]])
def test_counts_beyond_the_traversal_are_an_error(asked):
    with pytest.raises(UsageError, match="not between 0 and 4"):
        choose_counts(asked, 4)


def test_images_with_fewer_regions_are_predicted_from_all_of_them(folder, tmp_path):
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
        """Return a manifest with one good image and two bad ones."""
        (tmp_path / "text.tif").write_text("no image")
        write_geotiff(tmp_path / "bands.tif", noise((100, 90), bands=2))
        rows = ["path,label", f"{folder / '0.tif'},river", "text.tif,river", "bands.tif,town"]
        (tmp_path / "a.csv").write_text("\n".join(rows) + "\n")
        return tmp_path / "a.csv"

    def test_a_bad_image_is_left_out_with_a_warning(self, folder, broken, caplog):
        with caplog.at_level(logging.WARNING):
            found = evaluate(folder / "tnet.safetensors", broken, device="cpu")
        assert found.images == 1
        assert {failure.id for failure in found.failures} == {"text.tif", "bands.tif"}
        assert {failure.error.type for failure in found.failures} == {"ImageError"}
        for name in ("text.tif", "bands.tif"):
            assert name in caplog.text

    def test_a_bad_image_does_not_change_the_scores_of_others(self, folder, broken, tmp_path):
        (tmp_path / "b.csv").write_text(f"path,label\n{folder / '0.tif'},river\n")
        with_bad = evaluate(folder / "tnet.safetensors", broken, device="cpu")
        without = evaluate(folder / "tnet.safetensors", tmp_path / "b.csv", device="cpu")
        assert with_bad.rows == without.rows

    def test_only_bad_images_are_an_error_that_names_the_first(self, folder, broken, tmp_path):
        lines = broken.read_text().splitlines()
        broken.write_text("\n".join([lines[0], *lines[2:]]) + "\n")
        with pytest.raises(ImageError, match=r"none of 2 images .*text\.tif"):
            evaluate(folder / "tnet.safetensors", broken, device="cpu")
