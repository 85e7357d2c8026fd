"""What single layers of a built model give: how large a map, and what one of its pixels sees."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tnetcli.models.lsp import LOCALISATIONS, Localising, count_candidates
from tnetcli.models.papers import Map

if TYPE_CHECKING:
    from torch import Tensor

    from tnetcli.models.base import Model

BRANCHES = tuple(f"anchor.branches.{branch}.blocks" for branch in range(3))


def see_maps(model: "Model", names: Iterable[str]) -> dict[str, Map]:
    """Return the maps of these modules, by name; views are as large as the model's."""
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(name.split(".")[0], []).append(name)  # parts are shown a view
    return {name: seen for part in parts.items() for name, seen in _see(model, *part).items()}


def _see(model: "Model", part: str, names: Sequence[str]) -> dict[str, Map]:
    import torch

    from tnetcli.models.receptive_field import trace

    like, side = next(model.parameters()), model.view_size
    view = torch.zeros(1, model.bands, side, side, device=like.device, dtype=like.dtype)
    kept: dict[str, Tensor] = {}  # (1, channels, height, width)

    def keep(name: str, module: Any, inputs: Any, output: "Tensor") -> None:
        kept[name] = output

    def run(name: str, view: "Tensor") -> "Tensor":
        if not kept:  # all layers are seen at once
            model.get_submodule(part)(view)
        return kept[name]

    hooks = []
    try:
        for name in names:
            hooks.append(model.get_submodule(name).register_forward_hook(partial(keep, name)))
        with torch.no_grad():
            found = {name: trace(partial(run, name), view) for name in names}
    finally:
        for hook in hooks:
            hook.remove()
    return {name: (seen.shape[2], rows.size) for name, (seen, (rows, _)) in found.items()}


def count_tried(setting: Localising, sides: Iterable[int]) -> list[int]:
    """Return how many positions of each branch LSP goes through, where maps have these sides."""
    shares = LOCALISATIONS[setting].shares
    return [count_candidates(side**2, share) for side, share in zip(sides, shares, strict=True)]
