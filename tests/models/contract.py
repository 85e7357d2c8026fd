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

from tnetcli.geometry import Region, Window
from tnetcli.models.base import Looked, Model
from tnetcli.models.registry import build_model, read_arguments

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


def everywhere(count: int) -> Tensor:
    """Return that all of one image's regions are present."""
    return torch.ones(1, count, dtype=torch.bool)


def learned_parts(model: nn.Module) -> set[str]:
    """Return the parts of a model, by attribute, in which something got a gradient."""
    return {
        name.split(".")[0]
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and parameter.grad.any()
    }


def tensors_of(looked: Looked) -> list[Tensor]:
    """Return all that was seen."""
    return [part for part in (*looked[:3], *(looked.within or ())) if part is not None]


@dataclass(frozen=True)
class Case:
    """What to build; `never_learned` names the parameters that no loss can reach."""

    family: str
    arguments: dict[str, Any]
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
        return build_model(case.family, case.arguments, classes=case.classes, bands=bands).eval()

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
    def views(cls) -> Tensor:
        side = read_arguments(cls.case.family, cls.case.arguments).view_size
        return noise(3, cls.case.bands, side, side)

    @pytest.fixture(scope="class")
    @classmethod
    def looked(cls, model: Model, views: Tensor) -> Looked:
        return model.look(views, root_and_cells(model))

    def learn(self, model: Model, views: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses by which a model learns what it sees, and where to look."""
        looked = model.look(views, root_and_cells(model))
        conclusion = model.conclude(looked.features.unsqueeze(0), everywhere(3))
        assert looked.attention is not None
        where = -looked.attention[:, 0, 0].log().sum()
        return functional.cross_entropy(conclusion.scores, torch.tensor([1])), where

    def test_a_look_gives_one_feature_vector_and_one_grid_of_attention_a_region(
        self, model, looked
    ):
        grid = model.grid
        assert looked.features.shape == (3, model.feature_size)
        assert looked.attention.shape == (3, grid.rows, grid.columns)

    def test_a_conclusion_gives_one_score_a_class_and_one_weight_a_region(self, model, looked):
        scores, weights, _ = model.conclude(looked.features.unsqueeze(0), everywhere(3))
        assert (scores.shape, weights.shape) == ((1, self.case.classes), (1, 3))

    @pytest.mark.parametrize("leading", [(), (3,), (2, 5)])
    def test_single_features_are_classified_whatever_shape_they_come_in(self, model, leading):
        features = noise(*leading, model.feature_size)
        assert model.classify(features).shape == (*leading, self.case.classes)

    def test_all_that_is_seen_is_finite(self, model, looked):
        conclusion = model.conclude(looked.features.unsqueeze(0), everywhere(3))
        assert all(part.isfinite().all() for part in (*tensors_of(looked), *conclusion))

    def test_a_blank_view_is_seen_without_nan(self, model, views):
        looked = model.look(torch.zeros_like(views[:1]), [ROOT])
        assert all(part.isfinite().all() for part in tensors_of(looked))

    def test_glimpses_lie_inside_of_their_view(self, model, looked):
        if looked.within is None:
            return  # it takes none
        boxes, features = looked.within
        assert boxes.shape == (3, model.arguments.glimpses, 4)
        assert features.shape == (3, model.arguments.glimpses, model.feature_size)
        assert ((boxes >= 0) & (boxes <= 1)).all()
        assert (boxes[..., :2] < boxes[..., 2:]).all()

    def test_the_attention_of_a_region_is_positive_and_sums_to_1(self, looked):
        assert (looked.attention > 0).all()
        torch.testing.assert_close(looked.attention.sum(dim=(1, 2)), torch.ones(3))

    def test_the_weights_of_an_image_sum_to_1(self, model, looked):
        _, weights, _ = model.conclude(looked.features.unsqueeze(0), everywhere(3))
        assert (weights > 0).all()
        torch.testing.assert_close(weights.sum(), torch.tensor(1.0))

    def test_cells_are_scored_only_if_asked_for(self, model, views, looked):
        again = model.look(views, root_and_cells(model), score_cells=False)
        assert again.attention is None
        assert torch.equal(again.features, looked.features)

    def test_looking_twice_gives_the_same(self, model, views, looked):
        again = model.look(views, root_and_cells(model))
        assert torch.equal(again.features, looked.features)
        assert torch.equal(again.attention, looked.attention)

    def test_looking_leaves_the_model_as_it_was(self, model, views):
        before = {key: value.clone() for key, value in model.state_dict().items()}
        model.look(views, root_and_cells(model))
        after = model.state_dict()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)

    def test_the_same_seed_builds_the_same_weights_and_another_seed_others(self, model):
        same, other = self.build(0).state_dict(), self.build(1).state_dict()
        mine = model.state_dict()
        assert all(torch.equal(mine[key], same[key]) for key in mine)
        assert not all(torch.equal(mine[key], other[key]) for key in mine)

    def test_weights_that_were_saved_and_loaded_give_equal_output(self, model, views, looked):
        saved = safetensors.torch.save(model.state_dict())
        other = self.build(seed=1)
        other.load_state_dict(safetensors.torch.load(saved), strict=True)
        with torch.no_grad():
            again = other.look(views, root_and_cells(model))
            features = again.features.unsqueeze(0)
            one = other.conclude(features, everywhere(3))
        two = model.conclude(features, everywhere(3))
        assert torch.equal(again.features, looked.features)
        assert torch.equal(again.attention, looked.attention)
        assert torch.equal(one.scores, two.scores)

    def test_arguments_come_back_from_json(self, model):
        text = model.arguments.model_dump_json()
        assert read_arguments(self.case.family, json.loads(text)) == model.arguments

    def test_views_are_seen_alone_as_in_a_batch(self, model, views, looked):
        regions = root_and_cells(model)
        for index, region in enumerate(regions):
            alone = model.look(views[index : index + 1], [region])
            self.assert_close(alone.features[0], looked.features[index])
            self.assert_close(alone.attention[0], looked.attention[index])

    def test_views_with_channels_last_are_seen_the_same(self, model, views, looked):
        last = views.to(memory_format=torch.channels_last)
        again = model.look(last, root_and_cells(model))
        self.assert_close(again.features, looked.features)
        self.assert_close(again.attention, looked.attention)

    def test_images_are_concluded_alone_as_in_a_batch(self, model):
        features = noise(4, 3, model.feature_size)
        present = torch.ones(4, 3, dtype=torch.bool)
        together = model.conclude(features, present)
        for index in range(4):
            alone = model.conclude(features[index : index + 1], present[:1])
            self.assert_close(alone.scores[0], together.scores[index])
            self.assert_close(alone.weights[0], together.weights[index])

    @pytest.mark.parametrize("garbage", GARBAGE)
    @pytest.mark.parametrize("count", [1, 2, 7])
    def test_what_is_absent_changes_nothing_whatever_it_holds(self, model, count, garbage):
        features = noise(1, count, model.feature_size)
        plain = model.conclude(features, everywhere(count))
        padded = torch.full((2, 9, model.feature_size), garbage)
        present = torch.zeros(2, 9, dtype=torch.bool)
        places = torch.arange(count) + 1  # something absent on both sides
        padded[0, places], present[0, places] = features[0], True
        padded[1, 0], present[1, 0] = features[0, 0], True
        conclusion = model.conclude(padded, present)
        self.assert_close(conclusion.scores[0], plain.scores[0])
        self.assert_close(conclusion.weights[0, places], plain.weights[0])
        assert not conclusion.weights[~present].any()

    @pytest.mark.parametrize("garbage", GARBAGE)
    def test_nothing_is_learned_from_what_is_absent(self, learner, garbage):
        features = torch.full((1, 4, learner.feature_size), garbage)
        features[0, :2] = noise(2, learner.feature_size)
        features.requires_grad_(True)
        present = torch.tensor([[True, True, False, False]])
        scores = learner.conclude(features, present).scores
        functional.cross_entropy(scores, torch.tensor([1])).backward()
        assert features.grad[0, :2].any()
        assert not features.grad[0, 2:].any()
        assert all(p.grad.isfinite().all() for p in learner.parameters() if p.grad is not None)

    def test_one_level_is_enough(self, model, looked):
        alone = looked.features[:1]
        scores, weights, _ = model.conclude(alone.unsqueeze(0), everywhere(1))
        self.assert_close(scores, model.classify(alone))
        assert torch.equal(weights, torch.ones(1, 1))

    def test_the_order_of_regions_does_not_change_the_conclusion(self, model):
        features = noise(1, 5, model.feature_size)
        order = torch.tensor([3, 0, 4, 2, 1])
        one = model.conclude(features, everywhere(5))
        other = model.conclude(features[:, order], everywhere(5))
        self.assert_close(other.scores, one.scores)
        self.assert_close(other.weights, one.weights[:, order])

    def test_labels_teach_everything_but_where_to_look(self, learner, views):
        labels, _ = self.learn(learner, views)
        labels.backward()
        expected = {name.split(".")[0] for name, _ in learner.named_parameters()} - {"location"}
        assert learned_parts(learner) == expected

    def test_attention_teaches_where_to_look_and_nothing_else(self, learner, views):
        _, where = self.learn(learner, views)
        if not hasattr(learner, "location"):
            assert not where.requires_grad
            return
        where.backward()
        assert learned_parts(learner) == {"location"}

    def test_both_together_teach_every_parameter(self, learner, views):
        labels, where = self.learn(learner, views)
        (labels + where).backward()
        unlearned = {
            name
            for name, parameter in learner.named_parameters()
            if parameter.grad is None or not parameter.grad.any()
        }
        assert unlearned - self.case.never_learned == set()
        assert self.case.never_learned <= dict(learner.named_parameters()).keys()

    def test_the_weights_that_are_shown_are_not_learned_from(self, learner, looked):
        conclusion = learner.conclude(looked.features.unsqueeze(0), everywhere(3))
        assert not conclusion.weights.requires_grad

    @pytest.mark.parametrize("bands", [1, 5])
    def test_any_number_of_bands_is_seen(self, bands):
        model = self.build(bands=bands)
        with torch.no_grad():
            looked = model.look(noise(1, bands, model.view_size, model.view_size), [ROOT])
        assert looked.features.isfinite().all()

    def assert_close(self, actual, expected):
        scale = max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * scale)
