import itertools

import numpy as np
from PIL import Image

from tests.exporters.records import window
from tnetcli.exporters.drawing import Rect, Sheet
from tnetcli.exporters.lettering import Sizes
from tnetcli.exporters.marks import Marks, line_colour

SHARES = np.linspace(0, 1, 101)


def grey(colour):
    """As Pillow turns a colour picture into a grey one, after ITU-R 601."""
    return Image.new("RGB", (1, 1), colour).convert("L").getpixel((0, 0))


def test_more_attention_is_brighter_also_in_grey():
    greys = [grey(line_colour(share)) for share in SHARES]
    assert all(b >= a for a, b in itertools.pairwise(greys))
    assert greys[-1] - greys[0] > 150


def test_a_line_or_its_halo_stands_out_from_any_ground():
    for ground in range(256):
        for share in SHARES:
            assert max(abs(grey(line_colour(share)) - ground), ground) >= 36


def test_more_attention_is_thicker():
    marks = Marks(Sizes.of_width(1600), most=0.5)
    widths = [marks.width(window("root/0-0", attention=share / 2)) for share in SHARES]
    assert widths == sorted(widths)
    assert (widths[0], widths[-1]) == (2, 7)
    assert Marks(Sizes.of_width(1600), most=0.0).width(window("root/0-0", attention=0.0)) == 2


def test_numbers_are_never_written_over_one_another():
    marks = Marks(Sizes.of_width(1600), most=1.0)
    sheet, all_of_it = Sheet(400, 400), Rect(0, 0, 400, 400)
    taken = []
    for rank in range(1, 9):
        marks.tag(sheet, window("root/0-0", rank=rank), Rect(50, 50, 350, 350), all_of_it, taken)
    assert len(taken) == 4
    assert not any(a.meets(b) for a in taken for b in taken if a is not b)
    marks.tag(sheet, window("root/0-0"), Rect(5, 5, 20, 20), all_of_it, taken)
    assert len(taken) == 4  # no room
