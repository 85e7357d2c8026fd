import json
import subprocess
import sys
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tests.checkpoints import fields, pack_description
from tests.strategies import grids, numbers
from tnetcli import __version__
from tnetcli.errors import ModelError
from tnetcli.geometry import Grid
from tnetcli.models.checkpoint import SCHEMA, Description, read_description
from tnetcli.models.configs import TNetConfig
from tnetcli.traversal.config import TraversalConfig

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAMES = TEXT.filter(lambda text: text.strip() != "")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers(-1e300, 1e300) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@st.composite
def descriptions(draw):
    bands = draw(st.lists(NAMES, min_size=1, max_size=5))
    several = {"min_size": len(bands), "max_size": len(bands)}
    family = draw(st.sampled_from(["tnet", "whole"]))
    config = {"backbone": draw(NAMES), "view_size": draw(st.integers(8, 4096))}
    if family == "tnet":
        config["grid"] = draw(grids())
        config["temperature"] = draw(numbers(0.1, 2))
    return Description(
        family=family,
        config=config,
        classes=draw(st.lists(NAMES, min_size=1, max_size=5, unique=True)),
        bands=bands,
        normalisation={
            "dtype": draw(st.sampled_from(["uint8", "uint16", "int16", "float32", "float64"])),
            "mean": draw(st.lists(numbers(-1e9, 1e9), **several)),
            "std": draw(st.lists(numbers(1e-9, 1e9), **several)),
        },
        traversal={
            "levels": draw(st.integers(1, 1 if family == "whole" else 12)),
            "keep": draw(st.lists(st.integers(1, 99), min_size=1, max_size=4)),
            "fit": draw(st.sampled_from(["stretch", "pad"])),
            "min_size": draw(st.none() | numbers(1, 1e6)),
            "background": draw(st.none() | st.just((230, 255))),
        },
        recipe=draw(st.none() | st.dictionaries(TEXT, VALUES, max_size=4)),
        metrics=draw(st.dictionaries(TEXT, numbers(-1e300, 1e300) | st.integers(), max_size=4)),
        tnet=draw(TEXT),
        data_licence=draw(TEXT),
        name=draw(st.none() | TEXT),
        summary=draw(st.none() | TEXT),
        weights=draw(st.sampled_from(["float32", "float16"])),
    )


@given(descriptions())
def test_a_description_comes_back_from_a_file_as_it_was(tmp_path_factory, description):
    path = tmp_path_factory.getbasetemp() / "described.safetensors"
    path.write_bytes(pack_description(description.as_json()))
    found = read_description(path)
    assert found == description
    assert found.as_json() == description.as_json()
    assert (found.view_size, found.grid) == (description.view_size, description.grid)


def test_the_configuration_is_stored_with_all_defaults():
    description = Description(**fields())
    assert description.config == TNetConfig(backbone="test_efficientnet", view_size=64).model_dump(
        mode="json"
    )
    assert description == Description(**fields(config=description.model_settings))
    assert (description.tnet, description.recipe) == (__version__, None)
    assert Description(**fields("whole")).grid == Grid(1, 1, 1.0)
    with pytest.raises(ValidationError):
        description.name = "other"


def test_a_recipe_that_json_cannot_hold_is_refused():
    for recipe in ({"a": float("nan")}, {"a": object()}):
        with pytest.raises(ValueError, match="recipe"):
            Description(**fields(recipe=recipe))


def nested(depth):
    return "[" * depth + "]" * depth


SCALE = fields()["normalisation"]


@pytest.mark.parametrize(
    ("content", "problem", "hint"),
    [
        ("{", "not valid JSON", "copy"),
        ("[1]", "not an object", "copy"),
        ('{"a": NaN}', "not valid JSON", "copy"),
        ('{"a": ' + "9" * 5000 + "}", "not valid JSON", "copy"),
        (f'{{"schema": "tnet.model/{"9" * 5000}"}}', "its schema is", "version"),
        ('{"schema": "tnet.model/1", "tnet": "0.1"}', "expected `tnet.model/2`", "`0.1`"),
        ({}, "`family` is missing", ""),
        (fields(family="tnett"), "unknown family: `tnett`", "did you mean `tnet`?"),
        (fields(family=["tnet"]), "`family` is", ""),
        (fields(config={"view_sise": 64}), "unknown key `view_sise`", "did you mean `view_size`?"),
        (fields(config={"view_size": 2}), "`view_size` is `2`", ""),
        (fields(config=None), "not a table", ""),
        (fields("whole", config={"grid": {}}), "unknown key `grid`", ""),
        (fields(classes=["a", "b", "a"]), "two classes have the same name: `a`", ""),
        (fields(classes=["a", " "]), "`classes.1` is", ""),
        (fields(bands=["red"]), "normalisation", ""),
        (fields(normalisation={**SCALE, "scale": 1}), "unknown key `normalisation.scale`", ""),
        (fields(traversal={"levels": 0}), "`traversal.levels` is `0`", ""),
        (fields("whole", traversal={"levels": 2}), "`levels` is `2`: `whole` has at most 1", ""),
        (fields(metrics={"accuracy": "inf"}), "`metrics.accuracy", ""),
        (fields(metrics={"accuracy": 10**400}), "`metrics.accuracy", ""),
        (fields(task={"name": "guess"}), "unknown task: `guess`", ""),
        (fields(weights="int4"), "`weights` is `int4`", ""),
        (fields(name="\ud800"), "not valid JSON", ""),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, str) else "",
)
def test_a_wrong_description_is_an_error_of_one_line_with_a_hint(tmp_path, content, problem, hint):
    (tmp_path / "a.safetensors").write_bytes(pack_description(content))
    with pytest.raises(ModelError) as caught:
        read_description(tmp_path / "a.safetensors")
    assert problem in str(caught.value)
    assert str(tmp_path / "a.safetensors") in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 1000
    assert caught.value.hint
    assert hint in caught.value.hint


@pytest.mark.parametrize("depth", [10, 950, 100_000])
@pytest.mark.parametrize("key", ["recipe", "config", "metrics"])
def test_a_deeply_nested_description_is_read_or_an_error(tmp_path, depth, key):
    text = json.dumps({"schema": SCHEMA, **fields(**{key: {"a": "deep"}})})
    path = tmp_path / "a.safetensors"
    path.write_bytes(pack_description(text.replace('"deep"', nested(depth))))
    with suppress(ModelError):
        assert read_description(path).traversal.levels == 3


@given(st.data())
def test_a_description_with_any_value_changed_is_read_or_an_error(tmp_path_factory, data):
    text = {"schema": SCHEMA, **Description(**fields()).model_dump(mode="json")}
    place, key = text, data.draw(st.sampled_from(sorted(text)))
    while isinstance(place[key], dict) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place)))
    place[key] = data.draw(VALUES)
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    path.write_bytes(pack_description(json.dumps(text)))
    with suppress(ModelError):
        read_description(path).as_json()


def test_a_description_is_read_without_torch_or_image_libraries(tmp_path):
    (tmp_path / "a.safetensors").write_bytes(pack_description(fields()))
    code = f"""
import sys
from tnetcli.models.checkpoint import read_description
assert read_description({str(tmp_path / "a.safetensors")!r}).view_size == 64
print(*{{"torch", "timm", "rasterio", "tifffile"}} & sys.modules.keys())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_the_traversal_is_that_of_training_by_default(caplog):
    description = Description(**fields(traversal={"levels": 3, "keep": (2, 1)}))
    assert description.traversal_config() == TraversalConfig(levels=3, keep=(2, 1))
    assert description.traversal_config(levels=2, keep=(5,)) == TraversalConfig(levels=2, keep=(5,))
    assert not caplog.records


def test_a_traversal_deeper_than_trained_repeats_the_last_number_with_a_warning(caplog):
    config = Description(**fields(traversal={"levels": 3, "keep": (2, 1)})).traversal_config(
        levels=5
    )
    assert [config.keep_at(level) for level in (1, 2, 3, 4)] == [2, 1, 1, 1]
    assert ["trained with 3 levels" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("family", "more", "most"),
    [("two_stream", {}, 2), ("whole", {}, 1)],
)
def test_levels_are_limited_to_those_of_the_family_with_a_warning(family, more, most, caplog):
    config = {"backbone": "compact", "view_size": 64, **more}
    traversal = {"levels": most, "keep": (2,)}
    description = Description(**fields(family, config=config, traversal=traversal))
    assert description.traversal_config(levels=5) == TraversalConfig(levels=most, keep=(2,))
    assert [record.message for record in caplog.records] == [
        f"the family `{family}` has {most} levels: 5 requested"
    ]


@pytest.mark.parametrize(
    ("recipe", "crop"),
    [
        (None, "none"),
        ({"data": None}, "none"),
        ({"data": {"crop": "box"}}, "box"),
        ({"data": {"crop": "context"}}, "context"),
        ({"data": {"crop": ["of", "another", "version"]}}, "none"),
    ],
)
def test_the_crop_of_training_is_that_of_the_recipe(recipe, crop):
    assert Description(**fields(recipe=recipe)).crop == crop
