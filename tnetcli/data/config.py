"""Recipe sections for images, labels, composed scenes and augmentation."""

from typing import Literal, Self

from pydantic import Field, model_validator

from tnetcli.config import File, Fraction, Range, Strict, Weight, check_range
from tnetcli.readers.wrappers import CropKind


class LandscapeConfig(Strict):
    """Scenes composed of labelled tiles: fields of background classes, with or without a site."""

    size: int = Field(default=2048, ge=64, le=131_072, description="side of a scene in pixels")
    sites: tuple[str, ...] = Field(min_length=1, description="tile classes that form a site")
    background: tuple[str, ...] = Field(min_length=1, description="tile classes of the fields")
    empty: str | None = Field(
        default="none", description="label of scenes without a site; null for no such scenes"
    )
    site_tiles: tuple[int, int] = Field(
        default=(3, 6), description="minimum and maximum side of a site in tiles"
    )
    neighbours: int = Field(
        default=24,
        ge=1,
        description="number of similar tiles that a class is drawn from within one scene",
    )
    gain: Fraction = Field(
        default=0.12, description="maximum relative change of a scene's brightness in training"
    )
    channel_gain: Fraction = Field(
        default=0.04, description="maximum relative change of each band in training"
    )
    offset: Fraction = Field(
        default=0.03, description="maximum offset in training, as a fraction of the value range"
    )
    training: int = Field(
        default=4000, ge=1, description="scenes per epoch; every epoch composes new ones"
    )
    validation: int = Field(default=400, ge=1, description="number of validation scenes")
    test: int = Field(default=500, ge=1, description="number of test scenes")

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_range("site_tiles", self.site_tiles)
        if self.site_tiles[0] < 1:
            raise ValueError(f"`site_tiles` is below 1: `{list(self.site_tiles)}`")
        both = set(self.sites) & set(self.background)
        if both or self.empty in self.sites:
            raise ValueError(f"a class is used twice: `{', '.join(both) or self.empty}`")
        return self

    @property
    def classes(self) -> tuple[str, ...]:
        """Return the labels of scenes."""
        return (*([] if self.empty is None else [self.empty]), *self.sites)


class TilesConfig(Strict):
    """Tile pre-training: classify the tiles under the feature map, and whole views."""

    views: tuple[int, ...] = Field(
        default=(24, 10, 6), min_length=1, description="views per step, one number per level"
    )
    crowded: float = Field(
        default=0.7, ge=0, le=1, description="fraction of scenes with several sites"
    )
    sites: tuple[int, int] = Field(
        default=(2, 5), description="minimum and maximum number of sites in a crowded scene"
    )
    weights: dict[str, Weight] = Field(
        default={}, description="relative frequency of each label; 1 for labels not listed"
    )
    near: float = Field(
        default=0.7, ge=0, le=1, description="fraction of the finer views that show a site"
    )
    doubt: float = Field(
        default=0.0,
        ge=0,
        le=1,
        description="fraction of the finer views drawn where the coarser view predicts a site",
    )
    site_weights: tuple[Weight, ...] = Field(
        default=(6.0, 2.0),
        min_length=1,
        description="additional loss weight of site pixels per level; the last one repeats",
    )
    dense: Weight = Field(default=1.0, description="weight of the loss over the feature map")
    window: Weight = Field(default=0.5, description="weight of the loss of the view's label")

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_range("sites", self.sites)
        if min(self.views) < 0 or self.views[0] < 1 or self.sites[0] < 1:
            raise ValueError("`views` and `sites` are counts; level 1 needs at least one view")
        return self


class DataConfig(Strict):
    """Images and their labels."""

    kind: Literal["manifest", "folder", "mosaic"] = Field(
        default="manifest",
        description="a CSV of images, one folder per class, or scenes composed of labelled tiles",
    )
    path: File = Field(description="the CSV, the folder, or the folder or zip of tiles")
    validation: Fraction = Field(
        default=0.2,
        description="fraction of the groups without a split that becomes the validation split",
    )
    test: Fraction = Field(
        default=0.0, description="fraction of the groups without a split that becomes the test"
    )
    class_weights: Literal["none", "balanced"] | dict[str, Weight] = Field(
        default="none", description="loss weight of an image by its class"
    )
    crop: CropKind = Field(
        default="none", description="crop images to their box, or to the box with context around it"
    )
    regions: File | None = Field(
        default=None,
        description="regions of level 2 in place of chosen cells: predictions of another model, or "
        "a CSV with path, left, top, right, bottom",
    )
    bands: tuple[str, ...] | None = Field(
        default=None, description="bands by number or name, in the model's order"
    )
    nodata: float | None = Field(default=None, description="value of pixels without data")
    mpp: float | None = Field(
        default=None, gt=0, description="microns per pixel; overrides the file"
    )
    statistics: Literal["estimate", "unit"] = Field(
        default="estimate",
        description="normalise by the mean and deviation of the images, or map integers to [-1, 1]",
    )
    statistics_images: int = Field(
        default=64, ge=1, description="number of images used for the estimate"
    )
    licence: str = Field(default="", description="licence of the images; stored in the checkpoint")
    pixel_size: float | None = Field(
        default=None,
        gt=0,
        description="metres per pixel of the images; prediction warns about other resolutions",
    )
    landscape: LandscapeConfig | None = Field(
        default=None, description="how tiles are composed into scenes (`kind: mosaic`)"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.kind == "mosaic") != (self.landscape is not None):
            raise ValueError("`kind: mosaic` and `landscape` require each other")
        if self.crop != "none" and self.kind != "manifest":
            raise ValueError(f"`crop: {self.crop}` needs boxes, which only a manifest has")
        if self.regions is not None and (self.kind == "mosaic" or self.crop != "none"):
            raise ValueError("`regions` apply to whole images, not to scenes or crops")
        if self.kind == "mosaic" and self.class_weights != "none":
            raise ValueError("`class_weights` do not apply to composed scenes")
        if self.validation + self.test >= 1:
            raise ValueError("`validation` and `test` leave no images to train on")
        return self


class AugmentConfig(Strict):
    """Random changes of a training image; all its views share them."""

    flip: Literal["none", "horizontal", "both"] = Field(default="none", description="random flips")
    turns: bool = Field(default=False, description="random quarter turns")
    crop: Range | None = Field(
        default=None, description="minimum and maximum fraction of the area that a crop keeps"
    )
    aspect: Range = Field(
        default=(0.5, 2.0), description="minimum and maximum width / height of a crop"
    )
    shift: Fraction = Field(
        default=0.0, description="maximum shift along each axis, as a fraction of the side"
    )
    rotate: float = Field(
        default=0.0, ge=0, le=180, description="maximum rotation in degrees, either way"
    )
    colour: bool = Field(
        default=False, description="colour jitter in one of four random orders, or none"
    )
    blur: Weight = Field(default=0.0, description="maximum Gaussian sigma in pixels of the view")

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_range("crop", self.crop)
        check_range("aspect", self.aspect)
        if self.crop is not None and not 0 < self.crop[0] <= self.crop[1] <= 1:
            raise ValueError(f"`crop` is not within (0, 1]: `{list(self.crop)}`")
        if self.aspect[0] <= 0:
            raise ValueError(f"`aspect` is not above 0: `{list(self.aspect)}`")
        return self
