"""What all tests share: a flag for those that take minutes, a Ctrl-C that is heard, a log."""

import logging
import os
import signal

import pytest

HOUR = 3600  # seconds, for a slow test on a busy machine


def pytest_configure(config):
    # What a shell starts in the background ignores Ctrl-C, and so would all that tests start.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--run-slow", action="store_true", help="run tests that take minutes too")
    parser.addoption(
        "--update-goldens", action="store_true", help="store the results of tests/golden anew"
    )


def pytest_collection_modifyitems(config, items):
    how = pytest.mark.skip(reason="takes minutes: --run-slow")
    if config.getoption("--run-slow"):
        how = pytest.mark.timeout(HOUR)
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(how)


@pytest.fixture(autouse=True)
def untouched_log():
    """Give each test the log of a fresh process, whatever commands ran in this one before."""
    # Not what it was before the test: fixtures that many tests share run commands before that.
    logger = logging.getLogger("tnetcli")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)


@pytest.fixture
def unmeasured():
    """Lend the environment of a command that `make cov` cannot follow: it would be disturbed."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
