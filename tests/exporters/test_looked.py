import pytest

from tests.exporters.conformance import check_overlay
from tests.exporters.records import UTM, features, record, window
from tnetcli.exporters.base import Choice, Looked
from tnetcli.exporters.geojson import write_geojson
from tnetcli.prediction.record import GlimpseRecord

FIRST = GlimpseRecord((10.0, 10.0, 40.0, 40.0), "forest", 0.4)
SECOND = GlimpseRecord((20.5, 10.0, 50.5, 40.0), "river", 0.9)
RECORD = record(
    window(attention=1.0),
    window("root/1-1", (0.0, 0.0, 60.0, 60.0), attention=0.5, glimpses=(FIRST, SECOND)),
    window("root/0-0", (0.0, 0.0, 60.0, 60.0), attention=0.25),
    config={"view_size": 20},
)


def test_glimpses_are_shown_as_windows_below_their_own():
    found = list(Looked(RECORD).with_joint())
    paths = [each.path for each, _ in found]
    assert paths == ["root", "root/1-1", "root/1-1/g1", "root/1-1/g2", "root/0-0"]
    (first, joint), (second, _) = found[2:4]
    assert (first.level, first.rank, second.rank) == (3, 1, 2)
    assert (first.box, first.label, first.probability) == (FIRST.box, "forest", 0.4)
    assert (first.attention, joint) == (0.5, 0.25)
    assert first.share is None


def test_glimpses_are_chosen_by_level_and_attention_as_windows_are():
    of_level = Looked(RECORD, Choice(levels=frozenset({3})))
    assert [each.path for each in of_level.chosen()] == ["root/1-1/g1", "root/1-1/g2"]
    of_most = Looked(RECORD, Choice(least_attention=0.6))
    assert [each.path for each in of_most.chosen()] == ["root"]


def test_no_glimpse_is_shown_without_its_window():
    lone = record(window(), window("root/1-1", attention=0.1, glimpses=(FIRST,)))
    found = Looked(lone, Choice(least_attention=0.2))
    assert [each.path for each in found.chosen()] == ["root"]


@pytest.mark.parametrize("place", [{}, UTM])
def test_an_overlay_with_glimpses_is_good(tmp_path, place):
    told = record(*RECORD.windows, **place)
    write_geojson(tmp_path / "a.geojson", [Looked(told)])
    assert check_overlay(tmp_path / "a.geojson").features == 5


def test_nothing_is_made_up_of_a_glimpse():
    glimpse = features(RECORD)[2]["properties"]
    assert glimpse["name"] == "root/1-1/g1"
    assert not {"weight", "valid", "downsample"} & set(glimpse["measurements"])
