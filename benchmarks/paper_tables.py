"""Compare the published size and cost of each model with what is counted on the built model.

`python benchmarks/paper_tables.py` prints every figure of the papers beside ours.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from benchmarks.receptive_field import trace
from tnetcli.models.base import Model
from tnetcli.models.cost import Step, Steps, count_parameters, steps_of
from tnetcli.models.lsp import LSP_SETTINGS, LspSetting, count_candidates
from tnetcli.models.registry import build_model
from tnetcli.text import table

Keep = tuple[int, ...]  # cells followed per region when leaving level 1, 2, ...
MILLION, BILLION = 10**6, 10**9
Map = tuple[int, int]  # side of a feature map, and the receptive field of one of its pixels
SAME = 1e-9  # a figure that is off by one in its last digit may round to slightly more
LAYERS = (functional.linear, functional.conv1d, functional.conv2d, functional.conv3d)
BRANCHES = tuple(f"anchor.branches.{branch}.blocks" for branch in range(3))


@dataclass(frozen=True, slots=True)
class Published:
    """One model, `build_model(family, arguments, classes=classes)`, and its printed figures.

    `image_size` is the side of the images it was made for. `trainable` and `total` are millions of
    parameters; `total` includes running statistics and the reward baseline. `multiplications` are
    billions per image, by `keep`. `maps` are those of single layers, by module name. `positions`
    are those of each branch of AnchorNet, `tried` how many of them LSP examines.

    `scaling` adds the products of squeeze-excite to those of convolutions and dense layers;
    `root_always_scored` adds the location module even where no cell is followed.
    """

    family: str
    arguments: Mapping[str, Any]
    classes: int
    image_size: int
    multiplications: Mapping[Keep, float]
    trainable: float | None = None
    total: float | None = None
    scaling: bool = False
    root_always_scored: bool = False
    # "published": printed in a paper. "derived": counted on independent prototypes, where no
    # paper has a table (CUB and NABirds).
    source: Literal["published", "derived"] = "published"
    digits: int = 2  # after the point, as printed
    cost_digits: int = 2
    maps: Mapping[str, Map] = field(default_factory=dict)
    positions: tuple[int, ...] = ()
    tried: Mapping[LspSetting, tuple[int, ...]] = field(default_factory=dict)
    reason: str = ""  # why a figure is not met, as far as known


def _by_windows(*billions: float) -> dict[Keep, float]:
    """Return costs by 0, 1, 2, ... regions on two levels."""
    return {(count,) if count else (): cost for count, cost in enumerate(billions)}


def _bagnet_maps() -> dict[str, Map]:
    """Return table 4 of the TNet paper: views of 77 pixels, block by block."""
    maps = {"backbone.net.stem": (75, 3)}
    sides = (38,) * 3 + (19,) * 4 + (9,) * 6
    fields = (5, 9, 9, 13, 21, 21, 21, 29, *(45,) * 5)
    for block, each in enumerate(zip(sides, fields, strict=True)):
        maps[f"backbone.net.to_map.{block}"] = each
    for block, seen in enumerate((61, 77, 77)):
        maps[f"backbone.net.to_features.{block}"] = (7, seen)
    return maps


def _efficientnet_maps() -> dict[str, Map]:
    """Return table 5 of the TNet paper, less its two slips: views of 224 pixels."""
    maps = {"backbone.net.net.conv_stem": (112, 3)}
    sides = (112, 56, 28, 14, 14, 7, 7)
    fields = (
        (7,), (11, 19), (35, 67), (83, 115, 147), (211, 275, 339), (403, 531, 659, 787), (851,),
    )  # fmt: skip
    for stage, (side, blocks) in enumerate(zip(sides, fields, strict=True)):
        for block, seen in enumerate(blocks):
            maps[f"backbone.net.net.blocks.{stage}.{block}"] = (side, seen)
    return maps


def _anchor_maps() -> dict[str, Map]:
    """Return the tables of AnchorNet: views of 224 pixels; its head, then its branches."""
    maps = {"anchor.trunk.0": (111, 3)}
    blocks = ((55, 7), *((27, 15),) * 6, (25, 31), (23, 47))
    for block, each in enumerate(blocks, 3):  # after a norm and an activation
        maps[f"anchor.trunk.{block}"] = each
    branches = (((21, 63), (21, 63)), ((21, 63), (17, 95)), ((19, 79), (15, 111)))
    for branch, pair in enumerate(branches):
        for block, each in enumerate(pair):
            maps[f"anchor.branches.{branch}.blocks.{block}"] = each
    return maps


def _imagenet() -> dict[str, Published]:
    return {
        "tnet-imagenet": Published(
            "tnet",
            {
                "backbone": "bagnet77",
                "view_size": 77,
                "grid": {"rows": 5, "columns": 5, "cell_fraction": 0.34375},
                "alignment": "reference",
                "location": "context",
                "position": "concat",
            },
            classes=1000,
            image_size=224,
            multiplications={**_by_windows(1.82, 3.63, 5.43, 7.24), (5,): 10.84},
            trainable=21.86,
            root_always_scored=True,
            maps=_bagnet_maps(),
        ),
        "bagnet-77": Published(
            "whole",
            {"backbone": "bagnet77", "view_size": 224},
            classes=1000,
            image_size=224,
            multiplications={(): 18.42},
            trainable=20.55,
        ),
    }


def _anchornet() -> dict[str, Published]:
    return {
        "anchornet": Published(
            "anchornet",
            {"backbone": "anchornet"},
            classes=1000,
            image_size=224,
            multiplications={(): 0.5},
            trainable=1.6,
            digits=1,
            cost_digits=1,
            maps=_anchor_maps(),
            positions=(441, 289, 225),
            tried={"strict": (22, 11, 6), "loose": (132, 86, 67)},
        )
    }


def _two_stream() -> dict[str, Published]:
    return {
        "two-stream-cub-vgg19": Published(
            "two_stream",
            {"backbone": "vgg19", "view_size": 448, "local_size": 224},
            classes=200,
            image_size=448,
            multiplications=_by_windows(78.03, 97.58, 117.12),
            trainable=44.46,
            source="derived",
        )
    }


def _classic() -> dict[str, Published]:
    """Return the baselines in the tables of the TNet paper."""
    models = {
        "saccader": Published(
            "saccader",
            {"view_size": 224},
            classes=1000,
            image_size=224,
            multiplications={(): 19.5},
            total=35.58,
            cost_digits=1,
            reason="classes are scored at the chosen places only; at all 361 places, as in the "
            "public code, it is 19.504",
        )
    }
    for glimpses, cost in ((2, 1.86), (4, 3.10), (8, 5.58), (20, 13.03)):
        models[f"dram-{glimpses}"] = Published(
            "dram",
            {"glimpses": glimpses},
            classes=1000,
            image_size=224,
            multiplications={(): cost},
            total=45.61,
            reason="what is printed are glimpses + 1 times 0.620, which leaves no space for the "
            "recurrent layers; 0.02 million parameters are biases of TensorFlow's ResNet",
        )
    return models


def _fmow() -> dict[str, Published]:
    models = {
        "tnet-fmow": Published(
            "tnet",
            {
                "backbone": "tf_efficientnet_b0",
                "view_size": 224,
                "grid": {"rows": 3, "columns": 3, "cell_fraction": 0.5},
                "alignment": "reference",
            },
            classes=62,
            image_size=896,  # up to 3 windows on two levels: 448
            # Six windows are printed without their levels; 3 + 3 x 1 and 2 + 2 x 2 cost the same
            # but for one call of the location module.
            multiplications={**_by_windows(0.39, 0.77, 1.16, 1.55), (2, 1): 1.94, (3, 1): 2.71},
            total=4.56,
            scaling=True,
            maps=_efficientnet_maps(),
        )
    }
    for image_size, cost in ((224, 0.39), (448, 1.54), (896, 6.18)):
        models[f"en-b0-fmow-{image_size}"] = Published(
            "whole",
            {"backbone": "tf_efficientnet_b0", "view_size": image_size},
            classes=62,
            image_size=image_size,
            multiplications={(): cost},
            total=4.13,
            scaling=True,
        )
    return models


# By EfficientNet B0 to B4: trainable and total millions of parameters on CUB, then on NABirds.
_TNET_SIZES = (
    ((5.52, 5.56), (5.97, 6.01)),
    ((8.01, 8.07), (8.46, 8.52)),
    ((9.48, 9.55), (9.98, 10.05)),
    ((12.79, 12.87), (13.33, 13.42)),
    ((20.33, 20.46), (20.97, 21.09)),
)
_WHOLE_SIZES = (
    ((4.26, 4.31), (4.72, 4.76)),
    ((6.77, 6.83), (7.22, 7.29)),
    ((7.98, 8.05), (8.48, 8.55)),
    ((11.00, 11.09), (11.55, 11.64)),
    ((17.91, 18.03), (18.54, 18.67)),
)
# Billions of multiplications for 0 to 5 windows, on either data.
_TNET_COSTS = (
    (0.39, 0.77, 1.16, 1.54, 1.93, 2.31),
    (0.57, 1.14, 1.71, 2.28, 2.85, 3.41),
    (0.66, 1.32, 1.98, 2.63, 3.29, 3.95),
    (0.96, 1.93, 2.89, 3.85, 4.81, 5.77),
    (1.50, 3.01, 4.51, 6.01, 7.52, 9.02),
)
_WHOLE_COSTS = (1.54, 2.27, 2.63, 3.84, 6.00)
_BIRDS = (("cub", 200), ("nabirds", 555))


def _birds() -> dict[str, Published]:
    models = {}
    for data, (name, classes) in enumerate(_BIRDS):
        for size in range(5):
            trainable, total = _TNET_SIZES[size][data]
            models[f"tnet-{name}-b{size}"] = Published(
                "tnet",
                {
                    "backbone": f"tf_efficientnet_b{size}",
                    "view_size": 224,
                    # A cell is 157 of 448 pixels wide, and is enlarged to a view of 224.
                    "grid": {"rows": 5, "columns": 5, "cell_fraction": 0.35},
                    "alignment": "reference",
                    "aggregator": "gated",
                },
                classes=classes,
                image_size=448,
                multiplications=_by_windows(*_TNET_COSTS[size]),
                trainable=trainable,
                total=total,
                source="derived",
            )
        for size in range(5):
            trainable, total = _WHOLE_SIZES[size][data]
            models[f"en-{name}-b{size}"] = Published(
                "whole",
                {"backbone": f"tf_efficientnet_b{size}", "view_size": 448},
                classes=classes,
                image_size=448,
                multiplications={(): _WHOLE_COSTS[size]},
                trainable=trainable,
                total=total,
                source="derived",
            )
    return models


PAPERS: dict[str, Published] = _imagenet() | _anchornet() | _classic() | _fmow()
PAPERS |= _birds() | _two_stream()


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure in units of `unit`, beside what is counted on the built model."""

    group: Literal["Parameters", "Multiplications", "Feature maps", "Patches"]
    of: str
    expected: float
    ours: int
    unit: int = 1
    digits: int = 0  # after the point, as printed

    @property
    def printed(self) -> str:
        """Return the figure as published."""
        return f"{self.expected:.{self.digits}f}"

    @property
    def difference(self) -> float:
        """Return ours less the published figure, in its unit."""
        return self.ours / self.unit - self.expected

    @property
    def agrees(self) -> str:
        """Return `digits` if ours prints the same, `nearly` if off by one in the last, else `no`.

        Whole numbers either agree or do not.
        """
        if f"{self.ours / self.unit:.{self.digits}f}" == self.printed:
            return "digits"
        near = self.digits > 0 and abs(self.difference) <= 10.0**-self.digits + SAME
        return "nearly" if near else "no"

    @property
    def row(self) -> tuple[str, ...]:
        """Return the cells of a table."""
        ours = f"{self.ours / self.unit:.{self.digits and self.digits + 2}f}"
        percent = f"{100 * self.difference / self.expected:+.2f}"
        return self.of, self.printed, ours, percent, self.agrees


@dataclass(slots=True)
class Multiplications:
    """Products of convolutions and dense layers, and those of squeeze-excite."""

    layers: int = 0
    scaling: int = 0


class _LayerCounter(TorchFunctionMode):
    """Count the products of layers that apply a weight, as the papers do; no area mean, no norm."""

    def __init__(self, count: Multiplications) -> None:
        super().__init__()
        self.count = count

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        if func in LAYERS:
            weight = args[1] if len(args) > 1 else kwargs["weight"]
            self.count.layers += weight.shape[1:].numel() * output.numel()
        return output


@contextmanager
def count_layers(model: nn.Module) -> Iterator[Multiplications]:
    """Count multiplications inside the block by the convention of the papers."""
    count = Multiplications()

    def scale(module: Any, inputs: Any, output: Tensor) -> None:
        count.scaling += output.numel()

    squeezes = [each for each in model.modules() if type(each).__name__.startswith("SqueezeExcite")]
    hooks = [each.register_forward_hook(scale) for each in squeezes]
    try:
        with torch.no_grad(), _LayerCounter(count):
            yield count
    finally:
        for hook in hooks:
            hook.remove()


def multiply(model: Model, steps: Steps) -> Multiplications:
    """Count the multiplications of a traversal on a model without numbers."""
    views = sum(step.views for step in steps)
    with count_layers(model) as count:
        features = torch.empty(1, views, model.feature_size, device="meta")
        levels = torch.ones(1, views, dtype=torch.long, device="meta")
        model.aggregate(features, levels > 0, levels)
    for step in steps:
        view = _multiply_view(model, min(step.level, 2), step.scored)
        count.layers += step.views * view.layers
        count.scaling += step.views * view.scaling
    return count


@lru_cache
def _multiply_view(model: Model, level: int, scored: bool) -> Multiplications:
    """Count the multiplications of one view; levels after the first have one encoder."""
    side = model.view_size_of(Step(level, 1, scored).regions(model.grid)[0])
    shown = torch.empty(1, model.bands, side, side, device="meta")
    positions = torch.empty(1, 3, dtype=torch.long, device="meta")
    with count_layers(model) as count:
        model.encoder(level)(shown, positions, scored)
    return count


def see_maps(model: Model, names: Iterable[str]) -> dict[str, Map]:
    """Return the feature maps of these modules, by name."""
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(name.split(".")[0], []).append(name)  # a part is called with a view
    return {name: seen for part in parts.items() for name, seen in _see(model, *part).items()}


def _see(model: Model, part: str, names: Sequence[str]) -> dict[str, Map]:
    like, side = next(model.parameters()), model.view_size
    view = torch.zeros(1, model.bands, side, side, device=like.device, dtype=like.dtype)
    kept: dict[str, Tensor] = {}  # (1, channels, height, width)

    def keep(name: str, module: Any, inputs: Any, output: Tensor) -> None:
        kept[name] = output

    def run(name: str, view: Tensor) -> Tensor:
        if not kept:  # one pass fills all names
            model.get_submodule(part)(view)
        return kept[name]

    hooks = []
    try:
        for name in names:
            hooks.append(model.get_submodule(name).register_forward_hook(partial(keep, name)))
        with torch.no_grad():
            found = {name: trace(partial(run, name), view) for name in names}
    finally:
        for hook in hooks:
            hook.remove()
    return {name: (seen.shape[2], rows.size) for name, (seen, (rows, _)) in found.items()}


def count_tried(setting: LspSetting, sides: Iterable[int]) -> list[int]:
    """Return how many positions of each branch LSP examines on maps of these sides."""
    shares = LSP_SETTINGS[setting].fractions
    return [count_candidates(side**2, share) for side, share in zip(sides, shares, strict=True)]


def compare(published: Published) -> list[Figure]:
    """Build a model without numbers and return all of its figures."""
    with torch.device("meta"):
        model = build_model(
            published.family, dict(published.arguments), classes=published.classes
        ).eval()
    counted = count_parameters(model)
    figures = [
        Figure("Parameters", f"{what}, M", printed, ours, MILLION, published.digits)
        for what, printed, ours in (
            ("trainable", published.trainable, counted.trainable),
            ("with statistics", published.total, counted.total),
        )
        if printed is not None
    ]
    for keep, expected in published.multiplications.items():
        steps = steps_of(keep, root_always_scored=published.root_always_scored)
        count = multiply(model, steps)
        ours = count.layers + count.scaling * published.scaling
        regions = f"{sum(step.views for step in steps) - 1} regions, B"
        digits = published.cost_digits
        figures.append(Figure("Multiplications", regions, expected, ours, BILLION, digits))
    for layer, found in see_maps(model, published.maps).items():
        for what, printed, ours in zip(
            ("side", "receptive field"), published.maps[layer], found, strict=True
        ):
            figures.append(Figure("Feature maps", f"{what} of {layer}", printed, ours))
    return [*figures, *_patches(model, published)]


def _patches(model: Model, published: Published) -> Iterator[Figure]:
    """Yield how many patches each branch can name, and how many of these LSP examines."""
    if not published.positions:
        return
    seen = see_maps(model, BRANCHES).values()
    branches, sides = [f"B{field}" for _, field in seen], [side for side, _ in seen]
    counts = {"positions": (published.positions, [side**2 for side in sides])}
    for setting, expected in published.tried.items():
        counts[f"tried, {setting}"] = (expected, count_tried(setting, sides))
    for count, (printed, found) in counts.items():
        for branch, each, ours in zip(branches, printed, found, strict=True):
            yield Figure("Patches", f"{branch} {count}", each, ours)


def report(compared: Mapping[str, Sequence[Figure]]) -> str:
    """Return a table for each group, the reasons of what is not met, and how many agree."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    reasons: dict[str, list[str]] = {}
    for name, figures in compared.items():
        for figure in figures:
            groups.setdefault(figure.group, []).append((name, PAPERS[name].source, *figure.row))
        if any(figure.agrees == "no" for figure in figures):
            reasons.setdefault(PAPERS[name].reason or "unknown", []).append(name)
    columns = ("model", "source", "figure", "printed", "ours", "off by, %", "agrees")
    parts = [table(group, columns, rows) for group, rows in groups.items()]
    parts += [f"Not met: {', '.join(names)}: {reason}" for reason, names in reasons.items()]
    found = [figure.agrees for figures in compared.values() for figure in figures]
    parts.append(
        f"{found.count('digits')} of {len(found)} figures agree in every digit, "
        f"{found.count('nearly')} nearly, {found.count('no')} do not"
    )
    return "\n\n".join(parts)


if __name__ == "__main__":
    print(report({name: compare(published) for name, published in PAPERS.items()}))
