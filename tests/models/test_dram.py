import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.models.published import count_layers, outline, traverse
from tnetcli.errors import ModelError
from tnetcli.geometry import Grid, Window
from tnetcli.models.dram import Emission, Glimpses, LstmCell, State, cell_centres, glimpse_fields
from tnetcli.models.registry import build_model, read_model_config
from tnetcli.testing.model import ROOT, Case, ModelContract, encode, noise

SMALL = {
    "backbone": "compact", "view_size": 64, "glimpse_size": 32, "glimpses": 3, "state_size": 32,
}  # fmt: skip


def build(classes=3, **config):
    torch.manual_seed(0)
    return build_model("dram", SMALL | config, classes=classes).eval()


@pytest.fixture(scope="module")
def model():
    return build().requires_grad_(False)


class TestDram(ModelContract):
    case = Case("dram", SMALL)


class TestDramWithMaxima(ModelContract):
    case = Case("dram", SMALL | {"pooling": "mean_max", "glimpses": 2})


def test_a_recurrent_step_is_one_of_torch_with_the_forget_gate_raised():
    torch.manual_seed(0)
    ours, theirs = LstmCell(5, 4), nn.LSTMCell(5, 4)
    enter, new, keep, leave = ours.gates.weight.detach().chunk(4)  # torch: enter, keep, new, leave
    weight = torch.cat([enter, keep, new, leave])
    enter, new, keep, leave = ours.gates.bias.detach().chunk(4)
    with torch.no_grad():
        theirs.weight_ih.copy_(weight[:, :5])
        theirs.weight_hh.copy_(weight[:, 5:])
        theirs.bias_ih.copy_(torch.cat([enter, keep + 1, new, leave]))
        theirs.bias_hh.zero_()
        state, expected = None, (torch.zeros(3, 4), torch.zeros(3, 4))
        for step in range(4):
            x = noise(3, 5, seed=step)
            state, expected = ours(x, state), theirs(x, expected)
            torch.testing.assert_close(state, State(*expected))


def test_a_position_is_the_most_probable_one_unless_sampled():
    torch.manual_seed(0)
    emission, seen = Emission(6, 0.7, 0.1), noise(500, 6)
    calm = emission(seen, None, sample=False)
    assert torch.equal(calm.place, calm.mean.detach())
    drawn = emission(seen, None, sample=True)
    torch.testing.assert_close(drawn.mean, calm.mean)
    apart = drawn.place - calm.place
    assert 0.09 < float(apart.std()) < 0.11
    assert drawn.place.abs().max() <= 0.7
    assert not drawn.place.requires_grad


def test_the_probability_of_a_draw_is_that_of_a_normal_distribution():
    torch.manual_seed(0)
    emission = Emission(6, 0.7, 0.2)
    torch.manual_seed(1)
    drawn = emission(noise(50, 6), None, sample=True)
    torch.manual_seed(1)
    before = drawn.mean.detach() + 0.2 * torch.randn(50, 2)  # before clamping
    normal = torch.distributions.Normal(drawn.mean, 0.2)
    torch.testing.assert_close(drawn.log_p, normal.log_prob(before).sum(dim=1))
    torch.testing.assert_close(drawn.place, before.clamp(-0.7, 0.7))


def brute_force(view, place, field, size):
    """Crop pixel by pixel, repeating the edge, then average small squares."""
    bands, height, width = view.shape
    rows = np.linspace(-1, 1, height)[:, None].repeat(width, 1)
    columns = np.linspace(-1, 1, width)[None].repeat(height, 0)
    placed = np.concatenate([view, rows[None], columns[None]])
    top = int(np.floor(height * (place[0] + 1) / 2 - field / 2 + 1e-3))
    left = int(np.floor(width * (place[1] + 1) / 2 - field / 2 + 1e-3))
    crop = np.zeros((bands + 2, field, field))
    for row in range(field):
        for column in range(field):
            y, x = min(max(top + row, 0), height - 1), min(max(left + column, 0), width - 1)
            crop[:, row, column] = placed[:, y, x]
    fine = crop.repeat(size, axis=1).repeat(size, axis=2)  # each pixel as size x size
    return fine.reshape(bands + 2, size, field, size, field).mean(axis=(2, 4))


@settings(deadline=None, max_examples=20)
@given(
    st.integers(8, 20),
    st.integers(0, 14),
    st.integers(1, 4),
    st.floats(-1, 1, width=32),
    st.floats(-1, 1, width=32),
)
def test_a_glimpse_is_the_crop_of_each_field_and_its_area_mean(size, more, scales, y, x):
    view = noise(2, size + more, size + more)
    glimpses = Glimpses(size + more, size, scales)
    found = glimpses(view[None], torch.tensor([[y, x]]))[0].numpy()
    assert found.shape == (scales * 4, size, size)
    for number, field in enumerate(glimpse_fields(size + more, size, scales)):
        expected = brute_force(view.double().numpy(), (y, x), field, size)
        np.testing.assert_allclose(found[4 * number : 4 * number + 4], expected, atol=2e-6)


def test_the_published_glimpses_show_77_150_and_224_pixels():
    assert glimpse_fields(224, 77, 3) == (77, 150, 224)
    assert glimpse_fields(224, 77, 1) == (77,)
    assert glimpse_fields(64, 64, 2) == (64, 64)


@pytest.mark.parametrize("place", [(-1, -1), (1, 1), (-1, 1)])
def test_a_glimpse_at_the_end_of_its_reach_shows_the_edge_of_the_view(place):
    view, reach = noise(1, 3, 24, 24), 1 - 8 / 24
    found = Glimpses(24, 8, 1)(view, reach * torch.tensor([place], dtype=torch.float32))
    top, left = (8 * (each + 1) for each in place)
    assert torch.equal(found[:, :3], view[:, :, top : top + 8, left : left + 8])


def test_with_sharp_only_the_coarser_scales_are_their_mean():
    view, place = noise(3, 3, 30, 30), noise(3, 2).tanh() / 2
    glimpses = Glimpses(30, 10, 3)
    assert not glimpses.state_dict()
    whole, sharp = glimpses(view, place), glimpses(view, place, sharp_only=True)
    assert torch.equal(sharp[:, :5], whole[:, :5])
    wide = sharp[:, 5:]
    torch.testing.assert_close(wide, whole[:, 5:].mean(dim=(2, 3), keepdim=True).expand_as(wide))


def test_glimpses_are_taken_one_after_another(model):
    views = noise(2, 3, 64, 64)
    features = model.backbone(model.cut(views, torch.zeros(2, 2)))[1]
    context = model.recurrent(features, None)
    emitted = model.location(context.output, None, sample=False)
    state, outputs, places = None, [], []
    for _ in range(3):
        places.append(emitted.place)
        features = model.backbone(model.cut(views, emitted.place, sharp_only=True))[1]
        state = model.recurrent(features, state)
        outputs.append(state.output)
        emitted = model.location(state.output, emitted.state, sample=False)
    found = model.glimpse(views)
    torch.testing.assert_close(found.features, torch.stack(outputs, dim=1))
    torch.testing.assert_close(found.places, torch.stack(places, dim=1))
    torch.testing.assert_close(found.context, context.output)
    torch.testing.assert_close(encode(model, views, [ROOT] * 2).features, outputs[-1])


def test_places_are_sampled_in_training_only():
    model, same = build().requires_grad_(False), noise(1, 3, 64, 64).expand(8, -1, -1, -1)
    calm = encode(model, same, [ROOT] * 8)
    assert len(calm.aux["glimpse_boxes"].unique(dim=0)) == 1
    assert calm.aux.keys() == {"glimpse_boxes", "glimpse_features"}
    for part in (model, model.location):  # batch norm as in evaluation
        part.training = True
    drawn = encode(model, same, [ROOT] * 8)
    assert len(drawn.aux["glimpse_boxes"].unique(dim=0)) == 8
    assert {"side_logits", "log_p"} <= drawn.aux.keys()


def test_the_first_glimpse_at_the_centre_only_chooses_the_first_position():
    model = build(glimpses=1, scales=1).requires_grad_(False)
    model.location.place.weight.zero_()
    model.location.place.bias.fill_(-20)  # always the top left
    views = noise(1, 3, 64, 64)
    other = views.clone()
    other[:, :, 32:, 32:] = 5  # partly inside the first glimpse
    one, two = model.glimpse(views), model.glimpse(other)
    assert torch.equal(one.features, two.features)
    assert not torch.equal(one.context, two.context)


def test_the_box_of_a_glimpse_is_that_of_the_pixels_it_shows(model):
    views = noise(8, 3, 64, 64)
    glimpsed, out = model.glimpse(views), encode(model, views, [ROOT] * 8)
    for number in range(3):
        shown = model.cut(views, glimpsed.places[:, number])[:, 3:5]  # where its pixels lie
        pixel = ((shown + 1) * 63 / 2).round().int()
        first, last = pixel.amin(dim=(2, 3)), pixel.amax(dim=(2, 3)) + 1  # (views, down across)
        box = torch.cat([first.flip(1), last.flip(1)], dim=1)
        assert torch.equal((out.aux["glimpse_boxes"][:, number] * 64).round().int(), box)
    assert torch.equal(out.aux["glimpse_features"][:, -1], out.features)


def test_attention_is_highest_where_the_glimpse_was():
    model = build(glimpses=1).requires_grad_(False)
    for row, column in ((0, 0), (3, 5), (6, 2)):
        with torch.no_grad():
            target = model.centres.view(7, 7, 2)[row, column] / 0.5
            model.location.place.weight.zero_()
            model.location.place.bias.copy_(torch.atanh(target.clamp(-0.999, 0.999)))
        attention = encode(model, noise(1, 3, 64, 64), [ROOT]).cell_logits[0, :, 0]
        assert divmod(int(attention.argmax()), 7) == (row, column)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"glimpse_size": 65}, "a view has 64 pixels"),
        ({"glimpses": 0}, "glimpses"),
        ({"scales": 0}, "scales"),
        ({"deviation": 0}, "deviation"),
    ],
)
def test_a_wrong_configuration_is_an_error(config, problem):
    with pytest.raises(ModelError, match=problem):
        read_model_config("dram", SMALL | config)


def test_a_backbone_that_does_not_accept_glimpses_is_an_error():
    with pytest.raises(ModelError, match="does not accept views of 16 pixels"):
        build_model("dram", SMALL | {"backbone": "bagnet77", "glimpse_size": 16}, classes=2)


ONE_PASS = 617_462_720  # of ResNet-50 over a glimpse of 77 pixels


def test_multiplications_are_those_of_the_layers():
    model = outline("dram", {"glimpses": 4}, 1000)
    with count_layers(model.backbone) as count:
        model.backbone(torch.zeros(1, 15, 77, 77, device="meta"))
    assert count.layers == ONE_PASS
    one_more = 5 * (ONE_PASS + 3072 * 4096)  # encoded, and the recurrent step
    expected = one_more + 4 * (2048 * 4096 + 1024 * 2) + 1024 * 1000
    assert traverse(model).layers == expected


def test_cell_centres_span_a_view_from_minus_1_to_1():
    grid, window = Grid(7, 7, 0.4), Window(-1, -1, 2, 2)
    for (row, column), found in zip(grid.cells(), cell_centres(grid), strict=True):
        x, y = window.cell(grid, row, column).centre
        assert found.tolist() == pytest.approx([y, x], abs=1e-6)
