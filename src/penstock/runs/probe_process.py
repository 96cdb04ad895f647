# SPDX-License-Identifier: Apache-2.0
"""Runs the user's code once, in a process that `penstock check` can kill.

Started as `python -m penstock.runs.probe_process`: a ProbeRequest as JSON on stdin, one
ProbeMessage per line on stdout. Output of the user's code goes to stderr. Loads and calls the code
as the services do, so code that passes here works there. The steps, in order:

    rules      built with their options
    sources    the first task, twice, and a digest
    engines    loaded, not built
    stages     loaded, and their signatures compared with the stages
    workflow   one attempt at the first task of each source, on a scripted answer
    reward     called on the completion of that attempt, and on an empty one
    loss       the attempt as a tiny group, through the training graph to a loss; imports torch

A step whose input an earlier step could not make is left out. torch is imported only if nothing was
found before.
"""

from __future__ import annotations

import faulthandler
import inspect
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.config import CommandWorkflow, RunConfig
from penstock.errors import ConfigError, EngineError, WeightsError
from penstock.runs.probe_report import (
    ProbeMessage,
    ProbeRequest,
    Reporter,
    code_of,
    code_of_frames,
    code_of_object,
)
from penstock.types import JsonObject, PolicyName, Task, Trajectory

IMPORT_DEADLINE_S = 600.0
"""Time limit of steps without user code, such as importing torch; much longer than they take."""
MADE_UP_TASK = Task(
    key="check", source="check", ordinal=0, payload={"prompt": "abc"}, workflow="", seed=0
)
"""For a run of external agents, whose tasks only they know."""


class Probe:
    """The steps, over one config."""

    def __init__(self, config: RunConfig, request: ProbeRequest, reporter: Reporter) -> None:
        self._config = config
        self._deadline_s = request.deadline_s
        self._reporter = reporter
        self._tasks: list[Task] = []
        """The first task of each source."""

    def run(self, *, with_loss: bool) -> None:
        self._import_penstock()
        self._check_rules()
        self._check_sources()
        self._check_engines()
        self._check_stages()
        trajectories = self._check_workflow()
        found = self._reporter.result
        if with_loss and trajectories and not found.problems:
            from penstock.runs.probe_loss import check_loss

            check_loss(self._config, trajectories, self._reporter)

    # --- loading --------------------------------------------------------------------------------

    def _import_penstock(self) -> None:
        """Before the user's steps, so that their time limits count the user's code alone."""
        self._reporter.begin("penstock", "")
        import penstock.dataflow.rules.registry
        import penstock.dataflow.service.build
        import penstock.rollout.engines.scripted
        import penstock.rollout.rewards.worker
        import penstock.runs.probe_workflow
        import penstock.trainer.model_folders
        import penstock.trainer.pipeline.functions  # noqa: F401

    def _check_rules(self) -> None:
        from penstock.dataflow.rules import make_rule

        for key, rule in _written_rules(self._config):
            self._reporter.begin(f"rule {rule.name}", key)
            try:
                make_rule(rule.hook, rule.name, rule.options, {})
            except ConfigError as error:
                self._reporter.add_config_error(key, error, named=rule.name)

    def _check_sources(self) -> None:
        for index, source in enumerate(self._config.sources):
            if source.task:
                self._reporter.begin(f"source {source.name}", f"sources[{index}].task")
                self._check_source(index, source.name, source.task, source.limit)

    def _check_source(self, index: int, name: str, where: str, limit: int | None) -> None:
        from penstock.dataflow.sources import open_source

        seed, reporter, key = self._config.seed, self._reporter, f"sources[{index}].task"
        try:
            source = open_source(name, where, limit=limit)
            task = source.task(0, seed=seed, workflow="")
            repeated = source.task(0, seed=seed, workflow="")
            reporter.result.digests[name] = source.digest(seed)
        except ConfigError as error:
            named = where if error.__cause__ else f"{where}:make_task"
            return reporter.add_config_error(key, error, named=named)
        except (Exception, SystemExit) as error:
            text = f"source {name!r}: {where} raised {type(error).__name__}: {error}"
            fix = "mend make_task, or write it as make_task(ordinal, seed)"
            code = code_of(f"{where}:make_task")
            return reporter.add_error(key, f"{text}; {fix}", error, code=code)
        maker = code_of(f"{where}:make_task")
        if task != repeated:
            reporter.add(
                key,
                f"source {name!r}: two calls of make_task(0, {seed}) returned different tasks; "
                "derive all randomness from the seed, so that a restart repeats the tasks",
                code=maker,
            )
        if self._config.workflow == "single_turn" and not isinstance(
            task.payload.get("prompt"), str
        ):
            what = "its first line" if where.endswith(".jsonl") else "make_task"
            keys = ", ".join(map(str, task.payload)) or "none"
            return reporter.add(
                key,
                f'source {name!r}: {what} has no text under "prompt", which workflow single_turn '
                f"needs; keys: {keys}",
                code=maker,
            )
        reporter.result.tasks[name] = task.payload
        self._tasks.append(task)

    def _check_engines(self) -> None:
        from penstock.rollout.engines import find_engine

        for name, model in self._config.models.items():
            key = f"models.{name}.engine"
            if ":" not in model.engine:
                continue
            self._reporter.begin(f"engine {model.engine}", key)
            try:
                build = find_engine(model.engine).build
            except ConfigError as error:
                self._reporter.add_config_error(key, error, named=model.engine)
                continue
            if not _takes_one_argument(build):
                self._reporter.add(
                    key,
                    f"engine {model.engine} does not take one argument; write it as "
                    "`def __init__(self, settings)`, with the EngineSettings",
                    code=code_of_object(build),
                )

    def _check_stages(self) -> None:
        from penstock.trainer.pipeline.functions import find_function

        stages = self._config.pipeline.stages if self._config.pipeline else ()
        for index, stage in enumerate(stages):
            if not stage.fn and stage.type != "compute":
                continue
            key = f"pipeline.stages[{index}].fn"
            self._reporter.begin(f"stage {stage.id}", key)
            try:
                find_function(stage)
            except ConfigError as error:
                self._reporter.add_config_error(key, error, named=stage.fn or "")

    # --- workflow and reward --------------------------------------------------------------------

    def _check_workflow(self) -> list[Trajectory]:
        """The attempts that can be trained; of a run without tasks, one at a made-up task."""
        from penstock.dataflow.service.build import run_info
        from penstock.rollout.workflows import find_workflow

        info, reporter = run_info(self._config), self._reporter
        tasks = self._tasks
        if self._config.session_source is not None:
            info = replace(info, workflow="single_turn", reward="", is_scored=False)
            tasks = [MADE_UP_TASK]
        reward = self._load_reward()
        reporter.begin(f"workflow {_label(info.workflow)}", "workflow")
        if isinstance(self._config.workflow, CommandWorkflow) and not shutil.which(
            self._config.workflow.command[0]
        ):
            return []  # the check of this machine reports it
        try:
            find_workflow(info.workflow)
        except ConfigError as error:
            reporter.add_config_error("workflow", error, named=info.workflow)
            return []
        trajectories: list[Trajectory] = []
        for task in tasks:
            reporter.begin(f"workflow {_label(info.workflow)}", "workflow")
            rollout = self._attempt(info, task)
            if rollout is None:
                continue
            trajectories.append(rollout.trajectory)
            if reward is not None and info.reward:
                reporter.begin(f"reward {info.reward}", "reward")
                self._check_reward(reward, task.payload, rollout.completion)
        return trajectories

    def _attempt(self, info: Any, task: Task) -> Any:
        """The attempt, or None with the problem noted."""
        from penstock.runs.probe_workflow import judge_rollout, run_scripted

        with ExitStack() as folders:
            models = dict(self._model_folders(folders))
            try:
                rollout = run_scripted(info, task, models, deadline_s=self._deadline_s)
            except (WeightsError, EngineError) as error:
                first = next(iter(self._config.models))
                self._reporter.add(f"models.{first}.init", str(error))
                return None
        is_good = judge_rollout(
            rollout, info.workflow, "workflow", self._reporter, self._deadline_s
        )
        return rollout if is_good else None

    def _model_folders(self, open_folders: ExitStack) -> Iterator[tuple[PolicyName, Path]]:
        """Of each policy; the built-in model where a folder is missing, which the check of this
        machine reports."""
        from penstock.trainer.model_folders import TINY_QWEN3, initial_folder

        for name, model in self._config.models.items():
            try:
                folder = open_folders.enter_context(initial_folder(model.init, self._config.seed))
            except ConfigError:
                folder = open_folders.enter_context(initial_folder(TINY_QWEN3, self._config.seed))
            yield PolicyName(name), folder

    def _load_reward(self) -> Any:
        from penstock.plugins import load_function

        name = self._config.reward
        if not name:
            return None
        self._reporter.begin(f"reward {name}", "reward")
        try:
            return load_function(name)
        except ConfigError as error:
            self._reporter.add_config_error("reward", error, named=name)
            return None

    def _check_reward(self, function: Any, payload: JsonObject, completion: str | None) -> None:
        """Call it as a node does: on a batch of two, and on an empty completion."""
        from penstock.rollout.rewards.frames import ScoreRequest
        from penstock.rollout.rewards.worker import score

        name, code = self._config.reward, code_of_object(function)
        tries = [("two completions", [completion or "", ""]), ("an empty completion", [""])]
        for what, texts in tries:
            answer = score(
                function, ScoreRequest(completions=texts, payloads=[payload] * len(texts))
            )
            wrong = [value for value in answer.values if isinstance(value, str)]
            if answer.error:
                return self._add_reward_error(answer.error, what, code)
            if wrong:
                text = f"reward {name} returned {wrong[0]} for {what}; expected a number"
                fix = "return one finite number per completion"
                return self._reporter.add("reward", f"{text}: {fix}", code=code)
            self._reporter.result.reward = float(answer.values[-1])

    def _add_reward_error(self, error: str, what: str, code: str) -> None:
        lines = error.splitlines()
        is_traceback = any(line.lstrip().startswith("File ") for line in lines)
        reason = lines[-1] if is_traceback else error
        text = f"reward {self._config.reward} failed on {what}: {reason}"
        if ";" not in reason:
            text += "; write it as reward(completions, **columns) -> one number per completion"
        frame = code_of_frames(error) if is_traceback else ""
        self._reporter.add("reward", text, code=frame or code, detail=error if is_traceback else "")


def _written_rules(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """(config key, rule) of every rule in the file."""
    for index, rule in enumerate(config.dataflow.rules):
        yield f"dataflow.rules[{index}]", rule
    for name, model in config.models.items():
        for index, rule in enumerate(model.dataflow.rules if model.dataflow else ()):
            yield f"models.{name}.dataflow.rules[{index}]", rule


def _takes_one_argument(build: Any) -> bool:
    try:
        inspect.signature(build).bind(object())
    except TypeError:
        return False
    except ValueError:  # a compiled class
        return True
    return True


def _label(workflow: str) -> str:
    return workflow if len(workflow) <= 60 else f"{workflow[:57]}..."


def main() -> None:
    from penstock.observe import logs
    from penstock.runs.service_process import add_import_paths
    from penstock.wire.codec import JSON, decode, encode_json

    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    logs.configure("check", level="error")
    request = decode(sys.stdin.buffer.read(), ProbeRequest, media_type=JSON)
    add_import_paths(tuple(request.python_path))

    def send(step: str, key: str) -> None:
        message = ProbeMessage(step=step, key=key, result=reporter.result)
        answers.write(encode_json(message) + b"\n")
        answers.flush()

    def begin(step: str, key: str) -> None:
        send(step, key)
        limit_s = request.deadline_s if key else IMPORT_DEADLINE_S
        # Its watchdog needs neither the GIL nor the main thread, so a loop in C is seen too.
        faulthandler.dump_traceback_later(limit_s, exit=True, file=request.stack_fd)

    reporter = Reporter(request.python_path, begin)
    config = RunConfig.model_validate(request.config)
    Probe(config, request, reporter).run(with_loss=request.with_loss)
    faulthandler.cancel_dump_traceback_later()
    reporter.result.cpu_s = time.process_time() - reporter.result.import_cpu_s
    send("", "")
    sys.stdout.flush()
    os._exit(0)  # threads of the user's code must not keep the process


if __name__ == "__main__":
    main()
