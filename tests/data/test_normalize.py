import logging

import numpy as np
import pytest

from tests.images import noise, write_geotiff
from tnetcli.config import validate
from tnetcli.data.normalize import Normalisation, estimate
from tnetcli.errors import ImageError, ManifestError, ModelError
from tnetcli.readers.base import Pixels
from tnetcli.readers.detect import open_image


def pixels(values, valid=None):
    values = np.asarray(values)
    return Pixels(values, np.ones(values.shape[1:], bool) if valid is None else np.asarray(valid))


def test_bytes_map_onto_minus_one_to_one():
    normalisation = Normalisation.to_unit_range("uint8", 1)
    found, _ = normalisation.apply(pixels(np.array([[[0, 255]]], np.uint8)))
    assert found.tolist() == [[[-1.0, 1.0]]]
    assert found.dtype == np.float32


def test_every_band_has_its_own_mean_and_deviation():
    normalisation = Normalisation(dtype="uint16", mean=(100, 2000), std=(10, 500))
    found, _ = normalisation.apply(pixels(np.array([[[120]], [[1000]]], np.uint16)))
    assert found.ravel().tolist() == [2.0, -2.0]


def test_what_is_not_valid_becomes_the_mean():
    normalisation = Normalisation(dtype="uint8", mean=(100,), std=(10,))
    found, _ = normalisation.apply(pixels(np.array([[[0, 110]]], np.uint8), [[False, True]]))
    assert found.tolist() == [[[0.0, 1.0]]]


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e300])
def test_a_pixel_with_a_band_that_is_no_number_becomes_the_mean_and_is_not_known(poison):
    normalisation = Normalisation(dtype="float64", mean=(1, 1), std=(1, 1))
    found, known = normalisation.apply(pixels(np.array([[[poison, 3.0]], [[5.0, 5.0]]])))
    assert found.tolist() == [[[0.0, 2.0]], [[0.0, 4.0]]]
    assert known.tolist() == [[False, True]]


def test_large_numbers_keep_their_digits():
    normalisation = Normalisation(dtype="int32", mean=(1_000_000_000,), std=(1,))
    found, _ = normalisation.apply(pixels(np.array([[[1_000_000_001]]], np.int32)))
    assert found.tolist() == [[[1.0]]]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"std": (0.0,)}, "not above zero"),
        ({"std": (1.0, 2.0)}, "one number per band"),
        ({"mean": (), "std": ()}, "one number per band"),
        ({"dtype": "colour"}, "not a pixel type"),
        ({"dtype": "complex64"}, "not a pixel type"),
        ({"mean": (float("nan"),)}, "finite"),
        ({"median": 3}, "unknown key `median`"),
    ],
)
def test_nonsense_is_refused(wrong, problem):
    data = {"dtype": "uint8", "mean": (1.0,), "std": (1.0,), **wrong}
    with pytest.raises(ModelError, match=problem):
        validate(Normalisation, data, "normalisation", ModelError)


def test_an_image_of_other_bands_is_refused_with_both_lists(tmp_path):
    path = write_geotiff(
        tmp_path / "scene.tif", noise((64, 64), bands=2), descriptions=["B4", "B8"]
    )
    with open_image(path) as reader, pytest.raises(ImageError) as caught:
        Normalisation.to_unit_range("uint8", 3).check(reader, ("red", "green", "blue"))
    assert "3 bands (red, green, blue)" in str(caught.value)
    assert "2 (B4, B8)" in str(caught.value)
    assert "--bands" in caught.value.hint


def test_an_image_of_another_type_is_refused(tmp_path):
    path = write_geotiff(tmp_path / "scene.tif", noise((64, 64), dtype="uint16"))
    with open_image(path) as reader, pytest.raises(ImageError, match="trained on uint8"):
        Normalisation.to_unit_range("uint8", 3).check(reader)


def test_floats_of_any_width_are_the_same_units(tmp_path):
    path = write_geotiff(tmp_path / "scene.tif", noise((64, 64)).astype(np.float32))
    normalisation = Normalisation(dtype="float64", mean=(1,) * 3, std=(1,) * 3)
    with open_image(path) as reader:
        normalisation.check(reader)


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


def test_floats_that_hardly_differ_are_not_constant(opened):
    array = (1e-4 + 1e-6 * np.random.default_rng(0).normal(size=(1, 50, 50))).astype(np.float32)
    double = opened(array.astype(np.float64))  # floats of any width are one kind
    assert estimate([opened(array), double]).std == pytest.approx((1e-6,), rel=0.1)


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
    assert "flat is constant (7)" in caplog.text


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


def test_nothing_valid_anywhere_is_refused(opened):
    empty = opened(np.zeros((1, 30, 30), np.uint8), nodata=0)
    with pytest.raises(ManifestError, match="no valid pixel in 2 images"):
        estimate([empty, empty])


def test_one_empty_image_among_others_counts_nothing(opened):
    empty = opened(np.zeros((1, 30, 30), np.uint8), nodata=0)
    full = opened(np.full((1, 30, 30), 9, np.uint8), nodata=0)
    assert estimate([empty, full]).mean == (9,)


def test_the_text_is_one_line_a_band():
    normalisation = Normalisation(dtype="uint8", mean=(103.25, 7.0), std=(42.5, 1.0))
    first, second = normalisation.as_text(("red", "near infrared")).splitlines()
    assert first.split() == ["red", "mean", "103.25", "std", "42.5"]
    assert second.split() == ["near", "infrared", "mean", "7", "std", "1"]
    assert first.index("mean") == second.index("mean")


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("uint8", (0, 255)), ("uint16", (0, 2900)), ("float32", (-100, 2900))],
)
def test_values_lie_near_their_mean_unless_there_are_few(dtype, expected):
    normalisation = Normalisation(dtype=dtype, mean=(1000.0, 1400.0), std=(100.0, 500.0))
    assert normalisation.value_range() == expected
