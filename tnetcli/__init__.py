"""Classify gigapixel images by looking closer only where it matters."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tnetcli.errors import TnetError

if TYPE_CHECKING:
    from tnetcli.models.checkpoint import load_model
    from tnetcli.prediction.batch import predict, predict_many
    from tnetcli.prediction.record import Prediction
    from tnetcli.readers.detect import open_image

__version__ = "0.2.0.dev0"
__all__ = [
    "Prediction",
    "TnetError",
    "__version__",
    "load_model",
    "open_image",
    "predict",
    "predict_many",
]

# `import tnetcli` stays instant: what is asked for loads when it is.
HOMES = {
    "Prediction": "tnetcli.prediction.record",
    "load_model": "tnetcli.models.checkpoint",
    "open_image": "tnetcli.readers.detect",
    "predict": "tnetcli.prediction.batch",
    "predict_many": "tnetcli.prediction.batch",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module `tnetcli` has no attribute `{name}`")
    return getattr(import_module(HOMES[name]), name)
