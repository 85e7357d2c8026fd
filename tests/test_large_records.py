import json
import tracemalloc

import pytest

from tests.exporters.records import record, window
from tnetcli import large_records
from tnetcli.errors import OutputError
from tnetcli.large_records import read_apart
from tnetcli.prediction import Prediction

SHORT = record(window(), image="short.tif")
LONG = record(
    *(
        window(f"root/{n}-0", (n, 0.25, n + 1, 9), 1 / (n + 1), steps=(0.5, 0.25, 0.25)[: n % 4])
        for n in range(300)
    ),
    image="long.tif",
    settings={"windows": [1, {"windows": "windows"}], "item": None},
    microns_per_pixel=(0.25, 0.5),
    probabilities={"windows": 0.25, "größe.item": 0.75},
)


@pytest.fixture(autouse=True)
def _few_bytes_are_many(monkeypatch):
    monkeypatch.setattr(large_records, "LONG", 2000)
    monkeypatch.setattr(large_records, "PIECE", 64)


def put(path, *records, end="\n"):
    path.write_text("\n".join(each.to_json() for each in records) + end, encoding="utf-8")
    return path


def test_records_of_any_length_are_read_in_order(tmp_path):
    path = put(tmp_path / "a.jsonl", SHORT, LONG, SHORT, LONG)
    found = list(read_apart(path))
    assert [each.image for each, _ in found] == ["short.tif", "long.tif"] * 2
    for (header, windows), whole in zip(found, (SHORT, LONG) * 2, strict=True):
        data = json.loads(header.to_json()) | {"windows": [0]}
        assert data == json.loads(whole.to_json()) | {"windows": [0]}
        assert tuple(windows) == whole.windows
        assert tuple(windows) == whole.windows  # and again
    assert found[1][0].windows == ()


def test_a_record_is_the_same_whichever_way_it_is_read(tmp_path, monkeypatch):
    path = put(tmp_path / "a.jsonl", LONG)
    ((apart, windows),) = read_apart(path)
    monkeypatch.setattr(large_records, "LONG", 1 << 23)
    ((whole, _),) = read_apart(path)
    assert whole == LONG == Prediction.from_data(json.loads(LONG.to_json()))
    assert tuple(windows) == whole.windows
    assert apart.probabilities == whole.probabilities


@pytest.mark.parametrize("last", [SHORT, LONG], ids=["short", "long"])
def test_a_last_line_that_was_cut_off_is_left_out_aloud(last, tmp_path, caplog):
    path = put(tmp_path / "a.jsonl", SHORT, last, end="")
    path.write_bytes(path.read_bytes()[:-30])
    assert [each.image for each, _ in read_apart(path)] == ["short.tif"]
    assert "line 2 was cut off" in caplog.text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x" * 5000 + "\n", "line 1: not JSON"),
        ("[" * 5000 + "\n", "line 1: not JSON"),
        ('{"schema": "other", "pad": "' + "x" * 5000 + '"}\n', "line 1: not a tnet.prediction/1"),
        ("hello\n", "line 1: not JSON"),
    ],
)
def test_what_is_no_prediction_is_refused(text, says, tmp_path):
    (tmp_path / "a.jsonl").write_text(text)
    with pytest.raises(OutputError, match=says):
        list(read_apart(tmp_path / "a.jsonl"))


DEEP = "[" * 3000 + "]" * 3000
SPOILT = {
    "nested": (f'"settings": {{"a": {DEEP}}}', "nested too deeply"),
    "nested window": (f'"windows": [{DEEP}]', "nested too deeply"),
    "integer": (f'"width": {"1" * 500}', "integer overflow"),
    "number": ('"probability": 1e400', "overflow"),
    "text": (f'"id": "{"x" * 3000}"', "a value has more than"),
    "list": (f'"id": [{"1, " * 3000} 1]', "beside its windows"),
    "window": (f'"windows": [[{"1, " * 3000} 1]]', "a window or a value has more than"),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_long_record_that_would_fill_the_memory_is_refused(name, tmp_path, monkeypatch):
    monkeypatch.setattr(large_records, "PIECE_BYTES", 500)
    monkeypatch.setattr(large_records, "MOST_WITHIN", 2000)
    monkeypatch.setattr(large_records, "MOST_HELD", 20_000)
    spoilt, said = SPOILT[name]
    (tmp_path / "a.jsonl").write_text("{" + spoilt + ", " + LONG.to_json()[1:] + "\n")
    with pytest.raises(OutputError, match=said):
        list(read_apart(tmp_path / "a.jsonl"))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, '{"schema": 1e400}'])
def test_a_short_record_that_cannot_be_parsed_is_refused(text, tmp_path, monkeypatch):
    monkeypatch.setattr(large_records, "LONG", 1 << 23)
    (tmp_path / "a.jsonl").write_text(text + "\n")
    with pytest.raises(OutputError, match="line 1: not JSON: "):
        list(read_apart(tmp_path / "a.jsonl"))


def test_a_window_that_is_wrong_is_named(tmp_path):
    text = LONG.to_json().replace('"path": "root/7-0", ', "", 1)
    (tmp_path / "a.jsonl").write_text(text + "\n")
    ((_, windows),) = read_apart(tmp_path / "a.jsonl")
    with pytest.raises(OutputError, match="window 8 is wrong"):
        list(windows)


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(OutputError, match="No such file"):
        list(read_apart(tmp_path / "a.jsonl"))


def test_memory_does_not_follow_the_windows(tmp_path):
    def peak(count):
        windows = (window(f"root/{n}-0", (n, 0, n + 1, 9)) for n in range(count))
        path = put(tmp_path / f"{count}.jsonl", record(*windows))
        tracemalloc.start()
        ((_, found),) = read_apart(path)
        assert sum(1 for _ in found) == count
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    peak(100)
    assert peak(6000) < 1.2 * peak(1500) + 50_000


@pytest.mark.parametrize("last", [SHORT, LONG], ids=["short", "long"])
def test_empty_lines_at_the_end_are_passed_over_and_others_refused(last, tmp_path):
    path = put(tmp_path / "a.jsonl", SHORT, last)
    lines = path.read_bytes()
    path.write_bytes(lines + b"\n \r\n")
    assert [each.image for each, _ in read_apart(path)] == [SHORT.image, last.image]
    path.write_bytes(lines + b"\n" + lines)
    with pytest.raises(OutputError, match="line 3: empty"):
        list(read_apart(path))
