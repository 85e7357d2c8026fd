import pytest
import torch
from torch.nn import functional

from tests.models.contract import noise
from tnetcli.models.nets import SLOPE, BagNet77, Block, SameConv2d, Stage, trace

# SPEC 1.4, after the stem and after each of the 16 blocks.
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
def test_every_layer_puts_out_the_published_size(outline, view_size):
    x = torch.zeros(1, 3, view_size, view_size, device="meta")
    shapes = []
    for layer in layers(outline):
        x = layer(x)
        shapes.append(tuple(x.shape[1:]))
    sides = SIDES[view_size]
    assert shapes == list(zip(CHANNELS, sides, sides, strict=True))


def test_every_layer_sees_the_published_field(outline):
    view = torch.zeros(1, 3, 77, 77, device="meta")
    found = []
    for count in range(1, 18):
        _, fields = trace(torch.nn.Sequential(*layers(outline)[:count]), view)
        found.append([axis.size for axis in fields])
    assert found == [[size, size] for size in FIELDS]


def test_a_view_of_77_pixels_gives_a_map_of_9_and_512_features(outline):
    seen, features = outline(torch.zeros(2, 3, 77, 77, device="meta"))
    assert (seen.shape, features.shape) == ((2, 1024, 9, 9), (2, 512))


def test_a_map_pixel_is_centred_on_8_q_plus_7(outline):
    _, (rows, columns) = trace(lambda x: outline(x)[0], torch.zeros(1, 3, 77, 77, device="meta"))
    assert rows.centers(9) == columns.centers(9) == [8 * q + 7 for q in range(9)]


@pytest.mark.parametrize("q", [0, 3, 4, 8])
def test_a_map_pixel_learns_from_its_field_and_from_nothing_else(q):
    torch.manual_seed(0)
    net = BagNet77().requires_grad_(False)
    views = noise(1, 3, 77, 77).requires_grad_(True)
    net(views)[0][0, :, q, q].sum().backward()
    touched = views.grad[0].abs().sum(0)
    rows, columns = (touched.sum(axis).nonzero().flatten().tolist() for axis in (1, 0))
    first, last = max(8 * q + 7 - 22, 0), min(8 * q + 7 + 22, 76)
    assert rows == columns == list(range(first, last + 1))


def test_the_fifth_map_pixel_covers_rows_17_to_61(outline):
    _, (rows, _) = trace(lambda x: outline(x)[0], torch.zeros(1, 3, 77, 77, device="meta"))
    center, half = rows.centers(9)[4], (rows.size - 1) / 2
    assert (center - half, center + half) == (17, 61)


@pytest.mark.parametrize(
    ("length", "before", "after"),
    [(75, 1, 1), (38, 0, 1)],  # odd and even, SPEC 1.4
)
def test_stride_2_pads_as_tensorflow_does(length, before, after):
    layer = SameConv2d(1, 1, 3, 2, bias=False)
    torch.nn.init.ones_(layer.weight)
    x = noise(1, 1, length, length)
    padded = functional.pad(x, (before, after, before, after))
    expected = functional.conv2d(padded, torch.ones(1, 1, 3, 3), stride=2)
    assert layer(x).shape[-1] == -(-length // 2)
    torch.testing.assert_close(layer(x), expected)


def test_sides_are_padded_each_by_its_own_length():
    layer = SameConv2d(1, 1, 3, 2)
    assert layer(torch.zeros(1, 1, 5, 8)).shape == (1, 1, 3, 4)


@pytest.mark.parametrize(("kernel", "before", "after"), [(3, 1, 1), (4, 1, 2), (1, 0, 0)])
def test_the_shortcut_loses_what_an_unpadded_kernel_loses(kernel, before, after):
    block = silenced(Block(8, Stage(kernel, 8, padding="valid"), 1))
    x = noise(1, 8, 9, 11)
    kept = x[..., before : 9 - after, before : 11 - after]
    assert torch.equal(block(x), functional.leaky_relu(kept, 0.2))


def test_the_shortcut_of_a_padded_block_is_the_input_itself():
    block = silenced(Block(8, Stage(3, 8), 1))
    x = noise(1, 8, 9, 9)
    assert torch.equal(block(x), functional.leaky_relu(x, 0.2))


@pytest.mark.parametrize(("channels", "stride"), [(16, 1), (8, 2), (16, 2)])
def test_the_shortcut_is_a_biased_convolution_where_shapes_change(channels, stride):
    block = silenced(Block(8, Stage(3, channels, padding="valid"), stride))
    x = noise(1, 8, 19, 19)
    shortcut = block.shortcut
    assert (shortcut.kernel_size, shortcut.out_channels) == ((1, 1), channels)
    mixed = torch.einsum("oi,nihw->nohw", shortcut.weight[:, :, 0, 0], x[..., 1:-1, 1:-1])
    expected = mixed[..., ::stride, ::stride] + shortcut.bias[None, :, None, None]
    torch.testing.assert_close(block(x), functional.leaky_relu(expected, 0.2))


def test_a_block_squeezes_to_a_quarter_of_its_channels():
    block = Block(64, Stage(3, 256), 1)
    inner = [layer.out_channels for layer in (block.reduce, block.spread, block.expand)]
    assert inner == [64, 64, 256]


def test_negative_values_leak_by_a_fifth():
    assert SLOPE == 0.2
    block = silenced(Block(4, Stage(1, 4), 1))
    assert torch.equal(block(torch.full((1, 4, 1, 1), -5.0)), torch.full((1, 4, 1, 1), -1.0))


def test_every_convolution_has_a_bias_and_nothing_is_normalised(outline):
    kinds = {type(module).__name__ for module in outline.modules()}
    assert not [kind for kind in kinds if "Norm" in kind]
    convolutions = [each for each in outline.modules() if isinstance(each, torch.nn.Conv2d)]
    assert all(each.bias is not None for each in convolutions)


def silenced(block):
    """Return a block of which only the shortcut is left."""
    torch.nn.init.zeros_(block.expand.weight)
    torch.nn.init.zeros_(block.expand.bias)
    return block.requires_grad_(False)
