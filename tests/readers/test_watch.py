import multiprocessing
import os
import pickle
import subprocess
import sys
import threading

import pytest

from tests.images import noise, write_geotiff
from tnetcli.errors import ImageError
from tnetcli.geometry import Size, Window
from tnetcli.readers import watch
from tnetcli.readers.detect import open_image
from tnetcli.readers.watch import ReadingThreads, watching


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Let no other test see what was stuck here."""
    yield
    watch._watch.begin()


class Blocked:
    """Work that blocks until it is let go."""

    def __init__(self):
        self.begun, self.release = threading.Event(), threading.Event()

    def __call__(self):
        self.begun.set()
        self.release.wait()
        return "late"


@pytest.fixture
def blocked():
    work = Blocked()
    yield work
    work.release.set()


@pytest.fixture
def threads():
    made = ReadingThreads(1, 0.5)
    yield made
    made.close()


def test_a_read_is_under_way_until_its_last_operation_ends():
    with watching("a") as outer:
        with watching("a") as inner:
            assert inner is outer
        assert "a" in watch._watch.under_way
    assert not watch._watch.under_way


def test_a_new_operation_is_progress():
    with watching("a") as reading:
        reading.last -= 1000
        assert reading.is_stuck(300)
        with watching("a"):
            assert not reading.is_stuck(300)


@pytest.mark.parametrize("seconds", [300, float("inf")])
def test_a_request_to_stop_shortens_the_patience(seconds):
    with watching("a") as reading:
        reading.last -= 100
        watch.request_stop()
        assert not reading.is_stuck(seconds)
        watch._watch.stopping -= watch.PATIENCE
        assert reading.is_stuck(seconds)


def test_what_was_given_up_is_no_longer_under_way():
    with watching("a") as reading:
        reading.abandon()
        assert not watch._watch.under_way
        with watching("a") as other:
            assert other is not reading
    assert not watch._watch.under_way
    assert watch.has_abandoned()


def test_every_block_of_an_image_is_progress(tmp_path):
    path = str(write_geotiff(tmp_path / "scene.tif", noise((64, 64))))
    with open_image(path) as reader, watching(path) as reading:
        reading.last -= 1000
        reader.read(Window(0, 0, 64, 64), Size(8, 8))
        assert not reading.is_stuck(300)


def test_opening_is_watched(tmp_path, monkeypatch):
    path = str(write_geotiff(tmp_path / "scene.tif", noise((64, 64))))
    seen = []

    def detect(name):
        seen.extend(watch._watch.under_way)
        return "raster"

    monkeypatch.setattr("tnetcli.readers.detect.detect", detect)
    open_image(path).close()
    assert seen == [path]


def test_a_stuck_read_fails_and_its_thread_is_replaced(threads, blocked):
    stuck, behind = threads.submit("a.tif", blocked), threads.submit("b.tif", lambda: 7)
    assert threads.result(behind) == 7  # it waited for the only thread
    with pytest.raises(ImageError, match=r"`a\.tif` made no progress for 0\.5 s") as caught:
        threads.result(stuck)
    assert "--read-timeout" in caught.value.hint
    assert watch.has_abandoned()


def test_a_thread_that_comes_back_changes_nothing(threads, blocked):
    with pytest.raises(ImageError):
        threads.run("a.tif", blocked)
    blocked.release.set()
    assert [threads.run("a.tif", [each].pop) for each in range(3)] == [0, 1, 2]


def test_progress_keeps_a_long_read_alive():
    def work():
        for _ in range(15):
            with watching("a.tif"):
                threading.Event().wait(0.1)
        return "done"

    assert ReadingThreads(1, 1).run("a.tif", work) == "done"


def test_a_process_that_was_suspended_gives_a_read_its_time_again(threads, blocked):
    future = threads.submit("a.tif", blocked)
    blocked.begun.wait()
    threads._readings[future].last -= 1000
    threads._checked -= 1000
    threads._fail_stuck()
    assert not future.done()


def test_closing_drops_what_has_not_begun_and_waits_for_the_rest(threads):
    begun = threading.Event()
    first = threads.submit("a.tif", lambda: begun.set() or threading.Event().wait(0.2))
    begun.wait()
    second = threads.submit("a.tif", int)
    threads.close()
    assert first.done()
    assert second.cancelled()
    assert threads.run("a.tif", lambda: 3) == 3


def test_closing_does_not_wait_for_what_is_stuck(threads, blocked):
    future = threads.submit("a.tif", blocked)
    blocked.begun.wait()
    threads.close()
    with pytest.raises(ImageError):
        future.result()


def test_many_threads_at_most_as_many_as_allowed():
    both = threading.Barrier(2, timeout=30)
    threads = ReadingThreads(2)
    futures = [threads.submit("a.tif", both.wait) for _ in range(6)]
    assert sorted(map(threads.result, futures)) == [0, 0, 0, 1, 1, 1]
    assert threads._threads == 2
    threads.close()


def test_threads_are_pickled_without_what_they_do(threads, blocked):
    threads.submit("a.tif", blocked)
    assert pickle.loads(pickle.dumps(threads)).run("a.tif", lambda: 5) == 5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_has_threads_of_its_own(threads, blocked):
    threads.submit("a.tif", blocked)
    blocked.begun.wait()
    watch.request_stop()
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def child():
        queue.put((threads.run("b.tif", lambda: 5), watch.is_stopping(), watch._watch.under_way))

    process = context.Process(target=child)
    process.start()
    process.join()
    assert queue.get() == (5, False, {})


def test_a_stuck_thread_does_not_keep_the_interpreter():
    code = """
import threading
from tnetcli.readers.watch import ReadingThreads
threads = ReadingThreads(1, 0.5)
try:
    threads.run("a.tif", threading.Event().wait)
except Exception as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "reading `a.tif` made no progress for 0.5 s\n"


def test_an_error_of_the_work_is_raised(threads):
    def fail():
        raise TimeoutError("of the work itself")

    with pytest.raises(TimeoutError, match="of the work itself"):
        threads.run("a.tif", fail)
