# SPDX-License-Identifier: Apache-2.0
"""What a workflow and an environment exchange: actions, observations, and `ctx.env` as a workflow
sees it. Types only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.gateway.model_calls import ToolCall
from penstock.types import JsonObject, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What the model does in one step."""

    text: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls of tools that the environment offers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the environment shows after `reset` or `step`."""

    text: str = ""
    """For the model."""
    messages: tuple[JsonObject, ...] = ()
    """Instead of the text: messages in OpenAI's chat format, such as a system prompt at the start,
    or one result for each tool call."""
    tools: tuple[JsonObject, ...] = ()
    """Tools that the model may call, in OpenAI's format; of `reset` only."""
    done: bool = False
    """The episode is over; do not step again. Already after `reset` where the environment plays by
    itself and calls the model over HTTP."""
    reward: float | None = None
    """Of this step; `score()` gives the episode's."""
    info: JsonObject = field(default_factory=JsonObject)
    """Anything else, for people and hooks."""


class Environment(Protocol):
    """`ctx.env`: one episode, ended with the attempt. Every call raises EnvironmentFailed if the
    environment hangs, crashes or breaks its protocol; the attempt then failed, whatever the
    workflow does afterwards."""

    async def reset(self) -> Observation:
        """Begin the episode of this task. The seed is the task's, the same for a whole group."""
        ...

    async def step(self, text: str, tool_calls: Sequence[ToolCall] = ()) -> Observation:
        """Act: pass `answer.text` and `answer.tool_calls`."""
        ...

    async def score(self) -> float | None:
        """The reward of the episode; None if the environment has none."""
        ...


BeforeStep = Callable[[Action, Task], Action]
"""Hook `before_step`: sees each action first, and returns the one to take."""
AfterStep = Callable[[Observation, Task], Observation]
"""Hook `after_step`: sees each observation of a step first, and returns the one to show."""
