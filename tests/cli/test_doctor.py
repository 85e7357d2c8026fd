import json
import sys

from tests.commands import tnet
from tnetcli import __version__
from tnetcli.cli import doctor


def test_the_report_is_one_screen(tmp_path):
    done = tnet("doctor", cwd=tmp_path, TNET_CACHE=str(tmp_path), HF_TOKEN="hf_hunter2")
    assert (done.returncode, done.stderr) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert lines["tnet"] == __version__
    assert lines["gdal"].startswith("3.")
    assert lines["cache"] == str(tmp_path)
    assert lines["devices"].startswith("cpu")
    assert "openslide-python 1." in lines["[slides]"]
    assert {"cores", "memory", "numpy", "torch", "[zarr]", "[dask]", "[tables]"} <= set(lines)
    assert len(lines) < 45
    assert "hunter2" not in done.stdout


def test_json_has_the_same_facts(tmp_path):
    done = tnet("doctor", "--json", cwd=tmp_path, TNET_CACHE=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["schema"] == "tnet.doctor/3"
    assert int(found["cores"].split()[0]) >= 1
    assert found["memory"]["total"].endswith("GB")
    assert found["libraries"]["rasterio"]
    assert found["[zarr]"]["zarr"]
    assert not {"[all]", "[test]"} & set(found)


def test_a_broken_library_is_part_of_the_report(monkeypatch):
    for name in ("torch", "rasterio"):
        monkeypatch.setitem(sys.modules, name, None)
    done = tnet("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert "torch: ModuleNotFoundError" in done.stdout
    assert "rasterio: ModuleNotFoundError" in done.stdout


def test_a_library_that_is_not_installed_is_reported(monkeypatch):
    monkeypatch.setattr(doctor, "requires", lambda _: ["no-such (>=2)", 'zarr>=3; extra == "zarr"'])
    assert json.loads(tnet("doctor", "--json").stdout)["libraries"] == {"no-such": "not installed"}
    assert "no-such   not installed" in tnet("doctor").stdout


def test_a_source_tree_without_metadata_or_home_folder_is_reported(monkeypatch):
    def missing(_):
        raise doctor.PackageNotFoundError

    def homeless():
        raise RuntimeError

    monkeypatch.setattr(doctor, "requires", missing)
    monkeypatch.setattr("pathlib.Path.home", homeless)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    found = json.loads(tnet("doctor", "--json").stdout)
    assert found["libraries"] == {}
    assert "home folder" in found["cache"]
