import json
import subprocess
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
from pydantic import ValidationError
from torch.nn import functional

from tests.images import noise as image_noise
from tests.images import write_geotiff
from tests.models.contract import ROOT, everywhere, learned_parts, noise, tensors_of
from tnetcli.errors import ModelError
from tnetcli.geometry import Grid, Window
from tnetcli.looking import Looker
from tnetcli.models.counting import count_multiplications, count_parameters
from tnetcli.models.two_stream import TwoStream
from tnetcli.models.two_stream_arguments import TwoStreamArguments
from tnetcli.normalisation import Normalisation
from tnetcli.prediction import Prediction
from tnetcli.readers.open import open_image
from tnetcli.recording import Maker, record_sight
from tnetcli.training.choices import by_boxes, by_chance
from tnetcli.traversal import Plan
from tnetcli.visits import Told

SMALL = {"backbone": "compact", "view_size": 64, "state_size": 16, "step_count": 5}
PUBLISHED = {"backbone": "vgg19", "view_size": 448, "local_size": 224}
VGG19 = [64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512, 512, 512, 512, 0, 512, 512, 512, 512]
CELL = ROOT.child(Grid(3, 3, 0.5), 1, 2)


def build(seed=0, classes=4, **arguments):
    torch.manual_seed(seed)
    model = TwoStream(TwoStreamArguments(**SMALL | arguments), classes=classes)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def model():
    return build()


def published(**more):
    with torch.device("meta"):
        return TwoStream(TwoStreamArguments(**PUBLISHED | more), classes=200).eval()


def vgg19_multiplications(side):
    """Count by hand: 3 x 3 convolutions, 0 halves the side."""
    total, bands = 0, 3
    for channels in VGG19:
        if channels:
            total += 9 * bands * channels * side * side
            bands = channels
        else:
            side //= 2
    return total


class TestPublished:
    @pytest.mark.parametrize(
        ("more", "attention"),
        [({}, 512 * 10), ({"step_count": 4}, 512 * 4), ({"step_vectors": "shared"}, 513)],
    )
    def test_the_size_is_the_sum_of_its_published_parts(self, more, attention):
        heads = 2 * (512 * 200 + 200)
        expected = 2 * 20_024_384 + 4_202_496 + attention + heads
        found = count_parameters(published(**more))
        assert found.trainable == found.total == expected

    def test_it_is_about_44_million(self):
        assert count_parameters(published()).trainable == 44_461_584

    def test_two_more_convolutions_are_counted(self):
        more = 512 * 1024 + 1024 + 1024 * 1024 + 1024 + (1024 - 512) * 200
        assert count_parameters(published(widening=1024)).trainable == 44_461_584 + more

    def test_without_steps_only_the_networks_and_the_heads_are_left(self):
        parameters = count_parameters(published(steps="none")).trainable
        assert parameters == 2 * 20_024_384 + 2 * (512 * 200 + 200)

    def test_multiplications_are_those_of_the_layers(self):
        model = published()
        view = torch.empty(1, 3, 448, 448, device="meta")
        with count_multiplications(model) as whole:
            model.look(view, [ROOT])
        with count_multiplications(model) as near:
            model.look(view, [CELL])
        head = 512 * 200  # the class whose evidence is looked for
        assert whole.layers == vgg19_multiplications(448) + head
        recurrence = 2048 * 512 * (1 + 10) + 10 * 2 * 2048 * 512
        assert near.layers == vgg19_multiplications(224) + recurrence

    def test_both_streams_end_in_maps_of_their_own_size(self):
        model = published()
        assert model.global_stream.backbone.map_size == (512, 14, 14)
        assert model.local_stream.backbone.map_size == (512, 7, 7)


class TestLooking:
    def test_the_whole_is_seen_by_one_stream_and_windows_by_the_other(self, model):
        views = noise(2, 3, 64, 64)
        whole, near = (model.look(views, [region] * 2).features for region in (ROOT, CELL))
        vectors = model.global_stream(views)[1]
        thought = model.local_stream(views)
        torch.testing.assert_close(whole[:, 6 : 6 + 96], vectors)
        torch.testing.assert_close(near[:, 6 : 6 + 16], thought.vectors)
        assert not near[:, 6 + 16 :].any()
        assert not model.is_local(whole).any()
        assert model.is_local(near).all()
        assert not torch.equal(model.classify(whole), model.classify(near))

    def test_deeper_windows_are_seen_by_the_local_stream_too(self, model):
        views = noise(1, 3, 64, 64)
        deeper = CELL.child(model.grid, 0, 0)
        one, other = (model.look(views, [region]).features for region in (CELL, deeper))
        assert torch.equal(one, other)

    def test_streams_share_nothing(self, model):
        names = [
            {id(p) for p in part.parameters()} for part in (model.global_stream, model.local_stream)
        ]
        assert not names[0] & names[1]
        other = build()
        for parameter in other.local_stream.parameters():
            parameter.zero_()
        views = noise(1, 3, 64, 64)
        assert torch.equal(other.look(views, [ROOT]).features, model.look(views, [ROOT]).features)

    def test_levels_may_be_mixed_in_any_order(self, model):
        views, regions = noise(5, 3, 64, 64), [CELL, ROOT, CELL, CELL, ROOT]
        together = model.look(views, regions)
        for index, region in enumerate(regions):
            alone = model.look(views[index : index + 1], [region])
            torch.testing.assert_close(together.features[index], alone.features[0])
            torch.testing.assert_close(together.attention[index], alone.attention[0])

    @pytest.mark.parametrize(("size", "factor"), [(32, 2), (16, 4)])
    def test_the_local_stream_sees_the_mean_of_the_pixels_of_a_larger_view(self, size, factor):
        model, view = build(local_size=size), noise(1, 3, 64, 64)
        shrunk = np.zeros((1, 3, size, size), np.float32)
        for row in range(size):
            for column in range(size):
                rows = slice(factor * row, factor * (row + 1))
                columns = slice(factor * column, factor * (column + 1))
                shrunk[..., row, column] = view[:, :, rows, columns].mean(dim=(2, 3))
        assert model.smallest_view == size
        found = model.local_stream(view).vectors
        expected = model.local_stream(torch.from_numpy(shrunk)).vectors
        torch.testing.assert_close(found, expected)

    def test_a_view_that_is_as_large_as_asked_for_is_not_touched(self, model):
        view = noise(1, 3, 64, 64)
        assert torch.equal(model.local_stream.see(view), model.local_stream.backbone(view))

    def test_no_views_give_no_features(self, model):
        looked = model.look(torch.zeros(0, 3, 64, 64), [])
        assert looked.features.shape == (0, model.feature_size)
        assert looked.attention.shape == (0, 3, 3)

    @pytest.mark.parametrize("count", [1, 3])
    def test_views_without_a_region_each_are_refused(self, model, count):
        with pytest.raises(ValueError, match=f"{count} regions for 2 views"):
            model.look(noise(2, 3, 64, 64), [ROOT] * count)

    def test_double_precision_is_kept(self):
        model = build(self_attention=True, basis_channels=4).double()
        looked = model.look(noise(2, 3, 64, 64).double(), [ROOT, CELL])
        conclusion = model.conclude(looked.features.unsqueeze(0), everywhere(2))
        assert {part.dtype for part in (*tensors_of(looked), *conclusion)} == {torch.float64}

    def test_half_precision_is_kept_but_for_attention(self):
        model = build().bfloat16()
        looked = model.look(noise(2, 3, 64, 64).bfloat16(), [ROOT, CELL])
        scores = model.conclude(looked.features.unsqueeze(0), everywhere(2)).scores
        assert looked.features.dtype == scores.dtype == torch.bfloat16
        assert looked.attention.dtype == torch.float32

    def test_mixed_precision_keeps_the_streams_apart(self, model):
        with torch.autocast("cpu", torch.bfloat16):
            features = model.look(noise(2, 3, 64, 64), [ROOT, CELL]).features.float()
        assert model.is_local(features).tolist() == [False, True]
        assert model.step_shares(features)[1].sum().item() == pytest.approx(1, abs=0.02)


class TestPatches:
    def test_the_evidence_in_a_grid_of_one_cell_is_the_score_of_its_class(self):
        model = build(grid={"rows": 1, "columns": 1, "cell_fraction": 1.0})
        stream = model.global_stream
        seen, vectors = stream(noise(3, 3, 64, 64))
        scores = stream.classifier(vectors)
        best, label = scores.max(dim=1)
        evidence = stream.cell_evidence(seen, vectors)[:, 0, 0]
        torch.testing.assert_close(evidence + stream.classifier.bias[label], best)

    def test_the_evidence_of_cells_is_the_mean_class_activation_under_them(self):
        model = build(grid={"rows": 2, "columns": 2, "cell_fraction": 0.5})
        stream = model.global_stream
        seen, vectors = stream(noise(2, 3, 64, 64))
        assert seen.shape[2:] == (4, 4)
        found = stream.cell_evidence(seen, vectors)
        for view in range(2):
            label = int(stream.classifier(vectors[view]).argmax())
            activation = sum(
                weight * channel
                for weight, channel in zip(stream.classifier.weight[label], seen[view], strict=True)
            )
            for row in range(2):
                for column in range(2):
                    under = activation[2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
                    torch.testing.assert_close(found[view, row, column], under.mean())

    def test_with_maxima_the_evidence_is_the_score_of_the_cell_seen_alone(self):
        grid = {"rows": 2, "columns": 2, "cell_fraction": 0.5}
        stream = build(grid=grid, pooling="mean_max").global_stream
        seen, vectors = stream(noise(1, 3, 64, 64))
        label = int(stream.classifier(vectors).argmax())
        corner = stream.backbone.pool(seen[:, :, 2:, :2])
        expected = stream.classifier(corner)[0, label] - stream.classifier.bias[label]
        torch.testing.assert_close(stream.cell_evidence(seen, vectors)[0, 1, 0], expected)

    def test_cells_with_more_evidence_get_more_attention(self, model):
        views = noise(4, 3, 64, 64)
        evidence = model.global_stream.cell_evidence(*model.global_stream(views)).flatten(1)
        attention = model.look(views, [ROOT] * 4).attention.flatten(1)
        assert torch.equal(evidence.argsort(dim=1), attention.argsort(dim=1))

    def test_a_lower_temperature_is_sharper(self, model):
        views = noise(1, 3, 64, 64)
        sharp = build(temperature=0.1).look(views, [ROOT]).attention
        assert sharp.max() > model.look(views, [ROOT]).attention.max()

    def test_even_cells_are_all_alike(self):
        attention = build(patches="even").look(noise(2, 3, 64, 64), [ROOT] * 2).attention
        torch.testing.assert_close(attention, torch.full((2, 3, 3), 1 / 9))

    def test_windows_prefer_no_cell(self, model):
        attention = model.look(noise(1, 3, 64, 64), [CELL]).attention
        torch.testing.assert_close(attention, torch.full((1, 3, 3), 1 / 9))


class TestConclusion:
    def features(self, model, windows):
        views = noise(1 + windows, 3, 64, 64)
        return model.look(views, [ROOT, *[CELL] * windows]).features

    @pytest.mark.parametrize("local_weight", [1.0, 0.25, 3.0])
    @pytest.mark.parametrize("windows", [1, 4])
    def test_scores_are_added_by_their_weight(self, local_weight, windows):
        model = build(local_weight=local_weight)
        features = self.features(model, windows)
        scores, weights, _ = model.conclude(features.unsqueeze(0), everywhere(1 + windows))
        each = model.classify(features)
        expected = each[0] + local_weight * each[1:].mean(dim=0)
        torch.testing.assert_close(scores[0], expected)
        assert weights[0, 0].item() == pytest.approx(1 / (1 + local_weight))
        share = local_weight / (1 + local_weight) / windows
        assert weights[0, 1:].tolist() == pytest.approx([share] * windows)

    def test_without_windows_the_whole_answers(self, model):
        features = self.features(model, 2)
        present = torch.tensor([[True, False, False]])
        conclusion = model.conclude(features.unsqueeze(0), present)
        vectors = model.global_stream(noise(3, 3, 64, 64)[:1])[1]
        torch.testing.assert_close(conclusion.scores, model.global_stream.classifier(vectors))
        assert conclusion.weights.tolist() == [[1, 0, 0]]

    def test_without_the_whole_the_windows_answer(self):
        model = build(local_weight=0.25)
        features = self.features(model, 2)
        present = torch.tensor([[False, True, True]])
        conclusion = model.conclude(features.unsqueeze(0), present)
        torch.testing.assert_close(conclusion.scores[0], model.classify(features[1:]).mean(dim=0))
        assert conclusion.weights.tolist() == [[0, 0.5, 0.5]]

    def test_images_of_a_batch_may_have_other_windows(self, model):
        features = self.features(model, 2).expand(3, 3, -1)
        present = torch.tensor([[True, True, True], [True, False, False], [False, True, False]])
        together = model.conclude(features, present)
        for image in range(3):
            alone = model.conclude(features[:1], present[image : image + 1])
            torch.testing.assert_close(together.scores[image], alone.scores[0])
            torch.testing.assert_close(together.weights[image], alone.weights[0])

    def test_dropout_is_before_both_classifiers(self):
        model = build(dropout=0.5).train()
        features = torch.ones(2, model.feature_size)
        features[0, 0] = 0
        one, two = model.classify(features), model.classify(features)
        assert (one != two).any(dim=1).all()


class TestLearning:
    def learner(self, **more):
        return build(**more).requires_grad_(True).train()

    def lesson(self, model):
        features = model.look(noise(3, 3, 64, 64), [ROOT, CELL, CELL]).features
        return model.conclude(features.unsqueeze(0), everywhere(3)).scores

    def test_gradients_reach_both_streams(self):
        model = self.learner()
        functional.cross_entropy(self.lesson(model), torch.tensor([1])).backward()
        assert learned_parts(model) == {"global_stream", "local_stream"}
        for stream in (model.global_stream, model.local_stream):
            assert stream.backbone.net.to_map[0][0].weight.grad.any()
        assert model.local_stream.memory.layers[0].recall.weight.grad.any()
        assert model.local_stream.weigh.vectors.grad.any()

    @pytest.mark.parametrize(("region", "part"), [(ROOT, "global_stream"), (CELL, "local_stream")])
    def test_a_view_teaches_only_its_own_stream(self, region, part):
        model = self.learner()
        features = model.look(noise(2, 3, 64, 64), [region] * 2).features
        functional.cross_entropy(model.classify(features), torch.tensor([1, 0])).backward()
        assert learned_parts(model) == {part}


class TestSteps:
    """The ablations, all with the weights of one model."""

    view = noise(2, 3, 64, 64)

    def variant(self, model, **more):
        other = build(seed=1, **more)
        wanted = other.state_dict()
        other.load_state_dict({k: v for k, v in model.state_dict().items() if k in wanted})
        return other

    def outputs(self, model):
        """Return what each step says, by torch's own LSTM."""
        stream = model.local_stream
        x = stream.backbone.net(self.view)[1]
        lstm = torch.nn.LSTM(96, 16, 2, batch_first=True)
        for number, layer in enumerate(stream.memory.layers):
            for name, part in (("ih", layer.enter), ("hh", layer.recall)):
                getattr(lstm, f"weight_{name}_l{number}").data = part.weight
                getattr(lstm, f"bias_{name}_l{number}").data = part.bias
        return lstm(x.unsqueeze(1).expand(-1, 5, -1))[0].detach()

    def scores(self, model):
        return model.classify(model.look(self.view, [CELL] * 2).features)

    def test_attention_weighs_the_steps(self, model):
        outputs = self.outputs(model)
        vectors = model.local_stream.weigh.vectors
        shares = torch.einsum("rts,ts->rt", outputs, vectors).softmax(dim=1)
        features = model.look(self.view, [CELL] * 2).features
        torch.testing.assert_close(model.step_shares(features), shares)
        expected = model.local_stream.classifier(torch.einsum("rt,rts->rs", shares, outputs))
        torch.testing.assert_close(model.classify(features), expected)

    @pytest.mark.parametrize(
        ("more", "kept"),
        [
            ({"steps": "last"}, [4]),
            ({"steps": "single"}, [4]),
            ({"steps": "single", "last_step": 2}, [1]),
            ({"steps": "sum"}, [0, 1, 2, 3, 4]),
            ({"steps": "sum", "first_step": 2, "last_step": 3}, [1, 2]),
        ],
    )
    def test_other_steps_are_picked_or_summed(self, model, more, kept):
        other = self.variant(model, **more)
        expected = model.local_stream.classifier(self.outputs(model)[:, kept].sum(dim=1))
        torch.testing.assert_close(self.scores(other), expected)
        shares = other.step_shares(other.look(self.view, [CELL] * 2).features)
        assert shares.shape[1] == kept[-1] + 1  # no step is made that does not count
        assert [i for i, share in enumerate(shares[0]) if share] == kept

    def test_without_steps_the_mean_of_the_map_is_classified(self, model):
        other = build(seed=1, steps="none")
        other.local_stream.backbone.load_state_dict(model.local_stream.backbone.state_dict())
        vectors = model.local_stream.backbone.net(self.view)[1]
        torch.testing.assert_close(self.scores(other), other.local_stream.classifier(vectors))
        assert other.step_shares(other.look(self.view, [CELL] * 2).features) is None
        assert not hasattr(other.local_stream, "memory")

    def test_what_each_step_scores_is_kept_where_each_learns(self, model):
        other = self.variant(model, steps="last")
        features = other.look(self.view, [CELL] * 2).features
        scores = other.step_scores(features)
        torch.testing.assert_close(scores, other.local_stream.classifier(self.outputs(model)))
        torch.testing.assert_close(scores[:, -1], other.classify(features))
        assert other.step_scores(features.expand(3, 2, -1)).shape == (3, 2, 5, 4)
        assert model.step_scores(model.look(self.view, [CELL] * 2).features) is None

    def test_the_whole_image_has_no_steps(self, model):
        features = model.look(self.view, [ROOT] * 2).features
        assert not model.step_shares(features).any()

    def test_shares_of_windows_sum_to_1(self, model):
        shares = model.step_shares(model.look(self.view, [CELL] * 2).features)
        torch.testing.assert_close(shares.sum(dim=1), torch.ones(2))
        assert (shares > 0).all()


class TestWalking:
    """The family inside the walk that all families share."""

    unit = Normalisation.to_unit_range("uint8", 3)
    plan = Plan(levels=3, keep=(2,), least_side=32.0)

    @pytest.fixture(scope="class")
    @classmethod
    def scene(cls, tmp_path_factory):
        path = tmp_path_factory.mktemp("scene") / "a.tif"
        return write_geotiff(path, image_noise((256, 320), seed=3), overviews=[2, 4])

    def look(self, model, scene, **more):
        with open_image(scene) as reader, Looker(model, self.unit) as looker:
            (sight,) = looker.look([reader], self.plan, **more)
        return sight

    def test_the_best_cells_of_the_whole_are_looked_at_and_no_deeper(self, model, scene):
        sight = self.look(model, scene)
        attention = sight.visits[0].seen.attention.ravel()
        best = sorted(np.argsort(-attention)[:2])
        expected = [f"root/{cell // 3}-{cell % 3}" for cell in best]
        assert [visit.place.region.path for visit in sight.visits] == ["root", *expected]
        assert sight.stop == "levels"
        torch.testing.assert_close(
            torch.from_numpy(sight.level_scores[0]), torch.from_numpy(sight.window_scores[0])
        )
        fused = sight.window_scores[0] + sight.window_scores[1:].mean(axis=0)
        np.testing.assert_allclose(sight.scores, fused, rtol=1e-5, atol=1e-6)

    def test_boxes_from_outside_tell_where_to_look(self, model, scene):
        box = Window(200.0, 150.0, 60.0, 60.0)  # in the last cell, and in no other as a whole
        sight = self.look(model, scene, attend=by_boxes([[box]], model.grid))
        assert "root/2-2" in [visit.place.region.path for visit in sight.visits]

    def test_chance_tells_where_to_look(self, model, scene):
        found = {
            tuple(
                visit.place.region.path
                for visit in self.look(model, scene, attend=by_chance([seed])).visits
            )
            for seed in range(5)
        }
        assert len(found) > 2

    def test_even_cells_are_sampled_by_chance(self, scene):
        model = build(patches="even")
        plan = Plan(levels=2, keep=(1,), least_side=32.0, policy="sample")
        found = set()
        with open_image(scene) as reader, Looker(model, self.unit) as looker:
            for seed in range(12):
                (sight,) = looker.look([reader], plan, seeds=[seed])
                found.add(sight.visits[1].place.region.path)
        assert len(found) > 3

    def test_the_steps_of_every_window_can_be_told_from_what_was_kept(self, model, scene):
        sight = self.look(model, scene)
        shares = model.step_shares(torch.from_numpy(sight.features))
        assert not shares[0].any()
        torch.testing.assert_close(shares[1:].sum(dim=1), torch.ones(2))
        np.testing.assert_array_equal(sight.steps, shares.numpy())

    def test_windows_that_are_told_are_looked_at_as_cells_would_be(self, model, scene):
        sight = self.look(model, scene)
        told = [Told(visit.place.region.window, visit.attention) for visit in sight.visits[1:]]
        with open_image(scene) as reader, Looker(model, self.unit) as looker:
            (again,) = looker.look([reader], self.plan, told=[told])
        assert [each.place.region.path for each in again.visits] == ["root", "root/w1", "root/w2"]
        np.testing.assert_allclose(again.scores, sight.scores, atol=1e-5)
        np.testing.assert_allclose(again.steps, sight.steps, atol=1e-5)

    def test_a_record_tells_the_steps_of_windows_and_of_nothing_else(self, model, scene):
        with open_image(scene) as reader, Looker(model, self.unit) as looker:
            (sight,) = looker.look([reader], self.plan)
            maker = Maker("small", "0" * 64, ("a", "b", "c", "d"))
            record = record_sight(sight, reader, image="a", id="scene", maker=maker)
        whole, *near = json.loads(record.model_dump_json())["windows"]
        assert "steps" not in whole
        assert [len(each["steps"]) for each in near] == [5, 5]
        for each, shares in zip(near, sight.steps[1:], strict=True):
            np.testing.assert_allclose(each["steps"], shares, atol=1e-6)
        assert Prediction.model_validate_json(record.model_dump_json()) == record


class TestArguments:
    @pytest.mark.parametrize(
        ("wrong", "problem"),
        [
            ({"steps": "sum", "first_step": 4, "last_step": 3}, "steps `4` to `3` are not within"),
            ({"steps": "single", "last_step": 6}, "steps `1` to `6` are not within 1 to 5"),
            ({"last_step": 3}, "`last_step` is of a `sum` or `single`, not of `attention`"),
            ({"steps": "single", "first_step": 2}, "`first_step` is of a `sum`"),
            ({"steps": "none", "self_attention": True}, "`steps` cannot be `none`"),
            ({"key_channels": 8}, "`key_channels` are of `self_attention`"),
            ({"local_size": 65}, "views of 64 pixels are only shrunk"),
            ({"local_weight": 0.0}, "greater than 0"),
            ({"step_count": 0}, "greater than or equal to 1"),
            ({"grid": {"rows": 65, "columns": 2, "cell_fraction": 0.5}}, "`grid.rows` is `65`"),
            ({"patches": "boxes"}, "'cam' or 'even'"),
        ],
    )
    def test_what_does_not_fit_together_is_refused(self, wrong, problem):
        with pytest.raises(ValidationError, match=problem):
            TwoStreamArguments(**SMALL | wrong)

    def test_one_file_cannot_hold_two_networks(self, tmp_path):
        arguments = TwoStreamArguments(**SMALL | {"local_backbone": "resnet18"})
        path = tmp_path / "weights.safetensors"
        net = build().global_stream.backbone.net
        safetensors.torch.save_file(net.state_dict(), path)
        with pytest.raises(ModelError, match="cannot hold the weights of `compact` and `resnet18`"):
            TwoStream(arguments, classes=2, pretrained=path)

    def test_one_file_starts_both_streams(self, tmp_path):
        net = build(seed=5).global_stream.backbone.net
        path = tmp_path / "weights.safetensors"
        safetensors.torch.save_file(net.state_dict(), path)
        model = TwoStream(TwoStreamArguments(**SMALL), classes=2, pretrained=path)
        for stream in (model.global_stream, model.local_stream):
            weight = stream.backbone.net.to_map[0][0].weight
            assert torch.equal(weight, net.to_map[0][0].weight)

    def test_arguments_load_no_torch(self):
        code = "import sys, tnetcli.models.two_stream_arguments; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
