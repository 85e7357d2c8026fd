import hashlib
import json

import pytest

from tests.checkpoints import fields, pack_description, tiny, write_tiny
from tnetcli.cli.models import as_json, as_text, match_backbones, read_card, survey
from tnetcli.errors import ModelError
from tnetcli.models import checkpoint
from tnetcli.models.checkpoint import save_checkpoint
from tnetcli.models.cost import count_parameters
from tnetcli.models.registry import BACKBONES, FAMILIES


@pytest.fixture
def assets(tmp_path, monkeypatch):
    (tmp_path / "assets").mkdir()
    monkeypatch.setattr(checkpoint, "files", lambda package: tmp_path)
    return tmp_path / "assets"


@pytest.mark.parametrize("family", ["tnet", "whole"])
def test_parameters_are_counted_as_on_the_model(tmp_path, family):
    model, description = tiny(family)
    save_checkpoint(tmp_path / "a.safetensors", model, description)
    facts = read_card(str(tmp_path / "a.safetensors")).facts
    assert facts["parameters"] == count_parameters(model).total


def test_a_card_tells_all_that_the_description_does(tmp_path):
    told = fields(metrics={"accuracy": 0.93}, data_licence="CC-BY-4.0", recipe={"seed": 1})
    path = write_tiny(tmp_path / "a.safetensors", **told)
    facts = json.loads(as_json(read_card(str(path))))
    expected = {
        **told,
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


def test_bundled_models_are_listed_and_shown_by_name(assets):
    (assets / "default.safetensors").write_bytes(pack_description(fields(summary="land cover")))
    (assets / "other.safetensors").write_bytes(pack_description(fields()))
    assert survey().bundled == {"default": "land cover", "other": "river, forest, town"}
    assert "land cover" in as_text(survey())
    assert read_card("default").facts["name"] == "default"


def test_it_is_said_plainly_when_no_model_is_bundled(assets):
    assert "comes without a model" in as_text(survey())
    assert json.loads(as_json(survey()))["bundled"] == {}


def test_families_and_tested_backbones_are_listed():
    shown = as_text(survey())
    assert all(name in shown for name in (*FAMILIES, *BACKBONES))


def test_a_family_is_told_in_two_lines_below_each_other():
    lines = as_text(survey()).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("  anchornet "))
    column = lines[first].index("selects patches")
    told = [line[column:] for line in lines[first : first + 2]]
    assert told == FAMILIES.load("anchornet").summary.split("\n")
    assert not lines[first + 1][:column].strip()
    assert max(map(len, lines[first : first + 2])) <= 100


def test_a_family_is_told_on_one_line_as_json():
    told = json.loads(as_json(survey()))["families"]
    assert list(told) == list(FAMILIES)
    assert not any("\n" in text for text in told.values())


def test_a_card_tells_its_family_and_what_it_chooses_from(tmp_path):
    path = tmp_path / "a.safetensors"
    arguments = {"backbone": "compact", "view_size": 128}
    path.write_bytes(pack_description(fields("anchornet", config=arguments)))
    lines = [line.strip() for line in as_text(read_card(str(path))).splitlines()]
    first, second = FAMILIES.load("anchornet").summary.split("\n")
    assert lines[lines.index(second) - 1].split(maxsplit=1) == ["is", first]
    assert "115 patches of 63, 95 and 111 pixels" in " ".join(lines)  # 9^2 + 5^2 + 3^2


def test_many_classes_are_shown_in_part(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(pack_description(fields(classes=[f"kind{n}" for n in range(1000)])))
    shown = as_text(read_card(str(path)))
    assert "1000: kind0, kind1," in shown
    assert "980 more" in shown
    assert "kind20" not in shown


def test_no_line_of_a_card_is_longer_than_one_reads(tmp_path):
    path = tmp_path / "a.safetensors"
    count = 5000
    told = fields(
        name="n" * 10**6,
        summary="\x07" * 10**6,
        classes=["c" * 10**5, "d"],
        bands=[f"band{number}" for number in range(count)],
        normalisation={"dtype": "uint8", "mean": [1 / 3] * count, "std": [1.0] * count},
        traversal={"levels": 2, "keep": [1] * count},
        metrics={f"metric{number}": number for number in range(count)},
    )
    path.write_bytes(pack_description(told))
    shown = as_text(read_card(str(path)))
    assert max(map(len, shown.splitlines())) < 600
    assert "metric19 19 and 4980 more; --json has all" in shown


def test_a_card_says_that_only_the_header_was_read(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(pack_description(fields()))
    last = as_text(read_card(str(path))).splitlines()[-1]
    assert last.split()[:3] == ["tensors", "not", "checked:"]
    assert "`tnet profile --model FILE`" in last


def test_a_name_cannot_move_the_cursor(tmp_path):
    path = tmp_path / "a\x1b[2J.safetensors"
    path.write_bytes(pack_description(fields(classes=["a\x1b[2J", "b\nc", "d\x9b"], name="\x07")))
    shown = as_text(read_card(str(path)))
    assert not {"\x1b", "\x9b", "\x07"} & set(shown)
    assert "a\\x1b[2J, b\\nc, d\\x9b" in shown


@pytest.mark.parametrize(("pattern", "some"), [("bagnet*", "bagnet77"), ("resnet5?", "resnet50")])
def test_backbones_are_matched_by_name(pattern, some):
    found = match_backbones(pattern)
    assert some in found.names
    assert len(found.names) < 10 < found.total
    assert as_text(found).splitlines() == list(found.names)
    assert json.loads(as_json(found))["backbones"] == list(found.names)


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [("efficientnet", "`*efficientnet*`"), ("rsnet50", "`resnet50`"), ("~", "stands for")],
)
def test_a_pattern_without_a_match_suggests_another(pattern, hint):
    with pytest.raises(ModelError, match="no backbone matches") as caught:
        match_backbones(pattern)
    assert hint in caught.value.hint
