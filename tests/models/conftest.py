import pytest
import torch

import tests.strategies  # noqa: F401  (loads the profile)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Small networks gain nothing from more, and lose much where cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
