# SPDX-License-Identifier: Apache-2.0
"""The steps of the probe that call the user's code: the workflow, then the reward on its answer.

Owns which workflow and reward belong to which task, and how their failures are reported."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.config import CommandWorkflow, RunConfig, run_dir
from penstock.dataflow.service.build import run_info
from penstock.dataflow.service.build_sources import workflow_text
from penstock.errors import ConfigError, EngineError, SandboxError, WeightsError
from penstock.plugins import REWARD_GROUP, load_function
from penstock.rollout.prompt_templates import parse_prompt
from penstock.rollout.rewards.frames import ScoreRequest
from penstock.rollout.rewards.graded import tests_of
from penstock.rollout.rewards.worker import score
from penstock.rollout.workflows import find_workflow
from penstock.runs.environment_check import missing_environment
from penstock.runs.probe_report import Reporter, code_of_frames, code_of_object
from penstock.runs.probe_workflow import ScriptedRollout, judge_rollout, run_scripted
from penstock.runs.sandbox_settings import isolation_settings
from penstock.scorers.code import REWARD as CODE_REWARD
from penstock.scorers.code import test_ids
from penstock.trainer.model_folders import TINY_QWEN3, initial_folder
from penstock.types import JsonObject, PolicyName, Task, Trajectory

MADE_UP_TASK = Task(
    key="check", source="check", ordinal=0, payload={"prompt": "abc"}, workflow="", seed=0
)
"""For a run of external agents, whose tasks only they know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What attempts and scores the tasks of a source, with the config keys that say so."""

    workflow: str
    workflow_key: str
    reward: str
    """Empty if the workflow or a stage gives the reward."""
    reward_key: str


def environment_of(config: RunConfig, source_index: int) -> Environment:
    """Of one source."""
    source = config.sources[source_index]
    own = f"sources[{source_index}]."
    return Environment(
        workflow=workflow_text(config.workflow_of(source)),
        workflow_key=f"{own if source.workflow else ''}workflow",
        reward=config.reward_of(source) or "",
        reward_key=f"{own if source.reward else ''}reward",
    )


class CallChecker:
    """Runs every workflow and reward of a run once."""

    def __init__(self, config: RunConfig, reporter: Reporter, *, deadline_s: float) -> None:
        self._config = config
        self._reporter = reporter
        self._deadline_s = deadline_s
        self._loaded: dict[tuple[str, str], Any] = {}
        """Workflows and rewards by config key and name; None for those that cannot be loaded."""

    def check(self, tasks: Mapping[int, Task]) -> list[Trajectory]:
        """The attempts that can be trained, of one task of each source. Without any task, only
        loads workflow and reward."""
        is_online = all(source.session is not None for source in self._config.sources)
        if is_online:
            made = self._attempt("single_turn", "workflow", MADE_UP_TASK, has_reward=False)
            return [made.trajectory] if made else []
        trajectories: list[Trajectory] = []
        for index in range(len(self._config.sources)):
            place = environment_of(self._config, index)
            reward = self._load(place.reward, place.reward_key, "reward", _load_reward)
            workflow = self._load(place.workflow, place.workflow_key, "workflow", find_workflow)
            if index not in tasks or workflow is None or not self._is_installed(index):
                continue
            has_reward = bool(place.reward)
            made = self._attempt(
                place.workflow, place.workflow_key, tasks[index], has_reward=has_reward
            )
            if made is None:
                continue
            trajectories.append(made.trajectory)
            if reward is not None:
                self._reporter.begin(f"reward {place.reward}", place.reward_key)
                self._check_reward(reward, place, tasks[index].payload, made.completion)
        return trajectories

    def _load(self, name: str, key: str, kind: str, load: Callable[[str], Any]) -> Any:
        """The function; None if there is none, with the problem reported once."""
        if not name:
            return None
        if (key, name) not in self._loaded:
            self._reporter.begin(f"{kind} {_label(name)}", key)
            try:
                self._loaded[key, name] = load(name)
            except ConfigError as error:
                self._reporter.add_config_error(key, error, named=name)
                self._loaded[key, name] = None
        return self._loaded[key, name]

    def _is_installed(self, index: int) -> bool:
        """Whether the programs of a command and an environment are; the check of this machine
        reports it if not."""
        source = self._config.sources[index]
        if source.env is not None and missing_environment(source.env) is not None:
            return False
        workflow = self._config.workflow_of(source)
        return not isinstance(workflow, CommandWorkflow) or bool(shutil.which(workflow.command[0]))

    def _attempt(
        self, workflow: str, key: str, task: Task, *, has_reward: bool
    ) -> ScriptedRollout | None:
        """The attempt; None if it cannot be scored, with the reason reported."""
        self._reporter.begin(f"workflow {_label(workflow)}", key)
        try:
            info = run_info(self._config)
            for name, text in info.prompts.items():
                parse_prompt(name, text)
        except ConfigError:
            return None  # a template; the check of this machine reports it
        if task is MADE_UP_TASK:
            info = replace(info, reward="", is_scored=False)
        info = replace(info, workflow=workflow)
        with ExitStack() as folders:
            models = dict(self._model_folders(folders))
            try:
                rollout = run_scripted(
                    info,
                    task,
                    models,
                    has_reward=has_reward,
                    deadline_s=self._deadline_s,
                    isolation=isolation_settings(self._config, run_dir(self._config)),
                )
            except (WeightsError, EngineError) as error:
                first = next(iter(self._config.models))
                self._reporter.add(f"models.{first}.init", str(error))
                return None
            except (ConfigError, SandboxError) as error:
                self._reporter.add("tools", str(error))
                return None
        is_good = judge_rollout(rollout, workflow, key, self._reporter, self._deadline_s)
        return rollout if is_good else None

    def _model_folders(self, open_folders: ExitStack) -> Iterator[tuple[PolicyName, Path]]:
        """Of each policy; the built-in model where a folder is missing, which the check of this
        machine reports."""
        for name, model in self._config.models.items():
            try:
                folder = open_folders.enter_context(initial_folder(model.init, self._config.seed))
            except ConfigError:
                folder = open_folders.enter_context(initial_folder(TINY_QWEN3, self._config.seed))
            yield PolicyName(name), folder

    def _check_reward(
        self, function: Any, place: Environment, payload: JsonObject, completion: str | None
    ) -> None:
        """Call it as a node does: on a batch of two, and on an empty completion."""
        if place.reward == CODE_REWARD:
            return self._check_tests(place, payload)
        code = code_of_object(function)
        tries = [("two completions", [completion or "", ""]), ("an empty completion", [""])]
        for what, texts in tries:
            request = ScoreRequest(completions=texts, payloads=[payload] * len(texts))
            answer = score(function, request)
            wrong = [value for value in answer.values if isinstance(value, str)]
            if answer.error:
                return self._add_reward_error(place, answer.error, what, code)
            if wrong:
                return self._reporter.add(
                    place.reward_key,
                    f"reward {place.reward} returned {wrong[0]} for {what}; expected a number: "
                    "return one finite number per completion",
                    code=code,
                )
            self._reporter.result.rewards[place.reward] = float(answer.values[-1])

    def _check_tests(self, place: Environment, payload: JsonObject) -> None:
        """A node grades, in sandboxes; here only the tests of the task are read."""
        try:
            test_ids(tests_of(payload))
        except ConfigError as error:
            self._reporter.add(place.reward_key, f"reward {place.reward}: {error}")

    def _add_reward_error(self, place: Environment, error: str, what: str, code: str) -> None:
        raised_at = code_of_frames(error)
        reason = error.splitlines()[-1] if raised_at else error
        text = f"reward {place.reward} failed on {what}: {reason}"
        if ";" not in reason:
            text += "; write it as reward(completions, **columns) -> one number per completion"
        detail = error if raised_at else ""
        self._reporter.add(place.reward_key, text, code=raised_at or code, detail=detail)


def _load_reward(name: str) -> Callable[..., Any]:
    return load_function(name, REWARD_GROUP)


def _label(name: str) -> str:
    return name if len(name) <= 60 else f"{name[:57]}..."
