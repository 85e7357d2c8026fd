"""A backbone's weights, from the hub or a local file; never a pickle."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn

from tnetcli.errors import ModelError
from tnetcli.tensor_file import open_tensor_file
from tnetcli.wording import first_line


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
