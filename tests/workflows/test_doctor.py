import json

import pytest

from tnetcli.errors import OutputError
from tnetcli.machine import Memory
from tnetcli.workflows import doctor
from tnetcli.workflows.doctor import as_json, examine
from tnetcli.workflows.doctor_text import as_text
from tnetcli.workflows.libraries import LIBRARIES, Found


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch, tmp_path):
    for name in ("GDAL_CACHEMAX", "GDAL_DISABLE_READDIR_ON_OPEN", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TNET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "misfits", lambda versions: [])


@pytest.fixture
def installed(monkeypatch):
    """Return a function that says what is found of some libraries; the others are fine."""

    def set_to(**told):
        found = [
            Found(each, **{"state": "ok", "version": "1.0", **told.get(each.module, {})})
            for each in LIBRARIES
        ]
        monkeypatch.setattr(doctor, "examine_libraries", lambda advance: found)

    set_to()
    return set_to


def problems():
    return [(each.problem, each.hint) for each in examine().problems]


def test_a_good_installation_has_no_problems(installed):
    report = examine()
    assert report.problems == ()
    assert as_text(report).endswith("problems\n  none known")


def test_a_missing_extra_is_told_with_its_command_and_is_no_problem(installed):
    installed(zarr={"state": "missing", "version": None})
    report = examine()
    assert not report.problems
    assert report.facts["extras"]["zarr"] == {
        "state": "missing",
        "purpose": "reading and writing OME-Zarr",
        "install": "pip install 'tnetcli[zarr]'",
    }
    assert "zarr         not installed: pip install 'tnetcli[zarr]'" in as_text(report)


def test_a_missing_library_of_the_core_is_a_problem(installed):
    installed(torchvision={"state": "missing", "version": None})
    ((problem, hint),) = problems()
    assert problem == "torchvision is not installed, and tnet needs it"
    assert hint == "pip install torchvision"


def test_a_broken_library_is_a_problem_with_its_reason(installed):
    installed(torch={"state": "broken", "reason": "OSError: libcudnn.so.9"})
    ((problem, hint),) = problems()
    assert problem == "torch is broken: OSError: libcudnn.so.9"
    assert hint == "pip install --force-reinstall torch"
    assert "1.0 BROKEN: OSError: libcudnn.so.9" in as_text(examine())


def test_tables_of_another_proj_are_not_mended_by_pip(installed):
    installed(rasterio={"state": "broken", "reason": "CRSError: PROJ: Cannot find proj.db"})
    ((_, hint),) = problems()
    assert hint.startswith("unset PROJ_LIB and PROJ_DATA")


@pytest.mark.parametrize(
    ("details", "part"),
    [
        ({"OpenSlide": "3.4.1"}, "reads no DICOM"),
        ({"OpenSlide": "4.0.0", "pixman": "0.38.4"}, "MIRAX"),
    ],
)
def test_a_library_that_is_known_to_be_bad_is_a_problem(installed, details, part):
    installed(openslide={"details": details})
    ((problem, hint),) = problems()
    assert part in problem
    assert "openslide-bin" in hint


@pytest.mark.parametrize("details", [{"OpenSlide": "4.0.1", "pixman": "0.42.2"}, {}])
def test_a_library_that_is_not_is_none(installed, details):
    installed(openslide={"details": details})
    assert not problems()


def test_versions_that_do_not_fit_are_a_problem_once(installed, monkeypatch):
    seen = {}

    def twice(versions):
        seen.update(versions)
        return [("a needs b==1, and b 2 is installed", "b==1")] * 2

    monkeypatch.setattr(doctor, "misfits", twice)
    assert problems() == [("a needs b==1, and b 2 is installed", "pip install 'b==1'")]
    assert {"tnetcli", "torch", "zarr"} <= seen.keys()


def test_settings_that_go_wrong_are_problems(installed, monkeypatch):
    monkeypatch.setenv("GDAL_CACHEMAX", "1")
    monkeypatch.setenv("GDAL_DISABLE_READDIR_ON_OPEN", "EMPTY_DIR")
    assert len(problems()) == 2


def test_the_cache_is_measured(installed, tmp_path):
    folder = tmp_path / "cache" / "overviews"
    folder.mkdir(parents=True)
    (folder / "a.tif").write_bytes(bytes(1_500_000))
    (folder / "b.tif").write_bytes(bytes(500_000))
    (folder / "half").mkdir()
    (folder / "gone").symlink_to("nowhere")
    report = examine()
    assert report.facts["cache"] == {
        "folder": str(tmp_path / "cache"), "files": 2, "bytes": 2_000_000, "writable": True
    }  # fmt: skip
    assert f"{tmp_path}/cache: 2 small copies, 2.0 MB" in as_text(report)


@pytest.mark.parametrize("name", ["file", "file/below", "x" * 300])
def test_a_cache_that_cannot_be_written_to_is_a_problem(installed, tmp_path, monkeypatch, name):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(doctor, "cache_folder", lambda: tmp_path / name)
    monkeypatch.setattr(doctor, "overview_folder", lambda: tmp_path / name / "overviews")
    ((problem, hint),) = problems()
    assert "cannot write to the cache" in problem
    assert "TNET_CACHE" in hint


def test_a_user_without_a_home_is_a_problem(installed, monkeypatch):
    def nobody():
        raise OutputError("there is no home folder", hint="set TNET_CACHE")

    monkeypatch.setattr(doctor, "cache_folder", nobody)
    assert problems() == [("there is no home folder", "set TNET_CACHE")]
    assert "there is no home folder" in as_text(examine())


def test_a_package_without_its_parts_is_a_problem(installed, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "files", lambda name: tmp_path)
    monkeypatch.setattr(doctor, "recipe_files", dict)
    assert [problem for problem, _ in problems()] == [
        "the models that come with tnet are not there",
        "the recipes that come with tnet are not there",
    ]


def test_more_threads_than_cores_are_worth_a_note(installed, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4096")
    report = examine()
    assert not report.problems
    assert "OMP_NUM_THREADS=4096" in report.notes[0].problem
    assert "notes\n  OMP_NUM_THREADS=4096" in as_text(report)


def test_a_card_that_torch_does_not_see_is_worth_a_note(installed, monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(doctor, "NVIDIA", tmp_path)
    installed(torch={"details": {"devices": ["cpu"], "warning": "the driver is too old"}})
    notes = [each.problem for each in examine().notes]
    assert notes == [
        "torch says: the driver is too old",
        "there is an NVIDIA driver, and torch sees no card",
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert len(examine().notes) == 1
    installed(torch={"state": "broken"})
    assert not examine().notes


def test_memory_that_nobody_tells_of_is_no_bug(installed, monkeypatch):
    monkeypatch.setattr(doctor, "memory", lambda: Memory(None, None, None))
    assert "memory      not told" in as_text(examine())


def test_the_json_tells_all_that_the_text_does(installed, monkeypatch):
    monkeypatch.setenv("GDAL_CACHEMAX", "1")
    installed(
        torch={"version": "2.6.0+cpu", "details": {"devices": ["cpu"]}},
        zarr={"state": "broken", "reason": "no"},
    )
    told = json.loads(as_json(examine()))
    assert told["schema"] == "tnet.doctor/1"
    assert told["libraries"]["torch"] == {
        "state": "ok", "version": "2.6.0+cpu", "extra": None, "details": {"devices": ["cpu"]}
    }  # fmt: skip
    assert told["libraries"]["zarr"]["reason"] == "no"
    assert told["environment"]["GDAL_CACHEMAX"] == "1"
    assert [each["problem"][:4] for each in told["problems"]] == ["zarr", "GDAL"]
    assert told.keys() >= {
        "tnet",
        "python",
        "system",
        "cores",
        "memory",
        "cache",
        "extras",
        "notes",
    }


def test_no_line_can_steer_the_terminal(installed):
    installed(torch={"state": "broken", "reason": "\x1b[2J" + "x" * 5000})
    lines = as_text(examine()).splitlines()
    assert max(map(len, lines)) < 400
    assert not any("\x1b" in line for line in lines)
