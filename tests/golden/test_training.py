"""Metrics of tiny training runs equal those frozen in training.json, step by step."""

import pytest

from tests.golden import adapter


@pytest.mark.parametrize("name", adapter.RECIPES)
def test_metrics(golden, folder, tmp_path, name):
    rows = adapter.train(folder, tmp_path / "here", name)
    golden("training").check(name, rows, rtol=1e-5, atol=1e-7)


def test_no_other_case_is_stored(golden):
    golden("training").keep(set(adapter.RECIPES))
