import math

import numpy as np
import pytest
import torch

from tnetcli.models.registry import build_model
from tnetcli.models.tnet import Position, encode_positions
from tnetcli.testing.model import ROOT, encode, noise, proposed, unmasked
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import TopK
from tnetcli.traversal.tree import CellScores, traverse

SMALL = {"backbone": "resnet18", "view_size": 32, "tap": 1}
LEVEL = torch.tensor(1)  # all levels share one head


def build(**config):
    torch.manual_seed(0)
    return build_model("tnet", SMALL | config, classes=4).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def model():
    return build()


def view_of(region):
    """Return noise, the same for the same path."""
    return noise(1, 3, 32, 32, seed=sum(map(ord, region.path)) * 31 + len(region.path))[0]


def features_of(model, regions):
    return encode(model, [view_of(region) for region in regions], regions).features


def aggregate(model, features):
    """Aggregate the features (regions, D) of one image."""
    return model.aggregate(features.unsqueeze(0), *unmasked(len(features)))


@pytest.mark.parametrize("aggregator", ["mean", "gated"])
def test_reading_chosen_cells_equals_reading_all_and_masking_the_rest(aggregator):
    model = build(aggregator=aggregator)
    cells = [ROOT.child(model.grid, *cell) for cell in model.grid.cells()]
    chosen = [1, 5, 6]
    everything = features_of(model, [ROOT, *cells])
    gathered = features_of(model, [ROOT, *(cells[index] for index in chosen)])
    mask = torch.zeros(1, 10, dtype=torch.bool)
    mask[0, [0, *(index + 1 for index in chosen)]] = True
    masked = model.aggregate(everything.unsqueeze(0), mask, unmasked(10)[1])
    alone = aggregate(model, gathered)
    torch.testing.assert_close(masked.logits, alone.logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(masked.weights[mask], alone.weights[0], rtol=0, atol=1e-6)


def rollout(model, **config):
    """Traverse one image; return the paths of the regions and the views of each round."""
    rounds = []

    def score(nodes):
        regions = [node.region for node in nodes]
        rounds.append(len(regions))
        logits = encode(model, [view_of(region) for region in regions], regions).cell_logits
        return [CellScores(each, np.ones(len(each))) for each in logits.numpy()]

    found = traverse([ROOT.window], score, model.grid, TraversalConfig(**config), [TopK()])
    return [node.region.path for node in found.nodes], rounds


def test_every_cell_can_be_followed(model):
    paths, rounds = rollout(model, levels=2, keep=(9,))
    cells = [f"root/{row}-{column}" for row, column in model.grid.cells()]
    assert paths == ["root", *cells]
    assert rounds == [1, 9]
    assert rollout(model, levels=1, keep=()) == (["root"], [1])


def test_features_depend_on_the_position_of_a_region_and_attention_does_not(model):
    regions = [ROOT, ROOT.child(model.grid, 0, 0), ROOT.child(model.grid, 2, 1)]
    out = encode(model, [view_of(ROOT)] * 3, regions)
    assert not torch.allclose(out.features[0], out.features[1])
    assert not torch.allclose(out.features[1], out.features[2])
    torch.testing.assert_close(out.cell_logits[0], out.cell_logits[2])


def test_dropout_is_drawn_for_the_aggregate_and_for_every_vector():
    model = build(dropout=0.5).train()
    features = torch.ones(3, 512)
    drawn = [*model.classify(features, LEVEL), aggregate(model, features).logits[0]]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
    model.eval()
    assert torch.equal(model.classify(features, LEVEL), model.classify(features, LEVEL))


def test_feature_dropout_is_the_same_for_location_and_position():
    model = build(feature_dropout=0.5, location="context").train()
    given = {}
    model.location.register_forward_hook(lambda _, inputs, __: given.update(location=inputs[1]))
    model.position.register_forward_hook(lambda _, inputs, __: given.update(position=inputs[0]))
    encode(model, noise(2, 3, 32, 32), [ROOT, ROOT])
    assert torch.equal(given["location"], given["position"])
    plain = model.eval().backbone(noise(2, 3, 32, 32))[1]
    assert not given["position"][plain != 0].all()


def test_the_baseline_starts_at_a_half_and_is_saved(model):
    assert model.state_dict()["baseline"].tolist() == [0.5]
    assert "baseline" not in dict(model.named_parameters())


@pytest.mark.parametrize(
    ("dtype", "logits"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)]
)
def test_the_precision_of_the_weights_is_kept_but_for_half_precision_cell_logits(dtype, logits):
    model = build(aggregator="gated").to(dtype)
    out = encode(model, noise(2, 3, 32, 32).to(dtype), [ROOT, ROOT])
    parts = (out.features, out.aux["pooled"], *aggregate(model, out.features)[:3])
    assert {part.dtype for part in parts} == {dtype}
    assert out.cell_logits.dtype == logits


def test_a_grid_of_one_row_is_scored():
    model = build(grid={"rows": 1, "columns": 4, "cell_fraction": 0.5})
    probabilities = proposed(model, encode(model, noise(2, 3, 32, 32), [ROOT, ROOT]))
    assert probabilities.shape == (2, 4)
    assert (probabilities[:, 1:] != probabilities[:, :1]).any()


# Positional encoding. Width, frequencies, zeros at the end: Papadopoulos et al. 2021, sec. 3.1.
WIDTHS = [(512, 85, 2), (352, 58, 4), (384, 64, 0)]
POSITIONS = torch.tensor([[0, 0, 0], [2, 1, 1], [3, 7, 2]])  # rows, columns, depths


def code_of(row, column, depth, size):
    return encode_positions(torch.tensor([[row, column, depth]]), size)[0]


@pytest.mark.parametrize(("size", "count", "zeros"), WIDTHS)
def test_the_encoding_of_row_3_column_1_depth_1_is_the_published_one(size, count, zeros):
    code = code_of(3, 1, 1, size)
    assert code.shape == (size,)
    assert size - 6 * count == zeros
    assert not code[6 * count :].any()
    expected = {
        0: 0.14112,
        count - 1: 0.029995,
        count: -0.989992,
        2 * count: 0.841471,
        3 * count: 0.540302,
        6 * count - 1: 0.99995,
    }
    assert {each: float(code[each]) for each in expected} == pytest.approx(expected, abs=1e-6)
    waves = code_of(0, 0, 0, size)[: 6 * count].view(3, 2, count)
    assert not waves[:, 0].any()
    assert (waves[:, 1] == 1).all()


def test_the_encoding_equals_plain_python_at_any_depth():
    frequencies = [100 ** (-t / 3) for t in range(4)]
    expected = []
    for place in (13, 4, 2):
        expected += [math.sin(place * w) for w in frequencies]
        expected += [math.cos(place * w) for w in frequencies]
    assert code_of(13, 4, 2, 27).tolist() == pytest.approx([*expected, 0, 0, 0], abs=1e-7)
    place = 5**9 + 1  # level 10 of a 5 x 5 grid
    assert float(code_of(place, 0, 9, 512)[0]) == pytest.approx(math.sin(place), abs=1e-6)


@pytest.mark.parametrize(
    ("mode", "features", "size", "parameters"),
    [
        ("concat", 512, 512, 524_800),
        ("add", 1280, 320, 410_880),
        ("add", 1792, 448, 449 * 1792),
        ("add", 16, 12, 13 * 16),
    ],
)
def test_the_module_has_the_published_width_and_parameters(mode, features, size, parameters):
    module = Position(features, mode, None)
    assert module.size == size
    assert sum(parameter.numel() for parameter in module.parameters()) == parameters


@pytest.mark.parametrize("mode", ["add", "concat", "mix"])
def test_positions_are_combined_as_plain_numpy_does(mode):
    torch.manual_seed(0)
    module = Position(8, mode, 24).requires_grad_(False)
    features, code = noise(3, 8), encode_positions(POSITIONS, 24).numpy()
    weight, bias = module.linear.weight.numpy(), module.linear.bias.numpy()
    if mode == "add":
        expected = features.numpy() + code @ weight.T + bias
    else:
        expected = np.hstack([features.numpy(), code]) @ weight.T + bias
    if mode != "concat":
        expected = expected / (1 + np.exp(-expected))  # SiLU
    assert module(features, POSITIONS).numpy() == pytest.approx(expected, abs=1e-5)
    assert module(torch.zeros(0, 8), torch.zeros(0, 3, dtype=torch.long)).shape == (0, 8)
