import threading

import numpy as np
import pytest
import tifffile
from PIL import Image

from tests.images import noise, write_geotiff
from tests.readers.test_gdal import MRF, relative, vrt
from tests.web import serving
from tnetcli.errors import ImageError
from tnetcli.geometry import Size, Window
from tnetcli.readers.detect import open_image

APERIO = "Aperio Image Library v10\n512x384 |AppMag = 20|MPP = 0.5"


@pytest.fixture
def web(tmp_path):
    (tmp_path / "www").mkdir()
    with serving(tmp_path / "www", tmp_path / "log") as address:
        yield tmp_path / "www", address


def asked(folder):
    return set((folder.parent / "log").read_text().split())


def read(name):
    with open_image(name) as reader:
        return reader.read(Window.whole(reader.size), reader.size), reader.cost


def test_only_the_image_itself_is_fetched(web):
    folder, address = web
    write_geotiff(folder / "a.tif", noise((300, 200)))
    for sidecar in (".ovr", ".msk", ".aux.xml"):
        (folder / f"a.tif{sidecar}").write_text(MRF)
    pixels, _ = read(f"{address}/a.tif?signature=secret")
    assert np.array_equal(pixels.values, noise((300, 200)))
    assert asked(folder) == {"GET", "HEAD", "/a.tif?signature=secret"}


def test_the_bytes_of_a_url_are_those_of_its_blocks(web):
    folder, address = web
    write_geotiff(folder / "a.tif", noise((300, 200)), blocksize=64, overviews=(2,))
    with tifffile.TiffFile(folder / "a.tif") as file:
        full, half = (sum(page.databytecounts) for page in file.pages)
    assert read(f"{address}/a.tif")[1].bytes_read == full
    with open_image(f"{address}/a.tif") as reader:
        reader.read(Window.whole(reader.size), Size(150, 100))
        assert reader.cost.bytes_read == half


def test_the_bytes_of_a_picture_at_a_url_are_those_of_its_file(web):
    folder, address = web
    Image.fromarray(noise((64, 64)).transpose(1, 2, 0)).save(folder / "a.png")
    assert read(f"{address}/a.png")[1].bytes_read == (folder / "a.png").stat().st_size


def test_a_slide_at_a_url_is_refused(web):
    folder, address = web
    values = noise((512, 384)).transpose(1, 2, 0)
    tifffile.imwrite(folder / "a.svs", values, tile=(64, 64), description=APERIO)
    with tifffile.TiffWriter(folder / "b.tif") as file:
        file.write(values, tile=(64, 64))
        file.write(values[::2, ::2], tile=(64, 64))
    for name in ("a.svs", "b.tif"):
        with pytest.raises(ImageError, match="is a slide or a stack") as caught:
            open_image(f"{address}/{name}")
        assert "download it" in caught.value.hint


def test_a_vrt_and_overviews_elsewhere_are_refused_at_a_url(web):
    folder, address = web
    write_geotiff(folder / "b.tif", noise((64, 64)))
    (folder / "a.vrt").write_text(vrt(relative("b.tif")))
    with pytest.raises(ImageError):
        open_image(f"{address}/a.vrt")
    assert "/b.tif" not in asked(folder)


def test_a_local_file_fetches_nothing_while_a_url_is_read(web, monkeypatch):
    folder, address = web
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    write_geotiff(folder / "a.tif", noise((300, 200)))
    local = folder.parent / "local.vrt"
    local.write_text(vrt(f"<SourceFilename>/vsicurl/{address}/b.tif</SourceFilename>"))
    problems = []

    def open_local():
        with pytest.raises(ImageError) as caught:
            open_image(local)
        problems.append(str(caught.value))

    with open_image(f"{address}/a.tif") as reader:
        thread = threading.Thread(target=open_local)
        thread.start()
        thread.join()
        reader.read(Window.whole(reader.size), reader.size)
    assert "outside its folder" in problems[0]
    assert "/b.tif" not in asked(folder)
