"""The convolutional part of a network, without its head: a view becomes the last map it makes."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tnetcli.errors import ModelError
from tnetcli.models.backbone import BAGNET, COMPACT, FAILURES, build_backbone, create_timm
from tnetcli.models.bagnet import SLOPE, BagNet77
from tnetcli.models.compact import Compact
from tnetcli.models.configs import Arguments
from tnetcli.models.pooling import MapSize, pool_map
from tnetcli.wording import first_line


class Stream(nn.Module):
    """See views as maps, and maps as vectors: by their mean, whatever head the network came with.

    So the evidence for a class in a part of the view is linear in the map under it. Layers that
    only a head would use, such as the dense ones of VGG, are left out.
    """

    def __init__(
        self, arguments: Arguments, *, bands: int, pretrained: bool | Path = False
    ) -> None:
        super().__init__()
        name = arguments.backbone
        if name in (BAGNET, COMPACT):
            self.net: Any = build_backbone(arguments, bands=bands, pretrained=pretrained).net
        else:
            self.net = create_timm(arguments, bands=bands, pretrained=pretrained)
        self.pooling = arguments.pooling
        self.dropout = nn.Dropout(arguments.feature_dropout)
        self.map_size = self._without_head(name, bands, arguments.view_size)

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
