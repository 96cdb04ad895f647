# SPDX-License-Identifier: Apache-2.0
"""An OpenEnv server, as its authors would write one: guess a number that the seed chose."""

from __future__ import annotations

from typing import Any

from openenv.core.env_server import Environment, create_app
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    guess: int


class Hint(Observation):
    hint: str = ""


class GuessEnvironment(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()
        self._target = 0

    def reset(self, seed: int | None = None, episode_id: str | None = None, **rest: Any) -> Hint:
        self._state = State(episode_id=episode_id or "e", step_count=0)
        self._target = (seed or 0) % 9 + 1
        return Hint(hint="guess 1 to 9", done=False, reward=0.0)

    def step(self, action: Guess, timeout_s: float | None = None, **rest: Any) -> Hint:
        self._state.step_count += 1
        is_right = action.guess == self._target
        hint = "right" if is_right else "higher" if action.guess < self._target else "lower"
        return Hint(hint=hint, done=is_right, reward=float(is_right))

    @property
    def state(self) -> State:
        return self._state


app = create_app(GuessEnvironment, Guess, Hint, env_name="guess", max_concurrent_envs=32)
