import pytest

from tnetcli.workflows.environment import HIDDEN, judge, shown

GIGA = 2**30


@pytest.mark.parametrize(
    "name",
    ["TNET_CACHE", "GDAL_CACHEMAX", "SLURM_JOB_ID", "HF_HUB_OFFLINE", "NO_COLOR",
     "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "PROJ_LIB", "PYTHONPATH"],
)  # fmt: skip
def test_what_matters_is_shown(name):
    assert shown({name: "1", "HOME": "/root", "EDITOR": "vi"}) == {name: "1"}


@pytest.mark.parametrize(
    "name",
    ["AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AZURE_STORAGE_ACCESS_KEY", "HOME"],
)
def test_what_does_not_matter_is_not(name):
    assert shown({name: "x"}) == {}


@pytest.mark.parametrize(
    "name",
    ["HF_TOKEN", "hf_token", "GDAL_HTTP_USERPWD", "GDAL_HTTP_BEARER", "GDAL_HTTP_HEADERS",
     "GDAL_HTTP_AUTH", "GDAL_HTTP_COOKIE", "SLURM_JWT", "TNET_API_KEY", "TNET_DB_PASSWORD",
     "DASK_GATEWAY__AUTH__KWARGS", "CPL_SOMETHING_SECRET", "GDAL_HTTP_PROXYUSERPWD"],
)  # fmt: skip
def test_what_may_be_secret_is_only_said_to_be_there(name):
    told = shown({name: "hunter2", name.upper(): "hunter2"})
    assert "hunter2" not in str(told)
    assert told[name.upper()] == HIDDEN


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("tcp://user:hunter2@host:8786", "tcp://host:8786"),
        ("http://hunter2@proxy/", "http://proxy/"),
        ("https://b/a.tif?sig=hunter2&x=1", f"https://b/a.tif?{HIDDEN}"),
        ("a https://u:hunter2@b/c and s3://d/e@f", "a https://b/c and s3://d/e@f"),
        ("what? 4@5", "what? 4@5"),
    ],
)
def test_a_url_is_shown_without_login_and_signature(value, told):
    assert shown({"TNET_SCHEDULER": value}) == {"TNET_SCHEDULER": told}


def test_a_value_is_one_line_of_bounded_length():
    (told,) = shown({"TNET_SET": "a\n\x1b[2J" + "x" * 10_000}).values()
    assert told.startswith("a\\n\\x1b[2J")
    assert len(told) == 200


def problems(**variables):
    return list(judge(variables, 16 * GIGA))


@pytest.mark.parametrize("value", ["EMPTY_DIR", "empty_dir"])
def test_hidden_sidecars_are_a_problem(value):
    ((problem, hint),) = problems(GDAL_DISABLE_READDIR_ON_OPEN=value)
    assert ".ovr" in problem
    assert hint == "unset GDAL_DISABLE_READDIR_ON_OPEN"


@pytest.mark.parametrize("value", ["", "TRUE", "FALSE", "YES"])
def test_other_ways_to_open_are_not(value):
    assert not problems(GDAL_DISABLE_READDIR_ON_OPEN=value)


@pytest.mark.parametrize("value", ["0", "1", "32", "200000", "0.1%", " 16 ", "1000000"])
def test_a_cache_that_holds_no_two_rows_is_a_problem(value):
    ((problem, hint),) = problems(GDAL_CACHEMAX=value)
    assert f"GDAL_CACHEMAX={value}" in problem
    assert "33" in hint


@pytest.mark.parametrize("value", ["", "33", "512", "99999", "536870912", "5%", "1GB", "x", "-1"])
def test_a_cache_of_some_size_or_none_that_we_know_is_not(value):
    assert not problems(GDAL_CACHEMAX=value)


def test_a_part_of_an_unknown_memory_is_not_judged():
    assert not list(judge({"GDAL_CACHEMAX": "0.1%"}, None))
