"""The stream that sees windows, and thinks about each in steps; SPEC 5.2 and 5.3."""

from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional

from tnetcli.errors import ModelError
from tnetcli.models.backbone import BAGNET
from tnetcli.models.initial import start_as_bagnet, start_as_efficientnet
from tnetcli.models.self_attention import SelfAttention
from tnetcli.models.step_attention import Recurrence, build_step_shares, weigh_steps
from tnetcli.models.stream import Stream
from tnetcli.models.two_stream_arguments import TwoStreamArguments


class Thought(NamedTuple):
    """What the local stream makes of some windows."""

    vectors: Tensor  # (regions, features), to be classified
    shares: Tensor  # (regions, steps), how much each step counts in the vector
    outputs: Tensor  # (regions, steps, features), what each step says


class LocalStream(nn.Module):
    """A map of a window, the same vector shown at every step, attention over the steps."""

    def __init__(
        self,
        arguments: TwoStreamArguments,
        *,
        classes: int,
        bands: int,
        pretrained: bool | Path = False,
    ) -> None:
        super().__init__()
        name = arguments.local_backbone or arguments.backbone
        if isinstance(pretrained, Path) and name != arguments.backbone:
            raise ModelError(
                f"`{pretrained}` cannot hold the weights of `{arguments.backbone}` and `{name}`",
                hint="use one backbone for both streams, or the hub's weights: pretrained: true",
            )
        self.view_size, self.steps = arguments.seen_locally, arguments.steps_made
        built = arguments.model_copy(update={"backbone": name, "view_size": self.view_size})
        self.backbone = Stream(built, bands=bands, pretrained=pretrained)
        self.attend: SelfAttention | None = None
        self.feature_size = self.backbone.feature_size
        if self.steps:
            size = self.feature_size = arguments.state_size
            if arguments.self_attention:
                self.attend = SelfAttention(
                    self.backbone.map_size,
                    size,
                    keys=arguments.key_channels,
                    basis=arguments.basis_channels,
                )
            self.memory = Recurrence(size if self.attend else self.backbone.feature_size, size)
            self.weigh = build_step_shares(
                arguments.steps,
                self.steps,
                first=arguments.first_step,
                size=size,
                vectors=arguments.step_vectors,
            )
        self.classifier = nn.Linear(self.feature_size, classes)
        start = start_as_bagnet if name == BAGNET else start_as_efficientnet
        start(self.classifier)

    def forward(self, views: Tensor) -> Thought:
        """See (regions, bands, height, width) and think about it."""
        seen = self.see(views)
        if not self.steps:
            vectors = self.backbone.pool(seen)
            return Thought(vectors, vectors.new_zeros(len(vectors), 0), vectors.unsqueeze(1)[:, :0])
        outputs = self.think(seen)
        shares = self.weigh(outputs)
        return Thought(weigh_steps(outputs, shares), shares, outputs)

    def see(self, views: Tensor) -> Tensor:
        """Shrink views that are larger than what this stream sees, and return their maps.

        By the mean of the pixels, as readers do: by a whole factor it is as if the window had been
        read at that size.
        """
        if views.shape[-1] > self.view_size:
            size = (self.view_size, self.view_size)
            views = functional.interpolate(views, size, mode="area")
        seen: Tensor = self.backbone(views)
        return seen

    def think(self, seen: Tensor) -> Tensor:
        """Return what each step says (regions, steps, size) of maps (regions, channels, ...)."""
        outputs: Tensor
        if self.attend is not None:
            outputs = self.attend(self.backbone.dropout(seen), self.memory, self.steps)
        else:
            outputs = self.memory(self.backbone.pool(seen), self.steps)
        return outputs
