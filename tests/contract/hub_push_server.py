# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the Hugging Face Hub: the few calls that uploading a folder makes, over HTTP."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.contract.hub_model_server import in_thread

TOKEN = "hf_" + "t" * 20
LARGE = (".safetensors", ".gguf", ".parquet")
"""Endings of files that are uploaded apart from the commit."""


class PushServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.created: dict[str, dict[str, Any]] = {}
        """Repositories by `models/owner/name`, as they were asked for."""
        self.files: dict[str, dict[str, bytes]] = {}
        """Of the last commit, by `models/owner/name@branch`."""
        self.messages: list[str] = []
        self.large: dict[str, bytes] = {}
        """Uploaded apart, by SHA-256."""
        self.num_uploads = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: PushServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: object) -> None: ...

    def do_PUT(self) -> None:
        content = self._body()
        digest = self.path.rpartition("/")[2]
        assert hashlib.sha256(content).hexdigest() == digest
        self.server.large[digest] = content
        self.server.num_uploads += 1
        self._json({})

    def do_POST(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        body = self._body()
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self._json({"error": "Invalid credentials"}, status=401)
        if parts[:3] == ["api", "repos", "create"]:
            return self._create(json.loads(body))
        if parts[1:] == ["validate-yaml"]:
            return self._json({"errors": [], "warnings": []})
        if parts[-1] == "batch":
            return self._json(
                {"transfer": "basic", "objects": [*map(self._action, json.loads(body)["objects"])]}
            )
        _, kind, owner, name, call, branch = parts
        repository = f"{kind}/{owner}/{name}"
        if call == "preupload":
            return self._json({"files": [*map(_mode, json.loads(body)["files"])]})
        assert call == "commit", self.path
        return self._commit(repository, branch, [json.loads(line) for line in body.splitlines()])

    def _create(self, asked: dict[str, Any]) -> None:
        repository = f"{asked.get('type', 'model')}s/{asked['organization']}/{asked['name']}"
        url = {"url": f"{self.server.url}/{repository.removeprefix('models/')}"}
        if repository in self.server.created:
            return self._json({**url, "error": "exists"}, status=409)
        self.server.created[repository] = asked
        return self._json(url)

    def _action(self, asked: dict[str, Any]) -> dict[str, Any]:
        known = asked["oid"] in self.server.large
        upload = {"upload": {"href": f"{self.server.url}/large/{asked['oid']}"}}
        return {**asked, **({} if known else {"actions": upload})}

    def _commit(self, repository: str, branch: str, lines: list[dict[str, Any]]) -> None:
        files = self.server.files.setdefault(f"{repository}@{branch}", {})
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.server.messages.append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.server.large[value["oid"]]
        commit = hashlib.sha1(str(len(self.server.messages)).encode()).hexdigest()
        url = f"{self.server.url}/{repository.removeprefix('models/')}/commit/{commit}"
        self._json({"commitUrl": url, "commitOid": commit})

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _json(self, value: object, status: int = 200) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _mode(file: dict[str, Any]) -> dict[str, Any]:
    mode = "lfs" if file["path"].endswith(LARGE) else "regular"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False}


@contextmanager
def push_server() -> Generator[PushServer]:
    server = PushServer()
    with in_thread(server):
        yield server
