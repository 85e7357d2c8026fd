import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.exporters.records import window
from tests.strategies import numbers
from tnetcli.exporters import joint as module
from tnetcli.exporters.joint import JointProbabilities


def walk(seen):
    with JointProbabilities() as joint:
        return [joint.of(each) for each in seen]


def test_a_joint_probability_is_the_product_of_attention_along_the_path():
    seen = [
        window(attention=1.0),
        window("root/0-1", attention=0.5),
        window("root/2-2", attention=0.25),
        window("root/0-1/1-1", attention=0.1),
        window("root/2-2/0-0", attention=0.2),
    ]
    assert walk(seen) == pytest.approx([1.0, 0.5, 0.25, 0.05, 0.05])


def test_below_a_window_that_was_never_seen_it_is_unknown():
    seen = [window(attention=1.0), window("root/0-1/1-1"), window("root/0-1/1-1/0-0")]
    assert walk(seen) == [1.0, None, None]


@given(st.data())
def test_what_is_put_away_is_found_again_in_any_order(data):
    attention = {"root": 1.0}
    for _ in range(data.draw(st.integers(0, 30))):
        parent = data.draw(st.sampled_from(sorted(attention)))
        name = f"{parent}/{data.draw(st.integers(0, 2))}-{data.draw(st.integers(0, 2))}"
        attention.setdefault(name, data.draw(numbers(0.0, 1.0)))
    expected = [
        math.prod(
            attention["/".join(path.split("/")[: depth + 1])]
            for depth in range(path.count("/") + 1)
        )
        for path in attention
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST_IN_MEMORY", data.draw(st.integers(1, 5)))
        found = walk([window(path, attention=each) for path, each in attention.items()])
    assert found == pytest.approx(expected)
