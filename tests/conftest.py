"""Options, Hypothesis profiles and fixtures that all tests share."""

import logging
import os
import signal
import sys

import pytest
from hypothesis import settings

from tests.pages import warm_commands

# Read when torch and numpy are loaded, here and in every process that a test starts. Threads of two
# test processes would otherwise spin on cores that the others need: six times as slow.
os.environ |= {"OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
HOUR = 3600  # seconds, for a slow test on a busy machine
# `ci` is quick and repeatable; HYPOTHESIS_PROFILE=nightly searches further, at random.
settings.register_profile("ci", max_examples=20, deadline=None, derandomize=True)
settings.register_profile("nightly", max_examples=500, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def pytest_configure(config):
    # A process that a shell starts in the background ignores SIGINT, and so do its children.
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser):
    parser.addoption("--run-slow", action="store_true", help="run tests marked slow as well")
    parser.addoption(
        "--update-goldens", action="store_true", help="store the results of tests/golden again"
    )


def pytest_collection_modifyitems(config, items):
    marker = pytest.mark.skip(reason="slow: use --run-slow")
    if config.getoption("--run-slow"):
        marker = pytest.mark.timeout(HOUR)
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(marker)


@pytest.fixture(autouse=True)
def fresh_process():
    """Give each test the logger of a fresh process, and no request to stop of the test before."""
    # Not the state before the test: shared fixtures run commands before that.
    if watch := sys.modules.get("tnetcli.readers.watch"):
        watch._watch.begin()
    logger = logging.getLogger("tnetcli")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def commands(tmp_path_factory):
    """Return a folder of `tnet` and `python` programs that start fast."""
    with warm_commands(tmp_path_factory.mktemp("commands")) as folder:
        yield folder


@pytest.fixture
def unmeasured():
    """Return an environment without coverage, which would disturb the command under test."""
    return {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
