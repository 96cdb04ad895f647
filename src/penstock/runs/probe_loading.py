# SPDX-License-Identifier: Apache-2.0
"""The steps of the probe that load the user's code: rules, sources, engines, stages.

Owns what is loaded and how a failure is reported. Runs no workflow, reward or stage."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from penstock.config import RuleConfig, RunConfig
from penstock.dataflow.rules import make_rule
from penstock.dataflow.service.build_sources import PROMPT_WORKFLOWS, build_source
from penstock.errors import ConfigError
from penstock.rollout.engines import find_engine
from penstock.runs.probe_report import Reporter, code_of, code_of_object
from penstock.trainer.pipeline.functions import find_function
from penstock.types import Task


def check_rules(config: RunConfig, reporter: Reporter) -> None:
    """Build every rule with its options, as the dataflow service does."""
    for key, rule in _written_rules(config):
        reporter.begin(f"rule {rule.name}", key)
        try:
            make_rule(rule.hook, rule.name, rule.options, {})
        except ConfigError as error:
            reporter.add_config_error(key, error, named=rule.name)


def _written_rules(config: RunConfig) -> Iterator[tuple[str, RuleConfig]]:
    """(config key, rule) of every rule in the file."""
    for index, rule in enumerate(config.dataflow.rules):
        yield f"dataflow.rules[{index}]", rule
    for name, model in config.models.items():
        for index, rule in enumerate(model.dataflow.rules if model.dataflow else ()):
            yield f"models.{name}.dataflow.rules[{index}]", rule


def check_sources(config: RunConfig, reporter: Reporter) -> dict[int, Task]:
    """The first task of each source, by the index of the source; only of those without a fault."""
    found: dict[int, Task] = {}
    for index, source in enumerate(config.sources):
        if source.session is not None:
            continue
        key = f"sources[{index}].{source.kind}"
        reporter.begin(f"source {source.name}", key)
        task = _first_task(config, index, key, reporter)
        if task is None:
            continue
        if _has_prompt(config, index, task, key, reporter):
            reporter.result.tasks[source.name] = task.payload
            found[index] = task
    return found


def _first_task(config: RunConfig, index: int, key: str, reporter: Reporter) -> Task | None:
    entry, seed = config.sources[index], config.seed
    name, where = entry.name, entry.task or ""
    try:
        source = build_source(config, entry)
        task = source.task(0, seed=seed, workflow="")
        repeated = source.task(0, seed=seed, workflow="")
        reporter.result.digests[name] = source.digest(seed)
    except ConfigError as error:
        if entry.rows is None and entry.harbor is None:  # else `data_check` reports what is wrong
            named = where if error.__cause__ else f"{where}:make_task"
            reporter.add_config_error(key, error, named=named)
        return None
    except (Exception, SystemExit) as error:
        text = f"source {name!r}: {where} raised {type(error).__name__}: {error}"
        fix = "mend make_task, or write it as make_task(ordinal, seed)"
        reporter.add_error(key, f"{text}; {fix}", error, code=code_of(f"{where}:make_task"))
        return None
    if task != repeated:
        reporter.add(
            key,
            f"source {name!r}: two calls of make_task(0, {seed}) returned different tasks; "
            "derive all randomness from the seed, so that a restart repeats the tasks",
            code=code_of(f"{where}:make_task"),
        )
    return task


def _has_prompt(config: RunConfig, index: int, task: Task, key: str, reporter: Reporter) -> bool:
    """Whether the task has what the built-in workflow needs."""
    source = config.sources[index]
    is_prompt = isinstance(task.payload.get("prompt"), str | list)
    workflow = config.workflow_name_of(source)
    if workflow not in PROMPT_WORKFLOWS or is_prompt:
        return True
    keys = ", ".join(map(str, task.payload)) or "none"
    reporter.add(
        key,
        f'source {source.name!r}: make_task has neither text nor messages under "prompt", which '
        f"workflow {workflow} needs; add it, or set another workflow (keys: {keys})",
        code=code_of(f"{source.task}:make_task"),
    )
    return False


def check_engines(config: RunConfig, reporter: Reporter) -> None:
    """Load custom engines, and look at their arguments; building one may start a server."""
    for name, model in config.models.items():
        key = f"models.{name}.engine"
        if ":" not in model.engine:
            continue
        reporter.begin(f"engine {model.engine}", key)
        try:
            build = find_engine(model.engine).build
        except ConfigError as error:
            reporter.add_config_error(key, error, named=model.engine)
            continue
        if not _takes_one_argument(build):
            reporter.add(
                key,
                f"engine {model.engine} does not take one argument; write it as "
                "`def __init__(self, settings)`, with the EngineSettings",
                code=code_of_object(build),
            )


def _takes_one_argument(build: Any) -> bool:
    try:
        inspect.signature(build).bind(object())
    except TypeError:
        return False
    except ValueError:  # a compiled class
        return True
    return True


def check_stages(config: RunConfig, reporter: Reporter) -> None:
    """Load the functions of stages and losses, and compare their signatures with the stages."""
    for index, stage in enumerate(config.pipeline.stages if config.pipeline else ()):
        if not stage.fn and stage.type != "compute":
            continue
        key = f"pipeline.stages[{index}].fn"
        reporter.begin(f"stage {stage.id}", key)
        try:
            find_function(stage)
        except ConfigError as error:
            reporter.add_config_error(key, error, named=stage.fn or "")
