"""Built-in policies, tasks and exporters, and the toy plug-in, keep the published contracts."""

import numpy as np
import pytest

from tnetcli.exporters.base import EXPORTERS
from tnetcli.geometry import Size
from tnetcli.readers.detect import READERS
from tnetcli.tasks import TASKS
from tnetcli.testing.model import Case, ModelContract
from tnetcli.testing.plugins import CONFIG, ExporterContract, PolicyContract, TaskContract
from tnetcli.testing.reader import ReaderContract
from tnetcli.traversal.policies import POLICIES

NEEDS_PIXELS = {"figure", "html"}


class TestPolicies(PolicyContract):
    @pytest.fixture(params=[*POLICIES, "toy"])
    def policy(self, request):
        return POLICIES.load(request.param).from_config(CONFIG, 3)


class TestTasks(TaskContract):
    @pytest.fixture(params=[*TASKS, "toy"])
    def task(self, request):
        return TASKS.load(request.param)(["forest", "river", "town"], class_weights="balanced")


class TestExporters(ExporterContract):
    @pytest.fixture(params=[*EXPORTERS, "toy"])
    def exporter(self, request):
        return EXPORTERS.load(request.param)

    @pytest.fixture
    def options(self, exporter):
        return exporter.options(**({"pixels": False} if exporter.name in NEEDS_PIXELS else {}))


class TestToyReader(ReaderContract):
    block = Size(300, 200)

    def open(self, path):
        return READERS.load("toy")(str(path), None)

    def write(self, folder, truth):
        np.save(folder / "image.npy", truth)
        return folder / "image.npy"


class TestToyModel(ModelContract):
    case = Case("toy", {"backbone": "compact", "view_size": 64})
