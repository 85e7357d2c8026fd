import os

import numpy as np
import pytest
import rasterio
import tifffile
from PIL import Image

from tests.exporters.records import record, replace
from tests.images import noise, write_geotiff
from tests.slides import real
from tnetcli.errors import ImageError
from tnetcli.exporters import imagery
from tnetcli.exporters.imagery import ImageOptions, open_imagery
from tnetcli.prediction.record import Prediction
from tnetcli.readers.base import ReadOptions
from tnetcli.readers.detect import open_image
from tnetcli.readers.pyramid import fingerprint


def predicted(path, **options):
    """Return a record of an image without a prediction."""
    read = ReadOptions(**options)
    with open_image(path, options=read) as reader:
        size, name = reader.size, reader.name
    return record(
        image=str(path),
        width=size.width,
        height=size.height,
        reader=name,
        config={"reading": read.model_dump(mode="json", exclude_defaults=True)},
        fingerprint=fingerprint(str(path)),
    )


def opened(prediction, **options):
    return open_imagery(prediction, ImageOptions(**options))


def shown(prediction, box=None, size=None, **options):
    box = box or (0.0, 0.0, float(prediction.width), float(prediction.height))
    width, height = size or (round(box[2] - box[0]), round(box[3] - box[1]))
    with opened(prediction, **options) as image:
        pixels = image.show(box, width, height)
    assert pixels.shape == (height, width, 4)
    assert pixels.dtype == np.uint8
    return pixels


def test_pixels_of_eight_bits_are_shown_as_they_are(tmp_path):
    path = write_geotiff(tmp_path / "a.tif", noise((200, 150)), overviews=(2, 4))
    prediction = predicted(path)
    with rasterio.open(path) as file:
        whole = file.read()
    assert np.array_equal(shown(prediction)[..., :3], whole.transpose(1, 2, 0))
    part = shown(prediction, (40, 30, 90, 100))
    assert np.array_equal(part[..., :3], whole[:, 30:100, 40:90].transpose(1, 2, 0))
    assert (part[..., 3] == 255).all()
    small = shown(prediction, size=(100, 75)).astype(int)  # 2 x 2 pixels become one
    mean = whole.reshape(3, 75, 2, 100, 2).mean(axis=(2, 4)).transpose(1, 2, 0)
    assert np.abs(small[..., :3] - mean).max() <= 1


def test_missing_pixels_are_black_and_transparent(tmp_path):
    values = noise((64, 64))
    values[:, :20] = 0
    prediction = predicted(write_geotiff(tmp_path / "a.tif", values, nodata=0))
    found = shown(prediction)
    assert (found[:20] == 0).all()
    assert (found[20:, :, 3] == 255).all()
    beyond = shown(prediction, (32.0, 32.0, 96.0, 96.0))
    assert (beyond[32:] == 0).all()
    assert (beyond[:, 32:] == 0).all()
    assert np.array_equal(beyond[:32, :32], found[32:, 32:])


def test_an_alpha_band_is_alpha(tmp_path):
    values = noise((64, 64), bands=4)
    values[3] = 255
    values[3, :, 40:] = 0
    found = shown(predicted(write_geotiff(tmp_path / "a.tif", values, alpha=True)))
    assert np.array_equal(found[:, :40, :3], values[:3, :, :40].transpose(1, 2, 0))
    assert (found[:, 40:] == 0).all()


@pytest.mark.parametrize("dtype", ["uint16", "float32", "int8"])
def test_other_pixels_are_stretched_between_the_percentiles_of_each_band(dtype, tmp_path):
    values = noise((200, 150), dtype=dtype)
    found = shown(predicted(write_geotiff(tmp_path / "a.tif", values)))
    for band in range(3):
        plane = values[band].astype(float)
        low, high = np.percentile(plane, [2, 98])
        expected = np.clip((plane - low) / (high - low), 0, 1) * 255
        assert np.abs(found[..., band] - expected).max() <= 0.5 + 1e-6


def test_a_region_has_the_contrast_of_the_whole_image(tmp_path):
    values = noise((200, 150), dtype="uint16")
    prediction = predicted(write_geotiff(tmp_path / "a.tif", values))
    whole = shown(prediction)
    assert np.array_equal(shown(prediction, (40, 30, 90, 100)), whole[30:100, 40:90])


def test_contrast_is_of_valid_pixels_only(tmp_path):
    values = noise((100, 100), bands=1, dtype="float32")
    values[:, :50] = np.nan
    values[:, 60, 60] = np.inf
    found = shown(predicted(write_geotiff(tmp_path / "a.tif", values)))
    assert (found[:50] == 0).all()
    good = values[0, 50:][np.isfinite(values[0, 50:])]
    low, high = np.percentile(good, [2, 98])
    expected = np.clip((good - low) / (high - low), 0, 1) * 255
    finite = found[50:][np.isfinite(values[0, 50:])]
    assert np.abs(finite[:, 0] - expected).max() <= 0.5 + 1e-3
    assert (finite[:, 3] == 255).all()


@pytest.mark.parametrize(
    ("dtype", "value"), [("uint16", 700), ("float32", 0.0), ("float64", 1e308), ("int16", -5)]
)
def test_an_image_of_one_value_is_grey(dtype, value, tmp_path):
    values = np.full((3, 40, 40), value, dtype)
    found = shown(predicted(write_geotiff(tmp_path / "a.tif", values)))
    assert (found == [128, 128, 128, 255]).all()


def test_few_bright_cells_on_black_are_visible(tmp_path):
    values = np.zeros((1, 100, 100), "uint16")
    values[0, 40:44, 40:44] = 3000
    found = shown(predicted(write_geotiff(tmp_path / "a.tif", values)))
    assert (found[41, 41] == 255).all()
    assert (found[0, 0] == [0, 0, 0, 255]).all()


def test_numbers_at_the_ends_of_their_type_do_not_overflow(tmp_path):
    values = 1.7e308 * np.linspace(-1, 1, 1600).reshape(1, 40, 40)
    found = shown(predicted(write_geotiff(tmp_path / "a.tif", values, crs=None, transform=None)))
    assert found[0, 0, 0] == 0
    assert found[-1, -1, 0] == 255
    assert abs(int(found[20, 0, 0]) - 128) <= 2


@pytest.mark.parametrize(("bands", "shown_bands"), [(1, [0, 0, 0]), (2, [0, 0, 0]), (5, [0, 1, 2])])
def test_one_or_two_bands_are_grey_and_of_many_the_first_three_are_shown(
    bands, shown_bands, tmp_path
):
    values = noise((60, 40), bands=bands)
    found = shown(predicted(write_geotiff(tmp_path / "a.tif", values)))
    assert np.array_equal(found[..., :3], values[shown_bands].transpose(1, 2, 0))


def test_the_bands_are_those_of_the_prediction(tmp_path):
    values = noise((60, 40), bands=5)
    path = write_geotiff(tmp_path / "a.tif", values, descriptions=("a", "b", "c", "d", "e"))
    found = shown(predicted(path, bands=("4", "b", "1")))
    assert np.array_equal(found[..., :3], values[[3, 1, 0]].transpose(1, 2, 0))


def test_nodata_is_that_of_the_prediction(tmp_path):
    values = np.maximum(noise((60, 40)), 78)
    values[:, 10:20] = 77
    found = shown(predicted(write_geotiff(tmp_path / "a.tif", values), nodata=77.0))
    assert (found[10:20] == 0).all()
    assert (found[30:, :, 3] == 255).all()


@pytest.mark.parametrize(
    "options",
    [
        ReadOptions(),
        ReadOptions(bands=("4", 'it\'s "B"')),
        ReadOptions(nodata=-9999.5, mpp=0.25, default_mpp=1e-3, z=3, t=0, overviews="require"),
    ],
)
def test_read_options_come_back_from_a_record(options):
    stored = options.model_dump(mode="json", exclude_defaults=True)
    line = record(config={"reading": stored}).model_dump_json()
    assert imagery._read_options(Prediction.model_validate_json(line)) == options


@pytest.mark.parametrize(
    "reading",
    [
        None,
        [],
        "bands",
        {"bands": 7, "z": "a", "t": [1], "nodata": {}, "mpp": "x", "overviews": "maybe"},
    ],
)
def test_invalid_read_options_are_ignored(reading, tmp_path):
    path = write_geotiff(tmp_path / "a.tif", noise((60, 40)))
    odd = replace(predicted(path), config={"reading": reading}, reader="no such")
    assert np.array_equal(shown(odd), shown(predicted(path)))


def test_a_missing_image_is_an_error_with_a_hint(tmp_path, monkeypatch):
    path = write_geotiff(tmp_path / "a.tif", noise((60, 40)))
    monkeypatch.chdir(tmp_path)
    near = predicted("a.tif")
    os.mkdir("elsewhere")
    monkeypatch.chdir("elsewhere")
    with pytest.raises(ImageError, match=r"does not exist: `a\.tif`") as caught, opened(near):
        pass
    assert "--root" in caught.value.hint
    assert np.array_equal(shown(near, root=tmp_path), shown(predicted(path)))
    path.unlink()
    far = replace(near, image=str(path))
    with pytest.raises(ImageError) as caught, opened(far, root=tmp_path):
        pass
    assert "--root" not in caught.value.hint
    for name in ("a\0b", "", "x" * 5000):
        with pytest.raises(ImageError), opened(replace(near, image=name)):
            pass


@pytest.mark.parametrize("url", ["https://example.org/a.tif", "https://***@example.org/a.tif"])
def test_a_url_is_not_fetched_unless_allowed(url):
    with pytest.raises(ImageError, match="fetch"), opened(record(image=url)):
        pass


def test_an_image_of_another_size_is_an_error(tmp_path):
    path = write_geotiff(tmp_path / "a.tif", noise((60, 40)))
    before = predicted(path)
    write_geotiff(path, noise((61, 40)))
    with pytest.raises(ImageError, match="61 x 40 pixels, but 60 x 40"), opened(before):
        pass


def test_an_image_that_may_have_changed_is_shown_with_a_warning(tmp_path, caplog):
    path = write_geotiff(tmp_path / "a.tif", noise((60, 40)))
    before = predicted(path)
    shown(before)
    shown(replace(before, fingerprint=f"{before.fingerprint}-12345678"))  # options of its own
    shown(replace(before, fingerprint=""))
    assert caplog.text == ""
    os.utime(path, (1, 1))
    shown(before)
    assert "changed or copied since its prediction" in caplog.text


def test_only_requested_pixels_are_decoded(tmp_path, monkeypatch):
    path = write_geotiff(
        tmp_path / "a.tif", noise((1024, 1024), dtype="uint16"), overviews=(2, 4, 8)
    )
    readers = []

    def spy(*arguments, **options):
        readers.append(open_image(*arguments, **options))
        return readers[-1]

    prediction = predicted(path)
    monkeypatch.setattr(imagery, "open_image", spy)
    with opened(prediction) as image:
        assert readers[0].cost.pixels_decoded == 0
        image.show((100.0, 100.0, 140.0, 140.0), 40, 40)
        once = readers[0].cost.pixels_decoded
        assert once <= 512 * 512 + 4 * 64 * 64  # the contrast, and the blocks of the window
        image.show((100.0, 100.0, 140.0, 140.0), 40, 40)
        assert readers[0].cost.pixels_decoded <= once + 4 * 64 * 64
    with pytest.raises(ValueError, match="closed"):
        readers[0].read(imagery.Window(0, 0, 10, 10), imagery.Size(10, 10))


def test_a_slide_is_shown_in_its_own_colours():
    path = real("wsi/CMU-1-Small-Region.svs")
    pixels = tifffile.imread(path, level=0)
    found = shown(predicted(path), (600.0, 900.0, 856.0, 1100.0)).astype(int)
    # Decoders of JPEG may differ by a shade.
    assert np.abs(found[..., :3] - pixels[900:1100, 600:856]).mean() < 1
    assert (found[..., 3] == 255).all()


def test_a_stack_shows_the_plane_that_was_predicted():
    path = real("wsi/synthetic/multi-channel-z-series.ome.tif")
    planes = tifffile.imread(path)[:, 2].astype(float)  # (channels, y, x) of int8
    found = shown(predicted(path, z=2))
    for band, plane in enumerate(planes):
        low, high = np.percentile(plane, [2, 98])
        low, high = (low, high) if low < high else (plane.min(), plane.max())
        expected = np.clip((plane - low) / (high - low), 0, 1) * 255
        assert np.abs(found[..., band] - expected).max() <= 0.5 + 1e-6


def test_an_image_whose_name_is_not_utf_8_is_found(tmp_path):
    plain, odd = tmp_path / "a.png", tmp_path / os.fsdecode(b"K\xf6ln.png")
    Image.fromarray(noise((60, 40)).transpose(1, 2, 0)).save(plain)
    try:
        odd.write_bytes(plain.read_bytes())
    except OSError:
        pytest.skip("this file system takes only UTF-8")
    prediction = record(image=str(odd), width=60, height=40)
    assert prediction.image.endswith("K\\xf6ln.png")
    assert np.array_equal(shown(prediction), shown(predicted(plain)))


def test_an_image_without_a_valid_pixel_is_transparent(tmp_path):
    values = np.full((1, 40, 40), np.nan, "float32")
    assert (shown(predicted(write_geotiff(tmp_path / "a.tif", values))) == 0).all()
