"""What all tests share: the flag for those that take minutes."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--run-slow", action="store_true", help="run tests that take minutes too")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--run-slow"):
        return
    skip = pytest.mark.skip(reason="takes minutes: --run-slow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)
