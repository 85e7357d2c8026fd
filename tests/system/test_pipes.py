"""Commands that read pipes, standard input, or a named pipe where a file is expected."""

import os

import pytest

from tests.commands import run_in_shell, tnet
from tests.exporters.records import record, window
from tests.images import noise, write_geotiff

pytestmark = pytest.mark.skipif(os.name == "nt", reason="no POSIX pipes")


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("info --manifest pipe", 4),
        ("predict --manifest pipe -o b.jsonl", 4),
        ("train pipe -o run", 4),
        ("models ./pipe", 5),
        ("predict a.tif --model ./pipe", 5),
        ("predict a.tif --regions pipe", 4),
        ("merge pipe -o b.jsonl", 7),
        ("export pipe -o b.csv", 7),
    ],
)
def test_a_named_pipe_on_a_disk_is_an_error_and_does_not_block(tmp_path, command, code):
    write_geotiff(tmp_path / "a.tif", noise((64, 64)))
    os.mkfifo(tmp_path / "pipe")
    done = tnet(*command.split(), cwd=tmp_path)
    assert done.returncode == code
    error, hint = done.stderr.splitlines()[-2:]
    assert error.startswith("error: ")
    assert "is a named pipe, not a regular file" in error
    assert hint.startswith("hint: ")


@pytest.fixture
def predictions(tmp_path):
    found = record(window(attention=1.0), image="a.tif", width=100, height=80)
    (tmp_path / "a.jsonl").write_text(found.model_dump_json() + "\n")
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        "tnet export <(cat a.jsonl) -o b.geojson && grep -q root b.geojson",
        "cat a.jsonl | tnet merge - -o b.jsonl && cmp a.jsonl b.jsonl",
    ],
)
def test_predictions_are_read_from_a_pipe_and_from_standard_input(predictions, command):
    done = run_in_shell(f"cd {predictions} && {command}")
    assert done.returncode == 0, done.stderr


def test_closed_standard_input_is_a_usage_error(predictions):
    done = run_in_shell(f"cd {predictions} && tnet merge - -o b.jsonl <&-")
    assert done.returncode == 2
    assert done.stderr.startswith("error: standard input is closed\nhint: ")


def test_paths_in_a_manifest_from_a_pipe_are_relative_to_this_folder(tmp_path):
    write_geotiff(tmp_path / "a.tif", noise((64, 64)))
    done = run_in_shell(f"cd {tmp_path} && tnet info --manifest <(echo path; echo a.tif)")
    assert done.returncode == 0, done.stderr


def test_regions_are_not_read_from_a_pipe(tmp_path):
    write_geotiff(tmp_path / "a.tif", noise((64, 64)))
    done = run_in_shell(f"cd {tmp_path} && tnet predict a.tif --regions <(sleep 1)")
    assert done.returncode == 4
    assert "is a pipe" in done.stderr
