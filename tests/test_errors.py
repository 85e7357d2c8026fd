import pickle

import pytest

from tnetcli import errors
from tnetcli.errors import ImageError, ManifestError, MissingExtraError, TnetError

EXIT_CODES = {
    "UsageError": 2,
    "ImageError": 3,
    "ManifestError": 4,
    "RecipeError": 4,
    "ModelError": 5,
    "MissingExtraError": 6,
    "OutputError": 7,
    "SomeFailedError": 8,
}


@pytest.mark.parametrize(("name", "code"), EXIT_CODES.items())
def test_every_problem_has_the_exit_code_of_the_design(name, code):
    assert getattr(errors, name).exit_code == code


@pytest.mark.parametrize("name", EXIT_CODES)
def test_every_problem_is_a_tnet_error(name):
    assert issubclass(getattr(errors, name), TnetError)


def test_no_two_problems_share_an_exit_code():
    kinds = set(TnetError.__subclasses__()) - {ManifestError}  # as wrong as a recipe
    codes = [kind.exit_code for kind in kinds]
    assert len(codes) == len(set(codes))


def test_a_problem_reads_as_its_message_and_keeps_its_hint():
    error = ImageError("cannot open `a.tif`", hint="copy it again")
    assert (str(error), error.hint) == ("cannot open `a.tif`", "copy it again")


def test_a_hint_may_be_missing():
    assert ImageError("cannot open `a.tif`").hint == ""


@pytest.mark.parametrize("name", EXIT_CODES)
def test_a_problem_survives_the_way_back_from_a_worker(name):
    error = getattr(errors, name)("a `problem`", hint="a hint")
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), back.hint) == (type(error), "a `problem`", "a hint")


def test_a_missing_extra_names_the_command_that_installs_it():
    error = MissingExtraError.of("slides", "reading `a.svs`")
    assert "reading `a.svs`" in str(error)
    assert error.hint == "pip install 'tnetcli[slides]'"


def test_a_problem_is_found_again_by_its_name():
    assert errors.error_class("ManifestError") is ManifestError
    assert errors.error_class("ZeroDivisionError") is ImageError


def test_problems_of_one_kind_are_of_that_kind_and_of_several_of_images():
    assert errors.common_error_class([ManifestError, ManifestError]) is ManifestError
    assert errors.common_error_class([ManifestError, MissingExtraError]) is ImageError
