import numpy as np
import pytest
import torch
from tnetcli.visits import Seen

from tests.models.contract import ROOT, everywhere, noise, tensors_of
from tnetcli.errors import ModelError
from tnetcli.models.registry import build_model
from tnetcli.traversal import Plan, traverse

SMALL = {"backbone": "resnet18", "view_size": 32, "tap": 1}


def build(**arguments):
    torch.manual_seed(0)
    return build_model("tnet", SMALL | arguments, classes=4).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def model():
    return build()


def view_of(region):
    """Return what a region shows: noise, the same for the same path."""
    return noise(1, 3, 32, 32, seed=sum(map(ord, region.path)) * 31 + len(region.path))[0]


def features_of(model, regions):
    return model.look(torch.stack([view_of(region) for region in regions]), regions).features


@pytest.mark.parametrize("weighting", [False, True])
def test_reading_chosen_cells_is_reading_all_and_masking_the_rest(weighting):
    model = build(weighting=weighting)
    cells = [ROOT.child(model.grid, *cell) for cell in model.grid.cells()]
    chosen = [1, 5, 6]
    everything = features_of(model, [ROOT, *cells])
    gathered = features_of(model, [ROOT, *(cells[index] for index in chosen)])
    present = torch.zeros(1, 10, dtype=torch.bool)
    present[0, [0, *(index + 1 for index in chosen)]] = True
    masked = model.conclude(everything.unsqueeze(0), present)
    alone = model.conclude(gathered.unsqueeze(0), everywhere(4))
    torch.testing.assert_close(masked.scores, alone.scores, rtol=0, atol=1e-5)
    torch.testing.assert_close(masked.weights[present], alone.weights[0], rtol=0, atol=1e-6)


def walk(model, **plan):
    """Walk one image with a model; return the regions seen and the attention given to each."""
    calls = []

    def look(places):
        regions = [place.region for place in places]
        views = torch.stack([view_of(region) for region in regions])
        attention = model.look(views, regions).attention.numpy()
        calls.append(regions)
        return [Seen(each, np.ones(each.shape)) for each in attention]

    visits = traverse([ROOT.window], look, model.grid, Plan(**plan)).visits
    return [visit.place.region.path for visit in visits], calls


def test_every_cell_can_be_followed(model):
    paths, calls = walk(model, levels=2, keep=(9,))
    cells = [f"root/{row}-{column}" for row, column in model.grid.cells()]
    assert paths == ["root", *cells]
    assert [len(call) for call in calls] == [1, 9]


def test_cells_are_followed_in_reading_order_whatever_their_attention(model):
    paths, _ = walk(model, levels=3, keep=(3, 2), once=False)
    assert len(paths) == 1 + 3 + 6
    assert paths[1:4] == sorted(paths[1:4])
    parents = [path.rpartition("/")[0] for path in paths[4:]]
    assert parents == [parent for parent in paths[1:4] for _ in range(2)]
    assert paths[4:] == sorted(paths[4:])


def test_one_level_is_the_whole_image_alone(model):
    paths, _ = walk(model, levels=1, keep=())
    assert paths == ["root"]


def test_a_window_is_told_its_place(model):
    regions = [ROOT, ROOT.child(model.grid, 0, 0), ROOT.child(model.grid, 2, 1)]
    features = model.look(view_of(ROOT).expand(3, -1, -1, -1), regions).features
    assert not torch.allclose(features[0], features[1])
    assert not torch.allclose(features[1], features[2])


def test_the_place_of_a_window_does_not_enter_its_attention(model):
    regions = [ROOT, ROOT.child(model.grid, 2, 1)]
    attention = model.look(view_of(ROOT).expand(2, -1, -1, -1), regions).attention
    torch.testing.assert_close(attention[0], attention[1])


@pytest.mark.parametrize("count", [1, 3])
def test_views_without_a_region_each_are_refused(model, count):
    with pytest.raises(ValueError, match=f"{count} regions for 2 views"):
        model.look(noise(2, 3, 32, 32), [ROOT] * count)


def test_the_classifier_is_dense_with_a_bias(model):
    features = noise(2, 512)
    expected = features @ model.classifier.weight.T + model.classifier.bias
    torch.testing.assert_close(model.classify(features), expected)


def test_dropout_is_drawn_anew_for_the_conclusion_and_for_every_vector():
    model = build(dropout=0.5).train()
    features = torch.ones(1, 3, 512)
    drawn = [*model.classify(features)[0], model.conclude(features, everywhere(3)).scores[0]]
    assert all(not torch.equal(a, b) for i, a in enumerate(drawn) for b in drawn[:i])
    model.eval()
    assert torch.equal(model.classify(features), model.classify(features))


def test_dropped_features_are_dropped_alike_for_the_location_and_the_position():
    model = build(feature_dropout=0.5, location="context").train()
    given = {}
    model.location.register_forward_hook(lambda _, inputs, __: given.update(location=inputs[1]))
    model.position.register_forward_hook(lambda _, inputs, __: given.update(position=inputs[0]))
    model.look(noise(2, 3, 32, 32), [ROOT, ROOT])
    assert torch.equal(given["location"], given["position"])
    plain = model.eval().backbone(noise(2, 3, 32, 32))[1]
    assert not given["position"][plain != 0].all()


def test_the_conclusion_weighs_features_that_know_their_place(model):
    regions = [ROOT, ROOT.child(model.grid, 1, 1)]
    features = features_of(model, regions)
    conclusion = model.conclude(features.unsqueeze(0), everywhere(2))
    torch.testing.assert_close(conclusion.scores, model.classify(features.mean(0, keepdim=True)))


def test_the_baseline_starts_at_a_half_and_is_saved(model):
    assert model.state_dict()["baseline"].tolist() == [0.5]
    assert "baseline" not in dict(model.named_parameters())


def test_double_precision_is_kept():
    model = build(weighting=True).double()
    looked = model.look(noise(2, 3, 32, 32).double(), [ROOT, ROOT])
    scores, _, _ = model.conclude(looked.features.unsqueeze(0), everywhere(2))
    assert {part.dtype for part in (*tensors_of(looked), scores)} == {torch.float64}


def test_half_precision_is_kept_but_for_attention():
    model = build(weighting=True).bfloat16()
    looked = model.look(noise(2, 3, 32, 32).bfloat16(), [ROOT, ROOT])
    scores, _, _ = model.conclude(looked.features.unsqueeze(0), everywhere(2))
    assert looked.features.dtype == scores.dtype == torch.bfloat16
    assert looked.attention.dtype == torch.float32


def test_no_views_give_no_features(model):
    looked = model.look(torch.zeros(0, 3, 32, 32), [])
    assert looked.features.shape == (0, 512)
    assert looked.attention.shape == (0, 3, 3)


@pytest.mark.parametrize("alignment", ["nearest", "pool"])
def test_a_grid_of_one_row_is_scored(alignment):
    model = build(grid={"rows": 1, "columns": 4, "cell_fraction": 0.5}, alignment=alignment)
    attention = model.look(noise(2, 3, 32, 32), [ROOT, ROOT]).attention
    assert attention.shape == (2, 1, 4)
    assert (attention[:, :, 1:] != attention[:, :, :1]).any()


def test_an_alignment_that_was_not_published_is_refused():
    with pytest.raises(ModelError, match="no published alignment of `resnet18`"):
        build(alignment="reference")
