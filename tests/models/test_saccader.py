import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tnetcli.looking import Looker
from tnetcli.models.saccader_arguments import SaccaderArguments
from tnetcli.models.saccader_cell import SaccaderCell, SaccaderLocation, visit
from tnetcli.training.draws import draw_log_probability
from torch.nn import functional

from tests.images import noise as image_noise
from tests.images import write_geotiff
from tests.models.contract import ROOT, Case, ModelContract, noise
from tests.models.places import glimpse_windows
from tests.models.published import billions, outline, traverse
from tnetcli.errors import ModelError
from tnetcli.models.receptive_field import trace
from tnetcli.models.registry import build_model, read_arguments
from tnetcli.models.saccader import PatchNet
from tnetcli.normalisation import Normalisation
from tnetcli.readers.open import open_image
from tnetcli.traversal import Plan
from tnetcli.workflows.cost import count_parameters

SMALL = {"view_size": 101, "width": 0.0625, "glimpses": 3}  # 4 x 4 places
PUBLISHED = {"view_size": 224, "glimpses": 6}


def build(classes=3, **arguments):
    torch.manual_seed(0)
    return build_model("saccader", SMALL | arguments, classes=classes).eval()


@pytest.fixture(scope="module")
def model():
    return build().requires_grad_(False)


class TestSaccader(ModelContract):
    case = Case("saccader", SMALL)


class TestSaccaderOfOnePlace(ModelContract):
    case = Case(
        "saccader",
        {"view_size": 77, "width": 0.0625, "glimpses": 1},
        # With nothing to choose, nothing is learned about where to look.
        never_learned={
            f"location.{name}" for name, _ in SaccaderLocation(128, 32).named_parameters()
        },
    )

    def test_attention_teaches_where_to_look_and_nothing_else(self, learner, views):
        _, where = self.learn(learner, views)
        assert where == 0


# The cell, against the same said in loops.


def step_by_hand(mixed, weight, visited):
    """One map (channels, places): where to next, by SaccaderCell of the public code."""
    channels, places = mixed.shape
    free = [place for place in range(places) if place not in visited]
    logits = {p: sum(mixed[:, p] * weight) / math.sqrt(channels) for p in free}
    total = sum(math.exp(value) for value in logits.values())
    attended = sum(mixed[:, p] * math.exp(logits[p]) / total for p in free)
    shares = np.exp(attended) / np.exp(attended).sum()
    scores = {p: float((mixed[:, p] * shares).sum()) for p in free}
    total = sum(math.exp(value) for value in scores.values())
    return {p: math.exp(value) / total for p, value in scores.items()}


def cell_of(channels, seed=0):
    torch.manual_seed(seed)
    return SaccaderCell(channels).double().requires_grad_(False)


def test_the_cell_chooses_as_the_same_in_loops_does():
    cell, mixed = cell_of(5), 2 * noise(2, 5, 7, seed=3).double()
    found = visit(cell, mixed, 7)
    for region in range(2):
        visited = []
        for number in range(7):
            chances = step_by_hand(mixed[region].numpy(), cell.score.weight[0].numpy(), visited)
            best = max(chances, key=chances.get)
            assert found.places[region, number] == best
            assert found.log_p[region, number].exp().item() == pytest.approx(chances[best])
            visited.append(best)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 12), st.booleans(), st.integers(0, 5), st.sampled_from([0.1, 3, 1e3, 1e7]))
def test_no_place_is_visited_twice(places, sample, seed, scale):
    mixed = scale * noise(3, 4, places, seed=seed)
    torch.manual_seed(seed)
    found = visit(cell_of(4).float(), mixed, places, sample=sample)
    everywhere = torch.arange(places).expand(3, -1)
    assert torch.equal(found.places.sort(dim=1).values, everywhere)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("glimpses", [1, 2, 5, 9])
def test_attention_gives_the_places_in_their_order_the_probabilities_they_had(glimpses, sample):
    torch.manual_seed(1)
    found = visit(cell_of(4), 3 * noise(6, 4, 9).double(), glimpses, sample=sample)
    torch.testing.assert_close(found.attention.sum(dim=1), torch.ones(6).double())
    drawn = draw_log_probability(
        found.attention, found.places, torch.ones(6, 9, dtype=torch.bool)
    )  # as a walk draws cells
    # The last of all places is certain, whatever is left of it.
    torch.testing.assert_close(drawn, found.log_p, rtol=0, atol=1e-6)


def test_where_nothing_was_visited_yet_attention_is_that_of_a_single_glimpse():
    cell, mixed = cell_of(4), noise(2, 4, 9).double()
    first = cell.step(mixed, cell(mixed), torch.zeros(2, 9, dtype=torch.bool)).exp()
    torch.testing.assert_close(visit(cell, mixed, 1).attention.amax(dim=1), first.amax(dim=1))


def test_places_that_are_given_are_followed():
    cell, mixed = cell_of(4), noise(2, 4, 9).double()
    given = torch.tensor([[3, 1, 8], [0, 2, 7]])
    found = visit(cell, mixed, 3, follow=given)
    assert torch.equal(found.places, given)
    for region, order in enumerate(given.tolist()):
        for number, place in enumerate(order):
            weight = cell.score.weight[0].numpy()
            chances = step_by_hand(mixed[region].numpy(), weight, order[:number])
            assert found.log_p[region, number].exp().item() == pytest.approx(chances[place])


def test_draws_are_as_frequent_as_they_are_probable():
    cell, one = cell_of(3), 2 * noise(1, 3, 3, seed=2).double()
    torch.manual_seed(0)
    found = visit(cell, one.expand(6000, -1, -1), 2, sample=True)
    weight = cell.score.weight[0].numpy()
    for first, second in itertools.permutations(range(3), 2):
        expected = step_by_hand(one[0].numpy(), weight, [])[first]
        expected *= step_by_hand(one[0].numpy(), weight, [first])[second]
        often = (found.places == torch.tensor([first, second])).all(dim=1).double().mean().item()
        assert abs(often - expected) < 4 * math.sqrt(expected * (1 - expected) / 6000) + 1e-3


def test_moving_the_places_of_a_map_moves_what_is_visited():
    cell, mixed = cell_of(4), noise(2, 4, 9).double()
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    one, other = visit(cell, mixed, 4), visit(cell, mixed[:, :, order], 4)
    assert torch.equal(order[other.places], one.places)
    torch.testing.assert_close(other.attention, one.attention[:, order])


def test_half_precision_masks_too():
    torch.manual_seed(0)
    location = SaccaderLocation(16, 8).bfloat16().eval()
    found = location(noise(2, 16, 3, 3).bfloat16(), noise(2, 8, 3, 3).bfloat16(), 9)
    assert torch.equal(found.places.sort(dim=1).values, torch.arange(9).expand(2, -1))
    assert found.attention.isfinite().all()


def test_what_is_computed_in_half_precision_masks_too(model):
    with torch.autocast("cpu", torch.bfloat16):
        places = model.glimpse(noise(2, 3, 101, 101)).places
    assert all(len({tuple(place) for place in each.tolist()}) == 3 for each in places)


# The model.


@pytest.mark.parametrize(("side", "places"), [(77, 1), (84, 1), (85, 2), (101, 4), (224, 19)])
def test_the_map_has_a_place_for_every_8_pixels_and_each_sees_77(side, places):
    net = PatchNet(1, 0.0625).eval()
    with torch.no_grad():
        wide, narrow = net(noise(1, 1, side, side))
    assert wide.shape[2:] == narrow.shape[2:] == (places, places)
    assert SaccaderArguments(view_size=side, glimpses=1).places == places


def test_a_place_sees_77_pixels_and_no_other():
    net = PatchNet(1, 0.0625).eval()
    for part in net.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.weight.data.fill_(1)
    views = noise(1, 1, 101, 101).requires_grad_(True)
    net(views)[1][0, :, 1, 2].sum().backward()
    rows, columns = (views.grad[0, 0].abs().sum(dim=axis).nonzero() for axis in (1, 0))
    assert (rows.min(), rows.max()) == (8, 8 + 76)
    assert (columns.min(), columns.max()) == (16, 16 + 76)
    _, fields = trace(lambda view: net(view)[0], views.detach())
    assert (fields[0].jump, fields[0].size) == (8, 77)


def test_the_score_of_a_view_is_the_mean_of_the_scores_at_the_places_visited(model):
    views = noise(2, 3, 101, 101)
    wide, narrow = model.backbone(views)
    everywhere = functional.conv2d(
        narrow, model.classifier.weight[:, :, None, None], model.classifier.bias
    )  # (regions, classes, 4, 4), as the public code has them
    places = model.visit(wide, narrow).places
    expected = everywhere.flatten(2).gather(2, places[:, None].expand(-1, 3, -1)).mean(dim=2)
    scores = model.classify(model.look(views, [ROOT] * 2).features)
    torch.testing.assert_close(scores, expected)


def test_glimpses_are_cells_of_the_grid(model):
    glimpsed = model.glimpse(noise(1, 3, 101, 101))
    windows = glimpse_windows(glimpsed.places[0], ROOT.window, 77 / 101)
    cells = [ROOT.window.cell(model.grid, *cell) for cell in model.grid.cells()]
    for window in windows:
        assert any(window.box == pytest.approx(cell.box, abs=1e-2) for cell in cells)
    assert len({window.box for window in windows}) == 3


def test_a_glimpse_sees_its_box_and_nothing_else():
    model = build(view_size=117)
    for part in model.backbone.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            torch.nn.init.ones_(part.weight)  # else blocks add nothing before they have learned
    views = noise(16, 3, 117, 117).requires_grad_()
    with torch.no_grad():
        places = model.visit(*model.backbone(views)).places
    _, narrow = model.backbone(views)
    features = narrow.flatten(2).gather(2, places[:, None, :1].expand(-1, narrow.shape[1], -1))
    (slope,) = torch.autograd.grad(features.sum(), views)  # (views, bands, height, width)
    within = model.look(views.detach(), [ROOT] * 16).within
    assert within.boxes.shape == (16, 3, 4)
    for number, box in enumerate((within.boxes[:, 0] * 117).round().int().tolist()):
        rows, columns = (slope[number] != 0).any(dim=0).nonzero().T
        seen = [int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1]
        assert seen == box
    torch.testing.assert_close(within.features.mean(dim=1), model.look(views, [ROOT] * 16).features)


def test_before_it_learns_the_cells_of_most_attention_are_those_visited(model):
    views = noise(8, 3, 101, 101)
    glimpsed = model.glimpse(views)
    visited = model.visit(*model.backbone(views)).places
    best = glimpsed.attention.flatten(1).topk(3, dim=1).indices
    assert torch.equal(best.sort(dim=1).values, visited.sort(dim=1).values)


def test_what_is_not_visited_is_not_classified():
    model = build()
    views = noise(1, 3, 101, 101).requires_grad_(True)
    wide, narrow = model.backbone(views)
    narrow.retain_grad()
    places = model.visit(wide, narrow).places
    model.classify(model._at(narrow, places).mean(dim=1)).sum().backward()
    touched = narrow.grad[0].abs().sum(dim=0).flatten().nonzero().flatten()
    assert set(touched.tolist()) <= set(places[0].tolist())


def test_while_it_learns_places_are_drawn_and_otherwise_they_are_not(model):
    learner = build().train()
    views = noise(1, 3, 101, 101).expand(16, -1, -1, -1)
    torch.manual_seed(0)
    drawn = learner.glimpse(views, sample=True).places
    assert len({tuple(each.flatten().tolist()) for each in drawn}) > 1
    best = model.glimpse(views).places
    assert torch.equal(best, best[:1].expand_as(best))


def test_where_the_location_is_frozen_while_the_rest_learns_all_places_count():
    model, views = build(), noise(2, 3, 101, 101)
    model.train()
    model.location.eval()
    expected = model.backbone(views)[1].mean(dim=(2, 3))
    torch.testing.assert_close(model.look(views, [ROOT] * 2).features, expected)


def test_more_bands_and_another_width_are_built():
    model = build_model("saccader", SMALL | {"width": 0.125}, classes=2, bands=5).eval()
    assert model.feature_size == 64
    with torch.no_grad():
        assert model.look(noise(1, 5, 101, 101), [ROOT]).features.shape == (1, 64)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"backbone": "resnet18"}, "a Saccader has a bagnet77"),
        ({"pooling": "mean_max"}, "pooling `mean`"),
        ({"drop_path": 0.1}, "no stochastic depth"),
        ({"view_size": 76}, "view_size"),
        ({"glimpses": 17}, "a view has 16 places"),
        ({"glimpses": 0}, "glimpses"),
        ({"width": 0}, "width"),
        ({"grid": {"rows": 2, "columns": 2, "cell_fraction": 0.5}}, "grid"),
    ],
)
def test_what_cannot_be_built_is_refused(arguments, problem):
    with pytest.raises(ModelError, match=problem):
        read_arguments("saccader", SMALL | arguments)


def test_there_are_no_published_weights(tmp_path):
    with pytest.raises(ModelError, match="no published weights"):
        build_model("saccader", SMALL, classes=2, pretrained=True)
    with pytest.raises(ModelError, match="cannot read the weights"):
        build_model("saccader", SMALL, classes=2, pretrained=tmp_path / "a.pt")


def test_the_weights_of_another_patch_network_are_taken(tmp_path):
    from safetensors.torch import save_file

    other = PatchNet(3, 0.0625)
    save_file(other.state_dict(), tmp_path / "a.safetensors")
    model = build_model(
        "saccader", SMALL, classes=2, bands=4, pretrained=tmp_path / "a.safetensors"
    )
    assert torch.equal(model.backbone.head[0].weight, other.head[0].weight)
    assert model.backbone.to_map[0].weight.shape[1] == 4


def test_a_walk_reads_the_places_of_most_attention_closer(model, tmp_path):
    image = image_noise((800, 600))
    path = write_geotiff(tmp_path / "a.tif", image, overviews=[2, 4])
    unit = Normalisation.to_unit_range("uint8", 3)
    with open_image(path) as reader, Looker(model, unit, device="cpu", threads=1) as looker:
        (sight,) = looker.look([reader], Plan(levels=2, keep=(3,)))
        (alone,) = looker.look([reader], Plan(levels=1, keep=(3,)))
    assert len(sight.visits) == 4
    first = sight.visits[0].seen.attention
    best = sorted(np.argsort(-first.ravel())[:3].tolist())
    cells = [visit.place.region.path for visit in sight.visits[1:]]
    assert cells == [f"root/{place // 4}-{place % 4}" for place in best]
    assert all(
        visit.place.region.window.width == pytest.approx(800 * 77 / 101)
        for visit in sight.visits[1:]
    )
    assert np.array_equal(sight.level_scores[0], alone.scores)


# What is published: 35.58 million parameters and 19.5 billion multiplications (TNet's tables);
# 33.58 million and 21.6 billion (AnchorNet's).


def test_it_holds_35_58_million_parameters_as_published():
    counted = count_parameters(outline("saccader", PUBLISHED, 1000))
    assert (counted.trainable, counted.total) == (35_523_112, 35_583_400)
    assert round(counted.total / 1e6, 2) == 35.58


def test_it_multiplies_19_32_billion_times_and_19_50_with_scores_at_every_place():
    model = outline("saccader", PUBLISHED, 1000)
    ours = traverse(model).layers
    assert billions(ours) == 19.3192
    assert abs(ours / 1e9 - 19.5) < 0.02 * 19.5
    everywhere = ours + (19 * 19 - 1) * 512 * 1000
    assert everywhere == 19_503_521_024  # counted apart, layer by layer, from the public code


@pytest.mark.parametrize("glimpses", [1, 6, 20])
def test_more_glimpses_cost_no_more_layers(glimpses):
    model = outline("saccader", PUBLISHED | {"glimpses": glimpses}, 1000)
    assert billions(traverse(model).layers) == 19.3192


# That it can learn, by the losses of the paper.


def reinforce(scores, labels, log_p):
    """By saccader/losses.py, `reinforce_loss_discrete`: reward 1 if right, less the batch mean."""
    rewards = (scores.argmax(dim=1) == labels).float()
    return -((rewards - rewards.mean())[:, None] * log_p).mean()


def test_it_learns_eight_images_by_heart():
    torch.manual_seed(0)
    model = build_model("saccader", SMALL | {"view_size": 93}, classes=2).train()
    views, labels = noise(8, 3, 93, 93), torch.tensor([0, 1] * 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    first = last = None
    for _ in range(40):
        glimpsed = model.glimpse(views, sample=True)
        scores = model.classify(glimpsed.features.mean(dim=1))
        last = functional.cross_entropy(scores, labels)
        first = last.item() if first is None else first
        optimizer.zero_grad()
        (last + reinforce(scores, labels, glimpsed.log_p)).backward()
        optimizer.step()
    assert last < 0.2 < first


def test_rewards_teach_where_to_look():
    torch.manual_seed(0)
    cell = SaccaderCell(4)
    mixed = torch.nn.Parameter(noise(1, 4, 6))
    optimizer = torch.optim.Adam([mixed, *cell.parameters()], lr=0.1)
    for _ in range(60):
        found = visit(cell, mixed.expand(64, -1, -1), 1, sample=True)
        rewards = (found.places[:, 0] == 4).float()
        loss = -((rewards - rewards.mean())[:, None] * found.log_p).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert visit(cell, mixed, 1).attention[0, 4] > 0.8


def test_imitation_teaches_the_places_that_speak_most_for_the_class():
    torch.manual_seed(0)
    model = build().train()
    for part in model.modules():
        if isinstance(part, torch.nn.BatchNorm2d) and not part.weight.any():
            part.weight.data.fill_(1)
    views = noise(4, 3, 101, 101)
    optimizer = torch.optim.Adam(model.location.parameters(), lr=1e-2)
    losses = []
    for _ in range(30):
        loss = model.study(views, [ROOT] * 4)[1].own.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
    assert all(parameter.grad is None for parameter in model.backbone.parameters())
