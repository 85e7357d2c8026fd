import json

import pytest

from tests.checkpoints import BACKBONE, VIEW_SIZE, write_tiny
from tests.commands import ROOT, tnet
from tnetcli.cli import profile as profile_command
from tnetcli.cli.profile import profile_model
from tnetcli.errors import UsageError


@pytest.fixture(autouse=True)
def _one_repeat(monkeypatch):
    monkeypatch.setattr(profile_command, "REPEATS", 1)


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"model: {{classes: 4, backbone: {BACKBONE}, view_size: {VIEW_SIZE}, aggregator: gated}}\n"
        "traversal: {levels: 3, keep: [2, 1]}\n"
    )
    return path


def rows(found, key="windows"):
    return [(row[key], row["is_default"]) for row in found["traversals"]]


def test_a_recipe_is_changed_counted_and_measured(recipe):
    done = tnet("profile", "--recipe", recipe, "--json", "--windows", "0,2",
                "--device", "cpu", "--set", "model.classes=7", "--set", "traversal.keep=3",
                )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    record = json.loads(done.stdout)
    assert (record["schema"], record["classes"]) == ("tnet.profile/3", 7)
    assert record["cells"] == "3 x 3 cells of 0.5"
    assert [each["views"] for each in record["traversals"]] == [[1], [1, 2], [1, 3, 9]]
    costs = [each["multiplications"] for each in record["traversals"]]
    assert 0 < costs[0] < costs[1] < costs[2]
    assert all(each["seconds"] > 0 for each in record["traversals"])


def test_a_shipped_recipe_is_shown_as_text():
    done = tnet("profile", "--recipe", ROOT / "recipes" / "tnet-fmow.yaml", "--no-timing")
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("4,517,575", "4 (default)", "1+2+2", "1.9252"):
        assert part in done.stdout
    assert "seconds" not in done.stdout
    assert done.stdout.isascii()
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_a_checkpoint_wins_over_a_recipe_in_the_environment(tmp_path):
    path = write_tiny(tmp_path / "model.safetensors")
    done = tnet("profile", "--model", path, "--windows", 0, TNET_PROFILE_RECIPE="ignored.yaml")
    assert done.returncode == 0, done.stderr
    assert "1+2+2" in done.stdout
    assert "seconds" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ([], "neither --model nor --recipe"),
        (["--model", "a", "--recipe", "a.yaml"], "both given"),
        (["--model", "a", "--set", "a=1"], "--set needs a recipe"),
        (["--recipe", "a.yaml", "--windows", "a"], "not a list of integers >= 0: `a`"),
        (["--recipe", "a.yaml", "--windows", "1,-1"], "not a list of integers >= 0"),
        (["--recipe", "a.yaml", "--precision", "fp8"], "--precision"),
        (["--recipe", "a.yaml", "--device", "abacus"], "abacus"),
    ],
)
def test_wrong_usage_ends_with_2_and_a_hint(arguments, part):
    done = tnet("profile", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert part in done.stderr
    assert "hint:" in done.stderr


def test_missing_files_end_with_4_and_5(tmp_path):
    done = tnet("profile", "--recipe", tmp_path / "none.yaml", "--no-timing")
    assert (done.returncode, done.stdout) == (4, "")
    assert "no such recipe" in done.stderr
    done = tnet("profile", "--model", tmp_path / "none.safetensors", "--no-timing")
    assert (done.returncode, done.stdout) == (5, "")
    assert "hint:" in done.stderr


@pytest.mark.parametrize(
    "setting",
    ["model.classes=99999999999999999999999999", "model.classes=0x" + "f" * 5000,
     "model.location_size=1000000000000", "model.bands=1000000", "model.alignment=nearst",
     "model.grid={rows: 10000000, columns: 3, cell_fraction: 0.5}", "model=3",
     "model.pretrained=none.safetensors"],
    ids=lambda setting: setting[:30],
)  # fmt: skip
def test_a_wrong_setting_ends_with_4_and_two_lines(recipe, setting):
    done = tnet("profile", "--recipe", recipe, "--no-timing", "--set", setting)
    assert (done.returncode, done.stdout) == (4, "")
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["error", "hint"]


def test_settings_may_be_in_the_environment():
    recipe = ROOT / "recipes" / "whole-b0.yaml"
    done = tnet(
        "profile", "--recipe", recipe, "--no-timing",
        TNET_PROFILE_SET="model.classes=7 model.bands=4", TNET_PROFILE_JSON="1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["classes"], found["bands"]) == (7, 4)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("tnet", "backbone: compact, view_size: 64, aggregator: gated"),
        ("anchornet", "backbone: compact, view_size: 128"),
        ("two_stream", "backbone: compact, view_size: 64"),
        ("saccader", "view_size: 96, width: 0.125"),
        ("dram", "backbone: compact, view_size: 96, glimpse_size: 32"),
        ("whole", "backbone: compact, view_size: 64"),
    ],
)
def test_the_parts_of_a_model_add_up_to_all_of_it(family, more, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(f"model: {{family: {family}, classes: 4, {more}}}\n")
    parameters = profile_model(str(path), windows=[0])["parameters"]
    assert sum(parameters.values()) == 2 * parameters["all"]


def test_rows_are_the_given_windows_and_the_default(recipe):
    found = profile_model(str(recipe), windows=[3, 0, 3])
    assert rows(found) == [(0, False), (3, False), (4, True)]
    assert all(row["seconds"] is None for row in found["traversals"])
    found = profile_model(str(recipe), ["traversal.levels=2"], windows=[2, 3])
    assert rows(found) == [(2, True), (3, False)]
    found = profile_model(str(recipe))
    assert [windows for windows, is_default in rows(found) if not is_default] == list(range(6))


def test_windows_are_limited_to_the_cells_of_a_region(recipe):
    smaller = ["model.grid={rows: 1, columns: 3, cell_fraction: 0.5}"]
    assert max(windows for windows, default in rows(profile_model(str(recipe), smaller))
               if not default) == 3  # fmt: skip
    with pytest.raises(UsageError, match="more than 3 regions of level 2: `4`"):
        profile_model(str(recipe), smaller, windows=[4])
    many = ["model.grid={rows: 50, columns: 50, cell_fraction: 0.5}", "model.view_size=64"]
    with pytest.raises(UsageError, match="--windows is more than 2,000 regions of level 2: `2001`"):
        profile_model(str(recipe), many, windows=[0, 2001])


def test_a_family_of_one_level_has_no_windows(recipe):
    settings = ["model={family: whole, classes: 4, backbone: " + BACKBONE + "}", "traversal={}"]
    assert rows(profile_model(str(recipe), settings)) == [(0, True)]
    with pytest.raises(UsageError, match="more than 0 regions of level 2: `1`"):
        profile_model(str(recipe), settings, windows=[0, 1])


def test_anchornet_is_limited_to_the_patches_it_proposes(tmp_path):
    path = tmp_path / "anchor.yaml"
    path.write_text(
        "model: {family: anchornet, classes: 4, backbone: resnet18, view_size: 224}\n"
        "traversal: {levels: 2, keep: [99]}\n"
    )
    found = profile_model(str(path), windows=[0, 24])
    assert ([1, 24], True) in rows(found, "views")
    assert "955 patches of 63, 95 and 111 pixels" in found["cells"]  # 21^2 + 17^2 + 15^2
    with pytest.raises(UsageError, match="more than 24 regions of level 2: `25`"):
        profile_model(str(path), windows=[25])
    with pytest.raises(UsageError, match="more than 5 regions of level 2: `6`"):
        profile_model(str(path), ["model.patches=strict"], windows=[6])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_other_precisions_can_be_measured(tmp_path, precision):
    path = tmp_path / "a.yaml"
    path.write_text("model: {family: whole, classes: 2, backbone: compact, view_size: 32}\n")
    found = profile_model(str(path), windows=[0], timing=("cpu", precision))
    assert found["traversals"][0]["seconds"] > 0


@pytest.mark.parametrize(("family", "expected"), [("tnet", [1, 2, 2]), ("whole", [1])])
def test_a_checkpoint_is_profiled_with_its_own_traversal(tmp_path, family, expected):
    path = write_tiny(tmp_path / "model.safetensors", family)
    found = profile_model(str(path), windows=[0], timing=("cpu", "fp32"), is_recipe=False)
    assert (expected, True) in rows(found, "views")
    assert (found["bands"], found["classes"]) == (4, 3)
