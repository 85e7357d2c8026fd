import json
import os
import subprocess
import sys

import pytest

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
    assert found["schema"] == "tnet.doctor/2"
    assert found["cores"]["available"] >= 1
    assert found["memory"]["total"] > 2**20
    assert found["libraries"]["rasterio"]
    assert found["extras"]["zarr"]["zarr"]
    assert not {"all", "test"} & set(found["extras"])


def test_a_broken_library_is_a_fact_of_the_report(tmp_path):
    for name in ("torch", "rasterio"):
        (tmp_path / f"{name}.py").write_text("raise OSError('libbad.so: cannot open')")
    done = tnet("doctor", cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{os.environ['PYTHONPATH']}"
                if "PYTHONPATH" in os.environ else str(tmp_path))  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert "torch cannot be used: OSError: libbad.so: cannot open" in done.stdout
    assert "rasterio cannot be used: OSError: libbad.so" in done.stdout


def test_what_is_not_installed_is_said(monkeypatch):
    monkeypatch.setattr(doctor, "requires", lambda _: ["no-such (>=2)", 'zarr>=3; extra == "zarr"'])
    assert doctor._requirements() == (["no-such"], {"zarr": ["zarr"]})
    found = doctor.examine()
    assert found["libraries"] == {"no-such": None}
    assert "no-such   not installed" in doctor.as_text(found)


def test_a_source_tree_without_metadata_is_reported(monkeypatch):
    def missing(_):
        raise doctor.PackageNotFoundError

    monkeypatch.setattr(doctor, "requires", missing)
    assert doctor._requirements() == ([], {})


def test_no_home_folder_is_a_fact_too(monkeypatch):
    for name in ("TNET_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def homeless():
        raise RuntimeError

    monkeypatch.setattr("pathlib.Path.home", homeless)
    assert doctor.examine()["cache"] == "there is no home folder to keep the cache in"


@pytest.mark.skipif(os.name == "nt", reason="pipes of another kind")
def test_a_closed_pipe_is_no_bug():
    command = f"set -o pipefail; {sys.executable} -m tnetcli doctor | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.returncode in (0, 141)
    assert "Traceback" not in done.stderr
