import numpy as np
import pytest
import torch

from tnetcli.errors import ModelError
from tnetcli.geometry import Grid
from tnetcli.models.encoders import build_backbone
from tnetcli.models.nets import MapSize, Pool, pool_map
from tnetcli.models.registry import build_model, read_model_config


def test_the_maxima_stand_behind_the_means():
    seen = torch.randn(2, 3, 4, 5)
    pooled = pool_map(seen, "mean_max")
    flat = seen.flatten(2).numpy()
    assert np.allclose(pooled[:, :3], flat.mean(2), atol=1e-6)
    assert np.array_equal(pooled[:, 3:], flat.max(2))


def test_the_maximum_of_a_cell_is_of_the_pixels_under_it():
    seen = torch.randn(1, 2, 16, 16)
    pooled = Pool(MapSize(2, 16, 16), Grid(7, 7, 0.25), "mean_max")(seen)
    assert pooled.shape == (1, 4, 7, 7)
    for row in range(7):
        for column in range(7):
            under = seen[0, :, 2 * row : 2 * row + 4, 2 * column : 2 * column + 4].flatten(1)
            assert torch.allclose(pooled[0, :2, row, column], under.mean(1), atol=1e-6)
            assert torch.equal(pooled[0, 2:, row, column], under.amax(1))


def test_a_cell_smaller_than_a_map_pixel_has_a_maximum():
    pooled = Pool(MapSize(1, 2, 2), Grid(5, 5, 0.1), "mean_max")(torch.arange(4.0).view(1, 1, 2, 2))
    assert pooled[0, 1, 0, 0] == 0
    assert pooled[0, 1, 4, 4] == 3


def test_a_backbone_without_a_last_map_has_no_maxima():
    with pytest.raises(ModelError, match="does not end in a map"):
        build_model(
            "whole",
            {"backbone": "vit_tiny_patch16_224", "view_size": 112, "pooling": "mean_max"},
            classes=2,
        )


def test_bagnet_has_no_maxima():
    with pytest.raises(ModelError, match="takes the mean of its map"):
        build_model("whole", {"backbone": "bagnet77", "pooling": "mean_max"}, classes=2)


def test_the_compact_map_has_a_pixel_for_eight_of_the_view():
    config = read_model_config("tnet", {"backbone": "compact", "view_size": 128})
    backbone = build_backbone(config, bands=4)
    assert backbone.map_size() == (64, 16, 16)
    assert backbone.feature_size == 96
