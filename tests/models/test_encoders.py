import copy
import os
from concurrent.futures import ThreadPoolExecutor

import huggingface_hub.constants
import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from timm.models.resnet import ResNet
from torch import nn

from tests.models.published import count_parameters, outline_backbone
from tnetcli.errors import ModelError
from tnetcli.models import encoders
from tnetcli.models.configs import ModelConfig
from tnetcli.models.encoders import Stream, build_backbone, build_timm
from tnetcli.models.nets import BagNet77
from tnetcli.testing.model import noise

NETS = [f"tf_efficientnet_b{number}" for number in range(5)]
# Kernel, stride, expansion and channels of the stages of B0 (Papadopoulos et al. 2021, appendix,
# table 5), and the repeats of B0 to B4.
STAGES = [
    (3, 1, 1, 16, (1, 2, 2, 2, 2)),
    (3, 2, 6, 24, (2, 3, 3, 3, 4)),
    (5, 2, 6, 40, (2, 3, 3, 3, 4)),
    (3, 2, 6, 80, (3, 4, 4, 5, 6)),
    (5, 1, 6, 112, (3, 4, 4, 5, 6)),
    (5, 2, 6, 192, (4, 5, 5, 6, 8)),
    (3, 1, 6, 320, (1, 2, 2, 2, 2)),
]
# Network, tap, side and channels of the map, features.
TAPS = [
    (0, "blocks.3.2", 14, 80, 1280),
    (0, "blocks.3.0", 14, 80, 1280),
    (1, "blocks.2.1", 28, 40, 1280),
    (2, "blocks.2.1", 28, 48, 1408),
    (3, "blocks.2.1", 28, 48, 1536),
    (4, "blocks.2.1", 28, 56, 1792),
]


def build(name="resnet18", view_size=64, *, bands=3, tap=None, cells=3, pretrained=False, **rest):
    config = ModelConfig(backbone=name, view_size=view_size, **rest)
    return build_backbone(config, bands=bands, tap=tap, cells=cells, pretrained=pretrained)


class TestEfficientNet:
    def test_b0_has_the_published_blocks(self):
        found = []
        for stage in outline_backbone(NETS[0], 224, tap="blocks.3.0").net.net.blocks:
            block = stage[0]
            first = block.conv_pw if hasattr(block, "conv_pwl") else block.conv_dw
            last = block.conv_pwl if hasattr(block, "conv_pwl") else block.conv_pw
            depthwise = block.conv_dw
            expansion = depthwise.in_channels // first.in_channels
            sizes = depthwise.kernel_size[0], depthwise.stride[0]
            found.append((*sizes, expansion, last.out_channels))
        assert found == [stage[:4] for stage in STAGES]

    @pytest.mark.parametrize(("number", "tap", "side", "channels", "features"), TAPS)
    def test_the_published_taps_have_the_published_maps(
        self, number, tap, side, channels, features
    ):
        backbone = outline_backbone(NETS[number], 224, tap=tap)
        assert backbone.map_size == (channels, side, side)
        assert backbone.feature_size == features
        repeats = [len(stage) for stage in backbone.net.net.blocks]
        assert repeats == [stage[4][number] for stage in STAGES]

    def test_stochastic_depth_grows_linearly_to_the_last_block(self):
        net = outline_backbone(NETS[0], 64, drop_path=0.32).net.net
        rates = [block.drop_path.drop_prob for stage in net.blocks for block in stage]
        assert rates == pytest.approx([0.02 * number for number in range(1, 17)])
        without = outline_backbone(NETS[0], 64).net.net
        paths = [block.drop_path for stage in without.blocks for block in stage]
        assert all(isinstance(path, nn.Identity) for path in paths)

    def test_norms_are_those_of_keras_and_weights_start_by_fan_out(self):
        torch.manual_seed(0)
        net = build(NETS[0]).net.net
        norms = [each for each in net.modules() if isinstance(each, nn.BatchNorm2d)]
        assert {(norm.eps, norm.momentum) for norm in norms} == {(1e-3, 0.01)}
        assert float(net.conv_head.weight.detach().var()) == pytest.approx(2 / 1280, rel=0.03)
        depthwise = net.blocks[5][3].conv_dw.weight.detach()
        assert float(depthwise.var()) == pytest.approx(2 / 25, rel=0.03)


class TestTap:
    @pytest.mark.parametrize(
        ("name", "view_size", "cells", "side"),
        [
            ("resnet18", 224, 3, 7),
            ("resnet18", 224, 5, 14),
            ("vit_tiny_patch16_224", 224, 5, 14),
            ("resnet18", 64, 30, 32),  # none is fine enough: the finest
        ],
    )
    def test_the_default_is_the_deepest_map_with_two_pixels_per_cell(
        self, name, view_size, cells, side
    ):
        assert outline_backbone(name, view_size, cells=cells).map_size.height == side

    @pytest.mark.parametrize(
        ("name", "tap", "module"),
        [("resnet18", 2, "layer2"), (NETS[0], 2, "blocks.2"), ("convnext_atto", 1, "stages.1")],
    )
    def test_a_stage_by_index_equals_the_module_by_name(self, name, tap, module):
        views, outputs = noise(2, 3, 64, 64), []
        for each in (tap, module):
            torch.manual_seed(0)
            outputs.append(build(name, tap=each).eval().requires_grad_(False)(views))
        assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True))

    def test_a_stage_whose_tap_changes_the_features_is_tapped_by_name(self, monkeypatch):
        def forward_intermediates(net, views, indices):
            final = net.forward_features(views)
            return 1.01 * final, [final]

        monkeypatch.setattr(ResNet, "forward_intermediates", forward_intermediates)
        backbone = build(tap=2).eval().requires_grad_(False)
        views = noise(1, 3, 64, 64)
        assert torch.equal(backbone(views)[1], backbone.net.net(views))
        assert backbone.map_size.channels == 128

    def test_a_stage_that_returns_no_map_is_an_error(self, monkeypatch):
        def forward_intermediates(net, views, indices):
            final = net.forward_features(views)
            return final[:, 1:], [final]

        vit = type(timm.create_model("test_vit"))
        monkeypatch.setattr(vit, "forward_intermediates", forward_intermediates)
        with pytest.raises(ModelError, match="no map with channels first"):
            build("test_vit", 96, tap=1)

    def test_a_network_that_joins_stages_at_its_end_keeps_all_features(self):
        backbone = outline_backbone("mobilenetv5_base", 256)
        assert backbone.feature_size == backbone.net.net.num_features == 2048

    @pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # by timm 1.0.30
    def test_a_network_that_returns_nothing_without_its_classifier_has_features(self):
        assert outline_backbone("inception_next_atto", 224).feature_size == 960

    @pytest.mark.parametrize(
        ("name", "tap", "message", "hint"),
        [
            ("resnet18", -1, "`resnet18` has no stage `-1`", "use 0 to 4"),
            ("resnet18", 5, "`resnet18` has no stage `5`", "use 0 to 4"),
            ("resnet18", "layer2.7", r"no module `layer2\.7`", "did you mean `layer2"),
            ("resnet18", "", "does not return a map", "index"),
            ("resnet18", "fc", "does not return a map", "index"),
            ("vit_tiny_patch16_224", "blocks.3", "does not return a map", "index"),
            ("convnext_tiny", "stages.1.blocks.0.mlp", "channels first", "index"),
            ("bagnet77", 2, "one map", "remove tap"),
        ],
    )
    def test_a_tap_without_a_map_is_an_error(self, name, tap, message, hint):
        with pytest.raises(ModelError, match=message) as caught:
            outline_backbone(name, 77 if name == "bagnet77" else 224, tap=tap)
        assert hint in caught.value.hint

    def test_copies_and_threads_have_their_own_map_and_keep_none(self):
        torch.manual_seed(0)
        backbone = build(tap="layer2.1").eval().requires_grad_(False)
        views = [noise(1, 3, 64, 64, seed=seed) for seed in range(12)]
        expected = [backbone(view)[0] for view in views]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda view: backbone(view)[0], views))
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
        assert torch.equal(copy.deepcopy(backbone)(views[0])[0], expected[0])
        assert not backbone.net._maps


class TestBuilding:
    @pytest.mark.parametrize(
        ("name", "message", "hint"),
        [
            ("resnet81", "unknown backbone: `resnet81`", "did you mean `resnet18`?"),
            ("bagnet7", "unknown backbone", "`bagnet77`"),
            ("?????", "unknown backbone", "tnet models"),
            ("hf-hub:timm/resnet18", "unknown backbone", ""),
            ("local-dir:/tmp", "unknown backbone", ""),
            ("timm/resnet18", "unknown backbone", ""),
            ("resnet18.a1_in2k", "cannot build `resnet18.a1_in2k`", ""),
        ],
    )
    def test_an_unknown_name_is_an_error_with_the_closest(self, name, message, hint):
        with pytest.raises(ModelError, match=message) as caught:
            build(name)
        assert hint in caught.value.hint

    def test_weights_may_be_named_without_being_downloaded(self):
        assert outline_backbone("resnet18.a1_in1k").feature_size == 512

    @pytest.mark.parametrize(
        ("name", "channels", "features"), [("vgg11", 512, 4096), ("dla34", 512, 512)]
    )
    def test_a_network_that_only_names_its_stages_is_tapped_by_name(self, name, channels, features):
        backbone = outline_backbone(name, 224)
        assert backbone.map_size == (channels, 7, 7)
        assert backbone.feature_size == features

    @pytest.mark.parametrize("stages", [[], [{"reduction": 0}]])  # 0 is no map
    def test_a_network_without_stages_needs_the_name_of_a_module(self, monkeypatch, stages):
        def create(config, **how):
            net = build_timm(config, **how)
            net.feature_info = stages  # which networks lack them changes with timm
            return net

        monkeypatch.setattr(encoders, "build_timm", create)
        with torch.device("meta"):
            with pytest.raises(ModelError, match="does not list its stages") as caught:
                build("convmixer_768_32", 224)
            assert "tap" in caught.value.hint
            assert build("convmixer_768_32", 224, tap="blocks.20").map_size == (768, 32, 32)

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"name": "vgg11", "drop_path": 0.1}, "cannot build `vgg11`"),
            ({"name": "bagnet77", "view_size": 77, "drop_path": 0.1}, "no stochastic depth"),
            ({"name": "bagnet77", "pooling": "mean_max"}, "supports pooling `mean` only"),
            ({"name": "vit_tiny_patch16_224", "pooling": "mean_max"}, "does not end in a map"),
            ({"name": "bagnet77", "view_size": 8}, "does not accept views of 8 pixels"),
            ({"name": "vit_tiny_patch16_224", "view_size": 8}, "does not accept views of 8"),
        ],
    )
    def test_an_unsupported_setting_is_an_error(self, config, message):
        with torch.device("meta"), pytest.raises(ModelError, match=message) as caught:
            build(**config)
        assert caught.value.hint

    @pytest.mark.parametrize(("view_size", "side"), [(112, 7), (384, 24)])
    def test_a_vision_transformer_takes_views_of_any_size(self, view_size, side):
        assert outline_backbone("vit_tiny_patch16_224", view_size).map_size == (192, side, side)

    def test_building_leaves_mode_and_running_statistics_unchanged(self):
        backbone = build()
        assert backbone.training
        assert not backbone.net.net.bn1.running_mean.any()
        assert int(backbone.net.net.bn1.num_batches_tracked) == 0

    def test_features_are_dropped_but_the_map_is_not(self):
        torch.manual_seed(0)
        backbone, views = (
            build("compact", feature_dropout=0.5, pooling="mean_max"),
            noise(1, 3, 64, 64),
        )
        backbone.net.eval()
        with torch.no_grad():
            maps, dropped = backbone(views)
            plain, features = backbone.eval()(views)
        assert torch.equal(maps, plain)
        kept = dropped != 0
        torch.testing.assert_close(dropped[kept], 2 * features[kept])
        assert (features[~kept] != 0).any()


class TestWeights:
    @pytest.fixture(scope="class")
    @classmethod
    def file(cls, tmp_path_factory):
        """Return the weights of an RGB network with its classifier."""
        torch.manual_seed(7)
        path = tmp_path_factory.mktemp("weights") / "resnet18.safetensors"
        save_file(timm.create_model("resnet18", num_classes=10).state_dict(), path)
        return path

    def test_a_local_file_is_loaded_without_its_classifier(self, file):
        expected, found = load_file(file), build(pretrained=file).net.net.state_dict()
        assert expected.keys() - found.keys() == {"fc.weight", "fc.bias"}
        assert all(torch.equal(found[key], expected[key]) for key in found)

    def test_filters_are_repeated_or_summed_for_other_bands(self, file):
        colours = load_file(file)["conv1.weight"]
        four = build(bands=4, pretrained=file).net.net.conv1.weight.detach()
        torch.testing.assert_close(four, torch.cat([colours, colours[:, :1]], dim=1) * 3 / 4)
        one = build(bands=1, pretrained=file).net.net.conv1.weight.detach()
        torch.testing.assert_close(one, colours.sum(1, keepdim=True))

    @pytest.mark.parametrize(
        ("name", "value", "problem"),
        [
            ("conv1.weight", torch.zeros(64, 4, 7, 7), "size mismatch for conv1.weight"),
            ("bn1.bias", None, "Missing key.*bn1.bias"),
            ("more", torch.zeros(1), "Unexpected key.*more"),
        ],
    )
    def test_tensors_that_do_not_fit_are_named(self, file, tmp_path, name, value, problem):
        tensors = {key: each for key, each in load_file(file).items() if key != name}
        save_file(tensors if value is None else tensors | {name: value}, tmp_path / "a.safetensors")
        with pytest.raises(ModelError, match=problem) as caught:
            build(pretrained=tmp_path / "a.safetensors")
        assert "same network" in caught.value.hint

    def test_a_file_may_lack_the_counts_of_batches(self, file, tmp_path):
        tensors = {k: v for k, v in load_file(file).items() if "num_batches" not in k}
        save_file(tensors, tmp_path / "a.safetensors")
        net = build(pretrained=tmp_path / "a.safetensors").net.net
        assert torch.equal(net.conv1.weight, tensors["conv1.weight"])

    def test_bagnet_is_loaded_from_a_file_for_other_bands(self, tmp_path):
        torch.manual_seed(0)
        net = BagNet77()
        save_file(net.state_dict(), tmp_path / "a.safetensors")
        loaded = build("bagnet77", 77, bands=4, pretrained=tmp_path / "a.safetensors").net
        assert loaded.stem.weight.shape == (64, 4, 3, 3)
        assert torch.equal(loaded.head.weight, net.head.weight)
        with pytest.raises(ModelError, match="does not fit the backbone"):
            build("compact", 64, pretrained=tmp_path / "a.safetensors")

    def test_a_pickle_a_truncated_file_or_no_file_is_an_error(self, file, tmp_path):
        path = tmp_path / "a.safetensors"
        torch.save({"conv1.weight": torch.zeros(1)}, path)
        with pytest.raises(ModelError, match="not a valid safetensors file") as caught:
            build(pretrained=path)
        assert "pickle" in caught.value.hint
        path.write_bytes(file.read_bytes()[:1000])
        with pytest.raises(ModelError, match="not a valid safetensors file"):
            build(pretrained=path)
        path.unlink()
        os.mkfifo(path)  # must not block
        for each in (path, tmp_path, tmp_path / "none.safetensors"):
            with pytest.raises(ModelError, match="cannot read the weights"):
                build(pretrained=each)

    def test_weights_of_a_vision_transformer_fit_views_of_another_size(self, tmp_path):
        torch.manual_seed(0)
        net = timm.create_model("vit_tiny_patch16_224", num_classes=5)
        save_file(net.state_dict(), tmp_path / "vit.safetensors")
        loaded = build("vit_tiny_patch16_224", 112, pretrained=tmp_path / "vit.safetensors").net.net
        assert torch.equal(loaded.blocks[0].attn.qkv.weight, net.blocks[0].attn.qkv.weight)
        assert loaded.pos_embed.shape == (1, 50, 192)

    @pytest.mark.parametrize("name", ["bagnet77", "mobilenetv3_large_075"])
    def test_unpublished_weights_cannot_be_downloaded(self, name):
        with pytest.raises(ModelError, match=f"no weights of `{name}` are published") as caught:
            build(name, 77, pretrained=True)
        assert "local" in caught.value.hint

    def test_downloading_without_internet_is_an_error_with_a_hint(self, monkeypatch, tmp_path):
        # The library reads its environment once, when first imported.
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(ModelError, match="cannot download the weights of `resnet18`") as caught:
            build(pretrained=True)
        assert "pretrained: FILE" in caught.value.hint

    def test_only_safetensors_are_downloaded(self, monkeypatch, tmp_path):
        torch.manual_seed(0)
        published = timm.create_model("resnet18")  # with its classifier
        save_file(published.state_dict(), tmp_path / "model.safetensors")
        asked = []

        def download(repository, name):
            asked.append((repository, name))
            return str(tmp_path / "model.safetensors")

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        loaded = build(pretrained=True, bands=4).net.net
        assert asked == [("timm/resnet18.a1_in1k", "model.safetensors")]
        assert torch.equal(loaded.layer4[1].conv2.weight, published.layer4[1].conv2.weight)


def stream(backbone, view_size=64, *, pretrained=False, bands=3, **more):
    torch.manual_seed(0)
    config = ModelConfig(backbone=backbone, view_size=view_size, **more)
    return Stream(config, bands=bands, pretrained=pretrained)


class TestStream:
    def test_vgg19_is_reduced_to_its_convolutions(self):
        with torch.device("meta"):
            found = stream("vgg19", 224)
        assert (found.map_size, found.feature_size) == ((512, 7, 7), 512)
        assert count_parameters(found).trainable == 20_024_384

    def test_vectors_equal_those_of_timm_where_its_head_is_a_mean(self):
        found, views = stream("test_resnet").eval(), noise(2, 3, 64, 64)
        with torch.no_grad():
            maps, vectors = found(views)
        expected = found.net.forward_head(found.net.forward_features(views), pre_logits=True)
        torch.testing.assert_close(vectors, expected)
        assert maps.shape[1:] == found.map_size

    @pytest.mark.parametrize(
        ("name", "view_size", "pooling"), [("compact", 64, "mean_max"), ("bagnet77", 77, "mean")]
    )
    def test_vectors_of_built_in_networks_equal_those_of_their_backbone(
        self, name, view_size, pooling
    ):
        found = stream(name, view_size, pooling=pooling).eval()
        views = noise(2, 3, view_size, view_size)
        with torch.no_grad():
            torch.testing.assert_close(found(views)[1], found.net(views)[1])

    @pytest.mark.parametrize("name", ["mobilenetv3_small_100", "compact"])
    def test_every_parameter_that_is_left_learns_and_no_hook_or_statistics_are_left(self, name):
        found = stream(name, bands=5)
        assert found.net.training
        assert not any(part._forward_hooks for part in found.modules())
        means = [each for name, each in found.net.state_dict().items() if "running_mean" in name]
        assert means
        assert not any(each.any() for each in means)
        for parameter in found.eval().parameters():
            if not parameter.any():
                parameter.data.fill_(0.1)
        found(noise(2, 5, 64, 64))[1].square().sum().backward()
        assert [name for name, p in found.named_parameters() if p.grad is None] == []

    @pytest.mark.parametrize(
        ("name", "view_size", "message"),
        [
            ("test_vit", 96, "no map with channels first"),
            ("swin_tiny_patch4_window7_224", 224, "no map with channels first"),
            ("vgg11", 16, "does not accept views of 16 pixels"),
            ("vg19", 64, "unknown backbone: `vg19`"),
        ],
    )
    def test_an_unsupported_network_is_an_error(self, name, view_size, message):
        with torch.device("meta"), pytest.raises(ModelError, match=message):
            stream(name, view_size)
