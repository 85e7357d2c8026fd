"""The published models: how each is built, and what is printed about its size and cost.

What is printed is here to be compared with. What we say of a model is always counted on the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Keep = tuple[int, ...]  # cells followed per window when leaving level 1, 2, ...
DIGITS = 2  # after the point of every printed figure
MILLION, BILLION = 10**6, 10**9


@dataclass(frozen=True, slots=True)
class Published:
    """One model: `build_model(family, arguments, classes=classes)`, and its printed figures.

    `image_size` is the side of the images it was made for. `trainable` and `total` are millions of
    parameters, as many of the two as are printed; `total` holds running statistics and the
    baseline of the reward too. `multiplications` are billions per image, by what is kept.

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


def _by_windows(*billions: float) -> dict[Keep, float]:
    """Name costs by 0, 1, 2, ... windows on two levels."""
    return {(count,) if count else (): cost for count, cost in enumerate(billions)}


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


PAPERS: dict[str, Published] = {**_imagenet(), **_fmow(), **_birds()}
