import base64
import hashlib
import io
import json
import re
import tracemalloc
from contextlib import contextmanager
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.exporters.imagery import Places, places
from tests.exporters.records import UTM, failed, record, replace, to_lonlat, window
from tnetcli.errors import ImageError
from tnetcli.exporters.geojson import as_hex, attention_colour
from tnetcli.exporters.html import (
    MAX_REGIONS,
    Detail,
    HTMLOptions,
    page_text,
    strongest,
)
from tnetcli.prediction.record import LevelRecord, PredictionCost, Problem

COST = PredictionCost(3, 1_000_000, 12_000_000, 1 / 12, 400_000, 9_000_000, 0.1, 0.2, 0.3)


LEVELS = (LevelRecord(1, 1, "forest", 0.55), LevelRecord(2, 2, "river", 0.91))


SCENE = record(
    window("root", (0, 0, 4000, 3000), 1.0, label="forest", probability=0.55),
    window("root/0-2", (1000.5, 500, 2000.5, 1250), 0.25, probabilities=(0.07, 0.93)),
    window("root/1-1", (3500, 2500, 4500, 3250), 0.125, rank=2),
    label="river",
    probability=0.97,
    levels=LEVELS,
    cost=COST,
    warnings=("bands were guessed",),
    config={"levels": 2, "keep": [2], "budget": None, "view_size": 128},
    stop_reason="max_level",
    **UTM,
)


FAILED = failed(error=Problem("ImageError", "damaged", "copy it"))


HOSTILE = [
    "</script><script>alert(1)</script>",
    "<!--<script>",
    "\"'`&amp;<b>\u2028\u2029\u202e",
    "\x00\r\n\t\x1b[0m\x7f",
    "{{script}}{{images}}",
    "x" * 1000,
    "__proto__",
]


class Read(HTMLParser):
    """The parts of a page, by the parser of Python."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.blocks, self.rows, self.texts = [], {}, [], {}
        self._now = ("", {})
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._now = self.tags[-1]

    def handle_data(self, data):
        tag, attributes = self._now
        if attributes.get("type") == "application/json":
            if attributes.get("class") == "row":
                self.rows.append(json.loads(data))
            else:
                self.blocks[attributes["id"]] = json.loads(data)
            self._now = ("after", {})
        else:
            self.texts[tag] = self.texts.get(tag, "") + data

    def handle_endtag(self, tag):
        self._now = ("after", {})

    def count(self, name):
        return sum(tag == name for tag, _ in self.tags)

    @property
    def policy(self):
        return next(a["content"] for _, a in self.tags if "http-equiv" in a)


def pieces(*predictions, imagery=None, **options):
    options = {"pixels": imagery is not None} | options
    return page_text(predictions, HTMLOptions(**options), open_image=imagery)


def read(*predictions, **options):
    return Read("".join(pieces(*predictions, **options)))


def decoded(source):
    kind, data = re.fullmatch(r"data:image/(\w+);base64,(.*)", source).groups()
    return kind, Image.open(io.BytesIO(base64.b64decode(data)))


def test_a_page_shows_the_record():
    page = read(SCENE, imagery=places)
    (row,) = page.rows
    image = page.blocks["image-1"]
    names = [name for name, _ in image["names"]]
    assert (row["id"], row["label"], row["probability"]) == ("scenes/a.tif", "river", 0.97)
    assert (row["windows"], row["fraction"], row["status"]) == (3, 1 / 12, "ok")
    assert (image["width"], image["height"], names[image["label"]]) == (4000, 3000, "river")
    assert [[names[number], probability] for number, probability in image["classes"]] == [
        ["river", 0.97],
        ["forest", 0.03],
    ]
    levels = [
        (e["level"], e["windows"], names[e["label"]], e["probability"]) for e in image["levels"]
    ]
    assert levels == [(1, 1, "forest", 0.55), (2, 2, "river", 0.91)]
    assert image["warnings"] == ["bands were guessed"]
    assert image["cost"]["pixels_decoded"] == 1_000_000
    assert ["keep", "[2]"] in image["facts"]
    assert "budget" not in dict(image["facts"])
    for seen, each in zip(SCENE.windows, image["windows"], strict=True):
        assert each["path"] == seen.path
        assert tuple(each["box"]) == seen.box
        assert each["attention"] == each["joint"] == seen.attention
        assert names[each["label"]] == seen.label
        assert each["colour"] == as_hex(attention_colour(seen.attention))
    assert [names[number] for number, _ in image["windows"][1]["classes"]] == ["river", "forest"]


def test_centres_are_where_gdal_puts_them():
    image = read(SCENE).blocks["image-1"]
    middles = [((b[0] + b[2]) / 2, (b[1] + b[3]) / 2) for b in (w.box for w in SCENE.windows)]
    expected = to_lonlat(middles, **UTM)
    assert np.allclose([each["centre"] for each in image["windows"]], expected, atol=6e-7)


@pytest.mark.parametrize(
    "place",
    [
        {},
        {"crs": "EPSG:99999999", "transform": UTM["transform"]},
        {"crs": None, "transform": UTM["transform"]},
    ],
)
def test_an_image_without_a_place_has_no_centres(place):
    image = read(record(window(), **place)).blocks["image-1"]
    assert [each["centre"] for each in image["windows"]] == [None]


def test_longitudes_stay_within_half_a_turn():
    prediction = record(window(), crs="EPSG:4326", transform=(1.0, 0.0, 170.0, 0.0, -1.0, 45.0))
    (each,) = read(prediction).blocks["image-1"]["windows"]
    assert each["centre"] == [-140.0, 5.0]


def test_the_page_may_load_nothing_and_run_only_its_own_script():
    page = read(SCENE, imagery=places)
    policy = dict(part.strip().split(" ", 1) for part in page.policy.split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["img-src"] == "data:"
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        digest = hashlib.sha256(page.texts[tag].encode()).digest()
        assert policy[rule] == f"'sha256-{base64.b64encode(digest).decode()}'"
    for tag, attributes in page.tags:
        assert not {"src", "style", "action", "srcset"} & attributes.keys(), tag
        assert not [name for name in attributes if name.startswith("on")]
        assert re.match(r"#|data:,$", attributes.get("href", "#"))
    assert page.count("link") == 1


def test_no_asset_names_an_address():
    text = "".join(pieces())
    assert not re.search(r"https?:|url\(|@import|//[a-z]", text)
    assert "innerHTML" not in text
    assert "eval" not in text


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(text):
    scene = record(
        window("root", label=text, attention=1.0),
        window("root/0-0", label=text),
        image=text,
        label=text,
        probabilities={text: 1.0},
        warnings=(text,),
        config={text: text},
        model=text,
        crs=text,
        transform=UTM["transform"],
    )
    broken = failed(text, error=Problem(text, text, text))
    page = read(scene, broken, title=text)
    plain = read(record(window("root"), window("root/0-0")), FAILED)
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in plain.tags]
    assert [row["id"] for row in page.rows] == [text, text]
    image = page.blocks["image-1"]
    assert image["names"][image["label"]][0] == text
    assert image["warnings"] == [text]
    assert page.blocks["image-2"]["error"] == {"type": text, "message": text, "hint": text}
    assert page.texts["h1"].split() == re.sub("[\x00-\x1f\x7f]", " ", text).split()


ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(ANY_TEXT, ANY_TEXT)
def test_any_text_comes_back_as_it_was(label, name):
    page = read(record(window(label=label), image=name, label=label, probabilities={label: 1.0}))
    assert page.rows[0]["id"] == re.sub("[\ud800-\udfff]", "\ufffd", name)
    assert page.count("script") == 4
    "".join(pieces(record(window(label=label), image=name))).encode()


def test_pictures_show_the_right_places():
    image = read(SCENE, imagery=places).blocks["image-1"]
    truth = Places(4000, 3000)
    boxes = [(0, 0, 4000, 3000), *(each["box"] for each in image["windows"])]
    sources = [image["overview"], *(each["picture"] for each in image["windows"])]
    for (x0, y0, x1, y1), picture in zip(boxes, sources, strict=True):
        kind, pixels = decoded(picture["source"])
        assert pixels.size == (picture["width"], picture["height"])
        assert kind == ("webp" if x1 > 4000 else "jpeg")
        shown = np.asarray(pixels.convert("RGBA"), float)
        for row, column in ((0.1, 0.1), (0.5, 0.25), (0.25, 0.4)):
            at = shown[int(row * pixels.height), int(column * pixels.width)]
            x, y = x0 + column * (x1 - x0), y0 + row * (y1 - y0)
            expected = truth.colour(np.array(x), np.array(y))
            assert np.allclose(at, [*expected, 255], atol=5)
    past = np.asarray(decoded(sources[-1]["source"])[1])
    assert (past[:, past.shape[1] // 2 + 1 :, 3] == 0).all()


def test_pictures_are_no_larger_than_documented_nor_than_the_region():
    opened = []

    @contextmanager
    def imagery(prediction):
        opened.append(Places(prediction.width, prediction.height))
        yield opened[-1]

    many = [window(f"root/{i}-0", (i, i, i + 70.25, i + 1), 1 / (i + 1)) for i in range(200)]
    scene = record(window("root", (0, 0, 99_999, 33), 1.0), *many, width=99_999, height=33)
    image = read(scene, imagery=imagery).blocks["image-1"]
    (one,) = opened
    assert one.asked[0] == ((0.0, 0.0, 99_999.0, 33.0), 1280, 1)
    assert one.asked[1][1:] == (256, 1)
    assert {size[1:] for size in one.asked[2:]} == {(70, 1)}
    assert len(one.asked) == 1 + 48
    with_picture = [each["path"] for each in image["windows"] if each["picture"]]
    assert with_picture == ["root", *(f"root/{i}-0" for i in range(47))]


def test_nodata_is_transparent():
    @contextmanager
    def imagery(prediction):
        yield Places(400, 300, hole=(100, 100, 200, 200))

    image = read(record(window(), width=400, height=300), imagery=imagery).blocks["image-1"]
    kind, picture = decoded(image["overview"]["source"])
    alpha = np.asarray(picture)[..., 3]
    assert kind == "webp"
    assert alpha[150, 150] == 0
    assert alpha[50, 50] == 255


def test_without_imagery_there_are_no_pixels():
    image = read(SCENE).blocks["image-1"]
    assert image["overview"] is None
    assert all(each["picture"] is None for each in image["windows"])
    assert image["notes"] == ["The page was written without pixels."]


def test_an_image_that_cannot_be_read_is_shown_without_pixels():
    @contextmanager
    def imagery(prediction):
        if prediction.id == "gone.tif":
            raise ImageError("no such file: `gone.tif`", hint="mount the disk")
        yield Places(prediction.width, prediction.height)

    page = read(replace(SCENE, id="gone.tif"), SCENE, imagery=imagery)
    gone, other = page.blocks["image-1"], page.blocks["image-2"]
    assert gone["overview"] is None
    reason = "The pixels could not be read: no such file: `gone.tif` (mount the disk)"
    assert gone["notes"] == [reason]
    assert len(gone["windows"]) == 3
    assert other["overview"]
    assert other["notes"] == []


def test_what_was_read_before_the_damage_stays():
    class Damaged(Places):
        def show(self, box, width, height):
            if box[0] == 3500:
                raise ImageError("a damaged tile")
            return super().show(box, width, height)

    @contextmanager
    def imagery(prediction):
        yield Damaged(4000, 3000)

    image = read(SCENE, imagery=imagery).blocks["image-1"]
    assert image["overview"]
    assert [bool(each["picture"]) for each in image["windows"]] == [True, True, False]
    assert image["notes"] == ["Some pixels could not be read: a damaged tile"]


def test_failed_images_are_listed_with_their_reason_and_never_opened():
    def imagery(prediction):
        raise AssertionError("a failed image was opened")

    page = read(FAILED, imagery=imagery)
    assert page.rows[0]["status"] == "failed"
    assert page.rows[0]["reason"] == "damaged"
    assert page.rows[0]["probability"] is None
    assert page.blocks["image-1"]["error"]["hint"] == "copy it"
    assert page.blocks["image-1"]["notes"] == []


def test_detail_falls_with_the_number_of_images(monkeypatch):
    page = read(*[SCENE] * 4, imagery=places)
    costs = len(json.dumps(page.blocks["image-1"]))
    steps = (
        Detail(costs // 2, overview=1280, thumbnail=256, thumbnails=48),
        Detail(2 * costs, overview=64, thumbnail=0, thumbnails=0),
    )
    monkeypatch.setattr("tnetcli.exporters.html.DETAILS", steps)
    page = read(*[SCENE] * 40, imagery=places)
    sizes = [(page.blocks[f"image-{i}"]["overview"] or {}).get("width", 0) for i in range(1, 41)]
    assert sizes[0] == 1280
    assert sorted(sizes, reverse=True) == sizes
    assert set(sizes) == {1280, 64, 0}
    assert "In little detail" in page.blocks[f"image-{sizes.index(64) + 1}"]["notes"][0]
    assert "Export this one alone" in page.blocks["image-40"]["notes"][0]


def test_the_number_of_drawn_regions_is_limited():
    attentions = np.random.default_rng(1).permutation(3000) / 10_000
    levels = [(f"root/{i}-0", a) for i, a in enumerate(attentions)]
    levels += [(f"root/0-0/{i}-0", a) for i, a in enumerate(attentions[:100])]
    scene = record(window(attention=1.0), *(window(path, attention=float(a)) for path, a in levels))
    image = read(scene).blocks["image-1"]
    drawn = [each["attention"] for each in image["windows"] if each["level"] == 2]
    assert drawn == sorted(attentions, reverse=True)[:MAX_REGIONS]
    assert image["drawn"] == [
        {"level": 1, "drawn": 1, "all": 1},
        {"level": 2, "drawn": MAX_REGIONS, "all": 3000},
        {"level": 3, "drawn": 100, "all": 100},
    ]
    assert image["notes"][1].startswith(f"{MAX_REGIONS + 101} of 3,101 regions are drawn")


def test_only_selected_levels_are_drawn():
    image = read(SCENE, levels={2}).blocks["image-1"]
    assert [each["path"] for each in image["windows"]] == ["root/0-2", "root/1-1"]
    assert image["windows"][0]["joint"] == 0.25


def test_thousands_of_classes_are_cut_to_the_likeliest():
    raw = {f"class {i}": 1 / (i + 2) for i in range(3000)}
    probabilities = {name: probability / sum(raw.values()) for name, probability in raw.items()}
    first = {"label": "class 0", "probabilities": probabilities}
    image = read(record(window(label="class 7"), **first)).blocks["image-1"]
    assert [image["names"][number][0] for number, _ in image["classes"]] == [
        f"class {i}" for i in range(20)
    ]
    assert image["more"] == 2980


@given(st.lists(st.tuples(st.integers(1, 4), st.floats(0, 1)), max_size=60), st.integers(0, 20))
def test_thumbnails_are_spread_over_the_levels(seen, most):
    windows = [
        window("root" + "/0-0" * (level - 1) + f"/{i}-0", attention=attention)
        for i, (level, attention) in enumerate(seen)
    ]
    drawn = strongest(record(*windows))
    levels = [each.level for each, _ in drawn.regions]
    assert levels == sorted(levels)
    chosen = drawn.spread(most)
    assert len(chosen) == min(most, len(windows))
    taken = [sum(levels[place] == level for place in chosen) for level in sorted(set(levels))]
    there = [levels.count(level) for level in sorted(set(levels))]
    # No level has two more than another that could give more.
    for one, other, could in zip(taken, taken[1:], there[1:], strict=False):
        assert one <= other + 1 or other == could


def test_memory_does_not_follow_the_number_of_images():
    regions = [window(f"root/{n}-0", (n, 0, n + 9, 9), n % 97 / 97) for n in range(60)]
    scene = record(window(attention=1.0), *regions, width=400, height=300, cost=COST)

    def peak(images):
        tracemalloc.start()
        for _ in pieces(*[scene] * images, imagery=places):
            pass
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return most

    peak(1)
    assert peak(5) < 1.1 * peak(2) + 100_000


def test_a_page_without_images_is_a_page():
    page = read()
    assert page.rows == []
    assert page.texts["h1"] == "tnet predictions"
