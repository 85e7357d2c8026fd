"""benchmarks/soak.py detects wrong pixels, and undamaged images pass."""

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.commands import ROOT
from tnetcli.errors import ImageError
from tnetcli.readers.base import Pixels

BENCHMARKS = str(ROOT / "benchmarks")
FORMATS = ("GeoTIFF DEFLATE tiles", "GeoTIFF LZW tiles", "OME-Zarr v2", "PNG RGB", "JPEG")
COMPANIONS = (
    "OME-TIFF in two files", "OME-Zarr v2", "VRT of two, one a VRT", "PNG with aux.xml",
    "GeoTIFF with sidecars",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def found():
    """Put the modules of the soak on the path."""
    sys.path.insert(0, BENCHMARKS)
    yield
    sys.path.remove(BENCHMARKS)


@pytest.fixture(scope="module")
def bases(tmp_path_factory, found):
    from soak_images import make_bases

    return {base.format: base for base in make_bases(tmp_path_factory.mktemp("images"), FORMATS)}


def checked_after(base, damaged, path, change=None):
    """Return the check of a damaged image, with pixels changed after reading."""
    from soak_check import Checked, compare, read_image

    result = Checked()
    found = read_image(base.write(path, damaged.files), result)
    if found is not None:
        if change is not None:
            found.boxes[:] = [(level, box, change(level, box, p)) for level, box, p in found.boxes]
        compare(base, damaged, found, result)
        found.reader.close()
    return result


def damaged_as(kind, base, bases):
    """Return the first damage of a kind."""
    from soak_damage import KINDS

    for number in range(100):
        done = KINDS[kind][0](base, list(bases.values()), np.random.default_rng(number))
        if done is not None and done.files != base.files:
            return done
    raise AssertionError(kind)


def darken(level, box, pixels):
    return Pixels(np.where(pixels.valid, pixels.values // 2, 0).astype("u1"), pixels.valid)


def undamaged(base):
    from soak_damage import Damaged, _truth

    return Damaged("none", "", base.files, tuple(_truth(base)))


@pytest.mark.parametrize("name", FORMATS)
def test_an_undamaged_image_passes_and_changed_pixels_do_not(tmp_path, bases, name):
    base = bases[name]
    result = checked_after(base, undamaged(base), tmp_path)
    assert (result.outcome, result.wrong) == ("ok", [])
    assert result.checked == sum(
        -(-size.width // 64) * -(-size.height // 64) for size in base.sizes
    )
    assert checked_after(base, undamaged(base), tmp_path, darken).wrong


def test_swapped_blocks_are_expected_at_their_new_places(tmp_path, bases):
    for name in ("GeoTIFF DEFLATE tiles", "OME-Zarr v2"):
        base = bases[name]
        swapped = damaged_as("swapped blocks", base, bases)
        assert checked_after(base, swapped, tmp_path / name / "a").wrong == []
        # As if the reader had not noticed that they were swapped.
        stale = type(swapped)("", "", base.files, swapped.known)
        assert checked_after(base, stale, tmp_path / name / "b").wrong


def test_a_truncated_file_is_an_error_or_correct(tmp_path, bases):
    for name in FORMATS:
        base = bases[name]
        cut = damaged_as("truncated", base, bases)
        assert checked_after(base, cut, tmp_path / name / "a").wrong == []
        assert checked_after(base, type(cut)("", "", base.files, cut.known), tmp_path / name / "b",
                      darken).wrong  # fmt: skip


def test_a_flipped_bit_is_checked_in_other_blocks_and_behind_a_checksum(bases):
    from soak_damage import _changed

    for name, checked in (("GeoTIFF DEFLATE tiles", True), ("GeoTIFF LZW tiles", False)):
        base = bases[name]
        place = base.places[1]
        known = _changed(base, "", base.entry, b"", [(place.start, place.start + 1)]).known[0]
        left, top, right, bottom = place.box
        inside = known.free[top:bottom, left:right]
        assert inside.any() != checked
        assert known.free.sum() == inside.sum()


def test_a_changed_description_is_compared_with_the_library(tmp_path, bases):
    from soak_damage import Damaged

    base = bases["GeoTIFF LZW tiles"]
    unknown = Damaged("none", "", base.files, (None,) * len(base.sizes), arguable=True)
    result = checked_after(base, unknown, tmp_path / "a")
    assert result.checked == 17
    assert result.wrong == []
    assert len(checked_after(base, unknown, tmp_path / "b", darken).wrong) == 17


@pytest.mark.parametrize("name", COMPANIONS)
def test_every_file_of_an_image_is_damaged(tmp_path, name):
    from soak_damage import damage
    from soak_images import make_bases

    (base,) = make_bases(tmp_path / "images", (name,))
    result = checked_after(base, undamaged(base), tmp_path / "read")
    assert (result.outcome, result.wrong) == ("ok", [])
    assert len(base.files) > 1
    changed = set()
    for number in range(1000):
        files = damage(base, [base], np.random.default_rng(number)).files
        changed |= {each for each in base.files if files.get(each) != base.files[each]}
    assert changed == base.files.keys()


def test_mixed_up_files_do_not_crash(tmp_path):
    from soak_images import make_bases

    bases = {base.format: base for base in make_bases(tmp_path / "images", COMPANIONS)}
    for name, base in bases.items():
        result = checked_after(
            base, damaged_as("mixed-up files", base, bases), tmp_path / "read" / name
        )
        assert result.outcome in ("ok", "refused")
        assert result.wrong == []


def test_an_exception_of_another_kind_is_a_traceback(tmp_path, bases, monkeypatch):
    import soak_check

    base = bases["JPEG"]

    def broken(*_):
        raise KeyError("a bug")

    monkeypatch.setattr(soak_check, "open_image", broken)
    assert checked_after(base, undamaged(base), tmp_path).outcome == "traceback"


def test_an_error_without_a_hint_is_a_traceback(tmp_path, bases, monkeypatch):
    import soak_check

    base = bases["JPEG"]

    def refuse(*_):
        raise ImageError("no hint")

    monkeypatch.setattr(soak_check, "open_image", refuse)
    with pytest.raises(AssertionError, match="no hint"):
        checked_after(base, undamaged(base), tmp_path)


def test_sixty_damaged_files_pass_and_damage_is_reproducible(tmp_path, bases):
    from soak_workers import BASES, check_many

    (tmp_path / BASES).write_bytes(pickle.dumps(list(bases.values())))
    from soak_damage import damage

    reports = list(check_many(range(60), tmp_path, seed=3))
    assert [report.number for report in reports] == list(range(60))
    assert {report.outcome for report in reports} == {"ok", "refused"}
    assert not any(report.wrong for report in reports)
    assert sum(report.checked for report in reports) > 100
    some = list(bases.values())
    for number in range(20):
        again = damage(some[number % len(some)], some, np.random.default_rng([3, number]))
        assert (again.kind, again.note) == (reports[number].kind, reports[number].note)


def die(number):
    if number == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    end = time.process_time() + 30
    while time.process_time() < end:
        pass


class Deadly:
    """A list of bases that crashes or blocks the worker at some of them."""

    def __init__(self, bases):
        self.bases = bases

    def __len__(self):
        return len(self.bases)

    def __getitem__(self, number):
        if number in (1, 2):
            die(number)
        return self.bases[number]


def test_a_worker_that_dies_or_hangs_is_counted_and_replaced(tmp_path, bases, monkeypatch):
    import soak_workers

    (tmp_path / soak_workers.BASES).write_bytes(pickle.dumps(Deadly(list(bases.values()))))
    monkeypatch.setattr(soak_workers, "SECONDS", 1.0)
    reports = list(soak_workers.check_many([0, 1, 3, 2], tmp_path, seed=3))
    assert [report.outcome for report in reports[1::2]] == ["crash", "hang"]
    assert {report.outcome for report in reports[::2]} <= {"ok", "refused"}
    assert "Segmentation fault" in reports[1].problem
    assert "in die" in reports[3].problem


def test_a_failed_file_is_a_missed_target(bases):
    from soak import file_figures
    from soak_workers import Report

    good = [Report(0, "a", outcome="ok", checked=5), Report(1, "a", outcome="refused")]
    assert all(figure.holds for figure in file_figures(good))
    for bad in (Report(2, outcome="crash"), Report(2, outcome="hang"), Report(2, wrong=["x"]),
                Report(2, outcome="memory"), Report(2, outcome="traceback")):  # fmt: skip
        assert sum(not figure.holds for figure in file_figures([*good, bad])) == 1


# Kills


def record(number, **changes):
    window = {"path": "root", "box": [0, 0, 8, 8]}
    return {"id": f"{number}", "status": "ok", "label": "a", "windows": [window],
            "probabilities": {"a": 0.75, "b": 0.25}, **changes}  # fmt: skip


KNOWN = {each["id"]: each for each in map(record, range(3))}
OTHER_WINDOW = [{"path": "root", "box": [0, 0, 8, 9]}]


def write_lines(path, *records, tail=""):
    path.write_text("".join(json.dumps(each) + "\n" for each in records) + tail)
    return path


def test_duplicate_torn_and_differing_records_are_counted(tmp_path):
    from soak_kills import Tally, _count_records

    def counts(*records, tail=""):
        tally = Tally()
        found = _count_records(write_lines(tmp_path / "a.jsonl", *records, tail=tail), KNOWN, tally)
        return len(found), tally.doubled, tally.torn, tally.others

    assert counts(record(0), record(1), tail='{"torn') == (2, 0, 0, 0)
    assert counts(record(0), record(0)) == (1, 1, 0, 0)
    assert counts(record(0), tail='{"torn\n') == (1, 0, 1, 0)
    for change in ({"label": "b"}, {"status": "failed"}, {"windows": OTHER_WINDOW},
                   {"probabilities": {"a": 0.7501, "b": 0.2499}}):  # fmt: skip
        assert counts(record(0, **change), record(1)) == (2, 0, 0, 1)
    assert counts(record(7)) == (1, 0, 0, 1)


def test_an_unexpected_exit_is_counted():
    from soak_kills import Tally, _check_exit

    tally = Tally()
    for name, code, is_full in (
        ("SIGKILL", -9, False), ("SIGTERM", 75, False), ("SIGINT", 130, False),
        ("SIGUSR1", 0, False), ("SIGTERM", 7, True), (None, 0, False),
    ):  # fmt: skip
        _check_exit(tally, name, code, is_full, "")
    assert tally.unexpected == []
    assert (tally.full, tally.full_errors, tally.in_time) == (1, 1, 3)
    for name, code, is_full, said in (
        ("SIGTERM", 1, False, ""), ("SIGTERM", 7, False, ""), (None, 75, False, ""),
        ("SIGUSR1", 75, False, "Traceback (most recent call last):"),
    ):  # fmt: skip
        before = len(tally.unexpected)
        _check_exit(tally, name, code, is_full, said)
        assert len(tally.unexpected) == before + 1


def test_growing_memory_and_files_miss_their_targets():
    from soak import hour_figures
    from soak_hours import Flatness

    flat = Flatness(images=100, megabytes=[500.0] * 100, handles=[9, 20] * 50, threads=[4])
    assert all(figure.holds for figure in hour_figures(flat))
    flat.megabytes = [500 + 0.4 * number for number in range(100)]
    flat.handles = [9 + number for number in range(100)]
    assert [figure.holds for figure in hour_figures(flat)] == [False, False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", [("files", "--files", "300"), ("kills", "--rounds", "6"), ("hours", "--images", "400")]
)
def test_each_part_runs_alone(part):
    script = str(Path(BENCHMARKS) / "soak.py")
    done = subprocess.run(
        [sys.executable, script, "--only", *part], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert "MISS" not in done.stdout
