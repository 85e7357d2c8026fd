"""`tnet predict --crop` predicts as on images that were cut out by hand."""

import json

import numpy as np
import pytest
from rasterio.transform import Affine

from tests.commands import tnet
from tests.images import noise, write_geotiff
from tests.predicting import predict, records, write_model
from tnetcli.exporters.base import export

BOXES = {"a": (40, 30, 200, 190), "b": (0, 0, 150, 170), "c": (100, 110, 260, 280)}
UTM = Affine(10.0, 0.0, 399960.0, 0.0, -10.0, 5000040.0)


def write_list(path, boxes, suffix="tif"):
    rows = [f"{name}.{suffix},{name},{' '.join(map(str, box))}" for name, box in boxes.items()]
    path.write_text("\n".join(["path,id,box", *rows]) + "\n")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cropping")
    write_model(folder / "m.safetensors")
    (folder / "cut").mkdir()
    for seed, (name, (left, top, right, bottom)) in enumerate(BOXES.items()):
        pixels = noise((260, 280), seed=seed)
        place = {"crs": "EPSG:32633", "transform": UTM}
        write_geotiff(folder / f"{name}.tif", pixels, **place)
        moved = {**place, "transform": UTM @ Affine.translation(left, top)}
        write_geotiff(folder / f"cut/{name}.tif", pixels[:, top:bottom, left:right], **moved)
    write_list(folder / "boxes.csv", BOXES)
    write_list(folder / "cut" / "all.csv", BOXES)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    crops = predict(
        folder, "--manifest", folder / "boxes.csv", "--crop", "box", "-o", folder / "crops.jsonl"
    )
    cut = predict(folder, "--manifest", folder / "cut" / "all.csv", "-o", folder / "cut.jsonl")
    assert (crops.returncode, cut.returncode) == (0, 0), crops.stderr + cut.stderr
    return records(folder / "crops.jsonl"), records(folder / "cut.jsonl")


def test_crops_are_predicted_as_images_cut_out_by_hand(found):
    for crop, cut in zip(*found, strict=True):
        assert (crop.id, crop.label, crop.stop_reason) == (cut.id, cut.label, cut.stop_reason)
        assert crop.probability == pytest.approx(cut.probability, abs=1e-5)
        assert [window.path for window in crop.windows] == [window.path for window in cut.windows]


def test_windows_are_in_pixels_of_the_whole_image(found, folder):
    for crop, cut in zip(*found, strict=True):
        left, top, right, bottom = BOXES[crop.id]
        assert (crop.width, crop.height, crop.offset) == (260, 280, (0, 0))
        assert crop.georeference.transform == tuple(UTM)[:6]
        assert crop.image == str(folder / f"{crop.id}.tif")
        assert crop.windows[0].box == (left, top, right, bottom)
        assert crop.reading["crop"] == f"{left} {top} {right} {bottom}"
        for ours, theirs in zip(crop.windows, cut.windows, strict=True):
            moved = np.add(theirs.box, (left, top, left, top))
            assert ours.box == pytest.approx(tuple(moved))
        assert crop.cost.pixels_total == 260 * 280
        assert crop.cost.fraction_decoded == crop.cost.pixels_decoded / (260 * 280)


def test_crops_are_resumed_and_a_changed_box_is_predicted_again(found, folder, tmp_path):
    kept = tmp_path / "kept.jsonl"
    kept.write_bytes((folder / "crops.jsonl").read_bytes())
    again = ["--manifest", folder / "boxes.csv", "--crop", "box", "-o", kept]
    before = kept.read_bytes()
    assert predict(folder, *again).returncode == 0
    assert kept.read_bytes() == before
    lines = (folder / "boxes.csv").read_text().splitlines()  # in another order: the same crops
    other = folder / "other.csv"
    other.write_text("\n".join([lines[0], *reversed(lines[1:])]) + "\n")
    assert predict(folder, "--manifest", other, *again[2:]).returncode == 0
    assert kept.read_bytes() == before
    write_list(other, BOXES | {"b": (10, 10, 150, 170)})
    assert predict(folder, "--manifest", other, *again[2:]).returncode == 0
    now = {record.id: record.windows[0].box for record in records(kept)}
    assert now["b"] == (10, 10, 150, 170)
    assert now["a"] == BOXES["a"]


def test_context_shows_more(folder, tmp_path):
    given = ["--manifest", folder / "boxes.csv", "--crop", "context", "-o", tmp_path / "o.jsonl"]
    assert predict(folder, *given).returncode == 0
    first = records(tmp_path / "o.jsonl")[0].windows[0].box
    assert first == (28, 18, 212, 202)  # 160 pixels grow by 15 %


@pytest.mark.parametrize(
    ("box", "says"),
    [
        ("", "line 2: no box to crop the image to"),
        ("1 2 3", "line 2: a box is not four numbers"),
        ("9 9 3 3", "line 2: a box is empty"),
        ("inf 0 9 9", "line 2: a box is empty"),
        ("0 0 9 9;1 1 5 5", "line 2: 2 boxes"),
    ],
)
def test_a_row_without_a_good_box_is_refused(folder, box, says):
    (folder / "bad.csv").write_text(f"path,box\na.tif,{box}\n")
    done = predict(folder, "--manifest", folder / "bad.csv", "--crop", "box")
    assert done.returncode == 4
    assert says in done.stderr
    assert done.stderr.count("error:") == done.stderr.count("hint:") == 1


def test_a_box_outside_is_a_failed_record(folder, tmp_path):
    (folder / "bad.csv").write_text("path,box\na.tif,250 0 261 20\nb.tif,0 0 99 99\n")
    given = ["--manifest", folder / "bad.csv", "--crop", "box", "-o", tmp_path / "o.jsonl"]
    assert predict(folder, *given).returncode == 8
    failed, good = records(tmp_path / "o.jsonl")
    assert good.status == "ok"
    assert failed.error.type == "ManifestError"
    assert "bad.csv`: line 2: the box `250 0 261 20` is not inside `a.tif`" in failed.error.message
    (folder / "bad.csv").write_text("path,box\na.tif,250 0 261 20\n")
    assert predict(folder, *given[:4]).returncode == 4


def test_a_crop_wants_a_manifest(folder):
    done = predict(folder, folder / "a.tif", "--crop", "box")
    assert done.returncode == 2
    assert "only a manifest has" in done.stderr


def test_an_evaluation_crops_as_the_model_was_trained_or_as_given(folder, tmp_path):
    rows = [f"{name}.tif,river,{' '.join(map(str, box))}" for name, box in BOXES.items()]
    (folder / "labels.csv").write_text("\n".join(["path,label,box", *rows]) + "\n")
    (folder / "cut" / "labels.csv").write_text("\n".join(["path,label,box", *rows]) + "\n")
    trained = write_model(tmp_path / "t.safetensors", recipe={"data": {"crop": "box"}})

    def loss_of(model, data, *more):
        given = ["evaluate", "--model", model, "--data", data, "--json", "-q", *more]
        done = tnet(*given)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["scores"]["log_loss"]

    cut = loss_of(folder / "m.safetensors", folder / "cut" / "labels.csv")
    whole = loss_of(folder / "m.safetensors", folder / "labels.csv")
    assert cut != pytest.approx(whole, abs=1e-4)
    boxes = loss_of(folder / "m.safetensors", folder / "labels.csv", "--crop", "box")
    assert boxes == pytest.approx(cut, abs=1e-5)
    assert loss_of(trained, folder / "labels.csv") == pytest.approx(cut, abs=1e-5)
    assert loss_of(trained, folder / "labels.csv", "--crop", "none") == pytest.approx(whole)


def test_a_model_trained_on_boxes_warns_about_whole_images(folder, tmp_path):
    trained = write_model(tmp_path / "t.safetensors", recipe={"data": {"crop": "box"}})
    given = ["predict", "--model", trained, "--manifest", folder / "boxes.csv"]
    whole = tnet(*given)
    assert whole.returncode == 0, whole.stderr
    assert whole.stderr.count("the model was trained on boxes") == 1
    assert "trained on" not in tnet(*given, "--crop", "context").stderr
    assert "--crop box" in tnet("models", trained).stdout
    assert "--crop" not in tnet("models", folder / "m.safetensors").stdout


def test_windows_of_whole_images_and_crops_do_not_go_together(folder, tmp_path):
    (tmp_path / "w.csv").write_text("id,left,top,right,bottom\na,0,0,64,64\n")
    options = ["--manifest", folder / "boxes.csv", "--regions", tmp_path / "w.csv"]
    done = predict(folder, *options, "--crop", "box", "-o", tmp_path / "out.jsonl")
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "error: --regions and --crop are both given",
        "hint: choose one of them",
    ]
    assert not (tmp_path / "out.jsonl").exists()


def test_outlines_of_crops_lie_where_those_of_cut_images_do(found, folder):
    outlines = []
    for name in ("crops", "cut"):
        out = export(folder / f"{name}.jsonl", folder / f"{name}.geojson")
        features = json.loads(out.read_text())["features"]
        outlines.append([feature["geometry"]["coordinates"] for feature in features])
    for ours, theirs in zip(*outlines, strict=True):
        assert np.allclose(ours, theirs, atol=2e-7)
