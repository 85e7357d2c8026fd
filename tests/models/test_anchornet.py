import copy
from itertools import pairwise

import numpy as np
import pytest
import torch
from tnetcli.looking import Looker, Sight
from tnetcli.models.anchor_grid import AnchorGrid
from tnetcli.training.choices import by_boxes, by_chance
from torch.nn import functional

from benchmarks.paper_tables import count_layers
from tests.images import noise as noisy_image
from tests.images import write_geotiff
from tests.models.contract import Case, ModelContract, everywhere, noise, root_and_cells
from tests.models.places import branch_of, patch_at
from tests.readers.contract import area_mean
from tnetcli.checkpoint import load_checkpoint, save_checkpoint
from tnetcli.description import Description
from tnetcli.errors import ModelError
from tnetcli.geometry import Region, Size, Window
from tnetcli.models.lsp import FIELDS
from tnetcli.models.registry import build_model, read_arguments
from tnetcli.normalisation import Normalisation
from tnetcli.readers.open import open_image
from tnetcli.traversal import Plan
from tnetcli.workflows.cost import count_parameters

UNIT = Normalisation.to_unit_range("uint8", 3)
ROOT = Region(Window(0, 0, 4000, 3000))
VIEW = 128
# Softmax over positions takes away what is added to all alike.
UNSEEN = frozenset(f"anchor.branches.{branch}.attention.score.bias" for branch in range(3))


def build(*, classes=3, seed=0, **arguments):
    torch.manual_seed(seed)
    given = {"backbone": "anchornet", "view_size": VIEW} | arguments
    return build_model("anchornet", given, classes=classes).eval().requires_grad_(False)


def labelled_loss(model, views, regions, label=1):
    """Return what labels teach: a cross-entropy a branch, a head and a patch."""
    looked, lessons = model.study(views, regions)
    scores = lessons.scores.flatten(0, 1)  # (views x heads, classes)
    taught = functional.cross_entropy(scores, torch.full((len(scores),), label))
    patches = [i for i, region in enumerate(regions) if region.level > 1]
    alone = model.classify(looked.features[patches])
    own = functional.nll_loss(alone, torch.full((len(patches),), label))
    return looked, lessons.scores.shape[1] * taught + own


class AnchorContract(ModelContract):
    """Three promises read otherwise for this family; all others hold as they are."""

    def learn(self, model, views):
        # The answer is that of the patches alone: branches learn from losses of their own.
        looked, labels = labelled_loss(model, views, root_and_cells(model))
        return labels, -looked.attention[:, 0, 0].log().sum()

    def test_the_attention_of_a_region_is_positive_and_sums_to_1(self, model, looked):
        # What LSP did not take has none, so that it is never followed. A classifier of patches
        # names no cells.
        assert (looked.attention >= 0).all()
        sums = torch.tensor([1.0, 1.0, 1.0] if model.sees_patches else [1.0, 0.0, 0.0])
        torch.testing.assert_close(looked.attention.sum(dim=(1, 2)), sums)

    def test_the_weights_of_an_image_sum_to_1(self, model, looked):
        # As published, the answer is the sum over patches: the whole image only names them.
        _, weights, _ = model.conclude(looked.features.unsqueeze(0), everywhere(3))
        assert weights.tolist() == [[0.0, 0.5, 0.5]]


class TestAnchorNetWithResNet(AnchorContract):
    case = Case("anchornet", {"backbone": "resnet18", "view_size": VIEW}, never_learned=UNSEEN)


class TestAnchorNetThatSeesItsPatches(AnchorContract):
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
    assert read_arguments("anchornet", {}).grid == AnchorGrid(224)
    for wrong in ({"view_size": 118}, {"pool": "max"}, {"squeeze_ratio": 0}, {"patches": "all"}):
        with pytest.raises(ModelError):
            read_arguments("anchornet", wrong)


def test_the_smallest_view_can_be_learned_from():
    model = build(view_size=119).requires_grad_(True).train()
    _, loss = labelled_loss(model, noise(2, 3, 119, 119), root_and_cells(model, 2))
    loss.backward()
    assert loss.isfinite()


def test_there_is_nothing_to_load_without_a_backbone():
    with pytest.raises(ModelError, match="no backbone to load weights for"):
        build_model("anchornet", {"backbone": "anchornet"}, classes=3, pretrained=True)


@pytest.mark.parametrize(("backbone", "most"), [("anchornet", None), ("resnet18", 2)])
def test_a_classifier_of_patches_ends_the_looking(backbone, most):
    assert build(backbone=backbone).most_levels == most


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


def expected_walk(model, image, patches, heat):
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
        probability += model.classifier(features).softmax(dim=1)[0]
    return windows, probability / len(windows)


@pytest.mark.parametrize(
    ("patches", "heat", "seed"),
    [("strict", "attended", 0), ("loose", "attended", 1), ("strict", "bare", 2)],
)
def test_a_walk_through_a_file_is_what_the_decoded_image_gives(scene, patches, heat, seed):
    image, path = scene
    model = build(backbone="resnet10t", patches=patches, heat=heat, seed=seed, classes=4)
    for branch in model.anchor.branches:
        branch.classifier.weight.mul_(100)  # maps that differ by more than rounding
    plan = Plan(2, (24,), least_side=1)
    with open_image(path) as reader, Looker(model, UNIT, device="cpu") as looker:
        (sight,) = looker.look([reader], plan)
    assert isinstance(sight, Sight)
    windows, probability = expected_walk(model, image, patches, heat)
    by_rank = sorted(sight.visits[1:], key=lambda visit: visit.rank)
    found = np.array([visit.place.region.window.box for visit in by_rank])
    assert found == pytest.approx(np.array([window.box for window in windows]), abs=1e-6)
    assert np.exp(sight.scores) == pytest.approx(probability.numpy(), abs=1e-4)
    assert sight.weights[0] == 0
    assert sight.weights[1:] == pytest.approx(np.full(len(windows), 1 / len(windows)))


def test_fewer_patches_are_followed_if_asked_for_and_they_are_the_first(scene):
    model = build(backbone="resnet10t")
    with open_image(scene[1]) as reader, Looker(model, UNIT, device="cpu") as looker:
        (all_of_them,) = looker.look([reader], Plan(2, (24,), least_side=1))
        (three,) = looker.look([reader], Plan(2, (3,), least_side=1))
    best = sorted(all_of_them.visits[1:], key=lambda visit: visit.rank)[:3]
    assert {visit.place.region.path for visit in three.visits[1:]} == {
        visit.place.region.path for visit in best
    }


@pytest.mark.parametrize(
    "attend",
    [by_chance([5]), by_boxes([[Window(40, 10, 200, 30)]], AnchorGrid(VIEW))],
    ids=["chance", "boxes"],
)
def test_whoever_chooses_chooses_among_patches(scene, attend):
    image, path = scene
    model = build(backbone="resnet10t")
    with open_image(path) as reader, Looker(model, UNIT, device="cpu") as looker:
        (sight,) = looker.look([reader], Plan(2, (24,), least_side=1), attend=attend)
    windows = [visit.place.region.window for visit in sight.visits[1:]]
    assert len(windows) == 24
    aspect = image.shape[2] / image.shape[1]
    assert [each.width / each.height for each in windows] == pytest.approx([aspect] * 24)


def test_a_deeper_plan_ends_where_the_classifier_of_patches_does(scene):
    model = build(backbone="resnet10t", patches="strict")
    with open_image(scene[1]) as reader, Looker(model, UNIT, device="cpu") as looker:
        (sight,) = looker.look([reader], Plan(4, (2,), least_side=1))
    assert {visit.place.region.level for visit in sight.visits} == {1, 2}


def test_anchornet_alone_goes_as_deep_as_asked(scene):
    model = build(patches="strict")
    with open_image(scene[1]) as reader, Looker(model, UNIT, device="cpu") as looker:
        (sight,) = looker.look([reader], Plan(3, (2,), least_side=1))
    assert {visit.place.region.level for visit in sight.visits} == {1, 2, 3}
    for visit in sight.visits[1:]:
        row, column = map(int, visit.place.region.path.split("/")[-1].split("-"))
        assert branch_of(model.grid, row, column) is not None


def test_an_image_too_small_for_a_closer_look_gets_the_answer_of_anchornet(tmp_path):
    path = write_geotiff(tmp_path / "small.tif", noisy_image((150, 150), seed=1))
    model = build(backbone="resnet10t")
    with open_image(path) as reader, Looker(model, UNIT, device="cpu") as looker:
        (sight,) = looker.look([reader], Plan(2, (24,)))
    assert (len(sight.visits), sight.stop) == (1, "pixels")
    assert sight.weights.tolist() == [1.0]
    assert np.exp(sight.scores).sum() == pytest.approx(1)


def test_where_there_is_no_data_no_patch_is_looked_at(tmp_path):
    image = noisy_image((400, 400), seed=3)
    image[:, :, 100:] = 0  # three quarters are empty
    path = write_geotiff(tmp_path / "edge.tif", image, nodata=0)
    model = build(backbone="resnet10t")
    with open_image(path) as reader, Looker(model, UNIT, device="cpu") as looker:
        (sight,) = looker.look([reader], Plan(2, (24,), least_side=1))
    assert all(visit.place.region.window.left < 100 for visit in sight.visits)
    assert (sight.valid > 0).all()


def test_without_patches_the_answer_is_that_of_the_branch_that_was_chosen():
    model = build(seed=5, classes=4)
    view = noise(1, 3, VIEW, VIEW)
    seen = torch.cat([branch.scores for branch in model.anchor(view)])
    label, branch = decided(seen.double().numpy())
    features = model.look(view, [ROOT]).features
    scores = model.conclude(features[None], everywhere(1)).scores
    torch.testing.assert_close(scores[0], seen[branch].log_softmax(dim=0))
    assert int(scores.argmax()) == label


def test_the_answer_is_the_sum_of_the_probabilities_of_the_patches():
    model = build()
    logits = torch.tensor([[9.0, 0.0, 0.0], [0.0, 3.0, 1.0], [2.0, 1.0, 0.0], [0.0, 0.0, 5.0]])
    features = torch.cat([logits, torch.tensor([[0.0], [1.0], [1.0], [1.0]])], dim=1)[None]
    scores, weights, concluded = model.conclude(features, torch.tensor([[True] * 3 + [False]]))
    expected = logits[1:3].softmax(dim=1).mean(dim=0)
    torch.testing.assert_close(scores[0].softmax(dim=0), expected)
    torch.testing.assert_close(scores[0].exp(), expected)
    assert weights.tolist() == [[0.0, 0.5, 0.5, 0.0]]
    torch.testing.assert_close(model.classify(concluded), scores)


def test_a_patch_that_is_very_wrong_can_still_be_learned_from():
    model = build()
    features = torch.tensor([[[-300.0, 0.0, 0.0, 1.0]]], requires_grad=True)
    scores = model.conclude(features, everywhere(1)).scores
    functional.cross_entropy(scores, torch.tensor([0])).backward()
    assert features.grad[0, 0, 0] == pytest.approx(-1)


def test_attention_marks_patches_of_one_branch_in_their_order():
    model = build(seed=3, patches="loose", view_size=224)
    attention = model.look(noise(2, 3, 224, 224), [ROOT, ROOT]).attention
    for each in attention:
        cells = each.nonzero().tolist()
        (branch,) = {branch_of(model.grid, *cell) for cell in cells}
        assert 1 <= len(cells) <= (24, 10, 8)[branch]
        ordered = sorted((each[tuple(cell)].item() for cell in cells), reverse=True)
        assert all(a > b for a, b in pairwise(ordered))


def test_regions_in_any_order_are_seen_by_whom_they_belong_to():
    model = build(backbone="resnet10t")
    regions = root_and_cells(model, 4)
    views = noise(4, 3, VIEW, VIEW)
    plain = model.look(views, regions)
    order = [2, 0, 3, 1]
    mixed = model.look(views[order], [regions[i] for i in order])
    torch.testing.assert_close(mixed.features, plain.features[order])
    torch.testing.assert_close(mixed.attention, plain.attention[order])
    assert plain.features[:, -1].tolist() == [0, 1, 1, 1]


def test_lessons_are_of_the_views_that_anchornet_saw():
    model = build(backbone="resnet10t")
    regions, views = root_and_cells(model, 3)[::-1], noise(3, 3, VIEW, VIEW)
    looked, lessons = model.study(views, regions)
    assert (lessons.regions, lessons.scores.shape) == ((2,), (1, 3, 3))
    _, branch = decided(lessons.scores[0].double().numpy())
    torch.testing.assert_close(looked.features[2, :3], lessons.scores[0, branch])
    assert model.study(views[:2], regions[:2])[1] is None
    learner = copy.deepcopy(model).train()
    assert learner.study(views, regions)[1].scores.shape == (1, 6, 3)


def test_costs_are_counted_without_numbers():
    with torch.device("meta"):
        model = build(backbone="resnet50", view_size=224, classes=1000)
        costs = []
        for region in (ROOT, ROOT.child(model.grid, 0, 0)):
            with count_layers(model) as count:
                looked = model.look(torch.empty(1, 3, 224, 224), [region])
            assert looked.attention.shape == (1, 53, 53)
            costs.append(count.layers)
    assert 0.486e9 < costs[0] < 0.490e9
    assert costs[1] == pytest.approx(4.09e9, rel=0.01)  # as ResNet-50 is published
    assert count_parameters(model.anchor).trainable == 1_550_601


def test_a_model_comes_back_from_its_file(tmp_path):
    model = build(backbone="resnet10t", patches="strict")
    description = Description(
        family="anchornet",
        arguments=model.arguments.model_dump(mode="json"),
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
        again = loaded.model.look(views, regions)
    assert torch.equal(again.features, model.look(views, regions).features)
    assert torch.equal(again.attention, model.look(views, regions).attention)


def test_half_precision_names_patches_too():
    model = build(backbone="resnet10t")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        looked = model.look(noise(3, 3, VIEW, VIEW), root_and_cells(model))
    assert looked.attention[0].sum().item() == pytest.approx(1, abs=1e-3)
    assert looked.features.float().isfinite().all()


def test_weights_that_are_not_numbers_are_noticed(scene):
    model = build(backbone="resnet10t")
    model.anchor.head[0].weight.fill_(torch.nan)
    with (
        open_image(scene[1]) as reader,
        Looker(model, UNIT, device="cpu") as looker,
        pytest.raises(ModelError, match="not a number"),
    ):
        looker.look([reader], Plan(2, (4,), least_side=1))
