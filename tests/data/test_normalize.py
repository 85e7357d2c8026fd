import numpy as np
import pytest

from tests.images import noise, write_geotiff
from tnetcli.config import validate
from tnetcli.data.normalize import Normalisation
from tnetcli.errors import ImageError, ModelError
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


def test_signed_numbers_map_onto_minus_one_to_one():
    normalisation = Normalisation.to_unit_range("int16", 1)
    found, _ = normalisation.apply(pixels(np.array([[[-32768, 32767]]], np.int16)))
    assert found.tolist() == [[[-1.0, 1.0]]]


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
        ({"std": (1.0, 2.0)}, "one number a band"),
        ({"mean": (), "std": ()}, "one number a band"),
        ({"dtype": "colour"}, "not a type of pixels"),
        ({"dtype": "complex64"}, "not a type of pixels"),
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
