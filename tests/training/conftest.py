import pytest

from tnetcli.models.configs import ModelConfig
from tnetcli.models.registry import FAMILIES, Family


@pytest.fixture
def small_family(monkeypatch):
    """Register SmallModel, so that stages find what it learns from."""
    family = Family("", ModelConfig, "tests.small_model:SmallModel")
    monkeypatch.setitem(FAMILIES._loaded, "small", family)
    return family
