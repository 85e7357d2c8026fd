import pytest
import safetensors.torch
import timm
import torch

from tests.models.contract import noise
from tests.models.published import count_parameters
from tnetcli.errors import ModelError
from tnetcli.models.configs import ModelConfig
from tnetcli.models.encoders import Stream, build_backbone


def build(backbone, view_size=64, *, pretrained=False, bands=3, **more):
    torch.manual_seed(0)
    config = ModelConfig(backbone=backbone, view_size=view_size, **more)
    return Stream(config, bands=bands, pretrained=pretrained).eval()


@pytest.mark.parametrize(("view_size", "side"), [(448, 14), (224, 7)])
def test_vgg19_is_its_convolutions_and_nothing_else(view_size, side):
    with torch.device("meta"):
        stream = build("vgg19", view_size)
        convolutions = timm.create_model("vgg19").features
    assert stream.map_size == (512, side, side)
    assert stream.feature_size == 512
    assert count_parameters(stream).trainable == 20_024_384
    assert count_parameters(convolutions).trainable == 20_024_384


def test_vectors_are_those_of_timm_where_its_head_is_a_mean():
    stream, views = build("resnet18"), noise(2, 3, 64, 64)
    torch.manual_seed(0)
    net = timm.create_model("resnet18", num_classes=0).eval()
    net.load_state_dict(stream.net.state_dict())
    with torch.no_grad():
        seen = stream(views)
        torch.testing.assert_close(stream.pool(seen), net(views))
    assert seen.shape[1:] == stream.map_size


@pytest.mark.parametrize(
    ("name", "view_size", "pooling"),
    [("compact", 64, "mean"), ("compact", 64, "mean_max"), ("bagnet77", 77, "mean")],
)
def test_vectors_of_our_own_networks_are_those_of_their_backbone(name, view_size, pooling):
    stream = build(name, view_size, pooling=pooling)
    backbone = build_backbone(stream_arguments(name, view_size, pooling), bands=3).eval()
    backbone.net.load_state_dict(stream.net.state_dict())
    views = noise(2, 3, view_size, view_size)
    with torch.no_grad():
        torch.testing.assert_close(stream.pool(stream(views)), backbone(views)[1])
    assert stream.feature_size == backbone.feature_size


def stream_arguments(name, view_size, pooling):
    return ModelConfig(backbone=name, view_size=view_size, pooling=pooling)


@pytest.mark.parametrize("name", ["mobilenetv3_small_100", "convnext_atto", "resnet10t", "compact"])
def test_every_parameter_that_is_left_learns(name):
    stream = build(name, drop_path=0.0)
    for parameter in stream.parameters():
        if not parameter.any():
            parameter.data.fill_(0.1)
    stream.pool(stream(noise(2, 3, 64, 64))).square().sum().backward()
    assert [name for name, p in stream.named_parameters() if p.grad is None] == []


def test_looking_once_leaves_nothing_behind():
    stream = build("mobilenetv3_small_100")
    assert not any(part._forward_hooks for part in stream.modules())
    fresh = timm.create_model("mobilenetv3_small_100", num_classes=0)
    for key, value in stream.net.state_dict().items():
        if "running" in key:
            assert torch.equal(value, fresh.state_dict()[key])


def test_a_network_learns_on_after_it_was_built():
    config = ModelConfig(backbone="resnet10t", view_size=64)
    assert Stream(config, bands=3).net.training


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_a_network_that_does_not_end_in_a_map_is_refused(name):
    with pytest.raises(ModelError, match="does not end in a map with channels first"):
        build(name, 224)


def test_views_that_are_too_small_are_refused():
    with pytest.raises(ModelError, match="cannot see views of 8 pixels"):
        build("bagnet77", 8)
    message = "`vgg11` cannot see views of 16 pixels"
    with torch.device("meta"), pytest.raises(ModelError, match=message):
        build("vgg11", 16)


def test_an_unknown_network_is_refused():
    with pytest.raises(ModelError, match="unknown backbone: `vg19`"):
        build("vg19")


@pytest.mark.parametrize("name", ["resnet10t", "mobilenetv3_small_100"])
def test_weights_come_from_a_file_that_may_hold_a_head(name, tmp_path):
    torch.manual_seed(7)
    net = timm.create_model(name).eval()
    path = tmp_path / "net.safetensors"
    safetensors.torch.save_file(net.state_dict(), path)
    stream, views = build(name, pretrained=path), noise(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(stream(views), net.forward_features(views))


def test_other_bands_are_seen():
    assert build("resnet10t", bands=5)(noise(1, 5, 64, 64)).shape == (1, 512, 2, 2)
