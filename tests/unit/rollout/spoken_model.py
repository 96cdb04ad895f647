# SPDX-License-Identifier: Apache-2.0
"""A model that says what a test tells it to, as a server of text behind a real session."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

from tests.unit.rollout.test_attempt import DirectScorer

from penstock.gateway.model_calls import ToolCall
from penstock.rollout.context import Context
from penstock.rollout.prompt_templates import parse_prompt
from penstock.rollout.tools.types import ToolResult
from penstock.runs.logged_gateway import LoggedGateway, TextServer, TextSession, no_engine
from penstock.types import JsonObject, PolicyName, SamplingSpec, Task

POLICY = PolicyName("policy")


class SpokenModel:
    """Answers each request with the next text, or with a function of the last message. A text that
    begins with `call:` is a tool call of `look` with the rest as its argument."""

    def __init__(self, replies: Sequence[str] | Callable[[str], str]) -> None:
        self._replies = replies if callable(replies) else None
        self._left = [] if callable(replies) else list(replies)
        self.requests: list[JsonObject] = []

    async def post(self, path: str, body: JsonObject) -> JsonObject:
        self.requests.append({**body, "messages": list(body["messages"])})
        last = body["messages"][-1]["content"]
        text = self._replies(last) if self._replies else self._left.pop(0)
        message: JsonObject = {"role": "assistant", "content": text}
        if text.startswith("call:"):
            function = {"name": "look", "arguments": f'{{"at": "{text.removeprefix("call:")}"}}'}
            call = {"id": f"c{len(self.requests)}", "type": "function", "function": function}
            message |= {"content": "", "tool_calls": [call]}
        return {"choices": [{"message": message, "finish_reason": "stop"}]}

    @property
    def base_url(self) -> str:
        return "spoken"

    def said(self, request: int) -> str:
        """The last message of a request."""
        return self.requests[request]["messages"][-1]["content"]


class SpokenTools:
    """Tools with the shape of `ctx.tools`."""

    sandbox = None

    def __init__(self, *names: str) -> None:
        self._names = names
        self.calls: list[tuple[str, str]] = []

    @property
    def specs(self) -> list[JsonObject]:
        parameters = {"type": "object", "properties": {"at": {"type": "string"}}}
        return [
            {"type": "function", "function": {"name": name, "parameters": parameters}}
            for name in self._names
        ]

    async def call(self, call: ToolCall) -> ToolResult:
        self.calls.append((call.name, call.arguments))
        is_bad = "bad" in call.arguments
        return ToolResult(text="broken" if is_bad else f"seen by {call.name}", is_error=is_bad)


def context(
    model: SpokenModel,
    task: Task,
    *,
    roles: Mapping[str, PolicyName] | None = None,
    scorer: DirectScorer | None = None,
    prompts: Mapping[str, str] | None = None,
    **parts: Any,
) -> Context:
    """A context whose model calls reach `model`."""
    server = cast(TextServer, model)
    gateway = LoggedGateway(no_engine, partial(TextSession, server))
    session = gateway.open(policies=[POLICY], sampling=SamplingSpec(), seed=1, roles=roles)
    templates = {name: parse_prompt(name, text) for name, text in (prompts or {}).items()}
    return Context(
        session,
        cast(Any, None),
        seed=1,
        task=task,
        scorer=scorer,
        prompts=templates,
        **parts,
    )
