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


def test_arguments_are_kept_complete():
    description = Description(**fields())
    assert description.config == TNetConfig(backbone="test_efficientnet", view_size=64).model_dump(
        mode="json"
    )
    assert description == Description(**fields(config=description.model_settings))


def test_view_size_and_grid_are_those_of_the_arguments():
    grid = {"rows": 5, "columns": 4, "cell_fraction": 0.3}
    description = Description(**fields(config={"view_size": 77, "grid": grid}))
    assert (description.view_size, description.grid) == (77, Grid(5, 4, 0.3))
    assert Description(**fields("whole")).grid == Grid(1, 1, 1.0)


def test_what_is_left_out_has_a_default():
    description = Description(**fields())
    assert (description.tnet, description.data_licence) == (__version__, "")
    assert (description.recipe, description.metrics, description.name) == (None, {}, None)


def test_a_description_cannot_be_changed():
    with pytest.raises(ValidationError):
        Description(**fields()).name = "other"


def test_a_recipe_that_json_cannot_hold_is_refused():
    for recipe in ({"a": float("nan")}, {"a": object()}):
        with pytest.raises(ValueError, match="recipe"):
            Description(**fields(recipe=recipe))


def nested(depth):
    return "[" * depth + "]" * depth


SCALE = fields()["normalisation"]


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[1]", "not a table"),
        ("null", "not a table"),
        ('{"a": NaN}', "not JSON"),
        ('{"a": ' + "9" * 5000 + "}", "not JSON"),
        ("{}", "its schema is `None`"),
        ('{"schema": {"a": 1}}', "its schema is"),
        (f'{{"schema": "tnet.model/{"9" * 5000}"}}', "its schema is"),
        ('{"schema": "tnet.model/1"}', "`tnet.model/1`, this version of tnet reads `tnet.model/2`"),
        ({}, "`family` is missing"),
        (fields(family="tnett"), "unknown family: `tnett`"),
        (fields(family=["tnet"]), "`family` is"),
        (fields(family=""), "`family` is"),
        (fields(config={"view_sise": 64}), "unknown key `view_sise`"),
        (fields(config={"view_size": 2}), "`view_size` is `2`"),
        (fields(config={"grid": {"rows": 0, "columns": 3, "cell_fraction": 0.5}}), "grid"),
        (fields(config=[]), "not a table"),
        (fields(config=None), "not a table"),
        (fields("whole", config={"grid": {}}), "unknown key `grid`"),
        (fields(classes=["a", "b", "a"]), "two classes share a name: `a`"),
        (fields(classes=[]), "`classes` is"),
        (fields(classes=["a", " "]), "`classes.1` is"),
        (fields(classes=["a", 1]), "`classes.1` is"),
        (fields(bands=[]), "`bands` is"),
        (fields(bands=["red"]), "normalisation"),
        (fields(normalisation={**SCALE, "std": [1, 1, 1, 0]}), "above zero"),
        (fields(normalisation={**SCALE, "std": [1, 1, 1]}), "one number a band"),
        (fields(normalisation={**SCALE, "dtype": "complex64"}), "not a type of pixels"),
        (fields(normalisation={**SCALE, "dtype": "nope"}), "not a type of pixels"),
        (fields(normalisation={**SCALE, "scale": 1}), "unknown key `normalisation.scale`"),
        (fields(traversal={"levels": 0}), "`traversal.levels` is `0`"),
        (fields(traversal={"keep": []}), "keep is empty"),
        (fields(traversal={"keep": [0]}), "`traversal.keep.0` is `0`"),
        (fields(traversal={"fit": "crop"}), "`traversal.fit` is `crop`"),
        (fields(traversal={"background": [9, 1]}), "background ends before it begins"),
        (fields("whole", traversal={"levels": 2}), "`levels` is above the 1 of `whole`: `2`"),
        (fields(metrics={"accuracy": "high"}), "`metrics.accuracy"),
        (fields(metrics={"accuracy": "inf"}), "`metrics.accuracy"),
        (fields(metrics={"accuracy": 10**400}), "`metrics.accuracy"),
        (fields(metrics={"accuracy": -(10**400)}), "`metrics.accuracy"),
        (fields(weights="int4"), "`weights` is `int4`"),
        (fields(data_license="MIT"), "unknown key `data_license`"),
        (fields(name="\ud800"), "not JSON that makes sense"),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, str) else "",
)
def test_a_wrong_description_is_told_in_one_line_with_a_hint(tmp_path, told, problem):
    (tmp_path / "a.safetensors").write_bytes(pack_description(told))
    with pytest.raises(ModelError) as caught:
        read_description(tmp_path / "a.safetensors")
    assert problem in str(caught.value)
    assert str(tmp_path / "a.safetensors") in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert len(str(caught.value)) < 1000
    assert caught.value.hint


@pytest.mark.parametrize(
    ("told", "hint"),
    [
        ('{"schema": "tnet.model/9", "tnet": "9.1"}', "`9.1`"),
        (fields(family="tnett"), "did you mean `tnet`?"),
        (fields(config={"view_sise": 64}), "did you mean `view_size`?"),
        (fields(data_license="MIT"), "did you mean `data_licence`?"),
    ],
)
def test_the_hint_says_what_was_meant(tmp_path, told, hint):
    (tmp_path / "a.safetensors").write_bytes(pack_description(told))
    with pytest.raises(ModelError) as caught:
        read_description(tmp_path / "a.safetensors")
    assert hint in caught.value.hint


@pytest.mark.parametrize("depth", [10, *range(200, 1100, 50), 5000, 100_000])
@pytest.mark.parametrize("key", ["recipe", "config", "classes", "metrics"])
def test_a_description_nested_beyond_measure_is_refused_or_read(tmp_path, depth, key):
    told = json.dumps({"schema": SCHEMA, **fields(**{key: {"a": "deep"}})})
    path = tmp_path / "a.safetensors"
    path.write_bytes(pack_description(told.replace('"deep"', nested(depth))))
    with suppress(ModelError):
        assert read_description(path).traversal.levels == 3


@given(st.data())
def test_a_description_with_any_value_changed_is_refused_or_read(tmp_path_factory, data):
    told = {"schema": SCHEMA, **Description(**fields()).model_dump(mode="json")}
    place, key = told, data.draw(st.sampled_from(sorted(told)))
    while isinstance(place[key], dict) and place[key] and data.draw(st.booleans()):
        place = place[key]
        key = data.draw(st.sampled_from(sorted(place)))
    place[key] = data.draw(VALUES)
    path = tmp_path_factory.getbasetemp() / "changed.safetensors"
    path.write_bytes(pack_description(json.dumps(told)))
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


def test_a_traversal_is_as_trained_unless_asked_otherwise(caplog):
    description = Description(**fields(traversal={"levels": 3, "keep": (2, 1)}))
    assert description.traversal_config() == TraversalConfig(levels=3, keep=(2, 1))
    assert description.traversal_config(levels=2, keep=(5,)) == TraversalConfig(levels=2, keep=(5,))
    assert not caplog.records


def test_a_traversal_deeper_than_trained_repeats_the_last_number_with_a_warning(caplog):
    config = Description(**fields(traversal={"levels": 3, "keep": (2, 1)})).traversal_config(
        levels=5
    )
    assert [config.keep_at(level) for level in (1, 2, 3, 4)] == [2, 1, 1, 1]
    assert ["trained with 3" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize(
    ("family", "more", "most"),
    [("two_stream", {}, 2), ("anchornet", {"view_size": 128}, 2), ("whole", {}, 1)],
)
def test_no_traversal_is_deeper_than_its_family_and_that_is_warned_about(
    family, more, most, caplog
):
    config = {"backbone": "compact", "view_size": 64, **more}
    traversal = {"levels": most, "keep": (2,)}
    description = Description(**fields(family, config=config, traversal=traversal))
    assert description.traversal_config(levels=5) == TraversalConfig(levels=most, keep=(2,))
    assert [record.message for record in caplog.records] == [
        f"5 levels asked for: the family `{family}` has {most}"
    ]


@pytest.mark.parametrize(
    ("recipe", "crop"),
    [
        (None, "none"),
        ({}, "none"),
        ({"data": None}, "none"),
        ({"data": {"crop": "box"}}, "box"),
        ({"data": {"crop": "context"}}, "context"),
        ({"data": {"crop": ["of", "another", "version"]}}, "none"),
    ],
)
def test_a_model_knows_whether_it_was_trained_on_boxes(recipe, crop):
    assert Description(**fields(recipe=recipe)).crop == crop
