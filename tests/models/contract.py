"""What every model promises, as tests that the test class of a family and backbone inherits.

class TestTNetOfResNet(ModelContract):
    case = Case("tnet", {"backbone": "resnet18", "view_size": 64})
"""

import copy
import json
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.encoding import encode
from tnetcli.geometry import Region, Window
from tnetcli.models.base import EncoderOutput, Model
from tnetcli.models.registry import build_model, read_model_config
from tnetcli.traversal.policies import TopK

GARBAGE = [torch.nan, torch.inf, -torch.inf, 1e30]
ROOT = Region(Window(0, 0, 4000, 3000))


def root_and_cells(model: Model, count: int = 3) -> list[Region]:
    """Return `count` regions: the whole image, then its last cells."""
    cells = list(model.grid.cells())[::-1]
    children = [ROOT.child(model.grid, *cells[i % len(cells)]) for i in range(count - 1)]
    return [ROOT, *children]


def noise(*shape: int, seed: int = 0) -> Tensor:
    """Return the same noise every time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unmasked(count: int) -> tuple[Tensor, Tensor]:
    """Return mask and levels of one image: the whole, then regions of level 2."""
    return torch.ones(1, count, dtype=torch.bool), torch.arange(count).clamp(max=1)[None] + 1


def attention(out: EncoderOutput) -> Tensor:
    """Return the softmax over places of the cell logits' first channel (n, places)."""
    return out.cell_logits[..., 0].softmax(dim=1)


def scores(out: EncoderOutput) -> Tensor:
    """Return the cell logits below the best of each view, as a common offset says nothing.

    It does differ where all cells are alike: then it is rounding, scaled up to a norm of 1.
    """
    finite = out.cell_logits.clamp(min=-1e9)
    return finite - finite.amax(dim=1, keepdim=True)


def proposed(model: Model, out: EncoderOutput) -> list[Any]:
    """Return the probabilities (places,) of each view's cells that policies choose by."""
    aux = {name: value.detach().numpy() for name, value in out.aux.items()}
    logits = model.propose(out.cell_logits.detach().numpy(), aux)
    return [TopK().probabilities(ROOT, each.astype(float)) for each in logits]


def learned_parts(model: nn.Module) -> set[str]:
    """Return the parts of a model, by attribute, in which something got a gradient."""
    return {
        name.split(".")[0]
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and parameter.grad.any()
    }


@dataclass(frozen=True)
class Case:
    """What to build; `never_learned` names the parameters that no loss can reach."""

    family: str
    config: dict[str, Any]
    classes: int = 3
    bands: int = 3
    never_learned: Set[str] = frozenset()


class ModelContract:
    """Inherit, and say what to build; every test here is a promise."""

    case: Case

    @classmethod
    def build(cls, seed: int = 0, bands: int | None = None) -> Model:
        torch.manual_seed(seed)
        case = cls.case
        bands = bands or case.bands
        return build_model(case.family, case.config, classes=case.classes, bands=bands).eval()

    @pytest.fixture(scope="class")
    @classmethod
    def model(cls) -> Model:
        """Return a model that tests share and leave as it is."""
        return cls.build().requires_grad_(False)

    @pytest.fixture
    def learner(self, model: Model) -> Model:
        """Return a copy that may be trained."""
        learner = copy.deepcopy(model)
        for parameter in learner.parameters():
            if not parameter.any():  # else what a ResNet starts by adding 0 times learns nothing
                parameter.fill_(0.1)
        return learner.requires_grad_(True).train()

    @pytest.fixture(scope="class")
    @classmethod
    def regions(cls, model: Model) -> list[Region]:
        return root_and_cells(model)

    @pytest.fixture(scope="class")
    @classmethod
    def views(cls, model: Model, regions: list[Region]) -> list[Tensor]:
        sides = [model.view_size_of(region) for region in regions]
        return [noise(cls.case.bands, side, side, seed=i) for i, side in enumerate(sides)]

    @pytest.fixture(scope="class")
    @classmethod
    def encoded(cls, model: Model, views: list[Tensor], regions: list[Region]) -> EncoderOutput:
        return encode(model, views, regions)

    def learn(
        self, model: Model, views: list[Tensor], regions: list[Region]
    ) -> tuple[Tensor, Tensor]:
        """Return the losses by which a model learns what it encodes, and where to look."""
        out = encode(model, views, regions)
        logits = model.aggregate(out.features.unsqueeze(0), *unmasked(3)).logits
        where = -out.cell_logits[..., 0].log_softmax(dim=1)[:, 0].sum()
        return functional.cross_entropy(logits, torch.tensor([1])), where

    def test_features_do_not_depend_on_whether_cells_are_scored(self, model, views):
        whole, position = views[0].unsqueeze(0), torch.tensor([ROOT.position])
        scored = model.encoder(1)(whole, position)
        bare = model.encoder(1)(whole, position, False)
        assert torch.equal(bare.features, scored.features)
        assert bare.cell_logits.shape == scored.cell_logits.shape

    def test_an_encoder_gives_features_and_logits_of_every_cell(self, model, encoded):
        places = model.grid.rows * model.grid.columns
        assert encoded.features.shape == (3, model.feature_size)
        assert encoded.cell_logits.shape == (3, places, 1)

    def test_an_aggregate_gives_one_logit_a_class_and_one_weight_a_region(self, model):
        features = noise(2, 3, model.feature_size)
        mask, levels = (each.expand(2, 3) for each in unmasked(3))
        logits, weights, embedding, parts = model.aggregate(features, mask, levels)
        classes = self.case.classes
        assert (logits.shape, weights.shape) == ((2, classes), (2, 3))
        assert embedding.shape == (2, model.feature_size)
        shapes = {"whole": (2, classes), "regions": (2, classes), "instances": (2, 3, classes)}
        assert all(part.shape == shapes[name] for name, part in parts.items())

    @pytest.mark.parametrize("leading", [(), (3,), (2, 5)])
    def test_single_features_are_classified_whatever_shape_they_come_in(self, model, leading):
        features = noise(*leading, model.feature_size)
        levels = torch.ones(leading, dtype=torch.long)
        for level in (levels, 2 * levels):
            assert model.classify(features, level).shape == (*leading, self.case.classes)

    def test_all_outputs_are_finite(self, model, encoded):
        logits, weights, embedding, parts = model.aggregate(
            encoded.features.unsqueeze(0), *unmasked(3)
        )
        outputs = (encoded.features, *encoded.aux.values(), logits, weights, embedding)
        assert all(part.isfinite().all() for part in (*outputs, *parts.values()))
        assert (encoded.cell_logits < torch.inf).all()  # NaN is not

    @pytest.mark.parametrize("index", [0, 1])
    def test_a_blank_view_is_encoded_without_nan(self, model, views, regions, index):
        out = encode(model, [torch.zeros_like(views[index])], [regions[index]])
        assert all(part.isfinite().all() for part in (out.features, *out.aux.values()))
        assert (out.cell_logits < torch.inf).all()

    def test_glimpses_lie_inside_of_their_view(self, model, encoded):
        if not hasattr(model.config, "glimpses"):
            assert not {"glimpse_boxes", "glimpse_features"} & encoded.aux.keys()
            return
        boxes, features = encoded.aux["glimpse_boxes"], encoded.aux["glimpse_features"]
        assert boxes.shape == (3, model.config.glimpses, 4)
        assert features.shape == (3, model.config.glimpses, model.feature_size)
        assert ((boxes >= 0) & (boxes <= 1)).all()
        assert (boxes[..., :2] < boxes[..., 2:]).all()

    def test_features_follow_from_what_is_kept_for_replay(self, model, encoded, regions):
        assert ("pooled" in encoded.aux) == model.config.replays
        if model.config.replays:
            positions = torch.tensor([region.position for region in regions])
            again = model.embed(encoded.aux["pooled"], positions)
            self.assert_close(again, encoded.features)

    def test_every_cell_is_proposed_with_a_probability(self, model, encoded):
        for probabilities in proposed(model, encoded):
            assert (probabilities > 0).all()
            assert probabilities.sum() == pytest.approx(1)

    def test_the_weights_of_an_image_sum_to_1(self, model, encoded):
        weights = model.aggregate(encoded.features.unsqueeze(0), *unmasked(3)).weights
        assert (weights > 0).all()
        torch.testing.assert_close(weights.sum(), torch.tensor(1.0))

    def test_encoding_twice_gives_the_same(self, model, views, regions, encoded):
        again = encode(model, views, regions)
        assert torch.equal(again.features, encoded.features)
        assert torch.equal(again.cell_logits, encoded.cell_logits)

    def test_encoding_leaves_the_model_as_it_was(self, model, views, regions):
        before = {key: value.clone() for key, value in model.state_dict().items()}
        encode(model, views, regions)
        after = model.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)

    def test_the_same_seed_builds_the_same_weights_and_another_seed_others(self, model):
        same, other = self.build(0).state_dict(), self.build(1).state_dict()
        mine = model.state_dict()
        assert all(torch.equal(mine[key], same[key]) for key in mine)
        assert not all(torch.equal(mine[key], other[key]) for key in mine)

    def test_weights_that_were_saved_and_loaded_give_equal_output(
        self, model, views, regions, encoded
    ):
        saved = safetensors.torch.save(model.state_dict())
        other = self.build(seed=1)
        other.load_state_dict(safetensors.torch.load(saved), strict=True)
        features = encoded.features.unsqueeze(0)
        with torch.no_grad():
            again = encode(other, views, regions)
            logits = other.aggregate(features, *unmasked(3)).logits
        assert torch.equal(again.features, encoded.features)
        assert torch.equal(again.cell_logits, encoded.cell_logits)
        assert torch.equal(logits, model.aggregate(features, *unmasked(3)).logits)

    def test_arguments_come_back_from_json(self, model):
        text = model.config.model_dump_json()
        assert read_model_config(self.case.family, json.loads(text)) == model.config

    def test_a_view_is_encoded_the_same_whatever_else_is_in_the_batch(
        self, model, views, regions, encoded
    ):
        for index, region in enumerate(regions):
            others = [torch.full_like(views[index], 3.0), noise(*views[index].shape, seed=9)]
            for batch in ([views[index]], [others[0], views[index], others[1]]):
                out = encode(model, batch, [region] * len(batch))
                row = len(batch) // 2
                self.assert_close(out.features[row], encoded.features[index])
                self.assert_close(scores(out)[row], scores(encoded)[index])

    def test_views_with_channels_last_are_encoded_the_same(self, model, views, regions, encoded):
        last = [view[None].to(memory_format=torch.channels_last)[0] for view in views]
        again = encode(model, last, regions)
        self.assert_close(again.features, encoded.features)
        self.assert_close(scores(again), scores(encoded))

    def test_images_are_aggregated_alone_as_in_a_batch(self, model):
        features = noise(4, 3, model.feature_size)
        mask, levels = (each.expand(4, 3) for each in unmasked(3))
        together = model.aggregate(features, mask, levels)
        for index in range(4):
            alone = model.aggregate(features[index : index + 1], mask[:1], levels[:1])
            self.assert_close(alone.logits[0], together.logits[index])
            self.assert_close(alone.weights[0], together.weights[index])

    @pytest.mark.parametrize("garbage", GARBAGE)
    @pytest.mark.parametrize("count", [1, 2, 7])
    def test_masked_features_change_nothing_whatever_they_hold(self, model, count, garbage):
        features = noise(1, count, model.feature_size)
        plain = model.aggregate(features, *unmasked(count))
        padded = torch.full((2, 9, model.feature_size), garbage)
        mask, levels = torch.zeros(2, 9, dtype=torch.bool), torch.arange(18).view(2, 9) % 3
        places = torch.arange(count) + 1  # something masked on both sides
        padded[0, places], mask[0, places] = features[0], True
        padded[1, 0], mask[1, 0] = features[0, 0], True
        levels[0, places] = unmasked(count)[1][0]
        levels[1, 0] = 1
        found = model.aggregate(padded, mask, levels)
        self.assert_close(found.logits[0], plain.logits[0])
        self.assert_close(found.embedding[0], plain.embedding[0])
        self.assert_close(found.weights[0, places], plain.weights[0])
        assert not found.weights[~mask].any()
        assert padded[~mask].isnan().all() or (padded[~mask] == garbage).all()

    @pytest.mark.parametrize("garbage", GARBAGE)
    def test_nothing_is_learned_from_masked_features(self, learner, garbage):
        features = torch.full((1, 4, learner.feature_size), garbage)
        features[0, :2] = noise(2, learner.feature_size)
        features.requires_grad_(True)
        mask = torch.tensor([[True, True, False, False]])
        logits = learner.aggregate(features, mask, unmasked(4)[1]).logits
        functional.cross_entropy(logits, torch.tensor([1])).backward()
        assert features.grad[0, :2].any()
        assert not features.grad[0, 2:].any()
        assert all(p.grad.isfinite().all() for p in learner.parameters() if p.grad is not None)

    def test_unread_evidence_is_refused(self, model):
        features, unread = noise(1, 2, model.feature_size), torch.zeros(1, self.case.classes + 1)
        with pytest.raises(ValueError, match="does not use unread evidence"):
            model.aggregate(features, *unmasked(2), unread)

    def test_one_level_is_enough(self, model, encoded):
        alone = encoded.features[:1]
        found = model.aggregate(alone.unsqueeze(0), *unmasked(1))
        self.assert_close(found.logits, model.classify(alone, torch.ones(1, dtype=torch.long)))
        assert torch.equal(found.weights, torch.ones(1, 1))

    def test_the_order_of_regions_does_not_change_the_aggregate(self, model):
        features = noise(1, 5, model.feature_size)
        order = torch.tensor([3, 0, 4, 2, 1])
        mask, levels = unmasked(5)
        one = model.aggregate(features, mask, levels)
        other = model.aggregate(features[:, order], mask, levels[:, order])
        self.assert_close(other.logits, one.logits)
        self.assert_close(other.weights, one.weights[:, order])

    def test_labels_teach_everything_but_where_to_look(self, learner, views, regions):
        labels, _ = self.learn(learner, views, regions)
        labels.backward()
        expected = {name.split(".")[0] for name, _ in learner.named_parameters()} - {"location"}
        assert learned_parts(learner) == expected

    def test_attention_teaches_where_to_look_and_nothing_else(self, learner, views, regions):
        _, where = self.learn(learner, views, regions)
        if not hasattr(learner, "location"):
            assert not where.requires_grad
            return
        where.backward()
        assert learned_parts(learner) == {"location"}

    def test_both_together_teach_every_parameter(self, learner, views, regions):
        labels, where = self.learn(learner, views, regions)
        (labels + where).backward()
        unlearned = {
            name
            for name, parameter in learner.named_parameters()
            if parameter.grad is None or not parameter.grad.any()
        }
        assert unlearned - self.case.never_learned == set()
        assert self.case.never_learned <= dict(learner.named_parameters()).keys()

    def test_the_weights_that_are_shown_are_not_learned_from(self, learner, encoded):
        found = learner.aggregate(encoded.features.unsqueeze(0), *unmasked(3))
        assert not found.weights.requires_grad

    @pytest.mark.parametrize("bands", [1, 5])
    def test_any_number_of_bands_is_encoded(self, bands):
        model = self.build(bands=bands)
        with torch.no_grad():
            out = encode(model, noise(1, bands, model.view_size, model.view_size), [ROOT])
        assert out.features.isfinite().all()

    def assert_close(self, actual, expected):
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * scale)
