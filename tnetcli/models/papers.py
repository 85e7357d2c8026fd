"""The published models: how each is built, and what is printed about its size and cost.

What is printed is here to be compared with. What we say of a model is always counted on the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tnetcli.models.lsp import Localising

Keep = tuple[int, ...]  # cells followed per window when leaving level 1, 2, ...
MILLION, BILLION = 10**6, 10**9
Map = tuple[int, int]  # pixels a side of a map, and how many of the view one of them sees


@dataclass(frozen=True, slots=True)
class Published:
    """One model: `build_model(family, arguments, classes=classes)`, and its printed figures.

    `image_size` is the side of the images it was made for. `trainable` and `total` are millions of
    parameters, as many of the two as are printed; `total` holds running statistics and the
    baseline of the reward too. `multiplications` are billions per image, by what is kept. `maps`
    are those of single layers, by the names of the modules; views are as large as the model's.
    `positions` are those of each branch of AnchorNet, `tried` how many of them LSP goes through.

    How these were counted: `scaling` adds the products of squeeze-excite to those of convolutions
    and dense layers; `root_always_scored` adds the location module even where nothing is followed.
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
    # "published": printed in a paper. "derived": counted on prototypes that were written apart
    # from this code, where no paper has a table (CUB and NABirds).
    source: Literal["published", "derived"] = "published"
    # Digits after the point, as printed.
    digits: int = 2
    cost_digits: int = 2
    maps: Mapping[str, Map] = field(default_factory=dict)
    positions: tuple[int, ...] = ()
    tried: Mapping[Localising, tuple[int, ...]] = field(default_factory=dict)
    # Where a figure cannot be met: why, as far as it is known.
    reason: str = ""


def _by_windows(*billions: float) -> dict[Keep, float]:
    """Name costs by 0, 1, 2, ... windows on two levels."""
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
    maps = {"anchor.head.0": (111, 3)}
    blocks = ((55, 7), *((27, 15),) * 6, (25, 31), (23, 47))
    for block, each in enumerate(blocks, 3):  # after a norm and an activation
        maps[f"anchor.head.{block}"] = each
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
    """Return what hard attention was compared with, as the TNet paper prints it."""
    models = {
        "saccader": Published(
            "saccader",
            {"view_size": 224},
            classes=1000,
            image_size=224,
            multiplications={(): 19.5},
            total=35.58,
            cost_digits=1,
            reason="classes are scored at the visited places only; at all 361 places, as in the "
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
            reason="what is printed are glimpses + 1 times 0.620, which leaves no room for the "
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
                    "weighting": True,
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


PAPERS: dict[str, Published] = {
    **_imagenet(),
    **_anchornet(),
    **_classic(),
    **_fmow(),
    **_birds(),
    **_two_stream(),
}
