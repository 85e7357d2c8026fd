import hashlib
import json
import os
import pickle
import sys

import pytest

from tests.checkpoints import fields, pack_description, tiny, write_tiny
from tests.commands import tnet
from tnetcli.cli.models import match_backbones, read_card
from tnetcli.errors import ModelError
from tnetcli.models import checkpoint
from tnetcli.models.checkpoint import save_checkpoint
from tnetcli.models.cost import count_parameters
from tnetcli.models.registry import BACKBONES, FAMILIES


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny(
        tmp_path_factory.mktemp("model") / "rivers.safetensors",
        metrics={"accuracy": 0.93},
        data_licence="CC-BY-4.0",
    )


@pytest.fixture
def assets(tmp_path, monkeypatch):
    (tmp_path / "assets").mkdir()
    monkeypatch.setattr(checkpoint, "files", lambda package: tmp_path)
    return tmp_path / "assets"


def card(path, *described, **changes):
    """Write a file with a description only, and return its card as text."""
    path.write_bytes(pack_description(fields(*described, **changes)))
    done = tnet("models", path)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def error_lines(done, code):
    assert (done.returncode, done.stdout) == (code, "")
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["error", "hint"]
    return done.stderr


def test_the_list_shows_families_models_and_backbones():
    done = tnet("models")
    assert (done.returncode, done.stderr) == (0, "")
    for part in (*FAMILIES, *BACKBONES, "bundled models", "--backbones"):
        assert part in done.stdout
    lines = done.stdout.splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("  anchornet "))
    summary = FAMILIES.load("anchornet").summary.split("\n")
    column = lines[first].index(summary[0])
    assert [line[column:] for line in lines[first : first + 2]] == summary
    assert not lines[first + 1][:column].strip()


def test_the_list_as_json_is_one_object():
    record = json.loads(tnet("models", "--json").stdout)
    assert record.keys() == {"families", "bundled", "backbones"}
    assert list(record["families"]) == list(FAMILIES)
    assert not any("\n" in text for text in record["families"].values())


def test_bundled_models_are_listed_and_shown_by_name(assets):
    assert "no model is installed" in tnet("models").stdout
    (assets / "default.safetensors").write_bytes(pack_description(fields(summary="land cover")))
    (assets / "other.safetensors").write_bytes(pack_description(fields()))
    bundled = json.loads(tnet("models", "--json").stdout)["bundled"]
    assert bundled == {"default": "land cover", "other": "river, forest, town"}
    assert "land cover" in tnet("models").stdout
    record = json.loads(tnet("models", "default", "--json").stdout)
    assert (record["name"], record["summary"]) == ("default", "land cover")
    assert "did you mean `default`?" in error_lines(tnet("models", "defalt"), 5)


def test_a_card_as_text(model):
    done = tnet("models", model)
    assert (done.returncode, done.stderr) == (0, "")
    for part in ("test_efficientnet", "64 x 64 pixels", "3 x 3 cells", "3, keep 2,1", "stretch",
                 "3: river, forest, town", "4: B02, B03, B04, B08", "uint16", "400.5",
                 "accuracy 0.93", "CC-BY-4.0", "sha256", str(model)):  # fmt: skip
        assert part in done.stdout
    last = done.stdout.splitlines()[-1]  # only the header was read
    assert last.split()[:3] == ["tensors", "not", "checked:"]


def test_a_card_as_json_has_the_whole_description(tmp_path):
    given = fields(metrics={"accuracy": 0.93}, data_licence="CC-BY-4.0", recipe={"seed": 1})
    path = write_tiny(tmp_path / "a.safetensors", **given)
    facts = json.loads(tnet("models", "--json", path).stdout)
    expected = {
        **given,
        "schema": "tnet.model/2",
        "file": str(path),
        "file_bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "backbone": "test_efficientnet",
        "view_size": 64,
        "grid": {"rows": 3, "columns": 3, "cell_fraction": 0.5},
        "weights": "float32",
    }
    del expected["config"], expected["traversal"]  # these are complete in the file
    assert {key: facts[key] for key in expected} == expected
    assert facts["config"]["alignment"] == "pool"


@pytest.mark.parametrize("family", ["tnet", "whole"])
def test_parameters_are_counted_as_on_the_model(tmp_path, family):
    model, description = tiny(family)
    save_checkpoint(tmp_path / "a.safetensors", model, description)
    facts, _ = read_card(str(tmp_path / "a.safetensors"))
    assert facts["parameters"] == count_parameters(model).total


def test_a_card_describes_the_family_and_its_cells(tmp_path):
    config = {"backbone": "compact", "view_size": 128}
    shown = card(tmp_path / "a.safetensors", "anchornet", config=config)
    lines = [line.strip() for line in shown.splitlines()]
    first, second = FAMILIES.load("anchornet").summary.split("\n")
    assert lines[lines.index(second) - 1].split(maxsplit=1) == ["is", first]
    assert "115 patches of 63, 95 and 111 pixels" in shown  # 9^2 + 5^2 + 3^2


def test_long_lists_and_names_are_cut(tmp_path):
    count = 5000
    shown = card(
        tmp_path / "a.safetensors",
        name="n" * 10**6,
        summary="\x07" * 10**6,
        classes=[f"kind{n}" for n in range(1000)],
        bands=[f"band{number}" for number in range(count)],
        normalisation={"dtype": "uint8", "mean": [1 / 3] * count, "std": [1.0] * count},
        traversal={"levels": 2, "keep": [1] * count},
        metrics={f"metric{number}": number for number in range(count)},
    )
    assert max(map(len, shown.splitlines())) < 600
    assert "1000: kind0, kind1," in shown
    assert "kind20" not in shown
    assert "metric19 19, and 4980 more; --json shows all" in shown


def test_control_characters_are_escaped(tmp_path):
    path = tmp_path / "a\x1b[2J.safetensors"
    shown = card(path, classes=["a\x1b[2J", "b\nc", "d\x9b"], name="\x07")
    assert not {"\x1b", "\x9b", "\x07"} & set(shown)
    assert "a\\x1b[2J, b\\nc, d\\x9b" in shown


@pytest.mark.skipif(sys.platform != "linux", reason="names are bytes on Linux only")
def test_a_file_name_that_is_not_utf_8_is_shown(model, tmp_path):
    odd = os.path.join(tmp_path, "\udcff.safetensors")
    os.symlink(model, odd)
    for flags in ([], ["--json"]):
        done = tnet("models", *flags, odd)
        assert (done.returncode, done.stderr) == (0, "")


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


def test_a_folder_and_an_impossible_name_end_with_5(tmp_path):
    error_lines(tnet("models", tmp_path), 5)
    error_lines(tnet("models", "a" * 300), 5)


@pytest.mark.parametrize(
    "arguments",
    [["a", "b"], ["--nope"], ["a.safetensors", "--backbones", "*"], ["--backbones"], [""],
     ["--backbones", ""]],
)  # fmt: skip
def test_wrong_usage_ends_with_2(arguments):
    error_lines(tnet("models", *arguments), 2)


def test_an_option_without_its_value_leads_to_the_help_of_its_command():
    assert "see `tnet models --help`" in error_lines(tnet("models", "--backbones"), 2)


def test_the_command_line_wins_over_the_environment(model):
    done = tnet("models", model, TNET_MODELS_BACKBONES="resnet*", TNET_MODELS_JSON="1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["file"] == str(model)


def test_backbones_are_matched_by_name():
    done = tnet("models", "--backbones", "test_efficientnet*")
    assert done.returncode == 0
    names = done.stdout.split()
    assert "test_efficientnet" in names
    assert f"{len(names)} of " in done.stderr
    found = json.loads(tnet("models", "--backbones", "bagnet*", "--json").stdout)
    assert "bagnet77" in found["backbones"]
    assert len(found["backbones"]) < 10 < found["total"]


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [("efficientnet", "`*efficientnet*`"), ("rsnet50", "`resnet50`"), ("~", "any characters")],
)
def test_a_pattern_without_a_match_suggests_another(pattern, hint):
    with pytest.raises(ModelError, match="no backbone matches") as caught:
        match_backbones(pattern)
    assert hint in caught.value.hint


def test_a_wrong_name_suggests_the_nearest_and_ends_with_5():
    assert "did you mean `default`?" in error_lines(tnet("models", "defalt"), 5)
