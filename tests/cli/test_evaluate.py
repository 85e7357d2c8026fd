import json

import pytest
from PIL import Image

from tests.checkpoints import write_tiny
from tests.commands import tnet
from tests.images import noise, write_geotiff
from tnetcli.errors import OutputError

CLASSES = ["river", "forest"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluate")
    write_tiny(
        folder / "m.safetensors",
        classes=CLASSES,
        bands=["red", "green", "blue"],
        normalisation={"dtype": "uint8", "mean": [128.0] * 3, "std": [60.0] * 3},
        traversal={"levels": 2, "keep": [2]},
    )
    rows = ["path,label,box"]
    for number in range(4):
        write_geotiff(folder / f"{number}.tif", noise((200, 180), seed=number))
        rows.append(f"{number}.tif,{CLASSES[number % 2]},10 10 60 50")
    (folder / "a.csv").write_text("\n".join(rows) + "\n")
    (folder / "broken.tif").write_text("no image")
    (folder / "some.csv").write_text("path,label\n0.tif,river\nbroken.tif,river\n")
    (folder / "none.csv").write_text("path,label\nbroken.tif,river\n")
    (folder / "unknown.csv").write_text("path,label\n0.tif,desert\n")
    return folder


PLAIN = ("--no-random", "--no-oracle", "--levels", "1")


def evaluate(folder, *arguments, data="a.csv", **environment):
    common = ("--model", folder / "m.safetensors", "--data", folder / data, "--device", "cpu")
    return tnet("evaluate", *common, "--threads", "1", *arguments, **environment)


def test_everything_is_printed_written_and_drawn(folder, tmp_path):
    output, picture = tmp_path / "a.json", tmp_path / "a.png"
    done = evaluate(folder, "-o", output, "--confusion", picture)
    assert (done.returncode, done.stderr) == (0, "")
    for words in ("accuracy", "macro F1", "random", "oracle", "1 river", "billion"):
        assert words in done.stdout
    record = json.loads(output.read_text())
    assert [row["windows"] for row in record["rows"][:3]] == [0, 1, 2]
    with Image.open(picture) as drawn:
        assert drawn.format == "PNG"


def test_results_are_printed_even_if_they_cannot_be_written(folder, tmp_path, monkeypatch):
    def is_full(*_):
        raise OutputError("no space left")

    monkeypatch.setattr("tnetcli.cli.evaluate.write_file", is_full)
    done = evaluate(folder, "-o", tmp_path / "a.json", *PLAIN)
    assert done.returncode == 7
    assert "accuracy" in done.stdout


def test_json_is_the_content_of_the_file(folder, tmp_path):
    output = tmp_path / "a.json"
    done = evaluate(folder, "--json", "-o", output, "--seed", 3, *PLAIN)
    assert done.returncode == 0
    assert done.stdout == output.read_text()
    assert json.loads(done.stdout)["seed"] == 3


def test_the_traversal_and_the_comparisons_are_options(folder):
    done = evaluate(
        folder, "--json", "--keep", "3", "--counts", "0,2", "--no-random", "--no-oracle"
    )
    record = json.loads(done.stdout)
    assert record["traversal"]["keep"] == [3]
    assert {row["choice"] for row in record["rows"]} == {"attention"}
    assert sorted({row["windows"] for row in record["rows"]}) == [0, 2, 3]


def test_options_are_read_from_the_environment(folder):
    done = evaluate(
        folder, TNET_EVALUATE_JSON="1", TNET_EVALUATE_LEVELS="1", TNET_EVALUATE_NO_RANDOM="1"
    )
    assert [row["windows"] for row in json.loads(done.stdout)["rows"]] == [0]


def test_an_existing_file_is_replaced_only_with_overwrite(folder, tmp_path):
    output = tmp_path / "a.json"
    output.write_text("mine")
    done = evaluate(folder, "-o", output)
    assert (done.returncode, done.stdout, output.read_text()) == (7, "", "mine")
    assert evaluate(folder, "-o", output, "--overwrite", *PLAIN).returncode == 0
    assert json.loads(output.read_text())["images"] == 4


def test_failed_images_end_with_8(folder):
    done = evaluate(folder, "--json", *PLAIN, data="some.csv")
    assert done.returncode == 8
    record = json.loads(done.stdout)
    assert record["images"] == 1
    assert [failure["id"] for failure in record["failed"]] == ["broken.tif"]
    assert "broken.tif" in done.stderr
    assert "error: 1 of 2 images could not be read" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "data", "code", "words"),
    [
        ((), "none.csv", 3, "broken.tif"),
        (("--model", "no.safetensors"), "a.csv", 5, "no.safetensors"),
        ((), "unknown.csv", 4, "desert"),
        ((), "nowhere.csv", 4, "nowhere.csv"),
        (("--split", "validation"), "a.csv", 4, "validation"),
        (("--counts", "0,9"), "a.csv", 2, "9"),
        (("--counts", "x"), "a.csv", 2, "--counts"),
        (("--keep", "0"), "a.csv", 2, "--keep"),
        (("--confusion", "a.jpg"), "a.csv", 2, "a.jpg"),
        (("--bands", "1,2"), "a.csv", 3, "3 bands"),
        (("--device", "toaster"), "a.csv", 2, "toaster"),
    ],
)
def test_an_error_has_its_exit_code(folder, arguments, data, code, words):
    done = evaluate(folder, *arguments, data=data)
    assert done.returncode == code
    assert words in done.stderr


def test_a_recipe_without_data_is_an_error(folder):
    (folder / "a.yaml").write_text("model: {classes: 3}\n")
    done = evaluate(folder, data="a.yaml")
    assert done.returncode == 4
    assert "has no section `data`" in done.stderr
