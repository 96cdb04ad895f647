# SPDX-License-Identifier: Apache-2.0
"""`ctx.tools`: the tools that one attempt may call, and the record of its calls.

Owns the bounds of a call: its arguments, its time, the length of its result, the number of calls.
Never raises for what a tool or the model did; a sandbox that fails raises SandboxError.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from penstock.bounds import MAX_AGENT_CHARS, MAX_TOOL_CHARS, MAX_TOOL_USES
from penstock.gateway.model_calls import ToolCall
from penstock.redaction import hide_known
from penstock.rollout.tool_sandbox import ToolSandbox
from penstock.rollout.tools.arguments import ArgumentCheck
from penstock.rollout.tools.types import ToolFailed, ToolResult, ToolSession, ToolSpec
from penstock.types import JsonObject, ToolUse

MAX_ARGUMENT_CHARS = 1 << 20
MAX_ARGUMENT_DEPTH = 64
"""Below what the encoders of servers take: where one fails, the server ends for all attempts."""
MAX_NAME_CHARS = 256
RECOVER_S = 30.0
"""How long ending a server may take before the next call goes on without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTool:
    """A tool under the name by which models call it."""

    name: str
    server: str
    spec: ToolSpec
    """As its server offers it, with the server's own name for it."""
    check: ArgumentCheck
    timeout_s: float
    max_result_chars: int

    @property
    def body(self) -> JsonObject:
        """In OpenAI's format."""
        function = {
            "name": self.name,
            "description": self.spec.description,
            "parameters": self.spec.parameters,
        }
        return {"type": "function", "function": function}


@dataclass(slots=True)
class _Record:
    """The calls of an attempt, of all its agents."""

    uses: list[ToolUse] = field(default_factory=list[ToolUse])
    num_started: int = 0


class Tools:
    """The tools of an attempt. Empty where the run file has no `tools:`."""

    def __init__(
        self,
        offered: Sequence[OfferedTool] = (),
        sessions: Mapping[str, ToolSession] | None = None,
        *,
        owned: Sequence[str] = (),
        sandbox: ToolSandbox | None = None,
        last_turn: Callable[[], int] = lambda: -1,
        agent: str = "",
        record: _Record | None = None,
    ) -> None:
        self._offered = {tool.name: tool for tool in offered}
        self._sessions = sessions or {}
        self._owned = tuple(owned)
        self.sandbox = sandbox
        """Where the tools python and files work; None if the attempt has neither."""
        self._last_turn = last_turn
        self._agent = agent[:MAX_AGENT_CHARS]
        self._record = record or _Record()

    @property
    def specs(self) -> list[JsonObject]:
        """The tools in OpenAI's format, for `policy.chat(messages, tools=ctx.tools.specs)`."""
        return [tool.body for tool in self._offered.values()]

    @property
    def uses(self) -> tuple[ToolUse, ...]:
        """Every call so far, of all agents of the attempt, in order of their ends."""
        return tuple(self._record.uses)

    def for_agent(self, agent: str) -> Tools:
        """The same tools, whose calls are recorded under the path of a sub-agent."""
        return Tools(
            tuple(self._offered.values()),
            self._sessions,
            sandbox=self.sandbox,
            last_turn=self._last_turn,
            agent=agent,
            record=self._record,
        )

    async def call(self, call: ToolCall | JsonObject) -> ToolResult:
        """Call a tool and wait for its result: an entry of `answer.tool_calls`, or a call in
        OpenAI's format. What goes wrong is a result with `is_error`, for the model to read."""
        name, arguments = _read_call(call)
        started = time.monotonic()
        self._record.num_started += 1
        if self._record.num_started > MAX_TOOL_USES:
            return _error(f"this attempt has made {MAX_TOOL_USES} calls of tools; no more are made")
        result = await self._run(name, arguments)
        self._record.uses.append(
            ToolUse(
                turn=self._last_turn(),
                name=clean(name, MAX_NAME_CHARS),
                arguments=clean(arguments, MAX_TOOL_CHARS),
                result=clean(result.text, MAX_TOOL_CHARS),
                is_error=result.is_error,
                seconds=time.monotonic() - started,
                cost=result.cost,
                agent=self._agent,
            )
        )
        return result

    async def close(self) -> None:
        """End the servers of this attempt. The node calls it."""
        await asyncio.gather(*(self._sessions[name].close() for name in self._owned))
        if self.sandbox is not None:
            await self.sandbox.close()

    async def _run(self, name: str, arguments: str) -> ToolResult:
        tool = self._offered.get(name)
        if tool is None:
            known = ", ".join(self._offered) or "none"
            return _error(f"there is no tool {name[:MAX_NAME_CHARS]!r}; the tools are: {known}")
        given = _parse(arguments)
        if isinstance(given, str):
            return _error(given)
        if problem := tool.check(given):
            return _error(problem)
        result = await self._within_deadline(tool, given)
        text = hide_known(clean(result.text))  # a server may say its own settings in an error
        return replace(result, text=shortened(text, tool.max_result_chars))

    async def _within_deadline(self, tool: OfferedTool, arguments: JsonObject) -> ToolResult:
        session = self._sessions[tool.server]
        limit = asyncio.timeout(tool.timeout_s)
        try:
            async with limit:
                return await session.call(tool.spec.name, arguments)
        except ToolFailed as failure:
            return _error(str(failure))
        except TimeoutError:
            if not limit.expired():
                raise
        await _recover(session)
        return _error(f"{tool.name} did not answer within {tool.timeout_s:g} s; it was stopped")


async def _recover(session: ToolSession) -> None:
    try:
        async with asyncio.timeout(RECOVER_S):
            await session.recover()
    except TimeoutError:
        await session.close()


def _read_call(call: ToolCall | JsonObject) -> tuple[str, str]:
    """The name, and the arguments as JSON text."""
    if isinstance(call, ToolCall):
        return call.name, call.arguments
    function = call.get("function", call)
    given: JsonObject = cast(JsonObject, function) if isinstance(function, dict) else {}
    name, arguments = given.get("name", ""), given.get("arguments", "")
    return str(name), arguments if isinstance(arguments, str) else json.dumps(arguments)


def _parse(text: str) -> JsonObject | str:
    """The arguments; or what is wrong with them, for the model."""
    if len(text) > MAX_ARGUMENT_CHARS:
        return f"the arguments have {len(text):,} characters; at most {MAX_ARGUMENT_CHARS:,} pass"
    try:
        parsed: Any = json.loads(text or "{}", parse_constant=_refuse_constant)
        if "\\ud" in text.lower():  # perhaps half a character, which no server can read
            parsed = json.loads(clean(json.dumps(parsed, ensure_ascii=False)))
    except (ValueError, RecursionError) as error:
        return f"the arguments are not valid JSON: {error}"
    if not isinstance(parsed, dict):
        return f"the arguments must be a JSON object, not {type(parsed).__name__}"
    if _is_deep(cast(JsonObject, parsed)):
        return f"the arguments are more than {MAX_ARGUMENT_DEPTH} levels deep; nest them less"
    return cast(JsonObject, parsed)


def _is_deep(value: JsonObject) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_ARGUMENT_DEPTH):
        level = [one for outer in level for one in _inner(outer) if isinstance(one, dict | list)]
        if not level:
            return False
    return True


def _inner(value: Any) -> Iterable[Any]:
    return cast(JsonObject, value).values() if isinstance(value, dict) else value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _error(text: str) -> ToolResult:
    return ToolResult(text=text, is_error=True)


def clean(text: str, max_chars: int | None = None) -> str:
    """A text that can be encoded: lone surrogates are replaced."""
    return text[:max_chars].encode(errors="replace").decode()


def shortened(text: str, max_chars: int) -> str:
    """The beginning and the end of a long text: an error is usually at the end."""
    if len(text) <= max_chars:
        return text
    note = f"\n[… {len(text) - max_chars:,} characters cut …]\n"
    kept = max(max_chars - len(note), 0)
    return f"{text[: kept - kept // 2]}{note}{text[len(text) - kept // 2 :]}"[:max_chars]
