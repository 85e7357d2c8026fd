"""Receptive fields of a network's feature map, traced through its layers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Axis:
    """Receptive fields along one axis: size, step to the next, and centre of the first.

    In input pixels, whose centres are whole numbers.
    """

    size: int = 1
    jump: int = 1
    first: float = 0.0

    def after(self, kernel: int, stride: int, padding: int, dilation: int = 1) -> Self:
        """Return the fields after one more layer; `padding` is the one before the first pixel."""
        reach = (kernel - 1) * dilation
        return replace(
            self,
            size=self.size + reach * self.jump,
            jump=self.jump * stride,
            first=self.first + (reach / 2 - padding) * self.jump,
        )


Fields = tuple[Axis, Axis]  # along rows and columns


class UntraceableError(ValueError):
    """A network moves pixels in a way that is not followed."""


def trace(run: Callable[[Tensor], Tensor], view: Tensor) -> tuple[Tensor, Fields]:
    """Run a network on `view` (1, bands, height, width); return its map and receptive fields.

    Of a sum, the larger field counts. Gates and attention over the whole map are ignored, as in
    the papers.
    """
    tracked = view.as_subclass(_Tracked)
    tracked.fields = (Axis(), Axis())
    maps = run(tracked)
    fields = getattr(maps, "fields", None)
    if fields is None:
        raise UntraceableError("the map does not derive from the view")
    return maps.as_subclass(Tensor), fields


class _Tracked(torch.Tensor):
    """A tensor that carries the receptive fields of its pixels through every operation."""

    fields: Fields | None

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        result = super().__torch_function__(func, types, args, given)  # type: ignore[no-untyped-call]
        sources = list(_tracked([args, *given.values()]))
        for part in _tracked([result]):  # several where a tensor is split
            part.fields = _fields_after(sources, part, getattr(func, "__name__", ""), args, given)
        return result


def _tracked(values: Any) -> Iterator[_Tracked]:
    for each in values:
        if isinstance(each, _Tracked):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tracked(each)


def _fields_after(
    sources: list[_Tracked], result: _Tracked, name: str, args: Any, kwargs: Any
) -> Fields | None:
    pairs = [fields for each in sources if (fields := getattr(each, "fields", None)) is not None]
    if not pairs:
        return None
    rows, columns = (max(axes, key=lambda axis: axis.size) for axes in zip(*pairs, strict=True))
    if name == "conv2d":
        names = ("input", "weight", "bias", "stride", "padding", "dilation")
        given = dict(zip(names, args)) | kwargs  # noqa: B905
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
        return None  # a mean over the map has no place
    return rows, columns


def _is_point(each: Tensor) -> bool:
    return each.ndim == 4 and each.shape[2:] == (1, 1)


def _two(value: Any) -> tuple[int, int]:
    if isinstance(value, str):
        raise UntraceableError(f"unsupported padding: `{value}`")
    if isinstance(value, int):
        return value, value
    return int(value[0]), int(value[-1])
