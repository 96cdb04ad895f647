# SPDX-License-Identifier: Apache-2.0
"""The context passed to a workflow: chat with policies, run programs, set the reward.

Owns one attempt's view of the gateway. Knows nothing of leases, deliveries or other attempts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.bounds import MAX_ROLE_CHARS
from penstock.gateway.model_calls import Answer, Call, RawPrompt
from penstock.gateway.sampling import read_overrides
from penstock.types import (
    JsonObject,
    PolicyName,
)

if TYPE_CHECKING:  # a reward worker that imports a user's workflow module must start fast
    from penstock.gateway.session import Session
    from penstock.rollout.endpoint import Endpoint
    from penstock.rollout.grading.types import GradingLimits, Verdict
    from penstock.rollout.harbor.trial import Trial
    from penstock.rollout.isolation import Isolation
    from penstock.rollout.tool_sandbox import ToolSandbox
    from penstock.tasks.harbor import HarborTask


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

    def __init__(
        self,
        session: Session,
        endpoint: Endpoint,
        *,
        seed: int,
        isolation: Isolation | None = None,
        row_id: str = "",
    ) -> None:
        self.seed = seed
        """Seed of this slot: the same for every attempt on every node."""
        self.explicit_reward: float | None = None
        """The last value passed to `reward()`; None means the run's reward function scores."""
        self._session = session
        self._endpoint = endpoint
        self._isolation = isolation
        self._row_id = row_id
        self._sandbox: ToolSandbox | None = None

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
        """Run a program in a sandbox and return its standard output.

        Environment variables point its OpenAI or Anthropic client at this attempt; it reaches
        nothing else, and sees of this machine's files what `sandbox.workflow` in the run file
        grants, the working directory and its own installation. Raises WorkflowError if the exit
        code is not 0. The program and its descendants are killed when the attempt ends for any
        reason, and when the node dies.
        """
        from penstock.rollout.agent_programs import run_agent

        return await run_agent(
            self._walls(),
            self._endpoint,
            self.api_key,
            argv,
            env=env or {},
            row_id=self._row_id,
            stdin=stdin,
            timeout_s=timeout_s,
        )

    async def run_harbor(self, task: HarborTask, argv: Sequence[str], instruction: str) -> Trial:
        """Run an agent inside a Harbor task, then the task's verifier. The workflow of Harbor
        sources calls it."""
        from penstock.rollout.harbor.trial import Agent, run_trial

        endpoint, key = self._endpoint, self.api_key
        agent = Agent(
            argv=argv, instruction=instruction, endpoint=endpoint, api_key=key, seed=self.seed
        )
        return await run_trial(self._walls(), task, agent, row_id=self._row_id)

    @property
    def sandbox(self) -> ToolSandbox:
        """Runs code that a model wrote: a folder and programs of this attempt, without network.
        Starts when it is first used, and ends with the attempt."""
        from penstock.rollout.tool_sandbox import ToolSandbox

        if self._sandbox is None:
            self._sandbox = ToolSandbox(self._walls(), self._row_id)
        return self._sandbox

    async def grade(
        self,
        solution: str,
        tests: str,
        *,
        ids: Sequence[str],
        limits: GradingLimits | None = None,
    ) -> Verdict:
        """Run hidden tests against a solution that a model wrote, each in a separate sandbox.

        Args:
            solution: Python source; see `TestFile` for what tests can do with it.
            tests: Python source of functions `test_NAME(solution)`.
            ids: Names of all tests that must report.
            limits: Bounds on time and sizes.
        """
        from penstock.rollout.tool_sandbox import grade_solution

        return await grade_solution(self._walls(), solution, tests, ids=ids, limits=limits)

    async def close(self) -> None:
        """End the sandbox of this attempt. The node calls it."""
        if self._sandbox is not None:
            await self._sandbox.close()

    def _walls(self) -> Isolation:
        from penstock.rollout.isolation import Isolation

        if self._isolation is None:
            self._isolation = Isolation()
        return self._isolation
