import json
import os

import numpy as np
import pytest
from rasterio.transform import Affine

from tests.commands import tnet
from tests.exporters.records import record, window
from tests.images import noise, write_geotiff
from tests.predicting import CLASSES, answers, assert_alike, predict, records, write_model
from tnetcli.cli.predict import Batch, as_text
from tnetcli.exporters.imagery import open_imagery
from tnetcli.prediction.record import LevelRecord, PredictionCost

COUNT = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predict")
    write_model(folder / "m.safetensors")
    write_model(folder / "other.safetensors", classes=["a", "b", "c"])
    (folder / "images" / "more").mkdir(parents=True)
    for number in range(COUNT):
        name = f"images/{number:02}.tif" if number < COUNT - 2 else f"images/more/{number:02}.tif"
        size = 200 + 30 * (number % 4), 260
        write_geotiff(folder / name, noise(size, seed=number), overviews=[2, 4])
    (folder / "broken.tif").write_text("no image")
    (folder / "empty.tif").write_bytes(b"")
    return folder


@pytest.fixture(scope="module")
def whole(folder):
    """Return the answers of an undisturbed run."""
    out = folder / "whole.jsonl"
    done = predict(folder, folder / "images", "--recursive", "-o", out)
    assert done.returncode == 0, done.stderr
    return answers(out)


def test_a_summary_shows_the_prediction_by_level_and_its_cost(folder):
    done = predict(folder, "images/00.tif", "--levels", "2", cwd=folder)
    assert done.returncode == 0
    first, *rest = done.stdout.splitlines()
    assert first.startswith("images/00.tif: ")
    assert any(first.split(": ")[1].startswith(name) for name in CLASSES)
    assert [line.split(":")[0].strip() for line in rest[:2]] == ["level 1", "level 2"]
    for words in ("read 3 regions", "all levels are done", "decoded", "reading", "the model"):
        assert words in done.stdout
    assert done.stderr == ""


def test_records_go_to_a_file_one_per_line(whole):
    assert len(whole) == COUNT
    some = next(iter(whole.values()))
    assert some["status"] == "ok"
    assert set(some["probabilities"]) == set(CLASSES)
    assert some["provenance"]["config"]["levels"] == 3
    assert [level["windows"] for level in some["levels"]] == [1, 2, 2]
    assert len({each["fingerprint"] for each in whole.values()}) == COUNT


def test_records_go_to_standard_output(folder, whole):
    done = predict(folder, folder / "images/03.tif", "-o", "-", "-q")
    (line,) = done.stdout.splitlines()
    assert json.loads(line)["label"] == whole["03.tif"]["label"]


@pytest.mark.parametrize("options", [["--batch-size", "1"], ["--batch-size", "5", "--workers", 2]])
def test_predictions_do_not_depend_on_the_execution(folder, whole, tmp_path, options):
    out = tmp_path / "a.jsonl"
    assert predict(folder, folder / "images", "--recursive", "-o", out, *options).returncode == 0
    assert_alike(answers(out), whole)


def test_a_sample_depends_on_the_seed_and_the_image_alone(folder, tmp_path):
    options = ["--policy", "sample", folder / "images", "--recursive"]
    found = []
    for number, more in enumerate([[], ["--batch-size", "1"], ["--seed", "1"]]):
        out = tmp_path / f"{number}.jsonl"
        assert predict(folder, *options, *more, "-o", out).returncode == 0
        found.append({r.id: [w.path for w in r.windows] for r in records(out)})
    assert found[0] == found[1] != found[2]


def test_failed_images_are_recorded_and_the_batch_continues(folder, tmp_path):
    out = tmp_path / "a.jsonl"
    named = ["broken.tif", "images/00.tif", "empty.tif", "gone.tif", "images/01.tif"]
    done = predict(folder, *(folder / name for name in named), "-o", out)
    assert done.returncode == 8
    assert [each.status for each in records(out)] == ["failed", "ok", "failed", "failed", "ok"]
    assert "error: 3 of 5 images failed" in done.stderr
    assert "2 of 5 images done, 3 failed" in done.stderr
    for each in records(out):
        if each.error is not None:
            assert all([each.error.message, each.provenance.sha256, each.provenance.config])


def test_only_failed_images_are_another_exit_code(folder):
    assert predict(folder, folder / "broken.tif", folder / "gone.tif").returncode == 3
    alone = predict(folder, folder / "empty.tif", "-q")
    assert alone.returncode == 3
    assert [line.split(":")[0] for line in alone.stderr.splitlines()] == ["error", "hint"]


def test_a_batch_stops_after_too_many_failures(folder, tmp_path):
    out = tmp_path / "a.jsonl"
    named = [folder / "images/00.tif", folder / "broken.tif", *sorted(folder.glob("images/*.tif"))]
    options = ["-o", out, "--batch-size", "1"]
    assert predict(folder, *named, *options, "--max-failures", "0").returncode == 8
    assert 2 <= len(records(out)) <= 4
    assert predict(folder, *named, *options, "--max-failures", "1").returncode == 8
    assert len(records(out)) == len(set(named))


def test_an_existing_file_is_resumed(folder, tmp_path, whole):
    out = tmp_path / "a.jsonl"
    predict(folder, *sorted(folder.glob("images/*.tif"))[:4], "-o", out)
    before = out.read_bytes()
    done = predict(folder, folder / "images", "--recursive", "-o", out)
    assert done.returncode == 0
    assert "4 done before" in done.stderr
    assert out.read_bytes().startswith(before)
    assert_alike(answers(out), whole)


def test_a_changed_image_is_predicted_again_and_the_record_of_a_lost_one_stays(folder, tmp_path):
    image, out = tmp_path / "a.tif", tmp_path / "a.jsonl"
    write_geotiff(image, noise((200, 200), seed=1))
    predict(folder, image, "-o", out)
    (before,) = records(out)
    write_geotiff(image, noise((200, 200), seed=2))
    predict(folder, image, "-o", out)
    (after,) = records(out)
    assert before.fingerprint != after.fingerprint
    assert before.probabilities != after.probabilities
    image.unlink()
    assert predict(folder, image, "-o", out).returncode == 0
    assert records(out) == [after]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("other.safetensors", []),
        ("m.safetensors", ["--levels", "2"]),
        ("m.safetensors", ["--bands", "3,2,1"]),
    ],
)
def test_output_with_other_settings_is_refused_and_stays(folder, tmp_path, model, options):
    out = tmp_path / "a.jsonl"
    predict(folder, folder / "images/00.tif", "-o", out)
    before = out.read_bytes()
    done = predict(folder, folder / "images/01.tif", "-o", out, *options, model=model)
    assert done.returncode == 7
    assert out.read_bytes() == before
    again = [folder / "images/01.tif", "-o", out, *options, "--overwrite"]
    assert predict(folder, *again, model=model).returncode == 0
    assert len(records(out)) == 1


def test_the_record_of_a_lost_image_stays_only_with_the_same_bands(folder, tmp_path):
    image, out, manifest = tmp_path / "a.tif", tmp_path / "a.jsonl", tmp_path / "list.csv"
    write_geotiff(image, noise((200, 200), seed=1))
    manifest.write_text('path,bands\na.tif,"3,2,1"\n')
    predict(folder, "--manifest", manifest, "-o", out)
    image.unlink()
    assert predict(folder, "--manifest", manifest, "-o", out).returncode == 0
    manifest.write_text("path,bands\na.tif,\n")
    assert predict(folder, "--manifest", manifest, "-o", out).returncode == 3


def test_a_pipe_fails_at_once(folder, tmp_path):
    os.mkfifo(tmp_path / "pipe.tif")
    assert predict(folder, tmp_path / "pipe.tif", folder / "images/00.tif").returncode == 8


def test_a_manifest_names_images_and_their_read_options(folder, tmp_path):
    manifest, out = tmp_path / "list.csv", tmp_path / "a.jsonl"
    image = folder / "images/00.tif"
    manifest.write_text(f'path,id,bands\n{image},plain,\n{image},turned,"3,2,1"\n')
    assert predict(folder, "--manifest", manifest, "-o", out).returncode == 0
    plain, turned = records(out)
    assert (plain.id, turned.id) == ("plain", "turned")
    assert plain.probabilities != turned.probabilities
    assert plain.fingerprint != turned.fingerprint
    assert (plain.reading, turned.reading) == ({}, {"bands": ["3", "2", "1"]})
    with open_imagery(plain) as one, open_imagery(turned) as other:
        own, reversed_ = (each.show((0, 0, 64, 64), 64, 64) for each in (one, other))
    np.testing.assert_array_equal(own[..., 2::-1], reversed_[..., :3])
    manifest.write_text(f"path,id\n{image},a\n{folder}/images/01.tif,a\n")
    assert predict(folder, "--manifest", manifest).returncode == 4


def test_a_list_on_standard_input(folder, tmp_path):
    out = tmp_path / "a.jsonl"
    paths = [str(path) for path in sorted(folder.glob("images/*.tif"))[:3]]
    assert predict(folder, "-", "-0", "-o", out, stdin="\0".join(paths)).returncode == 0
    assert [each.id for each in records(out)] == paths


def test_shards_together_are_the_whole(folder, tmp_path, whole):
    out, everything = tmp_path / "a.jsonl", [folder / "images", "--recursive"]
    for number in range(1, 4):
        done = predict(folder, *everything, "--shard", f"{number}/3", "-o", out)
        assert done.returncode == 0
    parts = sorted(tmp_path.glob("a.*-of-3.jsonl"))
    assert len(parts) == 3
    assert not out.exists()
    assert tnet("merge", *parts, "-o", out).returncode == 0
    assert_alike(answers(out), whole)
    values = {"ID": "7", "COUNT": "4", "MIN": "4", "STEP": "1"}
    task = {f"SLURM_ARRAY_TASK_{name}": value for name, value in values.items()}
    assert predict(folder, *everything, "-o", tmp_path / "b.jsonl", **task).returncode == 0
    assert (tmp_path / "b.4-of-4.jsonl").exists()
    lost = tnet("merge", *parts[:2], "-o", out, "--overwrite")
    assert lost.returncode == 8
    assert "a.3-of-3.jsonl" in lost.stderr


def test_records_are_not_written_to_a_compressed_file(folder, tmp_path):
    out = tmp_path / "a.jsonl.gz"
    done = predict(folder, folder / "images/00.tif", "-o", out)
    assert done.returncode == 2
    assert "hint: name a FILE.jsonl" in done.stderr
    predict(folder, folder / "images/00.tif", "-o", tmp_path / "a.jsonl")
    assert tnet("merge", tmp_path / "a.jsonl", "-o", out).returncode == 2
    assert not out.exists()


def test_a_name_with_a_line_end_makes_one_line_per_message(folder, tmp_path):
    odd, good = tmp_path / "a\nb\tc.tif", tmp_path / "good\nimage.tif"
    odd.write_text("no image")
    good.write_bytes((folder / "images/00.tif").read_bytes())
    done = predict(folder, odd, good, tmp_path / "gone.tif")
    assert done.returncode == 8
    for line in done.stderr.splitlines():
        assert line.startswith(
            ("warning: ", "failed ", "error: ", "hint: ", "1 of 3 images", "5 r")
        )
    assert "a\\nb\\tc.tif failed" in done.stderr
    assert done.stdout.splitlines()[0].startswith(f"{tmp_path}/good\\nimage.tif: ")


def test_one_image_is_counted_in_the_singular(folder, tmp_path):
    image = folder / "images/00.tif"
    done = predict(folder, image, "--budget", "1", "-o", tmp_path / "a.jsonl", "--shard", "1/1")
    assert "shard 1/1: 1 image, into" in done.stderr
    assert "1 of 1 image done" in done.stderr
    assert "\n1 region, " in done.stderr


def test_images_unlike_the_training_data_are_warned_about(tmp_path):
    write_model(tmp_path / "m.safetensors", pixel_size=10.0)
    bright = tmp_path / "bright.tif"
    place = Affine(0.5, 0, 4e5, 0, -0.5, 5e6)
    write_geotiff(bright, np.full((3, 200, 200), 250, np.uint8), transform=place)
    done = predict(tmp_path, bright, "-o", "-")
    assert len(json.loads(done.stdout)["warnings"]) == 1
    assert "0.5 m, the model was trained on 10 m" in done.stderr


def test_other_types_are_refused_or_rescaled(folder, tmp_path):
    wide, plain, values = tmp_path / "wide.tif", tmp_path / "plain.tif", noise((200, 200), seed=1)
    write_geotiff(wide, values.astype(np.uint16) * 16)
    write_geotiff(plain, values)
    done = predict(folder, wide)
    assert done.returncode == 3
    assert "-O rescale" in done.stderr
    scaled = predict(folder, wide, "-O", f"rescale=0,{255 * 16}", "-o", "-", "-q")
    same = predict(folder, plain, "-o", "-", "-q")
    one, two = (json.loads(each.stdout)["probabilities"] for each in (scaled, same))
    assert one == pytest.approx(two, abs=0.02)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["-O", "rescale=5"], "rescale"),
        (["-O", "rescale=9,1"], "low is not below high"),
        (["-O", "flat=refuse"], "unknown key `flat`"),
        (["--bands", "4,,2"], "a band has no name"),
        (["--policy", "best_first"], "best_first needs a budget"),
        (["--policy", "topk"], "no such policy; choose one of: top_k, sample, best_first"),
        (["--shard", "9/3"], "--shard"),
        (["--keep", "0"], "--keep"),
        (["--confidence", "2"], "confidence"),
        (["--device", "abacus"], "abacus"),
        (["--scheduler", "tcp://a:1", "--workers", "2"], "--workers and --scheduler"),
        (["--scheduler", "none.json"], "no scheduler file"),
    ],
)
def test_impossible_settings_are_usage_errors(folder, options, problem):
    done = predict(folder, folder / "images/00.tif", *options)
    assert done.returncode == 2
    assert problem in done.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--confidence", "0.01"], "confidence"),
        (["--policy", "best_first", "--budget", "3"], "budget"),
    ],
)
def test_the_record_has_the_stop_reason(folder, options, reason):
    done = predict(folder, folder / "images/00.tif", "-o", "-", "-q", *options)
    assert json.loads(done.stdout)["stop_reason"] == reason


def test_a_hint_for_some_failures_is_not_given_for_all(folder, tmp_path):
    write_geotiff(tmp_path / "grey.tif", noise((200, 200), bands=1))
    done = predict(folder, folder / "broken.tif", tmp_path / "grey.tif", "-q")
    assert "hint: see the warnings above" in done.stderr
    assert "grey.tif failed" in done.stderr


def test_an_image_is_never_replaced_by_its_prediction(folder, tmp_path):
    image = tmp_path / "a.tif"
    image.write_bytes((folder / "images/00.tif").read_bytes())
    done = predict(folder, image, "-o", image, "--overwrite")
    assert done.returncode == 7
    assert "is an input" in done.stderr
    assert image.read_bytes() == (folder / "images/00.tif").read_bytes()


def test_an_abstained_image_is_shown_with_its_reason_and_counted():
    cost = PredictionCost(2, 100, 10_000, 0.01, 2000, 30_000, 0.5, 0.25, 0.75)
    levels = (LevelRecord(1, 1, "river", 0.5),)
    abstained = record(
        window(attention=1.0), status="abstained", levels=levels, cost=cost, stop_reason="max_level"
    )
    shown = as_text(abstained)
    assert shown.startswith("scenes/a.tif: abstained: the classes are too close\n  level 1: river")
    batch = Batch(images=1)
    batch.add(abstained)
    assert batch.summary()[0] == "1 of 1 image done, 1 abstained"
