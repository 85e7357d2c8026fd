"""Run `tnet` and `python` in forks of a process that has imported torch, through a Unix socket.

Most of the time of a short command is spent on imports. A command is a separate process with the
folder, environment and standard streams of the client, which passes signals on to it, and whose
death ends it.

    python -P tests/warm.py serve SOCKET
    python tests/warm.py ask SOCKET tnet models
"""

import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import traceback
from contextlib import suppress

# Imported before the fork; these imports start no threads, which would not survive it.
LOADED = (
    *("torch", "torch._dynamo", "rasterio", "tifffile", "imagecodecs", "simplejpeg", "openslide"),
    *("PIL.Image", "matplotlib.pyplot", "tnetcli.cli.app", "tnetcli.prediction.batch"),
    *("tnetcli.evaluation.evaluate", "tnetcli.exporters.base", "tnetcli.training.run"),
)
MAX_BYTES = 2**20  # of a request
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


def ask(address: str, words: list[str]) -> int:
    """Run a command in a child of the server with our streams; return its exit code."""
    request = {"words": words, "folder": os.getcwd(), "environment": dict(os.environ)}
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [json.dumps(request).encode() + b"\n"], [0, 1, 2])
        child = int(server.recv(16))
        for number in FORWARDED:
            signal.signal(number, lambda number, _: os.kill(child, number))
        code = int(server.recv(16) or 1)
    if code < 0:  # a signal ended it
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code


def serve(address: str) -> None:
    """Serve requests until killed, each by a process that starts and keeps the command."""
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
                _keep(connection)
            connection.close()
            with suppress(ChildProcessError):  # children that have ended
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _keep(connection: socket.socket) -> None:
    """Start the command of a request, and answer with its number and its exit code."""
    text, streams, _, _ = socket.recv_fds(connection, MAX_BYTES, 3)
    while not text.endswith(b"\n"):
        text += connection.recv(MAX_BYTES)
    child = os.fork()
    if child == 0:
        connection.close()
        _be(json.loads(text), streams)
    for stream in streams:
        os.close(stream)
    with suppress(OSError):  # the client has ended
        connection.sendall(str(child).encode())
    while not (ended := os.waitpid(child, os.WNOHANG))[0]:
        if select.select([connection], [], [], 0.005)[0]:  # the client has ended
            os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(ended[1])
    with suppress(OSError):
        connection.sendall(str(code).encode())
    os._exit(0)


def _be(request: dict[str, object], streams: list[int]) -> None:
    """Be the command of a request."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    code = 0
    try:
        _run(*request["words"])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # a traceback and exit code 1, as in a normal process
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(program: str, *words: str) -> None:
    """Run `tnet …`, `python FILE …` or `python -m MODULE …`."""
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
