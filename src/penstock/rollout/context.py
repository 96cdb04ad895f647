# SPDX-License-Identifier: Apache-2.0
"""The context passed to a workflow: chat with policies, run programs, set the reward.

Owns one attempt's view of the gateway. Knows nothing of leases, deliveries or other attempts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.gateway.gateway import Session
from penstock.gateway.model_calls import Answer, RawPrompt
from penstock.gateway.sampling import read_overrides
from penstock.rollout.endpoint import Endpoint
from penstock.rollout.programs import inherited_env, run_program
from penstock.types import MAX_ROLE_CHARS, JsonObject, PolicyName


@dataclass(frozen=True, slots=True)
class BoundPolicy:
    """Calls one policy; each call is recorded as a turn of this attempt."""

    _session: Session
    _name: PolicyName | None
    _role: str

    async def chat(self, messages: Sequence[JsonObject], **overrides: Any) -> Answer:
        """Make one chat call. `overrides` are sampling fields, such as `temperature=0.7,
        max_tokens=64`."""
        return await self._session.chat(messages, policy=self._name, role=self._role, **overrides)

    async def complete(self, prompt: str, **overrides: Any) -> Answer:
        """Make one completion call: the model continues `prompt` without a chat template."""
        if self._role:
            raise ValueError(f"complete() does not take a role ({self._role!r}); use chat()")
        fields = read_overrides(overrides) if overrides else None
        return await self._session.call(
            RawPrompt(prompt=prompt, policy=self._name, overrides=fields)
        )


class Context:
    """Valid for one attempt."""

    def __init__(self, session: Session, endpoint: Endpoint, *, seed: int) -> None:
        self.seed = seed
        """Seed of this slot: the same for every attempt on every node."""
        self.explicit_reward: float | None = None
        """The last value passed to `reward()`; None means the run's reward function scores."""
        self._session = session
        self._endpoint = endpoint

    def policy(self, name: str | None = None, *, role: str = "") -> BoundPolicy:
        """The policy `name`; optional in a run with one policy. `role` labels its turns for `route`
        rules."""
        if len(role) > MAX_ROLE_CHARS:
            raise ValueError(f"role has {len(role)} characters; at most {MAX_ROLE_CHARS} allowed")
        return BoundPolicy(self._session, None if name is None else PolicyName(name), role)

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI clients in this or a child process; for Anthropic clients, drop the
        `/v1`."""
        return self._endpoint.url

    @property
    def api_key(self) -> str:
        """API key of this attempt's session: calls made with it are recorded as its turns."""
        return self._session.api_key

    def reward(self, value: float) -> None:
        """Set the reward; the run's reward function is then skipped. The last call counts."""
        if not math.isfinite(value):
            raise ValueError(f"reward must be a finite number, got {value}")
        self.explicit_reward = float(value)

    async def run_program(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float | None = None,
    ) -> str:
        """Run a program and return its standard output.

        Environment variables point its OpenAI or Anthropic client at this attempt. Raises
        WorkflowError if the exit code is not 0. The program and its process group are killed when
        the attempt ends for any reason, and when the node dies.
        """
        inherited = inherited_env()
        inherited.pop("ANTHROPIC_AUTH_TOKEN", None)  # some clients prefer it to the key
        address = {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
        }
        full_env = {**inherited, **address, **(env or {})}
        return await run_program(argv, env=full_env, stdin=stdin, timeout_s=timeout_s)
