import numpy as np
import pytest
import torch

from tests.encoding import encode
from tests.models.contract import ROOT, attention, noise, unmasked
from tnetcli.errors import ModelError
from tnetcli.models.registry import build_model
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
    """Return what a region shows: noise, the same for the same path."""
    return noise(1, 3, 32, 32, seed=sum(map(ord, region.path)) * 31 + len(region.path))[0]


def features_of(model, regions):
    return encode(model, [view_of(region) for region in regions], regions).features


def aggregate(model, features):
    """Aggregate the features (regions, D) of one image."""
    return model.aggregate(features.unsqueeze(0), *unmasked(len(features)))


@pytest.mark.parametrize("aggregator", ["mean", "gated"])
def test_reading_chosen_cells_is_reading_all_and_masking_the_rest(aggregator):
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
    """Traverse one image; return the paths of the regions, and how many each round encoded."""
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


def test_cells_are_followed_in_reading_order_whatever_their_attention(model):
    paths, _ = rollout(model, levels=3, keep=(3, 2), deduplicate=False)
    assert len(paths) == 1 + 3 + 6
    assert paths[1:4] == sorted(paths[1:4])
    parents = [path.rpartition("/")[0] for path in paths[4:]]
    assert parents == [parent for parent in paths[1:4] for _ in range(2)]
    assert paths[4:] == sorted(paths[4:])


def test_one_level_is_the_whole_image_alone(model):
    paths, _ = rollout(model, levels=1, keep=())
    assert paths == ["root"]


def test_features_depend_on_the_position_of_a_region(model):
    regions = [ROOT, ROOT.child(model.grid, 0, 0), ROOT.child(model.grid, 2, 1)]
    features = encode(model, [view_of(ROOT)] * 3, regions).features
    assert not torch.allclose(features[0], features[1])
    assert not torch.allclose(features[1], features[2])


def test_attention_does_not_depend_on_the_position_of_a_region(model):
    regions = [ROOT, ROOT.child(model.grid, 2, 1)]
    logits = encode(model, [view_of(ROOT)] * 2, regions).cell_logits
    torch.testing.assert_close(logits[0], logits[1])


def test_the_classifier_is_dense_with_a_bias(model):
    features = noise(2, 512)
    expected = features @ model.head.weight.T + model.head.bias
    torch.testing.assert_close(model.classify(features, LEVEL), expected)


def test_dropout_is_drawn_anew_for_the_aggregate_and_for_every_vector():
    model = build(dropout=0.5).train()
    features = torch.ones(3, 512)
    drawn = [*model.classify(features, LEVEL), aggregate(model, features).logits[0]]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
    model.eval()
    assert torch.equal(model.classify(features, LEVEL), model.classify(features, LEVEL))


def test_dropped_features_are_dropped_alike_for_the_location_and_the_position():
    model = build(feature_dropout=0.5, location="context").train()
    given = {}
    model.location.register_forward_hook(lambda _, inputs, __: given.update(location=inputs[1]))
    model.position.register_forward_hook(lambda _, inputs, __: given.update(position=inputs[0]))
    encode(model, noise(2, 3, 32, 32), [ROOT, ROOT])
    assert torch.equal(given["location"], given["position"])
    plain = model.eval().backbone(noise(2, 3, 32, 32))[1]
    assert not given["position"][plain != 0].all()


def test_features_that_know_their_position_are_averaged(model):
    regions = [ROOT, ROOT.child(model.grid, 1, 1)]
    features = features_of(model, regions)
    expected = model.classify(features.mean(0, keepdim=True), LEVEL)
    torch.testing.assert_close(aggregate(model, features).logits, expected)


def test_the_baseline_starts_at_a_half_and_is_saved(model):
    assert model.state_dict()["baseline"].tolist() == [0.5]
    assert "baseline" not in dict(model.named_parameters())


def test_double_precision_is_kept():
    model = build(aggregator="gated").double()
    out = encode(model, noise(2, 3, 32, 32).double(), [ROOT, ROOT])
    parts = (*out[:2], out.aux["pooled"], *aggregate(model, out.features)[:3])
    assert {part.dtype for part in parts} == {torch.float64}


def test_half_precision_is_kept_but_for_attention():
    model = build(aggregator="gated").bfloat16()
    out = encode(model, noise(2, 3, 32, 32).bfloat16(), [ROOT, ROOT])
    assert out.features.dtype == aggregate(model, out.features).logits.dtype == torch.bfloat16
    assert out.cell_logits.dtype == torch.float32


def test_no_views_give_no_features(model):
    out = model(torch.zeros(0, 3, 32, 32), torch.zeros(0, 3, dtype=torch.long))
    assert out.features.shape == (0, 512)
    assert out.cell_logits.shape == (0, 9, 1)


@pytest.mark.parametrize("alignment", ["nearest", "pool"])
def test_a_grid_of_one_row_is_scored(alignment):
    model = build(grid={"rows": 1, "columns": 4, "cell_fraction": 0.5}, alignment=alignment)
    probabilities = attention(encode(model, noise(2, 3, 32, 32), [ROOT, ROOT]))
    assert probabilities.shape == (2, 4)
    assert (probabilities[:, 1:] != probabilities[:, :1]).any()


def test_an_alignment_that_was_not_published_is_refused():
    with pytest.raises(ModelError, match="no published alignment of `resnet18`"):
        build(alignment="reference")
