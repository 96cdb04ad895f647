# SPDX-License-Identifier: Apache-2.0
"""The bridge of gymnasium: text environments with a finite set of actions, such as toy_text.

The model sees what `render_mode: ansi` draws, with coloured cells in [brackets], and names an
action in words of `actions`, or by its number. Needs gymnasium; imports nothing of penstock."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium
from serving import Json, serve

_COLOURED = re.compile(r"\x1b\[[0-9;]*m(.*?)\x1b\[0?m", re.DOTALL)
_WORD = re.compile(r"[A-Za-z0-9_-]+")
MAX_DIGITS = 19
"""Of an action's number: 64 bits. Python refuses to read thousands of digits."""


class GymnasiumEpisode:
    """An Episode."""

    def __init__(self, env: Any, actions: Mapping[str, int]) -> None:
        self._env = env
        self._actions = {name.lower(): number for name, number in actions.items()}
        self._total = 0.0

    @property
    def actions(self) -> Any:
        return self._env.action_space

    def reset(self, payload: Json, seed: int, model: Json) -> Json:
        seen, info = self._env.reset(seed=seed)
        self._total = 0.0
        return {"text": self._shown(seen), "info": {"state": _plain(seen), **_numbers(info)}}

    def step(self, text: str, tool_calls: list[Json]) -> Json:
        action = self._read(text)
        if action is None:
            names = ", ".join(self._actions) or f"a number below {self._env.action_space.n}"
            return {"text": f"No such action. Answer with one of: {names}.", "reward": 0.0}
        seen, reward, is_over, is_cut, info = self._env.step(action)
        self._total += float(reward)
        return {
            "text": self._shown(seen),
            "done": bool(is_over or is_cut),
            "reward": float(reward),
            "info": {"state": _plain(seen), "truncated": bool(is_cut), **_numbers(info)},
        }

    def score(self) -> float:
        return self._total

    def close(self) -> None:
        self._env.close()

    def _read(self, text: str) -> int | None:
        """The last word that names an action."""
        for word in reversed(_WORD.findall(text.lower())):
            if word in self._actions:
                return self._actions[word]
            if not self._actions and self._is_number_of_action(word):
                return int(word)
        return None

    def _is_number_of_action(self, word: str) -> bool:
        if not word.isdecimal() or len(word) > MAX_DIGITS:
            return False
        return int(word) < self._env.action_space.n

    def _shown(self, seen: Any) -> str:
        drawn = self._env.render()
        if not isinstance(drawn, str):
            return str(seen)
        return _COLOURED.sub(lambda found: f"[{found[1]}]", drawn).strip()


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _numbers(info: Mapping[str, Any]) -> Json:
    return {key: _plain(value) for key, value in info.items() if key != "action_mask"}


def load(settings: Json) -> Callable[[], GymnasiumEpisode]:
    name, options, actions = settings["name"], settings["options"], settings["actions"]

    def make() -> GymnasiumEpisode:
        try:
            env = gymnasium.make(name, render_mode="ansi", **options)
        except TypeError:  # it draws nothing; the model sees the observation itself
            env = gymnasium.make(name, **options)
        return GymnasiumEpisode(env, actions)

    space = (probe := make()).actions
    probe.close()
    if not isinstance(space, gymnasium.spaces.Discrete):
        raise ValueError(f"{name} has actions {space}; this bridge plays those with a finite set")
    wrong = {word: number for word, number in actions.items() if not 0 <= number < space.n}
    if wrong:
        raise ValueError(f"{name} has actions 0 to {space.n - 1}, and env.actions names {wrong}")
    return make


if __name__ == "__main__":
    serve(load)
