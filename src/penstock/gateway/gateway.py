# SPDX-License-Identifier: Apache-2.0
"""Capture gateway: opens and closes sessions, and maps keys to sessions.

In-process workflows and HTTP agents share one code path, `Session.call`. Knows nothing of tasks,
rewards or batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import structlog

from penstock.errors import EngineError, Unauthorized
from penstock.gateway.fair_queue import FairQueue
from penstock.gateway.generation import Completion, Generate, GenerationRequest, Starts
from penstock.gateway.renderer import Renderer
from penstock.gateway.salvaged_answers import SalvagedAnswers
from penstock.gateway.session import CLOSED, KEY_PREFIX, Session, TurnCallback
from penstock.gateway.template_probe import TemplateTraits, probe
from penstock.types import PolicyName, SamplingSpec, Turn

log = structlog.get_logger(__name__)
NO_ANSWERS = SalvagedAnswers()
MAX_RUNNING = 256
"""Calls that run in the engines at the same time; further ones wait, and their keys take turns."""
MAX_PREPARING = 2
"""Large prompts that are rendered or tokenized at the same time."""
MAX_RENDERING = 8
"""Small prompts on their way through a template's process."""
NO_KEY = (
    "missing session key; send `Authorization: Bearer KEY` with the api_key given to the workflow "
    "(ctx.api_key, or OPENAI_API_KEY in its environment)"
)


class Gateway:
    def __init__(
        self,
        generate: Generate,
        make_session: Callable[..., Session] = Session,
        *,
        max_running: int = MAX_RUNNING,
    ) -> None:
        """`make_session`: builds a session, with the arguments of `Session`."""
        self.generate: Generate = self._generate_in_turn
        self.preparing = FairQueue(MAX_PREPARING)
        self.rendering = FairQueue(MAX_RENDERING)
        self._engines = generate
        self._starts = generate if isinstance(generate, Starts) else None
        self._running = FairQueue(max_running)
        self._make_session = make_session
        self.template_traits: dict[PolicyName, TemplateTraits] = {}
        """How each policy's chat template treats a growing conversation."""
        self._renderers: dict[PolicyName, Renderer] = {}
        self._by_key: dict[str, Session] = {}

    def set_renderer(self, policy: PolicyName, renderer: Renderer) -> None:
        """Called once the first snapshot of a policy is loaded."""
        traits = probe(renderer)
        log.info("chat template probed", policy=policy, **traits.log_fields())
        self.template_traits[policy] = traits
        self._renderers[policy] = renderer

    def has_renderer(self, policy: PolicyName) -> bool:
        return policy in self._renderers

    def renderer(self, policy: PolicyName) -> Renderer:
        renderer = self._renderers.get(policy)
        if renderer is None:
            raise EngineError(
                f"policy {policy!r} is not loaded on this node yet; wait until the node is live"
            )
        return renderer

    def open(
        self,
        *,
        policies: Sequence[PolicyName],
        sampling: SamplingSpec,
        seed: int,
        salvaged_turns: Sequence[Turn] = (),
        on_turn: TurnCallback | None = None,
        roles: Mapping[str, PolicyName] | None = None,
    ) -> Session:
        """Open a session. A call already answered by one of `salvaged_turns` (turns of a failed
        earlier attempt at the same slot) is not generated again. `on_turn` is called after each
        turn. `roles`: the policy of each role."""
        session = self._make_session(
            self,
            policies=policies,
            sampling=sampling,
            seed=seed,
            salvaged_answers=SalvagedAnswers(salvaged_turns) if salvaged_turns else NO_ANSWERS,
            on_turn=on_turn,
            roles=roles,
        )
        self.register(session)
        return session

    def register(self, session: Session) -> None:
        """Accept the key of a session until `close`; of a sub-agent's too."""
        self._by_key[session.api_key] = session

    def queue_key(self, session_id: str) -> str:
        """Whose turn a call of this session takes: its own."""
        return session_id

    async def _generate_in_turn(self, request: GenerationRequest) -> Completion:
        async with self._running.place(self.queue_key(request.session)):
            return await self._engines(request)

    def start(
        self, request: GenerationRequest, lost: asyncio.Future[Completion] | None = None
    ) -> asyncio.Future[Completion]:
        """See `Starts`. Takes no turn: a node starts one for each of its slots, and no more."""
        if self._starts is not None:
            return self._starts.start(request, lost)
        return asyncio.ensure_future(self._engines(request))

    def close(self, session: Session) -> tuple[Turn, ...]:
        """Close the session and return its turns. Its key stops working; calls still running record
        nothing."""
        session.is_open = False
        self._by_key.pop(session.api_key, None)
        return session.turns()

    def find(self, api_key: str, session_id: str | None = None) -> Session:
        """The open session of a key; raises Unauthorized if there is none. Keys are 256 random
        bits, so the timing of a dictionary lookup does not help to guess one."""
        session = self._by_key.get(api_key)
        if session is None or session_id not in (None, session.id):
            raise Unauthorized(CLOSED if api_key.startswith(KEY_PREFIX) else NO_KEY)
        return session
