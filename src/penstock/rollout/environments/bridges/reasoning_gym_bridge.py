# SPDX-License-Identifier: Apache-2.0
"""The bridge of reasoning-gym: a procedural data set as an environment of one step.

Task `index` is entry `index` of the data set with the seed of the options, so a run can be
repeated. The library's own scorer judges the answer. Imports nothing of penstock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import reasoning_gym
from serving import Json, serve

SIZE = 1 << 30
"""More entries than a run has; they are made when they are read."""


class ReasoningEpisode:
    """An Episode."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._entry: Json = {}
        self._score: float | None = None

    def reset(self, payload: Json, seed: int, model: Json) -> Json:
        self._entry = self._data[int(payload["index"])]
        self._score = None
        return {"text": self._entry["question"]}

    def step(self, text: str, tool_calls: list[Json]) -> Json:
        answer = reasoning_gym.utils.extract_answer(text) or text.strip()
        self._score = float(self._data.score_answer(answer=answer, entry=self._entry))
        return {"done": True, "reward": self._score, "info": {"answer": self._entry["answer"]}}

    def score(self) -> float | None:
        return self._score

    def close(self) -> None:
        self._entry = {}


def load(settings: Json) -> Callable[[], ReasoningEpisode]:
    options = {"size": SIZE, "seed": 0, **settings["options"]}
    data = reasoning_gym.create_dataset(settings["name"], **options)
    return lambda: ReasoningEpisode(data)


if __name__ == "__main__":
    serve(load)
