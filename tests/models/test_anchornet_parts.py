import numpy as np
import pytest
import torch
from torch import nn
from torchvision.models.mobilenetv3 import InvertedResidual, InvertedResidualConfig

from tests.models.contract import noise
from tests.models.places import patch_at
from tests.models.published import count_layers, count_parameters
from tnetcli.models.anchornet import Anchors, Attention, Bottleneck, Branch, SqueezeExcite
from tnetcli.models.configs import AnchorNetConfig
from tnetcli.models.lsp import FIELDS

SIDES = (21, 17, 15)
# SPEC 4.5: squeeze, ratio, parameters with auxiliary classifiers and without.
PUBLISHED = [
    ("mobilenetv3", 4, 2_529_731, 2_238_731),
    ("input", 4, 1_706_727, 1_415_727),
    ("output", 4, 1_550_601, 1_259_601),
    ("expanded", 16, 1_758_355, 1_467_355),
    ("none", 4, 1_498_347, 1_207_347),
]


def config(**more):
    return AnchorNetConfig(backbone="anchornet", **more)


def anchors(classes=5, bands=3, seed=0, **more):
    torch.manual_seed(seed)
    return Anchors(config(**more), classes=classes, bands=bands).eval()


@pytest.fixture(scope="module")
def local():
    """Return a network without squeeze-excite, which alone sees the whole map."""
    return anchors(squeeze="none").requires_grad_(False)


@pytest.fixture(scope="module")
def view():
    return noise(1, 3, 224, 224)


@pytest.fixture(scope="module")
def positive():
    """Return a network through which every gradient passes: all it holds is above zero."""
    net = anchors(squeeze="none").double().requires_grad_(False)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            module.weight.fill_(4 / module.weight[0].numel())
    return net


@pytest.mark.parametrize(("squeeze", "ratio", "full", "bare"), PUBLISHED)
def test_parameters_and_multiplications_are_those_of_the_specification(squeeze, ratio, full, bare):
    with torch.device("meta"):
        view = torch.empty(1, 3, 224, 224)
        for auxiliary, expected in ((True, full), (False, bare)):
            net = anchors(1000, squeeze=squeeze, squeeze_ratio=ratio, auxiliary=auxiliary)
            assert count_parameters(net).trainable == expected
            with count_layers(net) as count:
                net(view)
            assert 0.486e9 < count.layers < 0.490e9


def test_the_default_meets_the_published_parameters():
    net = anchors(1000)
    counted = count_parameters(net)
    assert 1.55e6 <= counted.trainable <= counted.total < 1.6e6


def by_formula(classes=1000):
    """Count the multiplications of SPEC 4.2 and 4.3 without squeeze-excite from the tables."""
    head = [  # side after, inputs, expanded, outputs, kernel, side before
        (55, 16, 16, 16, 3, 111), (27, 16, 72, 24, 3, 55), (27, 24, 88, 24, 1, 27),
        (27, 24, 96, 40, 1, 27), (27, 40, 240, 40, 1, 27), (27, 40, 240, 40, 1, 27),
        (27, 40, 120, 48, 1, 27), (25, 48, 144, 48, 3, 27), (23, 48, 288, 96, 3, 25),
    ]  # fmt: skip
    branches = [
        (21, 96, 480, 96, 3, 23), (21, 96, 576, 96, 1, 21), (21, 96, 192, 96, 1, 21),
        (21, 96, 480, 96, 3, 23), (17, 96, 576, 96, 5, 21), (17, 96, 192, 96, 1, 17),
        (19, 96, 480, 96, 5, 23), (15, 96, 576, 96, 5, 19), (15, 96, 192, 96, 1, 15),
    ]  # fmt: skip
    total = 111**2 * 27 * 16
    for after, inputs, expanded, outputs, kernel, before in head + branches:
        total += before**2 * inputs * expanded
        total += after**2 * expanded * (kernel**2 + outputs)
    return total + sum(side**2 * 96 * (classes + 1) for side in SIDES)


def test_multiplications_are_what_the_tables_add_up_to():
    with torch.device("meta"):
        net = anchors(1000, squeeze="none")
        with count_layers(net) as count:
            net(torch.empty(1, 3, 224, 224))
    assert (count.layers, count.scaling) == (by_formula(), 0)


def test_map_sizes_are_those_of_the_tables(local, view):
    sides, x = [], view
    for part in local.head:
        x = part(x)
        if isinstance(part, nn.Conv2d | Bottleneck):
            sides.append(x.shape[2:])
    assert sides == [(side, side) for side in (111, 55, 27, 27, 27, 27, 27, 27, 25, 23)]
    assert x.shape == (1, 96, 23, 23)
    seen = local(view)
    assert [each.logits.shape for each in seen] == [(1, 5, side, side) for side in SIDES]
    assert [each.shares.shape for each in seen] == [(1, 1, side, side) for side in SIDES]


@pytest.mark.parametrize("branch", [0, 1, 2])
@pytest.mark.parametrize("crop", ["center", "corner"])
def test_a_position_sees_its_patch_and_nothing_else(positive, branch, crop):
    for block in positive.modules():
        if isinstance(block, Bottleneck):
            block.crop = crop
    last = SIDES[branch] - 1
    for row, column in ((0, 0), (3, last), (last, last)):
        pixels = torch.ones(1, 3, 224, 224, dtype=torch.float64, requires_grad=True)
        positive(pixels)[branch].logits[0, :, row, column].sum().backward()
        reached = pixels.grad[0].abs().sum(dim=0) > 0
        box = patch_at(row, column, FIELDS[branch])
        expected = torch.zeros(224, 224, dtype=torch.bool)
        expected[int(box.top) : int(box.bottom), int(box.left) : int(box.right)] = True
        assert torch.equal(reached, expected)


def changed_outside(view, box, seed=9):
    other = noise(*view.shape, seed=seed)
    rows = slice(int(box.top), int(box.bottom))
    columns = slice(int(box.left), int(box.right))
    other[:, :, rows, columns] = view[:, :, rows, columns]
    return other


@pytest.mark.parametrize("branch", [0, 1, 2])
def test_what_lies_outside_a_patch_changes_nothing_of_its_logits(local, view, branch):
    other = changed_outside(view, patch_at(4, 7, FIELDS[branch]))
    before, after = local(view)[branch].logits, local(other)[branch].logits
    torch.testing.assert_close(after[..., 4, 7], before[..., 4, 7], rtol=0, atol=1e-6)
    assert (after[..., 8, 7] - before[..., 8, 7]).abs().max() > 1e-4


def test_squeeze_excite_alone_sees_the_whole_map(view):
    net = anchors(squeeze="output").requires_grad_(False)
    other = changed_outside(view, patch_at(4, 7, 63))
    before, after = net(view)[0].logits, net(other)[0].logits
    assert (after[..., 4, 7] - before[..., 4, 7]).abs().max() > 1e-6


def test_shares_sum_to_one_and_are_the_same_for_every_class(local, view):
    for seen in local(torch.cat([view, 3 * view])):
        torch.testing.assert_close(seen.shares.sum(dim=(1, 2, 3)), torch.ones(2))
        assert (seen.shares >= 0).all()
        for label in range(5):
            labels = torch.full((2,), label)
            attended, bare = (seen.heat(labels, attended=each) for each in (True, False))
            assert torch.equal(bare, seen.logits[:, label])
            torch.testing.assert_close(attended, seen.shares[:, 0] * bare)


def test_the_map_of_each_view_is_that_of_its_own_class(local, view):
    (seen, *_) = local(torch.cat([view, 2 * view]))
    heat = seen.heat(torch.tensor([3, 1]), attended=False)
    assert torch.equal(heat[0], seen.logits[0, 3])
    assert torch.equal(heat[1], seen.logits[1, 1])


@pytest.mark.parametrize("pool", ["sum", "mean"])
def test_scores_are_the_attended_map_over_all_positions(view, pool):
    net = anchors(pool=pool).requires_grad_(False)
    for seen, side in zip(net(view), SIDES, strict=True):
        logits = seen.logits[0].double().numpy()
        shares = seen.shares[0, 0].double().numpy()
        expected = np.einsum("hw,chw->c", shares, logits) / (side**2 if pool == "mean" else 1)
        assert seen.scores[0].numpy() == pytest.approx(expected, rel=1e-4, abs=1e-8)


def test_attention_is_by_place_then_by_channel_then_by_place():
    torch.manual_seed(0)
    attention = Attention(config()).eval().requires_grad_(False)
    x = noise(1, 96, 4, 5)
    shares, seen = attention(x)
    assert seen.shape == x.shape
    maps = seen[0].double().numpy()  # (channels, height, width)
    weight = attention.score.weight[0, :, 0, 0].double().numpy()
    places = np.exp(np.tensordot(weight, maps, 1) + attention.score.bias.item())
    places /= places.sum()
    channels = np.exp(np.array([(places * each).sum() for each in maps]))
    channels /= channels.sum()
    again = np.exp(sum(c * each for c, each in zip(channels, maps, strict=True)))
    assert shares[0, 0].numpy() == pytest.approx(again / again.sum(), rel=1e-5)


def test_auxiliary_classifiers_run_in_training_only(view):
    net = anchors().requires_grad_(False)
    assert [seen.auxiliary for seen in net(view)] == [None] * 3
    net.train()
    for branch, seen in zip(net.branches, net(torch.cat([view, view.flip(3)])), strict=True):
        assert seen.auxiliary.shape == (2, 5)
        assert isinstance(branch.auxiliary, nn.Linear)
    bare = anchors(auxiliary=False).train()
    assert [seen.auxiliary for seen in bare(torch.cat([view, view]))] == [None] * 3
    assert not any("auxiliary" in name for name, _ in bare.named_parameters())


def test_an_auxiliary_classifier_reads_the_mean_of_what_attention_saw():
    torch.manual_seed(0)
    branch = Branch((3, 1), config(), classes=4).requires_grad_(False)
    for part in branch.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.eval()
    x = noise(2, 96, 9, 9)
    _, seen = branch.attention(branch.blocks(x))
    expected = seen.flatten(2).mean(dim=2) @ branch.auxiliary.weight.T + branch.auxiliary.bias
    torch.testing.assert_close(branch(x).auxiliary, expected)


def as_torchvision(block, *, kernel, inputs, expanded, outputs, swish, squeeze):
    """Return torchvision's block of MobileNetV3 with the same weights, which pads."""
    config = InvertedResidualConfig(
        inputs, kernel, expanded, outputs, squeeze, "HS" if swish else "RE", 1, 1, 1.0
    )
    other = InvertedResidual(config, nn.BatchNorm2d).eval().requires_grad_(False)
    weights = dict(zip(other.state_dict(), block.state_dict().values(), strict=True))
    other.load_state_dict(weights)
    return other


def stir(block):
    """Give batch norms something to do."""
    for part in block.modules():
        if isinstance(part, nn.BatchNorm2d):
            for each in (part.weight, part.bias, part.running_mean, part.running_var):
                each.uniform_(0.5, 1.5)


@pytest.mark.parametrize(("inputs", "outputs"), [(40, 40), (24, 40)])
@pytest.mark.parametrize("swish", [True, False])
@pytest.mark.parametrize("squeezed", [True, False])
def test_a_block_of_single_pixels_is_that_of_torchvision(inputs, outputs, swish, squeezed):
    torch.manual_seed(1)
    block = Bottleneck(
        inputs, 120, outputs, config(squeeze="mobilenetv3"), squeezed=squeezed, swish=swish
    )
    block.eval().requires_grad_(False)
    stir(block)
    other = as_torchvision(
        block,
        kernel=1, inputs=inputs, expanded=120, outputs=outputs, swish=swish, squeeze=squeezed,
    )  # fmt: skip
    x = noise(2, inputs, 6, 7)
    torch.testing.assert_close(block(x), other(x))


@pytest.mark.parametrize("kernel", [3, 5])
def test_a_block_without_padding_is_the_inside_of_one_with_padding(kernel):
    torch.manual_seed(1)
    block = Bottleneck(48, 144, 48, config(squeeze="none"), kernel=kernel)
    block.eval().requires_grad_(False)
    stir(block)
    other = as_torchvision(
        block, kernel=kernel, inputs=48, expanded=144, outputs=48, swish=True, squeeze=False
    )
    x, cut = noise(2, 48, 11, 9), kernel // 2
    torch.testing.assert_close(block(x), other(x)[:, :, cut:-cut, cut:-cut])


@pytest.mark.parametrize(
    ("crop", "kernel", "kept"),
    [
        ("center", 5, slice(2, 7)),
        ("center", 3, slice(1, 8)),
        ("corner", 5, slice(0, 5)),
        ("corner", 3, slice(0, 7)),
        ("center", 1, slice(0, 9)),
    ],
)
def test_what_a_shortcut_keeps(crop, kernel, kept):
    block = Bottleneck(8, 16, 8, config(crop=crop, squeeze="none"), kernel=kernel)
    block.eval().requires_grad_(False)
    block.layers[-1].weight.fill_(0)  # the other way adds nothing
    x = noise(1, 8, 9, 9)
    assert torch.equal(block(x), x[:, :, kept, kept])


@pytest.mark.parametrize(("inputs", "outputs", "stride"), [(8, 12, 1), (8, 8, 2)])
def test_there_is_no_shortcut_where_shapes_differ(inputs, outputs, stride):
    block = Bottleneck(inputs, 16, outputs, config(squeeze="none"), kernel=3, stride=stride)
    block.eval().requires_grad_(False)
    block.layers[-1].weight.fill_(0)
    assert not block(noise(1, inputs, 9, 9)).any()


def test_squeeze_excite_and_activations_are_where_the_tables_have_them():
    net = anchors(squeeze="mobilenetv3")
    blocks = [part for part in net.head if isinstance(part, Bottleneck)]
    squeezed = [any(isinstance(p, SqueezeExcite) for p in block.modules()) for block in blocks]
    swish = [any(isinstance(p, nn.Hardswish) for p in block.modules()) for block in blocks]
    assert squeezed == swish == [False] * 3 + [True] * 6
    assert isinstance(net.head[2], nn.Hardswish)
    for block in blocks:
        kinds = {type(p) for p in block.layers if isinstance(p, nn.Hardswish | nn.ReLU)}
        assert len(kinds) == 1
    for part in net.branches.modules():
        if isinstance(part, Bottleneck):
            assert any(isinstance(each, SqueezeExcite) for each in part.layers)
            assert not any(isinstance(each, nn.ReLU) for each in part.layers)


def test_any_number_of_bands_is_seen():
    for seen in anchors(bands=5)(noise(2, 5, 128, 128)):
        assert seen.scores.isfinite().all()
