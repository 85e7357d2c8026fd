import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.commands import tnet
from tnetcli import __version__

PLAIN = {"GDAL_CACHEMAX": "", "GDAL_DISABLE_READDIR_ON_OPEN": "", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def without_libraries(tmp_path):
    """Return settings with which most libraries are quick to import, and one is broken."""
    folder = tmp_path / "libraries"
    folder.mkdir()
    for name in ("torch", "torchvision", "timm", "distributed", "tensorboard", "pyarrow"):
        (folder / f"{name}.py").write_text("raise OSError('libbad.so: cannot open')")
    return {**PLAIN, "PYTHONPATH": str(folder), "TNET_CACHE": str(tmp_path / "cache")}


def test_a_report_tells_versions_and_ends_well_if_all_is_fine(tmp_path):
    done = tnet("doctor", cwd=tmp_path, TNET_CACHE=str(tmp_path), HF_TOKEN="hf_hunter2", **PLAIN)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"tnet {__version__}\n")
    for part in ("GDAL 3.", "OpenSlide 4.", "codecs JPEG8", "devices ", "numcodecs ", "cores ",
                 "slides       installed", "problems\n  none known", "HF_TOKEN"):  # fmt: skip
        assert part in done.stdout
    assert "hunter2" not in done.stdout


def test_broken_libraries_are_told_of_and_end_with_8(without_libraries, tmp_path):
    done = tnet("doctor", "--json", cwd=tmp_path, **without_libraries)
    assert done.returncode == 8
    told = json.loads(done.stdout)
    assert told["libraries"]["torch"]["reason"] == "OSError: libbad.so: cannot open"
    assert told["libraries"]["rasterio"]["state"] == "ok"
    assert len(told["problems"]) == 6
    assert done.stderr.splitlines() == [
        "error: 6 problems found",
        "hint: the last lines of the report say what to do",
    ]


def test_nothing_heavy_is_loaded_into_the_command_itself(without_libraries, tmp_path):
    code = """
import sys
sys.argv = ["tnet", "doctor"]
from tnetcli.cli.main import main
try:
    main()
except SystemExit as end:
    assert end.code == 8
heavy = {"torch", "timm", "rasterio", "numpy", "zarr", "openslide", "tifffile"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
"""
    subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, **without_libraries},
        capture_output=True,
        check=True,
    )


def test_a_reader_that_stops_listening_is_no_bug(without_libraries):
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {sys.executable} -m tnetcli doctor | head -n 1"],
        env={**os.environ, **without_libraries},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (8, 141)
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="signals of another kind")
def test_whoever_is_stopped_leaves_no_process_behind(tmp_path):
    (tmp_path / "numpy.py").write_text(
        f"open({str(tmp_path / 'begun')!r}, 'w').write(str(__import__('os').getpid()))\n"
        "while True: pass"
    )
    running = subprocess.Popen(
        [sys.executable, "-m", "tnetcli", "doctor"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    begun = tmp_path / "begun"
    while running.poll() is None and not (begun.exists() and begun.read_text()):
        time.sleep(0.01)
    running.send_signal(signal.SIGTERM)
    out, said = running.communicate(timeout=30)
    assert (running.returncode, out) == (75, "")
    assert said.startswith("error: stopped by a signal")
    with pytest.raises(ProcessLookupError):
        os.kill(int(begun.read_text()), 0)
