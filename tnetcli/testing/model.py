"""The contract of models, as tests that a test class of a family inherits.

class TestTNetOnResNet(ModelContract):
    case = Case("tnet", {"backbone": "resnet18", "view_size": 64})
"""

import copy
import json
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

from tnetcli.geometry import Region, Window
from tnetcli.models.base import EncoderOutput, Model
from tnetcli.models.registry import build_model, read_model_config

GARBAGE = (torch.nan, torch.inf, 1e30)
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
    """Encode one view per region with the encoder of its level; rows follow `regions`.

    Views that share an encoder are one batch. Rows of `aux` are those that have the output.
    """
    encoders = {level: model.encoder(level) for level in sorted({r.level for r in regions})}
    rows: list[int] = []
    outputs: list[EncoderOutput] = []
    for encoder in dict.fromkeys(encoders.values()):
        own = [i for i, region in enumerate(regions) if encoders[region.level] is encoder]
        positions = torch.tensor([regions[i].position for i in own])
        outputs.append(encoder(torch.stack([views[i] for i in own]), positions))
        rows += own
    order = torch.tensor(rows).argsort()
    features = torch.cat([each.features for each in outputs])[order]
    cell_logits = torch.cat([each.cell_logits for each in outputs])[order]
    names = sorted({name for each in outputs for name in each.aux})
    aux = {name: torch.cat([o.aux[name] for o in outputs if name in o.aux]) for name in names}
    return EncoderOutput(features, cell_logits, aux)


def proposed(model: Model, out: EncoderOutput) -> Tensor:
    """Return the probabilities (n, places) of the cells that policies see, 0 where none is."""
    aux = {name: value.detach().numpy() for name, value in out.aux.items()}
    logits = torch.from_numpy(model.propose(out.cell_logits.detach().numpy(), aux))[..., 0]
    return logits.double().softmax(dim=1).nan_to_num(nan=0.0)


def relative(out: EncoderOutput) -> Tensor:
    """Return the cell logits relative to the best of each view, as a common offset is free."""
    finite = out.cell_logits.clamp(min=-1e9)
    return finite - finite.amax(dim=1, keepdim=True)


def learned_parts(model: nn.Module) -> set[str]:
    """Return the attributes of a model in which some parameter has a gradient."""
    return {
        name.split(".")[0]
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and parameter.grad.any()
    }


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Compare up to rounding, relative to the largest value."""
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * scale)


class ModelContract:
    """Promises of every model; subclasses set `case`."""

    case: Case

    @classmethod
    def build(cls, seed: int = 0, bands: int | None = None) -> Model:
        """Build the model of the case."""
        torch.manual_seed(seed)
        case, bands = cls.case, bands or cls.case.bands
        return build_model(case.family, case.config, classes=case.classes, bands=bands).eval()

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> Model:
        """Return a model that tests share and do not change."""
        return cls.build().requires_grad_(False)

    @pytest.fixture
    def learner(self, model: Model) -> Model:
        """Return a copy that may be trained; zeros, such as gains of residuals, become 0.1."""
        learner = copy.deepcopy(model)
        for parameter in learner.parameters():
            if not parameter.any():
                parameter.fill_(0.1)
        return learner.requires_grad_(True).train()

    @pytest.fixture(scope="class")
    @classmethod
    def regions(cls, model: Model) -> list[Region]:
        """Return the whole image and two cells."""
        return root_and_cells(model)

    @pytest.fixture(scope="class")
    @classmethod
    def views(cls, model: Model, regions: list[Region]) -> list[Tensor]:
        """Return one view per region."""
        sides = [model.view_size_of(region) for region in regions]
        return [noise(cls.case.bands, side, side, seed=i) for i, side in enumerate(sides)]

    @pytest.fixture(scope="class")
    @classmethod
    def encoded(cls, model: Model, views: list[Tensor], regions: list[Region]) -> EncoderOutput:
        """Return the output of the encoders for all views."""
        return encode(model, views, regions)

    def losses(
        self, model: Model, views: list[Tensor], regions: list[Region]
    ) -> tuple[Tensor, Tensor]:
        """Return a loss of the label, and one of the attention."""
        out = encode(model, views, regions)
        logits = model.aggregate(out.features.unsqueeze(0), *unmasked(3)).logits
        where = -out.cell_logits[..., 0].log_softmax(dim=1)[:, 0].sum()
        return functional.cross_entropy(logits, torch.tensor([1])), where

    def test_shapes(self, model, views, encoded):  # type: ignore[no-untyped-def]
        """Encoders and aggregators return the documented shapes, all finite."""
        classes, size = self.case.classes, model.feature_size
        assert encoded.features.shape == (3, size)
        assert encoded.cell_logits.shape == (3, model.grid.rows * model.grid.columns, 1)
        assert (encoded.cell_logits < torch.inf).all()  # False for NaN
        found = model.aggregate(encoded.features.unsqueeze(0), *unmasked(3))
        assert (found.logits.shape, found.weights.shape) == ((1, classes), (1, 3))
        assert found.embedding.shape == (1, size)
        shapes = {"whole": (1, classes), "regions": (1, classes), "instances": (1, 3, classes)}
        assert all(part.shape == shapes[name] for name, part in found.parts.items())
        outputs = (encoded.features, *encoded.aux.values(), *found[:3], *found.parts.values())
        assert all(part.isfinite().all() for part in outputs)
        for leading in ((), (2, 5)):
            levels = torch.ones(leading, dtype=torch.long)
            for level in (levels, 2 * levels):
                logits = model.classify(noise(*leading, size), level)
                assert logits.shape == (*leading, classes)

    def test_features_do_not_depend_on_scoring(self, model, views):  # type: ignore[no-untyped-def]
        """Without `score_cells` features and shapes are the same."""
        whole, position = views[0].unsqueeze(0), torch.tensor([ROOT.position])
        scored, bare = (model.encoder(1)(whole, position, each) for each in (True, False))
        assert torch.equal(bare.features, scored.features)
        assert bare.cell_logits.shape == scored.cell_logits.shape

    def test_blank_views(self, model, views, regions):  # type: ignore[no-untyped-def]
        """A constant view gives no NaN."""
        out = encode(model, [torch.zeros_like(view) for view in views], regions)
        assert all(part.isfinite().all() for part in (out.features, *out.aux.values()))
        assert (out.cell_logits < torch.inf).all()

    def test_aux(self, model, encoded, regions):  # type: ignore[no-untyped-def]
        """Glimpses lie inside their view; features follow from what replay stores."""
        glimpses = getattr(model.config, "glimpses", None)
        assert ("glimpse_boxes" in encoded.aux) == (glimpses is not None)
        if glimpses is not None:
            boxes, features = encoded.aux["glimpse_boxes"], encoded.aux["glimpse_features"]
            assert boxes.shape == (3, glimpses, 4)
            assert features.shape == (3, glimpses, model.feature_size)
            assert ((boxes >= 0) & (boxes <= 1)).all()
            assert (boxes[..., :2] < boxes[..., 2:]).all()
        assert ("pooled" in encoded.aux) == model.config.replays
        if model.config.replays:
            positions = torch.tensor([region.position for region in regions])
            assert_close(model.embed(encoded.aux["pooled"], positions), encoded.features)

    def test_proposals(self, model, encoded):  # type: ignore[no-untyped-def]
        """Every cell is proposed."""
        probabilities = proposed(model, encoded)
        assert (probabilities > 0).all()
        assert probabilities.sum(dim=1).tolist() == pytest.approx([1] * 3)

    def test_determinism(self, model, views, regions, encoded):  # type: ignore[no-untyped-def]
        """The same seed builds the same weights; encoding is repeatable and changes nothing."""
        before = {key: value.clone() for key, value in model.state_dict().items()}
        again = encode(model, views, regions)
        assert torch.equal(again.features, encoded.features)
        assert torch.equal(again.cell_logits, encoded.cell_logits)
        same, other, mine = self.build(0).state_dict(), self.build(1).state_dict(), model
        for key, value in mine.state_dict().items():
            assert torch.equal(value, before[key])
            assert torch.equal(value, same[key])
        assert not all(torch.equal(before[key], other[key]) for key in before)

    def test_round_trip(self, model, views, regions, encoded):  # type: ignore[no-untyped-def]
        """Weights and configuration survive saving and loading."""
        other = self.build(seed=1)
        saved = safetensors.torch.save(model.state_dict())
        other.load_state_dict(safetensors.torch.load(saved), strict=True)
        with torch.no_grad():
            again = encode(other, views, regions)
        assert torch.equal(again.features, encoded.features)
        assert torch.equal(again.cell_logits, encoded.cell_logits)
        text = model.config.model_dump_json()
        assert read_model_config(self.case.family, json.loads(text)) == model.config

    def test_batches(self, model, views, regions, encoded):  # type: ignore[no-untyped-def]
        """A view's output does not depend on its batch or memory layout."""
        for index, region in enumerate(regions):
            others = [torch.full_like(views[index], 3.0), noise(*views[index].shape, seed=9)]
            last = views[index][None].to(memory_format=torch.channels_last)[0]
            for batch in ([views[index]], [others[0], last, others[1]]):
                out = encode(model, batch, [region] * len(batch))
                row = len(batch) // 2
                assert_close(out.features[row], encoded.features[index])
                assert_close(relative(out)[row], relative(encoded)[index])

    def test_aggregation(self, model):  # type: ignore[no-untyped-def]
        """Images are independent, order does not matter, weights sum to 1."""
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

    def test_one_level(self, model, encoded):  # type: ignore[no-untyped-def]
        """One region is classified as it is alone."""
        alone = encoded.features[:1]
        found = model.aggregate(alone.unsqueeze(0), *unmasked(1))
        assert_close(found.logits, model.classify(alone, torch.ones(1, dtype=torch.long)))
        assert torch.equal(found.weights, torch.ones(1, 1))

    @pytest.mark.parametrize("garbage", GARBAGE)
    def test_masked_features(self, learner, garbage):  # type: ignore[no-untyped-def]
        """Masked features change neither the output nor any gradient, whatever they hold."""
        learner.eval()
        plain = learner.aggregate(noise(1, 2, learner.feature_size), *unmasked(2))
        padded = torch.full((1, 5, learner.feature_size), garbage)
        padded[0, 1:3] = noise(1, 2, learner.feature_size)
        padded.requires_grad_(True)
        mask = torch.tensor([[False, True, True, False, False]])
        found = learner.aggregate(padded, mask, torch.tensor([[2, 1, 2, 1, 0]]))
        assert_close(found.logits, plain.logits)
        assert_close(found.weights[mask], plain.weights[0])
        assert not found.weights[~mask].any()
        assert not found.weights.requires_grad
        functional.cross_entropy(found.logits, torch.tensor([1])).backward()  # type: ignore[no-untyped-call]
        assert padded.grad is not None
        assert padded.grad[0, 1:3].any()
        assert not padded.grad[~mask].any()
        gradients = [each.grad for each in learner.parameters() if each.grad is not None]
        assert all(each.isfinite().all() for each in gradients)

    def test_labels_do_not_train_attention(self, learner, views, regions):  # type: ignore[no-untyped-def]
        """The label trains all parts but the location module."""
        self.losses(learner, views, regions)[0].backward()  # type: ignore[no-untyped-call]
        parts = {name.split(".")[0] for name, _ in learner.named_parameters()}
        assert learned_parts(learner) == parts - {"location"}

    def test_attention_trains_itself_only(self, learner, views, regions):  # type: ignore[no-untyped-def]
        """The attention trains the location module, if there is one."""
        where = self.losses(learner, views, regions)[1]
        if not hasattr(learner, "location"):
            assert not where.requires_grad
            return
        where.backward()  # type: ignore[no-untyped-call]
        assert learned_parts(learner) == {"location"}

    def test_all_parameters_learn(self, learner, views, regions):  # type: ignore[no-untyped-def]
        """Both losses together reach every parameter."""
        sum(self.losses(learner, views, regions)).backward()  # type: ignore[union-attr]
        unlearned = {
            name
            for name, parameter in learner.named_parameters()
            if parameter.grad is None or not parameter.grad.any()
        }
        assert unlearned - self.case.never_learned == set()
        assert self.case.never_learned <= dict(learner.named_parameters()).keys()

    @pytest.mark.parametrize("bands", [1, 5])
    def test_bands(self, bands: int) -> None:
        """Any number of bands is encoded."""
        model = self.build(bands=bands)
        with torch.no_grad():
            out = encode(model, noise(1, bands, model.view_size, model.view_size), [ROOT])
        assert out.features.isfinite().all()
