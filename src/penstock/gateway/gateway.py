# SPDX-License-Identifier: Apache-2.0
"""Capture gateway: one request in, one turn recorded, one answer out.

Owns sessions, their keys and their turns. In-process workflows and HTTP agents take the same path,
`Session.chat`. Knows nothing of tasks, rewards or batches.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.errors import BadRequest, EngineError, NotFound, Unauthorized
from penstock.gateway.generate import Completion, Generate
from penstock.gateway.renderer import Renderer
from penstock.gateway.sampling import Overrides, override, read_overrides
from penstock.gateway.seeds import derive
from penstock.gateway.tree import ROOT, TurnTree
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
MAX_MESSAGES = 2_048


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    prompt_tokens: int
    """The whole context sent to the engine, reused or new."""
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an agent gets to see of a turn."""

    text: str
    """Without special tokens, and cut before the first stop string. The turn keeps every token."""
    finish: FinishReason
    turn: int
    """Index among the session's turns."""
    usage: Usage


@dataclass(frozen=True, slots=True)
class _Prepared:
    """One call, rendered and matched against the tree."""

    policy: PolicyName
    role: str
    renderer: Renderer
    parent: int
    new_text: str
    new_ids: Sequence[int]
    context_ids: Sequence[int]


class Session:
    """Ties model calls to one rollout; whoever holds its key speaks for it."""

    def __init__(
        self,
        gateway: Gateway,
        *,
        policies: Sequence[PolicyName],
        sampling: SamplingSpec,
        seed: int,
    ) -> None:
        assert policies, "a session serves at least one policy"
        self.id = secrets.token_hex(8)
        self.api_key = KEY_PREFIX + secrets.token_hex(KEY_BYTES)
        self.policies = tuple(policies)
        self.is_open = True
        self._gateway = gateway
        self._sampling = sampling
        self._seed = seed
        self._num_calls = 0
        self._tree = TurnTree()

    async def chat(
        self,
        messages: Sequence[JsonObject],
        *,
        policy: PolicyName | None = None,
        role: str = "",
        **overrides: object,
    ) -> Answer:
        """Ask a policy (the session's first unless named), in a role, and record the turn.

        `overrides` are the sampling fields of the OpenAI API: temperature, top_p, max_tokens,
        seed, stop. Raises EngineError, BadRequest, NotFound, Unauthorized; none of them records
        a turn.
        """
        return await self.chat_with(
            messages, read_overrides(overrides) if overrides else None, policy, role
        )

    async def chat_with(
        self,
        messages: Sequence[JsonObject],
        overrides: Overrides | None = None,
        policy: PolicyName | None = None,
        role: str = "",
    ) -> Answer:
        """`chat`, with the overrides already read."""
        self._check_open()
        call = self._prepare(messages, policy or self.policies[0], role)
        seed = derive(self._seed, self._num_calls)
        self._num_calls += 1
        if overrides is None:
            sampling = replace(self._sampling, seed=seed)
        else:
            sampling = override(self._sampling, overrides, seed=seed)
        started_at = time.time()
        completion = await self._gateway.generate(
            call.context_ids, sampling, policy=call.policy, session=self.id
        )
        self._check_open()
        return self._record(call, sampling, completion, started_at)

    def turn(self, index: int) -> Turn:
        return self._tree[index]

    def mark_unreached(self, index: int) -> None:
        """The answer of this turn never arrived at its agent; it stays, untrained."""
        self._tree.mark_unreached(index)

    def turns(self) -> tuple[Turn, ...]:
        """So far, in the order they finished; a parent always comes before its children."""
        return self._tree.turns()

    def renderer(self, policy: PolicyName) -> Renderer:
        if policy not in self.policies:
            known = ", ".join(self.policies)
            raise NotFound(f"no model {policy!r} in this session; `model` is one of: {known}")
        return self._gateway.renderer(policy)

    def _check_open(self) -> None:
        if not self.is_open:
            raise Unauthorized(CLOSED)

    def _prepare(self, messages: Sequence[JsonObject], policy: PolicyName, role: str) -> _Prepared:
        renderer = self.renderer(policy)
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise BadRequest(f"{len(messages)} messages; send 1 to {MAX_MESSAGES}")
        text = renderer.render(messages)
        parent, length = self._tree.match(policy, text) if len(self._tree) else (ROOT, 0)
        new_text = text[length:] if length else text
        new_ids = renderer.encode(new_text)
        context_ids: Sequence[int] = new_ids
        if parent != ROOT:
            context_ids = [*self._tree.context_ids(parent), *new_ids]
        if not context_ids:
            raise BadRequest("the messages render to an empty prompt; send some content")
        return _Prepared(policy, role, renderer, parent, new_text, new_ids, context_ids)

    def _record(
        self, call: _Prepared, sampling: SamplingSpec, completion: Completion, started_at: float
    ) -> Answer:
        sampled = view_ids(completion.sampled_ids).tolist()
        full = call.renderer.decode(sampled)
        is_aborted = completion.finish is FinishReason.ABORT
        turn = Turn(
            policy=call.policy,
            parent=call.parent,
            prompt_ids=token_ids(call.new_ids),
            sampled_ids=completion.sampled_ids,
            logprobs=completion.logprobs,
            spans=completion.spans,
            sampling=sampling,
            finish=completion.finish,
            reached_agent=not is_aborted,
            started_at=started_at,
            ended_at=time.time(),
            role=call.role,
        )
        index = self._tree.add(turn, call.new_text + full)
        if is_aborted:
            raise EngineError(
                f"the engine gave up after {len(sampled)} tokens; turn {index} is kept"
            )
        visible = (
            call.renderer.decode_visible(sampled) if call.renderer.has_special(sampled) else full
        )
        return Answer(
            text=_cut(visible, sampling.stop),
            finish=completion.finish,
            turn=index,
            usage=Usage(prompt_tokens=len(call.context_ids), completion_tokens=len(sampled)),
        )


class Gateway:
    """Opens and closes sessions, and knows which key speaks for which."""

    def __init__(self, generate: Generate) -> None:
        self.generate = generate
        self._renderers: dict[PolicyName, Renderer] = {}
        self._by_key: dict[str, Session] = {}

    def set_renderer(self, policy: PolicyName, renderer: Renderer) -> None:
        """After the first snapshot of a policy was loaded."""
        self._renderers[policy] = renderer

    def renderer(self, policy: PolicyName) -> Renderer:
        renderer = self._renderers.get(policy)
        if renderer is None:
            raise EngineError(
                f"policy {policy!r} has no snapshot loaded on this node yet; "
                "wait until the node is live"
            )
        return renderer

    def open(self, *, policies: Sequence[PolicyName], sampling: SamplingSpec, seed: int) -> Session:
        session = Session(self, policies=policies, sampling=sampling, seed=seed)
        self._by_key[session.api_key] = session
        return session

    def close(self, session: Session) -> tuple[Turn, ...]:
        """The session's turns; its key stops working, and calls still running record nothing."""
        session.is_open = False
        self._by_key.pop(session.api_key, None)
        return session.turns()

    def find(self, api_key: str, session_id: str | None = None) -> Session:
        """The open session a key speaks for, or Unauthorized. Keys are 256 random bits, so a
        dictionary that leaks the time of a lookup leaks nothing that helps to guess one."""
        session = self._by_key.get(api_key)
        if session is None or session_id not in (None, session.id):
            raise Unauthorized(CLOSED if api_key.startswith(KEY_PREFIX) else NO_KEY)
        return session


CLOSED = (
    "this key speaks for no open session here: the rollout has ended, or the key is of another "
    "session or node; use the base_url and api_key given to the running workflow"
)
NO_KEY = (
    "no session key; send `Authorization: Bearer KEY` with the api_key that the workflow was given "
    "(ctx.api_key, or OPENAI_API_KEY in its environment)"
)


def _cut(text: str, stop: Sequence[str]) -> str:
    """Before the earliest stop string, as OpenAI does."""
    ends = [at for at in (text.find(word) for word in stop) if at >= 0]
    return text[: min(ends)] if ends else text
