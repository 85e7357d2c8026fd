"""Write docs/cli.md from the command line's own help; a test holds the two together."""

import html
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).with_name("cli.md")
NOTE = "<!-- Made by `make docs` from `tnet --help`; change the help instead. -->\n\n"
ENVIRONMENT = """
## Environment variables

`TNET_<COMMAND>_<OPTION>` sets an option where the command line does not: `TNET_PREDICT_LEVELS=3`.
Values of a repeated option are separated by spaces. `tnet COMMAND --help` shows each name.
`TNET_MODEL`, `TNET_DEVICE`, `TNET_SCHEDULER` and `TNET_LOG_FORMAT` hold for all commands, as does
`TNET_CACHE`, the folder of the cache.
"""


def cli_page() -> str:
    """Return the reference of all commands in Markdown."""
    command = [sys.executable, "-m", "typer", "tnetcli.cli.app", "utils", "docs", "--name", "tnet"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, encoding="utf-8")
    lines = html.unescape(done.stdout).strip().splitlines()
    # Completion differs from shell to shell and is no part of the reference.
    return (
        NOTE + "\n".join(line for line in lines if "-completion" not in line) + "\n" + ENVIRONMENT
    )


if __name__ == "__main__":
    PAGE.write_text(cli_page(), encoding="utf-8")
