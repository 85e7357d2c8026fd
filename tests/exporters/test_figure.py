import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from PIL import Image
from pydantic import ValidationError

from tests.exporters.imagery import Coordinates, Damaged, Meadow
from tests.exporters.records import UTM, record, window, write
from tnetcli.exporters.figure import (
    GROUND,
    LEVELS,
    FigureOptions,
    draw_figure,
    length_text,
    round_length,
)
from tnetcli.geo import pixel_metres
from tnetcli.geometry import Size
from tnetcli.prediction.record import LevelRecord, PredictionCost

ROOT = window(box=(0, 0, 4000, 3000), attention=1.0, label="forest", probability=0.55)


SCENE = record(
    ROOT,
    window("root/0-1", (1000, 0, 3000, 1500), 0.3),
    window("root/1-0", (0, 1500, 2000, 3000), 0.1, rank=2),
    window("root/0-1/2-2", (2000, 750, 3000, 1500), 0.6),
    label="river",
    probability=0.97,
    levels=(
        LevelRecord(1, 1, "forest", 0.55),
        LevelRecord(2, 2, "river", 0.91),
        LevelRecord(3, 1, "river", 0.97),
    ),
    **UTM,
)


def metres_of(prediction):
    size = Size(prediction.width, prediction.height)
    return pixel_metres(prediction.georeference, prediction.mpp, size)


def draw(prediction, imagery=None, size=1600, **options):
    figure = draw_figure(prediction, imagery, FigureOptions(size=size, **options))
    check_texts(figure, size)
    return figure


def check_texts(figure, size):
    """Check that every text is a single line inside the figure."""
    renderer = FigureCanvasAgg(figure).get_renderer()
    height = figure.get_size_inches()[1] * 72
    for text in figure.axes[0].texts:
        assert "\n" not in text.get_text()
        if text.get_text().strip():
            box = text.get_window_extent(renderer)
            assert box.x0 >= -1
            assert box.x1 <= size + 1
            assert box.y0 >= -1
            assert box.y1 <= height + 1


def texts(figure):
    return [each.get_text() for each in figure.axes[0].texts]


def place(figure):
    """Return left, top, right, bottom of the overview."""
    left, right, bottom, top = figure.axes[0].images[0].get_extent()
    return left, top, right, bottom


def regions(figure):
    return [each for each in figure.axes[0].patches if each.get_gid() == "region"]


@settings(max_examples=10)
@given(
    shape=st.tuples(st.integers(300, 90_000), st.integers(300, 90_000)),
    corner=st.tuples(st.floats(0.02, 0.6), st.floats(0.02, 0.6)),
    part=st.tuples(st.floats(0.15, 0.35), st.floats(0.15, 0.35)),
    level=st.integers(2, 5),
    size=st.sampled_from([600, 900]),
)
def test_regions_are_drawn_where_they_are(shape, corner, part, level, size):
    width, height = shape
    x0, y0 = corner[0] * width, corner[1] * height
    box = (x0, y0, x0 + part[0] * width, y0 + part[1] * height)
    one = record(window("root" + "/0-0" * (level - 1), box, 0.4), width=width, height=height)
    figure = draw(one, Meadow(), size=size)
    left, top, right, bottom = place(figure)
    (patch,) = regions(figure)
    across, down = (right - left) / width, (bottom - top) / height
    found = (*patch.get_xy(), patch.get_width(), patch.get_height())
    expected = (left + across * box[0], top + down * box[1])
    expected += (across * (box[2] - box[0]), down * (box[3] - box[1]))
    assert found == pytest.approx(expected)


def test_a_region_beyond_the_image_is_clipped_to_its_surroundings():
    figure = draw(record(window("root/0-0", (-1e7, -20, 1e9, 400), 0.4)), Meadow())
    (patch,) = regions(figure)
    left, _, right, _ = place(figure)
    box = patch.clipbox.extents
    assert box[0] == pytest.approx(left - 12)
    assert box[2] == pytest.approx(right + 12)
    assert math.isfinite(patch.get_width())


def test_colours_show_the_level_and_widths_the_attention():
    figure = draw(SCENE, Meadow())
    found = {to_hex(each.get_edgecolor()): each for each in regions(figure)}
    assert set(found) == {LEVELS[1], LEVELS[2]}
    widths = sorted(each.get_linewidth() for each in regions(figure))
    assert widths == pytest.approx([2 + 5 / 6, 2 + 5 / 2, 7])
    assert found[LEVELS[2]].get_linewidth() == max(widths)
    bars = {to_hex(each.get_facecolor()) for each in figure.axes[0].patches if each.fill}
    assert {LEVELS[0], LEVELS[1], LEVELS[2]} <= bars


def test_the_whole_image_is_not_drawn_as_a_region():
    assert not regions(draw(record(ROOT), Meadow()))


def test_numbers_do_not_overlap():
    many = [window(f"root/0-{n}", (500, 500, 3500, 2500), rank=n + 1) for n in range(8)]
    figure = draw(record(*many), Meadow(), sheet=False)
    tags = [each for each in figure.axes[0].patches if each.get_zorder() == 2.5]
    assert len(tags) == 4
    small = record(window("root/0-0", (0, 0, 20, 20)))
    assert not any(each.get_zorder() == 2.5 for each in draw(small).axes[0].patches)


def pixels(figure):
    figure.canvas.draw()
    return np.asarray(figure.canvas.buffer_rgba())[..., :3]


def test_pixels_are_unchanged_and_gaps_are_plain():
    imagery = Coordinates((4000, 3000))
    figure = draw(record(), imagery)
    ((box, shown),) = imagery.shown
    assert box == (0, 0, 4000, 3000)
    left, top, right, bottom = (int(each) for each in place(figure))
    inner = (slice(2, -2), slice(2, -2))  # within its outline
    assert np.array_equal(pixels(figure)[top:bottom, left:right][inner], shown[..., :3][inner])

    class Gap(Meadow):
        def show(self, box, width, height):
            shown = super().show(box, width, height)
            shown[: height // 2] = 0
            return shown

    found = pixels(draw(record(), Gap()))
    assert tuple(found[top + 20, left + 20]) == GROUND
    assert tuple(found[bottom - 20, left + 20]) != GROUND


def test_views_come_in_order_each_with_its_own_pixels():
    boxes = {
        "root": (0, 0, 4000, 3000),
        "root/1-1": (2000, 1500, 4000, 3000),
        "root/0-0": (0, 0, 2000, 1500),
        "root/0-0/0-1": (1000, 0, 2000, 750),
        "root/1-1/2-2": (3000, 2500, 4200, 3100),
    }
    ranks = {"root": 1, "root/1-1": 1, "root/0-0": 2, "root/0-0/0-1": 1, "root/1-1/2-2": 2}
    shown = [window(path, boxes[path], rank=ranks[path]) for path in sorted(boxes)]
    imagery = Coordinates((4500, 3500))
    figure = draw(record(*shown), imagery, size=800)
    assert [box for box, _ in imagery.shown[1:]] == list(boxes.values())
    found = pixels(figure)
    places = []
    for (box, view), image in zip(imagery.shown[1:], figure.axes[0].images[1:], strict=True):
        left, _, _, top = (int(each) for each in image.get_extent())
        high, wide = view.shape[:2]
        inner = (slice(2, -2), slice(2, -2))
        there = found[top : top + high, left : left + wide]
        assert np.array_equal(there[inner], view[..., :3][inner])
        assert abs(wide / high - (box[2] - box[0]) / (box[3] - box[1])) < 0.05
        places.append((top, left))
    assert places == sorted(places)


def test_a_view_that_cannot_be_read_is_marked_and_the_others_are_shown(caplog):
    figure = draw(SCENE, Damaged(lambda number: number == 3))
    assert texts(figure).count("cannot be read") == 1
    assert "1 views cannot be shown: a tile is damaged" in caplog.text


def test_an_image_that_cannot_be_read_is_drawn_without_its_pixels(caplog):
    figure = draw(SCENE, Damaged(lambda number: number == 1))
    assert "the pixels of the image cannot be read" in " ".join(texts(figure))
    assert "the image cannot be shown: a tile is damaged" in caplog.text
    assert len(regions(figure)) == 3


def test_regions_are_drawn_without_imagery():
    figure = draw(SCENE)
    assert "drawn without the pixels of the image" in " ".join(texts(figure))
    assert len(regions(figure)) == 3


def test_texts_of_a_figure():
    cost = PredictionCost(1234, 5, 6, 0.0123, 7, 8, 0.1, 0.1, 0.2)
    known = {name: getattr(SCENE, name) for name in ("label", "probability", "levels")}
    more = {"cost": cost, "warnings": ("a b c", "d", "e")}
    found = texts(draw(record(*SCENE.windows, **known, **more), Meadow()))
    assert found[:2] == ["river 97 %", "scenes/a.tif"]
    facts = "4,000 x 3,000 pixels · model default · 1,234 regions read"
    assert found[2] == f"{facts} · 1.23 % of the pixels decoded"
    story = found[found.index("How the answer changed") + 1 :][:9]
    assert story[::3] == ["forest", "river", "river"]
    assert story[1::3] == ["55 %", "91 %", "97 %"]
    assert story[2::3] == [
        "after level 1, 1 region", "after level 2, 2 regions", "after level 3, 1 region"
    ]  # fmt: skip
    assert {"level 1: the whole image", "level 2: 2 regions", "level 3: 1 region"} <= {*found}
    assert "thicker lines: more attention, up to 0.6" in found
    assert found[found.index("Warnings") + 1 :][:3] == ["a b c", "d", "and 1 more"]
    captions = found[found.index("Views, by level and rank") + 1 :]
    assert captions[:4] == ["1.1", "level 1, rank 1", "the whole image", "forest 55 %"]
    assert captions[4:8] == ["2.1", "level 2, rank 1", "attention 0.3", "river 93 %"]


def test_selected_levels_are_noted():
    found = texts(draw(SCENE, Meadow(), levels={3, 2}))
    assert "only levels 2, 3" in found
    assert "level 1: the whole image" not in found


def bar(figure):
    """Return the width of the scale bar: the widest filled patch below the overview."""
    left, _, _, bottom = place(figure)
    bars = [
        each.get_width()
        for each in figure.axes[0].patches
        if each.fill and each.get_x() == left and each.get_y() > bottom
    ]
    return max(bars, default=0)


DEGREES = (0.001, 0.0, 15.0, 0.0, -0.001, 61.5)  # 3000 rows: the centre is 60 degrees north


TURNED = (1.7320508, 1.0, 4e5, 1.0, -1.7320508, 5e6)  # 2 m a pixel, turned by 30 degrees


@pytest.mark.parametrize(
    ("facts", "metres", "word"),
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
def test_the_scale_bar_is_as_long_as_it_says(facts, metres, word):
    figure = draw(record(**facts), Meadow())
    left, _, right, _ = place(figure)
    (said,) = [text for text in texts(figure) if text == word]
    number, unit = said.split()[:2]
    length = float(number) * {"km": 1e3, "m": 1.0, "µm": 1e-6}[unit]
    # A degree is measured on a sphere, half a per cent wrong at most.
    assert bar(figure) == pytest.approx(length / metres / 4000 * (right - left), rel=0.006)


@pytest.mark.parametrize("shape", [(4000, 3000), (300, 100_000), (100_000, 300)])
def test_the_text_of_the_bar_stays_below_the_image(shape):
    world = (360 / shape[0], 0.0, -180.0, 0.0, -170 / shape[1], 85.0)
    where = {"crs": "EPSG:4326", "transform": world, "width": shape[0], "height": shape[1]}
    figure = draw(record(**where), Meadow(), size=600)
    found = texts(figure)
    first = next(number for number, text in enumerate(found) if " km" in text)
    said = found[first : found.index("Regions")]
    assert " ".join(said).endswith("km from left to right at the centre")


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"crs": "no such thing", "transform": UTM["transform"]},
        {"crs": "EPSG:99999999", "transform": UTM["transform"]},
        {"crs": "EPSG:3857", "transform": (1.0, 0.0, 1e12, 0.0, -1.0, 1e12)},  # PROJ would hang
        {"crs": "EPSG:3857", "transform": (1e8, 0.0, 0.0, 0.0, -1.0, 0.0)},
        {"transform": UTM["transform"]},
        {"mpp": (1e-7, 1.0)},  # smaller than an atom
    ],
)
def test_without_a_resolution_there_is_no_bar(facts):
    assert metres_of(record(**facts)) is None
    assert not bar(draw(record(**facts), Meadow()))


@given(st.floats(1e-10, 1e9))
def test_a_length_is_round_and_as_long_as_it_may_be(most):
    found = round_length(most)
    assert most * (1 - 1e-6) / 2.5 <= found <= most * (1 + 1e-6)
    first = found / 10 ** math.floor(math.log10(found) + 1e-9)
    assert min(abs(first - each) for each in (1, 2, 5)) < 1e-9


@pytest.mark.parametrize(
    ("metres", "text"),
    [
        (2e7, "20,000 km"),
        (1000.0, "1 km"),
        (500.0, "500 m"),
        (0.5, "50 cm"),
        (0.02, "20 mm"),
        (5e-4, "500 µm"),
        (1e-6, "1 µm"),
        (5e-8, "50 nm"),
    ],
)
def test_lengths_are_in_the_usual_unit(metres, text):
    assert length_text(metres) == text


@pytest.mark.parametrize("latitude", [0, 60, -80])
def test_degrees_are_shorter_away_from_the_equator(latitude):
    transform = (1e-4, 0.0, 10.0, 0.0, -1e-4, latitude + 0.15)
    across, down, is_even = metres_of(record(crs="EPSG:4326", transform=transform))
    sine = math.sin(math.radians(latitude))
    bent = 1 - 0.00669438 * sine**2  # on the ellipsoid of WGS 84
    metres = math.radians(1e-4) * 6_378_137
    assert across == pytest.approx(
        metres / math.sqrt(bent) * math.cos(math.radians(latitude)), rel=0.007
    )
    assert down == pytest.approx(metres * (1 - 0.00669438) / bent**1.5, rel=0.007)
    assert is_even


def test_maps_that_stretch_are_measured_on_the_ground():
    north = 8_399_738.0  # 60 degrees
    mercator = (10.0, 0.0, 0.0, 0.0, -10.0, north + 15_000)
    assert metres_of(record(crs="EPSG:3857", transform=mercator))[0] == pytest.approx(5.0, rel=0.01)
    feet = (1.0, 0.0, 980_000.0, 0.0, -1.0, 200_000.0)
    assert metres_of(record(crs="EPSG:2263", transform=feet))[0] == pytest.approx(
        1200 / 3937, rel=0.001
    )
    world = (0.09, 0, -180.0, 0, -0.06, 90.0)
    assert not metres_of(record(crs="EPSG:4326", transform=world))[2]
    assert metres_of(record(mpp=(0.25, 0.5), **UTM))[0] == pytest.approx(10.0)


@pytest.mark.parametrize("name", ["a.png", "a.JPEG", "output", "sc\udcffene.PNG"])
def test_the_suffix_selects_png_or_jpeg(name, tmp_path):
    path = write("figure", tmp_path / name, SCENE, size=700, pixels=False)
    with Image.open(path) as figure:
        figure.load()
        assert figure.format == ("JPEG" if name.endswith("JPEG") else "PNG")
        assert (figure.mode, figure.width) == ("RGB", 700)


@pytest.mark.parametrize("size", [599, 5001])
def test_a_width_out_of_range_is_an_error(size):
    with pytest.raises(ValidationError):
        FigureOptions(size=size)


HOSTILE = [
    "",
    "a\nb\tc\0d$\\frac{a}{b}$ and $x_",
    "</script>\u202eevil\u200d שלום мир Ω 日本語 \U0001f480 \ud83d \udcff",
    "W" * 1000,
    "long words " * 200,
    "e" + "\u0301" * 500,
]


@pytest.mark.parametrize("label", HOSTILE)
def test_no_label_breaks_out_of_its_place(label):
    hostile = record(
        ROOT,
        window("root/0-1", (1000, 0, 3000, 1500), 0.3, label=label),
        image=f"{label}/{label}",
        model=label,
        label=label,
        probability=0.5,
        levels=(LevelRecord(1, 1, label, 0.5),),
        warnings=(label,),
        **UTM,
    )
    assert 420 < len(pixels(draw(hostile, Meadow(), size=600))) < 1200


def test_of_many_regions_the_strongest_are_drawn_and_the_first_listed():
    random = np.random.default_rng(0)
    many = [
        window(f"root/{n}-0", (x, y, x + 300, y + 200), float(a), rank=n + 1)
        for n, (x, y, a) in enumerate(random.random((200, 3)) * [3700, 2800, 0.5])
    ]
    figure = draw(record(*many), Meadow())
    found = " ".join(texts(figure))
    assert "level 2: 200 regions, the 100 with the highest attention are drawn" in found
    assert "and 152 more" in found
    assert len(regions(figure)) == 100
    assert len(pixels(figure)) < 4000


@pytest.mark.parametrize("attention", [0.0, 1e-300, 1.000001])
def test_attention_at_its_limits_is_drawn(attention):
    one = record(ROOT, window("root/0-0", (400, 400, 2000, 2000), attention))
    figure = draw(one, Meadow())
    assert f"attention {min(attention, 1.0):g}" in texts(figure)
    (patch,) = regions(figure)
    assert 2 <= patch.get_linewidth() <= 7


def test_a_probability_that_was_rounded_above_one_is_drawn():
    shown = window("root/0-0", (400, 400, 2000, 2000), probability=1.0000005)
    levels = (LevelRecord(1, 1, "river", 1.0000005),)
    found = texts(draw(record(shown, probability=1.0000005, levels=levels), Meadow()))
    assert [found[0], found[-1]] == ["river > 99 %"] * 2
    assert "> 99 %" in found


@pytest.mark.parametrize("shape", [(100_000, 300), (300, 100_000), (1, 1), (1, 10**9)])
def test_strips_give_figures_of_sane_shapes(shape):
    size, (width, height) = 600, shape
    strip = record(
        window(box=(0, 0, width, height)),
        window("root/0-0", (0, 0, width / 2, height / 2)),
        width=width,
        height=height,
    )
    figure = draw(strip, Meadow(), size=size)
    assert size * 0.3 < figure.get_size_inches()[1] * 72 < size * 2.5
    left, top, right, bottom = place(figure)
    assert min(right - left, bottom - top) * 9 > max(right - left, bottom - top)
    assert any(text.startswith("drawn ") for text in texts(figure)) == (width != height)
