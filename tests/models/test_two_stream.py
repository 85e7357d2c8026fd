import json
import math

import numpy as np
import pytest
import safetensors.torch
import torch
from pydantic import ValidationError
from torch.nn import functional

from tests.images import noise as image_noise
from tests.images import write_geotiff
from tests.models.published import count_layers, count_parameters
from tnetcli.data.normalize import Normalisation
from tnetcli.geometry import Grid
from tnetcli.models.configs import TwoStreamConfig
from tnetcli.models.nets import pool_map
from tnetcli.models.two_stream import Recurrence, StepAttention, TwoStream
from tnetcli.prediction.inference import Inference, record_result
from tnetcli.prediction.record import Prediction
from tnetcli.readers.detect import open_image
from tnetcli.testing.model import (
    ROOT,
    Case,
    ModelContract,
    encode,
    learned_parts,
    noise,
    unmasked,
)
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import Fixed, ScoredRegion, TopK

SMALL = {"backbone": "compact", "view_size": 64, "state_size": 16, "step_count": 5}
PUBLISHED = {"backbone": "vgg19", "view_size": 448, "local_size": 224}
VGG19 = [64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512, 512, 512, 512, 0, 512, 512, 512, 512]
CELL = ROOT.child(Grid(3, 3, 0.5), 1, 2)


def build(seed=0, classes=4, **config):
    torch.manual_seed(seed)
    model = TwoStream(TwoStreamConfig(**SMALL | config), classes=classes)
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def model():
    return build()


def published(**more):
    with torch.device("meta"):
        return TwoStream(TwoStreamConfig(**PUBLISHED | more), classes=200).eval()


def vgg19_multiplications(side):
    """Count 3 x 3 convolutions; 0 halves the side."""
    total, bands = 0, 3
    for channels in VGG19:
        if channels:
            total += 9 * bands * channels * side * side
            bands = channels
        else:
            side //= 2
    return total


class TestTwoStream(ModelContract):
    case = Case("two_stream", SMALL)


class TestTwoStreamByTheLastStep(ModelContract):
    case = Case(
        "two_stream",
        SMALL
        | {
            "steps": "last",
            "pooling": "mean_max",
            "patches": "even",
            "local_size": 48,
            "grid": {"rows": 2, "columns": 4, "cell_fraction": 0.4},
            "dropout": 0.2,
        },
        bands=4,
    )


@pytest.mark.slow  # timm draws the weights of VGG's head, which is then removed
class TestTwoStreamOnVGG(ModelContract):  # smaller than published
    case = Case("two_stream", SMALL | {"backbone": "vgg11", "view_size": 32, "steps": "none"})


class TestPublished:
    def test_the_size_is_the_sum_of_its_published_parts(self):
        heads = 2 * (512 * 200 + 200)
        found = count_parameters(published(step_count=4))
        expected = 2 * 20_024_384 + 4_202_496 + 512 * 4 + heads
        assert found.trainable == found.total == expected

    def test_multiplications_are_those_of_the_layers(self):
        model = published()
        with torch.device("meta"), count_layers(model) as whole:
            encode(model, torch.empty(1, 3, 448, 448), [ROOT])
        with torch.device("meta"), count_layers(model) as local:
            encode(model, torch.empty(1, 3, 224, 224), [CELL])
        head = 512 * 200  # of the predicted class
        assert whole.layers == vgg19_multiplications(448) + head
        recurrence = 2048 * 512 * (1 + 10) + 10 * 2 * 2048 * 512
        assert local.layers == vgg19_multiplications(224) + recurrence


class TestEncoding:
    def test_the_whole_is_encoded_by_one_stream_and_regions_by_the_other(self, model):
        views = noise(2, 3, 64, 64)
        whole, local = (encode(model, views, [region] * 2).features for region in (ROOT, CELL))
        assert torch.equal(whole, model.global_stream(views, None).features)  # 96 numbers
        assert torch.equal(local, model.local_stream(views, None).features)
        assert not local[:, 16:].any()
        expected = (
            model.global_stream.head(whole),
            model.local_stream.head(local[:, :16]),
        )
        for features, level, logits in ((whole, 1, expected[0]), (local, 2, expected[1])):
            assert torch.equal(model.classify(features, torch.tensor(level)), logits)

    @pytest.mark.parametrize(("size", "expected"), [(None, 64), (32, 32)])
    def test_regions_are_read_at_the_size_of_the_local_stream(self, size, expected):
        model = build(local_size=size)
        assert (model.view_size_of(ROOT), model.view_size_of(CELL)) == (64, expected)
        assert model.min_view_size == expected
        out = encode(model, noise(1, 3, expected, expected), [CELL])
        assert out.features.shape == (1, model.feature_size)

    def test_half_precision_is_kept_but_for_cell_logits(self):
        model = build().bfloat16()
        out = encode(model, noise(2, 3, 64, 64).bfloat16(), [ROOT, CELL])
        logits = model.aggregate(out.features.unsqueeze(0), *unmasked(2)).logits
        assert out.features.dtype == logits.dtype == torch.bfloat16
        assert out.cell_logits.dtype == torch.float32

    def test_the_streams_share_no_weights(self, model):
        stores = [
            {each.data_ptr() for each in stream.parameters()}
            for stream in (model.global_stream, model.local_stream)
        ]
        assert not stores[0] & stores[1]
        own = [stream.backbone.net.to_map[0][0].weight for stream in model.children()]
        assert not torch.equal(*own)


class TestPatches:
    def test_the_evidence_of_cells_is_the_mean_class_activation_under_them(self):
        model = build(grid={"rows": 2, "columns": 2, "cell_fraction": 0.5})
        stream = model.global_stream
        seen, vectors = stream.backbone(noise(2, 3, 64, 64))
        assert seen.shape[2:] == (4, 4)
        found = stream.cell_evidence(seen, vectors)
        for view in range(2):
            label = int(stream.head(vectors[view]).argmax())
            activation = sum(
                weight * channel
                for weight, channel in zip(stream.head.weight[label], seen[view], strict=True)
            )
            for row in range(2):
                for column in range(2):
                    under = activation[2 * row : 2 * row + 2, 2 * column : 2 * column + 2]
                    torch.testing.assert_close(found[view, row, column], under.mean())

    def test_with_maxima_the_evidence_is_the_logit_of_the_cell_alone(self):
        grid = {"rows": 2, "columns": 2, "cell_fraction": 0.5}
        stream = build(grid=grid, pooling="mean_max").global_stream
        seen, vectors = stream.backbone(noise(1, 3, 64, 64))
        label = int(stream.head(vectors).argmax())
        corner = pool_map(seen[:, :, 2:, :2], "mean_max")
        expected = stream.head(corner)[0, label] - stream.head.bias[label]
        torch.testing.assert_close(stream.cell_evidence(seen, vectors)[0, 1, 0], expected)

    def test_cells_with_more_evidence_get_more_attention(self, model):
        views = noise(4, 3, 64, 64)
        stream = model.global_stream
        evidence = stream.cell_evidence(*stream.backbone(views)).flatten(1)
        logits = encode(model, views, [ROOT] * 4).cell_logits[..., 0]
        assert torch.equal(evidence.argsort(dim=1), logits.argsort(dim=1))


class TestAggregating:
    def features(self, model, regions):
        return encode(model, noise(1 + regions, 3, 64, 64), [ROOT, *[CELL] * regions]).features

    @pytest.mark.parametrize("regions", [1, 4])
    def test_logits_of_the_streams_are_added(self, model, regions):
        features, (mask, levels) = self.features(model, regions), unmasked(1 + regions)
        logits, weights, _, parts = model.aggregate(features.unsqueeze(0), mask, levels)
        each = model.classify(features, levels[0])
        torch.testing.assert_close(logits[0], each[0] + each[1:].mean(dim=0))
        assert weights[0].tolist() == pytest.approx([0.5, *[0.5 / regions] * regions])
        torch.testing.assert_close(parts["instances"][0], each)
        torch.testing.assert_close(parts["whole"][0], each[0])
        torch.testing.assert_close(parts["regions"][0], each[1:].mean(dim=0))

    def test_without_regions_the_whole_answers(self, model):
        features = self.features(model, 2)
        mask = torch.tensor([[True, False, False]])
        found = model.aggregate(features.unsqueeze(0), mask, unmasked(3)[1])
        torch.testing.assert_close(found.logits, model.global_stream.head(features[:1]))
        assert found.weights.tolist() == [[1, 0, 0]]

    def test_without_the_whole_the_regions_answer(self, model):
        features, levels = self.features(model, 2), unmasked(3)[1]
        mask = torch.tensor([[False, True, True]])
        found = model.aggregate(features.unsqueeze(0), mask, levels)
        alone = model.classify(features[1:], levels[0, 1:])
        torch.testing.assert_close(found.logits[0], alone.mean(dim=0))
        assert found.weights.tolist() == [[0, 0.5, 0.5]]


class TestLearning:
    def learner(self, **more):
        return build(**more).requires_grad_(True).train()

    @pytest.mark.parametrize(("region", "part"), [(ROOT, "global_stream"), (CELL, "local_stream")])
    def test_a_view_trains_its_own_stream_only(self, region, part):
        model = self.learner()
        features = encode(model, noise(2, 3, 64, 64), [region] * 2).features
        logits = model.classify(features, torch.tensor(region.level))
        functional.cross_entropy(logits, torch.tensor([1, 0])).backward()
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
        """Return the output of each step by torch's own LSTM."""
        stream = model.local_stream
        lstm = torch_lstm(stream.memory, 96).float()
        _, x = stream.backbone(self.view)
        return lstm(x.unsqueeze(1).expand(-1, 5, -1))[0].detach()

    def encode(self, model):
        """Return the logits of the views as regions of level 2, and the auxiliary outputs."""
        out = encode(model, self.view, [CELL] * 2)
        return model.classify(out.features, torch.tensor(2)), out.aux

    def test_attention_weighs_the_steps(self, model):
        outputs = self.outputs(model)
        vectors = model.local_stream.weigh.vectors
        weights = torch.einsum("rts,ts->rt", outputs, vectors).softmax(dim=1)
        logits, aux = self.encode(model)
        assert aux.keys() == {"step_weights"}
        torch.testing.assert_close(aux["step_weights"], weights)
        expected = model.local_stream.head(torch.einsum("rt,rts->rs", weights, outputs))
        torch.testing.assert_close(logits, expected)

    def test_without_steps_the_mean_of_the_map_is_classified(self, model):
        other = build(seed=1, steps="none")
        other.local_stream.backbone.load_state_dict(model.local_stream.backbone.state_dict())
        _, vectors = model.local_stream.backbone(self.view)
        logits, aux = self.encode(other)
        torch.testing.assert_close(logits, other.local_stream.head(vectors))
        assert not aux
        assert not hasattr(other.local_stream, "memory")

    def test_each_step_has_logits_in_training_if_only_the_last_counts(self, model):
        other = self.variant(model, steps="last")
        assert "step_logits" not in self.encode(other)[1]
        other.local_stream.training = True  # of the stream alone, as batch norm would differ
        logits, aux = self.encode(other)
        expected = other.local_stream.head(self.outputs(model))
        assert aux.keys() == {"step_weights", "step_logits"}
        torch.testing.assert_close(aux["step_logits"], expected)
        torch.testing.assert_close(aux["step_logits"][:, -1], logits)

    def test_the_whole_image_has_no_steps(self, model):
        assert not encode(model, self.view, [ROOT] * 2).aux


class TestTraversing:
    """The family inside the rollout that all families share."""

    unit = Normalisation.to_unit_range("uint8", 3)
    config = TraversalConfig(levels=3, keep=(2,), min_size=32.0)

    @pytest.fixture(scope="class")
    @classmethod
    def scene(cls, tmp_path_factory):
        path = tmp_path_factory.mktemp("scene") / "a.tif"
        return write_geotiff(path, image_noise((256, 320), seed=3), overviews=[2, 4])

    def run(self, model, scene, policy=TopK(), **changes):  # noqa: B008
        config = self.config.changed(**changes)
        with open_image(scene) as reader, Inference(model, self.unit) as inference:
            (result,) = inference.run([reader], config, [policy])
        return result

    def paths(self, result):
        return [node.region.path for node in result.nodes]

    def test_the_best_cells_of_the_whole_are_read_and_no_deeper(self, model, scene):
        result = self.run(model, scene)
        every = self.run(model, scene, keep=(9,)).nodes[1:]
        best = sorted(every, key=lambda node: node.rank)[:2]
        assert self.paths(result) == ["root", *sorted(node.region.path for node in best)]
        assert result.stop == "max_level"
        np.testing.assert_allclose(result.level_logits[0], result.region_logits[0], rtol=1e-5)
        fused = result.region_logits[0] + result.region_logits[1:].mean(axis=0)
        np.testing.assert_allclose(result.logits, fused, rtol=1e-5, atol=1e-6)

    def test_fixed_regions_are_read_as_cells_would_be(self, model, scene):
        result = self.run(model, scene)
        regions = [ScoredRegion(node.region.window, node.attention) for node in result.nodes[1:]]
        again = self.run(model, scene, Fixed(TopK(), regions))
        assert self.paths(again) == ["root", "root/w1", "root/w2"]
        np.testing.assert_allclose(again.logits, result.logits, atol=1e-5)
        np.testing.assert_allclose(again.steps, result.steps, atol=1e-5)

    def test_a_record_has_the_steps_of_regions_and_of_nothing_else(self, model, scene):
        result = self.run(model, scene)
        with open_image(scene) as reader:
            record = record_result(result, reader, image="a", id="scene", classes="abcd")
        whole, *local = json.loads(record.model_dump_json())["windows"]
        assert "steps" not in whole
        assert [len(each["steps"]) for each in local] == [5, 5]
        for each, weights in zip(local, result.steps[1:], strict=True):
            np.testing.assert_allclose(each["steps"], weights, atol=1e-6)
        assert Prediction.model_validate_json(record.model_dump_json()) == record


class TestConfig:
    @pytest.mark.parametrize(
        ("wrong", "problem"),
        [
            ({"local_size": 65}, "`local_size` is `65`, above `view_size`: 64"),
            ({"step_count": 0}, "greater than or equal to 1"),
            ({"grid": {"rows": 65, "columns": 2, "cell_fraction": 0.5}}, "`grid.rows` is `65`"),
            ({"patches": "boxes"}, "'cam' or 'even'"),
        ],
    )
    def test_a_wrong_configuration_is_an_error(self, wrong, problem):
        with pytest.raises(ValidationError, match=problem):
            TwoStreamConfig(**SMALL | wrong)

    def test_one_file_is_loaded_into_both_streams(self, tmp_path):
        net, path = build(seed=5).global_stream.backbone.net, tmp_path / "weights.safetensors"
        safetensors.torch.save_file(net.state_dict(), path)
        model = TwoStream(TwoStreamConfig(**SMALL), classes=2, pretrained=path)
        for stream in (model.global_stream, model.local_stream):
            weight = stream.backbone.net.to_map[0][0].weight
            assert torch.equal(weight, net.to_map[0][0].weight)


# The recurrence, against torch's own LSTM.


def torch_lstm(recurrence, inputs):
    """Return torch's LSTM with the same weights."""
    lstm = torch.nn.LSTM(inputs, recurrence.size, len(recurrence.layers), batch_first=True).double()
    for number, layer in enumerate(recurrence.layers):
        for name, part in (("ih", layer.enter), ("hh", layer.recall)):
            getattr(lstm, f"weight_{name}_l{number}").data = part.weight.data
            getattr(lstm, f"bias_{name}_l{number}").data = part.bias.data
    return lstm


@pytest.mark.parametrize("layers", [1, 3])
def test_the_recurrence_is_an_lstm_with_the_same_input_at_every_step(layers):
    torch.manual_seed(0)
    recurrence = Recurrence(5, 3, layers).double()
    x = noise(4, 5).double().requires_grad_(True)
    found = recurrence(x, 10)
    expected, _ = torch_lstm(recurrence, 5)(x.unsqueeze(1).expand(-1, 10, -1))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    (mine,) = torch.autograd.grad(found.square().sum(), x)
    (theirs,) = torch.autograd.grad(expected.square().sum(), x)
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    assert recurrence(torch.zeros(0, 5).double(), 4).shape == (0, 4, 3)


def test_the_input_of_the_recurrence_is_multiplied_once():
    with torch.device("meta"):
        assert count_parameters(Recurrence(512, 512)).trainable == 4_202_496
        recurrence = Recurrence(20, 8)
        with count_layers(recurrence) as count:
            recurrence(torch.empty(3, 20), 5)
    assert count.layers == 3 * (32 * 20 + 5 * 32 * 8 + 5 * (32 * 8 + 32 * 8))


def test_the_attention_over_steps_has_one_vector_per_step():
    attention, outputs = StepAttention(3, 4), torch.zeros(1, 3, 4)
    with torch.no_grad():
        attention.vectors.zero_()
        for step, share in enumerate((1, 2, 5)):  # the scores are log 1, log 2 and log 5
            attention.vectors[step, step] = 2.0
            outputs[0, step, step] = math.log(share) / 2
    torch.testing.assert_close(attention(outputs), torch.tensor([[1 / 8, 2 / 8, 5 / 8]]))
