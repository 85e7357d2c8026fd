from dataclasses import replace

import pytest
import torch
from tnetcli.training.losses import Walked, label_loss
from tnetcli.training.rehearsal import Rehearsal
from tnetcli.training.walking import Sights

from tests.runs import MODEL
from tnetcli.geometry import Region, Window
from tnetcli.models.registry import build_model
from tnetcli.sections import Stage
from tnetcli.traversal import Plan

STAGE = Stage(steps=1, freeze=("backbone",), rehearse=2, remember=5, loss={"label_smoothing": 0.1})
PLAN = Plan(2, (2,))
ROOT = Region(Window(0, 0, 96, 96))


@pytest.fixture
def model():
    torch.manual_seed(0)
    arguments = {key: value for key, value in MODEL.items() if key != "classes"}
    return build_model("tnet", arguments, classes=2).eval()


def look(model, images, seed, windows=3):
    """Return a walk of two levels, as a step would, and what the backbone saw."""
    generator = torch.Generator().manual_seed(seed)
    regions = [ROOT] * images
    regions += [ROOT.child(model.grid, i % 3, k) for i in range(images) for k in range(windows - 1)]
    views = torch.randn(len(regions), 3, 32, 32, generator=generator)
    image = torch.tensor([*range(images), *[i for i in range(images) for _ in range(windows - 1)]])
    labels = torch.randint(2, (images,), generator=generator)
    with torch.no_grad():
        looked = model.look(views, regions, score_cells=False)
    nothing = torch.zeros(0)
    order = torch.argsort(image, stable=True)
    each = looked.features[order].view(images, windows, -1)
    conclusion = model.conclude(each, torch.ones(images, windows, dtype=torch.bool))
    walked = Walked(
        labels=labels,
        scores=conclusion.scores,
        level_scores=conclusion.scores[None],
        concluded=conclusion.features,
        window_scores=model.classify(looked.features),
        image=image,
        level=torch.tensor([region.level for region in regions]),
        log_p=nothing,
        entropy=nothing,
    )
    return walked, Sights([looked.bare], regions)


def rehearsal(model, stage=STAGE, images=3):
    return Rehearsal(model, PLAN, stage, images=images, seed=1, device=torch.device("cpu"))


def test_a_rehearsed_image_costs_what_it_cost_when_it_was_looked_at(model):
    walked, sights = look(model, 1, seed=0)
    memory = rehearsal(model)
    memory.remember(walked, sights)
    expected = label_loss(walked, STAGE.loss)[0]
    assert memory.loss(0, 0, None).item() == pytest.approx(expected.item(), rel=1e-5)


def test_images_with_fewer_windows_are_concluded_from_what_they_have(model):
    walked, sights = look(model, 1, seed=0)
    fewer, fewer_sights = look(model, 1, seed=3, windows=2)
    memory = rehearsal(model, replace_remember(1))
    memory.remember(walked, sights)
    memory.remember(fewer, fewer_sights)  # in the place of the first
    expected = label_loss(fewer, STAGE.loss)[0]
    assert memory.loss(0, 0, None).item() == pytest.approx(expected.item(), rel=1e-5)


def replace_remember(count):
    return STAGE.model_copy(update={"remember": count})


def test_the_oldest_are_forgotten_first(model):
    memory = rehearsal(model)
    labels = []
    for seed in range(3):
        walked, sights = look(model, 2, seed=seed)
        walked = replace(walked, labels=torch.full((2,), seed % 2))
        labels += walked.labels.tolist()
        memory.remember(walked, sights)
    assert sorted(memory.state()["labels"].tolist()) == sorted(labels[1:])


def test_it_is_the_same_again_from_its_state(model):
    one, other = rehearsal(model), rehearsal(model)
    one.remember(*look(model, 4, seed=5))
    other.load(one.state())
    for memory in (one, other):
        memory.remember(*look(model, 3, seed=6))
    assert all(torch.equal(one.loss(2, i, None), other.loss(2, i, None)) for i in range(3))
    assert not torch.equal(one.loss(2, 0, None), one.loss(2, 1, None))


def test_only_what_follows_the_backbone_learns_and_attention_does_not(model):
    memory = rehearsal(model)
    memory.remember(*look(model, 4, seed=5))
    memory.loss(0, 0, None).backward()
    learned = {name.split(".")[0] for name, p in model.named_parameters() if p.grad is not None}
    assert learned == {"position", "weighting", "classifier"}


def test_a_backbone_that_learns_cannot_be_remembered():
    with pytest.raises(ValueError, match="needs `freeze: \\[backbone\\]`"):
        Stage(steps=1, rehearse=2)
