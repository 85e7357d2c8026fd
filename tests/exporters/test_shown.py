from hypothesis import given
from hypothesis import strategies as st

from tests.exporters.records import window
from tnetcli.exporters.shown import choose_shown, known_attention

ATTENTION = st.floats(0, 1)


@st.composite
def many(draw):
    told = draw(st.lists(st.tuples(st.integers(1, 20), st.integers(1, 5), ATTENTION), max_size=40))
    return [
        window("root" + "/0-0" * (level - 1), attention=attention, rank=rank)
        for level, rank, attention in told
    ]


@given(many(), st.integers(1, 6), st.integers(1, 6))
def test_the_same_is_found_as_by_sorting_everything(windows, most_drawn, most_listed):
    shown = choose_shown(iter(windows), most_drawn=most_drawn, most_listed=most_listed)
    by_place = sorted(range(len(windows)), key=lambda n: (windows[n].level, windows[n].rank, n))
    assert [id(each) for each in shown.listed] == [id(windows[n]) for n in by_place[:most_listed]]
    levels = sorted({each.level for each in windows if each.level <= 16})
    assert list(shown.drawn) == list(shown.counts) == levels
    for level in levels:
        peers = [each for each in windows if each.level == level]
        best = sorted(peers, key=lambda each: -rated(each))[:most_drawn]
        assert [id(each) for each in shown.drawn[level]] == [id(each) for each in reversed(best)]
        assert shown.counts[level] == len(peers)
    assert shown.total == len(windows)
    assert shown.others == sum(each.level > 16 for each in windows)
    rates = [rated(each) for each in windows if "/" in each.path]
    assert shown.most == max([0.0, *rates])


def rated(each):
    attention = known_attention(each)
    return -1.0 if attention is None else attention


def test_levels_that_nobody_has_are_counted_and_not_drawn():
    odd = [window("root" + "/0-0" * 40)]
    shown = choose_shown(odd)
    assert shown.drawn == {}
    assert shown.others == 1
    assert shown.listed == odd
