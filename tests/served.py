"""A loopback HTTP server that answers byte ranges and notes what is asked of it.

It is a process of its own: GDAL opens files with Python's lock held.
"""

import re
import subprocess
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Asked:
    """The requests that a server has seen."""

    def __init__(self, log):
        self._log = log

    def clear(self):
        self._log.write_text("")

    def __bool__(self):
        return bool(self._log.read_text())


@contextmanager
def serve(file, log):
    """Lend `(host:port, requests)` of a server that returns `file` for every `.tif`."""
    log.write_text("")
    command = [sys.executable, __file__, str(file), str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield server.stdout.readline().strip(), Asked(log)
        finally:
            server.kill()


class Handler(BaseHTTPRequestHandler):
    content = b""
    log = Path()

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        with self.log.open("a") as log:
            log.write("asked\n")
        if not self.path.partition("?")[0].endswith(".tif"):
            self.send_error(404)
            return
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        first, last = (int(part[1]), int(part[2])) if part else (0, len(self.content) - 1)
        body = self.content[first : last + 1]
        self.send_response(206 if part else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body)))
        if part:
            end = first + len(body) - 1
            self.send_header("Content-Range", f"bytes {first}-{end}/{len(self.content)}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    Handler.content, Handler.log = Path(sys.argv[1]).read_bytes(), Path(sys.argv[2])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
