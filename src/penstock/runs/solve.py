# SPDX-License-Identifier: Apache-2.0
"""Watches an agent work on one task: one rollout through the workflow of a run, event by event.

Owns the events and their order. The rollout is as on a node: same workflow, tools, engine and
reward. Nothing is kept, and nothing is printed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from penstock.config import SourceConfig
from penstock.dataflow.service.build import run_info
from penstock.dataflow.service.build_sources import workflow_text
from penstock.dataflow.sources import derive_seed
from penstock.errors import ConfigError
from penstock.gateway.model_calls import Answer, Call, Delta, DeltaCallback, RawPrompt
from penstock.runs.eval_target import EvalTarget
from penstock.runs.local_gateway import (
    SessionKinds,
    cancel,
    open_gateway,
    open_rollouts,
    wait_or_raise,
)
from penstock.runs.logged_gateway import LoggedSession, TextSession, sent_messages
from penstock.runs.service_process import add_import_paths
from penstock.types import JsonObject, Task, Trajectory


class EventKind(StrEnum):
    MESSAGE = "message"
    """What the model was sent: system prompt, question, result of a tool."""
    REASONING = "reasoning"
    """A piece of what the model thinks."""
    TEXT = "text"
    """A piece of what the model says."""
    CALLS = "calls"
    """A tool that the model calls."""
    END = "end"
    """The model's answer is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveEvent:
    kind: EventKind
    who: str
    """The role of a message, or the policy or role that answers; with the sub-agent, if any."""
    text: str = ""


Watch = Callable[[SolveEvent], None]


class _Watched(LoggedSession):
    """Tells what it sends and what comes back, while it comes."""

    def __init__(self, watch: Watch, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._watch = watch
        self._seen: list[JsonObject] = []

    async def _reply(self, call: Call | RawPrompt, on_chunk: DeltaCallback | None) -> Answer:
        policy, role = self.resolve(call)
        who = f"{role or policy} {self.agent}".rstrip()
        self._show_new(sent_messages(call))
        streamed: list[Delta] = []

        def show(delta: Delta) -> None:
            streamed.append(delta)
            self._show(EventKind.REASONING, who, delta.reasoning)
            self._show(EventKind.TEXT, who, delta.text)
            if on_chunk is not None:
                on_chunk(delta)

        answer = await super()._reply(call, show)
        if not streamed:  # the engine answers as a whole
            show(Delta(text=answer.text, reasoning=answer.reasoning))
        for asked in answer.tool_calls:
            self._show(EventKind.CALLS, who, f"{asked.name}({asked.arguments})")
        self._watch(SolveEvent(kind=EventKind.END, who=who))
        self._seen = [*sent_messages(call), answer.message]
        return answer

    def _show_new(self, sent: Sequence[JsonObject]) -> None:
        """What this call adds to the last one; all of it if it is another conversation."""
        is_longer = len(sent) > len(self._seen) and all(
            (new.get("content") or "") == (old.get("content") or "")
            for new, old in zip(sent, self._seen, strict=False)
        )
        for message in sent[len(self._seen) :] if is_longer else sent:
            self._show(
                EventKind.MESSAGE, str(message["role"]), str(message.get("content", "")).rstrip()
            )

    def _show(self, kind: EventKind, who: str, text: str) -> None:
        if text:
            self._watch(SolveEvent(kind=kind, who=who, text=text))


class _WatchedText(_Watched, TextSession):
    """The same, with a server of text."""


def question_payload(question: str, answer: str | None) -> JsonObject:
    """The payload of a task with this question."""
    return {"prompt": question} | ({} if answer is None else {"answer": answer})


async def solve(
    target: EvalTarget, payload: JsonObject, source: str | None = None
) -> AsyncGenerator[SolveEvent | Trajectory]:
    """Events as they happen; last, the trajectory.

    source: the source whose workflow, tools and sampling are used; by default the first."""
    config = target.run.config
    add_import_paths(target.run.python_path)
    chosen = _source(target, source)
    workflow = "" if chosen.workflow is None else workflow_text(chosen.workflow)
    seed = derive_seed(config.seed, "solve")
    task = Task(
        key="solve", source=chosen.name, ordinal=0, payload=payload, workflow=workflow, seed=seed
    )
    info = run_info(config)
    events: asyncio.Queue[SolveEvent | None] = asyncio.Queue()
    weights = {target.policy: target.weights} if target.weights is not None else {}
    sessions = SessionKinds(
        engine=partial(_Watched, events.put_nowait),
        server=partial(_WatchedText, events.put_nowait),
    )
    async with AsyncExitStack() as resources:
        opened = open_gateway(target.run, info, target.server, weights=weights, sessions=sessions)
        gateway = await resources.enter_async_context(opened)
        rollouts = open_rollouts(target.run, info, gateway)
        rollout, scoring = await resources.enter_async_context(rollouts)
        if scoring is not None:  # it ends early only if the reward cannot be imported
            scoring.add_done_callback(lambda _: events.put_nowait(None))
        attempt = asyncio.create_task(_run(rollout(task, 0), events))
        resources.push_async_callback(cancel, attempt)
        while (event := await events.get()) is not None:
            yield event
        await wait_or_raise(attempt, scoring)
        yield await attempt


async def _run(rollout: Any, events: asyncio.Queue[SolveEvent | None]) -> Trajectory:
    try:
        return await rollout
    finally:
        events.put_nowait(None)


def _source(target: EvalTarget, name: str | None) -> SourceConfig:
    sources = [one for one in target.run.config.sources if one.session is None]
    found = [one for one in sources if name in (None, one.name)]
    if not found:
        known = ", ".join(one.name for one in sources) or "none with tasks"
        raise ConfigError(
            f"run {target.model} has no source {name or 'with tasks'!r}, whose workflow would work "
            f"on the question; choose --source from: {known}"
        )
    return found[0]
