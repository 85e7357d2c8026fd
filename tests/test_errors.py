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
    "ClusterError": 75,
}


def test_every_error_has_its_exit_code():
    assert {kind.__name__: kind.exit_code for kind in TnetError.__subclasses__()} == EXIT_CODES


@pytest.mark.parametrize("name", EXIT_CODES)
def test_an_error_keeps_message_and_hint_when_pickled(name):
    error = getattr(errors, name)("a `problem`", hint="a hint")
    back = pickle.loads(pickle.dumps(error))
    assert (type(back), str(back), back.hint) == (type(error), "a `problem`", "a hint")


def test_a_missing_extra_names_its_pip_command():
    error = MissingExtraError.of("slides", "reading `a.svs`")
    assert str(error) == "reading `a.svs` needs the `slides` extra"
    assert error.hint == "pip install 'tnetcli[slides]'"


def test_an_error_class_is_found_by_name():
    assert errors.error_class("ManifestError") is ManifestError
    assert errors.error_class("ZeroDivisionError") is ImageError


def test_a_batch_has_the_class_that_its_errors_share():
    assert errors.common_error_class([ManifestError, ManifestError]) is ManifestError
    assert errors.common_error_class([ManifestError, MissingExtraError]) is ImageError
