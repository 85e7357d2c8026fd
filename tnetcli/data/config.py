"""Recipe sections for images, labels and augmentation."""

from typing import Literal, Self

from pydantic import Field, model_validator

from tnetcli.config import File, Range, Share, Strict, Weight, check_range
from tnetcli.readers.wrappers import CropKind


class LandscapeConfig(Strict):
    """How labelled tiles are composed into scenes: fields of nature, and a site or none."""

    size: int = Field(default=2048, ge=64, le=131_072, description="pixels a side of a scene")
    sites: tuple[str, ...] = Field(min_length=1, description="classes of tiles that make a site")
    background: tuple[str, ...] = Field(min_length=1, description="classes that fields are of")
    empty: str | None = Field(
        default="none", description="the label of scenes without a site; null: none"
    )
    site_tiles: tuple[int, int] = Field(
        default=(3, 6), description="tiles a side of a site, from and to"
    )
    neighbours: int = Field(
        default=24, ge=1, description="tiles of a class in a scene look like these"
    )
    gain: Share = Field(
        default=0.12, description="of a scene's brightness, up and down, in training"
    )
    channel_gain: Share = Field(default=0.04, description="of each band's, in training")
    offset: Share = Field(
        default=0.03, description="added to all, a part of the range, in training"
    )
    training: int = Field(
        default=4000, ge=1, description="scenes in an epoch; each epoch has new ones"
    )
    validation: int = Field(default=400, ge=1, description="scenes, always the same")
    test: int = Field(default=500, ge=1, description="scenes, always the same")

    @model_validator(mode="after")
    def _can_be_composed(self) -> Self:
        check_range("site_tiles", self.site_tiles)
        if self.site_tiles[0] < 1:
            raise ValueError(f"`site_tiles` is below 1: `{list(self.site_tiles)}`")
        both = set(self.sites) & set(self.background)
        if both or self.empty in self.sites:
            raise ValueError(f"a class has two parts to play: `{', '.join(both) or self.empty}`")
        return self

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the labels of scenes."""
        return (*([] if self.empty is None else [self.empty]), *self.sites)


class TilesConfig(Strict):
    """Learning from the labels of tiles, before scenes: what the backbone can tell at each scale.

    Views of all levels are looked at; the map is asked for the classes under it, the features for
    the label of what the view shows.
    """

    views: tuple[int, ...] = Field(
        default=(24, 10, 6), min_length=1, description="views in a step, of each level"
    )
    crowded: float = Field(
        default=0.7, ge=0, le=1, description="the part of the scenes that hold several sites"
    )
    sites: tuple[int, int] = Field(default=(2, 5), description="sites in a crowded scene")
    weights: dict[str, Weight] = Field(
        default={}, description="how often each label is drawn; 1 where it is not named"
    )
    near: float = Field(
        default=0.7, ge=0, le=1, description="the part of closer views that are over a site"
    )
    doubt: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="the part of closer views that are where the view above seems to show a site",
    )
    site_weights: tuple[Weight, ...] = Field(
        default=(6.0, 2.0),
        min_length=1,
        description="how much more sites count, by level; the last repeats",
    )
    dense: Weight = Field(default=1.0, description="weight of the classes under the map")
    window: Weight = Field(default=0.5, description="weight of the label of the view")

    @model_validator(mode="after")
    def _can_be_drawn(self) -> Self:
        check_range("sites", self.sites)
        if min(self.views) < 0 or self.views[0] < 1 or self.sites[0] < 1:
            raise ValueError("`views` and `sites` are counts, of level 1 one at least")
        return self


class DataConfig(Strict):
    """Images and their labels."""

    kind: Literal["manifest", "folder", "mosaic"] = Field(
        default="manifest",
        description="a CSV of images, a folder for each class, or labelled tiles made into scenes",
    )
    path: File = Field(description="the CSV, or the folder, or the folder or zip of tiles")
    validation: Share = Field(
        default=0.2, description="held out of what is in no split, group by group"
    )
    test: Share = Field(default=0.0, description="held out of what is in no split, group by group")
    class_weights: Literal["none", "balanced"] | dict[str, Weight] = Field(
        default="none", description="how much an image counts by its class"
    )
    crop: CropKind = Field(
        default="none",
        description="show the images' boxes only, or with some of what lies around them, as large "
        "boxes need less of that than small ones",
    )
    regions: File | None = Field(
        default=None,
        description="what level 2 looks at instead of cells: predictions of another model, or a "
        "CSV with path, left, top, right, bottom",
    )
    bands: tuple[str, ...] | None = Field(
        default=None, description="by number or name, in the model's order"
    )
    nodata: float | None = Field(default=None, description="this value means no data")
    mpp: float | None = Field(
        default=None, gt=0, description="microns per pixel, whatever the file says"
    )
    statistics: Literal["estimate", "unit"] = Field(
        default="estimate",
        description="normalise by the images' own mean and deviation, or to [-1, 1]",
    )
    statistics_images: int = Field(
        default=64, ge=1, description="images that the estimate looks at"
    )
    licence: str = Field(default="", description="of the images; the model tells it")
    pixel_size: float | None = Field(
        default=None,
        gt=0,
        description="metres of a pixel of the images; the model warns of other ones",
    )
    landscape: LandscapeConfig | None = Field(
        default=None, description="how tiles make scenes (mosaic)"
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if (self.kind == "mosaic") != (self.landscape is not None):
            raise ValueError("`landscape` belongs to `kind: mosaic`, and that needs it")
        if self.crop != "none" and self.kind != "manifest":
            raise ValueError(f"`crop: {self.crop}` wants boxes: only a manifest has them")
        if self.regions is not None and (self.kind == "mosaic" or self.crop != "none"):
            raise ValueError("`regions` are of whole images, not of scenes or crops")
        if self.kind == "mosaic" and self.class_weights != "none":
            raise ValueError("`class_weights` are of images: scenes of all classes come as often")
        if self.validation + self.test >= 1:
            raise ValueError("validation and test leave nothing to train on")
        return self


class AugmentConfig(Strict):
    """What is changed in training images, once per image so that all its windows agree."""

    flip: Literal["none", "horizontal", "both"] = Field(default="none", description="by chance")
    turns: bool = Field(default=False, description="by quarters, by chance")
    crop: Range | None = Field(
        default=None, description="the part of the area that is kept, from and to"
    )
    aspect: Range = Field(default=(0.5, 2.0), description="width by height of what is kept")
    shift: Share = Field(default=0.0, description="along each axis, a part of the side")
    rotate: float = Field(default=0.0, ge=0, le=180, description="degrees, either way")
    colour: bool = Field(default=False, description="the papers' jitter: four orders, or none")
    brightness: Weight = Field(default=32 / 255, description="added, a part of the range")
    contrast: Share = Field(default=0.5, description="up and down by this part")
    saturation: Share = Field(default=0.5, description="up and down by this part; three bands only")
    hue: float = Field(default=0.2, ge=0, le=0.5, description="of the circle; three bands only")
    blur: Weight = Field(default=0.0, description="the largest sigma, in pixels of the view")

    @model_validator(mode="after")
    def _can_be_drawn(self) -> Self:
        check_range("crop", self.crop)
        check_range("aspect", self.aspect)
        if self.crop is not None and not 0 < self.crop[0] <= self.crop[1] <= 1:
            raise ValueError(f"`crop` is not within (0, 1]: `{list(self.crop)}`")
        if self.aspect[0] <= 0:
            raise ValueError(f"`aspect` is not above 0: `{list(self.aspect)}`")
        return self
