import json
import os
import random
import signal
import subprocess
import sys
import time
from typing import NamedTuple

import numpy as np
import pytest
from rasterio.transform import Affine
from typer.testing import CliRunner

from tests.checkpoints import write_tiny
from tests.commands import tnet
from tests.images import noise, write_geotiff
from tnetcli.cli.app import app
from tnetcli.errors import OutputError, TnetError
from tnetcli.exporters.imagery import open_imagery
from tnetcli.prediction.jsonl import read_lines

CLASSES = ["river", "forest", "town"]
COUNT = 12


def write_model(path, **changes):
    return write_tiny(
        path,
        **{
            "config": {"backbone": "compact", "view_size": 32, "pooling": "mean_max"},
            "classes": CLASSES,
            "bands": ["red", "green", "blue"],
            "normalisation": {"dtype": "uint8", "mean": [128.0] * 3, "std": [60.0] * 3},
            "traversal": {"levels": 3, "keep": [2, 1]},
            **changes,
        },
    )


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


class Done(NamedTuple):
    exit_code: int
    stdout: str
    stderr: str


def in_process(folder, *arguments, model="m.safetensors", env=None, stdin=None):
    given = ["predict", "--model", str(folder / model), "--device", "cpu", *map(str, arguments)]
    return invoke(given, env=env, stdin=stdin)


def invoke(given, env=None, stdin=None):
    """Run the command here, and tell of an error as the command line would."""
    done = CliRunner().invoke(app, given, env=env, input=stdin)
    if not isinstance(done.exception, TnetError):
        assert isinstance(done.exception, SystemExit | None), done.exception
        return Done(done.exit_code, done.stdout, done.stderr)
    error = done.exception
    said = f"{done.stderr}error: {error}\nhint: {error.hint}\n"
    return Done(error.exit_code, done.stdout, said)


def started(folder, *arguments):
    given = ["predict", "--model", folder / "m.safetensors", "--device", "cpu", *arguments]
    return subprocess.Popen(
        [sys.executable, "-m", "tnetcli", *map(str, given)],
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """Return what a process said, and its exit code."""
    _, said = process.communicate(timeout=90)
    return process.returncode, said


def records(path):
    return [line.record for line in read_lines(path)]


def answers(path):
    """Return all that a run found, without the time it took and the order it came in."""
    found = {}
    for record in records(path):
        plain = json.loads(record.model_dump_json())
        cost = plain.pop("cost", {})
        plain["cost"] = {key: value for key, value in cost.items() if "seconds" not in key}
        assert record.id not in found
        found[record.id] = plain
    return found


@pytest.fixture(scope="module")
def whole(folder):
    """Return the answers of a run that nobody disturbed."""
    out = folder / "whole.jsonl"
    done = in_process(folder, folder / "images", "--recursive", "-o", out)
    assert done.exit_code == 0, done.stderr
    return answers(out)


def test_a_summary_tells_the_answer_level_by_level_and_its_cost(folder):
    done = tnet("predict", "images/00.tif", "--model", "m.safetensors", "--levels", "2", cwd=folder)
    assert done.returncode == 0
    first, *rest = done.stdout.splitlines()
    assert first.startswith("images/00.tif: ")
    assert any(first.split(": ")[1].startswith(name) for name in CLASSES)
    assert [line.split(":")[0].strip() for line in rest[:2]] == ["level 1", "level 2"]
    text = done.stdout
    for words in ("looked at 3 windows", "all levels are done", "decoded", "reading", "the model"):
        assert words in text
    assert done.stderr == ""


def test_records_go_to_a_file_a_line_each(folder, whole):
    assert len(whole) == COUNT
    some = next(iter(whole.values()))
    assert some["status"] == "ok"
    assert set(some["probabilities"]) == set(CLASSES)
    assert some["provenance"]["config"]["levels"] == 3
    assert [level["windows"] for level in some["levels"]] == [1, 2, 2]
    assert all(some["fingerprint"] != each["fingerprint"] for each in list(whole.values())[1:])


def test_records_go_to_standard_output(folder, whole):
    done = in_process(folder, folder / "images/03.tif", "-o", "-", "-q")
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    assert found["label"] == whole[str(folder / "images/03.tif")]["label"]


@pytest.mark.parametrize(
    "options",
    [["--batch-size", "1"], ["--batch-size", "5", "--workers", "3"], ["--workers", "1"]],
)
def test_how_the_work_is_done_changes_no_answer(folder, whole, tmp_path, options):
    out = tmp_path / "a.jsonl"
    done = in_process(folder, folder / "images", "--recursive", "-o", out, *options)
    assert done.exit_code == 0
    assert_alike(answers(out), whole)


def assert_alike(found, expected):
    assert found.keys() == expected.keys()
    for id, one in found.items():
        two = expected[id]
        assert (one["status"], one.get("error")) == (two["status"], two.get("error"))
        if one["status"] == "failed":
            continue
        assert one["label"] == two["label"]
        assert [w["path"] for w in one["windows"]] == [w["path"] for w in two["windows"]]
        for name in CLASSES:
            assert one["probabilities"][name] == pytest.approx(two["probabilities"][name], abs=1e-5)


def test_a_draw_depends_on_the_seed_and_the_image_alone(folder, tmp_path):
    options = ["--policy", "sample", folder / "images", "--recursive"]
    found = []
    for number, more in enumerate([[], ["--batch-size", "1"], ["--seed", "1"]]):
        out = tmp_path / f"{number}.jsonl"
        assert in_process(folder, *options, *more, "-o", out).exit_code == 0
        found.append({r.id: [w.path for w in r.windows] for r in records(out)})
    assert found[0] == found[1] != found[2]


def test_bad_images_are_failed_records_and_the_rest_go_on(folder, tmp_path):
    out = tmp_path / "a.jsonl"
    named = ["broken.tif", "images/00.tif", "empty.tif", "gone.tif", "images/01.tif"]
    done = in_process(folder, *(folder / name for name in named), "-o", out)
    assert done.exit_code == 8
    assert [record.status for record in records(out)] == ["failed", "ok", "failed", "failed", "ok"]
    assert "3 of 5 images failed" in done.stderr
    assert "2 of 5 images done, 3 failed" in done.stderr
    for record in records(out):
        if record.error is not None:
            assert all([record.error.message, record.provenance.sha256, record.provenance.config])


def test_only_bad_images_are_another_exit_code(folder):
    assert in_process(folder, folder / "broken.tif", folder / "gone.tif").exit_code == 3
    alone = tnet("predict", folder / "empty.tif", "--model", folder / "m.safetensors", "-q")
    assert alone.returncode == 3
    assert [line.split(":")[0] for line in alone.stderr.splitlines()] == ["error", "hint"]


def test_a_batch_ends_at_the_first_failure_if_that_is_wanted(folder, tmp_path):
    out = tmp_path / "a.jsonl"
    named = [folder / "images/00.tif", folder / "broken.tif", *sorted(folder.glob("images/*.tif"))]
    options = ["-o", out, "--batch-size", "1"]
    assert in_process(folder, *named, *options, "--fail-fast").exit_code == 8
    assert 2 <= len(records(out)) <= 4
    assert in_process(folder, *named, *options, "--max-failures", "1").exit_code == 8
    assert len(records(out)) == len(set(named))


def test_a_run_goes_on_with_what_is_there(folder, tmp_path, whole):
    out = tmp_path / "a.jsonl"
    some = sorted(folder.glob("images/*.tif"))[:4]
    in_process(folder, *some, "-o", out)
    before = out.read_bytes()
    done = in_process(folder, folder / "images", "--recursive", "-o", out)
    assert done.exit_code == 0
    assert "4 kept from before" in done.stderr
    assert out.read_bytes().startswith(before)
    assert_alike(answers(out), whole)


def test_an_image_that_changed_is_looked_at_again(folder, tmp_path):
    image, out = tmp_path / "a.tif", tmp_path / "a.jsonl"
    write_geotiff(image, noise((200, 200), seed=1))
    in_process(folder, image, "-o", out)
    (before,) = records(out)
    write_geotiff(image, noise((200, 200), seed=2))
    in_process(folder, image, "-o", out)
    (after,) = records(out)
    assert before.fingerprint != after.fingerprint
    assert before.probabilities != after.probabilities


def test_what_was_found_of_an_image_that_is_gone_stays(folder, tmp_path):
    image, out = tmp_path / "a.tif", tmp_path / "a.jsonl"
    write_geotiff(image, noise((200, 200), seed=1))
    in_process(folder, image, "-o", out)
    image.unlink()
    assert in_process(folder, image, "-o", out).exit_code == 0
    assert len(records(out)) == 1


@pytest.mark.parametrize(
    ("model", "options"), [("other.safetensors", []), ("m.safetensors", ["--levels", "2"])]
)
def test_output_made_otherwise_is_refused_and_stays(folder, tmp_path, model, options):
    out = tmp_path / "a.jsonl"
    in_process(folder, folder / "images/00.tif", "-o", out)
    before = out.read_bytes()
    done = in_process(folder, folder / "images/01.tif", "-o", out, *options, model=model)
    assert done.exit_code == 7
    assert out.read_bytes() == before
    again = [folder / "images/01.tif", "-o", out, *options, "--overwrite"]
    assert in_process(folder, *again, model=model).exit_code == 0
    assert len(records(out)) == 1


def test_other_bands_are_other_settings(folder, tmp_path):
    out = tmp_path / "a.jsonl"
    in_process(folder, folder / "images/00.tif", "-o", out)
    done = in_process(folder, folder / "images/00.tif", "-o", out, "--bands", "3,2,1")
    assert done.exit_code == 7
    assert "bands" in done.stderr


def test_of_an_image_that_is_gone_the_record_stays_with_bands_of_its_own(folder, tmp_path):
    image, out, manifest = tmp_path / "a.tif", tmp_path / "a.jsonl", tmp_path / "list.csv"
    write_geotiff(image, noise((200, 200), seed=1))
    manifest.write_text('path,bands\na.tif,"3,2,1"\n')
    in_process(folder, "--manifest", manifest, "-o", out)
    image.unlink()
    assert in_process(folder, "--manifest", manifest, "-o", out).exit_code == 0
    manifest.write_text("path,bands\na.tif,\n")
    assert in_process(folder, "--manifest", manifest, "-o", out).exit_code == 3


def test_a_pipe_is_a_bad_image_and_not_waited_for(folder, tmp_path):
    os.mkfifo(tmp_path / "pipe.tif")
    done = in_process(folder, tmp_path / "pipe.tif", folder / "images/00.tif")
    assert done.exit_code == 8


def test_an_overlay_that_cannot_be_is_a_warning_and_the_rest_go_on(folder, tmp_path, monkeypatch):
    def refuse(path, records, **options):
        if "00.tif" in str(path):
            raise OutputError("no such place on Earth")

    monkeypatch.setattr("tnetcli.exporters.export.write_geojson", refuse)
    out, images = tmp_path / "a.jsonl", [folder / f"images/0{number}.tif" for number in range(2)]
    done = in_process(folder, *images, "-o", out, "--overlay", tmp_path / "overlays")
    assert done.exit_code == 0
    assert [len(record.warnings) for record in records(out)] == [1, 0]


def test_a_manifest_names_images_and_how_to_read_them(folder, tmp_path):
    manifest, out = tmp_path / "list.csv", tmp_path / "a.jsonl"
    rows = [
        "path,id,bands",
        f"{folder}/images/00.tif,plain,",
        f"{folder}/images/00.tif,turned,'321",
    ]
    manifest.write_text("\n".join(rows).replace("'321", '"3,2,1"') + "\n")
    assert in_process(folder, "--manifest", manifest, "-o", out).exit_code == 0
    plain, turned = records(out)
    assert (plain.id, turned.id) == ("plain", "turned")
    assert plain.probabilities != turned.probabilities
    assert plain.fingerprint != turned.fingerprint
    assert (plain.reading, turned.reading) == ({}, {"bands": "('3', '2', '1')"})
    with open_imagery(plain) as image, open_imagery(turned) as other:
        own, reversed_ = (each.show((0, 0, 64, 64), 64, 64) for each in (image, other))
    np.testing.assert_array_equal(own[..., 2::-1], reversed_[..., :3])


def test_an_id_that_two_images_have_is_refused(folder, tmp_path):
    manifest = tmp_path / "list.csv"
    manifest.write_text(f"path,id\n{folder}/images/00.tif,a\n{folder}/images/01.tif,a\n")
    assert in_process(folder, "--manifest", manifest).exit_code == 4


def test_a_list_on_standard_input(folder, tmp_path):
    out = tmp_path / "a.jsonl"
    paths = [str(path) for path in sorted(folder.glob("images/*.tif"))[:3]]
    done = in_process(folder, "-", "-0", "-o", out, stdin="\0".join(paths))
    assert done.exit_code == 0
    assert [record.id for record in records(out)] == paths


def test_overlays_are_written_as_it_goes_and_made_up_for(folder, tmp_path):
    out, overlays = tmp_path / "a.jsonl", tmp_path / "overlays"
    images = [folder / "images/00.tif", folder / "images/more/10.tif"]
    in_process(folder, *images, "-o", out)
    assert in_process(folder, *images, "-o", out, "--overlay", overlays).exit_code == 0
    found = sorted(path.relative_to(overlays) for path in overlays.rglob("*.geojson"))
    assert [path.name for path in found] == ["00.tif.geojson", "10.tif.geojson"]
    assert found[0].parent.parts[-1] == "images"
    for path, record in zip(found, records(out), strict=True):
        assert len(json.loads((overlays / path).read_text())["features"]) == len(record.windows)


def test_parts_together_are_the_whole(folder, tmp_path, whole):
    out, everything = tmp_path / "a.jsonl", [folder / "images", "--recursive"]
    for number in range(1, 4):
        options = [*everything, "--shard", f"{number}/3", "-o", out]
        assert in_process(folder, *options).exit_code == 0
    task = {f"SLURM_ARRAY_TASK_{name}": value for name, value in
            {"ID": "7", "COUNT": "4", "MIN": "4", "STEP": "1"}.items()}  # fmt: skip
    parts = sorted(tmp_path.glob("a.*-of-3.jsonl"))
    assert len(parts) == 3
    assert not out.exists()
    merged = invoke(["merge", *map(str, parts), "-o", str(out)])
    assert merged.exit_code == 0
    assert_alike(answers(out), whole)
    assert in_process(folder, *everything, "-o", tmp_path / "b.jsonl", env=task).exit_code == 0
    assert (tmp_path / "b.4-of-4.jsonl").exists()
    lost = invoke(["merge", *map(str, parts[:2]), "-o", str(out), "--overwrite"])
    assert lost.exit_code == 8
    assert "a.3-of-3.jsonl" in lost.stderr


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signal_finishes_what_was_begun(folder, tmp_path, whole, name):
    out, many = tmp_path / "a.jsonl", ["images", "--recursive", "--batch-size", "1"]
    process = started(folder, *many, "-o", out)
    while not (out.exists() and out.stat().st_size):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(getattr(signal, name))
    code, said = finish(process)
    assert code == 75
    assert "run the same command again" in said
    assert finish(started(folder, *many, "-o", out))[0] == 0
    assert_alike({k.split("/", 1)[1]: v for k, v in answers(out).items()},
                 {os.path.relpath(k, folder / "images"): v for k, v in whole.items()})  # fmt: skip


def test_ctrl_c_tells_what_is_kept_and_how_to_go_on(folder, tmp_path):
    for given, hint in (
        (["-o", tmp_path / "a.jsonl"], "what is done is kept: run the same command again"),
        (["-o", "-"], "with -o FILE.jsonl it is kept"),
    ):
        again = [f"images/../images/{number:02}.tif" for number in range(9)]  # other ids
        process = subprocess.Popen(
            [sys.executable, "-m", "tnetcli", "predict", "--model", "m.safetensors", "--device",
             "cpu", *map(str, given), "--batch-size", "1", "images", *again],
            cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        if given[-1] == "-":
            assert json.loads(process.stdout.readline())["status"] == "ok"
        else:
            while not (given[-1].exists() and given[-1].stat().st_size):
                assert process.poll() is None
                time.sleep(0.005)
        process.send_signal(signal.SIGINT)
        shown, said = process.communicate(timeout=90)
        assert process.returncode == 130
        assert said.splitlines()[-2] == "error: interrupted"
        assert said.splitlines()[-1].startswith("hint: ")
        assert hint in said.splitlines()[-1]
        for line in shown.splitlines():
            json.loads(line)  # none is torn


def test_a_strange_file_in_place_of_an_overlay_stays_unless_it_may_go(folder, tmp_path):
    out, overlays, image = tmp_path / "a.jsonl", tmp_path / "overlays", folder / "images/00.tif"
    options = [image, folder / "images/01.tif", "-o", out, "--overlay", overlays]
    strange = overlays / f"_{image}.geojson"
    strange.parent.mkdir(parents=True)
    strange.write_text('{"type": "FeatureCollection", "features": []}')
    done = in_process(folder, *options)
    assert done.exit_code == 7
    assert "--overwrite" in done.stderr
    assert not out.exists()
    assert [path.name for path in overlays.rglob("*.geojson")] == ["00.tif.geojson"]
    assert in_process(folder, *options, "--overwrite").exit_code == 0
    assert json.loads(strange.read_text())["tnet"]["image"] == str(image)
    assert in_process(folder, *options).exit_code == 0  # our own
    out.unlink()
    assert in_process(folder, *options).exit_code == 0


def test_records_are_not_written_to_what_should_be_packed(folder, tmp_path):
    out = tmp_path / "a.jsonl.gz"
    done = in_process(folder, folder / "images/00.tif", "-o", out)
    assert done.exit_code == 2
    assert "hint: name a FILE.jsonl" in done.stderr
    in_process(folder, folder / "images/00.tif", "-o", tmp_path / "a.jsonl")
    assert invoke(["merge", str(tmp_path / "a.jsonl"), "-o", str(out)]).exit_code == 2
    assert not out.exists()


def test_a_name_with_a_line_end_makes_one_line_of_each_message(folder, tmp_path):
    odd = tmp_path / "a\nb\tc.tif"
    odd.write_text("no image")
    good = tmp_path / "good\nimage.tif"
    good.write_bytes((folder / "images/00.tif").read_bytes())
    done = in_process(folder, odd, good, tmp_path / "gone.tif")
    assert done.exit_code == 8
    for line in done.stderr.splitlines():
        assert line.startswith(
            ("warning: ", "failed ", "error: ", "hint: ", "1 of 3 images", "5 w")
        )
    assert "a\\nb\\tc.tif failed" in done.stderr
    assert done.stdout.splitlines()[0].startswith(f"{tmp_path}/good\\nimage.tif: ")


def test_one_is_told_as_one(folder, tmp_path):
    image = folder / "images/00.tif"
    done = in_process(folder, image, "--budget", "1", "-o", tmp_path / "a.jsonl", "--shard", "1/1")
    assert "part 1/1: 1 image, into" in done.stderr
    assert "1 of 1 image done" in done.stderr
    assert "\n1 window, " in done.stderr


def test_killed_again_and_again_it_ends_with_the_same_records(folder, tmp_path, whole):
    out, chance = tmp_path / "a.jsonl", random.Random(3)
    many = ["images", "--recursive", "--batch-size", "1", "-o", out]
    for _ in range(2):
        process = started(folder, *many)
        start = out.stat().st_size if out.exists() else 0
        while not (out.exists() and out.stat().st_size > start) and process.poll() is None:
            time.sleep(0.005)
        time.sleep(chance.random() * 0.05)
        process.kill()
        finish(process)
    assert finish(started(folder, *many))[0] == 0
    assert_alike({k.split("/", 1)[1]: v for k, v in answers(out).items()},
                 {os.path.relpath(k, folder / "images"): v for k, v in whole.items()})  # fmt: skip


def test_values_and_pixels_unlike_those_trained_on_are_warned_of(folder, tmp_path):
    write_model(tmp_path / "m.safetensors", pixel_size=10.0)
    dark = tmp_path / "dark.tif"
    write_geotiff(
        dark, np.full((3, 200, 200), 250, np.uint8), transform=Affine(0.5, 0, 4e5, 0, -0.5, 5e6)
    )
    done = in_process(tmp_path, dark, "-o", "-")
    record = json.loads(done.stdout)
    assert len(record["warnings"]) == 1
    assert "0.5 m, the model was trained on 10 m" in done.stderr


def test_other_types_are_refused_or_rescaled(folder, tmp_path):
    wide = tmp_path / "wide.tif"
    values = noise((200, 200), seed=1)
    write_geotiff(wide, values.astype(np.uint16) * 16)
    done = in_process(folder, wide)
    assert done.exit_code == 3
    assert "-O rescale" in done.stderr
    plain = tmp_path / "plain.tif"
    write_geotiff(plain, values)
    scaled = in_process(folder, wide, "-O", f"rescale=0,{255 * 16}", "-o", "-", "-q")
    same = in_process(folder, plain, "-o", "-", "-q")
    one, two = (json.loads(each.stdout)["probabilities"] for each in (scaled, same))
    assert one == pytest.approx(two, abs=0.02)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["-O", "rescale=5"], 2),
        (["-O", "rescale=9,1"], 2),
        (["--policy", "best_first"], 2),
        (["--shard", "9/3"], 2),
        (["--keep", "0"], 2),
        (["--confidence", "2"], 2),
        (["--device", "abacus"], 2),
        ([], 2),
    ],
)
def test_impossible_wishes_are_usage_errors(folder, options, code):
    image = [folder / "images/00.tif"] if options else []
    done = in_process(folder, *image, *options)
    assert done.exit_code == code


def test_the_record_says_why_it_stopped(folder):
    for options, stop in (
        (["--confidence", "0.01"], "confidence"),
        (["--budget", "2"], "budget"),
        (["--policy", "best_first", "--budget", "3"], "budget"),
    ):
        done = in_process(folder, folder / "images/00.tif", "-o", "-", "-q", *options)
        assert json.loads(done.stdout)["stop_reason"] == stop


def test_lines_on_standard_error_can_be_json(folder, tmp_path):
    named = [folder / "images/00.tif", folder / "broken.tif"]
    done = in_process(folder, *named, "-o", tmp_path / "a.jsonl", "--log-format", "json")
    lines = done.stderr.splitlines()
    told = [json.loads(line) for line in lines if line.startswith("{")]
    assert {each["level"] for each in told} == {"info", "warning"}
    bad = tnet("predict", folder / "gone.tif", "--model", folder / "m.safetensors",
               "--log-format", "json")  # fmt: skip
    (line,) = bad.stderr.splitlines()
    assert (json.loads(line)["level"], bad.returncode) == ("error", 3)
    assert json.loads(line)["hint"]


def test_a_hint_that_fits_some_failures_only_is_not_given_for_all(folder, tmp_path):
    write_geotiff(tmp_path / "grey.tif", noise((200, 200), bands=1))
    some = [folder / "broken.tif", tmp_path / "grey.tif"]
    assert "hint: the lines above say why" in in_process(folder, *some, "-q").stderr
    assert "grey.tif failed" in in_process(folder, *some, "-q").stderr


def test_a_run_is_gone_on_with_where_an_overlay_cannot_be(folder, tmp_path, monkeypatch):
    out, image = tmp_path / "a.jsonl", folder / "images/00.tif"
    in_process(folder, image, "-o", out)

    def refuse(path, records, **options):
        raise OutputError("no such place on Earth")

    monkeypatch.setattr("tnetcli.exporters.export.write_geojson", refuse)
    done = in_process(folder, image, "-o", out, "--overlay", tmp_path / "overlays")
    assert done.exit_code == 0
    assert "no overlay" in done.stderr


@pytest.fixture(scope="module")
def night(tmp_path_factory):
    """Return a folder of 200 images, two of them bad, and what an undisturbed run finds."""
    folder = tmp_path_factory.mktemp("night")
    write_model(folder / "m.safetensors")
    (folder / "images").mkdir()
    for number in range(198):
        write_geotiff(folder / f"images/{number:03}.tif", noise((160, 160), seed=number))
    for name in ("bad", "worse"):
        (folder / f"images/{name}.tif").write_text(name)
    code, _ = finish(started(folder, "images", "-o", "whole.jsonl"))
    assert code == 8
    return folder, answers(folder / "whole.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
def test_a_night_of_stops_ends_as_one_without(night, tmp_path, name):
    folder, whole = night
    out, chance = tmp_path / "a.jsonl", random.Random(name)
    codes = []
    for _ in range(5):
        process = started(folder, "images", "-o", out)
        before = out.stat().st_size if out.exists() else 0
        while not (out.exists() and out.stat().st_size > before) and process.poll() is None:
            time.sleep(0.002)
        time.sleep(chance.random() * 0.1)
        process.send_signal(getattr(signal, name))
        codes.append(finish(process)[0])
    assert set(codes) == {75 if name == "SIGTERM" else -signal.SIGKILL}
    assert len(list(read_lines(out))) < 198
    assert finish(started(folder, "images", "-o", out))[0] == 8
    assert_alike(answers(out), whole)


@pytest.mark.slow
def test_four_parts_of_a_night_are_the_night(night, tmp_path):
    folder, whole = night
    for number in range(1, 5):
        finish(started(folder, "images", "-o", tmp_path / "a.jsonl", "--shard", f"{number}/4"))
    parts = sorted(map(str, tmp_path.glob("a.*-of-4.jsonl")))
    assert invoke(["merge", *parts, "-o", str(tmp_path / "all.jsonl")]).exit_code == 8
    assert_alike(answers(tmp_path / "all.jsonl"), whole)


def test_attention_is_checked_where_it_is_asked_for(folder, tmp_path):
    image = folder / "images/00.tif"
    arguments = (image, "--check-attention", "-o", tmp_path / "a.jsonl", "--overlay", tmp_path)
    assert in_process(folder, *arguments).exit_code == 0
    (line,) = read_lines(tmp_path / "a.jsonl")
    check = line.record.attention_check
    assert 0 <= check.random <= 1
    assert check.draws == 3
    (overlay,) = tmp_path.rglob("*.geojson")
    assert json.loads(overlay.read_text())["tnet"]["attention_check"]["draws"] == 3
    said = in_process(folder, image, "--check-attention")
    assert "no attention to check" not in said.stderr
    flat = in_process(folder, image, "--check-attention", "--levels", "1")
    assert "only whole images are seen: there is no attention to check" in flat.stderr
    assert "with its closest windows hidden" in said.stdout
    plain = in_process(folder, image, "-o", "-")
    assert json.loads(plain.stdout)["attention_check"] is None
    assert {**json.loads(line.text)["probabilities"]} == json.loads(plain.stdout)["probabilities"]


def test_records_with_and_without_a_check_do_not_share_a_file(folder, tmp_path):
    image, output = folder / "images/00.tif", tmp_path / "a.jsonl"
    assert in_process(folder, image, "-o", output).exit_code == 0
    done = in_process(folder, image, "-o", output, "--check-attention")
    assert done.exit_code == 7
    assert "check_attention was nothing, now True" in done.stderr


def test_an_image_is_never_replaced_by_its_prediction(folder, tmp_path):
    image = tmp_path / "a.tif"
    image.write_bytes((folder / "images/00.tif").read_bytes())
    done = in_process(folder, image, "-o", image, "--overwrite")
    assert done.exit_code == 7
    assert "is read from" in done.stderr
    assert image.read_bytes() == (folder / "images/00.tif").read_bytes()
