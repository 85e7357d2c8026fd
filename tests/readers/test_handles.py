import os
import signal
import threading
from contextlib import suppress

import numpy as np
import pytest

from tests.images import noise, write_geotiff
from tnetcli.errors import ImageError
from tnetcli.geometry import Size, Window
from tnetcli.readers.detect import open_image
from tnetcli.readers.pyramid import (
    BLOCKS,
    IDLE,
    MOST_IDLE,
    BlockCache,
    Handles,
    check_unchanged,
    file_stamp,
)
from tnetcli.readers.watch import ForkSafeLock


class Handle:
    def __init__(self):
        self.closed = 0

    def close(self):
        self.closed += 1


@pytest.fixture
def opened():
    return []


@pytest.fixture
def handles(opened):
    def open_handle():
        opened.append(Handle())
        return opened[-1]

    return Handles(open_handle)


def test_a_handle_that_came_back_is_lent_again(handles, opened):
    for _ in range(3):
        with handles.borrow():
            pass
    assert len(opened) == 1


def test_two_borrowers_never_share_a_handle(handles):
    with handles.borrow() as one, handles.borrow() as other:
        assert one is not other


def test_threads_open_no_more_handles_than_they_are(handles, opened):
    barrier = threading.Barrier(4)

    def use():
        for _ in range(20):
            with handles.borrow():
                barrier.wait(timeout=10)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(opened) == 4


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_a_handle_that_failed_is_closed_and_not_lent_again(handles, opened, failure):
    with suppress(failure), handles.borrow():
        raise failure
    with handles.borrow() as second:
        pass
    assert opened[0].closed == 1
    assert second is not opened[0]


def test_closing_closes_every_free_handle_once(handles, opened):
    with handles.borrow(), handles.borrow():
        pass
    handles.close()
    handles.close()
    assert [handle.closed for handle in opened] == [1, 1]


def test_a_lent_handle_is_closed_when_it_comes_back(handles, opened):
    with handles.borrow():
        handles.close()
        assert opened[0].closed == 0
    assert opened[0].closed == 1


def test_borrowing_after_close_is_a_callers_mistake(handles):
    handles.close()
    with pytest.raises(ValueError, match="closed"), handles.borrow():
        pass


def test_a_fork_does_not_use_its_parents_handles(handles, opened, monkeypatch):
    with handles.borrow() as parents:
        pass
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with handles.borrow() as own:
        pass
    assert own is not parents
    assert parents.closed == 0


def test_a_fork_may_happen_while_the_lock_is_held(handles):
    with IDLE.lock:
        child = os.fork()
        if child == 0:
            signal.alarm(5)  # ends a child that waits for the lock
            with handles.borrow():
                os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


def test_the_handles_of_many_images_do_not_pile_up():
    opened = []

    def open_handle():
        opened.append(Handle())
        return opened[-1]

    images = [Handles(open_handle) for _ in range(3 * MOST_IDLE)]
    for image in images:
        with image.borrow():
            pass
    assert sum(not handle.closed for handle in opened) <= MOST_IDLE
    assert not opened[-1].closed
    with images[0].borrow() as again:  # it is opened anew
        assert not again.closed
    for image in images:
        image.close()
    assert all(handle.closed == 1 for handle in opened)


def test_an_image_that_was_forgotten_does_not_stand_in_the_way():
    for _ in range(3 * MOST_IDLE):
        with Handles(Handle).borrow():
            pass


def test_closing_in_a_fork_leaves_the_parents_handles_open(handles, monkeypatch):
    with handles.borrow() as parents:
        pass
    monkeypatch.setattr(os, "getpid", lambda: -1)
    handles.close()
    assert parents.closed == 0


def test_the_stamp_of_a_file_stays_while_the_file_does(tmp_path):
    path = tmp_path / "a"
    path.write_text("one")
    assert file_stamp(str(path)) == file_stamp(str(path)) is not None


@pytest.mark.parametrize("path", ["/no/such/file", "https://host/a.tif", "/vsicurl/https://host/a"])
def test_what_is_no_local_file_has_no_stamp(path):
    assert file_stamp(path) is None


def test_a_file_of_equal_length_put_in_its_place_is_noticed(tmp_path):
    path, other = tmp_path / "a", tmp_path / "b"
    path.write_text("one")
    before = file_stamp(str(path))
    other.write_text("two")
    os.utime(other, ns=(before[1], before[1]))
    os.replace(other, path)
    with pytest.raises(ImageError, match="changed while it was open") as caught:
        check_unchanged(str(path), before)
    assert caught.value.hint


def test_a_file_that_went_away_is_noticed(tmp_path):
    path = tmp_path / "a"
    path.write_text("one")
    before = file_stamp(str(path))
    path.unlink()
    with pytest.raises(ImageError, match="was removed"):
        check_unchanged(str(path), before)


def test_a_forked_child_finds_the_lock_open():
    lock = ForkSafeLock()
    with lock:
        child = os.fork()
        if child == 0:
            signal.alarm(10)
            with lock:
                os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def block(value: int, count: int = 10) -> np.ndarray:
    return np.full(count, value, np.uint8)


def test_the_block_unused_for_longest_goes_first():
    cache = BlockCache(30)
    for name in "abc":
        cache.put(name, block(0))
    cache.get("a")
    cache.put("d", block(0))
    assert [name for name in "abcd" if cache.get(name) is not None] == ["a", "c", "d"]


def test_blocks_of_a_closed_file_are_dropped_and_no_others():
    cache = BlockCache(60)
    for name in ("a.tif", "b.tif", "a.tif.ovr"):
        cache.put((name, 1), block(0))
    cache.forget("a.tif", "a.tif.ovr")
    kept = [name for name in ("a.tif", "b.tif", "a.tif.ovr") if cache.get((name, 1)) is not None]
    assert kept == ["b.tif"]
    for number in range(5):  # as many as before fit
        cache.put(("c.tif", number), block(0))
    assert cache.get(("b.tif", 1)) is not None


def test_a_closed_image_leaves_no_blocks(tmp_path):
    paths = [tmp_path / "a.tif", tmp_path / "b.tif"]
    for path in paths:
        write_geotiff(path, noise((300, 200)), tiled=True, blockxsize=64, blockysize=64)
    BLOCKS.clear()
    with open_image(paths[1]) as other:
        with open_image(paths[0]) as reader:
            reader.read(Window(0, 0, 100, 100), Size(10, 10))
            other.read(Window(0, 0, 100, 100), Size(10, 10))
            assert {key[0] for key in BLOCKS._blocks} == {str(path) for path in paths}
        assert {key[0] for key in BLOCKS._blocks} == {str(paths[1])}
    assert not BLOCKS._blocks
    assert BLOCKS._bytes == 0


def test_memory_stays_bounded_whatever_is_put():
    cache = BlockCache(100)
    sizes = np.random.default_rng(0).integers(1, 60, 200)
    for key, count in enumerate(sizes):
        cache.put(key, block(0, int(count)))
        held = [cache.get(each) for each in range(key + 1)]
        assert sum(each.nbytes for each in held if each is not None) <= 100


def test_a_block_larger_than_the_cache_drops_nothing():
    cache = BlockCache(30)
    cache.put("a", block(1))
    cache.put("huge", block(2, 31))
    assert cache.get("huge") is None
    assert cache.get("a") is not None


def test_putting_a_block_again_does_not_count_it_twice():
    cache = BlockCache(30)
    cache.put("a", block(1))
    for _ in range(5):
        cache.put("b", block(2))
    assert cache.get("a") is not None


def test_a_kept_block_cannot_be_written():
    cache = BlockCache(100)
    cache.put("a", block(1))
    with pytest.raises(ValueError, match="read-only"):
        cache.get("a")[0] = 2


def test_threads_may_share_the_cache():
    cache = BlockCache(200)
    problems = []

    def use(seed: int) -> None:
        for key in np.random.default_rng(seed).integers(0, 40, 500):
            held = cache.get(int(key))
            if held is not None and held[0] != key:
                problems.append((key, held[0]))
            cache.put(int(key), block(int(key)))

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []


def test_a_block_that_many_threads_want_at_once_is_made_once():
    cache, made, ready = BlockCache(100), [], threading.Barrier(8)

    def make():
        made.append(1)
        return block(7)

    def want(found):
        ready.wait(timeout=10)
        found.append(cache.obtain("a", make))

    found = []
    threads = [threading.Thread(target=want, args=(found,)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert [each[0][0] for each in found] == [7] * 8
    assert sum(fresh for _, fresh in found) == 1


def test_a_block_that_could_not_be_made_is_tried_again_by_who_waited():
    cache, begun, results = BlockCache(100), threading.Event(), []

    def fail():
        begun.set()
        waiting.wait(timeout=10)
        raise OSError("torn")

    def first():
        with pytest.raises(OSError, match="torn"):
            cache.obtain("a", fail)

    waiting = threading.Event()
    one = threading.Thread(target=first)
    one.start()
    begun.wait(timeout=10)
    other = threading.Thread(target=lambda: results.append(cache.obtain("a", lambda: block(1))))
    other.start()
    waiting.set()
    one.join()
    other.join()
    assert results[0][1]


def test_a_block_too_large_to_keep_is_made_by_everyone_who_wants_it():
    cache = BlockCache(5)
    assert cache.obtain("a", lambda: block(1))[1]
    assert cache.obtain("a", lambda: block(1))[1]
