# SPDX-License-Identifier: Apache-2.0
"""One rollout's model calls, recorded as turns.

Owns a session's turns and the answers its agent received. In-process workflows and HTTP agents
share one code path, `Session.call`. A sub-agent has a separate session, with its own key, seed
and budget, that records into the same turns. Knows nothing of tasks, rewards or batches.
"""

from __future__ import annotations

import asyncio
import copy
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from penstock.bounds import MAX_SESSION_BYTES, MAX_TOKENS, MAX_TURNS
from penstock.errors import ContextOverflow, EngineError, NotFound, TooLarge, Unauthorized
from penstock.gateway.answer_history import AnswerHistory
from penstock.gateway.budgets import Budget, BudgetMeter
from penstock.gateway.fair_queue import FairQueue
from penstock.gateway.generation import Completion, Generate, GenerationRequest
from penstock.gateway.model_calls import Answer, Call, DeltaCallback, RawPrompt, Usage
from penstock.gateway.parsing import cut_at_stop, parse_answer
from penstock.gateway.prompts import Prompt, PromptBuilder, overflow
from penstock.gateway.renderer import AnswerTexts, Renderer
from penstock.gateway.salvaged_answers import SalvagedAnswers
from penstock.gateway.sampling import Overrides, override, read_overrides
from penstock.gateway.stream_decoder import StreamDecoder
from penstock.gateway.template_probe import TemplateTraits
from penstock.gateway.turn_tree import TOKEN_BYTES, TurnTree
from penstock.seeds import derive
from penstock.types import (
    FinishReason,
    JsonObject,
    PolicyName,
    SamplingSpec,
    Turn,
    token_ids,
    view_ids,
)

KEY_PREFIX = "sk-penstock-"
KEY_BYTES = 32
MAX_CALLS = 1 << 10
"""Maximum number of tool calls per turn with distinct ids."""
CLOSED = (
    "unknown or expired session key: the rollout has ended, or the key belongs to another session "
    "or node; use the base_url and api_key given to the running workflow"
)
FULL = (
    f"this session has {MAX_TURNS:,} turns, {MAX_TOKENS:,} tokens, or "
    f"{MAX_SESSION_BYTES >> 20} MiB of tokens, log-probs, experts, schemas and stop strings, the "
    "most that its row can have; end it and open another (an external agent: POST "
    "/sessions/NAME/end, then call again)"
)
T = TypeVar("T")
TurnCallback = Callable[[int, Turn, bool], None]
"""Called after each turn with its index, the turn, and whether an earlier attempt had generated
it."""


class SessionGateway(Protocol):
    """The part of the gateway a session uses."""

    generate: Generate
    template_traits: dict[PolicyName, TemplateTraits]
    preparing: FairQueue
    rendering: FairQueue

    def renderer(self, policy: PolicyName) -> Renderer: ...
    def queue_key(self, session_id: str) -> str: ...
    def register(self, session: Session) -> None: ...
    def close(self, session: Session) -> tuple[Turn, ...]: ...


class Session:
    """The model calls of one rollout. Its key grants access."""

    def __init__(
        self,
        gateway: SessionGateway,
        *,
        policies: Sequence[PolicyName],
        sampling: SamplingSpec,
        seed: int,
        salvaged_answers: SalvagedAnswers,
        on_turn: TurnCallback | None,
        roles: Mapping[str, PolicyName] | None = None,
    ) -> None:
        assert policies, "a session needs at least one policy"
        self.id = secrets.token_hex(8)
        self.api_key = KEY_PREFIX + secrets.token_hex(KEY_BYTES)
        self.policies = tuple(policies)
        self.roles = dict(roles or {})
        """The policy of each role."""
        self.agent = ""
        """Path of the sub-agent, like `0.2`; empty for the workflow."""
        self.root = self
        """The session of the workflow."""
        self.is_open = True
        self.has_overflowed = False
        """The last call, of the workflow or a sub-agent, did not fit in the model's context window;
        kept at the root."""
        self._gateway = gateway
        self._sampling = sampling
        self._seed = seed
        self._salvaged_answers = salvaged_answers
        self._on_turn = on_turn
        self._num_calls = 0
        self._role = ""
        self._meter: BudgetMeter | None = None
        self._tree = TurnTree()
        self._answer_history = AnswerHistory()
        self._prompt_builder = PromptBuilder(
            self._tree, self._answer_history, self._in_thread, self._place_to_render
        )

    def check_spawn(self) -> None:
        """Raise BudgetExceeded if this agent may have no sub-agent."""
        if self._meter is not None:
            self._meter.check_spawn()

    def open_child(self, agent: str, *, seed: int, role: str, budget: Budget) -> Session:
        """The session of a sub-agent, until `close`: its turns are among these, under its own path.
        `role`: who makes its calls that name neither a role nor a policy."""
        child = copy.copy(self)
        child.api_key = KEY_PREFIX + secrets.token_hex(KEY_BYTES)
        child.agent = agent
        child._seed = seed
        child._role = role
        child._num_calls = 0
        child._meter = BudgetMeter(budget, agent, self._meter)
        child._prompt_builder = PromptBuilder(
            self._tree, self._answer_history, self._in_thread, self._place_to_render, agent
        )
        self._gateway.register(child)
        return child

    def close(self) -> None:
        """End the session of a sub-agent: its key stops working."""
        self._gateway.close(self)

    async def chat(
        self,
        messages: Sequence[JsonObject],
        *,
        policy: PolicyName | None = None,
        role: str = "",
        tools: Sequence[JsonObject] = (),
        thinking: bool | None = None,
        **overrides: object,
    ) -> Answer:
        """`call` with keyword arguments. `overrides` are the sampling fields of the OpenAI API:
        temperature, top_p, max_tokens, seed, stop."""
        return await self.call(
            Call(
                messages=messages,
                policy=policy,
                role=role,
                tools=tools,
                thinking=thinking,
                overrides=read_overrides(overrides),
            )
        )

    async def call(self, call: Call | RawPrompt, on_chunk: DeltaCallback | None = None) -> Answer:
        """Call a policy and record the turn. Raises EngineError, BadRequest (including
        ContextOverflow), NotFound, Unauthorized, or TooLarge for a session that is full."""
        self._check_open()
        self._check_room()
        seed = derive(self._seed, self._num_calls)
        self._num_calls += 1  # before it waits: calls made together get their seeds in this order
        prompt, role, sampling = await self.prepare(call, seed=seed)
        return await self._run(prompt, role, sampling, on_chunk)

    async def prepare(
        self, call: Call | RawPrompt, *, seed: int
    ) -> tuple[Prompt, str, SamplingSpec]:
        """What `call` sends to an engine, and the role of its turn."""
        policy, role = self.resolve(call)
        if call.shared_prompt is None:
            prompt = await self._prepare(call, policy)
        else:
            prompt = await call.shared_prompt.get(partial(self._prepare, call, policy))
        return prompt, role, self._spec(prompt, call.overrides, seed)

    def resolve(self, call: Call | RawPrompt) -> tuple[PolicyName, str]:
        """The policy of a call, and the role of its turn. Roles come before policies."""
        name = call.policy or self._role or self.policies[0]
        if name in self.roles:
            return self.roles[name], call.role or name
        return PolicyName(name), call.role

    def turn(self, index: int) -> Turn:
        return self._tree[index]

    def mark_unreached(self, index: int) -> None:
        """Mark a turn whose answer never reached the agent: kept, but not trained."""
        self._tree.mark_unreached(index)

    def turns(self) -> tuple[Turn, ...]:
        """All turns so far in completion order; a parent always precedes its children."""
        return self._tree.turns()

    def renderer(self, name: str) -> Renderer:
        """Of a policy, or of a role's."""
        policy = self.roles.get(name, PolicyName(name))
        if policy not in self.policies:
            known = ", ".join(self.model_names)
            raise NotFound(f"unknown model {name!r}; this session has: {known}")
        return self._gateway.renderer(policy)

    @property
    def model_names(self) -> tuple[str, ...]:
        """What `model` may be: roles and policies."""
        return tuple(dict.fromkeys((*self.roles, *self.policies)))

    async def _prepare(self, call: Call | RawPrompt, policy: PolicyName) -> Prompt:
        renderer, builder = self.renderer(policy), self._prompt_builder
        try:
            if isinstance(call, Call):
                self._gateway.template_traits[policy].check(
                    wants_tools=bool(call.tools), wants_thinking=call.thinking is not None
                )
                return await builder.from_call(call, policy, renderer)
            if isinstance(call.prompt, str):
                return await builder.from_text(call.prompt, policy, renderer)
            return await builder.from_ids(call.prompt, policy, renderer)
        except ContextOverflow:
            self.root.has_overflowed = True
            raise

    async def _in_thread(self, work: Callable[[], T]) -> T:
        async with self._gateway.preparing.place(self._gateway.queue_key(self.id)):
            return await asyncio.to_thread(work)

    def _place_to_render(self) -> AbstractAsyncContextManager[None]:
        return self._gateway.rendering.place(self._gateway.queue_key(self.id))

    def _check_open(self) -> None:
        if not (self.is_open and self.root.is_open):
            raise Unauthorized(CLOSED)

    @property
    def num_bytes(self) -> int:
        """Of its turns in memory, with their texts."""
        return self._tree.num_bytes + self._tree.num_text_bytes

    def _check_room(self) -> None:
        if self._tree.is_full:
            raise TooLarge(FULL)

    async def _run(
        self,
        prompt: Prompt,
        role: str,
        sampling: SamplingSpec,
        on_chunk: DeltaCallback | None,
    ) -> Answer:
        started_at = time.time()
        known = self._salvaged_answers.pop(prompt.policy, sampling, prompt.context_ids, self.agent)
        completion = known or await self._generate(prompt, sampling, on_chunk)
        self._check_open()
        self._check_room()  # calls made at the same time may have filled it
        turn = make_turn(prompt, role, sampling, completion, started_at, self.agent)
        sampled = view_ids(turn.sampled_ids).tolist()
        if self._meter is not None:
            self._meter.end_call(len(sampled))
        texts = prompt.renderer.decode_answer(sampled, turn.finish)
        index = self._add(prompt, turn, texts, is_reused=known is not None)
        return self._answer(prompt, turn, texts, index)

    async def _generate(
        self, prompt: Prompt, sampling: SamplingSpec, on_chunk: DeltaCallback | None
    ) -> Completion:
        request = GenerationRequest(
            prompt.context_ids, sampling, policy=prompt.policy, session=self.id
        )
        if on_chunk is not None:
            stop, renderer = sampling.stop, prompt.renderer
            decoder = StreamDecoder(renderer, prompt.answer_format, stop, on_chunk)
            request = replace(request, on_chunk=decoder.feed)
        try:
            return await self._gateway.generate(request)
        except ContextOverflow:  # the engine's context window may be smaller than the model's
            self.root.has_overflowed = True
            raise

    def _spec(self, prompt: Prompt, overrides: Overrides | None, seed: int) -> SamplingSpec:
        """Sampling spec of this call, with max_tokens capped to the model's context window."""
        if overrides is None:
            sampling = replace(self._sampling, seed=seed)
        else:
            sampling = override(self._sampling, overrides, seed=seed)
        window, num_tokens = prompt.renderer.window, len(prompt.context_ids)
        self.root.has_overflowed = window is not None and num_tokens >= window
        if window is not None and self.root.has_overflowed:
            raise overflow(num_tokens, window)
        max_tokens = sampling.max_tokens
        if window is not None:
            max_tokens = min(max_tokens, window - num_tokens)
        if self._meter is not None:
            max_tokens = self._meter.start_call(max_tokens)
        if max_tokens < sampling.max_tokens:
            return replace(sampling, max_tokens=max_tokens)
        return sampling

    def _add(self, prompt: Prompt, turn: Turn, texts: AnswerTexts, *, is_reused: bool) -> int:
        index = self._tree.add(turn, prompt.new_text, texts.escaped)
        if self._on_turn is not None:
            self._on_turn(index, turn, is_reused)
        if turn.finish is FinishReason.ABORT:
            num = len(view_ids(turn.sampled_ids))
            raise EngineError(f"the engine aborted after {num} tokens; turn {index} was recorded")
        return index

    def _answer(self, prompt: Prompt, turn: Turn, texts: AnswerTexts, index: int) -> Answer:
        stop = turn.sampling.stop
        parts = parse_answer(
            cut_at_stop(texts.visible, stop),
            prompt.answer_format,
            lambda at: f"call_{derive(self._seed, (index + 1) * MAX_CALLS + at):016x}",
        )
        num_sampled = len(turn.sampled_ids) // TOKEN_BYTES
        escape = prompt.renderer.escape_untrusted
        answer = Answer(
            text=parts.text,
            finish=turn.finish,
            turn=index,
            usage=Usage(prompt_tokens=len(prompt.context_ids), completion_tokens=num_sampled),
            reasoning=parts.reasoning,
            tool_calls=parts.tool_calls,
        )

        def sampled_text() -> str | None:
            """None if the agent received exactly what was sampled. Kept for long: without the
            prompt, which has the ids of the whole conversation."""
            text = cut_at_stop(texts.without_end, stop)
            has_parts = bool(parts.reasoning or parts.tool_calls)
            is_plain = not has_parts and text == escape(parts.text)
            return None if is_plain else text

        self._answer_history.remember(turn.policy, turn.parent, answer, sampled_text, self.agent)
        return answer


def make_turn(
    prompt: Prompt,
    role: str,
    sampling: SamplingSpec,
    completion: Completion,
    started_at: float,
    agent: str = "",
) -> Turn:
    """The record of a call and its answer."""
    num_tokens = len(prompt.new_ids) + len(completion.sampled_ids) // TOKEN_BYTES
    return Turn(
        policy=prompt.policy,
        parent=prompt.parent,
        prompt_ids=token_ids(prompt.new_ids),
        sampled_ids=completion.sampled_ids,
        logprobs=completion.logprobs,
        spans=completion.spans,
        sampling=sampling,
        finish=completion.finish,
        reached_agent=completion.finish is not FinishReason.ABORT,
        started_at=started_at,
        ended_at=time.time(),
        role=role,
        agent=agent,
        kv=completion.kv,
        experts=completion.experts and completion.experts.last(num_tokens),
    )
