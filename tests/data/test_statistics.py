import logging

import numpy as np
import pytest

from tests.images import noise, write_geotiff
from tnetcli.data.normalize import Normalisation
from tnetcli.data.statistics import as_text, estimate, value_range
from tnetcli.errors import ManifestError
from tnetcli.readers.base import Pixels
from tnetcli.readers.detect import open_image


@pytest.fixture
def opened(tmp_path):
    """Return a function that writes an array and opens it."""
    readers = []

    def write(array, **options):
        path = write_geotiff(tmp_path / f"{len(readers)}.tif", array, **options)
        readers.append(open_image(path))
        return readers[-1]

    yield write
    for reader in readers:
        reader.close()


def test_small_images_are_pooled_pixel_by_pixel(opened):
    arrays = [noise((70, 50), 3, seed=seed) for seed in range(3)]
    found = estimate([opened(array) for array in arrays])
    pixels = np.concatenate([array.reshape(3, -1) for array in arrays], axis=1)
    assert found.mean == pytest.approx(pixels.mean(axis=1))
    assert found.std == pytest.approx(pixels.std(axis=1))
    assert found.dtype == "uint8"


def test_images_count_the_same_whatever_their_size(opened):
    small, large = np.full((1, 20, 20), 10, np.uint8), np.full((1, 200, 200), 30, np.uint8)
    found = estimate([opened(small), opened(large)])
    assert (found.mean, found.std) == ((20,), (10,))


def test_pixels_without_data_do_not_count_and_make_an_image_count_less(opened):
    half = np.full((1, 40, 40), 100, np.uint8)
    half[:, :20] = 0
    found = estimate([opened(half, nodata=0), opened(np.full((1, 40, 40), 40, np.uint8))])
    assert found.mean == pytest.approx((60,))  # a half of 100 and a whole of 40
    assert found.std == pytest.approx((np.sqrt((40**2 * 0.5 + 20**2) / 1.5),))


def test_numbers_that_are_none_do_not_count(opened):
    array = np.full((1, 30, 30), 2, np.float32)
    array[:, :5], array[:, 5:10], array[:, 10:15] = np.nan, np.inf, 4
    found = estimate([opened(array)])
    assert found.mean == pytest.approx((2.5,))
    assert found.std == pytest.approx((np.sqrt(0.75),))


def test_a_pixel_with_one_band_that_is_no_number_does_not_count(opened):
    array = np.stack([np.full((30, 30), value, np.float32) for value in (1, 5)])
    array[0, :15], array[1, :15] = np.inf, 100
    array[1, 20:25] = 7
    assert estimate([opened(array, nodata=None)]).mean == pytest.approx((1, 5 + 2 / 3))


def test_a_large_image_is_seen_through_its_overview(opened):
    array = noise((1200, 900), 3, seed=4)
    reader = opened(array, overviews=[2, 4], blocksize=256)
    found = estimate([reader])
    assert found.mean == pytest.approx(array.mean(axis=(1, 2)), abs=0.3)
    assert max(np.array(found.std) - array.std(axis=(1, 2))) < 0.1  # averages deviate less
    assert reader.cost.pixels_decoded < array[0].size / 4


def test_a_constant_band_has_deviation_one_and_a_warning(opened, caplog):
    array = np.stack([noise((30, 30), 1)[0], np.full((30, 30), 7, np.uint8)])
    with caplog.at_level(logging.WARNING):
        found = estimate([opened(array, descriptions=["red", "flat"])])
    assert found.std[1] == 1
    assert "flat is 7 everywhere" in caplog.text


def test_floats_that_hardly_differ_are_no_constant(opened):
    array = (1e-4 + 1e-6 * np.random.default_rng(0).normal(size=(1, 50, 50))).astype(np.float32)
    assert estimate([opened(array)]).std == pytest.approx((1e-6,), rel=0.1)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (noise((30, 30), 4), ["4 bands", "3 bands"]),
        (noise((30, 30), 3, "uint16"), ["uint16", "uint8"]),
    ],
)
def test_images_of_two_kinds_are_refused_naming_both(opened, other, says):
    one = opened(noise((30, 30), 3))
    two = opened(other)
    with pytest.raises(ManifestError) as caught:
        estimate([one, two])
    assert all(word in str(caught.value) for word in [*says, one.path, two.path])
    assert caught.value.hint


def test_floats_of_any_width_are_one_kind(opened):
    arrays = [noise((30, 30), 1, dtype) for dtype in ("float32", "float64")]
    estimate([opened(array) for array in arrays])


def test_bands_that_are_not_as_many_as_the_model_has_are_refused(opened):
    with pytest.raises(ManifestError, match=r"the model has 2 bands \(vv, vh\)"):
        estimate([opened(noise((30, 30)))], names=("vv", "vh"))


def test_nothing_valid_anywhere_is_refused(opened):
    empty = opened(np.zeros((1, 30, 30), np.uint8), nodata=0)
    with pytest.raises(ManifestError, match="no valid pixel in any of 2 images"):
        estimate([empty, empty])


def test_one_empty_image_among_others_counts_nothing(opened):
    empty = opened(np.zeros((1, 30, 30), np.uint8), nodata=0)
    full = opened(np.full((1, 30, 30), 9, np.uint8), nodata=0)
    assert estimate([empty, full]).mean == (9,)


def test_statistics_centre_and_scale_what_they_were_taken_from(opened):
    arrays = [noise((70, 50), 3, "uint16", seed=seed) for seed in range(2)]
    found = estimate([opened(array) for array in arrays])
    scaled = [found.apply(Pixels(array, np.ones((50, 70), bool)))[0] for array in arrays]
    together = np.stack(scaled)
    assert np.abs(together.mean(axis=(0, 2, 3))).max() < 1e-4
    assert np.abs(together.std(axis=(0, 2, 3)) - 1).max() < 1e-4


def test_the_text_is_one_line_a_band():
    normalisation = Normalisation(dtype="uint8", mean=(103.25, 7.0), std=(42.5, 1.0))
    first, second = as_text(normalisation, ("red", "near infrared")).splitlines()
    assert first.split() == ["red", "mean", "103.25", "std", "42.5"]
    assert second.split() == ["near", "infrared", "mean", "7", "std", "1"]
    assert first.index("mean") == second.index("mean")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("uint8", (0, 255)), ("uint16", (0, 2900)), ("float32", (-100, 2900))],
)
def test_values_lie_near_their_mean_unless_there_are_few(dtype, expected):
    normalisation = Normalisation(dtype=dtype, mean=(1000.0, 1400.0), std=(100.0, 500.0))
    assert value_range(normalisation) == expected
