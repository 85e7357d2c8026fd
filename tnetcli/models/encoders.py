"""Image encoders: timm and built-in networks, taps, pooling, pretrained weights."""

import difflib
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tnetcli.errors import ModelError
from tnetcli.models.base import init_bagnet, init_efficientnet
from tnetcli.models.checkpoint import open_tensor_file
from tnetcli.models.configs import ModelConfig, Pooling
from tnetcli.models.nets import (
    SLOPE,
    BagNet77,
    Compact,
    MapSize,
    Pair,
    UntraceableError,
    pool_map,
    trace,
)
from tnetcli.text import did_you_mean, first_line


def fetch_weights(net: Any, name: str) -> Path:
    """Return the published weights of a timm network, from the cache or else from the hub.

    timm itself would take a pickle where there is nothing better.
    """
    from huggingface_hub import hf_hub_download

    hub = (getattr(net, "pretrained_cfg", None) or {}).get("hf_hub_id")
    if not hub:
        raise ModelError(
            f"the weights of `{name}` are not published as safetensors",
            hint="give a local .safetensors file: pretrained: FILE",
        )
    try:
        return Path(hf_hub_download(hub, "model.safetensors"))
    except Exception as error:  # the hub's errors have no base of their own
        raise ModelError(
            f"cannot fetch the weights of `{name}`: {first_line(error)}",
            hint="a node without internet needs a local .safetensors file: pretrained: FILE",
        ) from error


def load_weights(net: Any, path: Path) -> None:
    """Load the weights of a backbone from a safetensors file; its head is left out."""
    with open_tensor_file(path, "pt") as file:
        found = dict(file.tensors())
    settings = getattr(net, "pretrained_cfg", None) or {"first_conv": "stem"}
    for head in _names(settings.get("classifier")):
        found = {key: value for key, value in found.items() if not key.startswith(f"{head}.")}
    for first in _names(settings.get("first_conv")):
        _adapt_bands(net, found, f"{first}.weight")
    if misfits := _misfits(net.state_dict(), found):
        raise ModelError(
            f"`{path}` does not fit the backbone: {'; '.join(misfits)}",
            hint="the file must come from the same network",
        )
    net.load_state_dict(found, strict=False)  # files may lack batch norm's counts of batches


def _names(value: Any) -> tuple[str, ...]:
    """Return what timm gives as a name, several, or none."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def _misfits(own: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    needed = {key for key in own if not key.endswith("num_batches_tracked")}
    both = own.keys() & found.keys()
    return [
        f"{len(keys)} tensors {problem}, such as `{min(keys)}`"
        for problem, keys in (
            ("are missing", needed - found.keys()),
            ("are unknown", found.keys() - own.keys()),
            ("have another shape", {key for key in both if own[key].shape != found[key].shape}),
        )
        if keys
    ]


def _adapt_bands(net: nn.Module, found: dict[str, Tensor], key: str) -> None:
    """Repeat or sum the colour filters for another number of bands, as timm does."""
    own, colours = net.state_dict().get(key), found.get(key)
    if own is None or colours is None or colours.shape == own.shape:
        return
    if colours.ndim != 4 or colours.shape[1] != 3:
        return  # not colours; that the shapes differ is reported with all that does not fit
    from timm.models import adapt_input_conv

    found[key] = adapt_input_conv(own.shape[1], colours)


BAGNET = "bagnet77"
COMPACT = "compact"
PIXELS_PER_CELL = 2
SAME = 1e-4  # of the largest feature: the same sums in another order
Tap = int | str | None
# What networks of timm raise for a view or an argument they are not made for.
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


class Backbone(nn.Module):
    """See views once; give the map at the tap and the features of the whole view.

    Where `untapped` gives the features without the tap, both have to agree.
    """

    def __init__(
        self,
        net: nn.Module,
        config: ModelConfig,
        *,
        bands: int,
        untapped: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self.dropout = nn.Dropout(config.feature_dropout)
        self._view = (1, bands, config.view_size, config.view_size)
        seen, features = self._quietly(self.net)
        if untapped is not None and not _are_alike(features, self._quietly(untapped)):
            raise _OtherFeaturesError(
                f"tapped, `{config.backbone}` finds other features than by itself",
                hint="give `tap` the name of one of its modules, or choose another backbone",
            )
        if seen.shape[2] != seen.shape[3]:  # views are square, so some nets put channels last
            raise ModelError(
                f"the tap puts out no map with channels first: {tuple(seen.shape[1:])}",
                hint="give the number of a stage instead",
            )
        if features.ndim != 2:
            raise ModelError(
                f"`{config.backbone}` does not end in one vector: {tuple(features.shape[1:])}",
                hint="choose another backbone",
            )
        self.feature_size = int(features.shape[1])
        self._map_size = MapSize(*seen.shape[1:])

    def forward(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """Return the map (regions, channels, height, width) and features (regions, features)."""
        seen, features = self.net(views)
        return seen, self.dropout(features)

    def map_size(self) -> MapSize:
        """Return the shape of the map."""
        return self._map_size

    def fields(self) -> Pair:
        """Return what a pixel of the map sees, along rows and columns."""
        try:
            fields: Pair = self._quietly(lambda view: trace(lambda x: self.net(x)[0], view)[1])
            _check_steps(fields, self._map_size, self._view[2])
        except UntraceableError as error:
            raise ModelError(
                f"cannot tell what a pixel of the map sees: {first_line(error)}",
                hint="use alignment `pool`",
            ) from error
        return fields

    def _quietly(self, run: Callable[[Tensor], Any]) -> Any:
        """Run on one view, leaving no trace in the running statistics."""
        first = next(self.net.parameters())
        training = self.net.training
        self.net.eval()
        try:
            with torch.no_grad():
                # A ramp: of a blank view many networks make nothing but zeros.
                ramp = torch.linspace(-1, 1, math.prod(self._view), device=first.device)
                return run(ramp.to(first.dtype).reshape(self._view))
        except UntraceableError:
            raise
        except FAILURES as error:
            raise _does_not_fit(self._view[2], error) from error
        finally:
            self.net.train(training)


class _OtherFeaturesError(ModelError):
    """A tap leaves out a part of the network."""


def _are_alike(features: Tensor, others: Tensor) -> bool:
    """Compare shapes, and values where there are any."""
    if features.shape != others.shape:
        return False
    if features.is_meta:
        return True
    tolerance = SAME * float(others.abs().max())
    return torch.allclose(features, others, rtol=0, atol=tolerance, equal_nan=True)


def _does_not_fit(view_size: int, error: Exception) -> ModelError:
    return ModelError(
        f"the backbone cannot see views of {view_size} pixels: {first_line(error)}",
        hint="choose another view_size or backbone",
    )


def _check_steps(fields: Pair, size: MapSize, view_size: int) -> None:
    """Refuse fields that were lost on the way, as where pixels are merged by reshaping."""
    for axis, count in zip(fields, (size.height, size.width), strict=True):
        expected = view_size / axis.jump
        if abs(count - expected) > 1 and not 0.75 < count / expected < 1.33:
            raise UntraceableError(f"{count} pixels cannot be {axis.jump} apart in {view_size}")


def build_backbone(
    config: ModelConfig,
    *,
    bands: int,
    tap: Tap = None,
    cells: int = 1,
    pretrained: bool | Path = False,
) -> Backbone:
    """Build the named network; `cells` a side have to find their place on the map."""
    if config.backbone in (BAGNET, COMPACT):
        return Backbone(_our_own(config, bands, tap, pretrained), config, bands=bands)
    net = create_timm(config, bands=bands, pretrained=pretrained)
    if isinstance(tap, str):
        return Backbone(_TapByName(net, tap, config.pooling), config, bands=bands)
    stages = getattr(net, "feature_info", None)
    if not stages or not all(stage["reduction"] for stage in stages):  # 0 is no map
        raise ModelError(
            f"`{config.backbone}` does not tell its stages",
            hint="give `tap` the name of one of its modules, or choose another backbone",
        )
    if tap is None:
        tap = _deepest_fine_enough(net, config.view_size, cells)
    if not 0 <= tap < len(stages):
        raise ModelError(
            f"`{config.backbone}` has no stage `{tap}`", hint=f"it has 0 to {len(stages) - 1}"
        )
    if hasattr(net, "forward_intermediates"):
        try:
            return Backbone(
                _TapByStage(net, tap, config.pooling),
                config,
                bands=bands,
                untapped=lambda view: _pool(net, net.forward_features(view), config.pooling),
            )
        except _OtherFeaturesError:
            pass  # such as `mobilenetv5`, which joins several stages at the end
    named = _TapByName(net, stages[tap]["module"], config.pooling)
    return Backbone(named, config, bands=bands)


def _pool(net: Any, final: Tensor, pooling: Pooling) -> Tensor:
    """Return what a classifier would read; the network itself, without one, may return nothing."""
    if pooling == "mean":  # the network's own head, which may do more than that
        features: Tensor = net.forward_head(final, pre_logits=True)
        return features
    if final.ndim != 4:
        raise ModelError("the backbone does not end in a map", hint="use pooling `mean`")
    return pool_map(final, pooling)


def _our_own(config: ModelConfig, bands: int, tap: Tap, pretrained: bool | Path) -> nn.Module:
    name = config.backbone
    if tap is not None or config.drop_path:
        raise ModelError(
            f"`{name}` has one map and no stochastic depth", hint="leave out tap and drop_path"
        )
    if name == COMPACT:
        net: nn.Module = Compact(bands, config.pooling)
    elif config.pooling == "mean":
        net = BagNet77(bands)
    else:
        raise ModelError(f"`{name}` takes the mean of its map", hint="use pooling `mean`")
    start = init_bagnet if name == BAGNET else init_efficientnet
    start(net)
    if pretrained is True:
        raise ModelError(
            f"there are no published weights of `{name}` on the hub",
            hint="give a local .safetensors file",
        )
    if pretrained:
        load_weights(net, Path(pretrained))
    return net


class _TapByStage(nn.Module):
    """Read the map after one of timm's stages."""

    def __init__(self, net: Any, stage: int, pooling: Pooling) -> None:
        super().__init__()
        self.net, self.stage, self.pooling = net, stage, pooling

    def forward(self, views: Tensor) -> tuple[Tensor, Tensor]:
        final, (seen,) = self.net.forward_intermediates(views, indices=[self.stage])
        return seen, _pool(self.net, final, self.pooling)


class _TapByName(nn.Module):
    """Read the map that a named module puts out: the papers tap inside a stage."""

    def __init__(self, net: Any, name: str, pooling: Pooling) -> None:
        super().__init__()
        self.net, self.pooling = net, pooling
        self._seen: dict[int, Any] = {}  # by thread, as several may share a model
        named = dict(net.named_modules())
        if name not in named:
            raise ModelError(
                f"the backbone has no module `{name}`",
                hint=did_you_mean(name, named, "give the number of a stage instead"),
            )
        named[name].register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._seen[threading.get_ident()] = output

    def forward(self, views: Tensor) -> tuple[Tensor, Tensor]:
        final = self.net.forward_features(views)
        seen = self._seen.pop(threading.get_ident(), None)  # nothing outlives the call
        if not isinstance(seen, Tensor) or seen.ndim != 4:
            raise ModelError(
                "the tap does not put out a map", hint="give the number of a stage instead"
            )
        return seen, _pool(self.net, final, self.pooling)


def create_timm(config: ModelConfig, *, bands: int, pretrained: bool | Path = False) -> Any:
    """Create a timm network without its classifier."""
    import timm  # takes seconds: it loads torchvision

    name = config.backbone
    _check_name(name, pretrained is True)
    settings: dict[str, Any] = {"drop_path_rate": config.drop_path} if config.drop_path else {}
    try:
        net: Any = timm.create_model(name, num_classes=0, in_chans=bands, **settings)
    except FAILURES as error:
        raise ModelError(
            f"`{name}` cannot be built that way: {first_line(error)}",
            hint="leave out drop_path" if settings else f"it may not take {bands} bands",
        ) from error
    if "efficientnet" in name:
        _drop_paths_as_published(net, config.drop_path)
        if not pretrained:
            init_efficientnet(net)
    if name.startswith("tf_efficientnet"):
        _average_as_published(net)
    if pretrained:
        load_weights(net, fetch_weights(net, name) if pretrained is True else Path(pretrained))
    if hasattr(net, "set_input_size"):  # transformers are made, and their weights, for one size
        try:
            net.set_input_size(img_size=(config.view_size, config.view_size))
        except FAILURES as error:
            raise _does_not_fit(config.view_size, error) from error
    return net


def _check_name(name: str, needs_weights: bool) -> None:
    """Refuse what timm does not know: a network, or a set of weights `network.tag`."""
    import timm

    known = [*timm.list_models(), BAGNET, COMPACT]
    network, _, tag = name.partition(".")
    if network not in known:
        raise ModelError(
            f"unknown backbone: `{name}`",
            hint=did_you_mean(network, known, "see `tnet models --backbones '*'`"),
        )
    tags = [each.partition(".")[2] for each in timm.list_pretrained(f"{network}.*")]
    if tag and tag not in tags:
        close = difflib.get_close_matches(tag, tags, n=1)
        hint = f"did you mean `{network}.{close[0]}`?" if close else f"use `{network}`"
        raise ModelError(f"`{network}` has no weights `{tag}`", hint=hint)
    if needs_weights and not tags:
        raise ModelError(
            f"there are no published weights of `{name}`",
            hint="train from the start, or give a local .safetensors file: pretrained: FILE",
        )


def _average_as_published(net: nn.Module) -> None:
    """Let running statistics forget as slowly as those of the papers: SPEC 1.5."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.01


def _drop_paths_as_published(net: Any, rate: float) -> None:
    """Let the rate grow from 1/n of it at the first block to all of it at the last: SPEC 1.5."""
    from timm.layers.drop import DropPath

    blocks = [block for stage in net.blocks for block in stage]
    for number, block in enumerate(blocks, start=1):
        if hasattr(block, "drop_path"):
            block.drop_path = DropPath(rate * number / len(blocks)) if rate else nn.Identity()


def _deepest_fine_enough(net: Any, view_size: int, cells: int) -> int:
    reductions = [stage["reduction"] for stage in net.feature_info]
    fine = [
        index
        for index, reduction in enumerate(reductions)
        if view_size // reduction >= PIXELS_PER_CELL * cells
    ]
    return max(fine, default=0)


class Stream(nn.Module):
    """See views as maps, and maps as vectors: by their mean, whatever head the network came with.

    So the evidence for a class in a part of the view is linear in the map under it. Layers that
    only a head would use, such as the dense ones of VGG, are left out.
    """

    def __init__(self, config: ModelConfig, *, bands: int, pretrained: bool | Path = False) -> None:
        super().__init__()
        name = config.backbone
        if name in (BAGNET, COMPACT):
            self.net: Any = build_backbone(config, bands=bands, pretrained=pretrained).net
        else:
            self.net = create_timm(config, bands=bands, pretrained=pretrained)
        self.pooling = config.pooling
        self.dropout = nn.Dropout(config.feature_dropout)
        self.map_size = self._without_head(name, bands, config.view_size)

    @property
    def feature_size(self) -> int:
        """Return the length of a vector."""
        return self.map_size.channels * (1 if self.pooling == "mean" else 2)

    def forward(self, views: Tensor) -> Tensor:
        """(regions, bands, height, width) -> the last map (regions, channels, height, width)."""
        seen: Tensor
        if isinstance(self.net, Compact):
            seen = self.net.to_features(self.net.to_map(views))
        elif isinstance(self.net, BagNet77):
            x = functional.leaky_relu(self.net.stem(views), SLOPE)
            x = self.net.head(self.net.to_features(self.net.to_map(x)))
            seen = functional.leaky_relu(x, SLOPE)
        else:
            seen = self.net.forward_features(views)
        return seen

    def pool(self, seen: Tensor) -> Tensor:
        """(regions, channels, height, width) -> (regions, features)."""
        vectors: Tensor = self.dropout(pool_map(seen, self.pooling))
        return vectors

    def _without_head(self, name: str, bands: int, view_size: int) -> MapSize:
        """Look once, blank out the layers that had no part in it, and return the map's shape."""
        used: set[nn.Module] = set()
        hooks = [
            part.register_forward_hook(lambda module, inputs, output: used.add(module))
            for part in self.net.modules()
        ]
        first, was_training = next(self.net.parameters()), self.net.training
        self.net.eval()  # one look leaves no trace in the running statistics
        try:
            with torch.no_grad():
                shape = (1, bands, view_size, view_size)
                seen = self(torch.zeros(shape, device=first.device, dtype=first.dtype))
        except FAILURES as error:
            raise ModelError(
                f"`{name}` cannot see views of {view_size} pixels: {first_line(error)}",
                hint="choose another view_size, local_size or backbone",
            ) from error
        finally:
            self.net.train(was_training)
            for hook in hooks:
                hook.remove()
        # Views are square, so that maps are too; some networks put channels last, or have none.
        if not isinstance(seen, Tensor) or seen.ndim != 4 or seen.shape[2] != seen.shape[3]:
            raise ModelError(
                f"`{name}` does not end in a map with channels first",
                hint="choose a convolutional network, such as `vgg19`, `resnet34` or `compact`",
            )
        for path, part in list(self.net.named_modules()):
            if path and part not in used and list(part.parameters(recurse=False)):
                parent, _, attribute = path.rpartition(".")
                setattr(self.net.get_submodule(parent), attribute, nn.Identity())
        return MapSize(*seen.shape[1:])
