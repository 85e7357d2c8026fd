import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torchvision.models.mobilenetv3 import InvertedResidual, InvertedResidualConfig

from tests.images import noise as noisy_image
from tests.images import write_geotiff
from tests.models.places import patch_at
from tests.models.published import count_layers, count_parameters
from tnetcli.data.normalize import Normalisation
from tnetcli.errors import ModelError
from tnetcli.geometry import Size, Window, box_coverage
from tnetcli.models.anchornet import Anchors, Attention, Bottleneck, decide
from tnetcli.models.lsp import FIELDS, AnchorGrid
from tnetcli.models.nets import SqueezeExcite
from tnetcli.models.registry import build_model, read_model_config
from tnetcli.prediction.inference import Inference
from tnetcli.readers.detect import open_image
from tnetcli.testing.model import (
    ROOT,
    Case,
    ModelContract,
    encode,
    noise,
    proposed,
    root_and_cells,
    unmasked,
)
from tnetcli.testing.reader import area_mean
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import Oracle, Random, TopK

UNIT = Normalisation.to_unit_range("uint8", 3)
VIEW = 128
# The softmax over positions cancels a common offset.
UNSEEN = frozenset(f"anchor.branches.{branch}.attention.score.bias" for branch in range(3))


def build(*, classes=3, seed=0, **config):
    torch.manual_seed(seed)
    given = {"backbone": "anchornet", "view_size": VIEW} | config
    return build_model("anchornet", given, classes=classes).eval().requires_grad_(False)


def labelled_loss(model, views, regions, label=1):
    """Return the cross-entropy of each branch, auxiliary head and patch."""
    out = encode(model, views, regions)
    side = out.aux["side_logits"]  # (views, heads, classes)
    learned = functional.cross_entropy(
        side.flatten(0, 1), torch.full((side[..., 0].numel(),), label)
    )
    patches = [i for i, region in enumerate(regions) if region.level > 1]
    levels = torch.full((len(patches),), 2)
    alone = model.classify(out.features[patches], levels)
    own = functional.nll_loss(alone, torch.full((len(patches),), label))
    return out, side.shape[1] * learned + own


class AnchorContract(ModelContract):
    """The contract, but for what the family defines otherwise."""

    def losses(self, model, batch):
        # The answer is that of the patches alone; branches have their own losses.
        out, labels = labelled_loss(model, batch.views, batch.regions)
        return labels, -out.cell_logits[..., 0].log_softmax(dim=1)[:, 0].sum()

    def test_every_cell_is_proposed(self, model, batch):
        # LSP proposes a few patches; the classifier of patches proposes nothing.
        whole = proposed(model, encode(model, batch.views[:1], batch.regions[:1]))[0]
        patch = proposed(model, encode(model, batch.views[1:], batch.regions[1:]))[0]
        choices = torch.from_numpy(model.grid.choices().ravel())
        for probabilities, total in ((whole, 1), (patch, int(model.encodes_patches))):
            assert not probabilities[~choices].any()
            assert float(probabilities.sum()) == pytest.approx(total)


class TestAnchorNetThatEncodesItsPatches(AnchorContract):
    case = Case(
        "anchornet",
        {"backbone": "anchornet", "view_size": VIEW, "patches": "strict"},
        never_learned=UNSEEN,
    )


class TestAnchorNetOnFourBands(AnchorContract):
    case = Case(
        "anchornet",
        {"backbone": "compact", "view_size": 131, "pooling": "mean_max"},
        bands=4,
        never_learned=UNSEEN,
    )


def test_the_configuration_is_checked():
    assert read_model_config("anchornet", {}).grid == AnchorGrid(224)
    for wrong in ({"view_size": 118}, {"patches": "all"}):
        with pytest.raises(ModelError):
            read_model_config("anchornet", wrong)
    with pytest.raises(ModelError, match="no backbone to load weights into"):
        build_model("anchornet", {"backbone": "anchornet"}, classes=3, pretrained=True)
    assert build(view_size=119).max_levels is None
    assert build(backbone="compact").max_levels == 2


def test_a_patch_that_is_very_wrong_has_a_gradient():
    features = torch.tensor([[[-300.0, 0.0, 0.0]]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    logits = build().aggregate(features, mask, torch.tensor([[2]])).logits
    functional.cross_entropy(logits, torch.tensor([0])).backward()
    assert features.grad[0, 0, 0] == pytest.approx(-1)


def test_patches_are_proposed_in_mixed_precision():
    model = build(backbone="test_resnet")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = encode(model, noise(2, 3, VIEW, VIEW), [ROOT, ROOT])
        assert proposed(model, out).sum(dim=1).tolist() == pytest.approx([1, 1], abs=1e-3)
    assert out.features.float().isfinite().all()


def branches(*named, classes=4):
    """Return log-probabilities (1, branches, classes) for classes and their probabilities."""
    rows = []
    for label, sure in named:
        row = torch.full((classes,), (1 - sure) / (classes - 1))
        row[label] = sure
        rows.append(row)
    return torch.stack(rows).log()[None]


@pytest.mark.parametrize(
    ("named", "decision"),
    [
        # Two agree, though the third is more confident.
        ([(1, 0.5), (1, 0.6), (2, 0.9)], (1, 1)),
        ([(3, 0.99), (0, 0.4), (0, 0.5)], (0, 2)),
        # All agree.
        ([(2, 0.5), (2, 0.8), (2, 0.7)], (2, 1)),
        # None agree: the most confident decides.
        ([(3, 0.8), (1, 0.6), (2, 0.7)], (3, 0)),
        # Ties: the smallest receptive field.
        ([(2, 0.7), (1, 0.7), (3, 0.7)], (2, 0)),
        ([(3, 0.9), (1, 0.7), (1, 0.7)], (1, 1)),
    ],
)
def test_class_and_branch(named, decision):
    label, branch = decide(branches(*named))
    assert (label.item(), branch.item()) == decision


def test_branches_that_are_almost_certain_do_not_tie():
    label, branch = decide(torch.tensor([[[20.0, 0.0], [0.0, 21.0], [22.0, 0.0]]]))
    assert (label.item(), branch.item()) == (0, 2)


@given(st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=3, max_size=3))
def test_the_branch_is_the_most_confident_one_that_predicts_the_class(rows):
    logits = torch.tensor([rows], dtype=torch.float64)
    label, branch = (each.item() for each in decide(logits))
    sure = logits[0].log_softmax(dim=1).amax(dim=1).tolist()
    named = [row.index(max(row)) for row in rows]
    assert named[branch] == label
    assert sure[branch] == max(each for j, each in enumerate(sure) if named[j] == label)
    if max(map(named.count, named)) >= 2:
        assert named.count(label) >= 2
    else:
        assert sure[branch] == max(sure)


def decided(scores):
    """Decide by counting from logits (branches, classes)."""
    p = np.exp(scores - scores.max(axis=1, keepdims=True))
    p /= p.sum(axis=1, keepdims=True)
    named, sure = p.argmax(axis=1), p.max(axis=1)
    for label in named:
        if (named == label).sum() >= 2:
            break
    else:
        label = named[sure.argmax()]
    branch = max(np.flatnonzero(named == label), key=lambda j: sure[j])
    return int(label), int(branch)


def best_patches(heat, branch, most, share, limit):
    """Return the windows that LSP selects, by the overlap of the windows themselves."""
    windows = []
    for number in np.argsort(-heat, axis=None)[: max(int(heat.size * share), 1)]:
        window = patch_at(*divmod(int(number), heat.shape[1]), FIELDS[branch])
        if len(windows) < most and all(iou(window, other) < limit for other in windows):
            windows.append(window)
    return windows


def iou(one, other):
    width = max(min(one.right, other.right) - max(one.left, other.left), 0)
    height = max(min(one.bottom, other.bottom) - max(one.top, other.top), 0)
    common = width * height
    return common / (one.width * one.height + other.width * other.height - common)


SETTINGS = {
    "strict": ((5, 3, 2), (0.05, 0.04, 0.03), 0.3),
    "loose": ((24, 10, 8), (0.3, 0.3, 0.3), 0.8),
}


@pytest.fixture(scope="module")
def scene(tmp_path_factory):
    image = noisy_image((900, 700), seed=4)
    path = tmp_path_factory.mktemp("scene") / "scene.tif"
    return image, write_geotiff(path, image)


def traverse(model, path, *, policy=TopK(), **config):  # noqa: B008
    """Traverse one image to two levels and 24 patches, unless asked for otherwise."""
    settings = TraversalConfig(**{"levels": 2, "keep": (24,), "min_size": 1, **config})
    with open_image(path) as reader, Inference(model, UNIT, device="cpu") as inference:
        (result,) = inference.run([reader], settings, [policy])
    return result


def by_rank(result):
    return sorted(result.nodes[1:], key=lambda node: node.rank)


def expected_traversal(model, image, patches):
    """Select the patches of the decoded image, crop them and classify them."""
    whole = Window(0.0, 0.0, float(image.shape[2]), float(image.shape[1]))

    def view_of(window):
        seen = np.rint(area_mean(image, window, Size(VIEW, VIEW)))
        mean, std = (np.array(each)[:, None, None] for each in (UNIT.mean, UNIT.std))
        return torch.tensor(((seen - mean) / std)[None], dtype=torch.float32)

    found = model.anchor(view_of(whole))
    label, branch = decided(torch.cat([each.logits for each in found]).double().numpy())
    maps = found[branch].maps[0, label]
    most, shares, limit = SETTINGS[patches]
    cut = best_patches(maps.double().numpy(), branch, most[branch], shares[branch], limit)
    across, down = whole.width / VIEW, whole.height / VIEW
    windows = [
        Window(w.left * across, w.top * down, w.width * across, w.height * down) for w in cut
    ]
    probability = torch.zeros(model.classes)
    for window in windows:
        _, features = model.backbone(view_of(window))
        probability += model.head(features).softmax(dim=1)[0]
    return windows, probability / len(windows)


@pytest.mark.parametrize(("patches", "seed"), [("strict", 0), ("loose", 1)])
def test_a_traversal_of_a_file_equals_one_of_the_decoded_image(scene, patches, seed):
    image, path = scene
    model = build(backbone="test_resnet", patches=patches, seed=seed, classes=4)
    for branch in model.anchor.branches:
        branch.head.weight.mul_(100)  # maps that differ by more than rounding
    result = traverse(model, path)
    windows, probability = expected_traversal(model, image, patches)
    found = np.array([node.region.window.box for node in by_rank(result)])
    assert found == pytest.approx(np.array([window.box for window in windows]), abs=1e-6)
    assert np.exp(result.logits) == pytest.approx(probability.numpy(), abs=1e-4)
    assert result.weights[0] == 0
    assert result.weights[1:] == pytest.approx(np.full(len(windows), 1 / len(windows)))


def test_an_image_too_small_for_patches_gets_the_answer_of_anchornet(tmp_path):
    path = write_geotiff(tmp_path / "small.tif", noisy_image((150, 150), seed=1))
    result = traverse(build(backbone="test_resnet"), path, min_size=None)
    assert (len(result.nodes), result.stop) == (1, "native_resolution")
    assert result.weights.tolist() == [1.0]
    assert np.exp(result.logits).sum() == pytest.approx(1)


def test_policies_for_comparison_read_patches_and_nothing_else(scene):
    model, box = build(backbone="test_resnet"), Window(100, 100, 200, 200)
    whole = Window.whole(Size(scene[0].shape[2], scene[0].shape[1]))
    patches = {whole.cell(model.grid, *cell).box for cell in np.argwhere(model.grid.choices())}
    for policy in (Random(TopK(), model.grid, 0), Oracle(TopK(), model.grid, [box])):
        result = traverse(model, scene[1], policy=policy, keep=(6,))
        windows = [node.region.window for node in result.nodes[1:]]
        assert len(windows) == 6
        assert {window.box for window in windows} <= patches
    assert all(box_coverage(window, [box]) for window in windows)  # of the oracle


def test_the_answer_is_the_mean_of_the_probabilities_of_the_patches():
    model = build()
    logits = torch.tensor([[9.0, 0.0, 0.0], [0.0, 3.0, 1.0], [2.0, 1.0, 0.0], [0.0, 0.0, 5.0]])
    mask, levels = torch.tensor([[True] * 3 + [False]]), unmasked(4)[1]
    found = model.aggregate(logits[None], mask, levels)
    expected = logits[1:3].softmax(dim=1).mean(dim=0)
    torch.testing.assert_close(found.logits[0].softmax(dim=0), expected)
    torch.testing.assert_close(found.logits[0].exp(), expected)
    assert found.weights.tolist() == [[0.0, 0.5, 0.5, 0.0]]
    torch.testing.assert_close(model.classify(found.embedding, levels[:, 0]), found.logits)
    torch.testing.assert_close(found.parts["instances"][0, :3], logits[:3].log_softmax(dim=1))


def test_cell_logits_hold_the_map_of_every_branch_in_its_block():
    model = build(seed=3)
    view = noise(1, 3, VIEW, VIEW)
    out = encode(model, view, [ROOT])
    maps = out.cell_logits.view(model.grid.rows, model.grid.columns)
    label, _ = decide(torch.stack([each.logits for each in model.anchor(view)], dim=1))
    for number, each in enumerate(model.anchor(view)):
        block = model.grid.block_of(number)
        torch.testing.assert_close(maps[block, block], each.maps[0, label[0]])
    assert not maps[~torch.from_numpy(model.grid.choices())].any()


def test_side_logits_are_those_of_every_branch_for_the_whole_image():
    model = build(backbone="test_resnet")
    regions, views = root_and_cells(model, 3), noise(3, 3, VIEW, VIEW)
    assert encode(model, views, regions).aux.keys() == {"branch"}
    for part in (model, model.anchor):  # batch norm as in evaluation, all else as in training
        part.training = True
    for branch in model.anchor.branches:
        branch.training = True
    out = encode(model, views, regions)
    side = out.aux["side_logits"]  # of the one view that AnchorNet encodes: branches, heads
    assert side.shape == (1, 6, 3)
    _, branch = decided(side[0, :3].double().numpy())
    torch.testing.assert_close(out.features[0], side[0, branch])


def test_weights_that_are_not_numbers_are_noticed(scene):
    model = build(backbone="test_resnet")
    model.anchor.trunk[0].weight.fill_(torch.nan)
    with pytest.raises(ModelError, match="not a number"):
        traverse(model, scene[1], keep=(4,))


# The network of Anchors.
SIDES = (21, 17, 15)


def anchors(classes=5, bands=3):
    torch.manual_seed(0)
    return Anchors(classes, bands).eval()


def multiplications_by_hand(classes=1000):
    """Count the multiplications of the paper's tables, and of squeeze-excitation."""
    trunk = [  # side after, inputs, expanded, outputs, kernel, side before
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
    for after, inputs, expanded, outputs, kernel, before in trunk + branches:
        total += before**2 * inputs * expanded
        total += after**2 * expanded * (kernel**2 + outputs)
    for *_, outputs, _, _ in trunk[3:] + branches:
        total += 2 * outputs * (outputs // 4)
    return total + sum(side**2 * 96 * (classes + 1) for side in SIDES)


def test_parameters_and_multiplications_follow_from_the_published_tables():
    with torch.device("meta"):
        net = anchors(1000)
        assert count_parameters(net).trainable == 1_550_601
        with count_layers(net) as count:
            net(torch.empty(1, 3, 224, 224))
        assert count.layers == multiplications_by_hand()
        assert 0.486e9 < count.layers < 0.490e9


def test_map_sizes_are_those_of_the_tables():
    with torch.device("meta"):
        net, x, sides = anchors(), torch.empty(1, 3, 224, 224), []
        for part in net.trunk:
            x = part(x)
            if isinstance(part, nn.Conv2d | Bottleneck):
                sides.append(x.shape[2])
        assert sides == [111, 55, 27, 27, 27, 27, 27, 27, 25, 23]
        shapes = [each.maps.shape for each in net(torch.empty(1, 3, 224, 224))]
        assert shapes == [(1, 5, side, side) for side in SIDES]


@pytest.mark.parametrize("branch", [0, 1, 2])
def test_a_position_sees_its_patch_and_nothing_else(branch):
    net = anchors().double().requires_grad_(False)
    for module in net.modules():
        if isinstance(module, Bottleneck) and isinstance(module.layers[-1], SqueezeExcite):
            module.layers[-1] = nn.Identity()  # it sees the whole view
        if isinstance(module, nn.Conv2d):  # all above zero, so that every gradient passes
            module.weight.fill_(4 / module.weight[0].numel())
    last = SIDES[branch] - 1
    for row, column in ((0, 0), (3, last)):
        pixels = torch.ones(1, 3, 224, 224, dtype=torch.float64, requires_grad=True)
        part = net.branches[branch]
        part.head(part.blocks(net.trunk(pixels)))[0, :, row, column].sum().backward()
        reached = pixels.grad[0].abs().sum(dim=0) > 0
        box = patch_at(row, column, FIELDS[branch])
        expected = torch.zeros(224, 224, dtype=torch.bool)
        expected[int(box.top) : int(box.bottom), int(box.left) : int(box.right)] = True
        assert torch.equal(reached, expected)


def test_logits_are_the_sum_of_the_attended_maps():
    net, views = anchors().requires_grad_(False), noise(2, 3, 224, 224)
    x = net.trunk(views)
    for branch, found in zip(net.branches, net(views), strict=True):
        attention, _ = branch.attention(branch.blocks(x))
        torch.testing.assert_close(attention.sum(dim=(1, 2, 3)), torch.ones(2))
        maps = attention * branch.head(branch.blocks(x))
        torch.testing.assert_close(found.maps, maps)
        torch.testing.assert_close(found.logits, maps.sum(dim=(2, 3)))


def test_attention_is_over_positions_then_channels_then_positions():
    torch.manual_seed(0)
    attention = Attention().eval().requires_grad_(False)
    found, attended = attention(noise(1, 96, 4, 5))
    maps = attended[0].double().numpy()  # (channels, height, width)
    weight = attention.score.weight[0, :, 0, 0].double().numpy()
    places = np.exp(np.tensordot(weight, maps, 1) + attention.score.bias.item())
    places /= places.sum()
    channels = np.exp(np.array([(places * each).sum() for each in maps]))
    channels /= channels.sum()
    again = np.exp(sum(c * each for c, each in zip(channels, maps, strict=True)))
    assert found[0, 0].numpy() == pytest.approx(again / again.sum(), rel=1e-5)


def test_auxiliary_heads_run_in_training_only():
    views = noise(2, 3, 128, 128)
    net = anchors().requires_grad_(False)
    assert [found.auxiliary for found in net(views)] == [None] * 3
    assert [found.auxiliary.shape for found in net.train()(views)] == [(2, 5)] * 3


@pytest.mark.parametrize(("kernel", "outputs", "activation"), [(1, 24, "RE"), (5, 48, "HS")])
def test_a_block_is_the_inside_of_a_padded_one_of_torchvision(kernel, outputs, activation):
    torch.manual_seed(1)
    block = Bottleneck(48, 144, outputs, kernel, squeeze=False, swish=activation == "HS")
    block.eval().requires_grad_(False)
    for part in block.modules():
        if isinstance(part, nn.BatchNorm2d):
            for each in (part.weight, part.bias, part.running_mean, part.running_var):
                each.uniform_(0.5, 1.5)
    config = InvertedResidualConfig(48, kernel, 144, outputs, False, activation, 1, 1, 1.0)
    other = InvertedResidual(config, nn.BatchNorm2d).eval().requires_grad_(False)
    other.load_state_dict(dict(zip(other.state_dict(), block.state_dict().values(), strict=True)))
    x, cut = noise(2, 48, 11, 9), kernel // 2
    torch.testing.assert_close(block(x), other(x)[:, :, cut : 11 - cut, cut : 9 - cut])


def test_squeeze_excitation_and_h_swish_begin_with_the_fourth_block():
    net = anchors()
    blocks = [part for part in net.trunk if isinstance(part, Bottleneck)]
    squeezed = [any(isinstance(p, SqueezeExcite) for p in block.modules()) for block in blocks]
    swish = [any(isinstance(p, nn.Hardswish) for p in block.modules()) for block in blocks]
    assert squeezed == swish == [False] * 3 + [True] * 6
    for part in net.branches.modules():
        if isinstance(part, Bottleneck):
            assert any(isinstance(each, SqueezeExcite) for each in part.layers)
            assert not any(isinstance(each, nn.ReLU) for each in part.layers)
