import threading

import numpy as np
import pytest

from tests.images import noise, write_geotiff
from tnetcli.geometry import Size, Window
from tnetcli.readers.detect import open_image
from tnetcli.readers.handles import BLOCKS, BlockCache


def block(value: int, count: int = 10) -> np.ndarray:
    return np.full(count, value, np.uint8)


def test_a_block_that_was_put_comes_back():
    cache = BlockCache(100)
    cache.put("a", block(1))
    assert cache.get("a")[0] == 1
    assert cache.get("b") is None


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
    for number in range(5):  # and there is room for as many as before
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


def test_a_cleared_cache_is_empty_and_goes_on_working():
    cache = BlockCache(30)
    for name in "abc":
        cache.put(name, block(0))
    cache.clear()
    assert [cache.get(name) for name in "abc"] == [None] * 3
    for name in "def":
        cache.put(name, block(0))
    assert all(cache.get(name) is not None for name in "def")


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


def test_the_cache_of_the_process_can_be_emptied():
    BLOCKS.put("test", block(1))
    BLOCKS.clear()
    assert BLOCKS.get("test") is None


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
