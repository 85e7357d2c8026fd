import gzip
import os

import pytest

from tnetcli.errors import OutputError
from tnetcli.files import write_text


def test_pieces_become_one_file_of_utf_8(tmp_path):
    write_text(tmp_path / "a.geojson", iter(["Größe ", "", "ok\n"]))
    assert (tmp_path / "a.geojson").read_bytes() == "Größe ok\n".encode()
    assert os.listdir(tmp_path) == ["a.geojson"]


def test_a_name_that_ends_in_gz_is_compressed_the_same_every_time(tmp_path):
    for name in ("a.geojson.gz", "b.GZ"):
        write_text(tmp_path / name, (f"{number}\n" for number in range(100_000)))
    content = (tmp_path / "a.geojson.gz").read_bytes()
    assert content == (tmp_path / "b.GZ").read_bytes()
    assert gzip.decompress(content).decode() == "".join(f"{n}\n" for n in range(100_000))


def test_what_exists_is_refused_before_any_work_and_kept(tmp_path):
    (tmp_path / "a").write_text("mine")

    def pieces():
        raise AssertionError("asked for")
        yield ""

    with pytest.raises(OutputError, match="exists") as caught:
        write_text(tmp_path / "a", pieces())
    assert caught.value.exit_code == 7
    assert "--overwrite" in caught.value.hint
    assert (tmp_path / "a").read_text() == "mine"


def test_what_appears_meanwhile_is_kept_too(tmp_path):
    def pieces():
        yield "ours"
        (tmp_path / "a").write_text("theirs")

    with pytest.raises(OutputError, match="exists"):
        write_text(tmp_path / "a", pieces())
    assert (tmp_path / "a").read_text() == "theirs"
    assert os.listdir(tmp_path) == ["a"]


def test_it_is_replaced_only_when_all_is_written(tmp_path):
    (tmp_path / "a").write_text("old")

    def pieces():
        yield "new"
        assert (tmp_path / "a").read_text() == "old"

    write_text(tmp_path / "a", pieces(), overwrite=True)
    assert (tmp_path / "a").read_text() == "new"


@pytest.mark.parametrize("name", ["a.geojson", "a.geojson.gz"])
def test_when_making_the_pieces_fails_nothing_is_left(tmp_path, name):
    def pieces():
        yield "x" * 1_000_000
        raise OSError("the disk of the images is gone")

    with pytest.raises(OutputError, match="the disk of the images is gone"):
        write_text(tmp_path / name, pieces())
    assert os.listdir(tmp_path) == []


def test_what_a_link_leads_to_is_replaced_and_not_the_link(tmp_path):
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_text(tmp_path / "link", ["new"], overwrite=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


@pytest.mark.parametrize("name", ["no/such/folder/a", "", "x" * 300])
def test_where_no_file_can_be_is_told(tmp_path, name):
    with pytest.raises(OutputError) as caught:
        write_text(tmp_path / name, ["text"])
    assert caught.value.hint


def test_a_full_disk_is_told(tmp_path):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: os.write(os.open("/dev/full", os.O_WRONLY), b"x"))
        with pytest.raises(OutputError, match="No space left"):
            write_text(tmp_path / "a", ["text"])
    assert os.listdir(tmp_path) == []
