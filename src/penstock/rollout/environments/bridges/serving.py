# SPDX-License-Identifier: Apache-2.0
"""Serves episodes of one library to a rollout node: see `protocol.py` for the messages.

Runs in the library's own virtual environment: standard library only, and nothing of penstock. Owns
the threads, one call of an episode at a time, and the leases: an episode that its node does not
renew is closed. Ends with its standard input."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

PROTOCOL = 1
MAX_ERROR_CHARS = 1500
Json = dict[str, Any]


class Episode(Protocol):
    """One episode of an environment. An action that makes no sense is an observation, not an
    exception: exceptions say that the environment is broken."""

    def reset(self, payload: Json, seed: int, model: Json) -> Json:
        """The first observation: text or messages, tools, done, reward, info."""
        ...

    def step(self, text: str, tool_calls: list[Json]) -> Json: ...

    def score(self) -> float | None: ...

    def close(self) -> None: ...


class _Open:
    """An open episode, its lease, and the lock of its calls."""

    def __init__(self, episode: Episode, lease_s: float) -> None:
        self.episode = episode
        self.lock = threading.Lock()
        self.lease_s = lease_s
        self.renew()

    def renew(self) -> None:
        self.expires_at = time.monotonic() + self.lease_s


class Server:
    """Answers the calls of one node."""

    def __init__(self, load: Callable[[Json], Callable[[], Episode]]) -> None:
        self._load = load
        self._make: Callable[[], Episode] | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._open: dict[str, _Open] = {}
        self._lock = threading.Lock()
        # Libraries print; only answers may be on standard output.
        self._output = os.fdopen(os.dup(1), "wb")
        os.dup2(2, 1)

    def run(self) -> None:
        threading.Thread(target=self._reap, daemon=True).start()
        for line in sys.stdin.buffer:
            request = json.loads(line)
            if request["call"] == "hello":
                self._answer(request, self._hello)
            elif request["call"] == "renew":
                self._answer(request, self._renew)
            else:
                assert self._threads is not None, "hello comes first"
                self._threads.submit(self._answer, request, self._of_an_episode)
        os._exit(0)  # the node is gone; a thread that hangs must not keep this process

    def _answer(self, request: Json, handle: Callable[[Json], Json]) -> None:
        try:
            line = _line(request, handle(request))
        except (Exception, SystemExit):
            line = _line(request, {"error": traceback.format_exc()[-MAX_ERROR_CHARS:]})
        with self._lock:
            self._output.write(line)
            self._output.flush()

    def _hello(self, request: Json) -> Json:
        if request["protocol"] == PROTOCOL:
            sys.path.append(
                os.path.abspath(os.path.expanduser(request["settings"].get("path", ".")))
            )
            self._make = self._load(request["settings"])
            self._threads = ThreadPoolExecutor(request["max_episodes"])
        return {"protocol": PROTOCOL}

    def _renew(self, request: Json) -> Json:
        with self._lock:
            for name in request["episodes"]:
                if name in self._open:
                    self._open[name].renew()
        return {}

    def _of_an_episode(self, request: Json) -> Json:
        name, call = request["episode"], request["call"]
        if call == "close":
            with self._lock:
                found = self._open.pop(name, None)
            if found is not None:
                with found.lock:
                    found.episode.close()
            return {}
        if call == "reset":
            assert self._make is not None
            found = _Open(self._make(), request["lease_s"])
            with self._lock:
                self._open[name] = found
        else:
            with self._lock:
                found = self._open[name]
                found.renew()
        with found.lock:
            return self._call(found.episode, request)

    def _call(self, episode: Episode, request: Json) -> Json:
        if request["call"] == "reset":
            payload, seed, model = request["payload"], request["seed"], request["model"]
            return {"observation": episode.reset(payload, seed, model)}
        if request["call"] == "step":
            return {"observation": episode.step(request["text"], request["tool_calls"])}
        return {"score": episode.score()}

    def _reap(self) -> None:
        """consumes: leases that expired · produces: closed episodes
        waits for: a quarter of the shortest lease"""
        while True:
            with self._lock:
                leases = [found.lease_s for found in self._open.values()]
            time.sleep(min(leases, default=1.0) / 4)
            now = time.monotonic()
            with self._lock:
                late = [name for name, found in self._open.items() if found.expires_at < now]
                ended = [self._open.pop(name) for name in late]
            for found in ended:
                if found.lock.acquire(blocking=False):  # else it hangs, and its node gave up on it
                    found.episode.close()
                    found.lock.release()


def _line(request: Json, body: Json) -> bytes:
    """An answer. Half a character, as in JSON that a model wrote, becomes a question mark; NaN
    raises ValueError. The node would end this process, with all episodes, for either."""
    answer = {"id": request["id"], **body}
    text = json.dumps(answer, default=str, allow_nan=False, ensure_ascii=False)
    return text.encode(errors="replace") + b"\n"


def serve(load: Callable[[Json], Callable[[], Episode]]) -> None:
    """Serve until the node is gone. `load` gets the settings of the run file once, and returns what
    makes an episode."""
    Server(load).run()
