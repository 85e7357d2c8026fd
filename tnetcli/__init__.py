"""Classify gigapixel images with recursive hard attention.

>>> import tnetcli
>>> prediction = tnetcli.predict("scene.tif", levels=3)
>>> tnetcli.export([prediction], "scene.geojson")

Names are imported on first use, so `import tnetcli` is quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tnetcli.errors import (
    ClusterError,
    ImageError,
    ManifestError,
    MissingExtraError,
    ModelError,
    OutputError,
    RecipeError,
    SomeFailedError,
    TnetError,
    UsageError,
)

if TYPE_CHECKING:
    from tnetcli.evaluation.evaluate import evaluate
    from tnetcli.exporters.base import export
    from tnetcli.geometry import Region, Size, Window
    from tnetcli.models.base import Model
    from tnetcli.prediction.batch import predict, predict_many
    from tnetcli.prediction.jsonl import read_predictions
    from tnetcli.prediction.predictor import Predictor, load_model
    from tnetcli.prediction.record import Prediction
    from tnetcli.readers.base import Reader, ReadOptions
    from tnetcli.readers.detect import open_image as open
    from tnetcli.registry import Registry
    from tnetcli.tasks import Task
    from tnetcli.training.recipe import Recipe
    from tnetcli.training.run import train
    from tnetcli.traversal.policies import Policy

__version__ = "0.2.0.dev0"
__all__ = [
    "ClusterError", "ImageError", "ManifestError", "MissingExtraError", "Model", "ModelError",
    "OutputError", "Policy", "Prediction", "Predictor", "ReadOptions", "Reader", "Recipe",
    "RecipeError", "Region", "Registry", "Size", "SomeFailedError", "Task", "TnetError",
    "UsageError", "Window", "__version__", "evaluate", "export", "load_model", "open", "predict",
    "predict_many", "read_predictions", "train",
]  # fmt: skip
_MODULES = {
    "tnetcli.evaluation.evaluate": ["evaluate"],
    "tnetcli.exporters.base": ["export"],
    "tnetcli.geometry": ["Region", "Size", "Window"],
    "tnetcli.models.base": ["Model"],
    "tnetcli.prediction.batch": ["predict", "predict_many"],
    "tnetcli.prediction.jsonl": ["read_predictions"],
    "tnetcli.prediction.predictor": ["Predictor", "load_model"],
    "tnetcli.prediction.record": ["Prediction"],
    "tnetcli.readers.base": ["ReadOptions", "Reader"],
    "tnetcli.readers.detect": ["open"],
    "tnetcli.registry": ["Registry"],
    "tnetcli.tasks": ["Task"],
    "tnetcli.training.recipe": ["Recipe"],
    "tnetcli.training.run": ["train"],
    "tnetcli.traversal.policies": ["Policy"],
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module `tnetcli` has no attribute `{name}`")
    # A module cannot define `open` without shadowing the built-in function for itself.
    attribute = "open_image" if name == "open" else name
    return getattr(import_module(_MODULE_OF[name]), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
