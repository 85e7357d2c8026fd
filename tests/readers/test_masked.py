import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.images import noise, write_geotiff
from tnetcli.geometry import Size, Window
from tnetcli.readers.detect import open_image
from tnetcli.readers.wrappers import MaskedReader


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    path = tmp_path_factory.mktemp("masked") / "a.tif"
    write_geotiff(path, noise((64, 48)), overviews=[2])
    with open_image(path) as reader:
        yield reader


def touched(hidden, window, out):
    """By brute force: which output pixels share any ground with a hidden window."""
    found = np.zeros((out.height, out.width), bool)
    for row in range(out.height):
        for column in range(out.width):
            left = window.left + column * window.width / out.width
            top = window.top + row * window.height / out.height
            right, bottom = left + window.width / out.width, top + window.height / out.height
            for each in hidden:
                x0, y0, x1, y1 = each.box
                found[row, column] |= left < x1 and x0 < right and top < y1 and y0 < bottom
    return found


boxes = st.builds(
    Window,
    st.integers(-20, 70),
    st.integers(-20, 50),
    st.integers(1, 60),
    st.integers(1, 60),
)


@given(st.lists(boxes, max_size=3), boxes, st.integers(1, 9), st.integers(1, 9))
def test_what_a_hidden_window_touches_is_not_valid_and_the_rest_is_as_it_was(
    image, hidden, window, width, height
):
    out = Size(width, height)
    whole, masked = image.read(window, out), MaskedReader(image, hidden).read(window, out)
    gone = touched(hidden, window, out)
    np.testing.assert_array_equal(masked.valid, whole.valid & ~gone)
    np.testing.assert_array_equal(masked.values, np.where(masked.valid, whole.values, 0))
    assert masked.values.dtype == whole.values.dtype


def test_closing_it_leaves_the_image_open(image):
    with MaskedReader(image, [Window(0, 0, 9, 9)]) as masked:
        assert (masked.size, masked.bands, masked.path) == (image.size, image.bands, image.path)
        assert masked.estimate(Window(0, 0, 8, 8), Size(4, 4)) > 0
    assert image.read(Window(0, 0, 8, 8), Size(4, 4)).valid.all()
    assert masked.cost == image.cost
