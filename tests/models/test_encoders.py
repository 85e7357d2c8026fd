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

from tests.models.contract import noise
from tests.models.outlines import outline
from tnetcli.errors import ModelError
from tnetcli.models import encoders as backbone_module
from tnetcli.models.configs import ModelConfig
from tnetcli.models.encoders import build_backbone, create_timm
from tnetcli.models.nets import BagNet77

NETS = [f"tf_efficientnet_b{number}" for number in range(5)]
# SPEC 1.5: kernel, stride, expansion and channels of the stages of B0; repeats of B0 to B4.
STAGES = [
    (3, 1, 1, 16, (1, 2, 2, 2, 2)),
    (3, 2, 6, 24, (2, 3, 3, 3, 4)),
    (5, 2, 6, 40, (2, 3, 3, 3, 4)),
    (3, 2, 6, 80, (3, 4, 4, 5, 6)),
    (5, 1, 6, 112, (3, 4, 4, 5, 6)),
    (5, 2, 6, 192, (4, 5, 5, 6, 8)),
    (3, 1, 6, 320, (1, 2, 2, 2, 2)),
]
FIELDS = [7, 11, 19, 35, 67, 83, 115, 147, 211, 275, 339, 403, 531, 659, 787, 851]
# Network, tap, side of the map, channels, field, picks, centres: the table of SPEC 1.5.
FIVE_CENTERS = [47, 79, 111, 143, 175]
TAPS = [
    (0, "blocks.3.2", 14, 80, 147, [2, 6, 10], [47, 111, 175]),
    (0, "blocks.3.0", 14, 80, 83, [2, 4, 6, 8, 10], FIVE_CENTERS),
    (1, "blocks.2.1", 28, 40, 79, [5, 9, 13, 17, 21], FIVE_CENTERS),
    (2, "blocks.2.1", 28, 48, 79, [5, 9, 13, 17, 21], FIVE_CENTERS),
    (3, "blocks.2.1", 28, 48, 79, [5, 9, 13, 17, 21], FIVE_CENTERS),
    (4, "blocks.2.1", 28, 56, 87, [5, 9, 13, 17, 21], FIVE_CENTERS),
    (0, "blocks.2.1", 28, 40, 67, [3, 8, 13, 18, 23], [31, 71, 111, 151, 191]),
]


def build(name="resnet18", view_size=64, *, bands=3, tap=None, cells=3, pretrained=False, **rest):
    config = ModelConfig(backbone=name, view_size=view_size, **rest)
    return build_backbone(config, bands=bands, tap=tap, cells=cells, pretrained=pretrained)


def published(number):
    """Return the network of CUB and NABirds."""
    return outline(NETS[number], 224, tap="blocks.2.1" if number else "blocks.3.0")


class TestEfficientNet:
    def test_b0_has_the_published_blocks(self):
        net = published(0).net.net
        found = []
        for stage in net.blocks:
            kernel, stride = stage[0].conv_dw.kernel_size[0], stage[0].conv_dw.stride[0]
            expansion = stage[0].conv_dw.in_channels // previous(stage[0])
            last = stage[0].conv_pwl if hasattr(stage[0], "conv_pwl") else stage[0].conv_pw
            found.append((kernel, stride, expansion, last.out_channels))
        assert found == [stage[:4] for stage in STAGES]

    @pytest.mark.parametrize("number", range(5))
    def test_stages_repeat_as_published(self, number):
        net = published(number).net.net
        assert [len(stage) for stage in net.blocks] == [stage[4][number] for stage in STAGES]

    def test_every_block_of_b0_sees_the_published_field(self):
        backbone = outline(NETS[0], 224, tap="blocks.6.0")
        net, found = backbone.net.net, []
        hooks = [
            layer.register_forward_hook(lambda _, __, output: found.append(output.fields))
            for layer in (net.conv_stem, *(block for stage in net.blocks for block in stage))
        ]
        backbone.fields()
        for hook in hooks:
            hook.remove()
        assert [(rows.size, columns.size) for rows, columns in found] == [
            (size, size) for size in (3, *FIELDS)
        ]

    @pytest.mark.parametrize(("number", "tap", "side", "channels", "size", "picks", "at"), TAPS)
    def test_the_published_taps_see_the_published_pixels(
        self, number, tap, side, channels, size, picks, at
    ):
        backbone = outline(NETS[number], 224, tap=tap)
        assert backbone.map_size() == (channels, side, side)
        for axis in backbone.fields():
            assert axis.size == size
            assert [axis.centers(side)[pick] for pick in picks] == at

    @pytest.mark.parametrize(
        ("tap", "side", "step"), [("blocks.2.1", 28, 8), ("blocks.3.0", 14, 16)]
    )
    def test_centres_lie_below_and_to_the_right_as_with_the_padding_of_tensorflow(
        self, tap, side, step
    ):
        rows, columns = outline(NETS[0], 224, tap=tap).fields()
        expected = [step * index + step - 1 for index in range(side)]
        assert rows.centers(side) == columns.centers(side) == expected

    @pytest.mark.parametrize(("number", "size"), list(enumerate([1280, 1280, 1408, 1536, 1792])))
    def test_features_are_as_many_as_published(self, number, size):
        assert published(number).feature_size == size

    def test_stochastic_depth_grows_from_the_first_block_to_all_of_it_at_the_last(self):
        net = outline("tf_efficientnet_b0", 64, drop_path=0.32).net.net
        rates = [block.drop_path.drop_prob for stage in net.blocks for block in stage]
        assert rates == pytest.approx([0.02 * number for number in range(1, 17)])

    def test_without_stochastic_depth_nothing_is_dropped(self):
        net = published(0).net.net
        paths = [block.drop_path for stage in net.blocks for block in stage]
        assert all(isinstance(path, nn.Identity) for path in paths)

    def test_norms_are_those_of_keras(self):
        norms = [each for each in published(0).modules() if isinstance(each, nn.BatchNorm2d)]
        assert {(norm.eps, norm.momentum) for norm in norms} == {(1e-3, 0.01)}

    def test_weights_start_by_fan_out(self):
        torch.manual_seed(0)
        net = build("tf_efficientnet_b0").net.net
        pointwise = net.conv_head.weight.detach()
        assert float(pointwise.var()) == pytest.approx(2 / 1280, rel=0.03)
        depthwise = net.blocks[5][3].conv_dw.weight.detach()
        assert float(depthwise.var()) == pytest.approx(2 / 25, rel=0.03)


def previous(block):
    """Return how many channels enter a block of EfficientNet."""
    return (block.conv_pw if hasattr(block, "conv_pwl") else block.conv_dw).in_channels


class TestTap:
    @pytest.mark.parametrize(
        ("name", "view_size", "cells", "side"),
        [
            ("resnet18", 224, 3, 7),
            ("resnet18", 224, 5, 14),
            ("resnet18", 64, 4, 8),
            ("tf_efficientnet_b0", 224, 5, 14),
            ("vit_tiny_patch16_224", 224, 5, 14),
            ("resnet18", 64, 30, 32),  # none is fine enough: the finest
        ],
    )
    def test_by_itself_it_is_the_deepest_map_with_two_pixels_a_cell(
        self, name, view_size, cells, side
    ):
        assert outline(name, view_size, cells=cells).map_size().height == side

    @pytest.mark.parametrize(
        ("name", "tap", "module"),
        [
            ("resnet18", 2, "layer2"),
            ("tf_efficientnet_b0", 2, "blocks.2"),
            ("mobilenetv3_small_100", 1, "blocks.0"),
            ("convnext_atto", 1, "stages.1"),
        ],
    )
    def test_a_stage_by_number_is_the_module_by_name(self, name, tap, module):
        torch.manual_seed(0)
        by_number = build(name, tap=tap).eval().requires_grad_(False)
        torch.manual_seed(0)
        by_name = build(name, tap=module).eval().requires_grad_(False)
        views = noise(2, 3, 64, 64)
        for one, other in zip(by_number(views), by_name(views), strict=True):
            assert torch.equal(one, other)

    def test_a_stage_that_is_joined_with_others_at_the_end_leaves_nothing_out(self):
        backbone = outline("mobilenetv5_base", 256)
        assert backbone.feature_size == backbone.net.net.num_features == 2048

    def test_a_stage_that_changes_the_features_is_tapped_by_its_name(self, monkeypatch):
        def forward_intermediates(net, views, indices):
            final = net.forward_features(views)
            return 1.01 * final, [final]

        monkeypatch.setattr(ResNet, "forward_intermediates", forward_intermediates)
        backbone = build(tap=2).eval().requires_grad_(False)
        views = noise(1, 3, 64, 64)
        assert torch.equal(backbone(views)[1], backbone.net.net(views))
        assert backbone.map_size().channels == 128

    def test_a_stage_that_changes_the_features_and_has_no_map_by_name_is_refused(self, monkeypatch):
        def forward_intermediates(net, views, indices):
            final = net.forward_features(views)
            return final[:, 1:], [final]

        monkeypatch.setattr(
            type(timm.create_model("test_vit")), "forward_intermediates", forward_intermediates
        )
        with pytest.raises(ModelError, match="does not put out a map"):
            build("test_vit", 96, tap=1)

    @pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # by timm 1.0.30
    def test_a_network_that_returns_nothing_without_its_classifier_has_features(self):
        assert outline("inception_next_atto", 224).feature_size == 960

    @pytest.mark.parametrize("tap", [-1, 5, 99])
    def test_a_stage_that_is_not_there_is_refused(self, tap):
        with pytest.raises(ModelError, match=f"`resnet18` has no stage `{tap}`") as caught:
            outline(tap=tap)
        assert caught.value.hint == "it has 0 to 4"

    def test_a_module_that_is_not_there_is_refused_with_the_nearest(self):
        with pytest.raises(ModelError, match=r"no module `layer2\.7`") as caught:
            outline(tap="layer2.7")
        assert "did you mean `layer2" in caught.value.hint

    @pytest.mark.parametrize("tap", ["", "fc", "global_pool"])
    def test_a_module_that_puts_out_no_map_is_refused(self, tap):
        with pytest.raises(ModelError, match="does not put out a map"):
            outline(tap=tap)

    def test_a_module_that_puts_out_tokens_is_refused(self):
        with pytest.raises(ModelError, match="does not put out a map"):
            outline("vit_tiny_patch16_224", 112, tap="blocks.3")

    def test_a_map_with_channels_last_is_refused(self):
        with pytest.raises(ModelError, match="channels first"):
            outline("convnext_tiny", tap="stages.1.blocks.0.mlp")

    def test_a_copy_keeps_its_own_map(self):
        torch.manual_seed(0)
        one = build(tap="layer2.1").eval().requires_grad_(False)
        other = copy.deepcopy(one)
        views = noise(1, 3, 64, 64)
        assert torch.equal(one(views)[0], other(views)[0])
        assert other.net._seen is not one.net._seen

    def test_threads_that_share_a_model_see_each_its_own_map(self):
        torch.manual_seed(0)
        backbone = build(tap="layer2.1").eval().requires_grad_(False)
        views = [noise(1, 3, 64, 64, seed=seed) for seed in range(12)]
        expected = [backbone(view)[0] for view in views]
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda view: backbone(view)[0], views))
        assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))

    def test_nothing_of_a_call_outlives_it(self):
        backbone = build(tap="layer2.1")
        backbone(noise(2, 3, 64, 64))
        assert not backbone.net._seen

    def test_bagnet_has_no_other_map(self):
        with pytest.raises(ModelError, match="one map") as caught:
            outline("bagnet77", 77, tap=2)
        assert caught.value.hint


class TestBuilding:
    def test_an_unknown_backbone_is_refused_with_the_nearest(self):
        with pytest.raises(ModelError, match="unknown backbone: `resnet81`") as caught:
            build("resnet81")
        assert caught.value.hint == "did you mean `resnet18`?"

    def test_our_own_backbone_is_among_the_nearest(self):
        with pytest.raises(ModelError) as caught:
            build("bagnet7")
        assert "`bagnet77`" in caught.value.hint

    def test_a_name_like_nothing_else_leads_to_the_list(self):
        with pytest.raises(ModelError) as caught:
            build("?????")
        assert "tnet models" in caught.value.hint

    @pytest.mark.parametrize("name", ["hf-hub:timm/resnet18", "local-dir:/tmp", "timm/resnet18"])
    def test_a_place_to_fetch_from_is_no_backbone(self, name):
        with pytest.raises(ModelError, match="unknown backbone"):
            build(name)

    def test_unknown_weights_of_a_known_backbone_are_refused_with_the_nearest(self):
        with pytest.raises(ModelError, match="no weights `a1_in2k`") as caught:
            build("resnet18.a1_in2k")
        assert caught.value.hint == "did you mean `resnet18.a1_in1k`?"

    def test_weights_may_be_named_without_being_fetched(self):
        assert outline("resnet18.a1_in1k").feature_size == 512

    @pytest.mark.parametrize(
        ("name", "channels", "side", "features"),
        [("vgg11", 512, 7, 4096), ("densenet121", 1024, 7, 1024), ("dla34", 512, 7, 512)],
    )
    def test_a_backbone_that_only_names_its_stages_is_tapped_by_name(
        self, name, channels, side, features
    ):
        with torch.device("meta"):
            backbone = build(name, 224)
        assert backbone.map_size() == (channels, side, side)
        assert backbone.feature_size == features

    @pytest.mark.parametrize("told", [[], [{"reduction": 0}]])  # 0 is no map
    def test_a_backbone_without_stages_needs_the_name_of_a_module(self, monkeypatch, told):
        def create(config, **how):
            net = create_timm(config, **how)
            net.feature_info = told  # which do not tell theirs changes from timm to timm
            return net

        monkeypatch.setattr(backbone_module, "create_timm", create)
        with torch.device("meta"):
            with pytest.raises(ModelError, match="does not tell its stages") as caught:
                build("convmixer_768_32", 224)
            assert "tap" in caught.value.hint
            assert build("convmixer_768_32", 224, tap="blocks.20").map_size() == (768, 32, 32)

    @pytest.mark.parametrize("name", ["vgg11", "densenet121"])
    def test_a_backbone_that_takes_no_stochastic_depth_is_refused(self, name):
        with pytest.raises(ModelError, match=f"`{name}` cannot be built that way") as caught:
            build(name, drop_path=0.1)
        assert caught.value.hint == "leave out drop_path"

    def test_bagnet_takes_no_stochastic_depth(self):
        with pytest.raises(ModelError, match="no stochastic depth"):
            build("bagnet77", 77, drop_path=0.1)

    @pytest.mark.parametrize(
        ("name", "view_size"),
        [
            ("bagnet77", 8),
            ("mixer_s16_224", 112),
            ("vit_tiny_patch16_224", 8),
            ("convit_tiny", 100),
        ],
    )
    def test_a_view_size_that_does_not_fit_is_refused(self, name, view_size):
        tap = "patch_embed.proj" if name == "convit_tiny" else None
        with pytest.raises(ModelError, match=f"cannot see views of {view_size} pixels") as caught:
            build(name, view_size, tap=tap)
        assert "view_size" in caught.value.hint

    @pytest.mark.parametrize(("view_size", "side"), [(224, 14), (112, 7), (160, 10), (384, 24)])
    def test_a_vision_transformer_sees_views_of_any_size(self, view_size, side):
        backbone = outline("vit_tiny_patch16_224", view_size)
        assert backbone.map_size() == (192, side, side)

    def test_building_leaves_running_statistics_as_they_start(self):
        backbone = build()
        assert backbone.training
        assert not backbone.net.net.bn1.running_mean.any()
        assert int(backbone.net.net.bn1.num_batches_tracked) == 0

    def test_features_are_dropped_but_the_map_is_not(self):
        torch.manual_seed(0)
        backbone = build("bagnet77", 77, feature_dropout=0.5)
        views = noise(1, 3, 77, 77)
        with torch.no_grad():
            seen, dropped = backbone(views)
            plain, features = backbone.eval()(views)
        assert torch.equal(seen, plain)
        kept = dropped != 0
        assert 0.35 < float(kept.float().mean()) < 0.65
        torch.testing.assert_close(dropped[kept], 2 * features[kept])

    def test_pixels_merged_by_reshaping_cannot_be_followed(self):
        backbone = build()
        backbone.net = Merging()
        with pytest.raises(ModelError, match="cannot tell what a pixel of the map sees") as caught:
            backbone.fields()
        assert caught.value.hint == "use alignment `pool`"


class Merging(nn.Module):
    """Halve the map in a way that is not followed."""

    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv2d(3, 512, 1)

    def forward(self, views):
        x = self.convolution(views)[:, :, ::8, ::8]
        return x, x.mean((2, 3))


class TestWeights:
    @pytest.fixture(scope="class")
    @classmethod
    def file(cls, tmp_path_factory):
        """Return the weights of a network for colour images, with its classifier."""
        torch.manual_seed(7)
        path = tmp_path_factory.mktemp("weights") / "resnet18.safetensors"
        save_file(timm.create_model("resnet18", num_classes=10).state_dict(), path)
        return path

    def test_a_local_file_is_loaded_without_its_classifier(self, file):
        net = build(pretrained=file).net.net
        expected = load_file(file)
        found = net.state_dict()
        assert expected.keys() - found.keys() == {"fc.weight", "fc.bias"}
        assert all(torch.equal(found[key], expected[key]) for key in found)

    def test_more_bands_repeat_the_colours(self, file):
        found = build(bands=4, pretrained=file).net.net.conv1.weight
        colours = load_file(file)["conv1.weight"]
        repeated = torch.cat([colours, colours[:, :1]], dim=1) * 3 / 4
        torch.testing.assert_close(found.detach(), repeated)

    def test_one_band_sums_the_colours(self, file):
        found = build(bands=1, pretrained=file).net.net.conv1.weight
        colours = load_file(file)["conv1.weight"]
        torch.testing.assert_close(found.detach(), colours.sum(1, keepdim=True))

    def test_colours_are_not_made_from_other_bands(self, tmp_path):
        path = tmp_path / "four.safetensors"
        save_file(timm.create_model("resnet18", in_chans=4).state_dict(), path)
        with pytest.raises(ModelError, match=r"another shape, such as `conv1\.weight`"):
            build(pretrained=path)

    def test_a_file_without_counts_of_batches_is_whole(self, file, tmp_path):
        tensors = {k: v for k, v in load_file(file).items() if "num_batches" not in k}
        save_file(tensors, tmp_path / "a.safetensors")
        net = build(pretrained=tmp_path / "a.safetensors").net.net
        assert torch.equal(net.conv1.weight, tensors["conv1.weight"])

    def test_missing_tensors_are_named(self, file, tmp_path):
        tensors = load_file(file)
        del tensors["layer1.0.conv1.weight"]
        save_file(tensors, tmp_path / "a.safetensors")
        with pytest.raises(ModelError, match=r"1 tensors are missing, such as `layer1\.0\.conv1"):
            build(pretrained=tmp_path / "a.safetensors")

    def test_the_file_of_another_network_is_refused(self, file):
        with pytest.raises(ModelError, match=r"are missing.*are unknown") as caught:
            build("mobilenetv3_small_100", pretrained=file)
        assert "same network" in caught.value.hint

    def test_a_pickle_in_disguise_is_not_loaded(self, tmp_path):
        path = tmp_path / "a.safetensors"
        torch.save({"conv1.weight": torch.zeros(1)}, path)
        with pytest.raises(ModelError, match="not a valid safetensors file") as caught:
            build(pretrained=path)
        assert "pickle" in caught.value.hint

    @pytest.mark.parametrize("length", [0, 5, 1000, 100_000])
    def test_a_truncated_file_is_refused(self, file, tmp_path, length):
        path = tmp_path / "a.safetensors"
        path.write_bytes(file.read_bytes()[:length])
        with pytest.raises(ModelError, match="not a valid safetensors file"):
            build(pretrained=path)

    def test_a_file_that_is_not_there_is_refused(self, tmp_path):
        with pytest.raises(ModelError, match="cannot read the weights"):
            build(pretrained=tmp_path / "a.safetensors")

    def test_a_folder_is_refused(self, tmp_path):
        path = tmp_path / "a.safetensors"
        path.mkdir()
        with pytest.raises(ModelError, match="cannot read the weights"):
            build(pretrained=path)

    def test_a_pipe_in_the_place_of_weights_is_refused_without_waiting(self, tmp_path):
        path = tmp_path / "a.safetensors"
        os.mkfifo(path)
        with pytest.raises(ModelError, match="cannot read the weights"):
            build(pretrained=path)

    def test_weights_of_a_vision_transformer_fit_views_of_another_size(self, tmp_path):
        torch.manual_seed(0)
        path = tmp_path / "vit.safetensors"
        net = timm.create_model("vit_tiny_patch16_224", num_classes=5)
        save_file(net.state_dict(), path)
        loaded = build("vit_tiny_patch16_224", 112, pretrained=path).net.net
        assert torch.equal(loaded.blocks[0].attn.qkv.weight, net.blocks[0].attn.qkv.weight)
        assert loaded.pos_embed.shape == (1, 50, 192)

    def test_bagnet_is_loaded_from_its_own_file(self, tmp_path):
        torch.manual_seed(0)
        net = BagNet77()
        path = tmp_path / "bagnet.safetensors"
        save_file(net.state_dict(), path)
        loaded = build("bagnet77", 77, bands=4, pretrained=path).net
        assert loaded.stem.weight.shape == (64, 4, 3, 3)
        assert torch.equal(loaded.head.weight, net.head.weight)

    def test_there_is_no_bagnet_to_fetch(self):
        with pytest.raises(ModelError, match="no published weights of `bagnet77`") as caught:
            build("bagnet77", 77, pretrained=True)
        assert "local" in caught.value.hint

    def test_a_backbone_that_was_never_published_cannot_be_fetched(self):
        with pytest.raises(ModelError, match="no published weights") as caught:
            build("mobilenetv3_large_075", pretrained=True)
        assert "local" in caught.value.hint

    def test_without_a_network_fetching_ends_with_a_hint(self, monkeypatch, tmp_path):
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        # The library reads its environment once, when first imported.
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
        with pytest.raises(ModelError, match="cannot fetch the weights of `resnet18`") as caught:
            build(pretrained=True)
        assert "pretrained: FILE" in caught.value.hint

    def test_what_is_fetched_is_never_a_pickle(self, monkeypatch, tmp_path):
        torch.manual_seed(0)
        published = timm.create_model("resnet18")  # with its classifier
        file = tmp_path / "model.safetensors"
        save_file(published.state_dict(), file)
        asked = []

        def download(repository, name):
            asked.append((repository, name))
            return str(file)

        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        loaded = build(pretrained=True, bands=4).net.net
        assert asked == [("timm/resnet18.a1_in1k", "model.safetensors")]
        assert torch.equal(loaded.layer4[1].conv2.weight, published.layer4[1].conv2.weight)
