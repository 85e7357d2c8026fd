"""`tnet` and `python` as children of a process that has loaded torch already, on a Unix socket.

Pages have dozens of short commands, and most of the time of each would go into loading libraries.
Nothing else differs: a command is a process of its own, in the folder and the environment, and with
the standard streams, of whoever asks.

    python -P tests/warm.py serve SOCKET
    python tests/warm.py ask SOCKET tnet models
"""

import importlib
import json
import os
import runpy
import socket
import sys
import traceback
from contextlib import suppress

# What commands load sooner or later; importing starts no threads, which would be lost in a fork.
LOADED = (
    *("torch", "torch._dynamo", "rasterio", "tifffile", "imagecodecs", "simplejpeg", "openslide"),
    *("PIL.Image", "matplotlib.pyplot", "tnetcli.cli.app", "tnetcli.prediction.batch"),
    *("tnetcli.evaluation.evaluate", "tnetcli.exporters.export", "tnetcli.training.run"),
)
LONGEST = 2**20  # bytes of a question


def ask(address: str, words: list[str]) -> int:
    """Run a command in a child of the server, with our streams; return its exit code."""
    question = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [json.dumps(question).encode() + b"\n"], [0, 1, 2])
        return int(server.recv(16) or 1)


def serve(address: str) -> None:
    """Answer questions until killed, each by a child that has everything loaded."""
    for name in LOADED:
        importlib.import_module(name)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                _answer(connection)
            connection.close()
            with suppress(ChildProcessError):  # those that have ended since the last question
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _answer(connection: socket.socket) -> None:
    text, streams, _, _ = socket.recv_fds(connection, LONGEST, 3)
    while not text.endswith(b"\n"):
        text += connection.recv(LONGEST)
    question = json.loads(text)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(question["folder"])
    os.environ.clear()
    os.environ.update(question["environment"])
    code = 0
    try:
        _run(*question["words"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # what would be a traceback and exit code 1 elsewhere
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    connection.sendall(str(code).encode())
    os._exit(code)


def _run(program: str, *words: str) -> None:
    """Be `tnet …`, `python FILE …` or `python -m MODULE …`."""
    sys.argv = [program, *words]
    if program == "tnet":
        sys.modules["tnetcli.cli.app"].main()
    elif words[0] == "-m":
        sys.argv = list(words[1:])
        sys.path.insert(0, "")
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(words)
        sys.path.insert(0, os.path.dirname(os.path.abspath(words[0])))
        runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    sys.exit(ask(sys.argv[2], sys.argv[3:]))
