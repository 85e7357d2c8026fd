import pytest

from tnetcli.errors import RecipeError
from tnetcli.training.distributed import OtherFailedError, speaking_once, wait_for_end


@pytest.mark.parametrize(("rank", "kind"), [("0", RecipeError), ("1", OtherFailedError)])
def test_one_process_of_a_machine_speaks(monkeypatch, rank, kind):
    monkeypatch.setenv("LOCAL_RANK", rank)
    with pytest.raises(kind) as caught, speaking_once(lambda: True):
        raise RecipeError("all say the same")
    assert caught.value.exit_code == 4


def test_what_no_other_has_ended_for_is_said_by_the_one_who_knows(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr("tnetcli.training.distributed.SPEAKER_PATIENCE", 0.1)
    with pytest.raises(RecipeError), speaking_once(lambda: False):
        raise RecipeError("only I know")


def test_who_is_silent_is_not_the_first_to_go():
    looks = iter([False, False, True])
    assert wait_for_end(lambda: next(looks))
    assert not list(looks)


def test_where_nothing_went_wrong_nobody_waits(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with speaking_once(lambda: pytest.fail("waited")):
        pass
