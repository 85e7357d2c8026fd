import threading

import pytest

from tests.engines.work import double, never, raise_at, singles
from tnetcli.engines.local import LocalEngine


@pytest.mark.parametrize("count", [0, 1, 7])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_results_keep_the_order_of_the_batches(count, depth):
    found = LocalEngine(depth).map(double, singles(*range(count)), should_stop=never)
    assert list(found) == [[2 * each] for each in range(count)]


def test_two_batches_run_at_once_and_no_third():
    both, running, most = threading.Barrier(2, timeout=10), [], []

    def work(batch):
        running.append(batch)
        most.append(len(running))
        both.wait()
        running.remove(batch)
        return batch

    assert list(LocalEngine().map(work, singles(*range(6)), should_stop=never)) == singles(
        *range(6)
    )
    assert max(most) == 2


def test_batches_are_taken_as_they_are_needed():
    taken = []

    def batches():
        for each in range(100):
            taken.append(each)
            yield [each]

    found = LocalEngine().map(double, batches(), should_stop=never)
    assert next(found) == [0]
    assert len(taken) <= 3
    found.close()


def test_running_batches_are_finished_after_a_stop():
    stop, begun, found = [], [], []

    def work(batch):
        begun.append(batch)
        return batch

    for each in LocalEngine().map(work, singles(*range(100)), should_stop=lambda: bool(stop)):
        found.append(each)
        if each == [3]:
            stop.append(True)
    assert found == begun
    assert 4 <= len(found) <= 6


def test_an_error_is_raised_in_place_of_its_result():
    found = LocalEngine().map(raise_at, singles(*range(9)), should_stop=never)
    assert [next(found), next(found)] == [0, 1]
    with pytest.raises(ValueError, match="two"):
        next(found)
