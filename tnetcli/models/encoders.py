"""Image encoders: timm and built-in networks, taps, pooling, pretrained weights."""

import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from tnetcli.errors import ModelError
from tnetcli.models.base import init_efficientnet, init_weights
from tnetcli.models.checkpoint import open_tensor_file
from tnetcli.models.configs import ModelConfig, Pooling, Weights
from tnetcli.models.nets import BagNet77, Compact, MapSize, pool_map
from tnetcli.text import did_you_mean, first_line, one_line, printable

OWN = ("bagnet77", "compact")
PIXELS_PER_CELL = 2
USE_FILE = "give a local .safetensors file: pretrained: FILE"
USE_INDEX = "set `tap` to the index of a stage"
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


class Backbone(nn.Module):
    """A network that returns a feature map and the pooled features of a view."""

    def __init__(self, net: Any, config: ModelConfig, *, bands: int) -> None:
        super().__init__()
        self.net, self.pooling = net, config.pooling
        self.dropout = nn.Dropout(config.feature_dropout)
        maps, features = self._probe(bands, config.view_size)
        # Views are square, so maps are too, unless channels are last.
        if maps.ndim != 4 or maps.shape[2] != maps.shape[3]:
            raise ModelError(f"no map with channels first: {tuple(maps.shape[1:])}", hint=USE_INDEX)
        if features.ndim != 2:
            problem = f"`{config.backbone}` does not end in one vector: {tuple(features.shape[1:])}"
            raise ModelError(problem, hint="choose another backbone")
        self.feature_size = int(features.shape[1])
        self.map_size = MapSize(*maps.shape[1:])

    def _probe(self, bands: int, side: int) -> tuple[Tensor, Tensor]:
        """Encode one view; raise ModelError if its size is not accepted."""
        like = next(self.parameters())
        try:
            with torch.no_grad():
                return self.eval().encode(like.new_zeros(1, bands, side, side))
        except FAILURES as error:
            raise _unsupported_view(side, error) from error
        finally:
            self.train()

    def forward(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """Return the map (n, channels, height, width) and the features (n, D)."""
        maps, features = self.encode(views)
        return maps, self.dropout(features)

    def encode(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """Return the map and the features without dropout."""
        maps, features = self.net(views)
        return maps, features


class Stream(Backbone):
    """A network without its head, tapped at its last map: class logits are linear in that map.

    Layers that only a head uses, such as the dense ones of VGG, are removed.
    """

    def __init__(self, config: ModelConfig, *, bands: int, pretrained: Weights = False) -> None:
        used: set[nn.Module] = set()
        with register_module_forward_hook(lambda module, inputs, output: used.add(module)):
            super().__init__(_build_net(config, bands, pretrained), config, bands=bands)
        for path, part in list(self.net.named_modules()):
            if path and part not in used and list(part.parameters(recurse=False)):
                self.net.set_submodule(path, nn.Identity())

    def encode(self, views: Tensor) -> tuple[Tensor, Tensor]:
        """Return the last map and its pooled features without dropout."""
        maps = self.net.forward_features(views)
        if maps.ndim != 4:
            hint = "choose a convolutional network, such as `vgg19`, `resnet34` or `compact`"
            raise ModelError(f"no map with channels first: {tuple(maps.shape[1:])}", hint=hint)
        return maps, pool_map(maps, self.pooling)


def build_backbone(
    config: ModelConfig,
    *,
    bands: int,
    tap: int | str | None = None,
    cells: int = 1,
    pretrained: Weights = False,
) -> Backbone:
    """Build a network with a tap, by default the deepest map with two pixels per cell a side."""
    name, pooling = config.backbone, config.pooling
    net = _build_net(config, bands, pretrained)
    if name in OWN:
        if tap is not None:
            raise ModelError(f"`{name}` has one map", hint="remove tap")
        return Backbone(net, config, bands=bands)
    if isinstance(tap, str):
        return Backbone(_Tapped(net, tap, pooling), config, bands=bands)
    stages = getattr(net, "feature_info", None)
    if not stages or not all(stage["reduction"] for stage in stages):
        hint = "set `tap` to the name of one of its modules, or choose another backbone"
        raise ModelError(f"`{name}` does not list its stages", hint=hint)
    if tap is None:
        sides = [config.view_size // stage["reduction"] for stage in stages]
        fine = [index for index, side in enumerate(sides) if side >= PIXELS_PER_CELL * cells]
        tap = max(fine, default=0)
    if not 0 <= tap < len(stages):
        raise ModelError(f"`{name}` has no stage `{tap}`", hint=f"use 0 to {len(stages) - 1}")
    by_name = _Tapped(net, stages[tap]["module"], pooling)
    try:
        return Backbone(by_name, config, bands=bands)
    except ModelError:
        if not hasattr(net, "forward_intermediates"):
            raise
    by_name.hook.remove()
    return Backbone(_Tapped(net, tap, pooling), config, bands=bands)


def _unsupported_view(view_size: int, error: Exception) -> ModelError:
    return ModelError(
        f"the backbone does not accept views of {view_size} pixels: {first_line(error)}",
        hint="choose another view_size, local_size or backbone",
    )


class _Tapped(nn.Module):
    """Return a map on the way to the features of a timm network, and the features.

    The map is the output of a named module, as the papers tap inside a stage; or that of a stage
    by index, which timm also makes of tokens and of channels last.
    """

    def __init__(self, net: Any, tap: int | str, pooling: Pooling) -> None:
        super().__init__()
        self.net, self.tap, self.pooling = net, tap, pooling
        self._maps: dict[int, Any] = {}  # by thread, as threads may share a model
        if isinstance(tap, str):
            named = dict(net.named_modules())
            if tap not in named:
                hint = did_you_mean(tap, named, USE_INDEX)
                raise ModelError(f"the backbone has no module `{tap}`", hint=hint)
            self.hook = named[tap].register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._maps[threading.get_ident()] = output

    def forward(self, views: Tensor) -> tuple[Tensor, Tensor]:
        if isinstance(self.tap, int):
            final, (maps,) = self.net.forward_intermediates(views, indices=[self.tap])
        else:
            final = self.net.forward_features(views)
            maps = self._maps.pop(threading.get_ident(), None)
            if not isinstance(maps, Tensor) or maps.ndim != 4:
                raise ModelError("the tap does not return a map", hint=USE_INDEX)
        if self.pooling == "mean":  # the network's own head may do more than that
            return maps, self.net.forward_head(final, pre_logits=True)
        if final.ndim != 4:
            raise ModelError("the backbone does not end in a map", hint="use pooling `mean`")
        return maps, pool_map(final, self.pooling)


def _build_net(config: ModelConfig, bands: int, pretrained: Weights) -> Any:
    """Build a built-in network, or one of timm without its classifier."""
    name = config.backbone
    if name not in OWN:
        return build_timm(config, bands=bands, pretrained=pretrained)
    if config.drop_path:
        raise ModelError(f"`{name}` has no stochastic depth", hint="remove drop_path")
    if name == "bagnet77" and config.pooling != "mean":
        raise ModelError(f"`{name}` supports pooling `mean` only", hint="use pooling `mean`")
    net = Compact(bands, config.pooling) if name == "compact" else BagNet77(bands)
    init_weights(name, net)
    load_weights(net, name, pretrained)
    return net


def build_timm(config: ModelConfig, *, bands: int, pretrained: Weights = False) -> Any:
    """Build a timm network without its classifier."""
    import timm  # takes seconds: it loads torchvision

    name = config.backbone
    known = timm.list_models()
    if name.partition(".")[0] not in known:  # timm would download `hf-hub:...`
        list_all = "list all with `tnet models --backbones '*'`"
        hint = did_you_mean(name.partition(".")[0], [*known, *OWN], list_all)
        raise ModelError(f"unknown backbone: `{name}`", hint=hint)
    settings: dict[str, Any] = {"drop_path_rate": config.drop_path} if config.drop_path else {}
    try:
        net: Any = timm.create_model(name, num_classes=0, in_chans=bands, **settings)
    except FAILURES as error:
        hint = "remove drop_path" if settings else f"check its tag, and if it takes {bands} bands"
        raise ModelError(f"cannot build `{name}`: {first_line(error)}", hint=hint) from error
    if "efficientnet" in name:
        _set_drop_path(net, config.drop_path)
        if not pretrained:
            init_efficientnet(net)
    if name.startswith("tf_efficientnet"):
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = 0.01  # Keras momentum 0.99, as in the authors' TNet code
    load_weights(net, name, pretrained)
    if hasattr(net, "set_input_size"):  # transformers are built, and pretrained, for one size
        try:
            net.set_input_size(img_size=(config.view_size, config.view_size))
        except FAILURES as error:
            raise _unsupported_view(config.view_size, error) from error
    return net


def _set_drop_path(net: Any, rate: float) -> None:
    """Let the rate grow from 1/n at the first of n blocks to all at the last, as in TNet's code."""
    from timm.layers.drop import DropPath

    blocks = [block for stage in net.blocks for block in stage]
    for number, block in enumerate(blocks, start=1):
        if hasattr(block, "drop_path"):
            block.drop_path = DropPath(rate * number / len(blocks)) if rate else nn.Identity()


def load_weights(net: Any, name: str, pretrained: Weights) -> None:
    """Load weights from a file or the hub (True), without classifier, adapted to the bands."""
    if not pretrained:
        return
    settings = getattr(net, "pretrained_cfg", None) or {"first_conv": "stem"}
    path = _download(name, settings) if pretrained is True else Path(pretrained)
    with open_tensor_file(path, "pt") as file:
        found = dict(file.tensors())
    classifiers = tuple(f"{name}." for name in _names(settings.get("classifier")))
    found = {key: each for key, each in found.items() if not key.startswith(classifiers)}
    own = net.state_dict()
    for key in (f"{first}.weight" for first in _names(settings.get("first_conv"))):
        value = found.get(key)
        if key in own and value is not None and value.ndim == 4 and value.shape[1] == 3:
            from timm.models import adapt_input_conv

            found[key] = adapt_input_conv(own[key].shape[1], value)
    try:
        net.load_state_dict(found)
    except RuntimeError as error:
        problem = f"`{path}` does not fit the backbone: {printable(one_line(error), 300)}"
        raise ModelError(problem, hint="use a file of the same network") from error


def _names(value: Any) -> tuple[str, ...]:
    """Return timm's name, names or None as a tuple."""
    return (value,) if isinstance(value, str) else tuple(value or ())


def _download(name: str, settings: dict[str, Any]) -> Path:
    """Return the published safetensors from the cache or the hub; timm would take a pickle."""
    from huggingface_hub import hf_hub_download

    if not (hub := settings.get("hf_hub_id")):
        raise ModelError(f"no weights of `{name}` are published as safetensors", hint=USE_FILE)
    try:
        return Path(hf_hub_download(hub, "model.safetensors"))
    except Exception as error:  # the hub's errors have no base class
        problem = f"cannot download the weights of `{name}`: {first_line(error)}"
        raise ModelError(problem, hint=f"without internet access, {USE_FILE}") from error
