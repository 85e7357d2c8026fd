import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.models.published import outline_backbone
from tnetcli.errors import ModelError
from tnetcli.geometry import Grid
from tnetcli.models.nets import MapSize, Pool, normalised_logits, pool_map
from tnetcli.models.tnet import (
    ContextLocation,
    Coordinates,
    Pick,
    Reference,
    SqueezeLocation,
    find_reference,
)
from tnetcli.testing.model import noise

FIVE = Grid(5, 5, 0.35)


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def probabilities(logits, *, centered=False, temperature=1.0):
    found = normalised_logits(logits, centered=centered, temperature=temperature)
    assert found.shape == (len(logits), logits[0].numel())
    return found.softmax(dim=1).view_as(logits)


def bounds(cells):
    """Return the smallest and largest probability of a cell for logits of norm 1.

    Softmax ignores a common offset, so the extreme logits sum to 0.
    """
    far, rest = math.sqrt((cells - 1) / cells), math.sqrt(1 / (cells * (cells - 1)))
    low, high = math.exp(-far), math.exp(far)
    return low / (low + (cells - 1) * math.exp(rest)), high / (high + (cells - 1) * math.exp(-rest))


class TestNormalisedLogits:
    @pytest.mark.parametrize(
        ("cells", "published"), [(25, (0.0148, 0.1036)), (9, (0.0415, 0.2653))]
    )
    def test_probabilities_reach_but_never_leave_the_published_bounds(self, cells, published):
        low, high = bounds(cells)
        assert (low, high) == pytest.approx(published, abs=5e-5)
        logits = noise(2000, cells, 1) * noise(2000, 1, 1, seed=1).exp()
        logits[:, 0] *= torch.linspace(-30, 30, 2000).unsqueeze(-1)  # near the extremes
        found = probabilities(logits.double())
        assert low <= found.min() <= found.max() <= high
        peak = torch.full((1, cells, 1), -1 / (cells - 1), dtype=torch.float64)
        peak[0, 0] = 1
        assert float(probabilities(7 * peak)[0, 0]) == pytest.approx(high)
        assert float(probabilities(-7 * peak)[0, 0]) == pytest.approx(low)

    def test_scale_never_matters_and_an_offset_only_without_centering(self):
        logits = noise(1, 3, 3)
        torch.testing.assert_close(probabilities(logits), probabilities(1000 * logits))
        assert float(probabilities(logits + 50).max()) == pytest.approx(1 / 9, abs=0.01)
        torch.testing.assert_close(
            probabilities(logits + 50, centered=True),
            probabilities(logits, centered=True),
            rtol=0,
            atol=1e-5,
        )

    def test_a_lower_temperature_sharpens_without_reaching_zero(self):
        logits = noise(1, 5, 5)
        tops = [float(probabilities(logits, temperature=t).max()) for t in (1.0, 0.1, 0.02)]
        assert tops == sorted(tops)
        assert tops[-1] > 0.99
        expected = (logits.flatten() / logits.norm() / 0.1).softmax(0).view_as(logits)
        torch.testing.assert_close(probabilities(logits, temperature=0.1), expected)
        assert (probabilities(torch.tensor([[[1.0, -1.0]]]), temperature=0.02) > 0).all()

    @pytest.mark.parametrize("centered", [False, True])
    @pytest.mark.parametrize(("shape", "value"), [((2, 3, 3), 0.0), ((2, 1, 1), 0.3)])
    def test_equal_logits_give_equal_probabilities_and_finite_gradients(
        self, centered, shape, value
    ):
        logits = torch.full(shape, value, requires_grad=True)
        found = probabilities(logits, centered=centered)
        torch.testing.assert_close(found, torch.full(shape, 1 / (shape[1] * shape[2])))
        found[:, 0, 0].log().sum().backward()
        assert logits.grad.isfinite().all()

    @pytest.mark.parametrize("dtype", [torch.float16])
    def test_half_precision_gives_single_precision_probabilities(self, dtype):
        large = 3e4 * noise(1, 5, 5).clamp(-2, 2).to(dtype)
        for logits in (torch.zeros(1, 5, 5, dtype=dtype), large):
            found = probabilities(logits)
            assert found.dtype == torch.float32
            assert float(found.sum()) == pytest.approx(1, abs=1e-6)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def parameters(module):
    """Return a 1x1 convolution as a matrix and a vector."""
    return module.weight.double().numpy()[:, :, 0, 0], module.bias.double().numpy()


class TestLocationModules:
    def test_parameters_are_as_many_as_published(self):
        assert count(ContextLocation(1024, 512)) == 788_485
        assert [count(SqueezeLocation(n)) for n in (80, 40, 56)] == [19_725, 5_065, 9_777]
        assert [SqueezeLocation(n).squeeze.reduce.out_channels for n in (80, 57, 1)] == [40, 28, 1]

    def test_squeeze_scores_equal_plain_numpy(self):
        torch.manual_seed(0)
        module, cells = SqueezeLocation(6).requires_grad_(False), noise(2, 6, 2, 3)
        found = module(cells, torch.zeros(2, 1))
        layers = (module.enter, module.squeeze.reduce, module.squeeze.expand)
        enter, reduce, expand = map(parameters, layers)
        mix, score = parameters(module.mix), parameters(module.score)
        for region in range(2):
            pixels = cells[region].double().numpy().reshape(6, 6).T  # (cells, channels)
            x = pixels @ enter[0].T + enter[1]
            x = x * sigmoid(x)
            gate = x.mean(0) @ reduce[0].T + reduce[1]
            gate = sigmoid((gate * sigmoid(gate)) @ expand[0].T + expand[1])
            places = [[row, column] for row in (-1, 1) for column in (-1, 0, 1)]
            x = np.hstack([x * gate, places]) @ mix[0].T + mix[1]
            logits = (x * sigmoid(x)) @ score[0].T + score[1]
            assert found[region].numpy().ravel() == pytest.approx(logits.ravel(), abs=1e-5)

    def test_context_scores_equal_plain_numpy(self):
        torch.manual_seed(0)
        module = ContextLocation(4, 3, 5).requires_grad_(False)
        cells, features = noise(2, 4, 2, 2), noise(2, 3, seed=1)
        found = module(cells, features)
        mix, score = parameters(module.mix), parameters(module.score)
        for region in range(2):
            pixels = cells[region].double().numpy().reshape(4, 4).T
            context = np.tile(features[region].double().numpy(), (4, 1))
            places = [[row, column] for row in (-1, 1) for column in (-1, 1)]
            x = np.hstack([pixels, context, places]) @ mix[0].T + mix[1]
            logits = np.where(x > 0, x, 0.2 * x) @ score[0].T + score[1]
            assert found[region].numpy().ravel() == pytest.approx(logits.ravel(), abs=1e-5)

    def test_coordinates_are_rows_then_columns_from_minus_1_to_1_with_a_learned_scale(self):
        cells, module = noise(2, 4, 3, 5), Coordinates().requires_grad_(False)
        found = module(cells)
        assert torch.equal(found[:, :4], cells)
        assert found[1, 4, :, 2].tolist() == [-1, 0, 1]
        assert found[1, 5, 1].tolist() == [-1, -0.5, 0, 0.5, 1]
        assert not module(torch.zeros(1, 1, 1, 1)).any()  # a single cell is in the middle
        module.weight[:], module.bias[:] = torch.tensor([2.0, 3.0]), torch.tensor([0.5, -1.0])
        found = module(torch.zeros(1, 1, 3, 3))
        assert found[0, 1, :, 0].tolist() == [-1.5, 0.5, 2.5]
        assert found[0, 2, 0].tolist() == [-4, -1, 2]


def align(name, grid, view_size, tap=None):
    return Pick(outline_backbone(name, view_size, tap=tap).map_size, find_reference(name, grid))


class TestAlignment:
    @pytest.mark.parametrize(
        ("name", "cells", "picks"),
        [
            ("bagnet77", 5, [0, 2, 4, 6, 8]),
            ("tf_efficientnet_b0", 3, [2, 6, 10]),
            ("tf_efficientnet_b0", 5, [2, 4, 6, 8, 10]),
            ("tf_efficientnet_b4", 5, [5, 9, 13, 17, 21]),
        ],
    )
    def test_the_published_rows_and_columns_are_picked(self, name, cells, picks):
        grid = Grid(cells, cells, 0.5)
        tap = find_reference(name, grid).tap
        assert align(name, grid, 77 if name == "bagnet77" else 224, tap).picks.tolist() == picks

    def test_a_set_of_weights_is_aligned_as_its_network(self):
        tagged = find_reference("tf_efficientnet_b0.ns_jft_in1k", FIVE)
        assert tagged == find_reference("tf_efficientnet_b0", FIVE)

    @pytest.mark.parametrize(
        ("name", "grid"),
        [
            ("resnet18", FIVE),
            ("bagnet77", Grid(5, 3, 0.5)),
            ("tf_efficientnet_b4", Grid(3, 3, 0.5)),
        ],
    )
    def test_an_unpublished_alignment_is_an_error_that_lists_the_published_ones(self, name, grid):
        with pytest.raises(ModelError, match="no published alignment") as caught:
            find_reference(name, grid)
        assert "bagnet77 5x5" in caught.value.hint

    def test_a_view_of_another_size_than_the_published_is_an_error(self):
        with pytest.raises(ModelError, match="9 pixels a side, not 27"):
            align("bagnet77", FIVE, 224)

    def test_a_pick_takes_rows_and_columns_of_the_map(self):
        maps = noise(2, 3, 6, 6)
        found = Pick(MapSize(3, 6, 6), Reference(6, (0, 5)))(maps)
        assert torch.equal(found, maps[:, :, [0, 5]][..., [0, 5]])

    @given(
        st.integers(1, 4),
        st.integers(1, 4),
        st.integers(1, 8),
        st.integers(1, 8),
        st.integers(1, 20),
    )
    def test_a_pool_is_the_area_mean_of_a_cell(self, rows, columns, height, width, twentieths):
        fine = 120  # so that cells of up to 4 rows, whole twentieths of a side, end between pixels
        maps = noise(1, 2, height, width)
        found = Pool(MapSize(2, height, width), Grid(rows, columns, twentieths / 20))(maps)[0]
        repeated = maps[0].double().numpy().repeat(fine, axis=1).repeat(fine, axis=2)
        for row in range(rows):
            top, bottom = span(row, rows, twentieths, height * fine)
            for column in range(columns):
                left, right = span(column, columns, twentieths, width * fine)
                expected = repeated[:, top:bottom, left:right].mean((1, 2))
                assert np.abs(found[:, row, column].numpy() - expected).max() < 1e-5

    def test_mean_max_appends_the_maximum_of_the_pixels_of_a_cell(self):
        maps = noise(1, 2, 16, 16)
        pooled = Pool(MapSize(2, 16, 16), Grid(7, 7, 0.25), "mean_max")(maps)
        assert pooled.shape == (1, 4, 7, 7)
        for row, column in ((0, 0), (3, 5), (6, 6)):
            under = maps[0, :, 2 * row : 2 * row + 4, 2 * column : 2 * column + 4].flatten(1)
            assert torch.allclose(pooled[0, :2, row, column], under.mean(1), atol=1e-6)
            assert torch.equal(pooled[0, 2:, row, column], under.amax(1))
        small = Pool(MapSize(1, 2, 2), Grid(5, 5, 0.1), "mean_max")
        assert small(torch.arange(4.0).view(1, 1, 2, 2))[0, 1, [0, 4], [0, 4]].tolist() == [0, 3]

    def test_alignment_keeps_the_precision_and_is_not_saved(self):
        pool = Pool(MapSize(2, 4, 4), Grid(2, 2, 0.5))
        assert pool(torch.ones(1, 2, 4, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16
        assert not pool.state_dict()
        assert not Pick(MapSize(3, 1, 1), Reference(1, (0,))).state_dict()


def span(index, cells, twentieths, length):
    """Return start and end of a cell; a single one spans all."""
    if cells == 1:
        return 0, length
    cell = length // 20 * twentieths
    start, rest = divmod(index * (length - cell), cells - 1)
    assert rest == 0
    return start, start + cell


def test_pooled_maps_are_means_then_maxima():
    maps = noise(2, 3, 4, 5)
    pooled, flat = pool_map(maps, "mean_max"), maps.flatten(2)
    assert torch.allclose(pooled[:, :3], flat.mean(2), atol=1e-6)
    assert torch.equal(pooled[:, 3:], flat.amax(2))
