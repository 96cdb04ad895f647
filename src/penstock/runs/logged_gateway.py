# SPDX-License-Identifier: Apache-2.0
"""A gateway that remembers the calls of its sessions as messages, for people to read.

Owns two kinds of sessions: `LoggedSession`, which calls an engine as every session does, and
`TextSession`, which passes calls on to any OpenAI-compatible server. The latter knows only text, so
its turns have no tokens and cannot be trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import httpx2

from penstock.api_keys import key_headers
from penstock.errors import BadRequest, EngineError
from penstock.gateway.gateway import Gateway
from penstock.gateway.generation import Completion, Generate, GenerationRequest
from penstock.gateway.model_calls import (
    Answer,
    Call,
    Delta,
    DeltaCallback,
    RawPrompt,
    ToolCall,
    Usage,
)
from penstock.gateway.renderer import Renderer
from penstock.gateway.session import Session
from penstock.types import (
    FinishReason,
    JsonObject,
    Turn,
    log_probs,
    token_ids,
)

REQUEST_TIMEOUT_S = 600.0
_SAMPLING = ("temperature", "top_p", "max_tokens")
"""Fields of the sampling spec that every OpenAI-compatible server knows."""


class LoggedSession(Session):
    """Remembers its calls and answers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls: list[tuple[list[JsonObject], Answer]] = []

    async def call(self, call: Call | RawPrompt, on_chunk: DeltaCallback | None = None) -> Answer:
        sent = sent_messages(call)  # now, because workflows extend the list they sent
        answer = await self._reply(call, on_chunk)
        self.calls.append((sent, answer))
        return answer

    async def _reply(self, call: Call | RawPrompt, on_chunk: DeltaCallback | None) -> Answer:
        return await super().call(call, on_chunk)

    def messages(self) -> list[JsonObject]:
        """The conversation: what each call added, and its answer."""
        found: list[JsonObject] = []
        seen: list[JsonObject] = []
        for sent, answer in self.calls:
            is_longer = sent[: len(seen)] == seen
            found += sent[len(seen) :] if is_longer else sent
            reply = _shown(answer.message)
            found.append(reply)
            seen = [*sent, reply]
        return found


def sent_messages(call: Call | RawPrompt) -> list[JsonObject]:
    """What a call sends, without what only programs read."""
    if isinstance(call, Call):
        return [_shown(message) for message in call.messages]
    return [{"role": "prompt", "content": str(call.prompt)}]


def _shown(message: JsonObject) -> JsonObject:
    """The parts that people read."""
    return {key: message[key] for key in ("role", "content", "tool_calls") if message.get(key)}


@dataclass(frozen=True, slots=True, kw_only=True)
class TextServer:
    """An OpenAI-compatible server."""

    base_url: str
    """Like http://127.0.0.1:8000/v1."""
    model: str
    api_key: str = ""
    http: httpx2.AsyncClient

    async def post(self, path: str, body: JsonObject) -> JsonObject:
        url = f"{self.base_url.rstrip('/')}/{path}"
        headers = key_headers(url, self.api_key, "OPENAI_API_KEY")
        try:
            reply = await self.http.post(
                url, json={"model": self.model, **body}, headers=headers, timeout=REQUEST_TIMEOUT_S
            )
        except httpx2.HTTPError as error:
            raise EngineError(
                f"{url}: {error or type(error).__name__}; check --base-url and that the server runs"
            ) from None
        if reply.status_code >= 400:
            shown = reply.content[:300].decode("utf-8", "replace")
            fix = "set OPENAI_API_KEY" if reply.status_code in (401, 403) else "check --model"
            raise EngineError(f"{url} answered {reply.status_code}: {shown}; {fix}")
        try:
            return cast(JsonObject, reply.json())
        except ValueError:
            raise EngineError(
                f"{url} did not answer with JSON; does --base-url end with /v1?"
            ) from None


class TextSession(LoggedSession):
    """Passes its calls on to a server of text."""

    def __init__(self, server: TextServer, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._server = server
        self._text_turns: list[Turn] = []

    def turns(self) -> tuple[Turn, ...]:
        return tuple(self._text_turns)

    def turn(self, index: int) -> Turn:
        return self._text_turns[index]

    def mark_unreached(self, index: int) -> None:
        self._text_turns[index] = replace(self._text_turns[index], reached_agent=False)

    def renderer(self, name: str) -> Renderer:
        return cast(Renderer, self)  # all that is asked of it here is `decode_visible`

    def decode_visible(self, ids: Sequence[int]) -> str:
        return self.calls[-1][1].text if self.calls else ""

    async def _reply(self, call: Call | RawPrompt, on_chunk: DeltaCallback | None) -> Answer:
        self._check_open()
        started_at = time.time()
        sampling = {name: getattr(self._sampling, name) for name in _SAMPLING}
        body = {**sampling, **_overrides(call)}
        if isinstance(call, Call):
            tools = {"tools": list(call.tools)} if call.tools else {}
            reply = await self._server.post(
                "chat/completions", {**body, **tools, "messages": list(call.messages)}
            )
        elif isinstance(call.prompt, str):
            reply = await self._server.post("completions", {**body, "prompt": call.prompt})
        else:
            raise BadRequest("a server of text takes no token ids; send the prompt as text")
        answer = _read_answer(reply, len(self._text_turns), self._server.base_url)
        policy, role = self.resolve(call)
        self._text_turns.append(
            Turn(
                policy=policy,
                parent=len(self._text_turns) - 1,
                prompt_ids=token_ids(()),
                sampled_ids=token_ids(()),
                logprobs=log_probs(()),
                spans=(),
                sampling=self._sampling,
                finish=answer.finish,
                reached_agent=True,
                started_at=started_at,
                ended_at=time.time(),
                role=role,
                agent=self.agent,
            )
        )
        if on_chunk is not None:
            on_chunk(Delta(text=answer.text, reasoning=answer.reasoning))
        return answer


def _overrides(call: Call | RawPrompt) -> JsonObject:
    given = call.overrides
    if given is None:
        return {}
    names = ("temperature", "top_p", "max_tokens", "seed", "stop")
    found = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    if given.max_completion_tokens:
        found["max_tokens"] = given.max_completion_tokens
    return found


def _read_answer(reply: JsonObject, index: int, url: str) -> Answer:
    try:
        choice: Any = reply["choices"][0]
        message: Any = choice.get("message") or {"content": choice.get("text")}
        usage: Any = reply.get("usage") or {}
        return Answer(
            text=message.get("content") or "",
            finish=FinishReason.LENGTH
            if choice.get("finish_reason") == "length"
            else FinishReason.STOP,
            turn=index,
            usage=Usage(
                prompt_tokens=usage.get("prompt_tokens") or 0,
                completion_tokens=usage.get("completion_tokens") or 0,
            ),
            reasoning=message.get("reasoning_content") or "",
            tool_calls=tuple(
                ToolCall(
                    id=call["id"],
                    name=call["function"]["name"],
                    arguments=call["function"]["arguments"],
                )
                for call in message.get("tool_calls") or ()
            ),
        )
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise EngineError(
            f"{url}: not an answer of the OpenAI API ({type(error).__name__}: {error}); check "
            "--base-url"
        ) from None


class LoggedGateway(Gateway):
    """Opens sessions of one kind and keeps them by seed."""

    def __init__(
        self, generate: Generate, session_type: Callable[..., LoggedSession] = LoggedSession
    ) -> None:
        super().__init__(generate, self._log_session)
        self._session_type = session_type
        self.sessions: dict[int, LoggedSession] = {}

    def _log_session(self, *args: Any, seed: int, **kwargs: Any) -> LoggedSession:
        self.sessions[seed] = self._session_type(*args, seed=seed, **kwargs)
        return self.sessions[seed]


async def no_engine(request: GenerationRequest) -> Completion:
    """For sessions of text, which never generate tokens."""
    raise EngineError("this session has no engine")
