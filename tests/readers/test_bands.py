import pytest

from tnetcli.errors import ImageError
from tnetcli.readers.metadata import choose_bands, unique_names

NAMES = ("red", "green", "blue", "nir")


def test_without_a_wish_the_default_is_taken():
    assert choose_bands("a.tif", None, NAMES, [0, 1, 2]) == (0, 1, 2)


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


def test_names_that_come_twice_are_told_apart():
    assert unique_names(["a", "b", "a"]) == ("a (1)", "b", "a (3)")


def test_a_missing_name_does_not_clash_with_a_name_made_of_digits():
    names = unique_names(["2", None, "x"])
    assert len(set(names)) == 3


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
