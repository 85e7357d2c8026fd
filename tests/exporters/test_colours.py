from hypothesis import given
from hypothesis import strategies as st

from tnetcli.exporters.base import as_hex, attention_colour, class_colour


def brightness(colour):
    return 0.2126 * colour[0] + 0.7152 * colour[1] + 0.0722 * colour[2]


def test_classes_of_a_model_have_colours_of_their_own():
    classes = [f"class {number}" for number in range(40)]
    assert len({class_colour(each, classes) for each in classes}) == 40


def test_a_class_that_no_model_names_has_a_colour_that_stays():
    assert class_colour("river", []) == class_colour("river", ["forest"])
    assert class_colour("river", []) != class_colour("forest", [])


def test_more_attention_is_brighter():
    scale = [brightness(attention_colour(step / 100)) for step in range(101)]
    assert scale == sorted(scale)
    assert scale[-1] - scale[0] > 150


@given(st.floats())
def test_any_attention_has_a_colour(attention):
    colour = attention_colour(attention)
    assert all(type(part) is int and 0 <= part <= 255 for part in colour)


def test_a_colour_is_written_as_in_style_sheets():
    assert as_hex((0, 171, 255)) == "#00abff"
