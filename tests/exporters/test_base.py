import gzip

import pytest

from tests.exporters.records import record, window
from tnetcli.errors import UsageError
from tnetcli.exporters.base import (
    EXPORTERS,
    find_exporter,
    measurements,
    regions_of,
    write_pieces,
)
from tnetcli.exporters.geojson import as_hex, attention_colour, class_colour
from tnetcli.prediction.record import GlimpseRecord

FIRST = GlimpseRecord((10.0, 10.0, 40.0, 40.0), "forest", 0.4)
SECOND = GlimpseRecord((20.5, 10.0, 50.5, 40.0), "river", 0.9)
RECORD = record(
    window(attention=1.0),
    window("root/1-1", (0.0, 0.0, 60.0, 60.0), attention=0.5, glimpses=(FIRST, SECOND)),
    window("root/0-0", (0.0, 0.0, 60.0, 60.0), attention=0.25),
    config={"view_size": 20},
)


def test_glimpses_are_regions_of_the_level_below():
    found = list(regions_of(RECORD))
    paths = [each.path for each, _ in found]
    assert paths == ["root", "root/1-1", "root/1-1/g1", "root/1-1/g2", "root/0-0"]
    (first, joint), (second, _) = found[2:4]
    assert (first.level, first.rank, second.rank) == (3, 1, 2)
    assert (first.box, first.label, first.probability) == (FIRST.box, "forest", 0.4)
    assert (first.attention, joint) == (0.5, 0.25)
    of_level = regions_of(RECORD, frozenset({3}))
    assert [each.path for each, _ in of_level] == ["root/1-1/g1", "root/1-1/g2"]


def test_measurements_of_a_glimpse_are_partly_unknown():
    found = {region.path: measurements(region, None, RECORD) for region, _ in regions_of(RECORD)}
    unknown = {name for name, value in found["root/1-1/g1"].items() if value is None}
    assert unknown == {"joint", "share", "valid", "downsample"}
    assert found["root/0-0"]["downsample"] == 3.0


def test_the_joint_attention_of_a_region_without_its_parent_is_unknown():
    orphan = record(window("root/3-3/0-0"))
    assert [joint for _, joint in regions_of(orphan)] == [None]


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ("a.geojson", "geojson"),
        ("a.JSON.gz", "geojson"),
        ("a.geojsonl", "geojson"),
        ("a.tif", "heatmap"),
        ("a.jpeg", "figure"),
        ("a.html", "html"),
        ("a.csv.gz", "csv"),
        ("a.parquet", "parquet"),
        (None, "geojson"),
        ("folder.png/", "geojson"),
        ("folder", "geojson"),
    ],
)
def test_the_suffix_selects_the_exporter(output, name):
    assert find_exporter(output).name == name


@pytest.mark.parametrize(
    ("output", "name", "says"),
    [
        ("a.xyz", None, r"no format has the suffix of `a\.xyz`"),
        ("a.png", "heatmap", "has the suffix of the format figure, not of heatmap"),
        (None, "heatmpa", "unknown exporter: `heatmpa`"),
    ],
)
def test_an_unknown_or_contradicting_format_is_an_error(output, name, says):
    with pytest.raises(UsageError, match=says):
        find_exporter(output, name)


def test_exporters_are_named_as_registered():
    assert [EXPORTERS.load(name).name for name in EXPORTERS] == EXPORTERS.names()


def test_compressed_text_is_the_same_and_has_no_time(tmp_path):
    for name in ("a.csv", "a.csv.gz", "b.csv.gz"):
        write_pieces(tmp_path / name, ["ä", "b\n"])
    assert (tmp_path / "a.csv").read_bytes() == "äb\n".encode()
    packed = (tmp_path / "a.csv.gz").read_bytes()
    assert gzip.decompress(packed) == "äb\n".encode()
    assert packed == (tmp_path / "b.csv.gz").read_bytes()


def test_classes_have_distinct_and_stable_colours():
    classes = [f"class {number}" for number in range(40)]
    assert len({class_colour(each, classes) for each in classes}) == 40
    assert class_colour("river", []) == class_colour("river", ["forest"])
    assert as_hex((0, 171, 255)) == "#00abff"


def test_more_attention_is_brighter():
    colours = [attention_colour(step / 100) for step in range(101)]
    scale = [0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue in colours]
    assert scale == sorted(scale)
    assert scale[-1] - scale[0] > 150
    assert attention_colour(1.000001) == colours[-1]
