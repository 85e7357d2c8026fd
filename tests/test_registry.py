from importlib.metadata import EntryPoint

import pytest

from tnetcli import registry as module
from tnetcli.errors import MissingExtraError, ModelError, UsageError
from tnetcli.registry import Registry


@pytest.fixture
def plugins(monkeypatch):
    found = []
    monkeypatch.setattr(
        module, "entry_points", lambda group: [each for each in found if each.group == group]
    )
    return found


@pytest.fixture
def codecs(plugins):
    return Registry("codec", {"json": "json:loads", "csv": "csv"}, error=ModelError)


def test_a_name_is_imported_on_first_use(codecs):
    assert codecs.load("json")("1") == 1
    assert codecs.load("csv").__name__ == "csv"


def test_an_entry_point_adds_a_name(codecs, plugins):
    plugins.append(EntryPoint("yaml", "yaml:safe_load", "tnetcli.codecs"))
    plugins.append(EntryPoint("other", "yaml:safe_load", "tnetcli.readers"))
    assert codecs.names() == ["json", "csv", "yaml"] == list(codecs)
    assert "yaml" in codecs
    assert "other" not in codecs
    assert codecs.load("yaml")("[1]") == [1]


def test_a_plug_in_does_not_replace_what_is_built_in(codecs, plugins):
    plugins.append(EntryPoint("json", "yaml:safe_load", "tnetcli.codecs"))
    assert codecs.names() == ["json", "csv"]
    assert codecs.load("json").__module__ == "json"


def test_an_unknown_name_is_an_error_with_a_hint(codecs):
    with pytest.raises(ModelError, match="unknown codec: `jsn`") as caught:
        codecs.load("jsn")
    assert caught.value.hint == "did you mean `json`?"


@pytest.mark.parametrize("value", ["no_such_module:thing", "json:no_such_name"])
def test_a_broken_plug_in_is_named(codecs, plugins, value):
    plugins.append(EntryPoint("bad", value, "tnetcli.codecs"))
    with pytest.raises(ModelError, match="cannot load the codec `bad`") as caught:
        codecs.load("bad")
    assert "uninstall" in caught.value.hint


def test_a_missing_library_names_its_extra(plugins):
    codecs = Registry("codec", {"x": "no_such:y"}, extras={"no_such": ("slides", "reading slides")})
    with pytest.raises(MissingExtraError, match="`slides` extra"):
        codecs.load("x")


def test_a_broken_built_in_is_a_bug(plugins):
    with pytest.raises(ModuleNotFoundError):
        Registry("codec", {"x": "no_such:y"}).load("x")


def test_usage_errors_are_the_default(plugins):
    with pytest.raises(UsageError):
        Registry("policy", {}, plural="policies").load("x")
