# SPDX-License-Identifier: Apache-2.0
"""The bridge of OpenEnv: starts the server of an environment on a port of this process's own
network, and plays each episode with a client of the library, over its WebSocket.

The model sees the fields of an observation as JSON, and writes an action as JSON, or the text of
one field. Needs openenv; imports nothing of penstock."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import uvicorn
from openenv.core.generic_client import GenericEnvClient
from serving import Json, serve

_BAD_ACTION = "code: VALIDATION_ERROR"
"""How the client reports an action that the server does not take."""


class OpenEnvEpisode:
    """An Episode."""

    def __init__(self, url: str, action_field: str) -> None:
        self._client = GenericEnvClient(base_url=url).sync()
        self._action_field = action_field
        self._total: float | None = None

    def reset(self, payload: Json, seed: int, model: Json) -> Json:
        self._client.connect()
        self._total = None
        return self._seen(self._client.reset(**{**payload, "seed": seed}))

    def step(self, text: str, tool_calls: list[Json]) -> Json:
        action = self._read(text)
        if action is None:
            return {"text": "Answer with an action as a JSON object.", "reward": 0.0}
        try:
            return self._seen(self._client.step(action))
        except RuntimeError as error:
            if _BAD_ACTION not in str(error):
                raise
            return {"text": f"No such action. {error}", "reward": 0.0}

    def score(self) -> float | None:
        return self._total

    def close(self) -> None:
        self._client.close()

    def _read(self, text: str) -> Json | None:
        if self._action_field:
            return {self._action_field: text.strip()}
        written = text[text.find("{") : text.rfind("}") + 1]  # empty if there is no object
        try:
            action = json.loads(written)
        except (ValueError, RecursionError):
            return None
        return action if isinstance(action, dict) else None

    def _seen(self, result: Any) -> Json:
        if result.reward is not None:
            self._total = (self._total or 0.0) + float(result.reward)
        fields: Mapping[str, Any] = result.observation
        shown = {key: value for key, value in fields.items() if key != "metadata"}
        return {
            "text": json.dumps(shown, ensure_ascii=False, default=str),
            "done": bool(result.done),
            "reward": None if result.reward is None else float(result.reward),
            "info": dict(result.metadata or {}),
        }


def load(settings: Json) -> Callable[[], OpenEnvEpisode]:
    module, _, name = settings["name"].partition(":")
    app = getattr(import_module(module), name or "app")
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    threading.Thread(target=server.run, args=([listener],), daemon=True).start()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    return lambda: OpenEnvEpisode(url, settings["action_field"])


if __name__ == "__main__":
    serve(load)
