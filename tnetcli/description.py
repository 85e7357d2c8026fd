"""The description stored with a trained model: what inference needs, and its provenance."""

import json
import logging
from collections import Counter
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, ValidationInfo, field_validator, model_validator

from tnetcli import __version__
from tnetcli.geometry import Grid
from tnetcli.models.configs import Arguments
from tnetcli.models.registry import read_arguments
from tnetcli.normalisation import Normalisation
from tnetcli.readers.cropped import CropKind
from tnetcli.traversal.config import TraversalConfig, warn_unused
from tnetcli.validation import Strict

log = logging.getLogger(__name__)
SCHEMA = "tnet.model/2"
WHOLE_VIEW = Grid(1, 1, 1.0)  # of a family that has no cells

Name = Annotated[str, Field(min_length=1, pattern=r"\S")]
Whole = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class TaskDescription(Strict):
    """The task of a model, and the state that was fitted to its training targets."""

    name: Literal["classification"] = "classification"
    state: dict[str, Any] = Field(default_factory=dict)


class Description(Strict):
    """Family, classes, bands, scaling and traversal of a model, and how it was trained.

    `arguments` are complete, so that a new default does not change a stored model. `traversal` is
    the one of training; inference may use another. `save_checkpoint` sets `weights`.
    """

    family: Name
    arguments: dict[str, Any]
    classes: tuple[Name, ...] = Field(min_length=1)
    bands: tuple[Name, ...] = Field(min_length=1)
    normalisation: Normalisation
    traversal: TraversalConfig
    task: TaskDescription = TaskDescription()
    recipe: dict[str, Any] | None = None
    metrics: dict[str, Whole | float] = Field(default_factory=dict)
    tnet: str = __version__
    data_licence: str = ""
    pixel_size: float | None = Field(default=None, gt=0)  # metres, of the images trained on
    name: str | None = None
    summary: str | None = None
    weights: Literal["float32", "float16"] = "float32"

    @field_validator("arguments", mode="before")
    @classmethod
    def _complete(cls, given: Any, info: ValidationInfo) -> Any:
        if "family" not in info.data:
            return {}  # that problem is reported already
        given = given.model_dump() if isinstance(given, Arguments) else given
        return read_arguments(info.data["family"], given).model_dump(mode="json")

    @field_validator("recipe")
    @classmethod
    def _as_json_has_it(cls, recipe: dict[str, Any] | None) -> Any:
        try:
            return json.loads(json.dumps(recipe, allow_nan=False))
        except (TypeError, RecursionError) as error:
            raise ValueError(str(error)) from error

    @model_validator(mode="after")
    def _agree(self) -> Self:
        bands, numbers = len(self.bands), len(self.normalisation.mean)
        levels, most = self.traversal.levels, self.model_arguments.most_levels
        (name, times), *_ = Counter(self.classes).most_common(1)
        if times > 1:
            raise ValueError(f"two classes share a name: `{name}`")
        if numbers != bands:
            raise ValueError(f"`normalisation` is of {numbers} bands, the model has {bands}")
        if most is not None and levels > most:
            raise ValueError(f"`levels` is above the {most} of `{self.family}`: `{levels}`")
        return self

    @property
    def model_arguments(self) -> Arguments:
        """Return the arguments as the family knows them."""
        return read_arguments(self.family, self.arguments)

    @property
    def view_size(self) -> int:
        """Return the pixels a side of what the model sees."""
        return self.model_arguments.view_size

    @property
    def grid(self) -> Grid:
        """Return the cells of a window; one, where the family has none."""
        grid = getattr(self.model_arguments, "grid", WHOLE_VIEW)
        assert isinstance(grid, Grid)
        return grid

    @property
    def crop(self) -> CropKind:
        """Return which part of images it was trained on: all, their boxes, or some more."""
        data = (self.recipe or {}).get("data")
        told = data.get("crop") if isinstance(data, dict) else None
        return next((kind for kind in get_args(CropKind) if kind == told), "none")

    def config(
        self, *, levels: int | None = None, keep: tuple[int, ...] | None = None
    ) -> TraversalConfig:
        """Return the traversal the model was trained with, or one of other levels and cells.

        Beyond the trained depth the last number repeats, and no family goes deeper than it can;
        both are warned about.
        """
        trained = self.traversal
        depth, most = levels or trained.levels, self.model_arguments.most_levels
        if most is not None and depth > most:
            log.warning("%d levels asked for: the family `%s` has %d", depth, self.family, most)
            depth = most
        if depth > trained.levels:
            log.warning(
                "%d levels asked of a model trained with %d: beyond, each follows as many cells as "
                "the one before",
                depth,
                trained.levels,
            )
        if keep is not None:
            warn_unused(depth, keep)
        return trained.changed(levels=depth, keep=keep or trained.keep or (1,))

    def as_json(self) -> str:
        """Return the text that goes into the file."""
        return json.dumps(
            {"schema": SCHEMA, **self.model_dump(mode="json")}, ensure_ascii=False, allow_nan=False
        )
