from hypothesis import given
from hypothesis import strategies as st
from PIL import ImageFont

from tnetcli.exporters import drawing
from tnetcli.exporters.drawing import Rect, cut_to, fitted, font_of, plain, wrapped

TEXT = st.text(max_size=300)


@given(TEXT, st.integers(40, 400), st.booleans())
def test_a_cut_text_fits_and_loses_no_more_than_it_must(text, width, keep_end):
    font = font_of(14)
    line = plain(text)
    cut = cut_to(line, font, width, keep_end=keep_end)
    assert font.getlength(cut) <= width
    if font.getlength(line) <= width:
        assert cut == line
    else:
        kept = cut.strip("…")
        assert line.endswith(kept) if keep_end else line.startswith(kept)


@given(TEXT, st.integers(40, 300), st.integers(1, 5))
def test_wrapped_lines_fit_and_hold_all_words_that_have_room(text, width, most):
    font = font_of(14)
    line = plain(text)
    lines = wrapped(line, font, width, most)
    assert len(lines) <= most
    assert all(font.getlength(each) <= width for each in lines)
    if not any(each.endswith("…") for each in lines):
        assert " ".join(lines).split() == line.split()


@given(st.text(alphabet=st.characters(), max_size=50))
def test_a_plain_text_can_be_drawn_in_one_line(text):
    line = plain(text, 30)
    assert len(line) <= 30
    assert "\n" not in line
    line.encode()  # no half characters
    font_of(14).getmask(line or " ")


@given(st.floats(1e-3, 1e9), st.floats(1e-3, 1e9), st.integers(50, 2000))
def test_a_place_has_the_shape_of_its_image_as_far_as_that_can_be(width, height, most):
    place = fitted(width, height, most)
    assert max(place) == most
    shape = min(max(width / height, 1 / 8), 8)
    assert abs(place.right - min(most, most * shape)) <= 1
    assert abs(place.bottom - min(most, most / shape)) <= 1


def test_places_meet_where_they_share_a_pixel():
    one = Rect(0, 0, 10, 10)
    assert one.meets(Rect(9, 9, 20, 20))
    assert not one.meets(Rect(10, 0, 20, 10))
    assert one.cut(one.wider(3)) == one


def test_without_the_fonts_of_matplotlib_there_is_another(monkeypatch):
    monkeypatch.setattr(drawing.importlib.util, "find_spec", lambda name: None)
    font = font_of.__wrapped__(17, bold=True)
    assert isinstance(font, ImageFont.FreeTypeFont)
    assert font.getlength("river") > 10
