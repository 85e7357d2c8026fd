import pytest
import torch

from tests.golden import scenes
from tests.golden.frozen import Golden


@pytest.fixture(autouse=True)
def two_threads():
    """Compute with as many threads as the goldens were made with: sums differ by their order."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def golden(request):
    """Open a file of frozen results by name."""
    update = request.config.getoption("--update-goldens")
    if update and hasattr(request.config, "workerinput"):
        pytest.fail("--update-goldens writes files that workers would share: add -n 0")
    return lambda name: Golden(name, update=update)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Write the images, tiles and lists that all golden tests read."""
    return scenes.write(tmp_path_factory.mktemp("golden"))
