"""The contract of models, as tests that a test class of a family inherits.

class TestTNetOnResNet(ModelContract):
    case = Case("tnet", {"backbone": "resnet18", "view_size": 64})
"""

import copy
import json
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

from tnetcli.geometry import Region, Window
from tnetcli.models.base import EncoderOutput, Model
from tnetcli.models.registry import build_model, read_model_config

ROOT = Region(Window(0, 0, 4000, 3000))


@dataclass(frozen=True)
class Case:
    """What to build; `never_learned` names parameters that no loss can reach."""

    family: str
    config: dict[str, Any]
    classes: int = 3
    bands: int = 3
    never_learned: Set[str] = frozenset()


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Return normal noise, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unmasked(count: int) -> tuple[Tensor, Tensor]:
    """Return mask and levels of one image: level 1, then regions of level 2."""
    return torch.ones(1, count, dtype=torch.bool), torch.arange(count).clamp(max=1)[None] + 1


def root_and_cells(model: Model, count: int = 3) -> list[Region]:
    """Return `count` regions: the whole image, then its last cells."""
    cells = list(model.grid.cells())[::-1]
    return [ROOT, *(ROOT.child(model.grid, *cells[i % len(cells)]) for i in range(count - 1))]


def encode(
    model: Model, views: Tensor | Sequence[Tensor], regions: Sequence[Region]
) -> EncoderOutput:
    """Encode one view per region; neighbours that share the encoder of their level are one batch.

    Rows of `aux` are those of the regions that have the output.
    """
    outputs: list[EncoderOutput] = []
    encoders = {level: model.encoder(level) for level in {each.level for each in regions}}
    for encoder, each in groupby(range(len(regions)), lambda i: encoders[regions[i].level]):
        rows = list(each)
        positions = torch.tensor([regions[i].position for i in rows])
        outputs.append(encoder(torch.stack([views[i] for i in rows]), positions))
    names = sorted({name for each in outputs for name in each.aux})
    return EncoderOutput(
        torch.cat([each.features for each in outputs]),
        torch.cat([each.cell_logits for each in outputs]),
        {name: torch.cat([o.aux[name] for o in outputs if name in o.aux]) for name in names},
    )


def proposed(model: Model, out: EncoderOutput) -> Tensor:
    """Return the probabilities (n, places) of the cells that policies see, 0 where none is."""
    aux = {name: value.detach().numpy() for name, value in out.aux.items()}
    logits = torch.from_numpy(model.propose(out.cell_logits.detach().numpy(), aux))[..., 0]
    return logits.double().softmax(dim=1).nan_to_num(nan=0.0)


def relative(out: EncoderOutput) -> Tensor:
    """Return the cell logits relative to the best of each view, as a common offset is free."""
    finite = out.cell_logits.clamp(min=-1e9)
    return finite - finite.amax(dim=1, keepdim=True)


def learned(model: nn.Module) -> set[str]:
    """Return the names of the parameters that have a gradient."""
    found = model.named_parameters()
    return {name for name, each in found if each.grad is not None and each.grad.any()}


def learned_parts(model: nn.Module) -> set[str]:
    """Return the attributes of a model in which some parameter has a gradient."""
    return {name.split(".")[0] for name in learned(model)}


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compare up to rounding, relative to the largest value."""
    scale = max(1.0, float(expected.detach().abs().max()))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * scale)


def assert_same(actual: EncoderOutput, expected: EncoderOutput) -> None:
    """Compare features and cell logits exactly."""
    assert torch.equal(actual.features, expected.features)
    assert torch.equal(actual.cell_logits, expected.cell_logits)


class Batch(NamedTuple):
    """The whole image and two cells: a view of each, and the encoder's output."""

    views: list[Tensor]
    regions: list[Region]
    out: EncoderOutput


class ModelContract:
    """Promises of every model; subclasses set `case`."""

    case: Case

    @classmethod
    def build(cls, seed: int = 0, bands: int | None = None) -> Model:
        torch.manual_seed(seed)
        case, bands = cls.case, bands or cls.case.bands
        return build_model(case.family, case.config, classes=case.classes, bands=bands).eval()

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> Model:
        return cls.build().requires_grad_(False)

    @pytest.fixture
    def learner(self, model: Model) -> Model:
        learner = copy.deepcopy(model)
        for parameter in learner.parameters():
            if not parameter.any():  # such as the gain of a residual, which would stop gradients
                parameter.fill_(0.1)
        return learner.requires_grad_(True).train()

    @pytest.fixture(scope="class")
    @classmethod
    def batch(cls, model: Model) -> Batch:
        regions = root_and_cells(model)
        sides = [model.view_size_of(region) for region in regions]
        views = [noise(cls.case.bands, side, side, seed=i) for i, side in enumerate(sides)]
        return Batch(views, regions, encode(model, views, regions))

    def losses(self, model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return a loss of the label, and one of the attention."""
        out = encode(model, batch.views, batch.regions)
        logits = model.aggregate(out.features.unsqueeze(0), *unmasked(3)).logits
        where = -out.cell_logits[..., 0].log_softmax(dim=1)[:, 0].sum()
        return functional.cross_entropy(logits, torch.tensor([1])), where

    def test_outputs_have_the_documented_shapes(self, model: Model, batch: Batch) -> None:
        classes, size = self.case.classes, model.feature_size
        assert batch.out.features.shape == (3, size)
        assert batch.out.cell_logits.shape == (3, model.grid.rows * model.grid.columns, 1)
        assert (batch.out.cell_logits < torch.inf).all()  # False for NaN
        found = model.aggregate(batch.out.features.unsqueeze(0), *unmasked(3))
        assert (found.logits.shape, found.weights.shape) == ((1, classes), (1, 3))
        assert found.embedding.shape == (1, size)
        shapes = {"whole": (1, classes), "regions": (1, classes), "instances": (1, 3, classes)}
        assert all(part.shape == shapes[name] for name, part in found.parts.items())
        outputs = (batch.out.features, *batch.out.aux.values(), *found[:3], *found.parts.values())
        assert all(part.isfinite().all() for part in outputs)
        for leading, level in (((), 1), ((2, 5), 2)):
            levels = torch.full(leading, level)
            assert model.classify(noise(*leading, size), levels).shape == (*leading, classes)

    def test_a_constant_view_gives_no_nan(self, model: Model, batch: Batch) -> None:
        out = encode(model, [torch.zeros_like(view) for view in batch.views], batch.regions)
        assert all(part.isfinite().all() for part in (out.features, *out.aux.values()))
        assert (out.cell_logits < torch.inf).all()

    def test_glimpses_lie_inside_their_view(self, model: Model, batch: Batch) -> None:
        glimpses = getattr(model.config, "glimpses", None)
        assert ("glimpse_boxes" in batch.out.aux) == (glimpses is not None)
        if glimpses is not None:
            boxes, features = batch.out.aux["glimpse_boxes"], batch.out.aux["glimpse_features"]
            assert boxes.shape == (3, glimpses, 4)
            assert features.shape == (3, glimpses, model.feature_size)
            assert ((boxes >= 0) & (boxes <= 1)).all()
            assert (boxes[..., :2] < boxes[..., 2:]).all()

    def test_features_follow_from_what_replay_stores(self, model: Model, batch: Batch) -> None:
        assert ("pooled" in batch.out.aux) == model.config.replays
        if model.config.replays:
            positions = torch.tensor([region.position for region in batch.regions])
            assert_close(model.embed(batch.out.aux["pooled"], positions), batch.out.features)

    def test_every_cell_is_proposed(self, model: Model, batch: Batch) -> None:
        probabilities = proposed(model, encode(model, batch.views, batch.regions))
        assert (probabilities > 0).all()
        assert probabilities.sum(dim=1).tolist() == pytest.approx([1] * 3)

    def test_encoding_is_repeatable(self, model: Model, batch: Batch) -> None:
        before = {key: value.clone() for key, value in model.state_dict().items()}
        assert_same(encode(model, batch.views, batch.regions), batch.out)
        assert all(torch.equal(before[key], each) for key, each in model.state_dict().items())
        whole, position = batch.views[0].unsqueeze(0), torch.tensor([ROOT.position])
        scored, bare = (model.encoder(1)(whole, position, each) for each in (True, False))
        assert torch.equal(bare.features, scored.features)
        assert bare.cell_logits.shape == scored.cell_logits.shape

    def test_weights_follow_the_seed_and_are_saved(self, model: Model, batch: Batch) -> None:
        mine, same, other = model.state_dict(), self.build(0).state_dict(), self.build(1)
        assert all(torch.equal(mine[key], same[key]) for key in mine)
        assert not all(torch.equal(mine[key], each) for key, each in other.state_dict().items())
        other.load_state_dict(safetensors.torch.load(safetensors.torch.save(mine)), strict=True)
        with torch.no_grad():
            assert_same(encode(other, batch.views, batch.regions), batch.out)
        text = model.config.model_dump_json()
        assert read_model_config(self.case.family, json.loads(text)) == model.config

    def test_a_view_does_not_depend_on_its_batch(self, model: Model, batch: Batch) -> None:
        for index, (view, region) in enumerate(zip(batch.views, batch.regions, strict=True)):
            others = [torch.full_like(view, 3.0), noise(*view.shape, seed=9)]
            last = view[None].to(memory_format=torch.channels_last)[0]
            for mixed in ([view], [others[0], last, others[1]]):
                out = encode(model, mixed, [region] * len(mixed))
                row = len(mixed) // 2
                assert_close(out.features[row], batch.out.features[index])
                assert_close(relative(out)[row], relative(batch.out)[index])

    def test_images_are_aggregated_alone_and_in_any_order(self, model: Model) -> None:
        features = noise(4, 5, model.feature_size)
        mask, levels = (each.expand(4, 5) for each in unmasked(5))
        together = model.aggregate(features, mask, levels)
        assert (together.weights >= 0).all()
        assert together.weights.sum(dim=1).tolist() == pytest.approx([1] * 4)
        order = torch.tensor([3, 0, 4, 2, 1])
        for i in range(4):
            alone = model.aggregate(features[i : i + 1, order], mask[:1], levels[:1, order])
            assert_close(alone.logits[0], together.logits[i])
            assert_close(alone.weights[0], together.weights[i, order])

    def test_one_region_is_classified_as_alone(self, model: Model, batch: Batch) -> None:
        alone = batch.out.features[:1]
        found = model.aggregate(alone.unsqueeze(0), *unmasked(1))
        assert_close(found.logits, model.classify(alone, torch.ones(1, dtype=torch.long)))
        assert torch.equal(found.weights, torch.ones(1, 1))

    def test_masked_features_change_neither_output_nor_gradient(self, learner: Model) -> None:
        learner.eval()
        plain = learner.aggregate(noise(1, 2, learner.feature_size), *unmasked(2))
        garbage = torch.tensor([torch.nan, 0, 0, torch.inf, 1e30])
        padded = garbage[None, :, None].repeat(1, 1, learner.feature_size)
        padded[0, 1:3] = noise(1, 2, learner.feature_size)
        padded.requires_grad_(True)
        mask = torch.tensor([[False, True, True, False, False]])
        found = learner.aggregate(padded, mask, torch.tensor([[2, 1, 2, 1, 0]]))
        assert_close(found.logits, plain.logits)
        assert_close(found.weights[mask], plain.weights[0])
        assert not found.weights[~mask].any()
        assert not found.weights.requires_grad
        torch.autograd.backward(functional.cross_entropy(found.logits, torch.tensor([1])))
        assert padded.grad is not None
        assert padded.grad[mask].any()
        assert not padded.grad[~mask].any()
        gradients = [each.grad for each in learner.parameters() if each.grad is not None]
        assert all(each.isfinite().all() for each in gradients)

    def test_labels_and_attention_train_different_parts_and_together_all(
        self, learner: Model, batch: Batch
    ) -> None:
        labels, where = self.losses(learner, batch)
        expected = {name for name, _ in learner.named_parameters()} - self.case.never_learned
        assert self.case.never_learned <= dict(learner.named_parameters()).keys()
        parts = {name.split(".")[0] for name in expected}
        torch.autograd.backward(labels, retain_graph=True)
        assert learned_parts(learner) == parts - {"location"}
        assert where.requires_grad == hasattr(learner, "location")
        labelled = learned(learner)
        learner.zero_grad()
        if where.requires_grad:
            torch.autograd.backward(where)
        assert learned_parts(learner) == parts & {"location"}
        assert expected <= labelled | learned(learner)

    def test_any_number_of_bands_is_encoded(self) -> None:
        model = self.build(bands=1)
        with torch.no_grad():
            out = encode(model, noise(1, 1, model.view_size, model.view_size), [ROOT])
        assert out.features.isfinite().all()
