# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face Hub of one public data set, on loopback: the calls that `datasets` makes to load
it, and 404 for everything else."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

COMMIT = "5" * 40


class _Handler(BaseHTTPRequestHandler):
    repo: str
    files: Mapping[str, bytes]
    seen: list[str]
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        if path == f"/api/datasets/{self.repo}/paths-info/{COMMIT}":
            return self._send(200, json.dumps([*map(self._entry, self.files)]).encode())
        self._not_found()

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.seen.append(path)
        api, resolve = f"/api/datasets/{self.repo}", f"/datasets/{self.repo}/resolve/"
        if path in (api, f"{api}/revision/main", f"{api}/revision/{COMMIT}"):
            siblings = [{"rfilename": name} for name in self.files]
            body = {"id": self.repo, "sha": COMMIT, "private": False, "siblings": siblings}
            return self._send(200, json.dumps(body).encode())
        if path.startswith(f"{api}/tree/{COMMIT}"):
            return self._send(200, json.dumps(self._tree(path)).encode())
        name = path.removeprefix(resolve).partition("/")[2] if path.startswith(resolve) else ""
        if name in self.files:
            return self._send(200, self.files[name], with_body=with_body)
        self._not_found(is_repo=path.startswith((api, resolve)))

    def _tree(self, path: str) -> list[dict[str, object]]:
        folder = path.partition(COMMIT)[2].strip("/")
        prefix = f"{folder}/" if folder else ""
        inside = [name for name in self.files if name.startswith(prefix)]
        folders = {
            name[len(prefix) :].partition("/")[0] for name in inside if "/" in name[len(prefix) :]
        }
        listed: list[dict[str, object]] = [
            {"type": "directory", "oid": COMMIT, "size": 0, "path": f"{prefix}{name}"}
            for name in folders
        ]
        return [*listed, *(self._entry(n) for n in inside if "/" not in n[len(prefix) :])]

    def _entry(self, name: str) -> dict[str, object]:
        data = self.files[name]
        return {
            "type": "file",
            "oid": sha256(data).hexdigest()[:40],
            "size": len(data),
            "path": name,
        }

    def _not_found(self, *, is_repo: bool = False) -> None:
        code = "EntryNotFound" if is_repo else "RepoNotFound"
        self._send(404, b"{}", {"X-Error-Code": code, "X-Error-Message": "not found"})

    def _send(
        self,
        status: int,
        body: bytes,
        headers: Mapping[str, str] | None = None,
        *,
        with_body: bool = True,
    ) -> None:
        self.send_response(status)
        etag = sha256(body).hexdigest()
        own = {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"', "Content-Length": str(len(body))}
        for name, value in {**own, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body and self.command != "HEAD":
            self.wfile.write(body)


@contextmanager
def hub(repo: str, files: Mapping[str, bytes]) -> Generator[tuple[str, list[str]]]:
    """The address of a Hub with this data set, and the paths that it was asked for."""
    seen: list[str] = []
    handler = type("Handler", (_Handler,), {"repo": repo, "files": files, "seen": seen})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
