import gzip
import json
import os
import subprocess
import sys
import tracemalloc

import pytest

from tests.exporters.records import UTM, failed, read, record, replace, window
from tnetcli.errors import OutputError
from tnetcli.exporters.base import Choice, Looked
from tnetcli.exporters.geojson import (
    collection_text,
    sequence_text,
    write_geojson,
    write_geojson_sequence,
)
from tnetcli.prediction.record import Prediction

SCENE = record(window(attention=1.0), window("root/0-2", (0, 0, 500, 400)), **UTM)
SLIDE = record(window(attention=1.0), window("root/0-2"), image="b.svs", offset=(7, 9))
FAILED = failed()


def looked(*predictions):
    return [Looked(each) for each in predictions]


def test_a_file_is_one_collection(tmp_path):
    write_geojson(tmp_path / "a.geojson", iter(looked(SCENE)))
    text = (tmp_path / "a.geojson").read_text()
    assert json.loads(text) == read(SCENE)
    assert text.startswith('{"type":"FeatureCollection","features":[\n{"type":"Feature",')
    assert text.endswith("}\n")


def test_a_compressed_file_holds_the_same(tmp_path):
    write_geojson(tmp_path / "a.geojson", looked(SLIDE), frame="level0")
    write_geojson(tmp_path / "a.geojson.gz", looked(SLIDE), frame="level0")
    plain = (tmp_path / "a.geojson").read_bytes()
    assert gzip.decompress((tmp_path / "a.geojson.gz").read_bytes()) == plain


def test_an_existing_file_is_refused_unless_it_may_be_overwritten(tmp_path):
    for write in (write_geojson, write_geojson_sequence):
        (tmp_path / "a").write_text("mine")
        with pytest.raises(OutputError, match="exists"):
            write(tmp_path / "a", looked(SLIDE))
        write(tmp_path / "a", looked(SLIDE), overwrite=True)
        assert "root/0-2" in (tmp_path / "a").read_text()


@pytest.mark.parametrize("prediction", [SCENE, SLIDE], ids=["scene", "slide"])
def test_the_same_record_gives_the_same_bytes(prediction, tmp_path):
    again = Prediction.model_validate_json(prediction.model_dump_json())
    for name in ("a.geojson", "a.geojson.gz"):
        write_geojson(tmp_path / name, looked(prediction))
        first = (tmp_path / name).read_bytes()
        write_geojson(tmp_path / name, looked(again), overwrite=True)
        assert (tmp_path / name).read_bytes() == first


def test_images_on_the_earth_share_a_collection_that_tells_what_they_share():
    other = replace(SCENE, image="b.tif", id="b.tif", width=77)
    collection = read(SCENE, FAILED, other)
    assert len(collection["features"]) == 4
    facts = collection["tnet"]
    assert (facts["images"], facts["failed"], facts["model"]) == (2, 1, "default")
    assert {"image", "width"}.isdisjoint(facts)
    assert facts["height"] == SCENE.height


@pytest.mark.parametrize(
    "pair", [(SLIDE, SCENE), (SCENE, SLIDE), (SLIDE, replace(SLIDE, image="c.svs"))]
)
def test_pixels_share_a_collection_with_no_other_image(pair, tmp_path):
    with pytest.raises(OutputError, match=r"pixels of `.*\.svs` cannot share") as caught:
        write_geojson(tmp_path / "a.geojson", looked(*pair))
    assert "sequence" in caught.value.hint
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("predictions", [[], [FAILED], [replace(SCENE, windows=())]])
def test_without_windows_it_is_still_a_collection(predictions):
    collection = read(*predictions)
    assert collection["features"] == []
    assert "bbox" not in collection


@pytest.mark.parametrize("base", [SCENE, SLIDE], ids=["scene", "slide"])
def test_windows_that_are_not_wanted_are_left_out_and_tell_their_children_how_likely_they_were(
    base,
):
    windows = (
        window(attention=1.0),
        window("root/0-0", attention=0.4),
        window("root/0-0/1-1", attention=0.5),
        window("root/0-0/1-2", attention=0.1),
    )
    full = read(replace(base, windows=windows))["features"]
    chosen = [Looked(replace(base, windows=windows), Choice(frozenset({1, 3}), 0.3))]
    assert json.loads("".join(collection_text(chosen)))["features"] == [full[0], full[2]]


def test_a_sequence_has_a_line_for_every_window_of_any_images():
    lines = list(sequence_text(looked(SCENE, FAILED, SLIDE)))
    assert all(line.count("\n") == 1 and line.endswith("\n") for line in lines)
    found = [json.loads(line) for line in lines]
    assert [each["type"] for each in found] == ["Feature"] * 4
    assert [each["tnet"]["frame"] for each in found] == ["wgs84"] * 2 + ["qupath"] * 2
    assert found[3]["tnet"]["offset"] == [7, 9]
    for each in found:
        del each["tnet"]
    assert found == read(SCENE)["features"] + read(SLIDE)["features"]


def test_a_sequence_may_have_record_separators(tmp_path):
    plain = "".join(sequence_text(looked(SCENE, SLIDE)))
    write_geojson_sequence(tmp_path / "a.geojsons", looked(SCENE, SLIDE), record_separator=True)
    content = (tmp_path / "a.geojsons").read_bytes()
    texts = content.split(b"\x1e")
    assert texts[0] == b""
    assert b"".join(texts) == plain.encode()
    assert len(texts) == 5


def test_a_sequence_is_told_as_predictions_come():
    asked = []

    def predictions():
        for prediction in (SCENE, SLIDE):
            asked.append(prediction.image)
            yield Looked(prediction)

    lines = sequence_text(predictions())
    next(lines)
    assert asked == ["scenes/a.tif"]


@pytest.mark.parametrize("make", [collection_text, sequence_text])
def test_an_unknown_frame_is_refused_at_once(make):
    with pytest.raises(ValueError, match="level0"):
        make(looked(SCENE), frame="level1")


def test_a_crs_that_nobody_knows_is_told():
    with pytest.raises(OutputError, match="EPSG:99999"):
        read(replace(SCENE, crs="EPSG:99999"))


@pytest.mark.parametrize("base", [SCENE, SLIDE], ids=["scene", "slide"])
def test_a_file_name_that_is_not_utf_8_can_be_written(base, tmp_path):
    name = os.fsdecode(b"K\xf6ln \xc3\xb6.tif")
    write_geojson(tmp_path / "a.geojson", looked(replace(base, image=name, id=name)))
    assert "K\\\\xf6ln ö.tif" in (tmp_path / "a.geojson").read_text("utf-8")


def many(count, side=50.0):
    """Yield windows, each below one that came before."""
    yield window(attention=1.0)
    for number in range(1, count):
        above = f"root/{number // 1000}-0" if number > 1000 and number % 1000 else "root"
        x, y = float(number % 1000 * 10), float(number // 1000 * 10)
        yield window(f"{above}/{number // 1000}-{number % 1000}", (x, y, x + side, y + side))


def test_memory_does_not_follow_the_number_of_images():
    def peak(count):
        tracemalloc.start()
        images = (Looked(replace(SCENE, image=str(n), id=str(n))) for n in range(count))
        assert sum(1 for _ in collection_text(images)) == 2 * count + 2
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(2)
    assert peak(60) < 1.1 * peak(10) + 50_000


WRITE = """
import resource, sys
from tests.exporters.records import UTM, record
from tests.exporters.test_geojson import many
from tnetcli.exporters.geojson import write_geojson
from tnetcli.exporters.base import Looked

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

before = peak()
told = UTM if sys.argv[1] == "scene" else {}
write_geojson(sys.argv[2], [Looked(record(*many(int(sys.argv[3])), **told))])
print(peak() - before, "torch" in sys.modules)
"""


def megabytes_for(kind, count, path):
    done = subprocess.run(
        [sys.executable, "-c", WRITE, kind, str(path), str(count)],
        capture_output=True,
        text=True,
        check=True,
    )
    more, torch = done.stdout.split()
    assert torch == "False"
    return float(more)


@pytest.mark.parametrize("kind", ["scene", "slide"])
@pytest.mark.skipif(sys.platform != "linux", reason="peaks are counted in other units elsewhere")
def test_a_file_is_written_in_little_memory_without_torch(kind, tmp_path):
    assert megabytes_for(kind, 2000, tmp_path / "a.geojson") < 150


def test_torch_is_never_imported():
    code = (
        "import sys, pkgutil, tnetcli.exporters as e\n"
        "for m in pkgutil.iter_modules(e.__path__): __import__(f'tnetcli.exporters.{m.name}')\n"
        "print(*{'torch', 'rasterio', 'tnetcli.readers', 'tnetcli.models'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
