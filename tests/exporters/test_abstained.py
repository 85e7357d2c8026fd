import csv
import json

import numpy as np
import pytest
import rasterio

from tests.exporters.records import UTM, record, window
from tests.exporters.test_html import Read
from tnetcli.cli.predict import Batch, as_text
from tnetcli.exporters.base import Looked
from tnetcli.exporters.export import FORMATS, How
from tnetcli.prediction.record import LevelRecord, Prediction, PredictionCost

REASON = "the classes are too close"
COST = PredictionCost(2, 100, 10_000, 0.01, 2000, 30_000, 0.5, 0.25, 0.75)
PLACES = {"scene": UTM, "slide": {"mpp": (0.25, 0.25)}}


def abstained(place):
    return record(
        window(attention=1.0, probabilities=(0.5, 0.5)),
        window("root/0-0", (0, 0, 50, 40)),
        status="abstained",
        levels=(LevelRecord(1, 1, "river", 0.5), LevelRecord(2, 1, "forest", 0.5)),
        cost=COST,
        stop_reason="max_level",
        **PLACES[place],
    )


def written(form, path, prediction, **how):
    def note(id, error):
        raise AssertionError(error)

    FORMATS[form].write(path, [Looked(prediction)], How(pixels=False, **how), note, False)
    return path


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("form", FORMATS)
def test_every_format_takes_an_abstained_record(form, place, tmp_path):
    prediction = abstained(place)
    again = Prediction.model_validate_json(prediction.model_dump_json())
    suffix = FORMATS[form].suffixes[0]
    first = written(form, tmp_path / f"a{suffix}", prediction)
    assert written(form, tmp_path / f"b{suffix}", again).read_bytes() == first.read_bytes()


@pytest.mark.parametrize("place", PLACES)
def test_its_windows_are_in_the_overlay(place, tmp_path):
    overlay = json.loads(written("geojson", tmp_path / "a.geojson", abstained(place)).read_text())
    assert len(overlay["features"]) == 2
    assert (overlay["tnet"]["images"], overlay["tnet"]["failed"]) == (1, 0)


def test_its_heat_map_names_its_status(tmp_path):
    with rasterio.open(written("heatmap", tmp_path / "a.tif", abstained("scene"))) as file:
        assert file.tags()["TNET_STATUS"] == "abstained"
        assert file.tags().get("TNET_LABEL", "") == ""
        assert np.nanmax(file.read(1)) == 0.5


def test_a_row_has_its_reason_and_no_label(tmp_path):
    path = written("csv", tmp_path / "a.csv", abstained("scene"), per_image=True)
    (row,) = csv.DictReader(path.read_text().splitlines())
    assert (row["status"], row["label"], row["probability"]) == ("abstained", "", "")
    assert (row["message"], row["windows"], row["prob_river"]) == (REASON, "2", "0.97")


def test_the_page_lists_it_with_its_reason(tmp_path):
    page = Read(written("page", tmp_path / "a.html", abstained("slide")).read_text())
    assert (page.rows[0]["status"], page.rows[0]["reason"]) == ("abstained", REASON)
    assert (page.rows[0]["label"], page.rows[0]["windows"]) == ("", 2)
    image = page.blocks["image-1"]
    assert (image["label"], image["reason"]) == (None, REASON)
    assert len(image["windows"]) == 2


def test_the_summary_says_so():
    prediction = abstained("scene")
    assert as_text(prediction).startswith(f"scenes/a.tif: abstained: {REASON}\n  level 1: river")
    batch = Batch(images=1)
    batch.add(prediction)
    assert batch.as_lines(1.0)[0] == "1 of 1 image done, 1 of them abstained"
