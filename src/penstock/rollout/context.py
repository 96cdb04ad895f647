# SPDX-License-Identifier: Apache-2.0
"""The context passed to a workflow: chat with policies, spawn sub-agents, run programs, set the
reward.

Owns one agent's view of the gateway. Knows nothing of leases, deliveries or other attempts.
"""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, SupportsFloat

from penstock.bounds import MAX_REWARD, MAX_ROLE_CHARS
from penstock.gateway.model_calls import Answer, Call, RawPrompt
from penstock.gateway.sampling import read_overrides
from penstock.types import (
    JsonObject,
    PolicyName,
    Task,
    view_ids,
)

if TYPE_CHECKING:  # a reward worker that imports a user's workflow module must start fast
    from penstock.gateway.budgets import Budget
    from penstock.gateway.session import Session
    from penstock.rollout.endpoint import Endpoint
    from penstock.rollout.environments.session import EnvironmentSession
    from penstock.rollout.environments.types import Environment
    from penstock.rollout.grading.types import GradingLimits, Verdict
    from penstock.rollout.harbor.trial import Trial
    from penstock.rollout.isolation import Isolation
    from penstock.rollout.prompt_templates import PromptTemplate
    from penstock.rollout.rewards.scorer import RewardScorer
    from penstock.rollout.tool_sandbox import ToolSandbox
    from penstock.rollout.tools.attempt_tools import Tools
    from penstock.tasks.harbor import HarborTask


_NOTHING_GIVEN = (None,) * 8


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
        given = (temperature, top_p, top_k, min_p, max_tokens, seed, stop, json_schema)
        overrides = None
        if given != _NOTHING_GIVEN:
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
            RawPrompt(prompt=prompt, policy=self._name, role=self._role, overrides=overrides)
        )


def _stop(texts: str | Sequence[str] | None) -> str | list[str] | None:
    return texts if texts is None or isinstance(texts, str) else list(texts)


SubWorkflow = Callable[[Task, "Context"], Awaitable[Any]]
"""A workflow that may return anything to the workflow that spawned it."""


class Context:
    """One attempt, as its workflow or a sub-agent sees it: the policies to call, and the reward to
    set."""

    def __init__(
        self,
        session: Session,
        endpoint: Endpoint,
        *,
        seed: int,
        isolation: Isolation | None = None,
        row_id: str = "",
        task: Task | None = None,
        scorer: RewardScorer | None = None,
        prompts: Mapping[str, PromptTemplate] | None = None,
        find_workflow: Callable[[str], SubWorkflow] | None = None,
        tools: Tools | None = None,
        env: EnvironmentSession | None = None,
    ) -> None:
        self.seed = seed
        """Seed of this slot, or of this sub-agent: the same for every attempt on every node."""
        self.explicit_reward: float | None = None
        """The last value passed to `reward()`; None means the run's reward function scores."""
        self.role_rewards: dict[str, float] = {}
        """Rewards of roles."""
        self.turn_rewards: dict[int, float] = {}
        """Rewards of turns, by index."""
        self._session = session
        self._endpoint = endpoint
        self._isolation = isolation
        self._row_id = row_id
        self._task = task
        self._scorer = scorer
        self._prompts = prompts or {}
        self._find_workflow = find_workflow
        self._role = ""
        self._num_spawned = 0
        self._root = self
        self._sandbox: ToolSandbox | None = None
        self._tools = tools
        self._env = env

    def policy(self, name: str | None = None, *, role: str = "") -> BoundPolicy:
        """The policy of the role `name`, or else the policy `name`. Without a name: the role of
        this sub-agent, or the first policy of the run. The role labels the turns; `role` labels
        them differently."""
        if len(role) > MAX_ROLE_CHARS:
            raise ValueError(f"role has {len(role)} characters; at most {MAX_ROLE_CHARS} allowed")
        return BoundPolicy(self._session, None if name is None else PolicyName(name), role)

    @property
    def base_url(self) -> str:
        """Base URL for OpenAI clients in this or a child process; for Anthropic clients, drop the
        `/v1`. A sub-agent with a role has the URL of its role."""
        return self.role_url(self._role) if self._role else self._endpoint.url

    def role_url(self, role: str) -> str:
        """Base URL whose calls are made in this role, whatever `model` they name."""
        from penstock.rollout.endpoint import role_url

        return role_url(self._endpoint.url, role)

    @property
    def roles(self) -> tuple[str, ...]:
        """What `policy()` takes: the roles of the run file, and its policies."""
        return self._session.model_names

    @property
    def agent(self) -> str:
        """Path of this sub-agent, like `0.2`; empty for the workflow itself."""
        return self._session.agent

    @property
    def api_key(self) -> str:
        """API key of this attempt's session: calls made with it are recorded as its turns."""
        return self._session.api_key

    def reward(self, value: float, *, role: str | None = None, turn: int | None = None) -> None:
        """Set a reward; the last call counts.

        Args:
            value: A finite number.
            role: Reward of this role, in place of the row's for its turns.
            turn: Reward of one turn (`answer.turn`), in place of its role's.

        Without role and turn it is the reward of the row, and the run's reward function is skipped.
        """
        if not abs(value) <= MAX_REWARD:
            raise ValueError(f"reward must be a finite number up to {MAX_REWARD:g}, got {value}")
        if role is not None and turn is not None:
            raise ValueError("a reward is of a role or of a turn; call reward() once for each")
        if turn is not None:
            if not 0 <= turn < len(self._session.turns()):
                raise ValueError(f"there is no turn {turn} yet; pass `answer.turn`")
            self.turn_rewards[turn] = float(value)
        elif role is not None:
            if not 0 < len(role) <= MAX_ROLE_CHARS:
                raise ValueError(f"role has {len(role)} characters; use 1 to {MAX_ROLE_CHARS}")
            self.role_rewards[role] = float(value)
        else:
            self.explicit_reward = float(value)

    def unplayed_roles(self, run_roles: Collection[str]) -> tuple[str, ...]:
        """Roles with a reward that neither a turn nor the run file names. The node asks."""
        if not self.role_rewards:
            return ()
        played = {turn.role for turn in self._session.turns()}
        return tuple(sorted(self.role_rewards.keys() - played - set(run_roles)))

    async def score(self, completion: str) -> float:
        """What the run's reward function gives for a completion of this task. Sets no reward.

        Raises RewardError if it fails, or if the run has none."""
        from penstock.rollout.rewards.scorer import score_or_raise

        return await score_or_raise(self._scorer, completion, self._task)

    def prompt(self, name: str, default: str | None = None, /, **values: object) -> str:
        """The template `name` of `prompts` in the run file, with a value for each placeholder.
        `default`: the template where the run file has none."""
        from penstock.rollout.prompt_templates import find_prompt

        return find_prompt(self._prompts, name, default).fill(values)

    async def spawn(
        self,
        workflow: str | SubWorkflow,
        payload: JsonObject | Task,
        *,
        role: str = "",
        budget: Budget | None = None,
        deadline_s: float | None = None,
    ) -> Any:
        """Run a sub-agent to its end and return its result.

        The result is what its workflow returned; for None, the text of its last answer. Its turns
        are turns of this attempt, under its own path. A reward that it sets is the reward of each
        of its own turns. Run several at once with `asyncio.gather`. Raises BudgetExceeded beyond a
        limit.

        Args:
            workflow: `async def run(task, ctx)`, or the name of a workflow as in the run file.
            payload: The payload of its task, or a task.
            role: Who calls in `ctx.policy()` without a name, and over HTTP.
            budget: What it may use, its own sub-agents included.
            deadline_s: Seconds until it is cancelled.
        """
        from penstock.gateway.budgets import Budget
        from penstock.rollout.sub_agents import child_path, child_seed, child_task, within

        function = self._load(workflow) if isinstance(workflow, str) else workflow
        self._session.check_spawn()
        number, self._num_spawned = self._num_spawned, self._num_spawned + 1
        seed = child_seed(self.seed, number)
        path = child_path(self.agent, number)
        session = self._session.open_child(path, seed=seed, role=role, budget=budget or Budget())
        task = child_task(payload, self._task, seed)
        child = self._child(session, seed, role, task)
        try:
            return child._result(await within(deadline_s, function(task, child), path))
        finally:
            session.close()
            self._credit(child)

    def _load(self, name: str) -> SubWorkflow:
        assert self._find_workflow is not None, "a context of an attempt finds workflows"
        return self._find_workflow(name)

    def _result(self, returned: Any) -> Any:
        """What this sub-agent hands to its parent, from what its workflow returned."""
        from penstock.rollout.sub_agents import without_result

        if isinstance(returned, SupportsFloat):
            self.reward(float(returned))
        if returned is not None:
            return returned
        text = self.last_text()
        if text is None:
            raise without_result(self.agent)
        return text

    def _credit(self, child: Context) -> None:
        """Give the reward that a sub-agent set to its own turns; a turn's own reward stays."""
        if child.explicit_reward is None:
            return
        for index, turn in enumerate(self._session.turns()):
            if turn.agent == child.agent:
                self.turn_rewards.setdefault(index, child.explicit_reward)

    def _child(self, session: Session, seed: int, role: str, task: Task) -> Context:
        """The context of a sub-agent. What an attempt has once (sandbox, rewards) it shares."""
        child = copy.copy(self)
        child.seed = seed
        child.explicit_reward = None
        child._session, child._role, child._task = session, role, task
        child._num_spawned = 0
        child._tools = self.tools.for_agent(session.agent)
        return child

    def last_text(self) -> str | None:
        """Text of the last answer that this agent received, through any API; None without one."""
        session = self._session
        for turn in reversed(session.turns()):
            if turn.agent == session.agent and turn.reached_agent:
                renderer = session.renderer(turn.policy)
                return renderer.decode_visible(view_ids(turn.sampled_ids).tolist())
        return None

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
            roles=tuple(self._session.roles),
            role=self._role,
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

        root = self._root  # sub-agents share it
        if root._sandbox is None:
            own = ToolSandbox(root._walls(), root._row_id)
            root._sandbox = root.tools.sandbox or own
        return root._sandbox

    @property
    def tools(self) -> Tools:
        """The tools that `tools:` in the run file names: `specs` for the model, `call` for its
        calls. Their servers end with the attempt."""
        from penstock.rollout.tools.attempt_tools import Tools

        if self._tools is None:
            self._tools = Tools()
        return self._tools

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

    @property
    def env(self) -> Environment:
        """The environment of the task's source: `reset`, `step`, `score`. Ends with the attempt."""
        from penstock.rollout.environments.environments import no_environment

        if self._env is None:
            raise no_environment()
        return self._env

    async def close(self) -> None:
        """End the sandbox, the tools and the environment of this attempt. The node calls it."""
        if self._tools is not None:
            await self._tools.close()
        if self._env is not None:
            self._env.close()
        if self._sandbox is not None:
            await self._sandbox.close()

    def _walls(self) -> Isolation:
        from penstock.rollout.isolation import Isolation

        if self._isolation is None:
            self._isolation = Isolation()
        return self._isolation
