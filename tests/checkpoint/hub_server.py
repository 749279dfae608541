"""As much of the Hugging Face hub's API as downloading a model takes, on 127.0.0.1, over folders of this machine."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/?]+))?")
_FILE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/([^?]+)")


class Hub(ThreadingHTTPServer):
    """`models`: id to folder. `status`: answered to everything instead. `silent`: take requests and never answer."""

    daemon_threads = True

    def __init__(self, models: dict[str, Path]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.models = models
        self.status = 0
        self.error_code = ""
        self.silent = threading.Event()
        self.closing = threading.Event()
        self.requests: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving(models: dict[str, Path]) -> Iterator[Hub]:
    hub = Hub(models)
    thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        hub.closing.set()
        hub.shutdown()
        hub.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def _answer(self) -> None:
        self.server.requests.append(f"{self.command} {self.path}")
        if self.server.silent.is_set():
            self.server.closing.wait()
            return
        if self.server.status:
            self._send(self.server.status, b"{}", **{"X-Error-Code": self.server.error_code})
        elif api := _API.match(self.path):
            self._api(api[1], api[2])
        elif file := _FILE.match(self.path):
            self._file(file[1], file[3])
        else:
            self._send(404, b"{}")

    def _api(self, model: str, what: str | None) -> None:
        folder = self.server.models.get(model)
        if folder is None:
            self._send(404, b'{"error":"Repository not found"}', **{"X-Error-Code": "RepoNotFound"})
            return
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        names = [str(path.relative_to(folder)) for path in files]
        if what == "tree":
            body: Any = [
                {"type": "file", "path": name, "size": path.stat().st_size, "oid": _etag(path)}
                for name, path in zip(names, files, strict=True)
            ]
        else:
            body = {"id": model, "modelId": model, "sha": COMMIT, "siblings": [{"rfilename": name} for name in names]}
        self._send(200, json.dumps(body).encode(), **{"Content-Type": "application/json"})

    def _file(self, model: str, name: str) -> None:
        path = self.server.models[model] / name if model in self.server.models else None
        if path is None or not path.is_file():
            self._send(404, b"{}", **{"X-Error-Code": "EntryNotFound"})
            return
        self._send(200, path.read_bytes(), **{"ETag": f'"{_etag(path)}"', "X-Repo-Commit": COMMIT})

    def _send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _etag(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()
