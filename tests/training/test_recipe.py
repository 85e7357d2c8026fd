import os
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from tnetcli.config import apply_overrides
from tnetcli.errors import RecipeError
from tnetcli.training.recipe import Recipe, check_recipe, read_recipe
from tnetcli.traversal.config import TraversalConfig

MODEL = {"model": {"classes": 10}}


def written(folder: Path, content: str | bytes) -> Path:
    path = folder / "recipe.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def problem(call, *arguments) -> RecipeError:
    with pytest.raises(RecipeError) as caught:
        call(*arguments)
    return caught.value


def test_a_recipe_of_two_lines_is_complete():
    recipe = check_recipe(MODEL)
    assert recipe.model.family == "tnet"
    assert (recipe.model.class_count, recipe.model.band_count) == (10, 3)
    assert recipe.model.pretrained is False
    assert recipe.traversal == TraversalConfig(levels=3, keep=(2, 1))


@pytest.mark.parametrize(
    "classes", [0, -1, True, 2.5, "ten", [], ["a", "a"], ["a", ""], ["a", 3], ["a", False], None]
)
def test_classes_are_a_count_or_names(classes):
    assert "`model.classes`" in str(problem(check_recipe, {"model": {"classes": classes}}))


@pytest.mark.parametrize(
    ("keep", "expected"), [(2, (2,)), ("4, 2", (4, 2)), ([3, 1], (3, 1)), ((5,), (5,))]
)
def test_keep_is_written_as_on_the_command_line_or_as_a_list(keep, expected):
    assert check_recipe({**MODEL, "traversal": {"keep": keep}}).traversal.keep == expected


@pytest.mark.parametrize(
    ("section", "part"),
    [
        ({"keep": [0]}, "`traversal.keep.0` is `0`"),
        ({"keep": [True, "x"]}, "traversal.keep.1"),
        ({"keep": True}, "traversal.keep"),
        ({"keep": []}, "keep is empty"),
        ({"levels": 0}, "traversal.levels"),
        ({"policy": "best_first"}, "best_first needs a budget"),
        ({"policy": "worst"}, "traversal.policy"),
        ({"confidence": 1.5}, "traversal.confidence"),
        ({"min_valid": 1}, "traversal.min_valid"),
        ({"temperature": float("nan")}, "traversal.temperature"),
        ({"fit": "crop"}, "traversal.fit"),
        ({"min_size": 0}, "traversal.min_size"),
        ({"background": [255, 230]}, "background ends before it begins"),
        ([1], "traversal"),
    ],
)
def test_an_impossible_traversal_is_refused(section, part):
    assert part in str(problem(check_recipe, {**MODEL, "traversal": section}))


@pytest.mark.parametrize(
    ("data", "key", "hint"),
    [
        ({**MODEL, "modle": {}}, "`modle`", "did you mean `model`?"),
        ({**MODEL, "traversal": {"level": 2}}, "`traversal.level`", "did you mean `levels`?"),
        ({"model": {"classes": 3, "veiw_size": 64}}, "`model.veiw_size`", "`view_size`?"),
        ({"model": {"clases": 3}}, "`model.clases`", "did you mean `classes`?"),
        ({"model": {"classes": 3, "zzz": 3}}, "`model.zzz`", "known keys: family, classes, bands"),
        ({"model": {"classes": 3, "arguments": {}}}, "`model.arguments`", ""),
        ({"model": {"classes": 3, "grid": {"rwos": 3}}}, "`grid.rwos`", "did you mean `rows`?"),
        ({"model": {"classes": 3, "family": "tent"}}, "`tent`", "did you mean `tnet`?"),
    ],
)
def test_a_wrong_name_is_answered_with_the_nearest(data, key, hint):
    error = problem(check_recipe, data)
    assert error.exit_code == 4
    assert key in str(error)
    assert hint in error.hint


@pytest.mark.parametrize(
    ("data", "part"),
    [
        ({}, "`model` is missing"),
        ({"model": None}, "`model` is missing"),
        ({"model": {}}, "`model.classes` is missing"),
        ({"model": 3}, "`model`"),
        ({"model": {"classes": 3, "family": ["tnet"]}}, "family is not a name"),
        ({"model": {"classes": 3, "view_size": 1}}, "view_size"),
        ({"model": {"classes": 3, "pretrained": 3}}, "model.pretrained"),
        ([1, 2], "not a table"),
        ("text", "not a table"),
    ],
)
def test_what_is_wrong_is_named(data, part):
    assert part in str(problem(check_recipe, data))


def test_a_section_without_keys_is_as_if_not_there():
    assert check_recipe({**MODEL, "traversal": None}) == check_recipe(MODEL)


@pytest.mark.parametrize(
    "data",
    [
        MODEL,
        {"model": {"family": "whole", "classes": ["ß", "no"], "pretrained": "w.safetensors"}},
        {
            "model": {"classes": 3, "bands": ["B04"], "grid": {"rows": 2, "columns": 3,
                                                                "cell_fraction": 0.5}},
            "traversal": {"policy": "best_first", "budget": 7, "confidence": 0.9, "fit": "pad"},
        },
    ],
)  # fmt: skip
def test_what_is_written_reads_back_the_same(tmp_path, data):
    recipe = check_recipe(data)
    (tmp_path / "w.safetensors").touch()
    again = read_recipe(written(tmp_path, recipe.as_yaml()))
    if recipe.model.pretrained is not False:
        assert again.model.pretrained == tmp_path / str(recipe.model.pretrained)
        again = check_recipe(apply_overrides(again.as_data(), ["model.pretrained=w.safetensors"]))
    assert again == recipe


def test_a_file_is_searched_for_beside_the_recipe_but_a_setting_where_we_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "deep").mkdir()
    for name in ("w.safetensors", "deep/w.safetensors"):
        (tmp_path / name).touch()
    path = written(tmp_path, "model: {classes: 2, pretrained: deep/w.safetensors}")
    assert read_recipe(path).model.pretrained == tmp_path / "deep/w.safetensors"
    changed = read_recipe(path, ["model.pretrained=w.safetensors"])
    assert changed.model.pretrained == Path("w.safetensors")


def test_settings_change_what_the_file_says_in_order(tmp_path):
    path = written(tmp_path, "model: {classes: 2}\ntraversal:\n")
    recipe = read_recipe(
        path,
        ["traversal.levels=1", "traversal.levels=2", "traversal.keep=3,1", "model.grid.rows=4",
         "model.grid.columns=4", "model.grid.cell_fraction=0.5", "model.dropout=1e-1",
         "model.classes=[a, b, 'c=d']"],
    )  # fmt: skip
    assert (recipe.traversal.levels, recipe.traversal.keep) == (2, (3, 1))
    assert recipe.model.grid is not None
    assert recipe.model.grid.rows == 4
    assert recipe.model.arguments.dropout == 0.1
    assert recipe.model.classes == ("a", "b", "c=d")


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("traversal.levels", "not a setting"),
        ("=3", "not a setting"),
        ("traversal..levels=3", "not a setting"),
        ("model.classes=[1", "not YAML"),
        ("model.classes={a: 1, a: 2}", "the key `a` is there twice"),
        ("model.classes=[&a 1, *a]", "anchors and aliases are not read"),
        ("model.classes=" + "9" * 5000, "a number of more than 64 digits"),
        ("model.classes.count=3", "`model.classes` is neither a table nor a list"),
        ("model.classes.count.more=3", "`model.classes` is neither a table nor a list"),
    ],
)
def test_a_setting_that_cannot_be_made_is_refused(setting, part):
    error = problem(apply_overrides, {"model": {"classes": 2}}, [setting])
    assert part in str(error)
    assert error.hint


def test_a_number_chooses_among_the_entries_of_a_list():
    data = {"stages": [{"steps": 1}, {"steps": 2, "loss": None}, None], "keep": [4, 1]}
    changed = apply_overrides(
        data, ["stages.1.steps=5", "stages.1.loss.rule=paper", "stages.2.steps=7", "keep.0=3"]
    )
    assert changed == {
        "stages": [{"steps": 1}, {"steps": 5, "loss": {"rule": "paper"}}, {"steps": 7}],
        "keep": [3, 1],
    }
    assert data["stages"][1] == {"steps": 2, "loss": None}


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("", "is empty"),
        ("# nothing\n", "is empty"),
        ("- model\n- traversal\n", "not a table"),
        ("model: {classes: 2\ntraversal: 1", "line 2: not YAML"),
        ("model:\n\tclasses: 2", "line 2: not YAML"),
        ("model:\n  classes: 2\n  bands: 3\n  classes: 4\n", "line 4: the key `classes` is there"),
        ("model: {classes: 2}\nmodel: {classes: 3}", "line 2: the key `model`"),
        ("model: [{a: 1, a: 2}]", "line 1: the key `a`"),
        ("model: !!python/object/apply:os.getcwd []", "line 1: tags are not read"),
        ("model: !!bool x", "line 1: tags are not read"),
        ("model: {classes: 2001-99-99}", "not YAML, month"),
        ("model: \x01", "not YAML"),
        ("[" * 5000, "line 1: more than 32 tables and lists inside each other"),
        ("model:\n  classes: 0x" + "f" * 5000, "line 2: a number of more than 64 digits"),
        ("model:\n  classes: " + "9" * 5000, "line 2: a number of more than 64 digits"),
        ("model:\n  dropout: " + "1:" * 500 + "1.5", "line 2: a number of more than 64 digits"),
        ("a: &a [1]\nmodel: *a", "line 1: anchors and aliases are not read: `a`"),
        ("model: {classes: 2}\ntraversal: *t", "line 2: anchors and aliases are not read"),
        ("#" * 2**20 + "\nmodel: {classes: 2}", "at most 1048576 bytes"),
        ("? [a]\n: 1", "line 1: not YAML"),
        (b"model: {classes: \xff}", "not a text in UTF-8"),
    ],
)
def test_a_file_that_is_no_recipe_is_refused_with_its_line(tmp_path, content, part):
    error = problem(read_recipe, written(tmp_path, content))
    assert part in str(error)
    assert "recipe.yaml" in str(error)
    assert error.exit_code == 4
    assert error.hint


def test_a_byte_order_mark_is_no_part_of_a_key(tmp_path):
    path = written(tmp_path, b"\xef\xbb\xbfmodel: {classes: 2}")
    assert read_recipe(path).model.class_count == 2


@pytest.mark.parametrize(("name", "part"), [("", "is a folder"), ("none.yaml", "no such recipe")])
def test_a_path_that_is_no_file_is_refused(tmp_path, name, part):
    error = problem(read_recipe, tmp_path / name)
    assert part in str(error)
    assert error.hint


@pytest.mark.parametrize("place", ["2", "-1", "first"])
def test_a_list_has_no_other_entries_than_it_has(place):
    error = problem(apply_overrides, {"stages": [{}, {}]}, [f"stages.{place}=3"])
    assert "`stages" in str(error)
    assert error.hint


LISTS = ["b0: &b0 [lol, lol, lol, lol, lol, lol, lol, lol, lol]"] + [
    f"b{number}: &b{number} [{', '.join([f'*b{number - 1}'] * 9)}]" for number in range(1, 12)
]
TABLES = ["a0: &a0 {x: 1}"] + [
    f"a{number}: &a{number} {{<<: [{', '.join([f'*a{number - 1}'] * 9)}]}}"
    for number in range(1, 12)
]


@pytest.mark.parametrize(
    "lines",
    [
        [*LISTS, "model: {classes: 2}"],
        [*LISTS, "model: {classes: *b11}"],
        [*LISTS, "model: {classes: 2}", "traversal: {keep: *b11}"],
        [*TABLES, "model: *a11"],
    ],
)
def test_aliases_that_stand_for_gigabytes_are_refused_before_they_are_followed(tmp_path, lines):
    error = problem(read_recipe, written(tmp_path, "\n".join(lines)))
    assert "line 1: anchors and aliases" in str(error)
    assert "use plain keys" in error.hint


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no FIFOs")
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    error = problem(read_recipe, tmp_path / "pipe.yaml")
    assert "is a named pipe, not a regular file" in str(error)
    assert error.hint


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there are no devices")
def test_a_device_is_refused_and_not_read():
    assert "a device" in str(problem(read_recipe, Path("/dev/zero")))


@pytest.mark.parametrize(
    ("model", "part"),
    [
        ({"classes": 99999999999999999999999999}, "`model.classes` is `9999"),
        (
            {"classes": 10**5000},
            "`model.classes` is `a number of 16610 bits`: the count is not within 1 to",
        ),
        ({"bands": 1_000_000}, "`model.bands` is `1000000`: the count is not within 1 to 4096"),
        ({"bands": [f"B{number}" for number in range(4097)]}, "the count is not within 1 to 4096"),
        ({"location_size": 10**12}, "`location_size` is `1000000000000`"),
        ({"position_size": 10**20}, "`position_size` is `100000000000000000000`"),
        ({"grid": {"rows": 10**7, "columns": 3, "cell_fraction": 0.5}}, "`grid.rows` is `1000"),
        ({"grid": {"rows": 3, "columns": 257, "cell_fraction": 0.5}}, "`grid.columns` is `257`"),
        (
            {"view_size": 16, "grid": {"rows": 17, "columns": 3, "cell_fraction": 0.5}},
            "`grid.rows` is `17`: at most 256, and not above the view's 16 pixels",
        ),
    ],
)
def test_what_no_machine_could_hold_is_refused(model, part):
    error = problem(check_recipe, {"model": {"classes": 2, **model}})
    assert part in str(error)
    assert error.hint
    assert "\n" not in str(error) + error.hint


@pytest.mark.parametrize(
    ("data", "hint"),
    [
        ({"model": {"classes": 0}}, "or their names"),
        ({"model": {}}, "or their names"),
        ({"model": {"classes": 3, "view_size": 1}}, "side of a view in pixels"),
        ({"model": {"classes": 3, "grid": 3}}, "rows, columns, cell_fraction"),
        ({"model": {"classes": 3, "temperature": 0}}, "of the attention"),
        ({"model": {"classes": 3, "alignment": "nearst"}}, "reference, pool"),
        ({"model": 3}, "`model: {classes: 10}` is enough"),
        ({"model": None}, "`model: {classes: 10}` is enough"),
        ({"model": {"classes": 3, "family": 3}}, "`model: {classes: 10}` is enough"),
        ({**MODEL, "traversal": {"keep": -1}}, "cells followed per region"),
        ({**MODEL, "traversal": {"levels": 50}}, "number of levels"),
        ({**MODEL, "traversal": {"policy": "bestfirst"}}, "top_k, sample or best_first"),
        ({**MODEL, "traversal": {"policy": "best_first"}}, "traversal in training"),
        ({"model": {"family": "whole", "classes": 2}, "traversal": {"levels": 2}}, "its keys"),
        ([1, 2], "its keys: model, traversal"),
    ],
)
def test_whatever_is_wrong_has_a_hint(data, hint):
    assert hint in problem(check_recipe, data).hint


@pytest.mark.parametrize(
    ("weights", "part"),
    [
        ("none.safetensors", "not a file"),
        ("recipe.yaml", "give true, false or a .safetensors file"),
        (".", "give true, false or a .safetensors file"),
        ("''", "`model.pretrained` is ``: give true, false or a .safetensors file"),
        ("' '", "give true, false or a .safetensors file"),
        ('"a\\0b.safetensors"', "not a file"),
    ],
)
def test_weights_that_are_not_there_are_refused_when_the_recipe_is_read(tmp_path, weights, part):
    path = written(tmp_path, f"model: {{classes: 2, pretrained: {weights}}}")
    error = problem(read_recipe, path)
    assert part in str(error)
    assert error.hint


def test_a_file_that_may_not_be_read_is_refused(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    path = written(tmp_path, "model: {classes: 2}")
    monkeypatch.setattr(os, "open", refuse)
    assert "Permission denied" in str(problem(read_recipe, path))


MOSAIC = {
    "model": {"classes": ["none", "town"]},
    "data": {
        "kind": "mosaic",
        "path": "tiles.zip",
        "landscape": {"sites": ["town"], "background": ["forest", "sea"]},
    },
}
TRAINED = {
    **MODEL,
    "seed": 7,
    "name": "mine",
    "init": "start.safetensors",
    "data": {"path": "images.csv", "class_weights": {"a": 2.0}, "bands": ["4", "3"]},
    "augmentation": {"flip": "both", "crop": [0.3, 1.0]},
    "loss": {"rule": "paper", "reinforce": 0.5},
    "optimizer": {"kind": "sgd", "clip": 5.0},
    "schedule": {"kind": "step", "drops": [0.5, 0.75]},
    "stages": [
        {"name": "near", "epochs": 3, "levels": 2, "optimizer": {"lr": 0.5}},
        {"name": "far", "steps": 9, "keep": "2,1", "loss": {"cap": 2}, "freeze": ["backbone"]},
    ],
    "training": {"batch_size": 8, "average": 0.99},
}


@pytest.mark.parametrize("data", [TRAINED, MOSAIC, {"model": {"family": "whole", "classes": 2}}])
def test_a_recipe_is_plain_values_that_read_back_the_same(data):
    recipe = check_recipe(data)
    assert check_recipe(yaml.safe_load(yaml.safe_dump(recipe.as_data()))) == recipe


def test_a_list_is_no_recipe():
    with pytest.raises(ValidationError, match="valid dictionary"):
        Recipe.model_validate([1, 2])


def test_a_recipe_without_stages_trains_once_through():
    (stage,) = check_recipe(MODEL).stages
    assert (stage.name, stage.learn, stage.epochs) == ("train", "scenes", 10)
    assert check_recipe({**MODEL, "stages": None}) == check_recipe(MODEL)


def test_a_stage_changes_sections_key_by_key():
    near, far = check_recipe(TRAINED).stages
    assert near.optimizer.kind == far.optimizer.kind == "sgd"
    assert (near.optimizer.lr, far.optimizer.lr) == (0.5, 1e-3)
    assert (near.loss.cap, far.loss.cap) == (None, 2)
    assert near.loss.rule == far.loss.rule == "paper"
    assert near.augmentation == far.augmentation == check_recipe(TRAINED).augmentation
    assert far.schedule.drops == (0.5, 0.75)


def test_a_stage_has_the_traversal_but_for_what_it_changes():
    recipe = check_recipe({**TRAINED, "traversal": {"levels": 3, "keep": [4, 2]}})
    near, far = (recipe.traversal_of(stage) for stage in recipe.stages)
    assert (near.levels, near.keep) == (2, (4, 2))
    assert (far.levels, far.keep) == (3, (2, 1))


def test_the_papers_rule_stands_for_its_choices():
    loss = check_recipe({**MODEL, "loss": {"rule": "paper"}}).loss
    assert (loss.selection, loss.baseline, loss.reward) == ("top_k", "ema", "correct")
    assert (loss.per_feature, loss.uniform) == ("each", 0.0)


def test_a_card_names_files_and_not_where_they_were():
    reported = check_recipe({**TRAINED, "init": "/a/b/start.safetensors"}).as_card()
    assert reported["init"] == "start.safetensors"
    assert reported["data"]["path"] == "images.csv"


@pytest.mark.parametrize(
    ("data", "part", "hint"),
    [
        ({"stages": [{"steps": 1, "stpes": 2}]}, "`stages.0.stpes`", "did you mean `steps`?"),
        (
            {"stages": [{"steps": 1}, {"name": "b", "steps": 1, "loss": {"selction": 1}}]},
            "unknown key `stages.1.loss.selction`",
            "did you mean `selection`?",
        ),
        ({"stages": [{"steps": 1, "loss": 3}]}, "`stages.0.loss` is `3`: not a table", "changes"),
        ({"stages": [{"steps": 1, "optimizer": [1]}]}, "`stages.0.optimizer` is", "changes"),
        ({"stages": []}, "`stages` is empty", ""),
        ({"stages": {"steps": 1}}, "`stages` is", "stages, in order"),
        ({"stages": [3]}, "`stages.0` is `3`: not a table", ""),
        ({"stages": [{"steps": 1}, {"steps": 2}]}, "two stages have the same name", ""),
        ({"stages": [{}]}, "a stage needs `steps` or `epochs`", ""),
        ({"stages": [{"steps": 1, "epochs": 1}]}, "not both", ""),
        ({"stages": [{"steps": 0}]}, "`stages.0.steps` is `0`", "number of steps"),
        ({"stages": [{"steps": 1, "name": "../up"}]}, "`stages.0.name`", "name of the stage"),
        ({"stages": [{"steps": 1, "freeze": ["backbon"]}]}, "freeze.0", "`backbone`?"),
        ({"stages": [{"steps": 1, "learn": "tiles"}]}, "needs `data.kind: mosaic`", ""),
        (
            {"traversal": {"levels": 1, "keep": []}, "data": {"path": "a.csv"},
             "stages": [{"steps": 1, "levels": 2}]},
            "stage `train`: `keep` is empty", "",
        ),
        (
            {"traversal": {"policy": "best_first", "budget": 4, "keep": []},
             "data": {"path": "a.csv"}},
            "`keep` is empty", "",
        ),
        (
            {"model": {"classes": 2, "family": "two_stream"},
             "stages": [{"steps": 1, "levels": 2, "replay": 3, "freeze": ["backbone"]}]},
            "`two_stream` does not support `replay`", "",
        ),
        ({"loss": {"rule": "paper", "selection": "sample"}}, "means `selection: top_k`", ""),
        (
            {"loss": {"rule": "paper"},
             "stages": [{"steps": 1, "loss": {"baseline": "per_level"}}]},
            "`rule: paper` means `baseline: ema`, not `per_level`", "",
        ),
        ({"loss": {"baseline": "leave_one_out"}}, "needs `samples` of 2 or more", ""),
        ({"loss": {"selction": 1}}, "unknown key `loss.selction`", "did you mean `selection`"),
        ({"optimizer": {"lr": 0}}, "`optimizer.lr` is `0`", "learning rate"),
        ({"training": {"precision": "fp8"}}, "`training.precision`", "fp32, bf16, fp16"),
        ({"augmentation": {"crop": [0.9, 0.1]}}, "`crop` ends before it begins", ""),
        ({"seed": -1}, "`seed` is `-1`", ""),
        ({"data": {}}, "`data.path` is missing", "the CSV"),
        ({"data": {"path": "a", "kind": "mosaic"}}, "`kind: mosaic` and `landscape`", ""),
        ({"data": {"path": "a", "validation": 0.6, "test": 0.4}}, "no images to train on", ""),
    ],
)  # fmt: skip
def test_a_training_that_cannot_be_is_refused_in_one_line(data, part, hint):
    error = problem(check_recipe, {**MODEL, **data})
    assert error.exit_code == 4
    assert str(error).count(part) == 1
    assert hint in error.hint
    assert error.hint
    assert "\n" not in str(error) + error.hint


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"model": {"classes": ["town", "none"]}}, "differs from the labels of scenes"),
        ({"model": {"classes": 3}}, "differs from the labels of scenes"),
        (
            {"model": {"classes": 2, "family": "whole"},
             "stages": [{"steps": 1, "learn": "tiles"}]},
            "`whole` does not support `learn: tiles`",
        ),
        (
            {"stages": [{"steps": 1, "learn": "tiles", "tiles": {"weights": {"twon": 1}}}]},
            "no scene has the label `twon`",
        ),
        (
            {"stages": [{"steps": 1, "learn": "tiles", "tiles": {"weights": {"town": 0}}}]},
            "leave no label to draw",
        ),
        ({"data": {**MOSAIC["data"], "class_weights": "balanced"}}, "`class_weights` do not apply"),
    ],
)  # fmt: skip
def test_scenes_that_cannot_be_made_are_refused(changes, part):
    error = problem(check_recipe, {**MOSAIC, **changes})
    assert part in str(error)
    assert error.exit_code == 4


def test_what_is_wrong_in_a_section_is_not_reported_again_for_every_stage():
    stages = [{"name": "a", "steps": 1}, {"name": "b", "steps": 1, "loss": {"cap": 0}}]
    error = problem(check_recipe, {**MODEL, "loss": {"zzz": 1}, "stages": stages})
    assert str(error).count("zzz") == 1
    assert "`stages.1.loss.cap` is `0`" in str(error)


def test_a_model_to_start_from_has_to_be_there(tmp_path):
    path = written(tmp_path, "model: {classes: 2}\ninit: none.safetensors")
    error = problem(read_recipe, path)
    assert "`init` is not a file" in str(error)


@pytest.mark.parametrize("name", ['"a\\0b.safetensors"', "a" * 300 + ".safetensors"])
def test_a_name_that_no_file_can_have_is_no_file(tmp_path, name):
    error = problem(read_recipe, written(tmp_path, "model: {classes: 2}"), [f"init={name}"])
    assert "`init` is not a file" in str(error)


@pytest.mark.parametrize(
    ("family", "more", "levels"),
    [
        ("tnet", {}, 3),
        ("whole", {}, 1),
        ("two_stream", {}, 2),
        ("anchornet", {}, 2),
        ("anchornet", {"backbone": "anchornet"}, 3),
        ("saccader", {}, 3),
    ],
)
def test_levels_default_to_the_maximum_of_the_family(family, more, levels):
    recipe = check_recipe({"model": {"family": family, "classes": 2, **more}})
    assert recipe.traversal.levels == levels


@pytest.mark.parametrize("family", ["two_stream", "anchornet"])
def test_more_levels_than_a_family_has_are_refused(family):
    model = {"family": family, "classes": 2}
    error = problem(check_recipe, {"model": model, "traversal": {"levels": 3}})
    assert f"`traversal.levels` is `3`: `{family}` has 2 levels" in str(error)
    check_recipe({"model": model, "traversal": {"levels": 2}})


@pytest.mark.parametrize(
    ("family", "levels", "reason"),
    [("whole", 2, "has 1 level"), ("two_stream", 3, "has 2 levels")],
)
def test_a_stage_cannot_go_deeper_than_its_family(family, levels, reason):
    stages = [{"name": "deep", "steps": 1, "levels": levels}]
    recipe = {"model": {"family": family, "classes": 2, "backbone": "compact"}, "stages": stages}
    assert f"stage `deep`: `levels` is `{levels}`: `{family}` {reason}" in str(
        problem(check_recipe, recipe)
    )


@pytest.mark.parametrize(("family", "levels"), [("whole", 1), ("two_stream", 1), ("dram", 1)])
def test_windows_are_reported_to_a_second_level_only(family, levels):
    recipe = {
        "model": {"family": family, "classes": 2},
        "traversal": {"levels": levels},
        "data": {"path": "a.csv", "regions": "w.csv"},
    }
    assert "there is only level 1" in str(problem(check_recipe, recipe))
    if family != "whole":
        check_recipe({**recipe, "traversal": {"levels": 2}})


OBJECTIVES = {
    "tnet": (),
    "anchornet": ("side",),
    "two_stream": ("local", "ranking", "margin"),
    "saccader": ("glimpses", "imitation"),
    "dram": ("side", "glimpses"),
    "whole": (),
}


@pytest.mark.parametrize("family", OBJECTIVES)
def test_an_objective_has_the_keys_of_its_family_alone(family):
    model = {"model": {"family": family, "classes": 2}}
    for key in {key for keys in OBJECTIVES.values() for key in keys}:
        objective = {key: 0.25}
        recipe = {**model, "objective": objective}
        staged = {**model, "stages": [{"name": "a", "steps": 1, "objective": objective}]}
        if key in OBJECTIVES[family]:
            for each in (recipe, staged):
                (stage,) = check_recipe(each).stages
                assert getattr(stage.objective, key) == objective[key]
        else:
            for each in (recipe, staged):
                error = problem(check_recipe, each)
                assert f"unknown key `{key}`" in str(error)
                assert f"objective of `{family}`" in str(error)
                assert error.hint.strip()[-1] != ":"


def test_a_stage_changes_its_objective_key_by_key():
    recipe = check_recipe(
        {
            "model": {"family": "saccader", "classes": 2},
            "objective": {"imitation": 2.0, "glimpses": 3.0},
            "stages": [
                {"name": "a", "steps": 1, "objective": {"glimpses": 0.5}},
                {"name": "b", "steps": 1},
            ],
        }
    )
    assert [(s.objective.imitation, s.objective.glimpses) for s in recipe.stages] == [
        (2.0, 0.5),
        (2.0, 3.0),
    ]
    assert check_recipe(recipe.as_data()) == recipe


@pytest.mark.parametrize(
    ("objective", "message", "hint"),
    [
        ({"glimpse": 1}, "unknown key `glimpse`", "did you mean `glimpses`?"),
        ({"glimpses": -1}, "`glimpses` is `-1`", "weight of REINFORCE"),
        ({"imitation": "much"}, "`imitation` is `much`", "weight"),
        (3, "not a table", ""),
    ],
)
def test_an_objective_that_makes_no_sense_is_refused(objective, message, hint):
    model = {"model": {"family": "saccader", "classes": 2}}
    for recipe in (
        {**model, "objective": objective},
        {**model, "stages": [{"name": "a", "steps": 1, "objective": objective}]},
    ):
        error = problem(check_recipe, recipe)
        assert message in str(error)
        assert hint in (error.hint or "")
