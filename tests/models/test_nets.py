import pytest
import torch
from torch.nn import functional

from benchmarks.receptive_field import trace
from tnetcli.models.configs import ModelConfig
from tnetcli.models.encoders import build_backbone
from tnetcli.models.nets import BagNet77, BagNetBlock, Block, SameConv2d
from tnetcli.testing.model import noise

# Papadopoulos et al. 2021, appendix, table 4: after the stem and after each of the 16 blocks.
FIELDS = [3, 5, 9, 9, 13, 21, 21, 21, 29, 45, 45, 45, 45, 45, 61, 77, 77]
SIDES = {
    77: [75] + [38] * 3 + [19] * 4 + [9] * 6 + [7] * 3,
    224: [222] + [111] * 3 + [56] * 4 + [27] * 6 + [25] * 3,
}
CHANNELS = [64] + [256] * 3 + [512] * 4 + [1024] * 6 + [2048] * 3


def layers(net):
    return [net.stem, *net.to_map, *net.to_features]


@pytest.fixture(scope="module")
def outline():
    with torch.device("meta"):
        return BagNet77()


@pytest.mark.parametrize("view_size", SIDES)
def test_every_layer_of_bagnet_has_the_published_output_size(outline, view_size):
    x = torch.zeros(1, 3, view_size, view_size, device="meta")
    shapes = []
    for layer in layers(outline):
        x = layer(x)
        shapes.append(tuple(x.shape[1:]))
    sides = SIDES[view_size]
    assert shapes == list(zip(CHANNELS, sides, sides, strict=True))


def test_every_layer_of_bagnet_has_the_published_receptive_field(outline):
    view = torch.zeros(1, 3, 77, 77, device="meta")
    found = [
        [axis.size for axis in trace(torch.nn.Sequential(*layers(outline)[:count]), view)[1]]
        for count in range(1, 18)
    ]
    assert found == [[size, size] for size in FIELDS]


def test_bagnet_returns_a_map_of_9_and_512_features_for_77_pixels(outline):
    views = torch.zeros(2, 3, 77, 77, device="meta")
    maps, features = outline(views)
    assert (maps.shape, features.shape) == ((2, 1024, 9, 9), (2, 512))
    assert outline.forward_features(views).shape == (2, 512, 7, 7)


@pytest.mark.parametrize("q", [0, 4])
def test_gradients_reach_the_receptive_field_of_a_map_pixel_and_no_further(q):
    torch.manual_seed(0)
    net = BagNet77().requires_grad_(False)
    views = noise(1, 3, 77, 77).requires_grad_(True)
    net(views)[0][0, :, q, q].sum().backward()
    touched = views.grad[0].abs().sum(0)
    rows, columns = (touched.sum(axis).nonzero().flatten().tolist() for axis in (1, 0))
    first, last = max(8 * q + 7 - 22, 0), min(8 * q + 7 + 22, 76)
    assert rows == columns == list(range(first, last + 1))


@pytest.mark.parametrize(("length", "before", "after"), [(75, 1, 1), (38, 0, 1)])
def test_stride_2_pads_as_tensorflow_does(length, before, after):
    layer = SameConv2d(1, 1, 3, 2, bias=False)
    torch.nn.init.ones_(layer.weight)
    x = noise(1, 1, length, length)
    padded = functional.pad(x, (before, after, before, after))
    expected = functional.conv2d(padded, torch.ones(1, 1, 3, 3), stride=2)
    torch.testing.assert_close(layer(x), expected)
    assert layer(torch.zeros(1, 1, 5, 8)).shape == (1, 1, 3, 4)


@pytest.mark.parametrize(("kernel", "before", "after"), [(3, 1, 1), (4, 1, 2)])
def test_the_shortcut_is_cropped_as_an_unpadded_kernel_crops(kernel, before, after):
    block = shortcut_only(Block(8, BagNetBlock(kernel, 8, padding="valid")))
    x = noise(1, 8, 9, 11)
    kept = x[..., before : 9 - after, before : 11 - after]
    assert torch.equal(block(x), functional.leaky_relu(kept, 0.2))
    padded = shortcut_only(Block(8, BagNetBlock(3, 8)))
    assert torch.equal(padded(x), functional.leaky_relu(x, 0.2))


def test_bagnet_has_biases_bottlenecks_and_no_norm(outline):
    assert not [each for each in outline.modules() if "Norm" in type(each).__name__]
    convolutions = [each for each in outline.modules() if isinstance(each, torch.nn.Conv2d)]
    assert all(each.bias is not None for each in convolutions)
    block = Block(64, BagNetBlock(3, 256))
    inner = [layer.out_channels for layer in (block.reduce, block.spread, block.expand)]
    assert inner == [64, 64, 256]


def shortcut_only(block):
    torch.nn.init.zeros_(block.expand.weight)
    torch.nn.init.zeros_(block.expand.bias)
    return block.requires_grad_(False)


def test_the_compact_map_has_one_pixel_per_eight_of_the_view():
    backbone = build_backbone(ModelConfig(backbone="compact", view_size=128), bands=4)
    assert backbone.map_size == (64, 16, 16)
    assert backbone.feature_size == 96
