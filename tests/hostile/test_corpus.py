"""Every file of the audit is refused: nothing written, nothing fetched, in bounded time and memory.

`tests/hostile/corpus.py --report` runs the same cases one by one, with figures.
"""

import json
import sys
from dataclasses import replace

import pytest

from tests.hostile.case import Case, Ended, Place, step, write_tiff
from tests.hostile.corpus import CASES, ROOT
from tests.hostile.running import MOST_MEGABYTES, SERVED, faults, runner, snapshot

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="pipes, limits and peak memory as Linux has them"
)
IMAGES = [case for case in CASES if case.entry]
SECONDS = 60  # a limit for busy machines; --report checks for ten


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with runner(tmp_path_factory.mktemp("hostile"), ROOT, seconds=SECONDS) as made:
        yield made


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_hostile_file_is_refused(running, case):
    # Pixels of images are read in the batch below: loading a model for each would take minutes.
    assert running.case(replace(case, steps=case.steps[:1]) if case.entry else case).problems == []


def test_a_batch_of_all_hostile_images_fails_them_and_does_the_good_ones(running, tmp_path):
    places = {case.name: Place(tmp_path / case.name, running.listener.url) for case in IMAGES}
    for case in IMAGES:
        places[case.name].make()
        case.make(places[case.name])
    good = write_tiff(tmp_path / "good.tif")
    url = f"{running.listener.url}{SERVED}good.tif"
    before = {name: snapshot(place) for name, place in places.items()}
    running.listener.requests.clear()

    entries = {str(places[case.name].images / case.entry): case for case in IMAGES}
    environment = {key: value for case in IMAGES for key, value in case.environment.items()}
    batch = Place(tmp_path / "batch", running.listener.url)
    batch.work.mkdir(parents=True)
    ended = running.run(
        batch, ("predict", url, str(good), *entries, "-o", "out.jsonl"), environment
    )

    assert list(faults(ended, frozenset({8}), ())) == []
    assert running.listener.unasked(SERVED) == []
    assert {name: snapshot(place) for name, place in places.items()} == before
    lines = (batch.work / "out.jsonl").read_text().splitlines()
    status = {record["id"]: record["status"] for record in map(json.loads, lines)}
    assert status.keys() == {url, str(good), *entries}
    assert status[url] == status[str(good)] == "ok"
    accepted = {
        case.name
        for path, case in entries.items()
        if status[path] == "ok" and 0 not in case.steps[-1].codes
    }
    assert accepted == set()


# That a case would be noticed


def harmless(place):
    write_tiff(place.images / "good.tif")


def test_a_write_a_request_and_a_wrong_exit_code_are_noticed(running):
    def harm(place):
        (place.victim / "profile").write_text("owned")
        (place.images / "new").mkdir()

    verdict = running.case(
        Case(
            "noticed",
            "",
            harmless,
            (
                step("info", "{images}/good.tif", codes=(3,), says=("a word",), before=harm),
                step("info", "{url}/evil/x.tif"),
            ),
        )
    )
    assert verdict.changes == ["images/new", "victim/profile"]
    assert any("/evil/x.tif" in each for each in verdict.requests)
    assert "`tnet info` exited with 0, not with [3]" in verdict.problems
    assert "`tnet info` does not say `a word`" in verdict.problems


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"code": None}, "did not end"),
        ({"code": 1, "err": "Traceback (most recent call last):"}, "traceback"),
        ({"err": ""}, "no error"),
        ({"err": "error: x\na.py:7: RuntimeWarning: overflow"}, "warning of Python"),
        ({"megabytes": MOST_MEGABYTES + 1}, "601 MB"),
    ],
)
def test_what_is_wrong_with_an_end_is_noticed(changes, fault):
    sound = Ended(("info", "a"), 3, 0.1, 10, "", "error: x\nhint: y\n")
    assert list(faults(sound, frozenset({3}), ())) == []
    assert any(fault in each for each in faults(replace(sound, **changes), frozenset({3}), ()))


def test_memory_and_time_are_measured(running):
    place = Place(running.folder / "measured", running.listener.url)
    place.make()
    harmless(place)
    ended = running.run(place, ("info", str(place.images / "good.tif")), {})
    assert 50 < ended.megabytes + running.idle["info"] < 5_000
    assert ended.megabytes < 100
    assert 0 < ended.seconds < SECONDS
