"""Companions of slides, checked before OpenSlide opens them."""

import os

import pytest

from tests.slides import copy_of_real
from tnetcli.errors import ImageError
from tnetcli.readers.slide import SlideReader, check_slide_files

SLIDEDAT = """\ufeff[GENERAL]
SLIDE_ID=A
[HIERARCHICAL]
INDEXFILE={index}
[DATAFILE]
FILE_COUNT={count}
FILE_0={data}
"""
HAMAMATSU = """[{kind} Microscope Specimen]
NoLayers=1
NoJpegColumns={columns}
NoJpegRows={rows}
ImageFile={image}
ImageFile(1,0)=b.jpg
MapFile=map.jpg
"""


@pytest.fixture
def mirax(tmp_path):
    """Return the path of a slide, and a function that writes its index."""
    path, folder = tmp_path / "a.mrxs", tmp_path / "a"
    path.write_bytes(b"\xff\xd8\xff")
    folder.mkdir()

    def write(index="Index.dat", data="Data0000.dat", count="1"):
        text = SLIDEDAT.format(index=index, data=data, count=count).replace("\n", "\r\n")
        (folder / "Slidedat.ini").write_bytes(text.encode())
        return str(path)

    return write


def test_companions_in_the_folder_pass(mirax, tmp_path):
    (tmp_path / "a" / "Index.dat").write_bytes(b"")
    (tmp_path / "a" / "Other.dat").write_bytes(b"")
    (tmp_path / "a" / "Data0000.dat").symlink_to("Other.dat")
    check_slide_files(mirax())


@pytest.mark.parametrize("key", ["index", "data"])
@pytest.mark.parametrize("name", ["../x.dat", "/dev/zero", "..", "b/x.dat", "..\\x.dat"])
def test_a_companion_elsewhere_is_refused(mirax, key, name):
    with pytest.raises(ImageError, match="outside its folder") as caught:
        SlideReader(mirax(**{key: name}))
    assert f"`{name}`" in str(caught.value)
    assert caught.value.hint


@pytest.mark.parametrize("name", ["Slidedat.ini", "Index.dat", "Data0000.dat"])
def test_a_companion_that_is_a_pipe_is_refused_without_waiting(mirax, tmp_path, name):
    path = mirax()
    (tmp_path / "a" / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / "a" / name)
    with pytest.raises(ImageError, match=f"`{name}`.*is a named pipe"):
        SlideReader(path)


@pytest.mark.parametrize("name", ["Slidedat.ini", "Index.dat"])
def test_a_link_out_of_the_folder_is_refused(mirax, tmp_path, name):
    path, place = mirax(), tmp_path / "a" / name
    (tmp_path / "elsewhere").write_text(SLIDEDAT.format(index="x", data="y", count=1))
    place.unlink(missing_ok=True)
    place.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ImageError, match=f"link `{name}` to a file outside"):
        SlideReader(path)


def test_more_data_files_than_named_are_refused(mirax):
    with pytest.raises(ImageError, match="declares 2,000,000,000 files, but names 2"):
        SlideReader(mirax(count="2000000000"))


@pytest.mark.parametrize("kind", ["Virtual", "Uncompressed Virtual"])
def test_the_files_of_hamamatsu_are_checked(tmp_path, kind):
    path = tmp_path / "a.vms"
    path.write_text(HAMAMATSU.format(kind=kind, columns=2, rows=1, image="a.jpg"))
    check_slide_files(str(path))
    os.mkfifo(tmp_path / "a.jpg")
    with pytest.raises(ImageError, match=r"`a.jpg`.*is a named pipe"):
        SlideReader(str(path))
    path.write_text(HAMAMATSU.format(kind=kind, columns=2, rows=1, image="../a.jpg"))
    with pytest.raises(ImageError, match=r"`../a.jpg`"):
        SlideReader(str(path))
    path.write_text(HAMAMATSU.format(kind=kind, columns=9999, rows=9999, image="b.jpg"))
    with pytest.raises(ImageError, match="declares 99,980,001 files"):
        SlideReader(str(path))


def test_a_pipe_beside_a_dicom_slide_is_refused_without_waiting(tmp_path):
    path = copy_of_real("wsi/dicom_panimg/full_no_bot/full_no_bot.dcm", tmp_path)
    check_slide_files(str(path))
    os.mkfifo(tmp_path / "b.dcm")
    with pytest.raises(ImageError, match=r"`b.dcm`.*is a named pipe"):
        SlideReader(str(path))


def test_a_pipe_in_place_of_an_overview_is_refused_without_waiting(tmp_path):
    (tmp_path / "a.tif").write_bytes(b"II*\0")
    os.mkfifo(tmp_path / "a.Full")
    with pytest.raises(ImageError, match=r"`a.Full`.*is a named pipe"):
        SlideReader(str(tmp_path / "a.tif"))


def test_a_pipe_is_no_slide(tmp_path):
    os.mkfifo(tmp_path / "a.svs")
    with pytest.raises(ImageError, match="is a named pipe"):
        SlideReader(str(tmp_path / "a.svs"))
