import json
import os
import pickle
import subprocess
import sys

import pytest

from tests.checkpoints import fields, pack_description, write_tiny
from tests.commands import ROOT, tnet


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny(
        tmp_path_factory.mktemp("model") / "rivers.safetensors",
        metrics={"accuracy": 0.93},
        data_licence="CC-BY-4.0",
    )


@pytest.fixture
def bundle(tmp_path):
    """Return a folder where `tnetcli` is the package with a model inside."""
    package = tmp_path / "tnetcli"
    (package / "assets").mkdir(parents=True)
    for part in (ROOT / "tnetcli").iterdir():
        if part.name not in ("assets", "__pycache__"):
            (package / part.name).symlink_to(part)
    (package / "assets" / "default.safetensors").write_bytes(
        pack_description(fields(summary="land cover"))
    )
    return tmp_path


def error_lines(done, code):
    assert done.returncode == code
    assert done.stdout == ""
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["error", "hint"]
    return done.stderr


def test_without_an_argument_families_models_backbones_and_uses_are_listed():
    done = tnet("models")
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("whole", "bundled models", "bagnet77", "tnet profile", "--backbones"):
        assert part in done.stdout


def test_the_list_is_one_object_as_json():
    record = json.loads(tnet("models", "--json").stdout)
    assert record.keys() == {"families", "bundled", "backbones"}


@pytest.mark.parametrize("arguments", [[], ["FILE"], ["FILE", "--json"]])
def test_no_list_and_no_card_loads_torch(model, arguments):
    given = ["models", *(str(model) if each == "FILE" else each for each in arguments)]
    code = f"""
import sys
sys.argv = ["tnet", *{given!r}]
from tnetcli.cli.app import main
try:
    main()
except SystemExit as end:
    assert not end.code
print(*{{"torch", "timm", "torchvision", "rasterio"}} & sys.modules.keys(), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.split() == []


def test_a_card_is_shown_as_text(model):
    done = tnet("models", model)
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("test_efficientnet", "64 x 64 pixels", "3 x 3 cells", "3, keep 2,1", "stretch",
                 "3: river, forest, town", "4: B02, B03, B04, B08", "uint16", "400.5",
                 "accuracy 0.93", "CC-BY-4.0", "sha256", str(model)):  # fmt: skip
        assert part in done.stdout


def test_a_card_is_one_object_as_json(model):
    record = json.loads(tnet("models", "--json", model).stdout)
    assert record["family"] == "tnet"
    assert record["classes"] == ["river", "forest", "town"]
    assert record["metrics"] == {"accuracy": 0.93}


def test_a_bundled_model_has_a_name(bundle):
    assert "land cover" in tnet("models", cwd=bundle).stdout
    record = json.loads(tnet("models", "default", "--json", cwd=bundle).stdout)
    assert (record["name"], record["summary"]) == ("default", "land cover")


def test_a_wrong_name_suggests_the_nearest_and_ends_with_5(bundle):
    assert "did you mean `default`?" in error_lines(tnet("models", "defalt", cwd=bundle), 5)


@pytest.mark.parametrize(
    "content",
    [None, b"", b"hello", pickle.dumps({"a": 1}), pack_description("{"),
     pack_description(fields(family="new"))],
)  # fmt: skip
def test_a_wrong_file_ends_with_5_and_a_hint(tmp_path, content):
    path = tmp_path / "a.safetensors"
    if content is not None:
        path.write_bytes(content)
    assert str(path) in error_lines(tnet("models", path), 5)


def test_a_folder_ends_with_5(tmp_path):
    error_lines(tnet("models", tmp_path), 5)


@pytest.mark.parametrize(
    "arguments",
    [["a", "b"], ["--nope"], ["a.safetensors", "--backbones", "*"], ["--backbones"], [""],
     ["--backbones", ""]],
)  # fmt: skip
def test_wrong_usage_ends_with_2(arguments):
    error_lines(tnet("models", *arguments), 2)


def test_an_option_without_its_value_leads_to_the_help_of_its_command():
    assert "see `tnet models --help`" in error_lines(tnet("models", "--backbones"), 2)


def test_a_name_that_no_file_can_have_ends_with_5():
    error_lines(tnet("models", "a" * 300), 5)


def test_letters_that_the_output_does_not_have_are_spelt_out(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(pack_description(fields(name="snow \N{SNOWMAN}")))
    done = tnet("models", tmp_path / "a.safetensors", PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stderr) == (0, "")
    assert "snow \\u2603" in done.stdout


def test_backbones_go_to_standard_output_and_their_number_beside():
    done = tnet("models", "--backbones", "test_efficientnet*")
    assert done.returncode == 0
    names = done.stdout.split()
    assert "test_efficientnet" in names
    assert f"{len(names)} of " in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="names are bytes on Linux only")
def test_a_file_whose_name_is_no_text_is_shown(model, tmp_path):
    odd = os.fsencode(tmp_path) + b"/\xff.safetensors"
    os.symlink(os.fsencode(model), odd)
    for flags in ([], ["--json"]):
        done = subprocess.run(
            [sys.executable, "-m", "tnetcli", "models", *flags, odd],
            capture_output=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b"")


def test_the_environment_does_not_stand_in_the_way_of_a_file(tmp_path):
    path = write_tiny(tmp_path / "a.safetensors")
    result = tnet("models", path, TNET_MODELS_BACKBONES="resnet*", TNET_MODELS_JSON="1")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["file"] == str(path)
