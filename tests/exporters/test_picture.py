import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.exporters.pictures import (
    MEADOW,
    Coordinates,
    Damaged,
    Meadow,
    find,
    find_pixels,
    listen,
    longest_run,
)
from tests.exporters.records import UTM, failed, record, window
from tnetcli.errors import OutputError
from tnetcli.exporters.drawing import GROUND, INK, font_of
from tnetcli.exporters.looked import Choice, Looked
from tnetcli.exporters.marks import line_colour
from tnetcli.exporters.picture import draw_picture, write_picture
from tnetcli.prediction import Prediction, PredictionCost, SeenLevel

STRONGEST = (252, 255, 164)  # pale yellow, the last of the colours of attention
ROOT = window(box=(0, 0, 4000, 3000), attention=1.0, label="forest", probability=0.55)
CHOSEN = Choice(frozenset({2, 3, 4, 5}))
SCENE = record(
    ROOT,
    window("root/0-1", (1000, 0, 3000, 1500), 0.3),
    window("root/1-0", (0, 1500, 2000, 3000), 0.1, rank=2),
    window("root/0-1/2-2", (2000, 750, 3000, 1500), 0.6),
    label="river",
    probability=0.97,
    levels=(
        SeenLevel(1, 1, "forest", 0.55),
        SeenLevel(2, 2, "river", 0.91),
        SeenLevel(3, 1, "river", 0.97),
    ),
    **UTM,
)


def drawn(prediction, imagery=None, choice=Choice(), size=600, sheet=False):  # noqa: B008
    looked = Looked(prediction, choice)
    return np.asarray(draw_picture(looked, imagery, size=size, sheet=sheet).image)


def edges_of(box, prediction, place):
    left, top, right, bottom = place
    across, down = (right - left) / prediction.width, (bottom - top) / prediction.height
    x, y = box[::2], box[1::2]
    return (*(left + across * each for each in x), *(top + down * each for each in y))


def line_error(picture, prediction, box, place, width):
    """The farthest that the middle of a line is from where the edge of its window should be."""
    left, top, right, bottom = find(picture, STRONGEST)
    x0, x1, y0, y1 = edges_of(box, prediction, place)
    half = width / 2
    found = np.array([left + half, right - half, top + half, bottom - half])
    return np.abs(found - [x0, x1, y0, y1]).max()


@settings(max_examples=30, deadline=None)
@given(
    shape=st.tuples(st.integers(300, 90_000), st.integers(300, 90_000)),
    corner=st.tuples(st.floats(0.02, 0.6), st.floats(0.02, 0.6)),
    part=st.tuples(st.floats(0.15, 0.35), st.floats(0.15, 0.35)),
    level=st.integers(2, 5),
    size=st.sampled_from([600, 900]),
)
def test_windows_are_drawn_where_they_are(shape, corner, part, level, size):
    width, height = shape
    x0, y0 = corner[0] * width, corner[1] * height
    box = (x0, y0, x0 + part[0] * width, y0 + part[1] * height)
    path = "root" + "/0-0" * (level - 1)
    one = record(window(path, box, 0.4), width=width, height=height)
    picture = drawn(one, Meadow(), size=size)[:, : size - 250]  # without the legend
    place = find(picture, MEADOW)
    assert line_error(picture, one, box, place, round(7 * size / 1600)) <= 1.5


def test_a_window_beyond_the_image_is_drawn_to_the_edge_of_its_place():
    beyond = record(window("root/0-0", (-1e7, -20, 1e9, 400), 0.4))
    picture = drawn(beyond, Meadow(), size=1600)[:, :1200]
    left, top, right, bottom = find(picture, STRONGEST)
    place = find(picture, MEADOW)
    assert 0 <= place[0] - left <= 15
    assert 0 <= right - place[2] <= 15
    assert abs(top + 3.5 - (place[1] - 20 * (place[3] - place[1]) / 3000)) <= 1.5
    assert abs(bottom - 3.5 - (place[1] + 400 * (place[3] - place[1]) / 3000)) <= 1.5


def test_lines_tell_levels_by_dashes_and_attention_by_weight():
    rows = {}
    for level in (2, 3, 4, 5):
        path = "root" + "/0-0" * (level - 1)
        picture = drawn(record(window(path, (400, 600, 3600, 2400), 0.4)), Meadow(), size=1600)
        picture = picture[:, :1200]
        _, top, _, _ = find(picture, STRONGEST)
        line = (picture[top + 1] == STRONGEST).all(axis=1)
        rows[level] = tuple(np.diff(np.flatnonzero(np.diff(line.astype(int))))[:4])
    assert len(set(rows.values())) == 4
    assert len(rows[2]) == 1  # a whole line

    weak, strong = line_colour(0.25), line_colour(1.0)
    pair = record(
        window("root/0-0", (200, 200, 1800, 1800), 0.1),
        window("root/0-1", (2000, 200, 3800, 1800), 0.4),
    )
    middle = drawn(pair, Meadow(), size=1600)[:, :1200]
    row = find(middle, MEADOW)[1] + 400
    thick, thin = (int((middle[row] == colour).all(axis=1).sum()) // 2 for colour in (strong, weak))
    assert thick > thin >= 2


def test_the_strongest_line_has_a_dark_halo_on_both_sides():
    picture = drawn(SCENE, Meadow(), Choice(frozenset({3})), size=1600)[:, :1200]
    left, top, right, bottom = find(picture, STRONGEST)
    middle = (left + right) // 2
    assert tuple(picture[top - 1, middle]) == (0, 0, 0)
    assert tuple(picture[bottom, middle]) == (0, 0, 0)


def test_the_whole_image_is_not_drawn_as_if_it_had_been_chosen():
    picture = drawn(record(ROOT), Meadow(), size=1600)[:, :1200]
    assert not (picture == STRONGEST).all(axis=2).any()


def test_pixels_of_the_image_are_shown_as_they_are_and_gaps_on_the_ground():
    imagery = Coordinates((4000, 3000))
    picture = drawn(record(), imagery)
    ((box, shown),) = imagery.shown
    assert box == (0, 0, 4000, 3000)
    find_pixels(picture, shown[..., :3])

    class Gap(Meadow):
        def show(self, box, width, height):
            shown = super().show(box, width, height)
            shown[: height // 2] = 0
            return shown

    left, top, right, bottom = find(drawn(record(), Gap()), MEADOW)
    picture = drawn(record(), Gap())
    assert tuple(picture[top - 1, (left + right) // 2]) == GROUND
    assert abs((bottom - top) * 2 / (right - left) - 0.75) < 0.02


def test_without_imagery_the_outline_and_the_windows_stay(monkeypatch):
    heard = listen(monkeypatch)
    picture = drawn(SCENE, None, size=1600)
    place = find(picture[:, :1200], GROUND)
    assert abs((place[3] - place[1]) / (place[2] - place[0]) - 0.75) < 0.01
    box = SCENE.windows[3].box
    assert line_error(picture[:, :1200], SCENE, box, place, 7) <= 6.5  # behind the root's line
    assert any("without the pixels" in text for _, _, text in heard)


def bar_in(picture):
    """The pixels of the scale bar below the image, by the longest line of ink."""
    _, _, _, bottom = find(picture, MEADOW)
    below = (picture[bottom + 3 : bottom + 40] == INK).all(axis=2)
    runs = [longest_run(row) for row in below if row.any()]
    return max(stop - start for start, stop in runs)


DEGREES = (0.001, 0.0, 15.0, 0.0, -0.001, 61.5)  # 3000 rows: the middle is 60 degrees north
TURNED = (1.7320508, 1.0, 4e5, 1.0, -1.7320508, 5e6)  # 2 m a pixel, turned by 30 degrees


@pytest.mark.parametrize(
    ("told", "metres", "word"),
    [
        (UTM, 10.0, "10 km"),
        ({"crs": "EPSG:32733", "transform": TURNED}, 2.0, "2 km"),
        ({"mpp": (0.25, 0.25)}, 0.25e-6, "200 µm"),
        # The parallel of 60 degrees on the ellipsoid: a / sqrt(1 - e2 sin2) cos.
        (
            {"crs": "EPSG:4326", "transform": DEGREES},
            np.radians(0.001) * 6_378_137 / np.sqrt(1 - 0.00669438 * 0.75) * 0.5,
            "50 km from left to right",
        ),
    ],
    ids=["utm", "turned", "slide", "degrees"],
)
def test_the_scale_bar_is_as_long_as_it_says(told, metres, word, monkeypatch):
    heard = listen(monkeypatch)
    picture = drawn(record(**told), Meadow(), size=1600)
    place = find(picture, MEADOW)
    scale = 4000 / (place[2] - place[0])  # pixels of the image in one of the picture
    (said,) = [text for _, _, text in heard if text == word]
    number, unit = said.split()[:2]
    length = float(number) * {"km": 1e3, "m": 1.0, "µm": 1e-6}[unit]
    # A degree is measured on a sphere, half a per cent wrong at most.
    assert bar_in(picture) == pytest.approx(length / metres / scale, abs=1.0, rel=0.006)


@pytest.mark.parametrize("shape", [(4000, 3000), (300, 100_000), (100_000, 300)])
@pytest.mark.parametrize("size", [600, 1600])
def test_what_the_bar_says_stays_below_the_image(shape, size, monkeypatch):
    heard = listen(monkeypatch)
    world = (360 / shape[0], 0.0, -180.0, 0.0, -170 / shape[1], 85.0)
    where = {"crs": "EPSG:4326", "transform": world, "width": shape[0], "height": shape[1]}
    draw_picture(Looked(record(**where)), Meadow(), size=size)
    texts = [text for _, _, text in heard]
    (first,) = [number for number, text in enumerate(texts) if " km" in text]
    said = texts[first : texts.index("Windows")]
    assert " ".join(said).endswith("km from left to right in the middle")
    scale = max(size / 1600, 0.65)
    column = size - round(36 * scale) - round(340 * scale)
    for x, _, text in heard[first : first + len(said)]:
        assert x + font_of(round(18 * scale)).getlength(text) <= column


@pytest.mark.parametrize(
    "told",
    [
        {},
        {"crs": "EPSG:32633"},
        {"crs": "no such thing", "transform": UTM["transform"]},
        {"transform": UTM["transform"]},
    ],
)
def test_without_a_resolution_there_is_no_bar(told, monkeypatch):
    heard = listen(monkeypatch)
    drawn(record(**told), Meadow())
    assert not any(text.endswith((" m", " km", " µm", " mm")) for _, _, text in heard)


def test_the_answer_and_how_it_changed_are_told(monkeypatch):
    heard = listen(monkeypatch)
    cost = PredictionCost(1234, 5, 6, 0.0123, 7, 8, 0.1, 0.1, 0.2)
    told = {name: getattr(SCENE, name) for name in ("label", "probability", "levels")}
    drawn(record(*SCENE.windows, cost=cost, warnings=("a b c",), **told), Meadow(), size=1600)
    texts = [text for _, _, text in heard]
    assert texts[0] == "river 97 %"
    assert texts[1] == "scenes/a.tif"
    facts = "4,000 x 3,000 pixels · model default · 1,234 windows looked at"
    assert texts[2] == f"{facts} · 1.23 % of the pixels decoded"
    story = texts[texts.index("How the answer changed") + 1 :][:9]
    assert story[::3] == ["forest", "river", "river"]
    assert story[1::3] == ["55 %", "91 %", "97 %"]
    assert story[2::3] == [
        "after level 1, 1 window", "after level 2, 2 windows", "after level 3, 1 window"
    ]  # fmt: skip
    assert texts[texts.index("Attention") + 1 :][:3] == ["0", "0.3", "0.6"]
    assert {"level 1: the whole image", "level 2: 2 windows", "level 3: 1 window"} <= {*texts}
    assert "a b c" in texts


def test_what_was_chosen_is_told(monkeypatch):
    heard = listen(monkeypatch)
    drawn(SCENE, Meadow(), Choice(frozenset({3, 2}), 0.2), size=1600)
    texts = " ".join(text for _, _, text in heard)
    assert "only levels 2, 3 only windows with an attention of 0.2 or more" in texts
    assert "level 2: 1 window" in texts


@pytest.mark.parametrize("name", ["a.png", "a.jpg", "a.JPEG", "sc\udcffene.PNG"])
def test_pictures_are_png_or_jpeg_by_their_name(name, tmp_path):
    path = tmp_path / name
    write_picture(path, Looked(SCENE), Meadow(), size=700)
    with Image.open(path) as picture:
        picture.load()
        assert picture.format == ("PNG" if name.lower().endswith("png") else "JPEG")
        assert picture.mode == "RGB"
        assert picture.width == 700
        near = np.asarray(picture).astype(int)
    expected = np.asarray(draw_picture(Looked(SCENE), Meadow(), size=700).image).astype(int)
    assert np.abs(near - expected).mean() < 2
    first = path.read_bytes()
    again = Prediction.model_validate_json(SCENE.model_dump_json())
    write_picture(path, Looked(again), Meadow(), size=700, overwrite=True)
    assert path.read_bytes() == first


@pytest.mark.parametrize("name", ["a.gif", "a", "a.png.gz", "png"])
def test_other_names_are_refused(name, tmp_path):
    with pytest.raises(OutputError, match="PNG or JPEG") as caught:
        write_picture(tmp_path / name, Looked(SCENE), Meadow())
    assert ".png" in caught.value.hint
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize("size", [0, -5, 599, 5001])
def test_a_width_that_cannot_be_drawn_is_refused(size, tmp_path):
    with pytest.raises(OutputError, match="pixels wide"):
        write_picture(tmp_path / "a.png", Looked(SCENE), Meadow(), size=size)


def test_an_existing_picture_is_refused_before_anything_is_read(tmp_path):
    (tmp_path / "a.png").write_text("mine")
    imagery = Damaged(lambda number: False)
    with pytest.raises(OutputError, match="exists"):
        write_picture(tmp_path / "a.png", Looked(SCENE), imagery)
    assert imagery.reads == 0
    assert (tmp_path / "a.png").read_text() == "mine"


def test_an_interrupted_picture_leaves_nothing_behind(tmp_path):
    class Interrupted(Meadow):
        def show(self, box, width, height):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_picture(tmp_path / "a.png", Looked(SCENE), Interrupted())
    assert not os.listdir(tmp_path)


def test_a_failed_prediction_has_no_picture(tmp_path):
    with pytest.raises(OutputError, match=r"c\.tif"):
        write_picture(tmp_path / "a.png", Looked(failed()), None)


def test_an_image_that_cannot_be_read_is_drawn_without_its_pixels(monkeypatch, caplog):
    heard = listen(monkeypatch)
    picture = drawn(SCENE, Damaged(lambda number: number == 1), size=1600, sheet=True)
    texts = " ".join(text for _, _, text in heard)
    assert "the pixels of the image cannot be read: a tile is damaged" in texts
    assert "the image cannot be shown: a tile is damaged" in caplog.text
    find(picture[:, :1200], STRONGEST)
    find(picture, MEADOW)  # what can be read is shown


HOSTILE = [
    "",
    " ",
    "a\nb\tc\0d",
    "</script>\u202eevil\u200d",
    "שלום мир Ω 日本語 \U0001f480",
    "W" * 1000,
    "long words " * 200,
    "e" + "\u0301" * 500,
]


@pytest.mark.parametrize("label", HOSTILE)
def test_no_label_breaks_out_of_its_place(label, monkeypatch):
    heard = listen(monkeypatch)  # checks that texts stay inside the picture
    hostile = record(
        ROOT,
        window("root/0-1", (1000, 0, 3000, 1500), 0.3, label=label),
        image=f"{label}/{label}",
        model=label,
        label=label,
        probability=0.5,
        levels=(SeenLevel(1, 1, label, 0.5),),
        warnings=(label,),
        **UTM,
    )
    for size in (600, 1600):
        picture = drawn(hostile, Meadow(), size=size, sheet=True)
        assert size * 0.7 < len(picture) < size * 2
    assert all("\n" not in text for _, _, text in heard)


def test_many_windows_are_counted_in_words(monkeypatch):
    heard = listen(monkeypatch)
    random = np.random.default_rng(0)
    many = [
        window(f"root/{n}-0", (x, y, x + 300, y + 200), float(a), rank=n + 1)
        for n, (x, y, a) in enumerate(random.random((10_000, 3)) * [3700, 2800, 0.5])
    ]
    picture = drawn(record(*many), Meadow(), size=1600, sheet=True)
    texts = " ".join(text for _, _, text in heard)
    assert "level 2: 10,000 windows, the 100 of most attention are drawn" in texts
    assert "and 9,952 more" in texts
    assert len(picture) < 4000


@pytest.mark.parametrize("attention", [0.0, 1.000001])
def test_odd_attention_is_drawn_all_the_same(attention, monkeypatch):
    heard = listen(monkeypatch)
    one = record(ROOT, window("root/0-0", (400, 400, 2000, 2000), attention))
    drawn(one, Meadow(), size=1600, sheet=True)
    texts = [text for _, _, text in heard]
    assert f"attention {min(max(attention, 0), 1):g}" in texts


@pytest.mark.parametrize("shape", [(100_000, 300), (300, 100_000), (1, 1), (1, 10**9)])
@pytest.mark.parametrize("size", [600, 1600])
def test_strips_give_pictures_of_sane_shapes(shape, size, monkeypatch):
    heard = listen(monkeypatch)
    width, height = shape
    strip = record(
        window(box=(0, 0, width, height)),
        window("root/0-0", (0, 0, width / 2, height / 2)),
        width=width,
        height=height,
    )
    picture = drawn(strip, Meadow(), size=size, sheet=True)
    assert size * 0.3 < len(picture) < size * 2.5
    left, top, right, bottom = find(picture[: size - 50, : size - 230], MEADOW)
    assert min(right - left, bottom - top) * 9 > max(right - left, bottom - top)
    told = [text for _, _, text in heard if text.startswith("drawn ")]
    assert bool(told) == (width != height)
