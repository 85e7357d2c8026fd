import importlib.metadata
import re
import tomllib

import pytest

from tests.commands import ROOT
from tnetcli.workflows import libraries
from tnetcli.workflows.libraries import EXTRAS, LIBRARIES, Library, examine_libraries, misfits

OWN = Library("tnetcli-test", "bad_library")
NEXT = Library("yaml-of-ours", "json")  # always there, and no distribution


@pytest.fixture
def bad(tmp_path, monkeypatch):
    """Return a function that writes a library that does what it should not."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(code):
        (tmp_path / "bad_library.py").write_text(code)

    return write


def examined(*wanted):
    said = []
    found = examine_libraries(said.append, wanted)
    assert [each.library for each in found] == list(wanted)
    return found, said


def name_of(requirement):
    return re.match(r"[\w-]+", requirement)[0]


def test_all_that_pyproject_asks_for_is_examined():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    asked = {(name_of(each), None) for each in project["dependencies"]}
    asked |= {(name_of(each), extra) for extra in EXTRAS for each in extras[extra]}
    # Without it there may be an OpenSlide of the system: openslide-python tells.
    asked -= {("openslide-bin", "slides")}
    assert {(each.name, each.extra) for each in LIBRARIES} == asked
    assert name_of(extras["all"][0]) == "tnetcli"
    assert set(re.findall(r"\w+", extras["all"][0])[1:]) == set(EXTRAS)


def test_a_library_tells_its_version_and_what_is_inside():
    (found,), said = examined(Library("imagecodecs", "imagecodecs"))
    assert found.state == "ok"
    assert found.version == importlib.metadata.version("imagecodecs")
    assert "JPEG8" in found.details["codecs"]
    assert said == [1.0]


def test_rasterio_tells_of_gdal():
    (found,), _ = examined(Library("rasterio", "rasterio"))
    assert re.fullmatch(r"\d+\.\d+\.\d+\w*", found.details["GDAL"])


def test_tables_of_another_proj_are_noticed(tmp_path, monkeypatch):
    for name in ("PROJ_LIB", "PROJ_DATA"):
        monkeypatch.setenv(name, str(tmp_path))
    (found,), _ = examined(Library("rasterio", "rasterio"))
    assert found.state == "broken"
    assert "PROJ" in found.reason


def test_what_is_not_there_is_missing():
    (found, after), _ = examined(OWN, NEXT)
    assert (found.state, found.version, found.reason) == ("missing", None, "")
    assert after.state == "ok"


def test_a_folder_that_an_old_version_left_is_missing(tmp_path, monkeypatch):
    (tmp_path / "bad_library").mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (found,), _ = examined(OWN)
    assert found.state == "missing"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise OSError('libx.so: cannot open\\nmore')", "OSError: libx.so: cannot open"),
        ("raise ImportError", "ImportError:"),
        ("import not_there_either", "ModuleNotFoundError: No module named 'not_there_either'"),
        ("import sys; sys.exit('no licence')", "SystemExit: no licence"),
        ("import os; os._exit(3)", "the process ended with exit code 3"),
        ("import os; os.abort()", "the process ended with SIGABRT"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "ended with SIGSEGV"),
        ("import os; os.write(2, b'out of\\nluck\\n'); os.abort()", "SIGABRT: luck"),
        ("def f(): f()\nf()", "RecursionError"),
        ("(", "SyntaxError"),
    ],
)
def test_a_broken_library_is_told_of_and_the_next_one_too(bad, code, reason):
    bad(code)
    (found, after), said = examined(OWN, NEXT)
    assert found.state == "broken"
    assert reason in found.reason
    assert "\n" not in found.reason
    assert after.state == "ok"
    assert said[-1] == 1.0


def test_what_a_broken_library_leaves_behind_breaks_no_other(bad):
    bad("import sys; sys.modules['json'] = None; raise ValueError")
    (found, after), _ = examined(OWN, NEXT)
    assert (found.state, after.state) == ("broken", "ok")


def test_a_library_that_never_answers_is_given_up(bad, monkeypatch):
    monkeypatch.setattr(libraries, "SECONDS", 2.0)
    bad("while True: pass")
    (found, after), _ = examined(OWN, NEXT)
    assert found.state == "broken"
    assert "an answer in 2 s" in found.reason
    assert after.state == "ok"


def test_what_a_library_prints_is_not_taken_for_an_answer(bad):
    bad("import os; print('{\"state\": \"broken\"}'); os.write(1, b'x' * 200_000); __version__ = 7")
    (found,), _ = examined(OWN)
    assert (found.state, found.version) == ("ok", "7")


def test_a_file_in_the_folder_of_the_user_is_no_library(tmp_path, monkeypatch):
    (tmp_path / "bad_library.py").write_text("")
    monkeypatch.chdir(tmp_path)
    (found,), _ = examined(OWN)
    assert found.state == "missing"


def test_a_machine_that_starts_no_process_is_told_of(monkeypatch):
    monkeypatch.setattr(libraries.sys, "executable", "/no/such/python")
    (found, _), _ = examined(OWN, NEXT)
    assert found.state == "broken"
    assert "no process can be started" in found.reason


def test_what_pip_knows_and_python_does_not_find_is_broken():
    (found,), _ = examined(Library("numpy", "bad_library"))
    assert found.state == "broken"
    assert found.version == importlib.metadata.version("numpy")


@pytest.fixture
def asking(monkeypatch):
    """Let `vision` ask for these."""

    def set_to(*requirements):
        monkeypatch.setattr(
            importlib.metadata,
            "requires",
            lambda name: list(requirements) if name == "vision" else None,
        )

    return set_to


def test_versions_that_do_not_fit_are_told_with_what_would(asking):
    asking("torch==2.6.0", "numpy")
    found = list(misfits({"vision": "0.21.0", "torch": "2.7.0", "numpy": "2.1"}))
    assert found == [
        ("vision 0.21.0 needs torch==2.6.0, and torch 2.7.0 is installed", "torch==2.6.0")
    ]


@pytest.mark.parametrize(
    ("requirement", "version"),
    [
        ("torch==2.6.0", "2.6.0+cpu"),
        ("torch (>=2.14.0)", "2.15.0+cu132"),
        ("torch>=2.6", "2.7.0.dev20250101"),
        ("torch==2.6.0; sys_platform == 'plan9'", "2.7"),
        ("torch==2.6.0; extra == 'other'", "2.7"),
        ("other==1", "2.7"),
        ("not a requirement at all", "2.7"),
        ("torch==2.6", "no version"),
    ],
)
def test_what_fits_or_cannot_be_told_is_no_misfit(asking, requirement, version):
    asking(requirement)
    assert not list(misfits({"vision": "0.21.0", "torch": version}))


def test_the_floors_of_tnet_itself_count_extras_too():
    versions = {"tnetcli": "0.1", "numpy": "1.26.4", "zarr": "2.18"}
    needed = {each for _, each in misfits(versions)}
    assert needed == {"numpy>=2.0", "zarr>=3.1"}


def test_without_the_means_to_judge_nothing_is_judged(monkeypatch):
    monkeypatch.setitem(libraries.sys.modules, "packaging.requirements", None)
    assert not list(misfits({"tnetcli": "0.1", "numpy": "1.26.4"}))
