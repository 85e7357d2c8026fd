"""Which parts of a model learn in a stage, and how much of them is dropped."""

from torch import nn

from tnetcli.errors import RecipeError
from tnetcli.models.base import Model
from tnetcli.sections.stages import Stage

BACKBONE = "backbone"


def is_of_backbone(name: str) -> bool:
    """Say whether a weight or a module is of a backbone; a model may have several."""
    return BACKBONE in name.split(".")


def prepare_parts(model: Model, stage: Stage) -> None:
    """Let the parts learn that a stage does not freeze; what is frozen sees as in a prediction."""
    model.train()
    frozen: set[str] = set(stage.freeze)
    if stage.optimizer.backbone_rate == 0:
        frozen.add(BACKBONE)
    if stage.learn == "tiles":
        frozen |= {"location", "weighting"}
    model.requires_grad_(True)
    for name, part in model.named_modules():
        if name in frozen or (BACKBONE in frozen and is_of_backbone(name)):
            part.requires_grad_(False)
            part.eval()  # running statistics stay as they are
    built = model.arguments
    dropout = getattr(model, "dropout", None)
    if isinstance(dropout, nn.Dropout):
        dropout.p = built.dropout if stage.dropout is None else stage.dropout
    if built.drop_path:
        _drop_paths(model, stage.drop_path)
    elif stage.drop_path:
        raise RecipeError(
            f"stage `{stage.name}` has a `drop_path`, the model has none",
            hint="a model is built for it: give model.drop_path",
        )


def _drop_paths(model: Model, rate: float | None) -> None:
    """Let stochastic depth grow towards `rate` at the last block, or as the model was built."""
    from timm.layers.drop import DropPath

    paths = [part for part in model.modules() if isinstance(part, DropPath)]
    first = [vars(path).setdefault("built_with", path.drop_prob) for path in paths]
    for path, own in zip(paths, first, strict=True):
        path.drop_prob = own if rate is None else rate * own / max(first)
