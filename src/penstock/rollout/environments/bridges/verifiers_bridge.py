# SPDX-License-Identifier: Apache-2.0
"""The bridge of verifiers: its environments play by themselves, with a client that calls the model
of this attempt at our gateway, so an episode is over when `reset` returns.

Task `index` is that task of the taskset, again from the start after the last one. Its harnesses ask
`uv` for an environment of their script; here there is no network, and a `uv` of ours names the
virtual environment that this bridge runs in, which has what they need. A client of the library
lives as long as the bridge, so memory grows a little with each episode; a bridge that reaches its
limit is replaced. Needs verifiers; imports nothing of penstock."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from serving import Json, serve

UV = """#!/bin/sh
case "$*" in
  *--help*) echo "  --script" ;;
  "python find"*) echo "{python}" ;;
esac
"""
AGENT = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
"""Plain chat, in this sandbox: the library's own default is a hosted service that needs an account.
Options of the run file replace either."""


class World:
    """The environment, served by an event loop in a separate thread."""

    def __init__(self, name: str, options: Json) -> None:
        from verifiers.v1.utils.loaders import (
            env_config_type,
            load_environment,
            resolve_env_config,
        )

        taskset = {"id": name, **options.get("taskset", {})}
        roles = env_config_type(name, options.get("id", "")).model_fields
        agent = {"agent": AGENT | options.get("agent", {})} if "agent" in roles else {}
        config = resolve_env_config({**options, **agent, "taskset": taskset})
        self._env = load_environment(config)
        self._rest = iter(self._env.taskset)
        self._tasks: list[Any] = []
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.do(self._env.serving().__aenter__())

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(_finish(work), self._loop).result()

    def task(self, index: int) -> Any:
        with self._lock:
            missing = index + 1 - len(self._tasks)
            self._tasks += itertools.islice(self._rest, max(missing, 0))
            if not self._tasks:
                raise ValueError("the taskset is empty")
            return self._tasks[index % len(self._tasks)]

    def play(self, task: Any, model: Json, key_name: str) -> Any:
        from verifiers.v1 import EvalClientConfig, ModelContext

        client = EvalClientConfig(base_url=model["base_url"], api_key_var=key_name)
        context = ModelContext(model=model["name"], client=client)
        return self.do(self._env.run_episode(task, context))


async def _finish(work: Coroutine[Any, Any, Any]) -> Any:
    """The library exits where something is missing; that would end the loop silently."""
    try:
        return await work
    except SystemExit as error:
        raise RuntimeError(f"verifiers gave up: {error}") from None


class VerifiersEpisode:
    """An Episode."""

    def __init__(self, world: World, number: int) -> None:
        self._world = world
        self._key_name = f"API_KEY_{number}"
        self._reward: float | None = None

    def reset(self, payload: Json, seed: int, model: Json) -> Json:
        os.environ[self._key_name] = model["api_key"]
        try:
            task = self._world.task(int(payload["index"]))
            episode = self._world.play(task, model, self._key_name)
        finally:
            del os.environ[self._key_name]
        if not episode.ok:
            traces = [error for trace in episode.traces for error in trace.errors]
            errors = [f"{error.type}: {error.message}" for error in (*episode.errors, *traces)]
            raise RuntimeError("; ".join(errors) or "the episode is not ok")
        rewards = [trace.reward for trace in episode.traces]
        self._reward = sum(rewards) / len(rewards)
        return {"done": True, "reward": self._reward, "info": {"rewards": rewards}}

    def step(self, text: str, tool_calls: list[Json]) -> Json:
        raise RuntimeError("this environment plays by itself; the episode is over after reset")

    def score(self) -> float | None:
        return self._reward

    def close(self) -> None:
        self._reward = None


def load(settings: Json) -> Callable[[], VerifiersEpisode]:
    home = Path(tempfile.mkdtemp(prefix="verifiers-"))
    os.environ["HOME"] = str(home)  # before the import: its cache lies below
    uv = home / ".local" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.write_text(UV.format(python=sys.executable))
    uv.chmod(0o755)
    world = World(settings["name"], settings["options"])
    numbers = itertools.count()
    return lambda: VerifiersEpisode(world, next(numbers))


if __name__ == "__main__":
    serve(load)
