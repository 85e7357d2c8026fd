import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch.nn import functional

from tests.images import noise as image_noise
from tests.images import write_geotiff
from tests.models.published import outline, traverse
from tnetcli.data.normalize import Normalisation
from tnetcli.errors import ModelError
from tnetcli.models.configs import SaccaderConfig
from tnetcli.models.registry import build_model, read_model_config
from tnetcli.models.saccader import PatchNet, SaccaderCell, SaccaderLocation, choose_positions
from tnetcli.prediction.inference import Inference
from tnetcli.readers.detect import open_image
from tnetcli.testing.model import ROOT, Case, ModelContract, encode, noise
from tnetcli.training.reinforce import draw_log_probability
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import TopK

SMALL = {"view_size": 101, "width": 0.0625, "glimpses": 3}  # 4 x 4 places
PUBLISHED = {"view_size": 224, "glimpses": 6}


def build(classes=3, **config):
    torch.manual_seed(0)
    return build_model("saccader", SMALL | config, classes=classes).eval()


@pytest.fixture(scope="module")
def model():
    return build().requires_grad_(False)


def chosen_by(model, views, *, sample=False):
    """Return the narrow map of views, and the positions that the location module chooses."""
    wide, narrow = model.backbone(views)
    mixed = model.location.mixed(wide.detach(), narrow.detach())
    return narrow, choose_positions(model.location.cell, mixed, model.glimpses, sample=sample)


def places_of(model, out):
    """Return the places (views, glimpses) of an encoder's glimpse boxes."""
    corner = (out.aux["glimpse_boxes"][..., :2] * model.view_size / 8).round().long()
    return corner[..., 1] * model.grid.columns + corner[..., 0]


class TestSaccader(ModelContract):
    case = Case("saccader", SMALL)


class TestSaccaderOfOnePosition(ModelContract):
    case = Case(
        "saccader",
        {"view_size": 77, "width": 0.0625, "glimpses": 1},
        # With one position there is nothing to choose.
        never_learned={
            f"location.{name}" for name, _ in SaccaderLocation(128, 32).named_parameters()
        },
    )


def step_by_hand(mixed, weight, taken):
    """Return the probability of each position of a map (channels, positions) to be next."""
    channels, places = mixed.shape
    free = [place for place in range(places) if place not in taken]
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


def test_the_cell_chooses_as_plain_loops_do():
    cell, mixed = cell_of(5), 2 * noise(2, 5, 7, seed=3).double()
    found = choose_positions(cell, mixed, 7)
    for region in range(2):
        taken = []
        for number in range(7):
            probabilities = step_by_hand(mixed[region].numpy(), cell.score.weight[0].numpy(), taken)
            best = max(probabilities, key=probabilities.get)
            assert found.positions[region, number] == best
            assert found.log_p[region, number].exp().item() == pytest.approx(probabilities[best])
            taken.append(best)


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 12), st.booleans(), st.integers(0, 5), st.sampled_from([0.1, 3, 1e3, 1e7]))
def test_no_position_is_chosen_twice(places, sample, seed, scale):
    mixed = scale * noise(3, 4, places, seed=seed)
    torch.manual_seed(seed)
    found = choose_positions(cell_of(4).float(), mixed, places, sample=sample)
    everywhere = torch.arange(places).expand(3, -1)
    assert torch.equal(found.positions.sort(dim=1).values, everywhere)


@pytest.mark.parametrize("sample", [False, True])
@pytest.mark.parametrize("glimpses", [1, 9])
def test_attention_gives_the_chosen_positions_the_probabilities_of_their_steps(glimpses, sample):
    torch.manual_seed(1)
    found = choose_positions(cell_of(4), 3 * noise(6, 4, 9).double(), glimpses, sample=sample)
    torch.testing.assert_close(found.attention.sum(dim=1), torch.ones(6).double())
    drawn = draw_log_probability(
        found.attention, found.positions, torch.ones(6, 9, dtype=torch.bool)
    )  # as a policy draws cells
    # The last of all places is certain, whatever is left of it.
    torch.testing.assert_close(drawn, found.log_p, rtol=0, atol=1e-6)


def test_given_positions_are_followed():
    cell, mixed = cell_of(4), noise(2, 4, 9).double()
    given = torch.tensor([[3, 1, 8], [0, 2, 7]])
    found = choose_positions(cell, mixed, 3, follow=given)
    assert torch.equal(found.positions, given)
    for region, order in enumerate(given.tolist()):
        for number, place in enumerate(order):
            weight = cell.score.weight[0].numpy()
            probabilities = step_by_hand(mixed[region].numpy(), weight, order[:number])
            assert found.log_p[region, number].exp().item() == pytest.approx(probabilities[place])


def test_draws_are_as_frequent_as_they_are_probable():
    cell, one = cell_of(3), 2 * noise(1, 3, 3, seed=2).double()
    torch.manual_seed(0)
    found = choose_positions(cell, one.expand(6000, -1, -1), 2, sample=True)
    weight = cell.score.weight[0].numpy()
    for first, second in itertools.permutations(range(3), 2):
        expected = step_by_hand(one[0].numpy(), weight, [])[first]
        expected *= step_by_hand(one[0].numpy(), weight, [first])[second]
        often = (found.positions == torch.tensor([first, second])).all(dim=1).double().mean().item()
        assert abs(often - expected) < 4 * math.sqrt(expected * (1 - expected) / 6000) + 1e-3


@pytest.mark.parametrize(("side", "places"), [(77, 1), (84, 1), (85, 2), (101, 4), (224, 19)])
def test_the_map_has_one_position_per_8_pixels(side, places):
    net = PatchNet(1, 0.0625).eval()
    with torch.no_grad():
        wide, narrow = net(noise(1, 1, side, side))
    assert wide.shape[2:] == narrow.shape[2:] == (places, places)
    assert SaccaderConfig(view_size=side, glimpses=1).positions == places


def test_a_position_sees_77_pixels_and_no_other():
    net = PatchNet(1, 0.0625).eval()
    for part in net.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            part.weight.data.fill_(1)
    views = noise(1, 1, 101, 101).requires_grad_(True)
    net(views)[1][0, :, 1, 2].sum().backward()
    rows, columns = (views.grad[0, 0].abs().sum(dim=axis).nonzero() for axis in (1, 0))
    assert (rows.min(), rows.max()) == (8, 8 + 76)
    assert (columns.min(), columns.max()) == (16, 16 + 76)


def test_the_logits_of_a_view_are_the_mean_of_those_at_the_chosen_positions(model):
    views = noise(2, 3, 101, 101)
    narrow, chosen = chosen_by(model, views)
    everywhere = functional.conv2d(
        narrow, model.head.weight[:, :, None, None], model.head.bias
    )  # (regions, classes, 4, 4), as the public code has them
    places = chosen.positions[:, None].expand(-1, 3, -1)
    expected = everywhere.flatten(2).gather(2, places).mean(dim=2)
    out = encode(model, views, [ROOT] * 2)
    torch.testing.assert_close(model.head(out.features), expected)
    assert torch.equal(places_of(model, out), chosen.positions)
    torch.testing.assert_close(out.cell_logits[..., 0].exp(), chosen.attention)


def test_positions_are_sampled_in_training_only():
    model, same = build().requires_grad_(False), noise(1, 3, 101, 101).expand(16, -1, -1, -1)
    calm = places_of(model, encode(model, same, [ROOT] * 16))
    assert len(set(map(tuple, calm.tolist()))) == 1
    for part in (model, model.location):  # batch norm as in evaluation
        part.training = True
    drawn = places_of(model, encode(model, same, [ROOT] * 16))
    assert len(set(map(tuple, drawn.tolist()))) > 4


def test_a_glimpse_sees_its_box_and_nothing_else():
    model = build(view_size=117)
    for part in model.backbone.modules():
        if isinstance(part, torch.nn.BatchNorm2d):
            torch.nn.init.ones_(part.weight)  # else blocks add nothing before they have learned
    views = noise(16, 3, 117, 117).requires_grad_()
    out = encode(model, views, [ROOT] * 16)
    boxes, features = out.aux["glimpse_boxes"], out.aux["glimpse_features"]
    cells = {ROOT.window.cell(model.grid, *cell).box for cell in model.grid.cells()}
    assert all(len(set(places)) == 3 for places in places_of(model, out).tolist())
    torch.testing.assert_close(features.mean(dim=1), out.features)
    (slope,) = torch.autograd.grad(features[:, 0].sum(), views)  # (views, bands, height, width)
    for number, box in enumerate((boxes[:, 0] * 117).round().int().tolist()):
        rows, columns = (slope[number] != 0).any(dim=0).nonzero().T
        seen = [int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1]
        assert seen == box
        across, down = ROOT.window.width / 117, ROOT.window.height / 117
        window = (box[0] * across, box[1] * down, box[2] * across, box[3] * down)
        assert any(window == pytest.approx(cell) for cell in cells)


def test_all_positions_count_while_the_location_module_is_frozen():
    model, views = build(), noise(2, 3, 101, 101)
    model.train()
    model.location.eval()
    expected = model.backbone(views)[1].mean(dim=(2, 3))
    out = encode(model, views, [ROOT] * 2)
    torch.testing.assert_close(out.features, expected)
    assert not out.aux


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"backbone": "resnet18"}, "`backbone` is `resnet18`"),
        ({"pooling": "mean_max"}, "pooling `mean`"),
        ({"drop_path": 0.1}, "no drop_path"),
        ({"view_size": 76}, "view_size"),
        ({"glimpses": 17}, "a view has 16 positions"),
        ({"grid": {"rows": 2, "columns": 2, "cell_fraction": 0.5}}, "grid"),
    ],
)
def test_a_wrong_configuration_is_an_error(config, problem):
    with pytest.raises(ModelError, match=problem):
        read_model_config("saccader", SMALL | config)


def test_weights_of_the_network_are_loaded_for_other_bands(tmp_path):
    other, path = PatchNet(3, 0.0625), tmp_path / "a.safetensors"
    save_file(other.state_dict(), path)
    model = build_model("saccader", SMALL, classes=2, bands=4, pretrained=path)
    assert torch.equal(model.backbone.head[0].weight, other.head[0].weight)
    assert model.backbone.to_map[0].weight.shape[1] == 4
    with pytest.raises(ModelError, match="no weights of `saccader` are published"):
        build_model("saccader", SMALL, classes=2, pretrained=True)


def test_a_traversal_reads_the_positions_with_the_most_attention(model, tmp_path):
    image = image_noise((800, 600))
    path = write_geotiff(tmp_path / "a.tif", image, overviews=[2, 4])
    unit = Normalisation.to_unit_range("uint8", 3)
    with open_image(path) as reader, Inference(model, unit, device="cpu", threads=1) as inference:
        result, alone = (
            inference.run([reader], TraversalConfig(levels=levels, keep=(3,)), [TopK()])[0]
            for levels in (2, 1)
        )
    assert (len(result.nodes), result.glimpses.shape) == (4, (4, 3, 4))
    corner = np.rint(result.glimpses[0, :, :2] * 101 / 8).astype(int)  # before it has learned
    expected = sorted(f"root/{row}-{column}" for column, row in corner)
    assert [node.region.path for node in result.nodes[1:]] == expected
    widths = [node.region.window.width for node in result.nodes[1:]]
    assert widths == pytest.approx([800 * 77 / 101] * 3)
    assert np.array_equal(result.level_logits[0], alone.logits)


def test_multiplications_with_logits_at_every_position_are_the_published_19_50_billion():
    model = outline("saccader", PUBLISHED, 1000)
    everywhere = traverse(model).layers + (19 * 19 - 1) * 512 * 1000
    assert everywhere == 19_503_521_024  # counted apart, layer by layer, from the public code
