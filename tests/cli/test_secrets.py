"""Passwords and signatures of URLs are used to fetch, and appear nowhere else."""

import json

import pytest

from tests.cli.test_export import scene
from tests.commands import tnet
from tests.images import noise, write_geotiff
from tests.predicting import predict, write_model
from tests.web import serving
from tnetcli.text import HIDDEN

SECRET = "hunter2"
LOGIN = f"user:{SECRET}"
QUERY = f"X-Amz-Date=1&X-Amz-Signature={SECRET}"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder, log = tmp_path_factory.mktemp("web"), tmp_path_factory.mktemp("log") / "log"
    write_geotiff(folder / "a.tif", noise((300, 200)), overviews=[2])
    log.touch()
    with serving(folder, log) as address:
        yield address.removeprefix("http://"), log, write_model(log.with_name("m.safetensors"))


@pytest.fixture
def served(server, tmp_path, monkeypatch):
    host, log, model = server
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GDAL_HTTP_MAX_RETRY", "0")
    monkeypatch.setenv("CPL_VSIL_CURL_NON_CACHED", "/vsicurl/")  # each test asks anew
    (tmp_path / "m.safetensors").write_bytes(model.read_bytes())
    log.write_text("")
    return host, log


def files_with_the_secret(folder):
    return [
        path
        for path in folder.rglob("*")
        if path.is_file() and SECRET.encode() in path.read_bytes()
    ]


def put(record):
    with open("p.jsonl", "w", encoding="utf-8") as file:
        file.write(f"{record.model_dump_json()}\n")


def test_an_image_by_url_leaves_no_secret_and_is_resumed(served, tmp_path):
    host, requests = served
    images = [f"http://{LOGIN}@{host}/a.tif?{QUERY}{each}" for each in (1, 2)]
    images += [f"/vsicurl/http://{host}/missing?sig={SECRET}"]
    done = predict(tmp_path, *images, "-o", "out.jsonl")
    assert done.returncode == 8, done.stderr
    assert requests.read_text()
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [each["status"] for each in records] == ["ok", "ok", "failed"]
    assert records[0]["image"] == f"http://{HIDDEN}@{host}/a.tif?X-Amz-Date=***&X-Amz-Signature=***"
    assert len({each["id"] for each in records}) == 3
    assert SECRET not in done.stdout + done.stderr
    requests.write_text("")
    again = predict(tmp_path, *images[:2], "-o", "out.jsonl")
    assert (again.returncode, bool(requests.read_text())) == (0, False)
    assert "2 done before" in again.stderr
    assert tnet("merge", "out.jsonl", "-o", "merged.jsonl").returncode == 8
    options = ["-o", "closer.jsonl", "--regions", "out.jsonl", "--levels", "2"]
    closer = predict(tmp_path, *images[:2], *options)
    assert closer.returncode == 0, closer.stderr
    for name in ("p.csv", "p.geojsonl"):
        assert tnet("export", "out.jsonl", "-o", name).returncode == 0
    assert tnet("export", "out.jsonl", "-o", "p.html").returncode == 8
    assert files_with_the_secret(tmp_path) == []


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_info_prints_no_secret(served, flags):
    host, _ = served
    good, bad = f"http://{LOGIN}@{host}/a.tif?{QUERY}", f"http://{host}/none?sig={SECRET}"
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
    """Records may come from anywhere: an export fetches nothing unless that is allowed."""

    @pytest.mark.parametrize(("name", "prefix"), [("a.png", ""), ("a.html", "/vsicurl/")])
    def test_pixels_of_a_url_are_fetched_only_if_allowed(self, served, name, prefix):
        host, requests = served
        put(scene(f"{prefix}http://{host}/a.tif"))
        done = tnet("export", "p.jsonl", "-o", name)
        assert (done.returncode, bool(requests.read_text())) == (8, False)
        assert "not fetched without --allow-remote" in done.stderr
        done = tnet("export", "p.jsonl", "-o", name, "--overwrite", "--allow-remote")
        assert (done.returncode, done.stderr) == (0, "")
        assert requests.read_text()

    @pytest.mark.parametrize("form", ["csv", "geojson", "heatmap"])
    def test_formats_without_pixels_fetch_nothing(self, served, form):
        host, requests = served
        put(scene(f"http://{host}/a.tif"))
        done = tnet("export", "p.jsonl", "-f", form, "-o", "out/")
        assert (done.returncode, bool(requests.read_text())) == (0, False)

    def test_an_image_whose_login_was_removed_cannot_be_fetched(self, served):
        host, requests = served
        put(scene(f"http://{LOGIN}@{host}/a.tif"))
        done = tnet("export", "p.jsonl", "-o", "a.png", "--allow-remote")
        assert (done.returncode, bool(requests.read_text())) == (8, False)
        assert "do not store logins" in done.stderr

    def test_records_with_secrets_are_exported_without_them(self, served, tmp_path):
        put(scene("IMAGE"))
        text = (tmp_path / "p.jsonl").read_text()
        (tmp_path / "p.jsonl").write_text(text.replace("IMAGE", f"https://h/a.tif?{QUERY}"))
        for name in ("a.png", "a.html", "a.csv", "a.geojson", "a.tif"):
            tnet("export", "p.jsonl", "-o", name)
        assert files_with_the_secret(tmp_path) == [tmp_path / "p.jsonl"]
