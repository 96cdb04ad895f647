# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the Hugging Face Hub: the few calls that downloading a model makes, over HTTP."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


class HubServer(ThreadingHTTPServer):
    """Repositories by name; each has commits, the last of which is the branch main."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, dict[str, Files]] = {}
        self.gated: set[str] = set()
        self.downloads: list[str] = []
        """Paths of the files that were sent."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def push(self, repository: str, files: Files) -> str:
        """Add a commit; returns its id."""
        commits = self.repositories.setdefault(repository, {})
        commit = hashlib.sha1(f"{repository} {len(commits)}".encode()).hexdigest()
        commits[commit] = files
        return commit


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: HubServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: object) -> None: ...

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        is_call = parts[:2] == ["api", "models"]
        owner, name, kind, revision, *rest = [*parts[2 if is_call else 0 :], "", "", ""]
        repository = f"{owner}/{name}"
        if repository in self.server.gated:
            return self._refuse(403, "GatedRepo")
        if (commits := self.server.repositories.get(repository)) is None:
            return self._refuse(404, "RepoNotFound")
        commit = [*commits][-1] if revision == "main" else revision
        if (files := commits.get(commit)) is None:
            return self._refuse(404, "RevisionNotFound")
        if kind == "revision":
            return self._json({"id": repository, "sha": commit, "siblings": []})
        if kind == "tree":
            return self._json([_entry(path, content) for path, content in files.items()])
        return self._file(commit, "/".join(filter(None, rest)), files)

    def _file(self, commit: str, path: str, files: Files) -> None:
        if path not in files:
            return self._refuse(404, "EntryNotFound")
        if self.command == "GET":
            self.server.downloads.append(path)
        etag = hashlib.sha1(files[path]).hexdigest()
        self._send(200, files[path], {"X-Repo-Commit": commit, "ETag": f'"{etag}"'})

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, code: str) -> None:
        self._send(status, b"{}", {"X-Error-Code": code})

    def _send(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _entry(path: str, content: bytes) -> dict[str, object]:
    oid = hashlib.sha1(content).hexdigest()
    return {"type": "file", "path": path, "size": len(content), "oid": oid}


@contextmanager
def hub_server() -> Generator[HubServer]:
    server = HubServer()
    with in_thread(server):
        yield server


@contextmanager
def in_thread(server: HTTPServer) -> Generator[None]:
    """It answers while the context is open."""
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
