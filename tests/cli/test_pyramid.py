import os

import numpy as np
import pytest
import rasterio

from tests.commands import tnet
from tests.images import area_average, noise, write_geotiff
from tnetcli.geometry import Size, Window
from tnetcli.readers.raster import RasterReader

SIDE = 1024


@pytest.fixture
def flat(tmp_path):
    return write_geotiff(tmp_path / "flat.tif", noise((SIDE, SIDE), 1))


def whole_view(path, side=256):
    with RasterReader(str(path)) as reader:
        return reader.overviews, reader.read(Window(0, 0, SIDE, SIDE), Size(side, side))


def test_overviews_are_written_beside_the_unchanged_image(flat):
    before = flat.read_bytes()
    done = tnet("pyramid", flat)
    assert (done.returncode, done.stdout) == (0, f"{flat}.ovr\n")
    assert flat.read_bytes() == before
    overviews, view = whole_view(flat)
    assert overviews == (2.0, 4.0)
    expected = area_average(noise((SIDE, SIDE), 1), 4)
    assert np.abs(view.values.astype(int) - expected).mean() < 1


def test_overviews_can_be_written_into_the_image(flat):
    assert tnet("pyramid", "--in-place", flat).returncode == 0
    assert not os.path.exists(f"{flat}.ovr")
    assert whole_view(flat)[0] == (2.0, 4.0)


def test_a_cog_can_be_written_instead(flat, tmp_path):
    done = tnet("pyramid", flat, "-o", tmp_path / "new.tif")
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'new.tif'}\n")
    with rasterio.open(tmp_path / "new.tif") as made, rasterio.open(flat) as source:
        assert made.tags(ns="IMAGE_STRUCTURE")["LAYOUT"] == "COG"
        assert (made.crs, made.transform) == (source.crs, source.transform)
        assert np.array_equal(made.read(), source.read())
        assert made.overviews(1) == [2]


@pytest.mark.parametrize("external", [False, True], ids=["internal", "msk"])
def test_the_mask_gets_overviews_too(tmp_path, external):
    mask = np.zeros((SIDE, SIDE), bool)
    mask[:, : SIDE // 2] = True
    path = write_geotiff(
        tmp_path / "a.tif", noise((SIDE, SIDE), 1), mask=mask, external_mask=external
    )
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert tnet("pyramid", path).returncode == 0
    overviews, view = whole_view(path)
    assert len(overviews) == 2
    assert np.array_equal(view.valid, mask[::4, ::4])
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_nodata_does_not_bleed_into_overviews(tmp_path):
    image = noise((SIDE, SIDE), 1, "float32") + 2
    image[:, :, 333:] = -9999
    path = write_geotiff(tmp_path / "a.tif", image, nodata=-9999)
    assert tnet("pyramid", path).returncode == 0
    view = whole_view(path)[1]
    assert view.values[:, view.valid].min() > 0


def test_a_palette_is_not_averaged(tmp_path):
    classes = np.where(np.arange(SIDE) % 2, 1, 9).astype(np.uint8)
    image = np.broadcast_to(classes, (1, SIDE, SIDE))
    colours = {value: (value * 20, 0, 0, 255) for value in range(10)}
    path = write_geotiff(tmp_path / "a.tif", np.ascontiguousarray(image), colormap=colours)
    assert tnet("pyramid", path).returncode == 0
    with rasterio.open(path, overview_level=0) as overview:
        assert set(np.unique(overview.read(1))) <= {1, 9}


@pytest.mark.parametrize("flags", [[], ["--in-place"]])
def test_existing_overviews_are_replaced_only_with_overwrite(flat, flags):
    assert tnet("pyramid", *flags, flat).returncode == 0
    again = tnet("pyramid", *flags, flat)
    assert again.returncode == 7
    assert "--overwrite" in again.stderr
    assert tnet("pyramid", "--overwrite", *flags, flat).returncode == 0
    assert whole_view(flat)[0] == (2.0, 4.0)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["missing.tif"], 3), (["text.tif"], 3), (["flat.tif", "-o", "flat.tif"], 7),
     (["flat.tif", "--in-place", "-o", "b.tif"], 2), (["flat.tif", "-o", "no/folder/b.tif"], 7),
     (["small.tif"], 2), (["photo.png"], 2)],
)  # fmt: skip
def test_an_impossible_request_is_an_error_with_a_hint(flat, tmp_path, arguments, code):
    (tmp_path / "text.tif").write_text("text")
    write_geotiff(tmp_path / "small.tif", noise((64, 64)))
    write_geotiff(tmp_path / "photo.png", noise((600, 600)), driver="PNG", crs=None)
    done = tnet("pyramid", *arguments, cwd=tmp_path)
    assert done.returncode == code
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["error", "hint"]
    assert not list(tmp_path.glob(".tnet-*"))


def test_a_damaged_image_leaves_nothing_behind(tmp_path):
    path = write_geotiff(tmp_path / "a.tif", noise((SIDE, SIDE), 1))
    content = bytearray(path.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 5000] = bytes(5000)
    path.write_bytes(content)
    done = tnet("pyramid", path)
    assert done.returncode == 7
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tif"]


@pytest.mark.parametrize("external", [False, True], ids=["internal", "msk"])
def test_masked_pixels_do_not_bleed_into_overviews(tmp_path, external):
    y, x = np.mgrid[0:SIDE, 0:SIDE]
    disc = (x - 500) ** 2 + (y - 500) ** 2 < 400**2
    disc[::16, ::16] = True
    image = np.where(disc, 200, 0).astype(np.uint8)[None]
    path = write_geotiff(tmp_path / "a.tif", image, mask=disc, external_mask=external)
    assert tnet("pyramid", path).returncode == 0
    overviews, view = whole_view(path)
    assert len(overviews) == 2
    assert set(np.unique(view.values[:, view.valid])) == {200}
    # Single valid pixels outside the disc survive at a quarter of the resolution.
    assert view.valid[::4, ::4].all()


@pytest.mark.parametrize("flags", [[], ["--in-place"], ["-o", "new.tif"]])
def test_blocks_never_written_are_not_filled_with_zeros(tmp_path, flags):
    written = np.zeros((16, 16), bool)
    written[0, 0] = True
    write_geotiff(tmp_path / "a.tif", noise((SIDE, SIDE), 1), sparse=True, written=written)
    done = tnet("pyramid", "a.tif", *flags, cwd=tmp_path)
    assert done.returncode == 3
    assert "nodata" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["a.tif"]


def test_the_output_cannot_be_the_image_by_another_name(flat, tmp_path):
    (tmp_path / "here").symlink_to(tmp_path)
    before = flat.read_bytes()
    done = tnet("pyramid", flat, "-o", tmp_path / "here" / flat.name, "--overwrite")
    assert done.returncode == 7
    assert flat.read_bytes() == before


def test_overviews_of_a_link_go_into_the_file_it_points_to(flat, tmp_path):
    link = tmp_path / "link.tif"
    link.symlink_to(flat)
    assert tnet("pyramid", "--in-place", link).returncode == 0
    assert link.is_symlink()
    assert whole_view(flat)[0] == (2.0, 4.0)


def test_the_output_cannot_be_a_folder(flat, tmp_path):
    done = tnet("pyramid", flat, "-o", tmp_path, "--overwrite")
    assert done.returncode == 7
    assert "not a file" in done.stderr
