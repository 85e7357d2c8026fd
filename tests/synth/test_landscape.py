import io
import pickle
import zipfile
from collections import Counter
from itertools import product

import numpy as np
import pytest
from PIL import Image
from PIL.Image import Transpose

from tests.images import area_average
from tests.synth.test_tiles import encode, write_zip
from tnetcli.config import SPLITS
from tnetcli.data.config import LandscapeConfig, TilesConfig
from tnetcli.errors import RecipeError
from tnetcli.geometry import Size, Window
from tnetcli.readers.base import Box, Cost
from tnetcli.synth import landscape
from tnetcli.synth.landscape import LandscapeMaker, cubic_weights
from tnetcli.synth.tiles import read_tiles
from tnetcli.testing.reader import SMALL_BOXES, ReaderContract, area_mean, random_windows

SIDE = 8
BACKGROUND = ("crop", "forest", "pasture", "sea")
SITES = ("harbour", "town")
RULES = LandscapeConfig(size=128, background=BACKGROUND, sites=SITES, neighbours=5)


def tile_pixels(seed, kind, side=SIDE, bands=3):
    """Return a tile with a colour of its own, a slope, and some grain."""
    random = np.random.default_rng([seed, kind])
    colour = 40 + 25 * kind + random.uniform(-15, 15, bands)
    y, x = np.mgrid[0:side, 0:side] / side
    slope = (random.uniform(-30, 30) * x + random.uniform(-30, 30) * y)[..., None]
    grain = random.normal(0, 4, (side, side, bands))
    return np.clip(np.rint(colour + slope + grain), 0, 255).astype(np.uint8)


def tile_files(count=40, side=SIDE, bands=3):
    return {
        f"{name}/{number}.png": encode(tile_pixels(number, kind, side, bands).squeeze())
        for kind, name in enumerate((*BACKGROUND, *SITES))
        for number in range(count)
    }


@pytest.fixture(scope="module")
def tiles(tmp_path_factory):
    return read_tiles(write_zip(tmp_path_factory.mktemp("tiles") / "tiles.zip", tile_files()))


@pytest.fixture(scope="module")
def maker(tiles):
    return LandscapeMaker(tiles, "train", RULES)


def maker_of(tiles, split="train", **changes):
    return LandscapeMaker(tiles, split, RULES.model_copy(update=changes))


def scene_with(maker, shift, training=False):
    """Return a scene with a site that is seen through a certain shift, in half tiles."""
    half = maker.tiles.side // 2
    for seed in range(200):
        scene = maker.scene(seed, training=training)
        if scene.boxes and scene.composition.shift == (shift[0] * half, shift[1] * half):
            return scene
    raise AssertionError("no such scene")


def whole(scene, level=0):
    size = scene.info.levels[level].size
    return Box(0, 0, size.width, size.height)


def build_slowly(scene, path, scale=1, prefix=""):
    """Lay tile by tile, each mirrored, turned and averaged on its own by Pillow."""
    made, tiles = scene.composition, scene._tiles
    side = tiles.side // scale
    rows, columns = made.tiles.shape
    canvas = np.zeros((rows * side, columns * side, tiles.bands))
    with zipfile.ZipFile(path) as archive:
        for row, column in product(range(rows), range(columns)):
            name = tiles.names[made.tiles[row, column]]
            image = Image.open(io.BytesIO(archive.read(prefix + name)))
            mirrored, turns = divmod(int(made.turns[row, column]), 4)
            if mirrored:
                image = image.transpose(Transpose.FLIP_LEFT_RIGHT)
            for _ in range(turns):
                image = image.transpose(Transpose.ROTATE_90)
            pixels = np.array(image).reshape(tiles.side, tiles.side, -1).transpose(2, 0, 1)
            y, x = row * side, column * side
            canvas[y : y + side, x : x + side] = area_average(pixels, scale).transpose(1, 2, 0)
    x, y = made.shift[0] // scale, made.shift[1] // scale
    size = -(-scene.size.width // scale)
    return canvas[y : y + size, x : x + size]


def shade_slowly(values, made):
    return np.clip(values * made.gain.astype(np.float64) + made.offset, 0, 255)


@pytest.mark.parametrize("shift", [(0, 0), (1, 0), (0, 1), (1, 1)])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_scene_is_its_tiles_turned_as_by_pillow(tiles, shift, level):
    scene = scene_with(maker_of(tiles, size=256), shift)
    expected = build_slowly(scene, tiles.path, 2**level)
    assert np.array_equal(scene.draw(whole(scene, level), level), expected)


def test_every_turn_and_every_shift_occurs(maker):
    scenes = [maker.scene(seed, training=False) for seed in range(60)]
    turns = np.concatenate([scene.composition.turns.ravel() for scene in scenes])
    share = np.bincount(turns, minlength=8) / len(turns)
    assert np.abs(share - 1 / 8).max() < 0.01
    assert {scene.composition.shift for scene in scenes} == {(0, 0), (0, 4), (4, 0), (4, 4)}


@pytest.mark.parametrize("level", [0, 1])
def test_in_training_brightness_varies_and_is_rounded_once(maker, level):
    scene = scene_with(maker, (1, 1), training=True)
    expected = shade_slowly(build_slowly(scene, maker.tiles.path, 2**level), scene.composition)
    drawn = scene.draw(whole(scene, level), level)
    assert np.abs(drawn - expected).max() <= 0.5 + 1e-4


def test_grey_tiles_make_grey_scenes(tmp_path):
    grey = read_tiles(write_zip(tmp_path / "grey.zip", tile_files(20, bands=1)))
    scene = scene_with(maker_of(grey), (1, 0), training=True)
    expected = shade_slowly(build_slowly(scene, grey.path), scene.composition)
    assert scene.bands == ("1",)
    assert np.abs(scene.draw(whole(scene)) - expected).max() <= 0.5 + 1e-4


def test_values_beyond_white_and_black_are_clipped(tiles):
    maker, found = maker_of(tiles, gain=0.99, offset=0.99), []
    for seed in range(8):
        scene = maker.scene(seed, training=True)
        expected = shade_slowly(build_slowly(scene, tiles.path), scene.composition)
        found.append(scene.draw(whole(scene)))
        assert np.abs(found[-1] - expected).max() <= 0.5 + 1e-4
    assert (np.min(found), np.max(found)) == (0, 255)


def test_colours_stay_within_the_limits_of_the_recipe(maker):
    made = [maker.compose(seed, training=True) for seed in range(150)]
    gains = np.array([each.gain for each in made])
    offsets = np.array([each.offset for each in made])
    assert 0.88 * 0.96 <= gains.min() < 0.9
    assert 1.1 < gains.max() <= 1.12 * 1.04
    assert (gains.max(1) / gains.min(1)).max() <= 1.04 / 0.96 + 1e-6
    assert 7 < np.abs(offsets).max() <= 0.03 * 255
    assert np.std(gains[:, 0]) > 3 * np.std(gains[:, 0] - gains.mean(1))


def test_training_changes_nothing_but_colours(maker):
    one, other = (maker.compose(7, training=training) for training in (True, False))
    assert other.gain is None
    assert one.shift == other.shift
    assert np.array_equal(one.tiles, other.tiles)
    assert np.array_equal(one.turns, other.turns)


def test_any_part_is_drawn_as_it_is_in_the_whole(maker):
    random = np.random.default_rng(0)
    for seed in range(4):
        scene = maker.scene(seed, training=True)
        for level in (0, 1):
            full = scene.draw(whole(scene, level), level)
            for _ in range(20):
                left, top = random.integers(0, len(full) - 1, 2)
                width, height = random.integers(1, len(full) - max(left, top), 2)
                box = Box(int(left), int(top), int(width), int(height))
                part = full[box.top : box.bottom, box.left : box.right]
                assert np.array_equal(scene.draw(box, level), part)


@pytest.mark.parametrize("size", [1024, 1100])
def test_views_coarser_than_a_tile_are_area_means(tiles, size):
    scene = scene_with(maker_of(tiles, size=size), (1, 1))
    full = scene.draw(whole(scene)).transpose(2, 0, 1)
    assert [each.scale_x for each in scene.info.levels] == [1, 2, 4]
    for scale in (8, 16):  # a tile is a pixel, and half a pixel
        expected = area_average(full, scale).astype(int)
        side = expected.shape[1]
        drawn = scene.read(Window(0, 0, side * scale, side * scale), Size(side, side)).values
        assert np.abs(drawn - expected).max() <= 1


@pytest.fixture(scope="module")
def large_scene(tiles):
    return scene_with(maker_of(tiles, size=304), (1, 0), training=True)


@pytest.fixture(scope="module")
def large_truth(large_scene, tiles):
    slow = shade_slowly(build_slowly(large_scene, tiles.path), large_scene.composition)
    return np.rint(slow).astype(np.uint8).transpose(2, 0, 1)


class TestLandscapeScene(ReaderContract):
    block = Size(1, 1)
    # Tiles meet at sharp borders, which windows at any fraction of a pixel cut through.
    area_tolerance = 4.0

    @pytest.fixture
    def image(self, large_scene):
        return large_scene

    @pytest.fixture
    def truth(self, large_truth):
        return large_truth

    def open(self, scene):
        return pickle.loads(pickle.dumps(scene))

    # There is no file, and every level shows the same landscape.
    test_unpickling_opens_nothing = None
    test_a_file_replaced_while_open_is_an_error = None
    test_a_file_may_have_any_name = None
    test_the_cost_of_a_small_window_is_the_blocks_it_touches = None

    @pytest.mark.parametrize("box", SMALL_BOXES)
    def test_the_cost_is_the_pixels_that_are_drawn(self, reader, box):
        reader.read(Window(*box), Size(box[2], box[3]))
        assert reader.cost == Cost(self.count_blocks(reader.size, box), 0)

    def test_a_view_near_full_resolution_is_the_exact_area_mean(self, reader, truth):
        for window, _ in random_windows(20, reader.size, seed=11):
            out_size = Size(int(window.width / 1.7) + 1, int(window.height / 1.3) + 1)
            pixels = reader.read(window, out_size)
            expected = area_mean(truth, window, out_size)
            assert np.abs(pixels.values - expected)[:, pixels.valid].max() <= 0.501


def test_a_seed_determines_a_scene(tiles, maker):
    again = LandscapeMaker(tiles, "train", RULES)
    view = Window(0, 0, 128, 128), Size(64, 64)
    for seed in (3, 1, 2):
        one, other = (each.scene(seed, training=True) for each in (maker, again))
        assert np.array_equal(one.read(*view).values, other.read(*view).values)
        assert (one.label, one.boxes, one.path) == (other.label, other.boxes, other.path)
    views = {maker.scene(seed, training=True).read(*view).values.tobytes() for seed in range(50)}
    assert len(views) == 50


def test_splits_share_no_tile_and_no_layout(tiles):
    layouts = []
    for number, split in enumerate(SPLITS):
        maker = maker_of(tiles, split)
        for seed in range(30):
            made = maker.compose(seed, training=False)
            assert (tiles.splits[made.tiles] == number).all()
            layouts.append(made.kinds.tobytes())
    assert len(set(layouts)) == len(layouts)


def test_labels_are_uniform_over_sites_and_none(maker):
    labels = Counter(maker.compose(seed, training=False).label for seed in range(450))
    assert set(labels) == {"none", *SITES}
    # Four standard deviations of a fair choice.
    assert all(abs(count - 150) < 40 for count in labels.values())


def test_without_an_empty_label_every_scene_has_a_site(tiles):
    maker = maker_of(tiles, empty=None)
    scenes = [maker.scene(seed, training=False) for seed in range(40)]
    assert {scene.label for scene in scenes} == set(SITES)
    assert all(scene.boxes for scene in scenes)


def kind_map(scene):
    """Return the class of tiles under every pixel, (height, width)."""
    made, side = scene.composition, scene._tiles.side
    x, y = made.shift
    size = scene.size.width
    large = np.repeat(np.repeat(made.kinds, side, 0), side, 1)
    return large[y : y + size, x : x + size]


def test_a_site_is_a_square_of_its_class_within_the_scene_and_its_box(maker):
    sides = Counter()
    places = set()
    for seed in range(150):
        scene = maker.scene(seed, training=False)
        is_site = kind_map(scene) >= len(BACKGROUND)
        if scene.label == "none":
            assert scene.boxes == ()
            assert not is_site.any()
            continue
        (box,) = scene.boxes
        assert 0 <= box.left < box.right <= 128
        assert 0 <= box.top < box.bottom <= 128
        left, top, right, bottom = (int(edge) for edge in box.box)
        inside = kind_map(scene)[top:bottom, left:right]
        assert (inside == maker.tile_classes.index(scene.label)).all()
        assert is_site.sum() == inside.size
        assert box.width == box.height
        sides[int(box.width) // SIDE] += 1
        places.add((left, top))
    assert set(sides) == {3, 4, 5, 6}
    assert min(left for left, _ in places) <= SIDE
    assert max(top for _, top in places) >= 128 - 4 * SIDE
    assert len(places) > 50


def test_the_background_is_of_two_to_four_classes(tiles):
    maker = maker_of(tiles, size=1024, empty="none")
    counts = Counter()
    kinds = Counter()
    for seed in range(60):
        made = maker.compose(seed, training=False)
        found = [kind for kind in np.unique(made.kinds) if kind < len(BACKGROUND)]
        counts[len(found)] += 1
        kinds.update(found)
    assert set(counts) <= {1, 2, 3, 4}  # a field may be nowhere the largest
    assert min(counts[2], counts[3], counts[4]) > 5
    assert set(kinds) == {0, 1, 2, 3}


def test_fields_are_smooth_but_for_noise(tiles, monkeypatch):
    def borders(noise):
        monkeypatch.setattr(landscape, "EDGE_NOISE", noise)
        maker = maker_of(tiles, size=1024, sites=SITES)
        made = [maker.compose(seed, training=False).kinds for seed in range(20)]
        return np.mean([(kinds[:, 1:] != kinds[:, :-1]).mean() for kinds in made])

    smooth, usual, wild = borders(0.0), borders(0.15), borders(5.0)
    assert smooth < 0.1
    assert smooth < usual < 0.2
    assert wild > 0.4


def test_weights_are_those_of_bicubic_resizing_by_pillow():
    points = np.random.default_rng(0).normal(size=(7, 7)).astype(np.float32)
    weights = cubic_weights(70, 7)
    resized = np.array(Image.fromarray(points).resize((70, 70), Image.Resampling.BICUBIC))
    # Pillow leaves out what is beyond the border, we repeat the last point.
    inner = slice(15, 55)
    assert np.abs(weights @ points @ weights.T - resized)[inner, inner].max() < 1e-4
    assert np.abs(weights.sum(1) - 1).max() < 1e-6


def test_tiles_of_a_class_are_nearest_to_one_of_them(tiles, maker):
    looks = np.concatenate(
        [tiles.levels[0].mean((1, 2)), tiles.levels[0].std((1, 2))], 1, dtype=np.float64
    )
    for seed in range(30):
        made = maker.compose(seed, training=False)
        for kind, name in enumerate(maker.tile_classes):
            used = set(made.tiles[made.kinds == kind])
            members = tiles.chosen("train", name)
            distance = np.linalg.norm(looks[members][:, None] - looks[members], axis=2)
            pools = [set(members[np.argsort(row)[:5]]) for row in distance]
            assert any(used <= pool for pool in pools)


def test_all_tiles_of_a_small_class_are_used(tiles):
    maker = maker_of(tiles, "test", neighbours=1000)
    made = [maker.compose(seed, training=False) for seed in range(60)]
    for kind, name in enumerate(maker.tile_classes):
        used = {tile for each in made for tile in each.tiles[each.kinds == kind]}
        assert used == set(tiles.chosen("test", name))


def test_without_an_empty_label_a_window_beside_the_site_shows_nothing(tiles):
    scene = maker_of(tiles, empty=None).scene(0, training=False)
    (box,) = scene.boxes
    assert scene.shown(box) == SITES.index(scene.label)
    assert scene.shown(Window(box.right, box.top, 20, 20)) == -1


WINDOWS = [
    (Window(0, 0, 128, 128), 16),
    (Window(3, 17, 50, 70), 7),
    (Window(10.25, 4.75, 31.5, 31.5), 5),
    (Window(96, 96, 64, 64), 4),
    (Window(-30, 100, 60, 90), 3),
    (Window(5.1, 5.2, 0.5, 0.5), 1),
    (Window(-300, -300, 728, 728), 9),
]


@pytest.mark.parametrize(("window", "cells"), WINDOWS)
@pytest.mark.parametrize("shift", [(0, 0), (1, 1)])
def test_fractions_are_the_shares_of_pixels(maker, shift, window, cells):
    scene = scene_with(maker, shift)
    each = np.arange(len(maker.tile_classes))[:, None, None]
    pixels = (kind_map(scene) == each).astype(float)  # (classes, height, width)
    found = scene.fractions(window, cells)
    assert found.shape == (cells, cells, len(maker.tile_classes))
    assert found.dtype == np.float32
    expected = area_mean(pixels, window, Size(cells, cells)).transpose(1, 2, 0)
    assert np.abs(found - expected).max() < 1e-6


def test_fractions_outside_of_the_scene_are_zero(maker):
    scene = maker.scene(0, training=False)
    for window in (Window(-50, 0, 20, 20), Window(0, 128, 20, 20), Window(500, 500, 1, 1)):
        assert not scene.fractions(window, 3).any()


def test_a_window_shows_the_site_if_it_has_half_of_it_or_is_a_quarter_site(maker):
    scene = scene_with(maker, (0, 0))
    (box,) = scene.boxes
    side, number = box.width, RULES.classes.index(scene.label)
    beside = box.left - side / 2
    assert scene.shown(box) == number
    assert scene.shown(Window(0, 0, 128, 128)) == number
    assert scene.shown(Window(box.left + 1, box.top + 1, 2, 2)) == number
    # Half of the site in a window that is large: enough; a little less: not.
    assert scene.shown(Window(box.left + side / 2, box.top, 500, 500)) == number
    assert scene.shown(Window(box.left + side / 2 + 0.01, box.top, 500, 500)) == -1
    # A quarter of the window is site, a sixteenth of the site is in it.
    assert scene.shown(Window(beside, box.top, side, side)) == number
    quarter = side / 2
    corner = Window(box.left - quarter / 2, box.top - quarter / 2, quarter, quarter)
    assert scene.shown(corner) == number
    assert scene.shown(Window(corner.left - 0.01, corner.top, quarter, quarter)) == -1


def test_a_window_beside_the_site_shows_the_empty_class(maker):
    scene = scene_with(maker, (0, 0))
    (box,) = scene.boxes
    assert RULES.classes[0] == "none"
    assert scene.shown(Window(box.right, box.top, 20, 20)) == 0
    assert scene.shown(Window(box.left - 20, box.top - 20, 20, 20)) == 0
    assert scene.shown(Window(box.right - 0.1, box.top, 20, 20)) == -1


def test_all_windows_of_an_empty_scene_show_the_empty_class(maker):
    scene = next(
        each for each in (maker.scene(n, training=False) for n in range(50)) if not each.boxes
    )
    assert scene.label == "none"
    assert scene.shown(Window(0, 0, 128, 128)) == scene.shown(Window(30, 30, 9, 9)) == 0


def crowded(tiles, crowd, count=100):
    maker = maker_of(tiles, size=256)
    return [maker.scene(seed, training=True, crowd=crowd) for seed in range(count)]


def sites_of(scene):
    return [label for label, _ in scene.composition.sites]


def test_the_fraction_of_crowded_scenes_is_as_configured(tiles):
    found = crowded(tiles, TilesConfig(crowded=0.7, sites=(2, 5)))
    share = np.mean([scene.label == "" for scene in found])
    assert share == pytest.approx(0.7, abs=0.1)
    counts = Counter(len(scene.boxes) for scene in found if scene.label == "")
    assert set(counts) == {2, 3, 4, 5}
    assert all(len(scene.boxes) <= 1 for scene in found if scene.label)


def test_scenes_that_are_not_crowded_have_the_label_of_their_site(tiles):
    for scene in crowded(tiles, TilesConfig(crowded=0.0), 40):
        assert sites_of(scene) == ([] if scene.label == "none" else [scene.label])
        assert bool(scene.boxes) == (scene.label != "none")


def test_labels_are_as_frequent_as_their_weights(tiles):
    crowd = TilesConfig(crowded=0.0, weights={"none": 0.2, "harbour": 0.2, "town": 0.6})
    share = Counter(scene.label for scene in crowded(tiles, crowd, 300))
    assert share["town"] / 300 == pytest.approx(0.6, abs=0.1)
    assert share["none"] / 300 == pytest.approx(0.2, abs=0.08)


def test_a_label_of_weight_zero_never_occurs(tiles):
    crowd = TilesConfig(crowded=0.5, weights={"harbour": 0.0})
    labels = {label for scene in crowded(tiles, crowd, 60) for label in sites_of(scene)}
    assert labels == {"town"}


def test_a_crowded_scene_has_several_sites_and_no_label(tiles):
    maker, crowd = maker_of(tiles, size=512), TilesConfig(crowded=1.0, sites=(2, 3))
    counts = Counter()
    for seed in range(40):
        scene = maker.scene(seed, training=True, crowd=crowd)
        assert scene.label == ""
        counts[len(scene.boxes)] += 1
        in_boxes = np.zeros((512, 512), bool)
        for left, top, right, bottom in (box.box for box in scene.boxes):
            in_boxes[int(top) : int(bottom), int(left) : int(right)] = True
        assert np.array_equal(kind_map(scene) >= len(BACKGROUND), in_boxes)
    assert set(counts) == {2, 3}


def test_a_window_with_enough_of_two_kinds_of_sites_is_ambiguous(tiles):
    maker, crowd = maker_of(tiles, size=512), TilesConfig(crowded=1.0, sites=(2, 2))
    seen = Counter()
    for seed in range(40):
        scene = maker.scene(seed, training=False, crowd=crowd)
        labels = {label for label, _ in scene.composition.sites}
        found = scene.shown(Window(0, 0, 512, 512))
        assert found == (-1 if len(labels) == 2 else RULES.classes.index(*labels))
        seen[len(labels)] += 1
    assert set(seen) == {1, 2}


def test_a_crowded_scene_is_pickled_as_such(tiles):
    scene = maker_of(tiles).scene(1, training=True, crowd=TilesConfig(crowded=1.0))
    other = pickle.loads(pickle.dumps(scene))
    assert other.boxes == scene.boxes
    assert np.array_equal(other.draw(whole(other)), scene.draw(whole(scene)))


@pytest.mark.parametrize("size", [64, 95, 96])
def test_a_scene_may_be_as_small_as_a_tile(tmp_path, size):
    large = read_tiles(write_zip(tmp_path / "large.zip", tile_files(9, side=64)))
    maker = maker_of(large, size=size, empty=None)
    for seed in range(12):
        scene = maker.scene(seed, training=False)
        assert np.array_equal(scene.draw(whole(scene)), build_slowly(scene, large.path))
        (box,) = scene.boxes
        assert box.width >= 64
        assert 0 <= box.left <= box.right <= size
        pixels = scene.read(Window(-10, -10, size + 20, size + 20), Size(13, 13))
        assert pixels.valid[6, 6]


def test_a_view_of_a_gigapixel_scene_costs_four_pixels_a_tile(tmp_path):
    files = tile_files(9, side=64)
    large = read_tiles(write_zip(tmp_path / "large.zip", files))
    scene = scene_with(maker_of(large, size=32_000), (1, 1))
    made = scene.composition
    assert made.kinds.nbytes + made.tiles.nbytes + made.turns.nbytes < 2e6
    pixels = scene.read(Window(0, 0, 32_000, 32_000), Size(100, 100))
    assert pixels.valid.all()
    assert scene.cost.pixels_decoded == 1000**2
    # The mean of all tiles, but for the half that the outer ones show.
    colour = large.levels[0].mean((1, 2))[made.tiles].mean((0, 1))
    assert np.abs(pixels.values.mean((1, 2)) - colour).max() < 1
    left, top = 64 * 300 - 32, 64 * 400 - 32
    native = scene.read(Window(left, top, 64, 64), Size(64, 64)).values
    tile = np.array(Image.open(io.BytesIO(files[large.names[made.tiles[400, 300]]])))
    mirrored, turns = divmod(int(made.turns[400, 300]), 4)
    expected = np.rot90(tile[:, ::-1] if mirrored else tile, turns)
    assert np.array_equal(native, expected.transpose(2, 0, 1))


def test_a_pickled_scene_is_small(maker):
    assert len(pickle.dumps(maker.scene(5, training=True))) < 2000


def test_classes_that_tiles_lack_are_all_named(tiles):
    with pytest.raises(RecipeError, match="`desert, moon`") as caught:
        maker_of(tiles, background=("desert", "forest"), sites=("moon",))
    assert "forest" in caught.value.hint


def test_a_split_without_a_class_is_an_error(tmp_path):
    few = read_tiles(write_zip(tmp_path / "few.zip", tile_files(1)))
    missing = next(s for s in SPLITS for n in BACKGROUND if not len(few.chosen(s, n)))
    with pytest.raises(RecipeError, match=f"for {missing}"):
        maker_of(few, missing)


def test_a_scene_smaller_than_a_tile_is_an_error(tmp_path):
    huge = read_tiles(write_zip(tmp_path / "huge.zip", tile_files(1, side=256)))
    with pytest.raises(RecipeError, match="`128`"):
        maker_of(huge)
