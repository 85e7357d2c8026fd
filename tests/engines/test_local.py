import threading

import pytest

from tnetcli.engines.local import in_lanes


def never():
    return False


@pytest.mark.parametrize("count", [0, 1, 2, 7])
@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_results_come_in_order(count, lanes):
    found = in_lanes(lambda piece: piece * 2, range(count), should_stop=never, lanes=lanes)
    assert list(found) == [2 * each for each in range(count)]


def test_two_pieces_are_worked_on_at_once_and_no_third():
    both, running, most = threading.Barrier(2, timeout=10), [], []

    def work(piece):
        running.append(piece)
        most.append(len(running))
        both.wait()
        running.remove(piece)
        return piece

    assert list(in_lanes(work, range(6), should_stop=never)) == list(range(6))
    assert max(most) == 2


def test_pieces_are_taken_as_they_are_needed():
    taken = []

    def pieces():
        for each in range(100):
            taken.append(each)
            yield each

    found = in_lanes(lambda piece: piece, pieces(), should_stop=never)
    assert next(found) == 0
    assert len(taken) <= 3
    found.close()


def test_what_was_begun_is_finished_after_a_stop():
    asked, begun = [], []

    def work(piece):
        begun.append(piece)
        return piece

    found = []
    for each in in_lanes(work, range(100), should_stop=lambda: bool(asked)):
        found.append(each)
        if each == 3:
            asked.append(True)
    assert found == begun
    assert 4 <= len(found) <= 6


def test_an_error_comes_out_where_its_result_would():
    def work(piece):
        if piece == 2:
            raise ValueError("two")
        return piece

    found = in_lanes(work, range(9), should_stop=never)
    assert [next(found), next(found)] == [0, 1]
    with pytest.raises(ValueError, match="two"):
        next(found)
