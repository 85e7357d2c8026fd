"""Image encoders: timm and built-in networks, taps, pooling, pretrained weights."""

import difflib
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tnetcli.errors import ModelError
from tnetcli.models.base import init_efficientnet, init_weights
from tnetcli.models.checkpoint import open_tensor_file
from tnetcli.models.configs import ModelConfig, Pooling
from tnetcli.models.nets import BagNet77, Compact, MapSize, pool_map
from tnetcli.text import did_you_mean, first_line

BAGNET = "bagnet77"
COMPACT = "compact"
PIXELS_PER_CELL = 2
TOLERANCE = 1e-4  # of the largest feature: the same sums in another order
Tap = int | str | None
# Errors that timm networks raise for an unsupported view or argument.
FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def build_backbone(
    config: ModelConfig,
    *,
    bands: int,
    tap: Tap = None,
    cells: int = 1,
    pretrained: bool | Path = False,
) -> "Backbone":
    """Build a network with a tap for the location module.

    The default tap is the deepest map with two pixels per cell, for `cells` per side.
    """
    name = config.backbone
    if name in (BAGNET, COMPACT):
        return Backbone(_build_own(config, bands, tap, pretrained), config, bands=bands)
    net = build_timm(config, bands=bands, pretrained=pretrained)
    if isinstance(tap, str):
        return Backbone(_TapByName(net, tap, config.pooling), config, bands=bands)
    stages = getattr(net, "feature_info", None)
    if not stages or not all(stage["reduction"] for stage in stages):
        raise ModelError(
            f"`{name}` does not list its stages",
            hint="set `tap` to the name of one of its modules, or choose another backbone",
        )
    if tap is None:
        fine = [
            index
            for index, stage in enumerate(stages)
            if config.view_size // stage["reduction"] >= PIXELS_PER_CELL * cells
        ]
        tap = max(fine, default=0)
    if not 0 <= tap < len(stages):
        raise ModelError(f"`{name}` has no stage `{tap}`", hint=f"use 0 to {len(stages) - 1}")
    if hasattr(net, "forward_intermediates"):
        tapped = Backbone(_TapByStage(net, tap, config.pooling), config, bands=bands)
        # Some networks, such as `mobilenetv5`, join several stages only without a tap.
        if tapped.agrees_with(lambda view: _pool(net, net.forward_features(view), config.pooling)):
            return tapped
    named = _TapByName(net, stages[tap]["module"], config.pooling)
    return Backbone(named, config, bands=bands)


class Backbone(nn.Module):
    """A network that returns the feature map at its tap and the pooled features of a view."""

    def __init__(self, net: nn.Module, config: ModelConfig, *, bands: int) -> None:
        super().__init__()
        self.net = net
        self.dropout = nn.Dropout(config.feature_dropout)
        self.view_size, self._bands = config.view_size, bands
        maps, features = self.probe(self.net)
        # Views are square, so maps are too, unless channels are last.
        if maps.ndim != 4 or maps.shape[2] != maps.shape[3]:
            raise ModelError(
                f"the tap has no map with channels first: {tuple(maps.shape[1:])}",
                hint="set `tap` to the index of a stage",
            )
        if features.ndim != 2:
            raise ModelError(
                f"`{config.backbone}` does not end in one vector: {tuple(features.shape[1:])}",
                hint="choose another backbone",
            )
        self.feature_size = int(features.shape[1])
        self.map_size = MapSize(*maps.shape[1:])

    def forward(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """Return the map (n, channels, height, width) and the features (n, D)."""
        maps, features = self.net(views)
        return maps, self.dropout(features)

    def probe(self, run: Callable[[Tensor], Any]) -> Any:
        """Return the output of `run` for one view, without touching running statistics."""
        return probe(self.net, run, bands=self._bands, view_size=self.view_size)

    def agrees_with(self, run: Callable[[Tensor], Tensor]) -> bool:
        """Return True if `run` gives the same features as this network."""
        features, others = self.probe(self.net)[1], self.probe(run)
        if features.shape != others.shape or features.is_meta:
            return bool(features.shape == others.shape)
        tolerance = TOLERANCE * float(others.abs().max())
        return torch.allclose(features, others, rtol=0, atol=tolerance, equal_nan=True)


def probe(net: nn.Module, run: Callable[[Tensor], Any], *, bands: int, view_size: int) -> Any:
    """Return the output of `run` for one view, with `net` in evaluation mode.

    Raise ModelError if the network does not accept views of this size.
    """
    first, was_training = next(net.parameters()), net.training
    shape = (1, bands, view_size, view_size)
    net.eval()
    try:
        with torch.no_grad():
            # A ramp, as many networks map a constant view to zeros.
            ramp = torch.linspace(-1, 1, math.prod(shape), device=first.device)
            return run(ramp.to(first.dtype).reshape(shape))
    except FAILURES as error:
        raise _unsupported_view(view_size, error) from error
    finally:
        net.train(was_training)


def _unsupported_view(view_size: int, error: Exception) -> ModelError:
    return ModelError(
        f"the backbone does not accept views of {view_size} pixels: {first_line(error)}",
        hint="choose another view_size, local_size or backbone",
    )


def _pool(net: Any, final: Tensor, pooling: Pooling) -> Tensor:
    """Return the features that a classifier would read."""
    if pooling == "mean":  # the network's own head may do more than that
        features: Tensor = net.forward_head(final, pre_logits=True)
        return features
    if final.ndim != 4:
        raise ModelError("the backbone does not end in a map", hint="use pooling `mean`")
    return pool_map(final, pooling)


class _TapByStage(nn.Module):
    """Return the map after one of timm's stages, and the features."""

    def __init__(self, net: Any, stage: int, pooling: Pooling) -> None:
        super().__init__()
        self.net, self.stage, self.pooling = net, stage, pooling

    def forward(self, views: Tensor) -> tuple[Tensor, Tensor]:
        final, (maps,) = self.net.forward_intermediates(views, indices=[self.stage])
        return maps, _pool(self.net, final, self.pooling)


class _TapByName(nn.Module):
    """Return the output of a named module, and the features; the papers tap inside a stage."""

    def __init__(self, net: Any, name: str, pooling: Pooling) -> None:
        super().__init__()
        self.net, self.pooling = net, pooling
        self._maps: dict[int, Any] = {}  # by thread, as threads may share a model
        named = dict(net.named_modules())
        if name not in named:
            raise ModelError(
                f"the backbone has no module `{name}`",
                hint=did_you_mean(name, named, "set `tap` to the index of a stage"),
            )
        named[name].register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._maps[threading.get_ident()] = output

    def forward(self, views: Tensor) -> tuple[Tensor, Tensor]:
        final = self.net.forward_features(views)
        maps = self._maps.pop(threading.get_ident(), None)
        if not isinstance(maps, Tensor) or maps.ndim != 4:
            raise ModelError(
                "the tap does not return a map", hint="set `tap` to the index of a stage"
            )
        return maps, _pool(self.net, final, self.pooling)


def _build_own(config: ModelConfig, bands: int, tap: Tap, pretrained: bool | Path) -> nn.Module:
    name = config.backbone
    if tap is not None or config.drop_path:
        raise ModelError(
            f"`{name}` has one map and no stochastic depth", hint="remove tap and drop_path"
        )
    if name == BAGNET and config.pooling != "mean":
        raise ModelError(f"`{name}` supports pooling `mean` only", hint="use pooling `mean`")
    net = Compact(bands, config.pooling) if name == COMPACT else BagNet77(bands)
    init_weights(name, net)
    load_own_weights(net, name, pretrained)
    return net


def load_own_weights(net: nn.Module, name: str, pretrained: bool | Path) -> None:
    """Load the weights of a built-in network from a file, if one is given."""
    if pretrained is True:
        raise ModelError(
            f"no weights of `{name}` are published on the hub",
            hint="give a local .safetensors file: pretrained: FILE",
        )
    if pretrained:
        load_weights(net, Path(pretrained))


def build_timm(config: ModelConfig, *, bands: int, pretrained: bool | Path = False) -> Any:
    """Build a timm network without its classifier."""
    import timm  # takes seconds: it loads torchvision

    name = config.backbone
    _check_name(name, needs_weights=pretrained is True)
    settings: dict[str, Any] = {"drop_path_rate": config.drop_path} if config.drop_path else {}
    try:
        net: Any = timm.create_model(name, num_classes=0, in_chans=bands, **settings)
    except FAILURES as error:
        raise ModelError(
            f"cannot build `{name}`: {first_line(error)}",
            hint="remove drop_path" if settings else f"it may not support {bands} bands",
        ) from error
    if "efficientnet" in name:
        _set_drop_path(net, config.drop_path)
        if not pretrained:
            init_efficientnet(net)
    if name.startswith("tf_efficientnet"):
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.01  # Keras momentum 0.99, as in the authors' TNet code
    if pretrained:
        load_weights(net, fetch_weights(net, name) if pretrained is True else Path(pretrained))
    if hasattr(net, "set_input_size"):  # transformers are built, and pretrained, for one size
        try:
            net.set_input_size(img_size=(config.view_size, config.view_size))
        except FAILURES as error:
            raise _unsupported_view(config.view_size, error) from error
    return net


def _check_name(name: str, *, needs_weights: bool) -> None:
    """Raise ModelError if timm has no network, or no weights `network.tag`, of this name."""
    import timm

    known = [*timm.list_models(), BAGNET, COMPACT]
    network, _, tag = name.partition(".")
    if network not in known:
        raise ModelError(
            f"unknown backbone: `{name}`",
            hint=did_you_mean(network, known, "list all with `tnet models --backbones '*'`"),
        )
    tags = [each.partition(".")[2] for each in timm.list_pretrained(f"{network}.*")]
    if tag and tag not in tags:
        close = difflib.get_close_matches(tag, tags, n=1)
        hint = f"did you mean `{network}.{close[0]}`?" if close else f"use `{network}`"
        raise ModelError(f"`{network}` has no weights `{tag}`", hint=hint)
    if needs_weights and not tags:
        raise ModelError(
            f"no weights of `{name}` are published",
            hint="train from scratch, or give a local .safetensors file: pretrained: FILE",
        )


def _set_drop_path(net: Any, rate: float) -> None:
    """Let the rate grow from 1/n at the first of n blocks to all at the last, as in TNet's code."""
    from timm.layers.drop import DropPath

    blocks = [block for stage in net.blocks for block in stage]
    for number, block in enumerate(blocks, start=1):
        if hasattr(block, "drop_path"):
            block.drop_path = DropPath(rate * number / len(blocks)) if rate else nn.Identity()


def fetch_weights(net: Any, name: str) -> Path:
    """Return the published weights of a timm network, from the cache or the hub.

    timm would fall back to a pickle; this takes safetensors only.
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
    except Exception as error:  # the hub's errors have no base class
        raise ModelError(
            f"cannot download the weights of `{name}`: {first_line(error)}",
            hint="without internet access, give a local .safetensors file: pretrained: FILE",
        ) from error


def load_weights(net: Any, path: Path) -> None:
    """Load the weights of a backbone from a safetensors file; its classifier is ignored."""
    with open_tensor_file(path, "pt") as file:
        found = dict(file.tensors())
    settings = getattr(net, "pretrained_cfg", None) or {"first_conv": "stem"}
    for classifier in _names(settings.get("classifier")):
        found = {key: each for key, each in found.items() if not key.startswith(f"{classifier}.")}
    for first in _names(settings.get("first_conv")):
        _adapt_bands(net, found, f"{first}.weight")
    if problems := _mismatches(net.state_dict(), found):
        raise ModelError(
            f"`{path}` does not fit the backbone: {'; '.join(problems)}",
            hint="use a file of the same network",
        )
    net.load_state_dict(found, strict=False)  # files may lack batch norm's counts of batches


def _names(value: Any) -> tuple[str, ...]:
    """Return timm's name, names or None as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def _mismatches(own: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
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
    """Repeat or sum RGB filters for another number of bands, as timm does."""
    own, colours = net.state_dict().get(key), found.get(key)
    if own is None or colours is None or colours.shape == own.shape:
        return
    if colours.ndim == 4 and colours.shape[1] == 3:  # else reported as a mismatch
        from timm.models import adapt_input_conv

        found[key] = adapt_input_conv(own.shape[1], colours)


class Stream(nn.Module):
    """A network without its head: views to maps, and maps to vectors by pooling.

    So the logit of a class is linear in the map. Layers that only a head uses, such as the dense
    ones of VGG, are removed.
    """

    def __init__(self, config: ModelConfig, *, bands: int, pretrained: bool | Path = False) -> None:
        super().__init__()
        name = config.backbone
        if name in (BAGNET, COMPACT):
            self.net: Any = _build_own(config, bands, None, pretrained)
        else:
            self.net = build_timm(config, bands=bands, pretrained=pretrained)
        self.pooling = config.pooling
        self.dropout = nn.Dropout(config.feature_dropout)
        self.map_size = self._remove_head(name, bands, config.view_size)

    @property
    def feature_size(self) -> int:
        """Return the length of a vector."""
        return self.map_size.channels * (1 if self.pooling == "mean" else 2)

    def forward(self, views: Tensor) -> Tensor:
        """(n, bands, height, width) -> the last map (n, channels, height, width)."""
        maps: Tensor = self.net.forward_features(views)
        return maps

    def pool(self, maps: Tensor) -> Tensor:
        """(n, channels, height, width) -> (n, features)."""
        vectors: Tensor = self.dropout(pool_map(maps, self.pooling))
        return vectors

    def _remove_head(self, name: str, bands: int, view_size: int) -> MapSize:
        """Replace layers that the map does not need by identities; return the map's shape."""
        used: set[nn.Module] = set()
        hooks = [
            part.register_forward_hook(lambda module, inputs, output: used.add(module))
            for part in self.net.modules()
        ]
        try:
            maps = probe(self.net, self, bands=bands, view_size=view_size)
        finally:
            for hook in hooks:
                hook.remove()
        # Views are square, so maps are too, unless channels are last.
        if not isinstance(maps, Tensor) or maps.ndim != 4 or maps.shape[2] != maps.shape[3]:
            raise ModelError(
                f"`{name}` does not end in a map with channels first",
                hint="choose a convolutional network, such as `vgg19`, `resnet34` or `compact`",
            )
        for path, part in list(self.net.named_modules()):
            if path and part not in used and list(part.parameters(recurse=False)):
                parent, _, attribute = path.rpartition(".")
                setattr(self.net.get_submodule(parent), attribute, nn.Identity())
        return MapSize(*maps.shape[1:])
