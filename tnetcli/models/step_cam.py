"""Where a step finds its class in a window: Grad-CAM of one step of the local stream."""

import torch
from torch import Tensor

from tnetcli.models.two_stream import TwoStream


def step_cam(model: TwoStream, view: Tensor, step: int, label: int) -> Tensor:
    """Return what speaks for class `label` at `step` (from 1) in each part of a window's view.

    `view` (bands, height, width) is normalised as for `look`. The map (height, width) is the local
    backbone's last: its channels, weighed by the mean gradient of what the class would score if the
    step alone were classified, without what speaks against it. Nothing is learned by it.
    """
    stream = model.local_stream
    if not 1 <= step <= stream.steps:
        raise ValueError(f"there is no step `{step}`: the model makes {stream.steps}")
    if not 0 <= label < model.classes:
        raise ValueError(f"there is no class `{label}`: the model knows {model.classes}")
    if view.ndim != 3 or view.shape[0] != model.bands:
        raise ValueError(f"not a view of {model.bands} bands: {tuple(view.shape)}")
    modes = [(part, part.training) for part in stream.modules()]
    stream.eval()
    try:
        with torch.inference_mode(False), torch.enable_grad():
            seen = stream.see(view.detach().clone().unsqueeze(0)).detach().requires_grad_(True)
            score = stream.classifier(stream.think(seen)[0, step - 1])[label]
            (gradient,) = torch.autograd.grad(score, seen)  # (1, channels, height, width)
    finally:
        for part, was_training in modes:
            part.training = was_training
    weights = gradient.mean(dim=(2, 3), keepdim=True)  # (1, channels, 1, 1)
    return (weights * seen.detach()).sum(dim=1).clamp(min=0)[0]
