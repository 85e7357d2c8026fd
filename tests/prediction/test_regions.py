import json

import numpy as np
import pytest
import torch

from tests.exporters.records import failed, record, replace, window
from tests.images import noise, write_geotiff
from tnetcli.data.normalize import Normalisation
from tnetcli.errors import ImageError, ManifestError
from tnetcli.geometry import Size, Window
from tnetcli.models.registry import build_model
from tnetcli.prediction.inference import Inference
from tnetcli.prediction.predictor import RegionFile
from tnetcli.readers.detect import open_image
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import Fixed, ScoredRegion, build_policy

SIZE = Size(4000, 3000)
TWO = record(
    window("root", (0, 0, 4000, 3000), 1.0),
    window("root/0-0", (0, 0, 100, 80), 0.2),
    window("root/1-2", (50, 60, 700, 800), 0.7),
    window("root/0-1", (-20, 0, 100, 80), 0.7),
    window("root/1-2/0-0", (50, 60, 70, 80), 0.9),
    image="scenes/a.tif",
)
BROKEN = failed("b.tif", id="b")


def write(path, *records):
    path.write_text("".join(f"{each.model_dump_json()}\n" for each in records))
    return RegionFile(path)


def table(path, text):
    path.write_text(text)
    return RegionFile(path)


class TestRecords:
    @pytest.fixture
    def file(self, tmp_path):
        return write(tmp_path / "a.jsonl", TWO, BROKEN)

    def test_regions_of_level_2_are_ordered_by_attention(self, file):
        found = file.of("scenes/a.tif", "anywhere.tif", SIZE)
        assert [(each.window.box, each.attention) for each in found] == [
            ((50, 60, 700, 800), 0.7),
            ((-20, 0, 100, 80), 0.7),  # of a square around an image: past its edge
            ((0, 0, 100, 80), 0.2),
        ]

    def test_an_image_of_another_id_is_known_by_its_path(self, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        file = write(tmp_path / "a.jsonl", TWO)
        assert len(file.of("a", "./scenes/../scenes/a.tif", SIZE)) == 3
        assert len(file.of("a", str(tmp_path / "scenes/a.tif"), SIZE)) == 3

    def test_an_image_that_is_not_named_fails(self, file):
        with pytest.raises(ImageError, match=r"has no regions of `c.tif`") as caught:
            file.of("c.tif", "c.tif", SIZE)
        assert "same path or id" in caught.value.hint

    def test_an_image_whose_prediction_failed_fails(self, file):
        with pytest.raises(ImageError, match="has no regions of `b`") as caught:
            file.of("b", "b.tif", SIZE)
        assert "failed predictions have no regions" in caught.value.hint

    def test_an_image_of_another_size_fails(self, file):
        with pytest.raises(ImageError, match=r"has 4000 x 2999 pixels, .* of 4000 x 3000"):
            file.of("scenes/a.tif", "", Size(4000, 2999))

    def test_a_window_that_shows_nothing_of_its_image_fails(self, tmp_path):
        far = record(window("root/0-0", (4000, 0, 4100, 80)))
        with pytest.raises(ImageError, match=r"is outside `scenes/a.tif`"):
            write(tmp_path / "a.jsonl", far).of("scenes/a.tif", "", SIZE)

    def test_a_prediction_with_one_level_has_no_regions(self, tmp_path, caplog):
        whole = record(window("root", (0, 0, 4000, 3000), 1.0))
        assert write(tmp_path / "a.jsonl", whole).of("scenes/a.tif", "", SIZE) == ()
        assert "has no regions of level 2" in caplog.text

    def test_some_images_without_regions_give_no_warning(self, tmp_path, caplog):
        whole = replace(record(window("root", (0, 0, 4000, 3000), 1.0)), id="b", image="b.tif")
        write(tmp_path / "a.jsonl", TWO, whole)
        assert not caplog.records

    def test_a_share_that_was_rounded_up_is_1(self, tmp_path):
        sure = record(window("root/0-0", (0, 0, 10, 10), 1.0000001))
        (region,) = write(tmp_path / "a.jsonl", sure).of("scenes/a.tif", "", SIZE)
        assert region.attention == 1

    def test_the_digest_follows_the_content(self, tmp_path):
        one = write(tmp_path / "a.jsonl", TWO).digest
        assert write(tmp_path / "b.jsonl", TWO).digest == one
        assert write(tmp_path / "a.jsonl", BROKEN).digest != one

    @pytest.mark.parametrize(
        ("change", "problem"),
        [
            ({"box": [5, 5, 5, 9]}, "thinner than"),
            ({"attention": -1}, "attention` is -1: "),
            ({"attention": 7}, "attention` is 7: "),
            ({"box": [5, 5]}, r"box\[2\]` is missing"),
        ],
    )
    def test_records_that_cannot_be_are_refused(self, change, problem, tmp_path):
        data = json.loads(TWO.model_dump_json())
        data["windows"][1] |= change
        (tmp_path / "a.jsonl").write_text(json.dumps(data) + "\n")
        with pytest.raises(ManifestError, match=problem):
            RegionFile(tmp_path / "a.jsonl")

    def test_two_records_of_an_image_are_refused(self, tmp_path):
        with pytest.raises(ManifestError, match=r"two predictions of `scenes/a.tif`"):
            write(tmp_path / "a.jsonl", TWO, TWO)

    def test_what_is_no_record_is_refused(self, tmp_path):
        (tmp_path / "a.jsonl").write_text('{"a": 1}\n')
        with pytest.raises(ManifestError, match="record"):
            RegionFile(tmp_path / "a.jsonl")


class TestTable:
    def test_windows_of_an_image_count_alike_in_the_order_of_their_rows(self, tmp_path):
        text = "path,left,top,right,bottom\na.tif,1,2,30.5,40\nb.tif,0,0,1,1\na.tif,0,0,9,9\n"
        file = table(tmp_path / "w.csv", text)
        found = file.of("any", str(tmp_path / "a.tif"), SIZE)
        assert [each.window for each in found] == [Window(1, 2, 29.5, 38), Window(0, 0, 9, 9)]
        assert {each.attention for each in found} == {0.5}

    def test_a_repeated_region_counts_once(self, tmp_path):
        rows = "a,0,0,9,9\n" * 3 + "a,5,5,9,9\n"
        file = table(tmp_path / "w.csv", f"id,left,top,right,bottom\n{rows}").of("a", "", SIZE)
        assert file == (
            ScoredRegion(Window(0, 0, 9, 9), 0.5),
            ScoredRegion(Window(5, 5, 4, 4), 0.5),
        )

    def test_images_may_be_named_by_id(self, tmp_path):
        text = "id,right,bottom,left,top\na,30,40,1,2\n"
        (found,) = table(tmp_path / "w.csv", text).of("a", "elsewhere/a.tif", SIZE)
        assert found.window.box == (1, 2, 30, 40)

    @pytest.mark.parametrize("box", ["-1,0,5,5", "0,0,4000.5,5", "0,2990,5,3001"])
    def test_a_window_past_an_edge_fails(self, box, tmp_path):
        file = table(tmp_path / "w.csv", f"id,left,top,right,bottom\na,{box}\n")
        with pytest.raises(ImageError, match=r"outside `a`, 4000 x 3000 pixels") as caught:
            file.of("a", "a.tif", SIZE)
        assert "full-resolution" in caught.value.hint

    @pytest.mark.parametrize(
        ("text", "problem"),
        [
            ("id,left,top,right,bottom\na,5,0,5,9\n", "line 2: not a region: `5, 0, 5, 9`"),
            ("id,left,top,right,bottom\na,5,9,7,3\n", "line 2: not a region"),
            ("id,left,top,right,bottom\na,0,0,inf,9\n", "line 2: not a region"),
            ("id,left,top,right,bottom\na,0,0,,9\n", "line 2: not a region"),
            ("id,left,top,right,bottom\n,0,0,1,9\n", "line 2: no image"),
            ("left,top,right,bottom\n0,0,1,9\n", "no column `path` or `id`"),
            ("id,x,y\na,0,0\n", "no column `left`"),
            ("", "no column"),
        ],
    )
    def test_a_wrong_row_is_an_error(self, text, problem, tmp_path):
        with pytest.raises(ManifestError, match=problem):
            table(tmp_path / "w.csv", text)


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(ManifestError, match=r"cannot read the regions .*No such file") as caught:
        RegionFile(tmp_path / "none.jsonl")
    assert "CSV" in caught.value.hint


def test_all_images_that_are_not_named_are_counted_at_once(tmp_path):
    file = table(tmp_path / "w.csv", "id,left,top,right,bottom\na,0,0,9,9\n")
    file.require([("a", "a.tif")])
    with pytest.raises(ManifestError, match="no regions of 2 of 3 images, such as `b`"):
        file.require([("a", "a.tif"), ("b", "b.tif"), ("c", "c.tif")])


@pytest.mark.parametrize(
    ("family", "arguments"),
    [
        ("tnet", {"backbone": "compact", "view_size": 32}),
        ("anchornet", {"backbone": "compact", "view_size": 128}),
        ("two_stream", {"backbone": "compact", "view_size": 32, "state_size": 8}),
    ],
)
def test_every_family_with_a_second_level_reads_fixed_regions(family, arguments, tmp_path):
    torch.manual_seed(0)
    model = build_model(family, arguments, classes=3, bands=3)
    path = write_geotiff(tmp_path / "a.tif", noise((300, 400), seed=2))
    regions = [
        ScoredRegion(Window(7.5, 10, 50, 30), 0.25),
        ScoredRegion(Window(300, 100, 90, 120), 0.75),
    ]
    unit = Normalisation.to_unit_range("uint8", 3)
    config = TraversalConfig(levels=2, keep=(2,))
    with open_image(path) as reader, Inference(model, unit) as inference:
        (result,) = inference.run([reader], config, [Fixed(build_policy(config), regions)])
    assert [node.region.path for node in result.nodes] == ["root", "root/w1", "root/w2"]
    assert [node.region.window for node in result.nodes[1:]] == [each.window for each in regions]
    assert [node.rank for node in result.nodes] == [1, 2, 1]
    assert np.isfinite(result.logits).all()
    assert np.isclose(result.weights.sum(), 1, atol=1e-5)
