import errno
import json
import os
import subprocess
import sys
import tracemalloc

import pytest

from tnetcli.data.images import Image
from tnetcli.errors import OutputError, UsageError
from tnetcli.files import try_lock
from tnetcli.prediction.jsonl import PredictionFile, check_uncompressed, merge, read_lines
from tnetcli.prediction.record import SCHEMA, Prediction, Problem, Provenance
from tnetcli.readers.base import ReadOptions
from tnetcli.text import public_name

MODEL, OTHER = "ab" * 32, "cd" * 32
SETTINGS = {"levels": 3, "keep": [4, 1], "budget": None}


def record(id, sha256=MODEL, config=SETTINGS, **changes):
    facts = {"label": "river", "probability": 0.9, "width": 9, "height": 9, "fingerprint": "f"}
    facts |= {"schema": SCHEMA, "id": id, "image": f"/images/{id}", "status": "ok"}
    return Prediction(provenance=Provenance(sha256=sha256, config=config), **(facts | changes))


def failure(id):
    return record(id, status="failed", error=Problem("ImageError", "torn"), label=None)


def abstention(id):
    return record(id, status="abstained", reason="unlike the training images", label=None)


def always(record):
    return True


def write(path, *records, tail=""):
    path.write_text("".join(f"{each.model_dump_json()}\n" for each in records) + tail)
    return path


def ids(path):
    return [line.record.id for line in read_lines(path)]


def test_records_are_there_as_soon_as_they_are_added(tmp_path):
    path = tmp_path / "new" / "a.jsonl"
    with PredictionFile(path) as file:
        assert file.resume(MODEL, SETTINGS, always) == []
        for name in ("a", "b"):
            file.add(record(name))
            assert ids(path)[-1] == name
    assert [line.record for line in read_lines(path)] == [record("a"), record("b")]


def test_records_with_the_same_settings_are_resumed(tmp_path):
    path = write(tmp_path / "a.jsonl", record("a"), record("b"))
    before = path.read_bytes()
    with PredictionFile(path) as file:
        assert file.resume(MODEL, SETTINGS, always) == ["a", "b"]
        assert path.read_bytes() == before
        file.add(record("c"))
    assert ids(path) == ["a", "b", "c"]


def test_failures_changed_images_and_repeats_are_dropped(tmp_path):
    path = write(tmp_path / "a.jsonl", record("a"), failure("b"), record("c"), record("a"))
    with PredictionFile(path) as file:
        assert file.resume(MODEL, SETTINGS, lambda each: each.id != "c") == ["a"]
        assert ids(path) == ["a"]
        file.add(record("c", label="sea"))
    assert ids(path) == ["a", "c"]
    assert not list(tmp_path.glob(".tnet*"))


@pytest.mark.parametrize("cut", [1, 10, 200])
def test_a_last_line_that_was_cut_off_is_repaired(tmp_path, caplog, cut):
    path = write(tmp_path / "a.jsonl", record("a"), tail=record("b").model_dump_json()[:-cut])
    with PredictionFile(path) as file:
        assert file.resume(MODEL, SETTINGS, always) == ["a"]
        file.add(record("b"))
    assert ids(path) == ["a", "b"]
    assert "cut off" in caplog.text


def test_a_last_line_without_its_end_is_done_again(tmp_path):
    path = write(tmp_path / "a.jsonl", record("a"), tail=record("b").model_dump_json())
    with PredictionFile(path) as file:
        assert file.resume(MODEL, SETTINGS, always) == ["a"]
    assert ids(path) == ["a"]


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        (OTHER, SETTINGS, "model abababababab, now cdcdcdcdcdcd"),
        (MODEL, {**SETTINGS, "levels": 2}, "levels was 3, now 2"),
        (MODEL, {**SETTINGS, "budget": 9}, "budget was not set, now 9"),
    ],
)
def test_records_with_other_settings_are_refused_and_stay(tmp_path, model, settings, words):
    path = write(tmp_path / "a.jsonl", record("a"), failure("b"))
    before = path.read_bytes()
    with PredictionFile(path) as file, pytest.raises(OutputError, match="other settings") as caught:
        file.resume(model, settings, always)
    assert words in str(caught.value)
    assert path.read_bytes() == before


def test_it_is_replaced_if_that_is_wanted(tmp_path):
    path = write(tmp_path / "a.jsonl", record("a"))
    with PredictionFile(path, overwrite=True) as file:
        assert file.resume(OTHER, {}, always) == []
        file.add(record("b"))
    assert ids(path) == ["b"]


@pytest.mark.parametrize("text", ["hello\n", '{"a": 1}\n', "\n", "\xff\n", '{"schema": "tn"'])
def test_a_file_of_something_else_is_refused_and_stays(tmp_path, text):
    path = tmp_path / "a.jsonl"
    path.write_bytes(text.encode("latin1"))
    with PredictionFile(path) as file, pytest.raises(OutputError, match="line 1"):
        file.resume(MODEL, SETTINGS, always)
    assert path.read_bytes() == text.encode("latin1")


def test_records_of_other_images_stay(tmp_path):
    path = write(tmp_path / "a.jsonl", failure("other"), record("a"), record("more"))
    with PredictionFile(path) as file:
        assert file.resume(MODEL, SETTINGS, lambda each: True if each.id == "a" else None) == ["a"]
    assert ids(path) == ["other", "a", "more"]


def test_of_two_records_of_an_image_the_current_one_is_kept(tmp_path):
    path = write(tmp_path / "a.jsonl", record("a", fingerprint="old"), record("a"))
    with PredictionFile(path) as file:
        assert file.resume(MODEL, SETTINGS, lambda each: each.fingerprint == "f") == ["a"]
    assert [line.record.fingerprint for line in read_lines(path)] == ["f"]


def test_failures_with_other_settings_are_dropped(tmp_path):
    path = write(tmp_path / "a.jsonl", failure("a"))
    with PredictionFile(path) as file:
        assert file.resume(OTHER, {}, always) == []
    assert ids(path) == []


def test_what_cannot_be_read_back_is_refused_and_stays(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for special in (pipe, "/dev/null", tmp_path):
        with pytest.raises(OutputError, match="not a regular file"):
            PredictionFile(special, overwrite=True).__enter__()
    assert pipe.is_fifo()


def test_a_file_that_was_replaced_meanwhile_is_opened_again(tmp_path, monkeypatch):
    path, calls = tmp_path / "a.jsonl", []

    def slow_lock(file):
        if not calls:  # another process rewrites the file before we hold it
            write(tmp_path / "b.jsonl", record("a")).replace(path)
        calls.append(file)
        return try_lock(file)

    monkeypatch.setattr("tnetcli.prediction.jsonl.try_lock", slow_lock)
    with PredictionFile(path) as file:
        file.add(record("b"))
    assert len(calls) == 2
    assert ids(path) == ["a", "b"]


def test_a_full_disk_leaves_the_records_before_it(tmp_path):
    path = tmp_path / "a.jsonl"
    with PredictionFile(path) as file:
        file.add(record("a"))
        real = file._file

        class Full:
            """Takes 50 bytes, and then no more."""

            taken = False

            def write(self, data):
                if self.taken:
                    raise OSError(errno.ENOSPC, "No space left on device")
                self.taken = True
                return real.write(data[:50])

            def __getattr__(self, name):
                return getattr(real, name)

        file._file = Full()
        with pytest.raises(OutputError, match="No space left"):
            file.add(record("b"))
        file._file = real
    assert ids(path) == ["a"]
    assert path.read_text() == record("a").model_dump_json() + "\n"


def test_two_processes_do_not_write_one_file(tmp_path):
    path = tmp_path / "a.jsonl"
    code = "import sys; from tnetcli.prediction.jsonl import PredictionFile as F\n"
    code += "try:\n  F(sys.argv[1]).__enter__()\nexcept Exception as e: print(e)"
    with PredictionFile(path):
        done = subprocess.run(
            [sys.executable, "-c", code, path], capture_output=True, text=True, check=True
        )
    assert "another tnet is writing" in done.stdout


def test_names_that_are_not_utf_8_survive(tmp_path):
    path = tmp_path / "a.jsonl"
    odd = record("a\udcff.tif")
    with PredictionFile(path) as file:
        file.add(odd)
    assert [line.record for line in read_lines(path)] == [odd]
    assert json.loads(path.read_bytes())["id"] == "a\\xff.tif"
    with PredictionFile(path) as file:
        assert file.resume(MODEL, SETTINGS, always) == [public_name("a\udcff.tif")]


@pytest.mark.parametrize("tail", ["\n", "  \r\n\n", " "])
def test_empty_lines_at_the_end_are_skipped(tmp_path, tail):
    path = write(tmp_path / "a.jsonl", record("a"), record("b"), tail=tail)
    assert ids(path) == ["a", "b"]
    with PredictionFile(path) as file:
        assert file.resume(MODEL, SETTINGS, always) == ["a", "b"]
        file.add(record("c"))
    expected = "".join(f"{record(name).model_dump_json()}\n" for name in "abc")
    assert path.read_text() == expected


def test_an_empty_line_between_records_is_refused(tmp_path):
    path = write(tmp_path / "a.jsonl", record("a"), tail=f"\n\n{record('b').model_dump_json()}\n")
    with pytest.raises(OutputError, match="line 2: empty") as caught:
        ids(path)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.JSONL.GZ", "a.zst", "x/a.zip"])
def test_the_name_of_a_compressed_file_is_refused(name):
    with pytest.raises(UsageError, match="plain text") as caught:
        check_uncompressed(name)
    assert "compress" in caught.value.hint


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a": NA}', "9" * 5000])
def test_a_line_that_cannot_be_parsed_is_refused(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(text + "\n")
    with pytest.raises(OutputError, match="line 1: not JSON: "):
        list(read_lines(tmp_path / "a.jsonl"))


def test_a_line_without_an_end_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("tnetcli.prediction.jsonl.MAX_LINE", 2**20)
    (tmp_path / "a.jsonl").write_bytes(bytes(2**20 + 1))
    with pytest.raises(OutputError, match="a line of more than 1 MiB"):
        list(read_lines(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("name", ["a.jsonl", "gz", "a.gz.jsonl", ".gz"])
def test_any_other_name_is_taken(name):
    check_uncompressed(name)


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no such folder")
def test_a_folder_that_takes_no_files_is_an_error():
    with pytest.raises(OutputError, match="cannot write"), PredictionFile("/proc/a.jsonl"):
        pass


def test_abstained_records_are_done_and_failed_ones_are_not(tmp_path):
    path = write(tmp_path / "a.jsonl", abstention("a"), failure("b"), record("c"))
    with PredictionFile(path) as file:
        assert file.resume(MODEL, SETTINGS, always) == ["a", "c"]
    assert ids(path) == ["a", "c"]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        ({"glimpses": None}, r"`windows\[0\].glimpses` is None: input should be a valid array"),
        ({"glimpses": [1]}, r"`windows\[0\].glimpses\[0\]` is 1: input should be an object"),
        (
            {"glimpses": [{"box": [0, 0, 1, 1], "label": "a"}]},
            r"`windows\[0\].glimpses\[0\].probability` is missing",
        ),
        (
            {"glimpses": [{"box": [0, 0, 1, 1], "label": "a", "probability": 1, "x": 1}]},
            r"unknown key `windows\[0\].glimpses\[0\].x`",
        ),
        ({"colour": "red"}, r"unknown key `windows\[0\].colour`"),
        ({"box": [0, 0, 0, 1]}, r"record: window `root`: `box` is thinner than 0.02 pixels"),
    ],
)
def test_a_wrong_record_is_named_by_line_and_key(tmp_path, spoil, said):
    window = {"path": "root", "level": 1, "box": [0, 0, 1, 1], "attention": 1.0, "rank": 1}
    window |= {"share": 1.0, "label": "a", "probability": 1.0, "valid": 1.0}
    wrong = json.loads(record("b").model_dump_json()) | {"windows": [window | spoil]}
    tail = json.dumps(wrong, separators=(",", ":")) + "\n"
    path = write(tmp_path / "a.jsonl", record("a"), tail=tail)
    with pytest.raises(OutputError, match=f"line 2: .*{said}") as caught:
        list(read_lines(path))
    assert "remove the line" in caught.value.hint


def test_a_record_of_another_schema_is_named_by_it(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"schema": "tnet.prediction/1", "id": "a"}\n')
    with pytest.raises(OutputError, match=r"`schema` is tnet\.prediction/1: ") as caught:
        list(read_lines(tmp_path / "a.jsonl"))
    assert caught.value.hint == "another version of tnet wrote it: predict again"


def test_a_line_with_thousands_of_problems_is_refused_in_one(tmp_path):
    keys = ", ".join(f'"k{number}": 1' for number in range(100_000))
    (tmp_path / "a.jsonl").write_text(f'{{"schema": "{SCHEMA}", {keys}}}\n')
    with pytest.raises(OutputError, match="record: 100,003 problems"):
        list(read_lines(tmp_path / "a.jsonl"))


def test_memory_follows_one_record(tmp_path):
    def peak(count):
        path = write(tmp_path / "a.jsonl", *(record(f"{n}" * 100) for n in range(count)))
        tracemalloc.start()
        assert sum(1 for _ in read_lines(path)) == count
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(10)
    assert peak(2000) < 1.2 * peak(200) + 50_000


def wanted(*names):
    return [Image(name, name, name, ReadOptions()) for name in names]


def test_records_come_together_each_once(tmp_path):
    one = write(tmp_path / "1.jsonl", record("a"), record("c"))
    two = write(tmp_path / "2.jsonl", record("b"), record("a", label="sea"))
    merged = merge([one, two], tmp_path / "all.jsonl")
    assert ids(tmp_path / "all.jsonl") == ["a", "c", "b"]
    assert (merged.records, merged.failed, merged.repeated, merged.missing) == (3, 0, 1, ())
    first = next(read_lines(tmp_path / "all.jsonl")).record
    assert first == record("a")
    assert "1 repeated" in str(merged)


def test_a_success_counts_more_than_a_failure_before_it(tmp_path):
    one = write(tmp_path / "1.jsonl", failure("a"), failure("b"))
    two = write(tmp_path / "2.jsonl", record("a"))
    merged = merge([one, two], tmp_path / "all.jsonl")
    assert [line.record.status for line in read_lines(tmp_path / "all.jsonl")] == ["ok", "failed"]
    assert (merged.records, merged.failed) == (2, 1)


def test_the_list_sets_the_order_and_what_is_missing(tmp_path, caplog):
    one = write(tmp_path / "1.jsonl", record("a"), record("x"))
    two = write(tmp_path / "2.jsonl", record("b"))
    merged = merge([one, two], tmp_path / "all.jsonl", wanted=wanted("b", "c", "a", "d"))
    assert ids(tmp_path / "all.jsonl") == ["b", "a", "x"]
    assert merged.missing == ("c", "d")
    assert str(merged).splitlines() == ["3 records, 2 missing:", "  c", "  d"]
    assert "expected images: 1 record: x" in caplog.text


@pytest.mark.parametrize("changes", [{"sha256": OTHER}, {"config": {**SETTINGS, "levels": 2}}])
def test_files_that_do_not_belong_together_are_refused(tmp_path, changes):
    one = write(tmp_path / "1.jsonl", record("a"))
    two = write(tmp_path / "2.jsonl", record("b", **changes))
    with pytest.raises(OutputError, match="does not belong"):
        merge([one, two], tmp_path / "all.jsonl")
    assert not (tmp_path / "all.jsonl").exists()


def test_an_abstention_counts_as_done(tmp_path):
    one = write(tmp_path / "1.jsonl", failure("a"), abstention("b"))
    two = write(tmp_path / "2.jsonl", abstention("a"), record("b"))
    merged = merge([one, two], tmp_path / "all.jsonl")
    found = {line.record.id: line.record.status for line in read_lines(tmp_path / "all.jsonl")}
    assert found == {"a": "abstained", "b": "abstained"}
    assert (merged.records, merged.failed) == (2, 0)


def test_a_record_that_is_nested_too_deeply_is_refused(tmp_path):
    (tmp_path / "1.jsonl").write_text("[" * 100_000 + "\n")
    with pytest.raises(OutputError, match="nested too deeply"):
        merge([tmp_path / "1.jsonl"], tmp_path / "all.jsonl")
    assert not (tmp_path / "all.jsonl").exists()


def test_nothing_is_replaced_unasked(tmp_path):
    one = write(tmp_path / "1.jsonl", record("a"))
    kept = write(tmp_path / "all.jsonl", record("z"))
    with pytest.raises(OutputError, match="exists"):
        merge([one], kept)
    assert ids(kept) == ["z"]
    merge([one], kept, overwrite=True)
    assert ids(kept) == ["a"]
    with pytest.raises(OutputError, match="one of the files"):
        merge([one, kept], kept, overwrite=True)


def test_a_file_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(OutputError, match="cannot read"):
        merge([tmp_path / "gone.jsonl"], tmp_path / "all.jsonl")
    assert not list(tmp_path.iterdir())


def test_counts_of_one_are_singular(tmp_path, caplog):
    one = write(tmp_path / "1.jsonl", record("a"))
    two = write(tmp_path / "2.jsonl", record("a", label="sea"))
    merged = merge([one, two], tmp_path / "all.jsonl", wanted=wanted("z"))
    assert str(merged).splitlines()[0] == "1 record, 1 repeated and left out, 1 missing:"
    assert "different predictions: 1 record;" in caplog.text
    assert "expected images: 1 record: a" in caplog.text


def test_a_name_cannot_break_a_line(tmp_path):
    one = write(tmp_path / "1.jsonl", record("a"))
    merged = merge([one], tmp_path / "all.jsonl", wanted=wanted("a", "b\nc\x1b"))
    assert str(merged).splitlines()[1:] == ["  b\\nc\\x1b"]


def test_merging_copies_lines_unchanged_and_skips_one_that_was_cut_off(tmp_path, caplog):
    one = write(tmp_path / "1.jsonl", record("a"), record("b"))
    before = one.read_bytes()
    write(one, record("a"), record("b"), tail='{"schema":"tnet.pre')
    assert merge([one], tmp_path / "all.jsonl").records == 2
    assert "cut off" in caplog.text
    assert (tmp_path / "all.jsonl").read_bytes() == before


def test_merging_completes_a_last_line_without_its_end(tmp_path):
    one = write(tmp_path / "1.jsonl", tail=record("a").model_dump_json())
    two = write(tmp_path / "2.jsonl", record("b"))
    merge([one, two], tmp_path / "all.jsonl")
    assert ids(tmp_path / "all.jsonl") == ["a", "b"]
