# SPDX-License-Identifier: Apache-2.0
"""What a workflow gets: chat with the policies, an address for programs, a place for the reward.

Owns one attempt's view of the gateway. Knows nothing of leases, deliveries or other attempts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.gateway.gateway import Session
from penstock.gateway.model_calls import Answer
from penstock.gateway.sampling import read_overrides
from penstock.rollout.endpoint import Endpoint
from penstock.rollout.programs import inherited_env, run_program
from penstock.types import MAX_ROLE_CHARS, JsonObject, PolicyName


class BoundPolicy:
    """Calls of one policy; each is recorded as a turn of this attempt."""

    __slots__ = ("_name", "_role", "_session")

    def __init__(self, session: Session, name: PolicyName | None, role: str) -> None:
        self._session = session
        self._name = name
        self._role = role

    async def chat(self, messages: Sequence[JsonObject], **overrides: Any) -> Answer:
        """One model call. `overrides` are fields of the sampling spec: `temperature=0.7,
        max_tokens=64`."""
        return await self._session.chat(messages, policy=self._name, role=self._role, **overrides)

    async def complete(self, prompt: str, **overrides: Any) -> Answer:
        """The same for a text that the model goes on with as it is, without a chat template."""
        if self._role:
            raise ValueError(f"a completion has no role such as {self._role!r}; ask with chat()")
        fields = read_overrides(overrides) if overrides else None
        return await self._session.complete(prompt, policy=self._name, overrides=fields)


class Context:
    """Lives as long as one attempt."""

    def __init__(self, session: Session, endpoint: Endpoint, *, seed: int) -> None:
        self.seed = seed
        """Of this slot: the same for every attempt on every node."""
        self.explicit_reward: float | None = None
        """What `reward()` was last told; None leaves the reward to the run's function."""
        self._session = session
        self._endpoint = endpoint

    def policy(self, name: str | None = None, *, role: str = "") -> BoundPolicy:
        """The policy of that name; a run with one policy need not name it. `role` is what it acts
        as, for `route` rules that go by it."""
        if len(role) > MAX_ROLE_CHARS:
            raise ValueError(f"a role has at most {MAX_ROLE_CHARS} characters, not {len(role)}")
        return BoundPolicy(self._session, None if name is None else PolicyName(name), role)

    @property
    def base_url(self) -> str:
        """For any OpenAI client in this or a child process; Anthropic's want it without `/v1`."""
        return self._endpoint.url

    @property
    def api_key(self) -> str:
        """Names this attempt's session: model calls made with it are recorded here."""
        return self._session.api_key

    def reward(self, value: float) -> None:
        """Set the reward; the run's reward function is then not asked. The last call counts."""
        if not math.isfinite(value):
            raise ValueError(f"a reward is a finite number, not {value}")
        self.explicit_reward = float(value)

    async def run_program(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float | None = None,
    ) -> str:
        """Run a program whose OpenAI or Anthropic client finds this attempt by itself; returns what
        it printed.

        Raises WorkflowError when it does not end with 0. It dies, with all it started in its
        process group, when the attempt ends in any way, and with the node.
        """
        inherited = inherited_env()
        inherited.pop("ANTHROPIC_AUTH_TOKEN", None)  # some clients prefer it to the key
        address = {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
        }
        return await run_program(
            argv,
            env={**inherited, **address, **(env or {})},
            stdin=stdin,
            timeout_s=timeout_s,
        )
