from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from tests.encoding import encode
from tests.images import noise as noisy_image
from tests.images import write_geotiff
from tests.models.contract import (
    ROOT,
    Case,
    ModelContract,
    noise,
    proposed,
    root_and_cells,
    unmasked,
)
from tests.models.places import branch_of, patch_at
from tests.models.published import count_layers, count_parameters
from tnetcli.data.normalize import Normalisation
from tnetcli.errors import ModelError
from tnetcli.geometry import Size, Window
from tnetcli.models.anchornet import decide
from tnetcli.models.checkpoint import Description, load_checkpoint, save_checkpoint
from tnetcli.models.lsp import FIELDS, AnchorGrid
from tnetcli.models.registry import build_model, read_model_config
from tnetcli.prediction.inference import Inference
from tnetcli.readers.detect import open_image
from tnetcli.testing.reader import area_mean
from tnetcli.traversal.config import TraversalConfig
from tnetcli.traversal.policies import Oracle, Random, TopK

UNIT = Normalisation.to_unit_range("uint8", 3)
VIEW = 128
# Softmax over positions takes away what is added to all alike.
UNSEEN = frozenset(f"anchor.branches.{branch}.attention.score.bias" for branch in range(3))


def build(*, classes=3, seed=0, **config):
    torch.manual_seed(seed)
    given = {"backbone": "anchornet", "view_size": VIEW} | config
    return build_model("anchornet", given, classes=classes).eval().requires_grad_(False)


def labelled_loss(model, views, regions, label=1):
    """Return what labels teach: a cross-entropy a branch, a head and a patch."""
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
    """Three promises read otherwise for this family; all others hold as they are."""

    def learn(self, model, views, regions):
        # The answer is that of the patches alone: branches learn from losses of their own.
        out, labels = labelled_loss(model, views, regions)
        return labels, -out.cell_logits[..., 0].log_softmax(dim=1)[:, 0].sum()

    def test_every_cell_is_proposed_with_a_probability(self, model, views, regions):
        # LSP proposes a few patches; a classifier of patches proposes nothing.
        (whole,) = proposed(model, encode(model, views[:1], regions[:1]))
        patch, _ = proposed(model, encode(model, views[1:], regions[1:]))
        choices = model.grid.choices().ravel()
        for probabilities, total in ((whole, 1), (patch, int(model.encodes_patches))):
            assert not probabilities[~choices].any()
            assert probabilities.sum() == pytest.approx(total)

    def test_the_weights_of_an_image_sum_to_1(self, model, encoded):
        # As published, the answer is the sum over patches: the whole image only names them.
        weights = model.aggregate(encoded.features.unsqueeze(0), *unmasked(3)).weights
        assert weights.tolist() == [[0.0, 0.5, 0.5]]


class TestAnchorNetWithResNet(AnchorContract):
    case = Case("anchornet", {"backbone": "resnet18", "view_size": VIEW}, never_learned=UNSEEN)


class TestAnchorNetThatEncodesItsPatches(AnchorContract):
    case = Case(
        "anchornet",
        {"backbone": "anchornet", "view_size": VIEW, "patches": "strict", "heat": "bare"},
        never_learned=UNSEEN,
    )


class TestAnchorNetAsPrintedOfFourBands(AnchorContract):
    case = Case(
        "anchornet",
        {
            "backbone": "compact",
            "view_size": 131,
            "pool": "mean",
            "crop": "corner",
            "squeeze": "mobilenetv3",
            "pooling": "mean_max",
            "auxiliary": False,
        },
        bands=4,
        never_learned=UNSEEN,
    )


def test_arguments_are_checked():
    assert read_model_config("anchornet", {}).grid == AnchorGrid(224)
    for wrong in ({"view_size": 118}, {"pool": "max"}, {"squeeze_ratio": 0}, {"patches": "all"}):
        with pytest.raises(ModelError):
            read_model_config("anchornet", wrong)


def test_the_min_view_size_can_be_learned_from():
    model = build(view_size=119).requires_grad_(True).train()
    _, loss = labelled_loss(model, noise(2, 3, 119, 119), root_and_cells(model, 2))
    loss.backward()
    assert loss.isfinite()


def test_there_is_nothing_to_load_without_a_backbone():
    with pytest.raises(ModelError, match="no backbone to load weights for"):
        build_model("anchornet", {"backbone": "anchornet"}, classes=3, pretrained=True)


@pytest.mark.parametrize(("backbone", "most"), [("anchornet", None), ("resnet18", 2)])
def test_a_classifier_of_patches_ends_the_traversal(backbone, most):
    assert build(backbone=backbone).max_levels == most


def branches(*named, classes=4):
    """Return log-probabilities (1, branches, classes) that each name a class, as sure as given."""
    rows = []
    for label, sure in named:
        row = torch.full((classes,), (1 - sure) / (classes - 1))
        row[label] = sure
        rows.append(row)
    return torch.stack(rows).log()[None]


@pytest.mark.parametrize(
    ("named", "decision"),
    [
        # Two agree, though the third is the surest; of the two, the surer shows why.
        ([(1, 0.5), (1, 0.6), (2, 0.9)], (1, 1)),
        ([(1, 0.7), (2, 0.9), (1, 0.6)], (1, 0)),
        ([(3, 0.99), (0, 0.4), (0, 0.5)], (0, 2)),
        # All agree.
        ([(2, 0.5), (2, 0.8), (2, 0.7)], (2, 1)),
        # None agree: the surest names the class, and shows why.
        ([(0, 0.5), (1, 0.6), (2, 0.7)], (2, 2)),
        ([(3, 0.8), (1, 0.6), (2, 0.7)], (3, 0)),
        # Ties: the smallest receptive field.
        ([(2, 0.7), (1, 0.7), (3, 0.7)], (2, 0)),
        ([(3, 0.6), (1, 0.7), (0, 0.7)], (1, 1)),
        ([(3, 0.9), (1, 0.7), (1, 0.7)], (1, 1)),
    ],
)
def test_class_and_branch(named, decision):
    label, branch = decide(branches(*named))
    assert (label.item(), branch.item()) == decision


def test_of_classes_that_are_equally_probable_the_first_is_named():
    even = [0.3, 0.3, 0.3, 0.1]
    # Each branch names its first: 0, 0 and 0, then 1, 0 and 0.
    rows = torch.tensor([[even] * 3, [[0.1, 0.4, 0.4, 0.1], even, even]])
    label, branch = decide(rows.log())
    assert (label.tolist(), branch.tolist()) == ([0, 0], [0, 1])


def test_branches_that_are_almost_certain_do_not_tie():
    label, branch = decide(torch.tensor([[[20.0, 0.0], [0.0, 21.0], [22.0, 0.0]]]))
    assert (label.item(), branch.item()) == (0, 2)


@given(st.lists(st.lists(st.integers(0, 4), min_size=3, max_size=3), min_size=3, max_size=3))
def test_the_branch_names_the_class_and_no_other_that_does_is_surer(rows):
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
    """Decide by counting, apart from the model's own way: (branches, classes) logits."""
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
    """Return windows of the view by LSP, with overlap from the windows themselves."""
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


def expected_traversal(model, image, patches, heat):
    """Do everything from the decoded image: name the patches, cut them out, classify them."""
    whole = Window(0.0, 0.0, float(image.shape[2]), float(image.shape[1]))

    def view_of(window):
        seen = np.rint(area_mean(image, window, Size(VIEW, VIEW)))
        mean, std = (np.array(each)[:, None, None] for each in (UNIT.mean, UNIT.std))
        return torch.tensor(((seen - mean) / std)[None], dtype=torch.float32)

    seen = model.anchor(view_of(whole))
    label, branch = decided(torch.cat([each.scores for each in seen]).double().numpy())
    maps = seen[branch].logits[0, label]
    if heat == "attended":
        maps = maps * seen[branch].shares[0, 0]
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


@pytest.mark.parametrize(
    ("patches", "heat", "seed"),
    [("strict", "attended", 0), ("loose", "attended", 1), ("strict", "bare", 2)],
)
def test_a_traversal_of_a_file_is_what_the_decoded_image_gives(scene, patches, heat, seed):
    image, path = scene
    model = build(backbone="resnet10t", patches=patches, heat=heat, seed=seed, classes=4)
    for branch in model.anchor.branches:
        branch.head.weight.mul_(100)  # maps that differ by more than rounding
    result = traverse(model, path)
    windows, probability = expected_traversal(model, image, patches, heat)
    found = np.array([node.region.window.box for node in by_rank(result)])
    assert found == pytest.approx(np.array([window.box for window in windows]), abs=1e-6)
    assert np.exp(result.logits) == pytest.approx(probability.numpy(), abs=1e-4)
    assert result.weights[0] == 0
    assert result.weights[1:] == pytest.approx(np.full(len(windows), 1 / len(windows)))


def test_fewer_patches_are_followed_if_asked_for_and_they_are_the_first(scene):
    model = build(backbone="resnet10t")
    best = by_rank(traverse(model, scene[1]))[:3]
    three = traverse(model, scene[1], keep=(3,)).nodes[1:]
    assert {node.region.path for node in three} == {node.region.path for node in best}


@pytest.mark.parametrize(
    "policy",
    [
        Random(TopK(), AnchorGrid(VIEW), 5),
        Oracle(TopK(), AnchorGrid(VIEW), [Window(40, 10, 200, 30)]),
    ],
    ids=["random", "oracle"],
)
def test_every_policy_chooses_among_patches(scene, policy):
    image, path = scene
    result = traverse(build(backbone="resnet10t"), path, policy=policy)
    windows = [node.region.window for node in result.nodes[1:]]
    assert len(windows) == 24
    aspect = image.shape[2] / image.shape[1]
    assert [each.width / each.height for each in windows] == pytest.approx([aspect] * 24)


def test_a_deeper_traversal_ends_where_the_classifier_of_patches_does(scene):
    model = build(backbone="resnet10t", patches="strict")
    assert set(traverse(model, scene[1], levels=4, keep=(2,)).levels) == {1, 2}


def test_anchornet_alone_goes_as_deep_as_asked(scene):
    model = build(patches="strict")
    result = traverse(model, scene[1], levels=3, keep=(2,))
    assert set(result.levels) == {1, 2, 3}
    for node in result.nodes[1:]:
        row, column = map(int, node.region.path.split("/")[-1].split("-"))
        assert branch_of(model.grid, row, column) is not None


def test_an_image_too_small_for_patches_gets_the_answer_of_anchornet(tmp_path):
    path = write_geotiff(tmp_path / "small.tif", noisy_image((150, 150), seed=1))
    result = traverse(build(backbone="resnet10t"), path, min_size=None)
    assert (len(result.nodes), result.stop) == (1, "native_resolution")
    assert result.weights.tolist() == [1.0]
    assert np.exp(result.logits).sum() == pytest.approx(1)


def test_where_there_is_no_data_no_patch_is_read(tmp_path):
    image = noisy_image((400, 400), seed=3)
    image[:, :, 100:] = 0  # three quarters are empty
    path = write_geotiff(tmp_path / "edge.tif", image, nodata=0)
    result = traverse(build(backbone="resnet10t"), path)
    assert all(node.region.window.left < 100 for node in result.nodes)
    assert (result.valid > 0).all()


def test_without_patches_the_answer_is_that_of_the_branch_that_was_chosen():
    model = build(seed=5, classes=4)
    view = noise(1, 3, VIEW, VIEW)
    seen = torch.cat([branch.scores for branch in model.anchor(view)])
    label, branch = decided(seen.double().numpy())
    out = encode(model, view, [ROOT])
    logits = model.aggregate(out.features[None], *unmasked(1)).logits
    torch.testing.assert_close(logits[0], seen[branch].log_softmax(dim=0))
    assert (int(logits.argmax()), out.aux["branch"].tolist()) == (label, [branch])


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


def test_a_patch_that_is_very_wrong_can_still_be_learned_from():
    model = build()
    features = torch.tensor([[[-300.0, 0.0, 0.0]]], requires_grad=True)
    mask = torch.ones(1, 1, dtype=torch.bool)
    logits = model.aggregate(features, mask, torch.tensor([[2]])).logits
    functional.cross_entropy(logits, torch.tensor([0])).backward()
    assert features.grad[0, 0, 0] == pytest.approx(-1)


def test_patches_of_one_branch_are_proposed_in_their_order():
    model = build(seed=3, patches="loose", view_size=224)
    for each in proposed(model, encode(model, noise(2, 3, 224, 224), [ROOT, ROOT])):
        attention = each.reshape(53, 53)
        cells = np.argwhere(attention).tolist()
        (branch,) = {branch_of(model.grid, *cell) for cell in cells}
        assert 1 <= len(cells) <= (24, 10, 8)[branch]
        ordered = sorted((attention[tuple(cell)] for cell in cells), reverse=True)
        assert all(a > b for a, b in pairwise(ordered))


def test_cell_logits_hold_the_map_of_every_branch_in_its_block():
    model = build(seed=3)
    view = noise(1, 3, VIEW, VIEW)
    out = encode(model, view, [ROOT])
    maps = out.cell_logits.view(model.grid.rows, model.grid.columns)
    label, _ = decide(torch.stack([each.scores for each in model.anchor(view)], dim=1))
    for number, each in enumerate(model.anchor(view)):
        block = model.grid.block_of(number)
        torch.testing.assert_close(maps[block, block], each.heat(label, attended=True)[0])
    assert not maps[~torch.from_numpy(model.grid.choices())].any()


def test_the_classes_of_every_branch_are_learned_from_the_whole_image():
    model = build(backbone="resnet10t")
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


def test_costs_are_counted_without_numbers():
    with torch.device("meta"):
        model = build(backbone="resnet50", view_size=224, classes=1000)
        costs = []
        for region in (ROOT, ROOT.child(model.grid, 0, 0)):
            with count_layers(model) as count:
                out = encode(model, torch.empty(1, 3, 224, 224), [region])
            assert out.cell_logits.shape == (1, 53 * 53, 1)
            costs.append(count.layers)
    assert 0.486e9 < costs[0] < 0.490e9
    assert costs[1] == pytest.approx(4.09e9, rel=0.01)  # as ResNet-50 is published
    assert count_parameters(model.anchor).trainable == 1_550_601


def test_a_model_comes_back_from_its_file(tmp_path):
    model = build(backbone="resnet10t", patches="strict")
    description = Description(
        family="anchornet",
        config=model.config.model_dump(mode="json"),
        classes=["river", "forest", "town"],
        bands=["red", "green", "blue"],
        normalisation=UNIT,
        traversal={"levels": 2, "keep": [5]},
    )
    save_checkpoint(tmp_path / "model.safetensors", model, description)
    loaded = load_checkpoint(tmp_path / "model.safetensors")
    assert loaded.description.grid == loaded.model.grid == AnchorGrid(VIEW)
    views, regions = noise(3, 3, VIEW, VIEW), root_and_cells(model)
    with torch.no_grad():
        again = encode(loaded.model, views, regions)
    out = encode(model, views, regions)
    assert torch.equal(again.features, out.features)
    assert torch.equal(again.cell_logits, out.cell_logits)


def test_half_precision_proposes_patches_too():
    model = build(backbone="resnet10t")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = encode(model, noise(2, 3, VIEW, VIEW), [ROOT, ROOT])
    for each in proposed(model, out):
        assert each.sum() == pytest.approx(1, abs=1e-3)
    assert out.features.float().isfinite().all()


def test_weights_that_are_not_numbers_are_noticed(scene):
    model = build(backbone="resnet10t")
    model.anchor.trunk[0].weight.fill_(torch.nan)
    with pytest.raises(ModelError, match="not a number"):
        traverse(model, scene[1], keep=(4,))
