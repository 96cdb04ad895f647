# SPDX-License-Identifier: Apache-2.0
"""One call that many sessions make as their first and only one: the slots of a group share their
prompt, and differ in the seed.

Owns what they have in common: the prompt, rendered and tokenized once. Each answer becomes the turn
and the text that `Session.call` gives for it. Calls no engine and keeps no turn.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from penstock.gateway.generation import Completion, GenerationRequest
from penstock.gateway.model_calls import Call
from penstock.gateway.parsing import cut_at_stop, parse_answer
from penstock.gateway.prompts import Prompt
from penstock.gateway.session import Session, make_turn
from penstock.seeds import derive
from penstock.types import SamplingSpec, Turn, view_ids


@dataclass(frozen=True, slots=True)
class SharedCall:
    _session: str
    _prompt: Prompt
    _role: str
    _sampling: dict[str, object]
    """The fields of its spec but the seed."""

    @classmethod
    async def prepare(cls, session: Session, call: Call) -> SharedCall:
        """Raises what `Session.call` raises before it asks an engine."""
        prompt, role, sampling = await session.prepare(call, seed=0)
        fields = {f.name: getattr(sampling, f.name) for f in dataclasses.fields(sampling)}
        del fields["seed"]
        return cls(session.id, prompt, role, fields)

    @property
    def policy(self) -> str:
        return self._prompt.policy

    def request(self, slot_seed: int) -> GenerationRequest:
        """The first call of a session with this seed."""
        sampling = SamplingSpec(seed=derive(slot_seed, 0), **self._sampling)  # type: ignore[arg-type]
        policy = self._prompt.policy
        return GenerationRequest(
            self._prompt.context_ids, sampling, policy=policy, session=self._session
        )

    def turn(self, request: GenerationRequest, completion: Completion, started_at: float) -> Turn:
        return make_turn(self._prompt, self._role, request.sampling, completion, started_at)

    def text(self, turn: Turn) -> str:
        """As the agent gets it."""
        visible = self._prompt.renderer.decode_visible(view_ids(turn.sampled_ids).tolist())
        shown = cut_at_stop(visible, turn.sampling.stop)
        return parse_answer(shown, self._prompt.answer_format, str).text
