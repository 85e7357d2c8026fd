import json
import os

import numpy as np
import pytest
from PIL import Image

from tests.commands import DATA, tnet
from tests.images import noise, write_geotiff

WARNING_LINE = "  warning"


@pytest.fixture
def scene(tmp_path):
    return write_geotiff(tmp_path / "scene.tif", noise((512, 400)), overviews=[2, 4], nodata=0)


def grain(side):
    return np.random.default_rng(0).integers(1, 200, (1, side, side), np.uint8)


def facts(*arguments, **environment):
    done = tnet("info", "--json", *arguments, **environment)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_text_shows_size_bands_overviews_mask_and_place(scene):
    shown = tnet("info", scene)
    assert shown.returncode == 0
    assert shown.stderr == ""
    for part in ("512 x 400", "3 of uint8: red, green, blue", "2, 4", "nodata 0", "EPSG:32633",
                 "10 x 10 m per pixel", "64 x 64 tiles", "deflate", "raster"):  # fmt: skip
        assert part in shown.stdout


def test_json_is_one_line_per_image(scene):
    (record,) = facts(scene)
    assert record["status"] == "ok"
    assert (record["width"], record["height"]) == (512, 400)
    assert record["transform"] == [10.0, 0.0, 399960.0, 0.0, -10.0, 5000040.0]
    assert [each["factor"] for each in record["overviews"]] == [2.0, 4.0]
    assert record["metres_per_pixel"] == pytest.approx([10.0, 10.0])


def test_what_a_prediction_would_decode_follows_levels_and_view_size(tmp_path):
    image = write_geotiff(tmp_path / "a.tif", grain(2048), overviews=[2, 4, 8])
    shallow, deep = (
        facts(image, "--levels", n, "--view-size", 128)[0]["prediction"] for n in (1, 3)
    )
    assert (shallow["windows"], deep["windows"]) == (1, 5)
    # The whole image at 128 px comes from the 256 px overview, which is decoded whole.
    assert shallow["pixels_decoded"] == 256 * 256
    # A cell of 1024 px from the same overview touches 2 x 2 or 3 x 3 of its 64 px blocks.
    assert 256 * 256 < deep["pixels_decoded"] < 0.2 * 2048 * 2048


def test_the_traversal_stops_at_native_resolution(scene):
    # Cells of 256 x 200 pixels fill a view of 224 on their longer side; their own cells do not.
    (record,) = facts(scene, "--levels", 6)
    assert record["prediction"]["levels"] == 2


def test_keep_is_the_number_of_cells_followed(tmp_path):
    image = write_geotiff(tmp_path / "a.tif", grain(2048), overviews=[2, 4, 8])
    (record,) = facts(image, "--view-size", 64, "--keep", "4,2")
    assert record["prediction"]["windows"] == 1 + 4 + 8


@pytest.mark.parametrize("keep", [None, "2,1"])
def test_the_counted_cost_of_a_model_is_an_upper_bound(tmp_path, keep):
    image = write_geotiff(tmp_path / "a.tif", noise((3000, 2000)), overviews=[2, 4, 8])
    asked = [] if keep is None else ["--keep", keep]
    (record,) = facts(image, "--model", "default", *asked)
    counted = record["prediction"]
    done = tnet("predict", image, *asked, "-o", tmp_path / "a.jsonl")
    assert done.returncode == 0, done.stderr
    cost = json.loads((tmp_path / "a.jsonl").read_text())["cost"]
    assert counted["view_size"] == 128
    assert counted["windows"] == (9 if keep is None else 5)
    assert 0.4 * counted["windows"] < cost["windows"] <= counted["windows"]
    assert 0 < cost["pixels_decoded"] <= counted["pixels_decoded"]


def test_a_model_and_a_view_size_cannot_both_be_given(scene):
    done = tnet("info", "--model", "default", "--view-size", 64, scene)
    assert done.returncode == 2
    assert "--view-size" in done.stderr


def test_an_unknown_model_ends_with_5(scene):
    assert tnet("info", "--model", "none", scene).returncode == 5


def test_unused_numbers_of_keep_are_warned_about(scene):
    done = tnet("info", "--levels", 2, "--keep", "4,2,1", scene)
    assert done.returncode == 0
    assert done.stderr == "warning: 2 levels use the first 1 of keep 4,2,1\n"
    assert tnet("info", "--levels", 1, scene).stderr == ""


def test_an_image_that_cannot_be_read_ends_with_3_and_a_hint(tmp_path):
    (tmp_path / "scene.tif").write_text("not an image")
    done = tnet("info", tmp_path / "scene.tif")
    assert done.returncode == 3
    assert done.stdout == ""
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["error", "hint"]


def test_one_bad_image_does_not_hide_the_others(scene, tmp_path):
    (tmp_path / "bad.tif").write_bytes(b"")
    done = tnet("info", "--json", tmp_path / "bad.tif", scene)
    assert done.returncode == 8
    failed, good = (json.loads(line) for line in done.stdout.splitlines())
    assert failed["status"] == "failed"
    assert failed["error"]["type"] == "ImageError"
    assert failed["error"]["hint"]
    assert good["status"] == "ok"


def test_a_folder_gives_its_images_and_not_their_sidecars(tmp_path, scene):
    write_geotiff(tmp_path / "b.tif", noise((300, 300)), overviews=[2], external_overviews=True)
    (tmp_path / "notes.txt").write_text("nothing")
    (tmp_path / "deeper").mkdir()
    write_geotiff(tmp_path / "deeper" / "c.tif", noise((64, 64)))
    names = [os.path.basename(record["image"]) for record in facts(tmp_path)]
    assert names == ["b.tif", "scene.tif"]
    names = [os.path.basename(record["image"]) for record in facts(tmp_path, "--recursive")]
    assert names == ["b.tif", "c.tif", "scene.tif"]


def test_a_glob_in_quotes_is_expanded(tmp_path, scene):
    assert len(facts(tmp_path / "*.tif")) == 1


def test_a_glob_that_matches_nothing_is_reported(tmp_path):
    done = tnet("info", tmp_path / "*.tif")
    assert done.returncode == 3
    assert "*.tif" in done.stderr


@pytest.mark.parametrize(("separator", "flags"), [("\n", []), ("\0", ["-0"])])
def test_a_list_on_standard_input_names_images(tmp_path, scene, separator, flags):
    other = write_geotiff(tmp_path / "two words.tif", noise((64, 64)))
    done = tnet("info", "--json", *flags, "-", stdin=f"{scene}{separator}{other}{separator}")
    assert [json.loads(line)["image"] for line in done.stdout.splitlines()] == [
        str(scene),
        str(other),
    ]


def test_a_manifest_names_images_relative_to_itself(tmp_path, scene):
    (tmp_path / "list.csv").write_text("id,path\na,scene.tif\n")
    done = tnet("info", "--json", "--manifest", tmp_path / "list.csv", cwd="/")
    assert json.loads(done.stdout)["status"] == "ok"


@pytest.mark.parametrize(
    "text",
    [
        "id,file\na,scene.tif\n",
        "",
        "path\n \n",
        "path\n\xff",
        "path,path\na.tif,b.tif\n",
        'path\n"a.tif\n',
        None,
    ],
)
def test_a_wrong_manifest_ends_with_4(tmp_path, text):
    if text is not None:
        (tmp_path / "list.csv").write_bytes(text.encode("latin-1"))
    done = tnet("info", "--manifest", tmp_path / "list.csv")
    assert done.returncode == 4
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["error", "hint"]


def test_missing_overviews_and_strips_are_warned_about(tmp_path):
    image = grain(4224)
    write_geotiff(tmp_path / "flat.tif", image, blocksize=None)
    done = tnet("info", tmp_path / "flat.tif", TNET_CACHE=str(tmp_path / "cache"))
    warnings = [line for line in done.stdout.splitlines() if line.startswith(WARNING_LINE)]
    assert any("no overviews" in line and "tnet pyramid" in line for line in warnings)
    assert any("strips" in line for line in warnings)
    assert not (tmp_path / "cache").exists()  # no pixel was decoded


def test_overviews_can_be_required(tmp_path):
    write_geotiff(tmp_path / "flat.tif", grain(4224))
    done = tnet("info", "-O", "overviews=require", tmp_path / "flat.tif")
    assert done.returncode == 3
    assert "tnet pyramid" in done.stderr


def test_bands_nodata_and_mpp_can_be_given(scene):
    (record,) = facts(scene, "--bands", "3,red", "-O", "nodata=7", "-O", "mpp=0.5")
    assert record["bands"] == ["blue", "red"]
    assert record["nodata"] == 7
    assert (record["microns_per_pixel"], record["microns_source"]) == ([0.5, 0.5], "mpp")


def test_an_impossible_resolution_is_wrong_usage(scene):
    done = tnet("info", "-O", "mpp=5000", scene)
    assert done.returncode == 2


def test_a_reader_can_be_chosen(tmp_path):
    Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(tmp_path / "a.png")
    (chosen,) = facts(tmp_path / "a.png")
    (forced,) = facts("--reader", "raster", tmp_path / "a.png")
    assert (chosen["reader"], forced["reader"]) == ("image", "raster")


def real_images():
    if not DATA.exists():
        return []
    geo = sorted(p for p in (DATA / "geo").rglob("*") if p.suffix.lower() in (".tif", ".ovr"))
    slides = sorted(p for p in (DATA / "wsi").rglob("*") if p.suffix in (
        ".svs", ".ndpi", ".qptiff", ".dcm", ".mrxs", ".tiff", ".tif", ".zip"))  # fmt: skip
    zarrs = [p for p in sorted((DATA / "wsi" / "zarr").rglob("*.zarr")) if p.is_dir()]
    return geo + slides + zarrs


@pytest.mark.skipif(not DATA.exists(), reason="real images are not beside this clone")
def test_every_real_image_is_described_or_fails_with_a_hint():
    images = real_images()
    done = tnet("info", "--json", *images)
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(records) == len(images) > 50
    assert "Traceback" not in done.stderr
    for record in records:
        if record["status"] == "failed":
            assert record["error"]["type"] == "ImageError", record
            assert record["error"]["hint"], record
            assert "hostile" in record["image"] or "zarr" in record["image"], record
        else:
            assert record["gigapixels"] > 0


@pytest.mark.parametrize("bands", ["", "1,,2"])
def test_a_gap_in_the_list_of_bands_is_wrong_usage(scene, bands):
    assert tnet("info", "--bands", bands, scene).returncode == 2


def test_a_traversal_of_too_many_regions_is_wrong_usage(tmp_path):
    image = write_geotiff(tmp_path / "a.tif", grain(2048), overviews=[2, 4, 8])
    done = tnet("info", "--levels", 12, "--keep", 9, "--view-size", 8, image)
    assert done.returncode == 2
    assert "--keep" in done.stderr


def test_a_loop_of_links_ends(tmp_path, scene):
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "self").symlink_to("self")
    assert len(facts(tmp_path, "--recursive")) == 1


def test_a_list_with_a_byte_order_mark_and_crlf_is_read(scene):
    done = tnet("info", "--json", "-", stdin=f"\ufeff{scene}\r\n\r\n")
    assert done.returncode == 0


@pytest.mark.parametrize("key", ["z", "t"])
def test_a_plane_that_does_not_exist_fails(scene, key):
    assert tnet("info", "-O", f"{key}=0", scene).returncode == 0
    done = tnet("info", "-O", f"{key}=3", scene)
    assert done.returncode == 3
    assert f"{key} = 0..0" in done.stderr


def test_a_name_cannot_steer_the_terminal(tmp_path):
    done = tnet("info", write_geotiff(tmp_path / "a\x1b[31m.tif", noise((60, 40))))
    assert done.returncode == 0
    assert "a\\x1b[31m.tif" in done.stdout
    assert "\x1b" not in done.stdout
