import os
import signal
import threading
from contextlib import suppress

import pytest

from tnetcli.errors import ImageError
from tnetcli.readers.handles import (
    IDLE,
    MOST_IDLE,
    ForkSafeLock,
    Handles,
    check_unchanged,
    file_stamp,
)


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


def test_nothing_is_opened_before_it_is_needed(handles, opened):
    assert opened == []


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


def test_the_failure_itself_is_passed_on(handles):
    with pytest.raises(KeyError), handles.borrow():
        raise KeyError("x")


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


def test_an_unchanged_file_passes(tmp_path):
    path = tmp_path / "a"
    path.write_text("one")
    check_unchanged(str(path), file_stamp(str(path)))


def test_a_url_always_passes():
    check_unchanged("https://host/a.tif", None)


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
