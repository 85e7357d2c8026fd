import logging
import os
import pickle
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import rasterio
import rasterio.shutil
import zarr

from tests.commands import ROOT
from tests.images import noise, write_geotiff, write_ome_tiff
from tests.slides import spoil_tile, truncate, write_zarr
from tnetcli.errors import ImageError, OutputError
from tnetcli.geometry import Size, Window
from tnetcli.readers import overviews as flat
from tnetcli.readers.base import ReadOptions
from tnetcli.readers.detect import open_image
from tnetcli.readers.overviews import (
    OverviewReader,
    cache_folder,
    is_own_tiff,
    prepare_cache_folder,
)
from tnetcli.readers.pyramid import BLOCKS
from tnetcli.readers.raster import RasterReader
from tnetcli.testing.reader import area_mean, assert_equal

WHOLE, SMALL = Window(0, 0, 1292, 972), Size(20, 15)


def smooth(bands=3, dtype="uint8", seed=2):
    """Return an image that a copy eight times smaller shows well, of a size it does not divide."""
    return noise((323, 243), bands, dtype, seed).repeat(4, axis=1).repeat(4, axis=2)


SCENE = smooth()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("TNET_CACHE", str(folder))
    monkeypatch.setattr(flat, "MOST_COARSE_PIXELS", 10_000)
    BLOCKS.clear()
    return folder


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return write_geotiff(tmp_path_factory.mktemp("flat") / "a.tif", SCENE)


@pytest.fixture
def path(tmp_path, original):
    return shutil.copy2(original, tmp_path / "a.tif")


def see(path, window=WHOLE, out_size=SMALL, **options):
    with open_image(path, options=ReadOptions(**options)) as reader:
        return reader.read(window, out_size)


def copies(cache):
    return sorted(each for each in cache.rglob("*") if each.is_file())


def warnings(caplog):
    return [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]


def error(pixels, truth, window=WHOLE, out_size=SMALL):
    expected = area_mean(truth, window, out_size)
    return np.abs(pixels.values - expected)[:, pixels.valid].mean()


# Which images are flat


def test_an_image_with_overviews_is_not_flat(tmp_path):
    path = write_geotiff(tmp_path / "b.tif", SCENE, overviews=[2, 4, 8, 16])
    with open_image(path) as reader:
        assert not isinstance(reader, OverviewReader)


def test_an_image_whose_coarsest_overview_is_large_is_flat(tmp_path, cache):
    pixels = see(write_geotiff(tmp_path / "b.tif", SCENE, overviews=[2]))
    assert len(copies(cache)) == 1
    assert error(pixels, SCENE) < 4


def test_a_flat_image_may_be_refused_with_a_way_out(path, cache):
    with pytest.raises(ImageError, match="no overviews") as caught:
        open_image(path, options=ReadOptions(overviews="require"))
    assert f"tnet pyramid {path}" in caught.value.hint
    assert not cache.exists()


def test_opening_decodes_and_writes_nothing(path, cache):
    with open_image(path) as reader:
        assert reader.cost.pixels_decoded == 0
    assert not cache.exists()


# The first coarse view


@pytest.mark.parametrize("out_size", [Size(20, 15), Size(33, 7), Size(80, 60), Size(1, 1)])
def test_the_whole_view_is_the_area_mean(path, out_size):
    pixels = see(path, out_size=out_size)
    assert pixels.valid.all()
    assert error(pixels, SCENE, out_size=out_size) < 2


def test_outside_of_the_image_is_zero_and_invalid(path):
    pixels = see(path, Window(1132, 812, 320, 320), Size(20, 20))
    expected = np.zeros((20, 20), bool)
    expected[:10, :10] = True
    assert np.array_equal(pixels.valid, expected)
    assert not pixels.values[:, ~expected].any()


@pytest.mark.parametrize(
    "info",
    [{"blocksize": 64}, {"blocksize": None}, {"blocksize": None, "compress": None},
     {"blocksize": 128, "interleave": "band"}, {"compress": "jpeg", "photometric": "YCBCR"}],
    ids=["tiles", "strips", "raw strips", "planes", "jpeg"],
)  # fmt: skip
def test_any_layout_is_streamed(tmp_path, info):
    path = write_geotiff(tmp_path / "b.tif", SCENE, **info)
    assert error(see(path), SCENE) < 2


def test_other_readers_are_streamed_too(tmp_path):
    for path in (
        write_ome_tiff(tmp_path / "b.tif", SCENE, ()),
        write_zarr(tmp_path / "d.zarr", SCENE, (), chunk=512),
    ):
        assert error(see(path), SCENE) < 2


def test_nodata_does_not_leak_into_the_view(tmp_path):
    truth = np.full((1, 480, 640), 100, np.int16)
    truth[:, ::3, ::2] = -9999
    truth[:, :160] = -9999
    path = write_geotiff(tmp_path / "b.tif", truth, nodata=-9999)
    pixels = see(path, Window(0, 0, 640, 480), Size(20, 15))
    assert np.array_equal(pixels.valid, [[False] * 20] * 5 + [[True] * 20] * 10)
    assert (pixels.values[:, pixels.valid] == 100).all()


def test_the_bands_chosen_are_streamed_in_their_order(path):
    expected = see(path).values[[2, 0]]
    assert np.array_equal(see(path, bands=("blue", "1")).values, expected)


def test_one_warning_names_the_remedy(path, caplog):
    with open_image(path) as reader:
        for _ in range(3):
            reader.read(WHOLE, SMALL)
    assert len(warnings(caplog)) == 1
    assert f"tnet pyramid {path}" in warnings(caplog)[0]


def test_the_first_coarse_view_decodes_everything_once(path):
    with open_image(path) as reader:
        assert reader.estimate(WHOLE, SMALL) == reader.size.pixels
        reader.read(WHOLE, SMALL)
        assert 1 <= reader.cost.pixels_decoded / reader.size.pixels < 1.2


def test_a_fine_view_comes_straight_from_the_file(path, cache):
    window, out_size = Window(100, 50, 70, 70), Size(10, 10)
    assert error(see(path, window, out_size), SCENE, window, out_size) < 0.3
    assert not cache.exists()


# The second coarse view


def test_the_second_coarse_view_decodes_almost_nothing(path):
    first = see(path)
    BLOCKS.clear()
    with open_image(path) as reader:
        assert reader.estimate(WHOLE, SMALL) < reader.size.pixels / 50
        assert_equal(reader.read(WHOLE, SMALL), first)
        assert reader.cost.pixels_decoded < reader.size.pixels / 50


def test_a_changed_file_gets_a_new_copy(path, cache):
    see(path)
    other = smooth(seed=9)
    write_geotiff(path, other)
    assert error(see(path), other) < 2
    assert len(copies(cache)) == 2


def test_a_file_that_changes_while_open_is_an_error(path):
    with open_image(path) as reader:
        reader.read(WHOLE, SMALL)
        os.utime(path, (1, 1))
        with pytest.raises(ImageError, match="changed while it was open"):
            reader.read(WHOLE, SMALL)


@pytest.mark.parametrize("options", [{"bands": ("1",)}, {"nodata": 7.0}])
def test_another_way_of_reading_has_a_copy_of_its_own(path, cache, options):
    see(path)
    see(path, **options)
    assert len(copies(cache)) == 2


# Faults


def empty(copy):
    copy.write_bytes(b"")


def overwrite(copy):
    copy.write_bytes(b"no image at all")


def spoil(copy):
    with rasterio.open(copy) as dataset:
        levels = len(dataset.overviews(1))
    for page in range(1 + levels):
        spoil_tile(copy, 0, page=page)


def halve(copy):
    truncate(copy, 0.5)


def describe_another(copy):
    """Put text there that makes GDAL read another file."""
    with rasterio.open(copy) as dataset:
        size = f'rasterXSize="{dataset.width}" rasterYSize="{dataset.height}"'
    copy.write_text(f"<VRTDataset {size}/>")


def link(copy):
    copy.rename(copy.with_name("elsewhere.tif"))
    copy.symlink_to("elsewhere.tif")


def share(copy):
    with rasterio.open(copy, "r+") as dataset:
        dataset.write(np.zeros_like(dataset.read()))
    copy.chmod(0o666)


def shrink(copy):
    write_geotiff(copy, np.zeros((3, 50, 50), np.uint8))
    copy.chmod(0o600)


def take_bands(copy):
    write_geotiff(copy, np.zeros((1, 122, 162), np.uint8))
    copy.chmod(0o600)


def deepen(copy):
    write_geotiff(copy, np.zeros((3, 122, 162), np.uint16))
    copy.chmod(0o600)


REPLACED = [describe_another, link, share, shrink, take_bands, deepen]


@pytest.mark.parametrize("harm", [empty, overwrite, halve, spoil, *REPLACED])
def test_a_damaged_copy_is_made_anew(path, cache, harm):
    first = see(path)
    harm(copies(cache)[0])
    BLOCKS.clear()
    assert_equal(see(path), first)


def test_a_copy_is_for_the_user_alone(path, cache):
    see(path)
    (copy,) = copies(cache)
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    assert stat.S_IMODE(copy.parent.stat().st_mode) == 0o700


def test_a_cache_that_cannot_be_written_is_an_output_error(path, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TNET_CACHE", str(tmp_path / "file"))
    with pytest.raises(OutputError, match="cannot write to the cache") as caught:
        see(path)
    assert "TNET_CACHE" in caught.value.hint
    assert caught.value.exit_code == 7


def test_a_full_disk_is_an_output_error_that_leaves_nothing(path, cache, monkeypatch):
    def fail(self, place):
        place.write_bytes(b"half of it")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(OverviewReader, "_write", fail)
    with pytest.raises(OutputError, match="No space left") as caught:
        see(path)
    assert caught.value.hint
    assert list((cache / "overviews").iterdir()) == []


def test_a_damaged_image_is_an_image_error_that_leaves_nothing(path, cache):
    spoil_tile(path, 30)
    with pytest.raises(ImageError, match="cannot read") as caught:
        see(path)
    assert caught.value.hint
    assert list((cache / "overviews").iterdir()) == []


def test_an_interruption_leaves_nothing(path, cache, monkeypatch):
    def interrupt(self, part):
        raise KeyboardInterrupt

    monkeypatch.setattr(OverviewReader, "_read_part", interrupt)
    with pytest.raises(KeyboardInterrupt):
        see(path)
    assert list((cache / "overviews").iterdir()) == []


@pytest.mark.parametrize("seen", [False, True], ids=["before a view", "after a view"])
def test_reading_after_close_is_a_callers_mistake(path, seen):
    see(path)
    reader = open_image(path)
    if seen:
        reader.read(WHOLE, SMALL)
    reader.close()
    with pytest.raises(ValueError, match="closed"):
        reader.read(WHOLE, SMALL)


# Threads, processes, memory


def test_eight_threads_at_once_make_one_copy(path, cache, caplog):
    with open_image(path) as reader, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: reader.read(WHOLE, SMALL), range(8)))
    assert len(copies(cache)) == 1
    assert len(warnings(caplog)) == 1
    for pixels in found:
        assert_equal(pixels, found[0])


def test_a_copy_that_another_process_makes_at_the_same_time_does_no_harm(path):
    with open_image(path) as one, open_image(path) as other:
        first = one.read(WHOLE, SMALL)
        other._make(other._place())  # as if it had checked a moment earlier
        assert_equal(
            one.read(Window(0, 0, 646, 486), SMALL), other.read(Window(0, 0, 646, 486), SMALL)
        )
        assert_equal(one.read(WHOLE, SMALL), first)


@pytest.mark.parametrize("seen", [False, True], ids=["before a view", "after a view"])
def test_a_pickled_reader_reads_the_same_pixels(path, seen):
    with open_image(path) as reader:
        if seen:
            reader.read(WHOLE, SMALL)
        with pickle.loads(pickle.dumps(reader)) as other:
            for window, out_size in ((WHOLE, SMALL), (Window(5, 5, 50, 50), Size(50, 50))):
                assert_equal(other.read(window, out_size), reader.read(window, out_size))


STREAMING = """
import sys
from tests.commands import peak_memory
from tnetcli.geometry import Size, Window
from tnetcli.readers import overviews as flat
from tnetcli.readers.detect import open_image
flat.MOST_COARSE_PIXELS = 10_000
with open_image(sys.argv[1]) as reader:
    assert isinstance(reader, flat.OverviewReader)
    assert reader.read(Window.whole(reader.size), Size(20, 20)).valid.all()
print(int(peak_memory() / 1e6))
"""


def peak(path, side):
    """Return the megabytes that seeing a flat image of two 16-bit bands takes at most."""
    profile = {"driver": "GTiff", "width": side, "height": side, "count": 2, "dtype": "uint16"}
    tiles = {"tiled": True, "blockxsize": 256, "blockysize": 256, "compress": "lzw"}
    row = np.ones((2, 256, side), np.uint16)
    with rasterio.open(path, "w", **profile, **tiles) as dataset:
        for top in range(0, side, 256):
            dataset.write(row, window=rasterio.windows.Window(0, top, side, 256))
    done = subprocess.run(
        [sys.executable, "-c", STREAMING, str(path)],
        capture_output=True, text=True, check=True, cwd=ROOT,
    )  # fmt: skip
    return int(done.stdout)


def test_memory_does_not_grow_with_the_image(tmp_path):
    small, large = (peak(tmp_path / f"{side}.tif", side) for side in (2048, 8192))
    # The larger one holds 250 MB more, and twice that as numbers to average.
    assert large - small < 200


def test_a_mask_that_changes_beside_the_image_makes_a_new_copy(tmp_path):
    path = write_geotiff(tmp_path / "b.tif", SCENE)
    mask = np.zeros(SCENE.shape[1:], bool)
    for valid in (True, False):
        mask[:] = valid
        with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=False), rasterio.open(path, "r+") as dataset:
            dataset.write_mask(mask)
        os.utime(path, ns=(1, 1))
        assert see(path).valid.any() == valid


def test_a_source_of_a_vrt_that_changes_makes_a_new_copy(tmp_path):
    for value in (10, 200):
        source = write_geotiff(tmp_path / "source.tif", np.full_like(SCENE, value))
        vrt = tmp_path / "b.vrt"
        if not vrt.exists():
            rasterio.shutil.copy(source, vrt, driver="VRT")
        assert (see(vrt).values == value).all()


def test_half_floats_are_streamed(tmp_path):
    truth = smooth(1, "float32").astype(np.float16)
    pixels = see(write_zarr(tmp_path / "b.zarr", truth, (), chunk=256))
    assert pixels.values.dtype == np.float16
    assert error(pixels, truth.astype(np.float64)) < 0.02


def test_chunks_rewritten_deep_in_a_folder_make_a_new_copy(tmp_path):
    path = write_zarr(tmp_path / "b.zarr", np.full_like(SCENE, 10), (), chunk=256)
    assert (see(path).values == 10).all()
    array = zarr.open_array(str(path / "0"), mode="r+")
    array[...] = 200
    BLOCKS.clear()
    assert (see(path).values == 200).all()


# The cache folder


def test_the_cache_folder_is_tnet_cache_else_xdg_else_below_home(monkeypatch):
    monkeypatch.delenv("TNET_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/user")
    assert cache_folder() == Path("/home/user/.cache/tnet")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/tnet")
    monkeypatch.setenv("TNET_CACHE", "/mine")
    assert cache_folder() == Path("/mine")


def test_a_user_without_a_home_gets_a_hint(monkeypatch):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("TNET_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(OutputError, match="no home folder") as caught:
        cache_folder()
    assert "TNET_CACHE" in caught.value.hint


@pytest.fixture
def chosen(tmp_path, monkeypatch):
    folder = tmp_path / "deep" / "cache"
    monkeypatch.setenv("TNET_CACHE", str(folder))
    return folder


def test_folders_are_private_whatever_the_umask(chosen):
    before = os.umask(0)
    try:
        prepare_cache_folder()
    finally:
        os.umask(before)
    made = (chosen.parent, chosen, chosen / "overviews")
    assert {stat.S_IMODE(each.stat().st_mode) for each in made} == {0o700}


@pytest.mark.parametrize("bits", [0o770, 0o1777])
@pytest.mark.parametrize("name", [".", "overviews"])
def test_a_folder_that_others_may_write_to_is_an_error(chosen, name, bits):
    (chosen / "overviews").mkdir(parents=True)
    (chosen / name).chmod(bits)
    with pytest.raises(OutputError, match="other users may write") as caught:
        prepare_cache_folder()
    assert "TNET_CACHE" in caught.value.hint
    assert caught.value.exit_code == 7


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_folder_of_another_user_is_an_error(chosen):
    (chosen / "overviews").mkdir(parents=True)
    os.chown(chosen / "overviews", 12345, -1)
    with pytest.raises(OutputError, match="other users may write"):
        prepare_cache_folder()


def test_only_a_regular_tiff_of_the_user_is_used(tmp_path):
    path = tmp_path / "a.tif"
    path.write_bytes(b"II*\0 and so on")
    assert is_own_tiff(path)
    (tmp_path / "link.tif").symlink_to(path)
    os.mkfifo(tmp_path / "pipe.tif")
    (tmp_path / "vrt.tif").write_text("<VRTDataset/>")
    for name in ("link.tif", "pipe.tif", "vrt.tif", "none.tif", "."):
        assert not is_own_tiff(tmp_path / name)
    path.chmod(0o620)
    assert not is_own_tiff(path)


def test_a_link_shares_the_copy_of_its_file(path, tmp_path, cache):
    see(path)
    (tmp_path / "link.tif").symlink_to(path)
    see(tmp_path / "link.tif")
    assert len(copies(cache)) == 1


def test_info_of_an_image_without_overviews_is_that_of_the_file(path):
    with open_image(path) as reader, RasterReader(str(path)) as inner:
        assert isinstance(reader, OverviewReader)
        assert (reader.name, reader.path, reader.size) == ("raster", str(path), Size(1292, 972))
        assert (reader.bands, reader.dtype) == (inner.bands, inner.dtype)
        assert (reader.overviews, reader.info) == ((), inner.info)
        assert reader.georeference == inner.georeference


def test_a_coarse_view_of_a_part_is_the_area_mean_also_of_16_bits(path, tmp_path):
    window, size = Window(100.5, 50.25, 800, 600), Size(21, 17)
    assert error(see(path, window, size), SCENE, window, size) < 2
    truth = smooth(4, "uint16")
    pixels = see(write_geotiff(tmp_path / "b.tif", truth))
    assert pixels.values.dtype == np.uint16
    assert error(pixels, truth) < 2 * 20_000 / 256


def test_nan_does_not_leak_into_the_view(tmp_path):
    truth = noise((640, 480), 1, "float32")
    truth[0, :, :320] = np.nan
    pixels = see(write_geotiff(tmp_path / "b.tif", truth), Window(0, 0, 640, 480), Size(20, 15))
    assert np.array_equal(pixels.valid, [[False] * 10 + [True] * 10] * 15)
    assert np.isfinite(pixels.values).all()


def test_only_the_copy_is_left_and_nothing_beside_the_image(path, cache, tmp_path):
    before = sorted(tmp_path.iterdir())
    see(path)
    assert sorted(tmp_path.iterdir()) == sorted([*before, cache])
    assert [each.suffix for each in (cache / "overviews").iterdir()] == [".tif"]


def test_a_fine_view_needs_no_cache(path, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TNET_CACHE", str(tmp_path / "file"))
    assert see(path, Window(0, 0, 50, 50), Size(50, 50)).valid.all()


def test_a_damaged_image_fails_again_and_other_windows_are_read(path):
    spoil_tile(path, 30)
    with open_image(path) as reader:
        for _ in range(2):
            with pytest.raises(ImageError):
                reader.read(WHOLE, SMALL)
        assert reader.read(Window(0, 0, 50, 50), Size(50, 50)).valid.all()
