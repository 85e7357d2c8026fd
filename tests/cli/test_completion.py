import pytest

from tests.commands import tnet


def completed(shell, line):
    if shell == "bash":
        asked = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1)}
    else:
        asked = {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = tnet(**asked, _TNET_COMPLETE=f"complete_{shell}")
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_zsh_and_fish_show_the_summary_of_a_command(shell):
    shown = completed(shell, "tnet pre")
    assert "predict" in shown
    assert "Classify images" in shown
    assert "train" not in shown


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("tnet pre", ["predict"]),
        ("tnet predict --confi", ["--confidence"]),
        ("tnet recipes ", ["list", "show", "copy"]),
        ("tnet recipes show tnet-fm", ["tnet-fmow"]),
        ("tnet recipes copy none-of-this", []),
    ],
)
def test_bash_completes_commands_options_and_names_of_recipes(line, found):
    assert completed("bash", line).split() == found
