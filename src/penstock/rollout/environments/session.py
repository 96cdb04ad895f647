# SPDX-License-Identifier: Apache-2.0
"""`ctx.env`: one attempt's episode. Owns its hooks, and remembers a failure: an attempt whose
environment failed has failed, whatever its workflow made of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from penstock.errors import EnvironmentFailed
from penstock.gateway.model_calls import ToolCall
from penstock.rollout.activities import busy_with
from penstock.rollout.environments.bridge_process import Bridge
from penstock.rollout.environments.protocol import BridgeAnswer
from penstock.rollout.environments.types import Action, AfterStep, BeforeStep, Observation
from penstock.types import JsonObject, Task

MAX_SEED = (1 << 31) - 1
"""Largest that every library takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    before_step: BeforeStep | None = None
    after_step: AfterStep | None = None


@dataclass(slots=True, kw_only=True)
class EnvironmentSession:
    """An Environment."""

    task: Task
    open_bridge: Callable[[], Awaitable[Bridge]]
    """Waits for a free place; raises EnvironmentFailed if there is no bridge."""
    release: Callable[[Bridge, str], None]
    """Ends an episode in the background, and frees its place."""
    name: str
    """Names its episodes."""
    api_key: str
    policy: str
    """For an environment that plays by itself."""
    hooks: Hooks = field(default_factory=Hooks)
    failure: EnvironmentFailed | None = None
    """The first failure of this attempt's environment."""
    _bridge: Bridge | None = None
    _episode: str = ""
    _num_resets: int = 0

    async def reset(self) -> Observation:
        self.close()
        try:
            with busy_with(f"the environment of source {self.task.source}, start"):
                self._bridge = await self.open_bridge()
        except EnvironmentFailed as error:
            self.failure = self.failure or error
            raise
        self._num_resets += 1
        self._episode = f"{self.name}.{self._num_resets}"
        self._bridge.episodes.add(self._episode)
        payload = self.task.payload
        seed = payload.get("seed", self.task.seed)
        answer = await self._call(
            "reset",
            lease_s=self._bridge.settings.lease_s,
            payload=payload,
            seed=seed & MAX_SEED if isinstance(seed, int) else 0,
            model=self._model(self._bridge.model_url),
        )
        return self._observation(answer)

    async def step(self, text: str, tool_calls: Sequence[ToolCall] = ()) -> Observation:
        action = Action(text=text, tool_calls=tuple(tool_calls))
        if self.hooks.before_step is not None:
            action = self.hooks.before_step(action, self.task)
        calls = [
            {"id": call.id, "name": call.name, "arguments": _encodable(call.arguments)}
            for call in action.tool_calls
        ]
        answer = await self._call("step", text=_encodable(action.text), tool_calls=calls)
        observation = self._observation(answer)
        if self.hooks.after_step is not None:
            observation = self.hooks.after_step(observation, self.task)
        return observation

    async def score(self) -> float | None:
        return (await self._call("score")).score

    def _model(self, base_url: str) -> JsonObject:
        if not base_url:
            return {}
        return {"base_url": base_url, "api_key": self.api_key, "name": self.policy}

    def close(self) -> None:
        """End the episode, if there is one; does not wait for it."""
        bridge, self._bridge = self._bridge, None
        if bridge is not None:
            self.release(bridge, self._episode)

    async def _call(self, call: str, **values: object) -> BridgeAnswer:
        if self._bridge is None:
            raise RuntimeError(f"ctx.env.{call}() before ctx.env.reset(); reset it first")
        try:
            with busy_with(f"{self._bridge.settings.label}, {call}"):
                return await self._bridge.call(call, episode=self._episode, **values)
        except EnvironmentFailed as error:
            self.failure = self.failure or error
            raise

    def _observation(self, answer: BridgeAnswer) -> Observation:
        if answer.observation is None:
            assert self._bridge is not None
            label = self._bridge.settings.label
            self.failure = EnvironmentFailed(f"{label}: answered without an observation; mend it")
            raise self.failure
        return answer.observation.observation()


def _encodable(text: str) -> str:
    """Half a character, which a model may end with, cannot be sent."""
    return text.encode(errors="replace").decode()
