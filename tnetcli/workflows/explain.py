"""Where a step of a model that thinks in steps found its class, laid over the pixels of an image.

Loads torch: only for `tnet export --explain`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tnetcli.checkpoint import Checkpoint, bundled_models, load_model
from tnetcli.errors import ModelError, OutputError, UsageError
from tnetcli.exporters.colours import attention_colour
from tnetcli.exporters.imagery import Imagery
from tnetcli.exporters.looked import Looked
from tnetcli.exporters.shown import choose_shown, is_chosen
from tnetcli.geometry import Size, Window
from tnetcli.models.step_cam import step_cam
from tnetcli.models.two_stream import TwoStream
from tnetcli.prediction import BoxEdges, Prediction, SeenWindow
from tnetcli.readers.base import Reader
from tnetcli.readers.rescaled import RescaledReader
from tnetcli.workflows.imagery import as_imagery, open_predicted

MOST_OPAQUE = 0.7  # of what is hottest: the pixels below are still to be seen
SHADES = np.array([attention_colour(shade / 255) for shade in range(256)], np.float64)  # (256, 3)


@dataclass(frozen=True, slots=True, eq=False)
class Heat:
    """What speaks for a class in a window (rows, columns), at most 1, and at which step."""

    box: BoxEdges
    step: int
    values: NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Explained:
    """The pixels of an image with heat over them; an `Imagery`.

    What is shown of a window has its own heat; what is shown of anything else that of all windows,
    the most where they overlap.
    """

    imagery: Imagery
    heats: tuple[Heat, ...]
    note: str

    def show(self, box: BoxEdges, width: int, height: int) -> NDArray[np.uint8]:
        """Return (height, width, 4); see `Imagery.show`."""
        shown = self.imagery.show(box, width, height)
        own = [heat for heat in self.heats if heat.box == box]
        total = np.zeros((height, width))
        for heat in own or self.heats:
            total = np.maximum(total, spread(heat, box, width, height))
        share = MOST_OPAQUE * total[..., None]  # (height, width, 1)
        colours = SHADES[np.rint(255 * total).astype(np.intp)]  # (height, width, 3)
        mixed = (1 - share) * shown[..., :3] + share * colours
        shown[..., :3] = np.where(shown[..., 3:] > 0, np.rint(mixed), 0).astype(np.uint8)
        return shown


def spread(heat: Heat, box: BoxEdges, width: int, height: int) -> NDArray[np.float64]:
    """Return the heat under each of `height` x `width` pixels of a box, 0 outside of its window."""
    x0, y0, x1, y1 = heat.box
    rows, columns = heat.values.shape
    down, is_inside_y = _between(box[1], box[3], height, y0, y1, rows)
    across, is_inside_x = _between(box[0], box[2], width, x0, x1, columns)
    found: NDArray[np.float64] = down @ heat.values.astype(np.float64) @ across.T
    return found * np.outer(is_inside_y, is_inside_x)


def _between(
    start: float, end: float, count: int, low: float, high: float, cells: int
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return by how much each cell counts at each pixel (count, cells), and which are inside."""
    place = start + (np.arange(count) + 0.5) * (end - start) / count  # (count,)
    at = np.clip((place - low) / (high - low) * cells - 0.5, 0, cells - 1)
    weights = np.maximum(1 - np.abs(at[:, None] - np.arange(cells)), 0.0)
    return weights, (place >= low) & (place < high)


@contextmanager
def open_explained(
    looked: Looked, *, model: str | None, step: int | None, root: Path | None, remote: bool = False
) -> Iterator[Explained]:
    """Lend the pixels of a predicted image with the Grad-CAM of a step over each window.

    The class is the answer of the record; the step is `step`, or by itself the one of the largest
    share in a window. ModelError where the model did not make the record, or makes no steps;
    ImageError where the image is gone.
    """
    prediction = looked.prediction
    checkpoint = _load(_name(prediction, model))
    network = _check(checkpoint, prediction, step)
    with open_predicted(prediction, root, remote=remote) as reader:
        explain = _explainer(checkpoint, network, prediction, reader)
        windows = [each for each in choose_shown(looked.chosen()).listed if is_chosen(each)]
        heats = tuple(explain(window, step or _counted_most(window)) for window in windows)
        yield Explained(as_imagery(reader), heats, _say(heats, network, prediction, step))


def _name(prediction: Prediction, model: str | None) -> str:
    if model is None and prediction.provenance.model not in bundled_models():
        raise UsageError(
            f"which model is `{prediction.provenance.model}`, that made the predictions?",
            hint="give its file: --model FILE",
        )
    return model or prediction.provenance.model


@lru_cache(maxsize=1)
def _load(name: str) -> Checkpoint:
    return load_model(name)


def _check(checkpoint: Checkpoint, prediction: Prediction, step: int | None) -> TwoStream:
    """Return the network, if it made the prediction and makes steps."""
    model = checkpoint.model
    if not isinstance(model, TwoStream) or not model.steps:
        raise ModelError(
            f"`{checkpoint.path}` does not think in steps: its family is `{model.family}`"
            + (", with `steps: none`" if isinstance(model, TwoStream) else ""),
            hint="--explain step is for models of the family two_stream that make steps",
        )
    if checkpoint.sha256 != prediction.provenance.sha256:
        raise ModelError(
            f"`{prediction.id}` was not predicted by `{checkpoint.path}`: the record names "
            f"{prediction.provenance.sha256[:12] or 'no model'}, the file is "
            f"{checkpoint.sha256[:12]}",
            hint="give the model that made the predictions, or predict again with this one",
        )
    if step is not None and step > model.steps:
        raise UsageError(
            f"there is no step {step}: the model makes {model.steps}",
            hint=f"--step is from 1 to {model.steps}",
        )
    return model


def _explainer(
    checkpoint: Checkpoint, network: TwoStream, prediction: Prediction, reader: Reader
) -> Callable[[SeenWindow, int], Heat]:
    """Return what finds the heat of a window at a step."""
    from torch import from_numpy

    description = checkpoint.description
    if prediction.label not in description.classes:
        raise OutputError(
            f"the model does not know the answer `{prediction.label}`",
            hint="was the file changed by something else than tnet?",
        )
    label = description.classes.index(prediction.label)
    side = Size(description.view_size, description.view_size)
    rescale: Any = prediction.provenance.config.get("rescale")
    if rescale:
        low, high = rescale
        reader = RescaledReader(reader, low, high, description.normalisation.dtype)

    def explain(window: SeenWindow, step: int) -> Heat:
        x0, y0, x1, y1 = window.box
        pixels = reader.read(Window(x0, y0, x1 - x0, y1 - y0), side)
        view, _ = description.normalisation.apply(pixels)  # (bands, height, width)
        found = step_cam(network, from_numpy(view), step, label).float().cpu()
        values: NDArray[np.float32] = (found / found.max().clamp(min=1e-30)).numpy()
        return Heat(window.box, step, values)

    return explain


def _counted_most(window: SeenWindow) -> int:
    """Return the step of the largest share, from 1; the earlier where several are as large."""
    if not window.steps:
        raise OutputError(
            f"the record does not tell the steps of `{window.path}`",
            hint="predict the image again, or choose one with --step N",
        )
    return 1 + int(np.argmax(window.steps))


def _say(
    heats: tuple[Heat, ...], network: TwoStream, prediction: Prediction, step: int | None
) -> str:
    if not heats:
        return "no window was looked at closer: there is no step to explain"
    made = sorted({heat.step for heat in heats})
    which = ", ".join(map(str, made))
    chosen = "" if step else ", the one that counted most in each window"
    return (
        f"bright: what speaks for {prediction.label} at step {which} of {network.steps}{chosen}; "
        "each window by its own most (Grad-CAM)"
    )
