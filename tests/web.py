"""A server of files on loopback that answers ranges and notes what is asked for.

It is a process of its own: rasterio holds Python's lock while GDAL waits for an answer.

    python tests/web.py FOLDER LOG     prints its address
"""

import os
import re
import subprocess
import sys
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urlsplit


@contextmanager
def serving(folder, log):
    """Lend the address of a server of `folder`; `log` gets a line for each request."""
    command = [sys.executable, __file__, str(folder), str(log)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield server.stdout.readline().strip()
        finally:
            server.kill()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        with open(sys.argv[2], "a") as log:
            log.write(f"{self.command} {self.path}\n")
        path = Path(sys.argv[1], urlsplit(self.path).path.lstrip("/"))
        if not path.is_file():
            self.send_error(404)
            return
        content = path.read_bytes()
        part = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start = int(part[1]) if part else 0
        end = min(int(part[2] or len(content)) + 1, len(content)) if part else len(content)
        self.send_response(206 if part else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(end - start))
        if part:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content[start:end])

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    os.close(1)
    server.serve_forever()
