import itertools

import numpy as np

from tests.exporters.pictures import Coordinates, Damaged, Meadow, find_pixels, listen
from tests.exporters.records import record, window
from tnetcli.exporters.looked import Looked
from tnetcli.exporters.picture import draw_picture

BOXES = {
    "root": (0, 0, 4000, 3000),
    "root/0-0": (0, 0, 2000, 1500),
    "root/1-1": (2000, 1500, 4000, 3000),
    "root/0-0/0-1": (1000, 0, 2000, 750),
    "root/1-1/2-2": (3000, 2500, 4200, 3100),
}
RANKS = {"root": 1, "root/0-0": 2, "root/1-1": 1, "root/0-0/0-1": 1, "root/1-1/2-2": 2}
ORDER = ["root", "root/1-1", "root/0-0", "root/0-0/0-1", "root/1-1/2-2"]


def scene(paths=tuple(BOXES), **told):
    return record(*(window(path, BOXES[path], rank=RANKS[path], **told) for path in paths))


def test_windows_come_in_order_each_with_its_own_pixels():
    imagery = Coordinates((4500, 3500))
    drawn = draw_picture(Looked(scene()), imagery, size=800).image
    picture = np.asarray(drawn)
    boxes = [box for box, _ in imagery.shown[1:]]  # the first is the overview
    assert boxes == [BOXES[path] for path in ORDER]
    places = [find_pixels(picture, shown[..., :3]) for _, shown in imagery.shown[1:]]
    columns = 4
    rows = [places[start : start + columns] for start in range(0, len(places), columns)]
    assert all(a[0] < b[0] for row in rows for a, b in itertools.pairwise(row))
    assert max(y for _, y in rows[0]) < min(y for _, y in rows[1])
    for box, shown in imagery.shown[1:]:
        height, width = shown.shape[:2]
        assert abs(width / height - (box[2] - box[0]) / (box[3] - box[1])) < 0.05


def test_the_border_has_the_colour_of_the_line():
    imagery = Coordinates((4500, 3500))
    one = record(window("root/0-0", BOXES["root/0-0"], 0.4))
    picture = np.asarray(draw_picture(Looked(one), imagery, size=1600).image)
    x, y = find_pixels(picture, imagery.shown[1][1][..., :3])
    height = imagery.shown[1][1].shape[0]
    assert tuple(picture[y + height // 2, x - 1]) == (252, 255, 164)
    assert tuple(picture[y - 1, x + 20]) == (252, 255, 164)


def test_captions_tell_level_rank_attention_and_vote(monkeypatch):
    heard = listen(monkeypatch)
    draw_picture(Looked(scene(attention=0.123)), Meadow(), size=1600)
    texts = [text for _, _, text in heard]
    start = texts.index("Looked at, in order of level and rank") + 1
    captions = [tuple(texts[at : at + 4]) for at in range(start, len(texts), 4)]
    assert captions[0] == ("1.1", "level 1, rank 1", "the whole image", "river 93 %")
    assert captions[1] == ("2.1", "level 2, rank 1", "attention 0.123", "river 93 %")
    assert [each[0] for each in captions] == ["1.1", "2.1", "2.2", "3.1", "3.2"]


def test_forty_eight_windows_are_shown_and_the_rest_counted(monkeypatch):
    heard = listen(monkeypatch)
    imagery = Damaged(lambda number: False)
    many = [window(f"root/{n}-0", (n, n, n + 9, n + 9), rank=60 - n) for n in range(60)]
    draw_picture(Looked(record(*many)), imagery, size=1600)
    assert imagery.reads == 1 + 48
    texts = [text for _, _, text in heard]
    ranks = [int(text.split("rank ")[1]) for text in texts if text.startswith("level 2, rank")]
    assert ranks == list(range(1, 49))
    assert texts[-1] == "and 12 more"


def test_without_a_sheet_windows_are_not_read():
    imagery = Damaged(lambda number: False)
    short = draw_picture(Looked(scene()), imagery, size=800, sheet=False).image
    assert imagery.reads == 1
    assert short.height < draw_picture(Looked(scene()), imagery, size=800).image.height


def test_windows_that_cannot_be_read_say_so_and_the_rest_are_shown(monkeypatch, caplog):
    heard = listen(monkeypatch)
    imagery = Damaged(lambda number: number in (3, 5))
    draw_picture(Looked(scene()), imagery, size=1600)
    texts = [text for _, _, text in heard]
    assert texts.count("cannot be read") == 2
    assert imagery.reads == 6
    assert caplog.text.count("2 windows cannot be shown: a tile is damaged") == 1
