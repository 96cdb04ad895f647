# SPDX-License-Identifier: Apache-2.0
"""Capture gateway: opens and closes sessions, and knows whose key is whose.

In-process workflows and HTTP agents take the same path, `Session.ask`. Knows nothing of tasks,
rewards or batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from penstock.errors import EngineError, Unauthorized
from penstock.gateway.generation import Generate
from penstock.gateway.renderer import Renderer
from penstock.gateway.salvaged_answers import SalvagedAnswers
from penstock.gateway.session import CLOSED, KEY_PREFIX, Session, TurnCallback
from penstock.gateway.template_probe import TemplateTraits, probe
from penstock.types import PolicyName, SamplingSpec, Turn

log = structlog.get_logger(__name__)
NO_KEY = (
    "no session key; send `Authorization: Bearer KEY` with the api_key that the workflow was given "
    "(ctx.api_key, or OPENAI_API_KEY in its environment)"
)


class Gateway:
    """Opens and closes sessions, and knows which key speaks for which."""

    def __init__(self, generate: Generate) -> None:
        self.generate = generate
        self.template_traits: dict[PolicyName, TemplateTraits] = {}
        """What each policy's template does to a conversation."""
        self._renderers: dict[PolicyName, Renderer] = {}
        self._by_key: dict[str, Session] = {}

    def set_renderer(self, policy: PolicyName, renderer: Renderer) -> None:
        """After the first snapshot of a policy was loaded."""
        traits = probe(renderer)
        log.info("template probed", policy=policy, **traits.facts())
        self.template_traits[policy] = traits
        self._renderers[policy] = renderer

    def renderer(self, policy: PolicyName) -> Renderer:
        renderer = self._renderers.get(policy)
        if renderer is None:
            raise EngineError(
                f"policy {policy!r} has no snapshot loaded on this node yet; "
                "wait until the node is live"
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
    ) -> Session:
        """`salvaged_turns`: turns that were made for the same work and lost their owner; a call
        that one of them answers is not generated again. `on_turn` hears of each turn as it ends."""
        session = Session(
            self,
            policies=policies,
            sampling=sampling,
            seed=seed,
            salvaged_answers=SalvagedAnswers(salvaged_turns),
            on_turn=on_turn,
        )
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
