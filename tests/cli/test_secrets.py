"""Passwords and signatures of URLs are used to fetch, and appear nowhere else."""

import json

import pytest

from tests.cli.test_export import export, put, scene
from tests.cli.test_predict import in_process, invoke, write_model
from tests.commands import tnet
from tests.images import noise, write_geotiff
from tests.web import serving
from tnetcli.text import HIDDEN

SECRET = "hunter2"
LOGIN = f"user:{SECRET}"
QUERY = f"X-Amz-Date=1&X-Amz-Signature={SECRET}"


@pytest.fixture
def served(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GDAL_HTTP_MAX_RETRY", "0")
    write_model(tmp_path / "m.safetensors")
    folder, log = tmp_path_factory.mktemp("web"), tmp_path_factory.mktemp("log") / "log"
    log.touch()
    write_geotiff(folder / "a.tif", noise((300, 200)), overviews=[2])
    with serving(folder, log) as address:
        yield address.removeprefix("http://"), log


def files_with_the_secret(folder):
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and SECRET.encode() in path.read_bytes()
    ]


def test_an_image_by_url_leaves_no_secret_behind_and_is_known_again(served, tmp_path):
    host, asked = served
    images = [f"http://{LOGIN}@{host}/a.tif?{QUERY}{each}" for each in (1, 2)]
    images += [f"/vsicurl/http://{host}/missing?sig={SECRET}"]
    done = in_process(tmp_path, *images, "-o", "out.jsonl", "--overlay", "overlays")
    assert done.exit_code == 8, done.stderr
    assert asked.read_text()
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [each["status"] for each in records] == ["ok", "ok", "failed"]
    assert records[0]["image"] == f"http://{HIDDEN}@{host}/a.tif?X-Amz-Date=***&X-Amz-Signature=***"
    assert len({each["id"] for each in records}) == 3
    assert SECRET not in done.stdout + done.stderr
    asked.write_text("")
    again = in_process(tmp_path, *images[:2], "-o", "out.jsonl", "--overlay", "overlays")
    assert (again.exit_code, bool(asked.read_text())) == (0, False)
    assert "2 kept" in again.stderr
    assert invoke(["merge", "out.jsonl", "-o", "merged.jsonl"]).exit_code == 8
    closer = in_process(
        tmp_path, *images[:2], "-o", "closer.jsonl", "--windows", "out.jsonl", "--levels", "2"
    )
    assert closer.exit_code == 0, closer.stderr
    for name in ("p.csv", "p.geojsonl"):
        assert export("out.jsonl", "-o", name).exit_code == 0
    assert export("out.jsonl", "-o", "p.html").exit_code == 8
    assert files_with_the_secret(tmp_path) == []


def test_what_info_shows_and_errors_say_has_no_secret(served):
    host, _ = served
    good, bad = f"http://{LOGIN}@{host}/a.tif?{QUERY}", f"http://{host}/none?sig={SECRET}"
    for flags in ([], ["--json"]):
        done = tnet("info", good, bad, *flags)
        assert done.returncode == 8
        assert SECRET not in done.stdout + done.stderr
        assert host in done.stdout


@pytest.mark.parametrize("command", ["info", "predict", "pyramid", "export"])
def test_errors_of_any_command_have_no_secret(command, tmp_path):
    done = tnet(command, f"https://{LOGIN}@127.0.0.1:9/a.tif?{QUERY}", cwd=tmp_path)
    assert done.returncode not in (0, 1)
    assert SECRET not in done.stdout + done.stderr


class TestExport:
    """Records may come from anywhere: what they name is not fetched unless that is asked for."""

    @pytest.mark.parametrize("name", ["a.png", "a.html"])
    @pytest.mark.parametrize("prefix", ["", "/vsicurl/"])
    def test_pixels_of_a_url_are_fetched_only_if_allowed(self, served, name, prefix):
        host, asked = served
        put("p.jsonl", scene(f"{prefix}http://{host}/a.tif"))
        done = export("p.jsonl", "-o", name)
        assert (done.exit_code, bool(asked.read_text())) == (8, False)
        assert "not fetched without --allow-remote" in done.stderr
        assert "--allow-remote fetches" in done.stderr
        done = export("p.jsonl", "-o", name, "--overwrite", "--allow-remote")
        assert (done.exit_code, done.stderr) == (0, "")
        assert asked.read_text()

    @pytest.mark.parametrize("form", ["csv", "geojson", "heatmap"])
    def test_formats_without_pixels_ask_nothing_and_have_no_such_option(self, served, form):
        host, asked = served
        put("p.jsonl", scene(f"http://{host}/a.tif"))
        assert (export("p.jsonl", "-f", form, "-o", "out/").exit_code, bool(asked.read_text())) == (
            0,
            False,
        )
        done = export("p.jsonl", "-f", form, "-o", "out/", "--allow-remote", "--overwrite")
        assert done.exit_code == 2

    def test_what_a_record_does_not_keep_cannot_be_fetched(self, served):
        host, asked = served
        put("p.jsonl", scene(f"http://{LOGIN}@{host}/a.tif"))
        done = export("p.jsonl", "-o", "a.png", "--allow-remote")
        assert (done.exit_code, bool(asked.read_text())) == (8, False)
        assert "do not keep logins and signatures" in done.stderr

    def test_records_of_older_versions_are_shown_without_their_secrets(self, served, tmp_path):
        put("p.jsonl", scene("IMAGE"))
        text = (tmp_path / "p.jsonl").read_text()
        (tmp_path / "p.jsonl").write_text(text.replace("IMAGE", f"https://h/a.tif?{QUERY}"))
        for name in ("a.png", "a.html", "a.csv", "a.geojson", "a.tif"):
            export("p.jsonl", "-o", name)
        assert files_with_the_secret(tmp_path) == [tmp_path / "p.jsonl"]
