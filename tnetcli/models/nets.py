"""Built-in networks, pooling, and receptive fields."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from tnetcli.geometry import Grid
from tnetcli.models.configs import Pooling

COUNTS = 0.5  # a map pixel belongs to a cell if at least this part of it does


class MapSize(NamedTuple):
    """The shape of the map that the location module reads."""

    channels: int
    height: int
    width: int


def pool_map(seen: Tensor, pooling: Pooling) -> Tensor:
    """(regions, channels, height, width) -> (regions, channels), or twice as many with the maxima.

    The maximum keeps what is small and rare: the mean of a large map forgets it.
    """
    mean = seen.mean(dim=(2, 3))
    return mean if pooling == "mean" else torch.cat([mean, seen.amax(dim=(2, 3))], dim=1)


class Pool(nn.Module):
    """Take the mean of the map under each cell, by the area they share, and maybe the maximum."""

    down: Tensor
    across: Tensor

    def __init__(self, size: MapSize, grid: Grid, pooling: Pooling = "mean") -> None:
        super().__init__()
        rows, columns = grid.row_weights(size.height), grid.column_weights(size.width)
        down = torch.tensor(rows, dtype=torch.float32)
        across = torch.tensor(columns, dtype=torch.float32)
        self.register_buffer("down", down, persistent=False)  # (rows, height)
        self.register_buffer("across", across.T.contiguous(), persistent=False)  # (width, columns)
        self.pooling = pooling
        self.channels = size.channels if pooling == "mean" else 2 * size.channels
        self._row_spans = [_span(each.tolist()) for each in rows]
        self._column_spans = [_span(each.tolist()) for each in columns]

    def forward(self, seen: Tensor) -> Tensor:
        """(regions, channels, height, width) -> (regions, channels, rows, columns)."""
        mean = self.down.to(seen) @ seen @ self.across.to(seen)
        if self.pooling == "mean":
            return mean
        most = torch.stack([seen[:, :, span].amax(dim=2) for span in self._row_spans], dim=2)
        most = torch.stack([most[..., span].amax(dim=3) for span in self._column_spans], dim=3)
        return torch.cat([mean, most], dim=1)


def _span(weights: list[float]) -> slice:
    """Return the run of map pixels that a cell covers by half or more, one of them at least."""
    least = COUNTS * max(weights)
    inside = [index for index, weight in enumerate(weights) if weight >= least]
    return slice(inside[0], inside[-1] + 1)


Pair = tuple["Axis", "Axis"]


@dataclass(frozen=True, slots=True)
class Axis:
    """Along rows or columns: how much one map pixel sees, the step to the next, the first centre.

    All in input pixels, whose centres are whole numbers.
    """

    size: int = 1
    jump: int = 1
    first: float = 0.0

    def after(self, kernel: int, stride: int, padding: int, dilation: int = 1) -> Self:
        """Return what a pixel sees through one more layer; `padding` is what stands before."""
        reach = (kernel - 1) * dilation
        return replace(
            self,
            size=self.size + reach * self.jump,
            jump=self.jump * stride,
            first=self.first + (reach / 2 - padding) * self.jump,
        )

    def centers(self, count: int) -> list[float]:
        """Return the centres of `count` map pixels."""
        return [self.first + index * self.jump for index in range(count)]

    def nearest(self, positions: Sequence[float], count: int) -> list[int]:
        """Return which of `count` map pixels is centred closest to each position."""
        centers = self.centers(count)
        return [
            min(range(count), key=lambda index: abs(centers[index] - position))
            for position in positions
        ]


class UntraceableError(ValueError):
    """A network moves pixels in a way that is not followed."""


def trace(run: Callable[[Tensor], Tensor], view: Tensor) -> tuple[Tensor, Pair]:
    """Run a network on `view` (1, bands, height, width); return its map and what a pixel sees.

    Along a shortcut the larger field counts. Gates and attention that see the whole map are
    passed over, as the papers do.
    """
    tracked = view.as_subclass(_Tracked)
    tracked.fields = (Axis(), Axis())
    seen = run(tracked)
    fields = getattr(seen, "fields", None)
    if fields is None:
        raise UntraceableError("the map does not stem from the view")
    return seen.as_subclass(Tensor), fields


class _Tracked(torch.Tensor):
    """A tensor that remembers the fields of its pixels through every operation."""

    fields: Pair | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        given = kwargs or {}
        sources = list(_tracked([args, *given.values()]))
        for part in _tracked([result]):  # several where a tensor is split
            part.fields = _pass(sources, part, getattr(func, "__name__", ""), args, given)
        return result


def _tracked(values: Any) -> Iterator[_Tracked]:
    for each in values:
        if isinstance(each, _Tracked):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tracked(each)


def _pass(
    sources: list[_Tracked], result: _Tracked, name: str, args: Any, kwargs: Any
) -> Pair | None:
    """Return the fields after an operation."""
    pairs = [fields for each in sources if (fields := getattr(each, "fields", None)) is not None]
    if not pairs:
        return None
    rows, columns = (max(axes, key=lambda axis: axis.size) for axes in zip(*pairs, strict=True))
    if name == "conv2d":
        given = dict(zip(("input", "weight", "bias", "stride", "padding", "dilation"), args))  # noqa: B905
        given |= kwargs
        kernel = given["weight"].shape[2:]
        stride, padding = _two(given.get("stride", 1)), _two(given.get("padding", 0))
        dilation = _two(given.get("dilation", 1))
        rows = rows.after(kernel[0], stride[0], padding[0], dilation[0])
        columns = columns.after(kernel[1], stride[1], padding[1], dilation[1])
    elif name in ("max_pool2d", "avg_pool2d", "_max_pool2d"):
        given = dict(zip(("input", "kernel_size", "stride", "padding"), args)) | kwargs  # noqa: B905
        kernel = _two(given["kernel_size"])
        stride, padding = _two(given.get("stride") or kernel), _two(given.get("padding", 0))
        rows = rows.after(kernel[0], stride[0], padding[0])
        columns = columns.after(kernel[1], stride[1], padding[1])
    elif name == "pad":
        sides = args[1] if len(args) > 1 else kwargs["pad"]
        if len(sides) == 4 and result.ndim == 4:
            columns = columns.after(1, 1, sides[0])
            rows = rows.after(1, 1, sides[2])
    elif _is_point(result) and any(each.ndim == 4 and not _is_point(each) for each in sources):
        return None  # a mean over the map: it sees everything and is nowhere
    return rows, columns


def _is_point(each: Tensor) -> bool:
    return each.ndim == 4 and each.shape[2:] == (1, 1)


def _two(value: Any) -> tuple[int, int]:
    if isinstance(value, str):
        raise UntraceableError(f"cannot follow a padding given as a word: `{value}`")
    if isinstance(value, int):
        return value, value
    first, second = (value[0], value[-1])
    return int(first), int(second)


Padding = Literal["same", "valid"]
SLOPE = 0.2  # of every leaky ReLU, TensorFlow's default


@dataclass(frozen=True, slots=True)
class Stage:
    """`repeats` blocks alike."""

    kernel: int
    channels: int
    stride: int = 1
    padding: Padding = "same"
    repeats: int = 1


# Block 13, the last of the map that the location module reads, ends the first group.
TO_MAP = (
    Stage(3, 256, stride=2),
    Stage(3, 256),
    Stage(1, 256),
    Stage(3, 512, stride=2),
    Stage(3, 512),
    Stage(1, 512, repeats=2),
    Stage(3, 1024, stride=2, padding="valid"),
    Stage(3, 1024),
    Stage(1, 1024, repeats=4),
)
TO_FEATURES = (
    Stage(3, 2048, padding="valid"),
    Stage(3, 2048),
    Stage(1, 2048),
)
BAGNET_STEM, FEATURES = 64, 512


class SameConv2d(nn.Conv2d):
    """Pad as TensorFlow does: the odd pixel goes below and to the right.

    torch pads both sides alike, which would shift every receptive field.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of ceil(side / stride)."""
        kernel, stride = self.kernel_size[0], self.stride[0]
        sides = []
        for length in (x.shape[-1], x.shape[-2]):  # functional.pad takes the last axis first
            total = max((-(-length // stride) - 1) * stride + kernel - length, 0)
            sides += [total // 2, total - total // 2]
        return functional.conv2d(
            functional.pad(x, sides), self.weight, self.bias, self.stride, 0, 1, self.groups
        )


class Block(nn.Module):
    """A bottleneck with a shortcut; the last activation comes after the sum."""

    def __init__(self, inputs: int, stage: Stage, stride: int) -> None:
        super().__init__()
        inner = stage.channels // 4
        convolution = SameConv2d if stage.padding == "same" else nn.Conv2d
        self.cut = stage.kernel - 1 if stage.padding == "valid" else 0
        self.reduce = nn.Conv2d(inputs, inner, 1)
        self.spread = convolution(inner, inner, stage.kernel, stride)
        self.expand = nn.Conv2d(inner, stage.channels, 1)
        changes = stride > 1 or inputs != stage.channels
        self.shortcut = nn.Conv2d(inputs, stage.channels, 1, stride) if changes else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of the stage's channels."""
        inside = functional.leaky_relu(self.reduce(x), SLOPE)
        inside = functional.leaky_relu(self.spread(inside), SLOPE)
        # What an unpadded kernel loses at the edges, the shortcut loses too.
        before, after = self.cut // 2, self.cut - self.cut // 2
        kept = x[..., before : x.shape[-2] - after, before : x.shape[-1] - after]
        return functional.leaky_relu(self.expand(inside) + self.shortcut(kept), SLOPE)


class BagNet77(nn.Module):
    """No pixel of the map after block 16 sees more than 77 pixels a side."""

    feature_size = FEATURES

    def __init__(self, bands: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(bands, BAGNET_STEM, 3)
        self.to_map, channels = _blocks(BAGNET_STEM, TO_MAP)
        self.to_features, channels = _blocks(channels, TO_FEATURES)
        self.head = nn.Conv2d(channels, FEATURES, 1)

    def forward(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """Return the map for the location module and the features (regions, 512)."""
        x = functional.leaky_relu(self.stem(views), SLOPE)
        seen = self.to_map(x)  # (regions, 1024, 9, 9) of views of 77 pixels
        x = functional.leaky_relu(self.head(self.to_features(seen)), SLOPE)  # (regions, 512, 7, 7)
        return seen, x.mean(dim=(2, 3))


def _blocks(channels: int, stages: tuple[Stage, ...]) -> tuple[nn.Sequential, int]:
    blocks = []
    for stage in stages:
        for repeat in range(stage.repeats):
            blocks.append(Block(channels, stage, stage.stride if repeat == 0 else 1))
            channels = stage.channels
    return nn.Sequential(*blocks), channels


MOMENTUM = 0.03  # of the running statistics: each level moves them by other views
FIRST_SHARE = 0.2  # of what a residual adds before it has learned anything
COMPACT_STEM, MIDDLE, LAST = (
    32,
    64,
    96,
)  # channels at a quarter, an eighth and a sixteenth of the view


class Convolution(nn.Sequential):
    """A convolution and its batch norm."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False),
            nn.BatchNorm2d(outputs, momentum=MOMENTUM),
        )


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = Convolution(channels, channels)
        self.second = Convolution(channels, channels)
        norm = self.second[1]
        assert isinstance(norm, nn.BatchNorm2d)
        nn.init.constant_(norm.weight, FIRST_SHARE)

    def forward(self, x: Tensor) -> Tensor:
        """Return a map of the same shape."""
        return functional.relu(x + self.second(functional.relu(self.first(x))))


class Compact(nn.Module):
    """Small things count: the map has a pixel for every eight of the view.

    The stem goes down by four at once, which takes less time than twice by two.
    """

    def __init__(self, bands: int = 3, pooling: Pooling = "mean") -> None:
        super().__init__()
        self.pooling = pooling
        self.to_map = nn.Sequential(
            Convolution(bands, COMPACT_STEM, kernel=7, stride=4),
            nn.ReLU(),
            Residual(COMPACT_STEM),
            Convolution(COMPACT_STEM, MIDDLE, stride=2),
            nn.ReLU(),
            Residual(MIDDLE),
            Residual(MIDDLE),
        )
        self.to_features = nn.Sequential(
            Convolution(MIDDLE, LAST, stride=2), nn.ReLU(), Residual(LAST)
        )

    def forward(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """Return the map for the location module, and the features of each view."""
        seen = self.to_map(views)  # (regions, 64, 16, 16) of views of 128 pixels
        return seen, pool_map(self.to_features(seen), self.pooling)
