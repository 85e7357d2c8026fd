"""Run the command line as `python -m tnetcli`."""

from tnetcli.cli.app import main

if __name__ == "__main__":
    main()
