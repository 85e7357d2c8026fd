import itertools

import numpy as np
import pytest
from PIL import Image

from tnetcli.geometry import Size, Window
from tnetcli.training.plots import COLOURS, Sample, draw_curves, draw_samples

GREEN = (0, 255, 0)
STRANGE = ["a$b", "$x$", "日本語", "\x1b[2J\n", "x" * 500, "", "%d {0}"]


def pixels(path):
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def is_colour(picture, colour):
    return (np.abs(picture.astype(int) - colour) <= 2).all(axis=2)


def of_hex(text):
    return tuple(bytes.fromhex(text[1:]))


def bounds(mask):
    """Return the edges of what is true: left, top, right, bottom."""
    rows, columns = np.nonzero(mask)
    return np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])


def line(step, **more):
    return {"stage": "look", "step": step, "loss": 3 - step / 100, **more}


def sample(**changes):
    return Sample(
        **{
            "thumbnail": np.full((30, 60, 3), GREEN, np.uint8),
            "size": Size(2000, 1000),
            "windows": [(Window(0, 0, 2000, 1000), 1, 1.0)],
            "label": "river",
            "predicted": "river",
            "probability": 0.8,
            **changes,
        }
    )


LINES = tuple(
    line(
        step,
        accuracy=[0.2, 0.3 + step / 1000, 0.4],
        entropy=[0.9, 0.8],
        validation={"accuracy": 0.5, "loss": 2.0} if step % 100 == 0 else None,
    )
    for step in range(0, 300, 10)
)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    path = tmp_path_factory.mktemp("curves") / "a.png"
    draw_curves(LINES, path)
    return path


class TestCurves:
    def test_every_level_has_a_colour_of_its_own(self, drawn):
        picture = pixels(drawn)
        assert all(is_colour(picture, of_hex(colour)).sum() > 50 for colour in COLOURS[:4])

    @pytest.mark.parametrize(
        "lines",
        [
            [],
            [{"step": 3}],
            [line(0), line(10, loss=float("nan")), line(20, loss=float("inf")), line(30)],
            [line(0, accuracy=None, validation=None), line(1, accuracy=[0.1, None], entropy="x")],
            [line(0, accuracy=[0.1]), line(1, accuracy=[0.1, 0.2]), line(2, accuracy=0.5)],
            [line(0, validation={"accuracy": [0.1, 0.2], "hit": [0.5], "random_accuracy": 0.1})],
            [{"stage": name, "step": 0, "loss": 1.0} for name in STRANGE],
        ],
        ids=range(7),
    )
    def test_what_is_missing_is_left_out(self, lines, tmp_path):
        draw_curves(lines, tmp_path / "a.png")
        assert pixels(tmp_path / "a.png").std() > 0


class TestSamples:
    @pytest.mark.parametrize("level", [2, 3])
    def test_a_window_is_drawn_where_it_is_in_the_colour_of_its_level(self, level, tmp_path):
        window = Window(500, 250, 1000, 500)  # the middle half
        draw_samples([sample(windows=[(window, level, 0.4)])], tmp_path / "a.png")
        picture = pixels(tmp_path / "a.png")
        image = bounds(is_colour(picture, GREEN))
        drawn = bounds(is_colour(picture, of_hex(COLOURS[level - 2])))
        width, height = image[2] - image[0], image[3] - image[1]
        quarter = np.array([width, height, -width, -height]) / 4
        assert drawn == pytest.approx(image + quarter, abs=3)

    def test_the_whole_image_needs_no_frame(self, tmp_path):
        draw_samples([sample()], tmp_path / "a.png")
        picture = pixels(tmp_path / "a.png")
        assert not any(is_colour(picture, of_hex(colour)).any() for colour in COLOURS)

    def test_a_true_box_is_dashed(self, tmp_path):
        draw_samples([sample(boxes=[Window(400, 200, 1200, 600)])], tmp_path / "a.png")
        picture = pixels(tmp_path / "a.png")
        left, top, right, bottom = bounds(is_colour(picture, GREEN))
        middle = picture[top + (bottom - top) // 2, left:right]
        assert not is_colour(middle[None], GREEN).all()
        row = top + (bottom - top) // 5
        edge = [tuple(each) for each in picture[row, left + 80 : right - 80]]
        colours = [each for each, _ in itertools.groupby(edge)]
        assert len(colours) > 10  # black and white in turn

    def test_a_window_past_the_edge_does_not_move_the_image(self, tmp_path):
        past = [(Window(-1000, -1000, 5000, 4000), 2, 0.1)]
        draw_samples([sample(windows=past)], tmp_path / "a.png")
        draw_samples([sample()], tmp_path / "b.png")
        (a, b) = (bounds(is_colour(pixels(tmp_path / name), GREEN)) for name in ("a.png", "b.png"))
        assert a == pytest.approx(b, abs=2)

    @pytest.mark.parametrize(("count", "rows"), [(4, 1), (5, 2)])
    def test_images_stand_in_rows_of_four(self, count, rows, tmp_path):
        draw_samples([sample()] * count, tmp_path / "a.png")
        green = is_colour(pixels(tmp_path / "a.png"), GREEN).any(axis=1)
        assert np.sum(green[1:] & ~green[:-1]) == rows

    def test_any_name_can_be_drawn(self, tmp_path):
        strange = [sample(label=name, predicted="river") for name in STRANGE]
        draw_samples(strange, tmp_path / "a.png")
        assert pixels(tmp_path / "a.png").std() > 0
