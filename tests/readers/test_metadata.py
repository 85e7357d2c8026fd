import pytest

from tnetcli.errors import ImageError, UsageError
from tnetcli.readers.base import ReadOptions, Resolution
from tnetcli.readers.metadata import (
    TIFF_TAGS,
    choose_bands,
    from_density,
    from_length,
    resolve,
    unique_names,
)

NAMES = ("red", "green", "blue", "nir")


def test_numbers_count_from_one():
    assert choose_bands("a.tif", ("1", "4"), NAMES, []) == (0, 3)


def test_names_are_found_in_any_case():
    assert choose_bands("a.tif", ("NIR", "Red"), NAMES, []) == (3, 0)


def test_the_order_asked_for_is_kept_also_where_a_band_comes_twice():
    assert choose_bands("a.tif", ("blue", "1", "blue"), NAMES, []) == (2, 0, 2)


def test_a_name_made_of_digits_wins_over_a_number():
    assert choose_bands("a.tif", ("2",), ("2", "1"), []) == (0,)


@pytest.mark.parametrize("wanted", ["0", "5", "-1", "swir", "", "1.0"])
def test_an_unknown_band_is_refused_with_a_list_of_what_there_is(wanted):
    with pytest.raises(ImageError, match=r"no band .* in `a\.tif`") as caught:
        choose_bands("a.tif", (wanted,), NAMES, [])
    assert caught.value.hint == "it has: 1 red, 2 green, 3 blue, 4 nir"


def test_a_name_that_fits_two_bands_is_refused():
    with pytest.raises(ImageError, match="no band `red`"):
        choose_bands("a.tif", ("red",), ("Red", "red"), [])


def test_a_band_without_a_name_is_called_by_its_number():
    assert unique_names(["red", None, ""]) == ("red", "2", "3")


def test_duplicate_names_get_the_band_number():
    assert unique_names(["a", "b", "a"]) == ("a (1)", "b", "a (3)")


def test_naming_many_bands_compares_each_with_few_others():
    compared = 0

    class Name(str):
        __hash__ = str.__hash__

        def __eq__(self, other):
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    unique_names([Name(f"band {number}") for number in range(500)])
    assert compared < 5_000


CLAIM = Resolution(0.5, 0.5, "the file")
PRINTER = Resolution(352.8, 352.8, TIFF_TAGS)
UNUSUAL = Resolution(32.0, 32.0, "the scanner")


def test_the_users_own_figure_wins_over_the_file():
    assert resolve(ReadOptions(mpp=0.25), [CLAIM]) == (Resolution(0.25, 0.25, "mpp"), [])


def test_the_first_credible_claim_is_believed():
    other = Resolution(0.4, 0.4, "another tag")
    assert resolve(ReadOptions(), [None, CLAIM, other]) == (CLAIM, [])


def test_the_resolution_of_a_printer_is_passed_over_with_a_warning():
    found, warnings = resolve(ReadOptions(), [PRINTER, CLAIM])
    assert found == CLAIM
    assert len(warnings) == 1
    assert "352.8" in warnings[0]
    assert "ignored" in warnings[0]


def test_an_unusual_figure_of_the_scanner_is_kept_with_a_warning():
    found, warnings = resolve(ReadOptions(), [UNUSUAL, CLAIM])
    assert found == UNUSUAL
    assert any("unusual" in warning for warning in warnings)


def test_the_default_stands_in_only_where_the_file_has_none():
    options = ReadOptions(default_mpp=0.25)
    assert resolve(options, [CLAIM])[0] == CLAIM
    assert resolve(options, [None])[0] == Resolution(0.25, 0.25, "default_mpp")


def test_pixels_that_are_not_square_are_mentioned():
    found, warnings = resolve(ReadOptions(), [Resolution(0.5, 0.6, "tags")])
    assert found == Resolution(0.5, 0.6, "tags")
    assert any("not square" in warning for warning in warnings)


@pytest.mark.parametrize("mpp", [0.0, 0.01, 250.0])
def test_a_senseless_figure_from_the_user_is_refused(mpp):
    with pytest.raises(UsageError, match="mpp"):
        resolve(ReadOptions(mpp=mpp), [])
    with pytest.raises(UsageError, match="default_mpp"):
        resolve(ReadOptions(default_mpp=mpp), [])


@pytest.mark.parametrize(
    ("density", "unit", "microns"),
    [(20_000, "centimeter", 0.5), (20_000, "3", 0.5), (20_000, "cm", 0.5),
     (25_400, "inch", 1.0), (25_400, "2", 1.0), (1_000, "millimeter", 1.0)],
)  # fmt: skip
def test_pixels_per_length_become_microns_per_pixel(density, unit, microns):
    found = from_density(density, density, unit)
    assert (found.x, found.y) == pytest.approx((microns, microns))


@pytest.mark.parametrize(
    ("x", "y", "unit"), [(0, 1, "inch"), (1, -1, "inch"), (1, 1, "1"), (1, 1, "")]
)
def test_a_density_without_meaning_is_no_claim(x, y, unit):
    assert from_density(x, y, unit) is None


@pytest.mark.parametrize(
    ("length", "unit", "microns"),
    [(500, "nm", 0.5), (0.5, "µm", 0.5), (0.5, "μm", 0.5), (0.5, "Micrometer", 0.5),
     (0.0005, "mm", 0.5), (0.00005, "cm", 0.5), (5e-7, "meter", 0.5)],
)  # fmt: skip
def test_a_length_in_any_unit_becomes_microns(length, unit, microns):
    found = from_length(length, length, unit, "OME")
    assert (found.x, found.y) == pytest.approx((microns, microns))


def test_without_a_choice_or_a_claim_there_is_the_default():
    assert choose_bands("a.tif", None, NAMES, [0, 1, 2]) == (0, 1, 2)
    assert resolve(ReadOptions(), []) == (None, [])
    assert resolve(ReadOptions(), [Resolution(float("nan"), 0.5, TIFF_TAGS)])[0] is None


@pytest.mark.parametrize(("x", "unit"), [(0.0, "µm"), (-0.5, "µm"), (0.5, "pixel"), (0.5, "")])
def test_a_length_without_meaning_is_no_claim(x, unit):
    assert from_length(x, x, unit, "OME") is None


def test_a_missing_name_is_unlike_a_name_made_of_digits():
    assert len(set(unique_names(["2", None, "x"]))) == 3
