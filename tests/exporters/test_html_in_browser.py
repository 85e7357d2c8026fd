import math
import re
from contextlib import contextmanager
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from tests.browser import Watched, chromium, expect
from tests.exporters.imagery import Places, places
from tests.exporters.records import UTM, record, replace, to_lonlat, window
from tests.exporters.test_html import COST, FAILED, HOSTILE, LEVELS, SCENE, pieces
from tnetcli.prediction.record import GlimpseRecord, LevelRecord

PADDING = 12  # screen pixels around an image that is shown whole
DEEP = replace(
    SCENE,
    windows=(
        *SCENE.windows,
        window("root/0-2/0-0", (1100, 600, 1350, 787.5), 0.75, label="forest", probability=0.6),
        window("root/0-2/1-0", (1400, 900, 1650, 1087.5), 0.5, rank=2),
        window("root/0-2/1-1", (1700, 900, 1950, 1087.5), 0.0625, rank=3),
    ),
    levels=(*LEVELS, LevelRecord(3, 3, "river", 0.97)),
)


WIDE = {"viewport": {"width": 1200, "height": 900}}


@pytest.fixture(scope="module")
def browser():
    with chromium() as lent:
        yield lent


@pytest.fixture(scope="module")
def shared(browser):
    """The tab of all tests that need no options of their own."""
    watched = Watched(browser, **WIDE)
    yield watched
    watched.context.close()


@pytest.fixture
def show(browser, shared, tmp_path):
    """Open a page of these records in a tab; check at the end that it printed nothing."""
    opened = []
    path = tmp_path / "päge #1?.html"

    def open_tab(*predictions, imagery=places, where="", **options):
        path.write_text("".join(pieces(*predictions, imagery=imagery)), encoding="utf-8")
        watched = Watched(browser, **(WIDE | options)) if options else shared
        opened.append(watched)
        watched.tab.mouse.move(0, 0)
        watched.tab.goto(path.as_uri() + where)
        return watched.tab

    yield open_tab
    for watched in opened:
        watched.check_quiet(path)
        watched.asked.clear()
        if watched is not shared:
            watched.context.close()


def rectangles(tab):
    """Return the outlines of regions on the screen (regions, 4): left, top, width, height."""
    return np.array(
        tab.eval_on_selector_all(
            ".window .edge",
            "all => all.map(each => each.getBoundingClientRect())"
            ".map(place => [place.x, place.y, place.width, place.height])",
        )
    )


def stage(tab):
    box = tab.locator("#view").bounding_box()
    return np.array([box["x"], box["y"], box["width"], box["height"]])


def expected_rectangles(boxes, centre, scale, middle):
    """Return boxes on a screen where the pixel `middle` of the image is at `centre`."""
    x0, y0, x1, y1 = np.array(boxes, float).T
    left, top = centre[0] + (x0 - middle[0]) * scale, centre[1] + (y0 - middle[1]) * scale
    return np.stack([left, top, (x1 - x0) * scale, (y1 - y0) * scale], axis=1)


def fitted(tab, width, height):
    """Return the scale and the centre at which an image fits the stage."""
    x, y, across, down = stage(tab)
    scale = min((across - 2 * PADDING) / width, (down - 2 * PADDING) / height)
    return scale, (x + across / 2, y + down / 2)


def test_a_level_that_is_switched_off_hides_its_regions(show):
    tab = show(DEEP)
    levels = [each.level for each in DEEP.windows]
    assert tab.locator(".window").count() == 6
    assert tab.locator("#levels label").all_inner_texts() == [
        "level 1 (1)",
        "level 2 (2)",
        "level 3 (3)",
        "fine pixels",
    ]
    for off in (1, 2, 3):
        box = tab.get_by_label(f"level {off} (")
        box.uncheck()
        seen = [each.is_visible() for each in tab.locator(".window").all()]
        assert seen == [level != off for level in levels]
        box.check()
    assert all(each.is_visible() for each in tab.locator(".window").all())


def test_glimpses_are_drawn_and_named(show):
    glimpses = tuple(
        GlimpseRecord((x, 600.0, x + 250, 850.0), "river", 0.5) for x in (1100.0, 1400.0)
    )
    first, second, *others = SCENE.windows
    tab = show(replace(SCENE, windows=(replace(first, glimpses=glimpses), second, *others)))
    assert tab.locator(".window").count() == len(SCENE.windows) + 2
    found = " ".join(tab.locator("#levels label").nth(1).inner_text().split())
    assert found == f"level 2 ({len(others) + 3}, 2 glimpses among them)"
    alone = show(replace(SCENE, windows=(replace(first, glimpses=glimpses),), levels=LEVELS[:1]))
    found = " ".join(alone.locator("#levels label").nth(1).inner_text().split())
    assert found == "level 2 (2 glimpses)"
    steps = [" ".join(each.split()) for each in alone.locator(".step").all_inner_texts()]
    assert steps == ["Level 1, whole image", "Level 2, 2 glimpses inside the regions above"]


def test_regions_are_in_place_before_and_after_zooming_and_panning(show):
    # Regions past the image would change the fit.
    windows = [w for w in DEEP.windows if w.box[2] <= 4000]
    tab = show(replace(DEEP, windows=tuple(windows)))
    boxes = [each.box for each in windows]
    scale, centre = fitted(tab, 4000, 3000)
    first = expected_rectangles(boxes, centre, scale, (2000, 1500))
    assert np.allclose(rectangles(tab), first, atol=1)

    pointer = np.array([centre[0] - 50, centre[1] - 40])
    tab.mouse.move(*pointer)
    tab.mouse.wheel(0, -200)
    factor = math.exp(200 / 400)
    tab.wait_for_timeout(100)
    zoomed = first * factor
    zoomed[:, :2] += (1 - factor) * pointer
    assert np.allclose(rectangles(tab), zoomed, atol=1)

    tab.mouse.down()
    tab.mouse.move(pointer[0] + 30, pointer[1] + 20, steps=5)
    tab.mouse.up()
    assert np.allclose(rectangles(tab)[:, :2], zoomed[:, :2] + (30, 20), atol=1)
    assert not tab.locator("#chosen").is_visible()  # a drag is no click

    tab.locator("#stage").press("0")
    assert np.allclose(rectangles(tab), first, atol=1)
    assert tab.evaluate("window.scrollY") == 0
    tab.mouse.wheel(0, 50)  # the image fits: the page scrolls
    tab.wait_for_function("() => window.scrollY > 0")
    tab.evaluate("window.scrollTo(0, 0)")
    assert np.allclose(rectangles(tab), first, atol=1)
    tab.get_by_role("button", name="Zoom in").click()
    tab.get_by_role("button", name="Zoom in").click()
    middle = np.array(centre)
    closer = first * 1.5**2
    closer[:, :2] += (1 - 1.5**2) * middle
    assert np.allclose(rectangles(tab), closer, atol=1)
    tab.get_by_role("button", name="Zoom out").click()
    tab.get_by_role("button", name="Fit").click()
    assert np.allclose(rectangles(tab), first, atol=1)


def test_keys_zoom_and_pan(show):
    tab = show(DEEP)
    first = rectangles(tab)
    tab.locator("#stage").focus()
    tab.keyboard.press("+")
    tab.keyboard.press("+")
    larger = rectangles(tab)
    assert np.allclose(larger[:, 2:], first[:, 2:] * 1.5**2, rtol=1e-3)
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowDown")
    assert np.allclose(rectangles(tab)[:, :2], larger[:, :2] - 80, atol=1)
    tab.keyboard.press("ArrowLeft")
    tab.keyboard.press("ArrowUp")
    assert np.allclose(rectangles(tab), larger, atol=1)
    tab.keyboard.press("-")
    assert np.allclose(rectangles(tab)[:, 2:], first[:, 2:] * 1.5, rtol=1e-3)
    tab.keyboard.press("0")
    assert np.allclose(rectangles(tab), first, atol=0.1)
    tab.keyboard.press("-")  # never smaller than the fitted image
    tab.keyboard.press("ArrowLeft")
    assert np.allclose(rectangles(tab), first, atol=0.1)


def test_fingers_pinch_and_drag(show):
    tab = show(DEEP, has_touch=True)
    first = rectangles(tab)
    _, (x, y) = fitted(tab, 4000, 3000)
    touch = tab.context.new_cdp_session(tab)

    def send(kind, *points):
        touches = [{"x": a, "y": b, "id": number} for number, (a, b) in enumerate(points)]
        touch.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": touches})

    send("touchStart", (x - 40, y), (x + 40, y))
    for step in range(1, 11):
        send("touchMove", (x - 40 - 4 * step, y), (x + 40 + 4 * step, y))
    send("touchEnd")
    assert np.allclose(rectangles(tab)[:, 2:], 2 * first[:, 2:], rtol=0.02)
    middle = np.array([x, y])
    assert np.allclose(rectangles(tab)[:, :2], middle + 2 * (first[:, :2] - middle), atol=4)


SAMPLE = """async (image, parts) => {
    await image.decode();
    const [width, height] = [image.naturalWidth, image.naturalHeight];
    const canvas = new OffscreenCanvas(width, height);
    const context = canvas.getContext("2d", { willReadFrequently: true });
    context.drawImage(image, 0, 0);
    const at = (x, y) => context.getImageData(Math.floor(x), Math.floor(y), 1, 1).data;
    return [width, height, parts.map(([x, y]) => Array.from(at(x * width, y * height)))];
}"""


def test_a_click_shows_the_pixels_of_a_region(show):
    tab = show(DEEP)
    truth = Places(4000, 3000)
    # Ordered by level, then by attention, as in this record.
    for place, chosen in enumerate(DEEP.windows):
        # Near a corner, where no other region is in the way.
        tab.locator(".window .edge").nth(place).click(position={"x": 3, "y": 3})
        assert f"Region {chosen.path}" in tab.locator("#chosen").inner_text()
        x0, y0, x1, y1 = chosen.box
        parts = [(0.45, 0.45), (0.3, 0.1), (0.1, 0.4)]
        width, height, colours = tab.locator("#chosen img").evaluate(SAMPLE, parts)
        assert max(width, height) == min(256, round(x1 - x0))
        for (across, down), colour in zip(parts, colours, strict=True):
            x, y = np.array(x0 + across * (x1 - x0)), np.array(y0 + down * (y1 - y0))
            assert np.allclose(colour, [*truth.colour(x, y), 255], atol=5)


def test_the_overview_and_the_regions_are_aligned(show):
    tab = show(replace(DEEP, windows=DEEP.windows[:2]))
    for box in tab.locator("#levels input").all():
        box.uncheck()
    scale, centre = fitted(tab, 4000, 3000)
    screen = np.asarray(Image.open(BytesIO(tab.screenshot())).convert("RGB"), float)
    for x, y in ((100, 100), (3900, 2900), (1000, 2900), (3000, 1500)):
        column, row = centre[0] + (x - 2000) * scale, centre[1] + (y - 1500) * scale
        colour = Places(4000, 3000).colour(np.array(float(x)), np.array(float(y)))
        assert np.allclose(screen[int(row), int(column)], colour, atol=6)


def test_hovering_shows_the_numbers_of_a_region(show):
    tab = show(DEEP)
    tab.locator(".window .edge").nth(4).hover()
    found = tab.locator("#hint").inner_text().replace("\u00a0", " ").splitlines()
    assert found[:6] == [
        "river 93.0 %",
        "attention 50.0 %",
        "joint probability 12.5 %",
        "rank 2 at level 3",
        "columns 1,400 to 1,650 px",
        "rows 900 to 1,087.5 px",
    ]
    latitude, longitude = re.fullmatch(r"centre ([\d.]+)° N, ([\d.]+)° E", found[6]).groups()
    expected = to_lonlat([(1525, 993.75)], **UTM)[0]
    assert np.allclose([float(longitude), float(latitude)], expected, rtol=0, atol=1e-5)
    tab.mouse.move(5, 5)
    assert not tab.locator("#hint").is_visible()


def test_the_keyboard_reaches_everything(show):
    tab = show(DEEP)
    tab.locator("#theme").focus()
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.id") == "stage"
    tab.keyboard.press("Tab")

    def label():
        return tab.evaluate("document.activeElement.ariaLabel ?? ''").replace("\u00a0", " ")

    assert label() == "Level 1, rank 1: forest 55.0 %, attention 100 %"
    assert tab.locator("#hint").is_visible()
    tab.keyboard.press("ArrowRight")
    tab.keyboard.press("ArrowDown")
    assert label() == "Level 2, rank 2: river 93.0 %, attention 12.5 %"
    tab.keyboard.press("End")
    assert label().startswith("Level 3, rank 3")
    tab.keyboard.press("ArrowLeft")
    tab.keyboard.press("Enter")
    assert "Region root/0-2/1-0" in tab.locator("#chosen").inner_text()
    before = rectangles(tab)
    tab.keyboard.press("+")
    assert np.allclose(rectangles(tab)[:, 2:], 1.5 * before[:, 2:], rtol=1e-3)
    tab.keyboard.press("Escape")
    assert not tab.locator("#chosen").is_visible()
    assert label().startswith("Level 3, rank 2")
    tab.keyboard.press("Tab")
    assert label() == "Zoom in"
    tab.keyboard.press("Shift+Tab")
    assert label().startswith("Level 3, rank 2")
    # Hidden regions are skipped.
    tab.get_by_label("level 3 (").uncheck()
    tab.locator("#stage").focus()
    tab.keyboard.press("Tab")
    tab.keyboard.press("End")
    assert label().startswith("Level 2")
    tab.keyboard.press(" ")
    tab.get_by_role("button", name="Close").press("Enter")
    assert not tab.locator("#chosen").is_visible()
    assert label().startswith("Level 2")


def test_a_focused_region_is_brought_into_view(show):
    tab = show(DEEP)
    tab.locator(".window").nth(5).focus()
    tab.keyboard.press("Enter")
    tab.get_by_role("button", name="Zoom to region").click()
    x, y, across, down = stage(tab)
    left, top, width, height = rectangles(tab)[5]
    assert 0.69 < max(width / across, height / down) < 0.71
    assert np.allclose([left + width / 2, top + height / 2], [x + across / 2, y + down / 2], atol=1)
    tab.locator(".window").nth(5).focus()
    tab.keyboard.press("ArrowLeft")
    left, top, width, height = rectangles(tab)[4]
    assert x <= left + width / 2 <= x + across
    assert y <= top + height / 2 <= y + down


def test_levels_bars_and_cost_are_shown(show):
    tab = show(DEEP)
    text = tab.locator("#image").inner_text().replace("\u00a0", " ")
    lines = [line for line in text.splitlines() if line]
    story = lines[lines.index("PREDICTION BY LEVEL") + 1 :]
    assert story[:7] == [
        "Level 1, whole image",
        "forest 55.0 %",
        "Level 2, 2 regions",
        "river 91.0 %",
        "Level 3, 3 regions",
        "river 97.0 %",
        "Stopped: all levels are done.",
    ]
    assert tab.locator("#answer").inner_text() == "river 97.0\u00a0%"
    assert "bands were guessed" in text
    assert "1 M of 12 M" in text
    assert "8.33 %" in text
    assert "400 kB of 9 MB" in text
    tracks = tab.locator("#classes .track").all()
    filled = [each.locator("span").bounding_box()["width"] for each in tracks]
    whole = tracks[0].bounding_box()["width"]
    assert np.allclose(np.array(filled) / whole, [0.97, 0.03], atol=0.01)
    tab.locator(".strip button").last.click()
    assert "Region root/0-2/1-1" in tab.locator("#chosen").inner_text()


MANY = [
    replace(
        SCENE,
        id=f"scenes/{name}.tif",
        label=label,
        probability=probability,
        probabilities={"forest": 0.03, "river": 0.9, "wüste": 0.07},
        windows=SCENE.windows[::2],
        cost=replace(COST, windows=windows, fraction_decoded=fraction),
    )
    for name, label, probability, windows, fraction in (
        ("beta 10", "river", 0.5, 30, 0.0001),
        ("Alpha", "forest", 0.25, 2, 0.9),
        ("beta 9", "wüste", 0.75, 100, 0.02),
    )
] + [FAILED]
SORTED = {
    "Image": ["c.tif", "scenes/Alpha.tif", "scenes/beta 9.tif", "scenes/beta 10.tif"],
    "Prediction": ["scenes/Alpha.tif", "scenes/beta 10.tif", "scenes/beta 9.tif", "c.tif"],
    "Probability": ["scenes/Alpha.tif", "scenes/beta 10.tif", "scenes/beta 9.tif", "c.tif"],
    "Regions": ["scenes/Alpha.tif", "scenes/beta 10.tif", "scenes/beta 9.tif", "c.tif"],
    "Decoded": ["scenes/beta 10.tif", "scenes/beta 9.tif", "scenes/Alpha.tif", "c.tif"],
    "Status": ["c.tif", "scenes/beta 10.tif", "scenes/Alpha.tif", "scenes/beta 9.tif"],
}


def listed(tab):
    return tab.eval_on_selector_all("#rows tbody a", "all => all.map(each => each.textContent)")


def test_the_list_is_sorted_by_each_column(show):
    tab = show(*MANY)
    assert listed(tab) == [each.id for each in MANY]
    assert tab.locator("th[aria-sort]").count() == 0
    for column, rising in SORTED.items():
        button = tab.get_by_role("button", name=column)
        head = tab.locator("th", has=button)
        button.press("Enter")
        assert head.get_attribute("aria-sort") == "ascending"
        assert listed(tab) == rising
        button.click()
        assert head.get_attribute("aria-sort") == "descending"
        assert tab.locator("th[aria-sort]").count() == 1
        if column == "Image":
            assert listed(tab) == rising[::-1]
        elif column == "Status":  # the rest are equal and keep their order
            assert listed(tab) == [each.id for each in MANY]
        else:  # unknown values stay last
            assert listed(tab) == [*rising[:3][::-1], "c.tif"]


def test_the_list_is_filtered_and_links_to_images(show):
    tab = show(*MANY)
    assert tab.locator("#totals").inner_text().replace("\u00a0", " ") == (
        "3 images done: river 1, forest 1, wüste 1; 1 failed"
    )
    tab.get_by_label("Filter").fill("WÜSTE")
    assert listed(tab) == ["scenes/beta 9.tif"]
    assert tab.locator("#found").inner_text().replace("\u00a0", " ") == "1 of 4 images"
    tab.get_by_label("Filter").fill("damaged")
    assert listed(tab) == ["c.tif"]
    tab.get_by_label("Filter").fill("nowhere")
    assert listed(tab) == []
    tab.get_by_label("Filter").fill("")
    tab.get_by_role("link", name="beta 9").press("Enter")
    expect(tab.locator("#name")).to_have_text("scenes/beta 9.tif")
    expect(tab.locator("#answer")).to_be_focused()
    assert tab.locator("#answer").inner_text().startswith("wüste")
    assert not tab.locator("#list").is_visible()
    tab.get_by_role("link", name="Next").click()
    expect(tab.locator("#answer")).to_have_text("Failed")
    assert "ImageError: damaged" in tab.locator("#warnings").inner_text()
    assert "copy it" in tab.locator("#warnings").inner_text()
    assert not tab.locator("#stage").is_visible()
    assert tab.locator("#next").get_attribute("href") is None
    tab.go_back()
    expect(tab.locator("#name")).to_have_text("scenes/beta 9.tif")
    tab.get_by_role("link", name="All images").click()
    expect(tab.get_by_role("link", name="beta 9")).to_be_focused()


def test_an_address_selects_an_image(show):
    tab = show(*MANY, where="#image-2")
    assert tab.locator("#name").inner_text() == "scenes/Alpha.tif"


def background(tab):
    red, green, blue = (
        int(part)
        for part in tab.evaluate("getComputedStyle(document.body).backgroundColor")[4:-1].split(",")
    )
    return (red + green + blue) / 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_follow_the_system_and_the_switch(scheme, show):
    tab = show(DEEP, color_scheme=scheme)
    assert (background(tab) < 60) is (scheme == "dark")
    tab.locator("#theme").click()
    assert (background(tab) < 60) is (scheme == "light")
    tab.locator("#theme").click()
    assert (background(tab) < 60) is (scheme == "dark")


def test_a_print_shows_image_regions_and_text_without_controls(show):
    tab = show(DEEP, color_scheme="dark")  # ink is dark on paper all the same
    tab.emulate_media(media="print", color_scheme="dark")
    for each in ("#stage", "#story", "#classes", "#cost", "#facts", "#ramp"):
        assert tab.locator(each).is_visible(), each
    assert all(each.is_visible() for each in tab.locator(".window").all())
    for each in ("#theme", ".tools", "#levels", "#usage", "#steps"):
        assert not tab.locator(each).is_visible(), each
    ink = tab.evaluate("getComputedStyle(document.querySelector('#answer')).color")
    assert ink == "rgb(29, 33, 38)"
    x, y, across, down = stage(tab)
    seen = rectangles(tab)[0]
    assert x <= seen[0] < seen[0] + seen[2] <= x + across
    assert y <= seen[1] < seen[1] + seen[3] <= y + down
    assert tab.pdf().startswith(b"%PDF")


def test_a_small_screen_does_not_scroll_sideways(show):
    width = 320
    facts = {"label": "b" * 200, "levels": (), "probabilities": {"b" * 200: 1.0}}
    windows = tuple(replace(each, label="b" * 200, probabilities=()) for each in DEEP.windows)
    long = replace(DEEP, id="a" * 300, windows=windows, **facts)
    options = {"viewport": {"width": width, "height": 600}}
    for tab in (show(long, **options), show(long, *MANY, **options)):
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
    tab.locator("#rows a").first.click()
    expect(tab.locator("#image")).to_be_visible()
    tab.locator(".window").first.focus()
    tab.keyboard.press("Enter")
    assert tab.locator("#chosen").is_visible()
    assert tab.evaluate("document.documentElement.scrollWidth") <= width


def test_more_than_a_thousand_images_open(show):
    @contextmanager
    def grey(prediction):
        yield type(
            "Grey", (), {"show": lambda self, box, x, y: np.full((y, x, 4), 255, np.uint8)}
        )()

    scene = record(window("root", (0, 0, 60, 40), 1.0), width=60, height=40)
    tab = show(*(replace(scene, id=f"{number}.tif") for number in range(1100)), imagery=grey)
    assert tab.locator("#rows tbody tr").count() == 1000
    assert tab.locator("#more").inner_text() == "Show 100 more"
    tab.locator("#more").click()
    assert tab.locator("#rows tbody tr").count() == 1100
    assert not tab.locator("#more").is_visible()
    tab.locator("th button").first.click()
    tab.locator("th button").first.click()
    assert listed(tab)[:2] == ["1099.tif", "1098.tif"]
    tab.locator("#rows a").first.click()
    expect(tab.locator("#position")).to_have_text("1,100 of 1,100")
    assert tab.locator(".window").count() == 1
    assert tab.locator("img").count() < 1110  # thumbnails only where they are shown


def test_all_drawn_regions_can_be_reached_by_keyboard(show):
    many = [
        window(
            f"root{'/1-1' * (level - 2)}/{place}-0",
            (place, level, place + 9, level + 9),
            place / 999,
        )
        for level in range(2, 17)
        for place in range(300)
    ]
    tab = show(record(*many, width=400, height=300))
    assert tab.locator(".window").count() == 15 * 250
    assert "level 16 (250 of 300)" in tab.locator("#levels").inner_text()
    assert "3,750 of 4,500 regions are drawn" in tab.locator("#notes").inner_text()
    tab.locator("#stage").focus()
    tab.keyboard.press("Tab")
    tab.keyboard.press("End")
    assert tab.evaluate("document.activeElement.ariaLabel").startswith("Level 16")
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.ariaLabel") == "Zoom in"


def hostile(text):
    scene = record(
        window("root", label=text, attention=1.0),
        window("root/0-0", (5, 5, 50, 50), label=text),
        image=text,
        label=text,
        probabilities={text: 1.0},
        levels=(LevelRecord(1, 1, text, 1.0),),
        warnings=(text,),
        config={text: text},
        cost=COST,
    )
    return scene, replace(FAILED, id=text, error=replace(FAILED.error, message=text))


def test_hostile_text_is_shown_and_never_run(show):
    tab = show(*(each for text in HOSTILE for each in hostile(text)), imagery=None)
    for place, text in enumerate(HOSTILE):
        clean = "".join("\ufffd" if "\ud800" <= each <= "\udfff" else each for each in text)
        row = tab.locator("#rows tbody tr").nth(2 * place)
        assert row.locator("a").text_content() == clean
        failed = tab.locator("#rows tbody tr").nth(2 * place + 1).locator(".failed")
        assert failed.text_content() == f"failed: {clean}"
        row.locator("a").click()
        expect(tab.locator("#image")).to_be_visible()
        assert tab.locator("#answer bdi").text_content() == clean
        assert tab.locator("#warnings li").text_content() == clean
        tab.locator(".window").last.focus()
        tab.keyboard.press("Enter")
        assert tab.locator("#chosen h3").text_content() == "Region root/0-0"
        tab.get_by_role("link", name="All images").click()
        expect(tab.locator("#list")).to_be_visible()
    assert tab.locator("script:not([type])").count() == 1


def test_odd_regions_do_no_harm(show):
    odd = [
        window("root", (-500, -900, 4500, 3900), 1.0, share=None),
        window("root/0-0", (-1e8, -1e8, 1e8, 1e8), 1.0, valid=None),
        window("root/0-1", (10, 10, 10.03, 11), 0.0),
        window("root/7-7/0-2", (3900, 2900, 5000, 4000), 0.3),
    ]
    tab = show(record(*odd, probabilities={}, levels=LEVELS))
    assert tab.locator(".window").count() == 4
    for _ in range(30):
        tab.locator("#stage").press("+")
    tab.locator("#stage").press("0")
    for each in tab.locator(".window").all():
        each.focus()
        tab.keyboard.press("Enter")
        assert tab.locator("#chosen").is_visible()


def test_an_abstained_image_is_shown_with_its_reason(show):
    abstained = record(*SCENE.windows, status="abstained", levels=LEVELS, cost=COST)
    tab = show(abstained)
    assert tab.locator("#answer").inner_text() == "Abstained: the classes are too close"
    assert tab.locator(".window").count() == 3


def test_regions_past_the_image_are_shown(show):
    tab = show(record(window(attention=1.0), window("root/0-0", (-300, 2900, 900, 3700))))
    x, y, across, down = stage(tab)
    left, top, width, height = rectangles(tab)[1]
    assert x < left < left + width < x + across
    assert y < top < top + height < y + down


def test_a_page_without_pixels_draws_the_regions(show):
    tab = show(DEEP, imagery=None)
    assert tab.locator(".window").count() == 6
    assert tab.locator("#view image").count() == 0
    assert "without pixels" in tab.locator("#notes").inner_text()
    tab.locator(".window").nth(3).click()
    assert "no pixels of this region" in tab.locator("#chosen").inner_text()


def test_a_page_without_images_opens(show):
    tab = show()
    assert tab.locator("#found").inner_text().replace("\u00a0", " ") == "0 of 0 images"


def test_a_single_failure_opens(show):
    assert "copy it" in show(FAILED).locator("#warnings").inner_text()


def test_the_policy_blocks_other_scripts_and_images(browser, tmp_path):
    path = tmp_path / "a.html"
    path.write_text("".join(pieces(SCENE, imagery=places)), encoding="utf-8")
    watched = Watched(browser)
    watched.tab.goto(path.as_uri())
    watched.tab.evaluate(
        """() => {
            const script = document.createElement("script");
            script.textContent = "window.ran = true";
            document.body.append(script, Object.assign(new Image(), { src: "a.png" }));
        }"""
    )
    watched.tab.wait_for_timeout(100)
    assert watched.tab.evaluate("window.ran") is None
    assert len(watched.said) == 2
    assert all("Content Security Policy" in each for each in watched.said)
    watched.context.close()
