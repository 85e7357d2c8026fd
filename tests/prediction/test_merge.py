import pytest

from tests.prediction.test_jsonl import OTHER, SETTINGS, abstention, failure, ids, record, write
from tnetcli.data.images import Image
from tnetcli.errors import OutputError
from tnetcli.prediction.jsonl import merge, read_lines
from tnetcli.readers.base import ReadOptions


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


def test_a_line_that_was_cut_off_is_left_out(tmp_path, caplog):
    one = write(tmp_path / "1.jsonl", record("a"), tail='{"schema":"tnet.pre')
    assert merge([one], tmp_path / "all.jsonl").records == 1
    assert "cut off" in caplog.text


def test_a_last_line_without_its_end_gets_one(tmp_path):
    one = write(tmp_path / "1.jsonl", tail=record("a").model_dump_json())
    two = write(tmp_path / "2.jsonl", record("b"))
    merge([one, two], tmp_path / "all.jsonl")
    assert ids(tmp_path / "all.jsonl") == ["a", "b"]


def test_an_abstention_counts_as_done(tmp_path):
    one = write(tmp_path / "1.jsonl", failure("a"), abstention("b"))
    two = write(tmp_path / "2.jsonl", abstention("a"), record("b"))
    merged = merge([one, two], tmp_path / "all.jsonl")
    found = {line.record.id: line.record.status for line in read_lines(tmp_path / "all.jsonl")}
    assert found == {"a": "abstained", "b": "abstained"}
    assert (merged.records, merged.failed) == (2, 0)


def test_lines_are_copied_as_they_are(tmp_path):
    one = write(tmp_path / "1.jsonl", record("a"), record("b"))
    merge([one], tmp_path / "all.jsonl")
    assert (tmp_path / "all.jsonl").read_bytes() == one.read_bytes()


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


def test_empty_lines_at_the_end_are_passed_over(tmp_path):
    one = write(tmp_path / "1.jsonl", record("a"), tail="\n\n")
    two = write(tmp_path / "2.jsonl", record("b"))
    merge([one, two], tmp_path / "all.jsonl")
    assert ids(tmp_path / "all.jsonl") == ["a", "b"]


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
