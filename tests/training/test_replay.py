from dataclasses import replace

import pytest
import torch

from tests.runs import MODEL
from tnetcli.geometry import Region, Window
from tnetcli.models.base import Episodes
from tnetcli.models.registry import build_model
from tnetcli.tasks import Classification
from tnetcli.training.recipe import StageConfig
from tnetcli.training.reinforce import label_terms, total_loss
from tnetcli.training.replay import ReplayBuffer
from tnetcli.traversal.config import TraversalConfig

STAGE = StageConfig(steps=1, freeze=("backbone",), replay=2, loss={"label_smoothing": 0.1})
CONFIG = TraversalConfig(levels=2, keep=(2,))
TASK = Classification(range(2), label_smoothing=0.1)
ROOT = Region(Window(0, 0, 96, 96))


@pytest.fixture
def model():
    torch.manual_seed(0)
    arguments = {key: value for key, value in MODEL.items() if key != "classes"}
    return build_model("tnet", arguments, classes=2).eval()


def encode(model, images, seed, regions=3):
    """Return episodes of two levels, as a step would."""
    generator = torch.Generator().manual_seed(seed)
    read = [ROOT] * images
    read += [ROOT.child(model.grid, i % 3, k) for i in range(images) for k in range(regions - 1)]
    views = torch.randn(len(read), 3, 32, 32, generator=generator)
    image = torch.tensor([*range(images), *[i for i in range(images) for _ in range(regions - 1)]])
    targets = torch.randint(2, (images,), generator=generator)
    position = torch.tensor([region.position for region in read])
    level = position[:, 2] + 1
    with torch.no_grad():
        out = model(views, position)
    order = torch.argsort(image, stable=True)
    levels = level[order].view(images, regions)
    each = out.features[order].view(images, regions, -1)
    aggregated = model.aggregate(each, levels > 0, levels)
    return Episodes(
        targets=targets,
        logits=aggregated.logits,
        level_logits=aggregated.logits[None],
        embedding=aggregated.embedding,
        region_logits=model.classify(out.features, level),
        image=image,
        level=level,
        log_p=torch.zeros(0),
        entropy=torch.zeros(0),
        aux={"pooled": (torch.arange(len(read)), out.aux["pooled"])},
        position=position,
    )


class Replay:
    """A buffer with what its losses need."""

    def __init__(self, model, size=5):
        self.model, self.buffer = model, ReplayBuffer(model, CONFIG, size, images=3, seed=1)
        self.add = self.buffer.add

    def loss(self, step, number):
        return self.buffer.loss(self.model, TASK, STAGE.loss, step, number)


def label_loss(episodes):
    return total_loss(label_terms(episodes, TASK, STAGE.loss))[0].item()


def test_a_replayed_image_costs_what_it_cost_when_it_was_read(model):
    episodes = encode(model, 1, seed=0)
    buffer = Replay(model)
    buffer.add(episodes)
    assert buffer.loss(0, 0).item() == pytest.approx(label_loss(episodes), rel=1e-5)


def test_pooled_features_may_come_in_another_order(model):
    episodes = encode(model, 1, seed=0)
    rows, pooled = episodes.aux["pooled"]
    buffer = Replay(model)
    buffer.add(replace(episodes, aux={"pooled": (rows.flip(0), pooled.flip(0))}))
    assert buffer.loss(0, 0).item() == pytest.approx(label_loss(episodes), rel=1e-5)


def test_images_with_fewer_regions_are_aggregated_from_what_they_have(model):
    fewer = encode(model, 1, seed=3, regions=2)
    buffer = Replay(model, 1)
    buffer.add(encode(model, 1, seed=0))
    buffer.add(fewer)  # in the place of the first
    assert buffer.loss(0, 0).item() == pytest.approx(label_loss(fewer), rel=1e-5)


def test_the_oldest_are_replaced_first(model):
    buffer, labels = Replay(model), []
    for seed in range(3):
        episodes = replace(encode(model, 2, seed=seed), targets=torch.full((2,), seed % 2))
        labels += episodes.targets.tolist()
        buffer.add(episodes)
    assert sorted(buffer.buffer.labels.tolist()) == sorted(labels[1:])


def test_it_is_the_same_again_from_its_state(model):
    one, other = Replay(model), Replay(model)
    one.add(encode(model, 4, seed=5))
    other.buffer.load_state_dict(one.buffer.state_dict())
    for buffer in (one, other):
        buffer.add(encode(model, 3, seed=6))
    assert all(torch.equal(one.loss(2, i), other.loss(2, i)) for i in range(3))
    assert not torch.equal(one.loss(2, 0), one.loss(2, 1))


def test_only_what_follows_the_backbone_learns_and_attention_does_not(model):
    buffer = Replay(model)
    buffer.add(encode(model, 4, seed=5))
    buffer.loss(0, 0).backward()
    learned = {name.split(".")[0] for name, p in model.named_parameters() if p.grad is not None}
    assert learned == {"position", "aggregator", "head"}


def test_features_of_a_backbone_that_learns_cannot_be_replayed():
    with pytest.raises(ValueError, match="needs `freeze: \\[backbone\\]`"):
        StageConfig(steps=1, replay=2)
