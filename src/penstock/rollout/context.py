# SPDX-License-Identifier: Apache-2.0
"""The context passed to a workflow: chat with policies, run programs, set the reward.

Owns one attempt's view of the gateway. Knows nothing of leases, deliveries or other attempts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.gateway.model_calls import Answer, Call, RawPrompt
from penstock.gateway.sampling import read_overrides
from penstock.rollout.programs import inherited_env, run_program
from penstock.types import MAX_ROLE_CHARS, JsonObject, PolicyName

if TYPE_CHECKING:  # a reward worker that imports a user's workflow module must start fast
    from penstock.gateway.session import Session
    from penstock.rollout.endpoint import Endpoint


@dataclass(frozen=True, slots=True)
class BoundPolicy:
    """Calls one policy; each call is recorded as a turn of this attempt."""

    _session: Session
    _name: PolicyName | None
    _role: str

    async def chat(
        self,
        messages: Sequence[JsonObject],
        *,
        tools: Sequence[JsonObject] = (),
        thinking: bool | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        json_schema: str | None = None,
    ) -> Answer:
        """Make one chat call and return the answer.

        Raises EngineError if no engine can answer, and BadRequest for a bad argument or a prompt
        that fills the model's context window.

        Args:
            messages: The conversation in OpenAI's chat format: `role` and `content` as text, and
                `tool_call_id` in the result of a tool. Append `answer.message` to continue it.
            tools: Functions that the model may call, in OpenAI's format: `{"type": "function",
                "function": {"name": ..., "description": ..., "parameters": JSON schema}}`. Calls
                of the model are in `answer.tool_calls`.
            thinking: Whether the model reasons before it answers; None leaves it to its template.
            temperature: Randomness of sampling; 0 takes the likeliest token and is not trained.
            top_p: Samples among the likeliest tokens that have this probability together.
            top_k: Samples among this many likeliest tokens; 0 for all.
            min_p: Drops tokens less likely than this times the likeliest one.
            max_tokens: Longest answer, in tokens.
            seed: Seed of this call; None derives it from the slot.
            stop: Texts that end the answer; they are not part of it.
            json_schema: JSON schema that the answer must match. Such an answer is not trained.

        None takes the value of `sampling` in the run file."""
        overrides = read_overrides(
            {
                "temperature": temperature,
                "top_p": top_p,
                "top_k": top_k,
                "min_p": min_p,
                "max_tokens": max_tokens,
                "seed": seed,
                "stop": _stop(stop),
                "json_schema": json_schema,
            }
        )
        return await self._session.call(
            Call(
                messages=messages,
                policy=self._name,
                role=self._role,
                tools=tools,
                thinking=thinking,
                overrides=overrides,
            )
        )

    async def complete(
        self,
        prompt: str,
        *,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        max_tokens: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
    ) -> Answer:
        """Make one completion call: the model continues `prompt` without a chat template. The other
        arguments are as in `chat`."""
        if self._role:
            raise ValueError(f"complete() does not take a role ({self._role!r}); use chat()")
        overrides = read_overrides(
            {
                "temperature": temperature,
                "top_p": top_p,
                "top_k": top_k,
                "min_p": min_p,
                "max_tokens": max_tokens,
                "seed": seed,
                "stop": _stop(stop),
            }
        )
        return await self._session.call(
            RawPrompt(prompt=prompt, policy=self._name, overrides=overrides)
        )


def _stop(texts: str | Sequence[str] | None) -> str | list[str] | None:
    return texts if texts is None or isinstance(texts, str) else list(texts)


class Context:
    """One attempt, as its workflow sees it: the policies to call, and the reward to set."""

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
