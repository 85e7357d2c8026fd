import pytest
import timm
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.models.contract import ROOT
from tnetcli.geometry import Grid
from tnetcli.models.alignment import Pool
from tnetcli.models.backbone import MapSize
from tnetcli.models.counting import count_multiplications, count_parameters
from tnetcli.models.registry import build_model

IMAGENET = {
    "backbone": "bagnet77",
    "view_size": 77,
    "grid": {"rows": 5, "columns": 5, "cell_fraction": 0.34375},
    "alignment": "reference",
    "location": "context",
    "position": "concat",
}
FMOW = {
    "backbone": "tf_efficientnet_b0",
    "grid": {"rows": 3, "columns": 3, "cell_fraction": 0.5},
    "alignment": "reference",
}
BIRDS = {
    "grid": {"rows": 5, "columns": 5, "cell_fraction": 0.35},
    "alignment": "reference",
    "weighting": True,
}
# SPEC 3.4, in millions: trainable and total of EN and TNet for CUB and NABirds; in billions:
# multiplications of EN at 448 pixels and of TNet with 0 to 5 locations.
DERIVED = {
    "b0": (
        ((4.26, 4.31), (4.72, 4.76), 1.54),
        ((5.52, 5.56), (5.97, 6.01), (0.39, 0.77, 1.16, 1.54, 1.93, 2.31)),
    ),
    "b1": (
        ((6.77, 6.83), (7.22, 7.29), 2.27),
        ((8.01, 8.07), (8.46, 8.52), (0.57, 1.14, 1.71, 2.28, 2.85, 3.41)),
    ),
    "b2": (
        ((7.98, 8.05), (8.48, 8.55), 2.63),
        ((9.48, 9.55), (9.98, 10.05), (0.66, 1.32, 1.98, 2.63, 3.29, 3.95)),
    ),
    "b3": (
        ((11.00, 11.09), (11.55, 11.64), 3.84),
        ((12.79, 12.87), (13.33, 13.42), (0.96, 1.93, 2.89, 3.85, 4.81, 5.77)),
    ),
    "b4": (
        ((17.91, 18.03), (18.54, 18.67), 6.00),
        ((20.33, 20.46), (20.97, 21.09), (1.50, 3.01, 4.51, 6.01, 7.52, 9.02)),
    ),
}


def outline(family, arguments, classes):
    with torch.device("meta"):
        return build_model(family, arguments, classes=classes).eval()


def look(model, count, *, score_cells):
    side = model.view_size
    views = torch.zeros(count, model.bands, side, side, device="meta")
    return model.look(views, [ROOT] * count, score_cells=score_cells).features


def walk(model, *followed, scores_last=False):
    """Count what it takes to see an image, then `followed` windows on each further level."""
    counts = (1, *followed)
    with count_multiplications(model) as count:
        seen = [
            look(model, number, score_cells=scores_last or level < len(followed))
            for level, number in enumerate(counts)
        ]
        present = torch.ones(1, sum(counts), dtype=torch.bool, device="meta")
        model.conclude(torch.cat(seen).unsqueeze(0), present)
    return count


def billions(number, digits=4):
    return round(number / 1e9, digits)


def millions(parameters):
    return round(parameters.trainable / 1e6, 2), round(parameters.total / 1e6, 2)


@pytest.fixture(scope="module")
def imagenet():
    return outline("tnet", IMAGENET, 1000)


@pytest.fixture(scope="module")
def fmow():
    return outline("tnet", FMOW, 62)


def test_bagnet_holds_20_546_664_parameters():
    model = outline("whole", {"backbone": "bagnet77", "view_size": 224}, 1000)
    assert count_parameters(model.backbone).trainable == 20_033_664
    assert count_parameters(model.classifier).trainable == 513_000
    assert count_parameters(model).trainable == 20_546_664


def test_bagnet_multiplies_18_42_billion_times_on_224_pixels():
    model = outline("whole", {"backbone": "bagnet77", "view_size": 224}, 1000)
    assert billions(walk(model).layers) == 18.4231


def test_tnet_for_imagenet_holds_21_859_949_parameters_and_the_baseline(imagenet):
    counted = count_parameters(imagenet)
    assert (counted.trainable, counted.total) == (21_859_949, 21_859_950)


def test_the_parts_of_tnet_for_imagenet_multiply_as_often_as_published(imagenet):
    multiplications = {
        part: count_part(imagenet, part)
        for part in ("backbone", "location", "position", "classifier")
    }
    assert multiplications == {
        "backbone": 1_803_329_728,
        "location": 25 * (1538 * 512 + 512),
        "position": 524_288,
        "classifier": 512_000,
    }


def test_the_parts_of_tnet_for_fmow_multiply_as_often_as_published(fmow):
    multiplications = {
        part: count_part(fmow, part) for part in ("backbone", "location", "position", "classifier")
    }
    assert multiplications == {
        "backbone": 384_534_752,
        "location": 123_760,
        "position": 409_600,
        "classifier": 79_360,
    }


def count_part(model, part):
    """Count what one part does while an image is seen once."""
    with count_multiplications(getattr(model, part)) as count:
        features = look(model, 1, score_cells=True)
        model.conclude(features.unsqueeze(0), torch.ones(1, 1, dtype=torch.bool, device="meta"))
    return count.layers


def test_scaling_by_squeeze_excite_is_counted_apart(fmow):
    with count_multiplications(fmow.backbone) as count:
        look(fmow, 1, score_cells=False)
    assert count.scaling == 2_306_528
    assert count.total == count.layers + count.scaling


@pytest.mark.parametrize(
    ("windows", "expected"),
    [(1, 3.6279), (2, 5.4318), (3, 7.2356), (4, 9.0395), (5, 10.8433)],
)
def test_tnet_for_imagenet_multiplies_as_often_as_published(imagenet, windows, expected):
    assert billions(walk(imagenet, windows).layers) == expected


def test_without_a_closer_look_the_published_figure_still_scores_cells(imagenet):
    assert billions(walk(imagenet).layers) == 1.8044
    assert billions(walk(imagenet, scores_last=True).layers) == 1.8241


@pytest.mark.parametrize(("classes", "expected"), [(62, (4_086_970, 4_128_986))])
def test_efficientnet_b0_holds_as_many_parameters_as_published(classes, expected):
    counted = count_parameters(outline("whole", {"backbone": "tf_efficientnet_b0"}, classes))
    assert (counted.trainable, counted.total) == expected


def test_tnet_for_fmow_holds_as_many_parameters_as_published(fmow):
    counted = count_parameters(fmow)
    assert (counted.trainable, counted.total) == (4_517_575, 4_559_592)


@pytest.mark.parametrize(
    ("view_size", "layers", "total"),
    [(224, 0.3846, 0.3869), (448, 1.5363, 1.5456), (896, 6.1432, 6.1801)],
)
def test_efficientnet_b0_multiplies_as_often_as_published(view_size, layers, total):
    model = outline("whole", {"backbone": "tf_efficientnet_b0", "view_size": view_size}, 62)
    count = walk(model)
    assert (billions(count.layers), billions(count.total)) == (layers, total)


@pytest.mark.parametrize(
    ("followed", "layers", "total"),
    [
        ((1,), 0.7701, 0.7747),
        ((2,), 1.1550, 1.1620),
        ((3,), 1.5400, 1.5492),
        ((2, 2), 1.9252, 1.9367),
        ((3, 3), 2.6952, 2.7113),
    ],
)
def test_tnet_for_fmow_multiplies_as_often_as_published(fmow, followed, layers, total):
    count = walk(fmow, *followed)
    assert (billions(count.layers), billions(count.total)) == (layers, total)


def test_tnet_for_fmow_without_a_closer_look_multiplies_as_often_as_published(fmow):
    count = walk(fmow)  # here, unlike for ImageNet, cells are scored only to be followed
    assert (billions(count.layers), billions(count.total)) == (0.3850, 0.3873)


@pytest.mark.parametrize("name", DERIVED)
def test_efficientnets_for_birds_hold_and_multiply_as_much_as_derived(name):
    cub, nabirds, multiplications = DERIVED[name][0]
    arguments = {"backbone": f"tf_efficientnet_{name}", "view_size": 448}
    model = outline("whole", arguments, 200)
    assert billions(walk(model).layers, 2) == multiplications
    assert held_for_birds(model) == [cub, nabirds]


@pytest.mark.parametrize("name", DERIVED)
def test_tnets_for_birds_hold_and_multiply_as_much_as_derived(name):
    cub, nabirds, multiplications = DERIVED[name][1]
    arguments = BIRDS | {"backbone": f"tf_efficientnet_{name}"}
    model = outline("tnet", arguments, 200)
    none, one, five = (walk(model, *followed).layers for followed in ((), (1,), (5,)))
    each, rest = divmod(five - one, 4)
    assert rest == 0
    found = [none, *(one + each * more for more in range(5))]
    assert tuple(billions(count, 2) for count in found) == multiplications
    assert held_for_birds(model) == [cub, nabirds]


def held_for_birds(model):
    """Count parameters for the 200 classes of CUB, then for the 555 of NABirds."""
    cub = millions(count_parameters(model))
    model.classifier = torch.nn.Linear(model.feature_size, 555, device="meta")
    return [cub, millions(count_parameters(model))]


@pytest.mark.parametrize(
    ("name", "view_size"), [("bagnet77", 77), ("tf_efficientnet_b0", 224), ("resnet18", 128)]
)
def test_multiplications_are_half_of_what_torch_counts(name, view_size):
    model = outline("whole", {"backbone": name, "view_size": view_size}, 10)
    with FlopCounterMode(display=False) as torch_count, torch.no_grad():
        features = look(model, 3, score_cells=True)
        model.classify(features)
    with count_multiplications(model) as count:
        features = look(model, 3, score_cells=True)
        model.classify(features)
    assert count.layers == torch_count.get_total_flops() // 2


# What FlopCounterMode calls the layers; `mm` of CondConv is the mixing of its weights.
LAYERS = ("convolution", "addmm", "mm")


@pytest.mark.parametrize(
    ("name", "view_size", "operations"),
    [
        ("beit_base_patch16_224", 224, LAYERS),
        ("eva02_tiny_patch14_224", 224, LAYERS),
        ("swinv2_tiny_window8_256", 256, LAYERS),
        ("tf_efficientnet_cc_b0_4e", 224, LAYERS[:2]),
    ],
)
def test_layers_that_apply_their_weight_themselves_are_counted(name, view_size, operations):
    with torch.device("meta"):
        net = timm.create_model(name, num_classes=10).eval()
    view = torch.zeros(2, 3, view_size, view_size, device="meta")
    with FlopCounterMode(display=False) as torch_count, torch.no_grad():
        net(view)
    with count_multiplications(net) as count:
        net(view)
    found = {str(name): flops for name, flops in torch_count.get_flop_counts()["Global"].items()}
    assert count.layers == sum(found.get(f"aten.{name}", 0) for name in operations) // 2


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (nn.Conv1d(4, 6, 3, groups=2), (5, 4, 10), 2 * 3 * 5 * 6 * 8),
        (nn.Conv3d(2, 3, 3), (1, 2, 5, 5, 5), 2 * 27 * 3 * 27),
        (nn.Linear(4, 6, bias=False), (2, 3, 4), 4 * 2 * 3 * 6),
    ],
)
def test_layers_of_any_number_of_dimensions_are_counted(layer, shape, expected):
    with count_multiplications(layer) as count:
        layer(torch.zeros(shape))
    assert count.layers == expected


def test_of_attention_only_the_dense_layers_are_counted():
    layer = nn.MultiheadAttention(8, 2).eval()
    with count_multiplications(layer) as count:
        layer(*[torch.zeros(5, 3, 8)] * 3)
    assert count.layers == 4 * 8 * (5 * 3 * 8)


def test_pooling_under_cells_is_not_counted():
    pool = Pool(MapSize(8, 6, 6), Grid(3, 3, 0.5))
    with count_multiplications(pool) as count:
        pool(torch.zeros(2, 8, 6, 6))
    assert count.total == 0


def test_counting_ends_with_its_block(fmow):
    with count_multiplications(fmow) as count:
        look(fmow, 1, score_cells=False)
    before = count.layers
    look(fmow, 1, score_cells=False)
    assert count.layers == before
    assert not any(module._forward_hooks for module in fmow.location.modules())


def test_counting_ends_where_the_block_fails(fmow):
    with pytest.raises(RuntimeError), count_multiplications(fmow):
        raise RuntimeError
    assert not any(module._forward_hooks for module in fmow.location.modules())
