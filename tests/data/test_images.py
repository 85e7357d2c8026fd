import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.commands import tnet
from tests.images import noise, write_geotiff
from tests.slides import copy_of_real, real
from tnetcli.data.images import find_images
from tnetcli.errors import ImageError, UsageError
from tnetcli.readers.detect import detect, series_of

AS_OTHER_USER = """
import os, sys
from tnetcli.data.images import find_images
from tnetcli.errors import TnetError
from tnetcli.readers import raster
from tnetcli.readers.detect import open_image
os.setuid(65534)
for image in find_images(sys.argv[1:], recursive=True):
    try:
        open_image(image).close()
        print(os.path.basename(image), "ok")
    except TnetError:
        print(os.path.basename(image), "failed")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("argument", ["closed", "."])
def test_a_folder_that_may_not_be_listed_does_not_end_the_batch(argument):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        write_geotiff(folder / "a.tif", noise((64, 64)))
        (folder / "closed").mkdir(mode=0o700)
        done = subprocess.run(
            [sys.executable, "-c", AS_OTHER_USER, str(folder / argument), str(folder / "a.tif")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["a.tif ok", "closed failed"]


def found_in(folder, **options):
    return [os.path.relpath(path, folder) for path in find_images([str(folder)], **options)]


def test_a_folder_without_images_is_warned_of_and_alone_refused(tmp_path, caplog):
    (tmp_path / "empty" / "deep").mkdir(parents=True)
    image = write_geotiff(tmp_path / "a.tif", noise((64, 64)))
    (tmp_path / "full").mkdir()
    write_geotiff(tmp_path / "full" / "b.tif", noise((64, 64)))
    arguments = [str(tmp_path / "empty"), str(image), str(tmp_path / "full")]
    assert len(find_images(arguments)) == 2
    (warning,) = caplog.messages
    assert str(tmp_path / "empty") in warning
    assert "--recursive" in warning
    with pytest.raises(UsageError, match="no images found"):
        find_images(arguments[:1], recursive=True)
    assert "--recursive" not in caplog.messages[-1]


@pytest.mark.parametrize("folder", ["dicom_camelyon", "dicom_panimg/full_no_bot"])
def test_a_folder_of_one_slide_in_dicom_files_is_an_image(folder):
    path = str(real(f"wsi/{folder}"))
    assert find_images([path]) == [path]


def test_levels_and_an_index_of_a_slide_do_not_make_it_two(tmp_path):
    for name in ("boxes_0.dcm", "boxes_1.dcm"):
        copy_of_real(f"wsi/synthetic/{name}", tmp_path)
    (tmp_path / "DICOMDIR").write_bytes(bytes(128) + b"DICM")
    (tmp_path / "notes.txt").write_text("a text")
    assert found_in(tmp_path) == ["."]
    assert detect(str(tmp_path)) == "slide"


def test_an_image_beside_a_slide_in_dicom_files_is_not_passed_over(tmp_path):
    for name in ("boxes_0.dcm", "boxes_1.dcm"):
        copy_of_real(f"wsi/synthetic/{name}", tmp_path)
    write_geotiff(tmp_path / "a.tif", noise((64, 64)))
    (tmp_path / "broken.dcm").write_text("no image")
    assert found_in(tmp_path) == ["a.tif", "boxes_0.dcm", "broken.dcm"]  # boxes_1 is its level
    with pytest.raises(ImageError, match="several images"):
        detect(str(tmp_path))


def test_slides_in_one_folder_of_dicom_files_are_an_image_each(tmp_path):
    (tmp_path / "slides").mkdir()
    for name in ("synthetic/boxes_0.dcm", "synthetic/boxes_1.dcm",
                 "dicom_camelyon/camelyon_multiframe_jpeg.dcm"):  # fmt: skip
        copy_of_real(f"wsi/{name}", tmp_path / "slides")
    expected = ["slides/boxes_0.dcm", "slides/camelyon_multiframe_jpeg.dcm"]
    assert sorted(found_in(tmp_path, recursive=True)) == expected


@pytest.mark.parametrize(
    "name", ["synthetic/boxes_1.dcm", "dicom_camelyon/camelyon_multiframe_jpeg.dcm",
             "dicom_panimg/sparse_no_bot/sparse_no_bot.dcm"],
)  # fmt: skip
def test_the_series_of_a_file_is_what_openslide_says(name):
    openslide = pytest.importorskip("openslide")
    path = str(real(f"wsi/{name}"))
    assert series_of(path) == openslide.OpenSlide(path).properties["dicom.SeriesInstanceUID"]


@pytest.mark.parametrize(("options", "content"), [([], "a.tif\0b.tif"), (["-0"], "a.tif\nb.tif\n")])
def test_a_list_that_is_separated_otherwise_is_said_to_be_so(tmp_path, options, content):
    done = tnet("info", "-", *options, stdin=content, cwd=tmp_path)
    assert done.returncode == 2
    assert "-0" in done.stderr
    assert len(done.stderr.splitlines()) == 2


@pytest.mark.parametrize(
    "command", [["info", "-0", "a.tif"], ["info", "-0", "--manifest", "a.csv"]]
)
def test_an_option_that_could_do_nothing_is_refused(tmp_path, command):
    done = tnet(*command, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: -0 is for")


def test_an_option_that_the_environment_sets_for_all_commands_is_no_mistake(tmp_path):
    write_geotiff(tmp_path / "a.tif", noise((64, 64)))
    done = tnet("info", "a.tif", cwd=tmp_path, TNET_INFO_NULL="1")
    assert done.returncode == 0, done.stderr


def test_a_name_with_a_line_end_is_one_name(tmp_path):
    write_geotiff(tmp_path / "a\nb.tif", noise((64, 64)))
    for content in ("a\nb.tif", "a\nb.tif\0"):
        assert tnet("info", "-", "-0", stdin=content, cwd=tmp_path).returncode == 0
