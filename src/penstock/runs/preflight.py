# SPDX-License-Identifier: Apache-2.0
"""Checks whether a run can start here, and derives its sizes.

Owns what `penstock check` consists of: this machine (packages, programs, model files, and what
`machine_limits` compares), the user's code in a probe process, and the folder of an earlier run.
Imports neither torch nor the user's code.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from penstock.config import CommandWorkflow, RunConfig
from penstock.config.models import BUILTIN_MODELS
from penstock.config.trackers import TRACKERS_PACKAGE
from penstock.dataflow.service.read_prompts import read_prompt, with_prompts
from penstock.devices import visible_devices
from penstock.errors import ConfigError
from penstock.fleet.run_folder import RunFolder
from penstock.hub import check_hub_model, check_model_files, parse_hub_model
from penstock.observe.tracking import OPENTELEMETRY
from penstock.plugins import builtin_names
from penstock.runs.check_problem import CheckProblem, located
from penstock.runs.data_check import data_problems
from penstock.runs.device_check import device_notes
from penstock.runs.environment_check import environment_problems
from penstock.runs.initial_versions import find, is_version, linked_versions
from penstock.runs.isolation_check import isolation_notes, isolation_problems
from penstock.runs.leakage_check import LeakBounds, leakage_notes
from penstock.runs.machine_limits import machine_problems, this_machine
from penstock.runs.probe import has_user_code, has_user_stages, run_probe
from penstock.runs.probe_report import ProbeResult
from penstock.runs.resume_changes import find_resume_changes
from penstock.runs.target import RunTarget
from penstock.runs.tools_check import check_tools, missing_tool_packages

EXTRAS = {"train": ("torch", "transformers", "safetensors"), "tokens": ("tokenizers", "jinja2")}
"""The packages of each extra; every training run needs both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySizes:
    steps: int
    rows_per_batch: int
    trajectories: int
    """In all steps together."""
    updates_per_step: int
    nodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSizes:
    """Sizes that follow from a config."""

    run: str
    folder: str
    policies: dict[str, PolicySizes]


def derive_sizes(target: RunTarget) -> RunSizes:
    config = target.config
    policies: dict[str, PolicySizes] = {}
    for name in config.trained:
        policy = config.for_policy(name)
        has_tasks = any(source.session is None for source in config.sources)
        num_members = policy.algorithm.num_generations if has_tasks else 1
        rows = policy.training.groups_per_batch * num_members
        policies[name] = PolicySizes(
            steps=policy.training.steps,
            rows_per_batch=rows,
            trajectories=rows * policy.training.steps,
            updates_per_step=policy.training.minibatches * policy.training.epochs,
            nodes=policy.model.replicas,
        )
    return RunSizes(run=config.name, folder=str(target.folder.path), policies=policies)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """The result of a check."""

    problems: tuple[CheckProblem, ...]
    """Everything that would make the run fail; empty if it can start."""
    notes: tuple[str, ...]
    """What was not checked, or is unusual."""
    probed: ProbeResult


def check_run(
    target: RunTarget,
    *,
    deadline_s: float | None = None,
    on_step: Callable[[str], None] | None = None,
    leak_bounds: LeakBounds | None = None,
) -> CheckReport:
    """Check everything, with the user's code called once and, if nothing was found, a loss
    computed; start nothing.

    deadline_s: most seconds for each step of the user's code. on_step: called with the name of each
    step as it begins. leak_bounds: how much training data is compared with the suites."""
    with linked_versions(target, skip_missing=True) as found:
        return _check_run(found, deadline_s=deadline_s, on_step=on_step, leak_bounds=leak_bounds)


def _check_run(
    target: RunTarget,
    *,
    deadline_s: float | None,
    on_step: Callable[[str], None] | None,
    leak_bounds: LeakBounds | None,
) -> CheckReport:
    tools = check_tools(target.config, target.folder.path)
    here = (*find_problems(target), *(located(one, target) for one in tools.problems))
    probed = run_probe(target, deadline_s=deadline_s, with_loss=not here, on_step=on_step)
    walls = isolation_notes(target.config, target.folder.path)
    suites = target.config.eval.suites if target.config.eval else ()
    leaks = leakage_notes(target.config, suites, leak_bounds)
    devices = device_notes(target.config, len(visible_devices()))
    notes = [*walls, *tools.notes, *probed.notes, *leaks, *devices]
    if target.folder.finish() is not None:
        notes.append(f"{target.folder.path} is already finished; raise training.steps to go on")
    return CheckReport(
        problems=(*here, *probed.problems, *_resume_problems(target, probed)),
        notes=tuple(notes),
        probed=probed,
    )


def ensure_startable(target: RunTarget, *, deadline_s: float | None = None) -> dict[str, str]:
    """Raise ConfigError with every problem found; otherwise return the task digest of each source
    that was probed. A run of built-in code only is not probed, and a loss is computed only for
    stages of the user, since that takes as long as starting a trainer."""
    config, probed = target.config, None
    with linked_versions(target, skip_missing=True) as resolved:
        found = list(find_problems(resolved))
        if has_user_code(config):
            with_loss = has_user_stages(config) and not found
            probed = run_probe(resolved, deadline_s=deadline_s, with_loss=with_loss)
            found += probed.problems
    if found:
        listed = "\n".join(f"  - {problem}" for problem in found)
        raise ConfigError(f"run {config.name} cannot start:\n{listed}")
    return probed.digests if probed else {}


def find_problems(target: RunTarget) -> Iterator[CheckProblem]:
    """What would make this run fail on this machine. Calls no code of the user."""
    for problem in _find_problems(target):
        yield located(problem, target)


def _find_problems(target: RunTarget) -> Iterator[CheckProblem]:
    config = target.config
    for text in _missing_extras():
        yield CheckProblem(key="", text=text)
    yield from _missing_models(config, target.folder)
    yield from _vocabulary_mismatches(config)
    yield from _missing_program(config)
    yield from _prompt_problems(config)
    yield from _missing_engines(config)
    yield from environment_problems(config)
    yield from missing_tool_packages(config)
    yield from missing_trackers(config)
    yield from isolation_problems(config, target.folder.path)
    yield from machine_problems(config, target.folder.path, this_machine())
    for key, text in data_problems(config, target.folder.sources()):
        yield CheckProblem(key=key, text=text)


def _resume_problems(target: RunTarget, probed: ProbeResult) -> Iterator[CheckProblem]:
    """Why `penstock run` would refuse to resume: the folder was started with something else."""
    fix = "use another `name`, or pass --accept-changes to `penstock run`"
    try:
        config = with_prompts(target.config)
    except ConfigError:  # reported by itself
        return
    for change in find_resume_changes(config, target.folder, probed.digests):
        key, _, values = change.partition(": ")
        key = "sources" if key.startswith("source ") else key
        text = f"{values}: changed since {target.folder.path} was started; {fix}"
        yield located(CheckProblem(key=key, text=text), target)


def _is_installed(tracker: str) -> bool:
    module = "opentelemetry.exporter.otlp.proto.http" if tracker == OPENTELEMETRY else tracker
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even a package around it
        return False


_TRACKER_EXTRAS = {"tensorboard": "tracking", "trackio": "tracking", OPENTELEMETRY: "traces"}


def missing_trackers(config: RunConfig) -> Iterator[CheckProblem]:
    """Libraries of built-in trackers; each has the tracker's name."""
    for name in config.report_to:
        if name in builtin_names(TRACKERS_PACKAGE) and not _is_installed(name):
            extra = _TRACKER_EXTRAS.get(name)
            package = f"'penstock-rl[{extra}]'" if extra else name
            text = f"{name} is not installed; run: pip install {package}"
            yield CheckProblem(key="report_to", text=text)


def _missing_engines(config: RunConfig) -> Iterator[CheckProblem]:
    from penstock.rollout.engines.vllm.server import default_environment

    for name, model in config.models.items():
        if model.engine != "vllm" or model.engine_urls or not model.replicas:
            continue
        own = model.vllm.environment
        program = (Path(own).expanduser() if own else default_environment()) / "bin" / "vllm"
        if not os.access(program, os.X_OK):
            yield CheckProblem(
                key=f"models.{name}.engine",
                text=f"is vllm, but {program} does not exist; `penstock doctor` shows how to "
                "install it",
            )


def _missing_extras() -> Iterator[str]:
    missing = {
        extra: [name for name in names if find_spec(name) is None]
        for extra, names in EXTRAS.items()
    }
    extras = [extra for extra, names in missing.items() if names]
    if extras:
        packages = ", ".join(name for names in missing.values() for name in names)
        yield f"not installed: {packages}; run: pip install 'penstock-rl[{','.join(extras)}]'"


def _missing_models(config: RunConfig, folder: RunFolder) -> Iterator[CheckProblem]:
    for where, init in _configured_models(config):
        if init in BUILTIN_MODELS:
            continue
        if is_version(init):
            try:
                find(init, folder)
            except ConfigError as error:
                yield CheckProblem(key=where, text=str(error))
            continue
        if parse_hub_model(init) is not None:
            try:
                check_hub_model(init)
            except ConfigError as error:
                yield CheckProblem(key=where, text=str(error))
            continue
        path = Path(init).expanduser()
        if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
            fix = "name a folder that has both, or a model of the Hub as owner/name"
            if init.startswith("builtin:"):
                fix = f"built-in models: {', '.join(BUILTIN_MODELS)}"
            text = f"no config.json and *.safetensors in {path}; {fix}"
            yield CheckProblem(key=where, text=text)
            continue
        try:
            check_model_files(path)
        except ConfigError as error:
            yield CheckProblem(key=where, text=str(error))


def _configured_models(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(config key, model) of every model that trainers load. Stages outside the trainer load their
    models where they run, and custom stages replace `algorithm.teacher`."""
    stages = config.pipeline.stages if config.pipeline else ()
    for policy, model in config.models.items():
        yield f"models.{policy}.init", model.init
        teacher = config.for_policy(policy).algorithm.teacher
        if teacher is not None and not stages:
            yield f"{f'models.{policy}.' if model.algorithm else ''}algorithm.teacher", teacher
    for index, stage in enumerate(stages):
        if stage.model is not None and not stage.is_service:
            yield f"pipeline.stages[{index}].model", stage.model


def _vocabulary_mismatches(config: RunConfig) -> Iterator[CheckProblem]:
    from penstock.trainer.pipeline.builtin import pipeline_of
    from penstock.trainer.vocabulary_check import vocabulary_mismatches

    for policy, model in config.trained.items():
        for text in vocabulary_mismatches(pipeline_of(config, policy), model.init):
            yield CheckProblem(key="pipeline" if config.pipeline else "algorithm", text=text)


def _prompt_problems(config: RunConfig) -> Iterator[CheckProblem]:
    """Templates that cannot be read or parsed. Whether their placeholders get values is found by
    running the workflow."""
    from penstock.rollout.prompt_templates import parse_prompt

    for name, prompt in config.prompts.items():
        try:
            parse_prompt(name, read_prompt(name, prompt))
        except ConfigError as error:
            yield CheckProblem(key=f"prompts.{name}", text=str(error))


def _missing_program(config: RunConfig) -> Iterator[CheckProblem]:
    own = {f"sources[{i}].workflow": source.workflow for i, source in enumerate(config.sources)}
    for key, workflow in {"workflow": config.workflow, **own}.items():
        if isinstance(workflow, CommandWorkflow) and shutil.which(workflow.command[0]) is None:
            program = workflow.command[0]
            text = f"program {program!r} not found; install it or use its full path"
            yield CheckProblem(key=f"{key}.command", text=text)
