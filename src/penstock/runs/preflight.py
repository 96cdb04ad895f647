# SPDX-License-Identifier: Apache-2.0
"""Checks whether a run can start here, and derives its sizes.

Owns the checks of this machine: packages, programs, model files, a writable folder, disk space.
They import neither torch nor the user's code; a probe process runs that.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from penstock.config import CommandWorkflow, RunConfig
from penstock.config.models import BUILTIN_MODELS
from penstock.errors import ConfigError
from penstock.fleet.run_folder import free_bytes
from penstock.runs.data_check import data_problems
from penstock.runs.probe import run_probe, user_stages, user_workflow
from penstock.runs.target import RunTarget

MIN_FREE_BYTES = 1 << 30
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
    for name in config.models:
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


def ensure_startable(target: RunTarget) -> dict[str, str]:
    """Raise ConfigError with every problem found; otherwise return the task digest of each source
    that was probed. A run of built-in code only is not probed."""
    config = target.config
    named = [*map(user_workflow, (config.workflow, *(s.workflow for s in config.sources)))]
    named += [config.reward or "", *(source.reward or "" for source in config.sources)]
    named += [source.task or "data" for source in config.sources if source.session is None]
    named += [str(stage["fn"]) for stage in user_stages(config) if stage["fn"]]
    has_user_code = any(name and not name.startswith("penstock.") for name in named)
    found = [*find_problems(target)]  # first: it downloads data sets, without a deadline
    probed = run_probe(target) if has_user_code else None
    found += probed.problems if probed else ()
    if found:
        listed = "\n".join(f"  - {text}" for text in found)
        raise ConfigError(f"run {config.name} cannot start:\n{listed}")
    return probed.digests if probed else {}


def find_problems(target: RunTarget) -> Iterator[str]:
    """What would make this run fail on this machine, one message per problem."""
    yield from _missing_extras()
    yield from _missing_models(target.config)
    yield from _vocabulary_mismatches(target.config)
    yield from _missing_program(target.config)
    yield from _missing_engines(target.config)
    yield from _disk_problems(target.folder.path)
    for key, text in data_problems(target.config, target.folder.sources()):
        yield f"{key}: {text}"


def _missing_engines(config: RunConfig) -> Iterator[str]:
    from penstock.rollout.engines.vllm.server import default_environment

    for name, model in config.models.items():
        if model.engine != "vllm" or model.vllm.url or not model.replicas:
            continue
        own = model.vllm.environment
        program = (Path(own).expanduser() if own else default_environment()) / "bin" / "vllm"
        if not os.access(program, os.X_OK):
            yield (
                f"models.{name}.engine is vllm, but {program} does not exist; `penstock doctor` "
                "shows how to install it"
            )


def _missing_extras() -> Iterator[str]:
    missing = {
        extra: [name for name in names if find_spec(name) is None]
        for extra, names in EXTRAS.items()
    }
    extras = [extra for extra, names in missing.items() if names]
    if extras:
        packages = ", ".join(name for names in missing.values() for name in names)
        yield f"not installed: {packages}; run: pip install 'penstock[{','.join(extras)}]'"


def _missing_models(config: RunConfig) -> Iterator[str]:
    for where, init in _configured_models(config):
        if init in BUILTIN_MODELS:
            continue
        path = Path(init).expanduser()
        if not (path / "config.json").is_file() or not any(path.glob("*.safetensors")):
            fix = f"download it with `hf download {init} --local-dir DIR` and set {where} to DIR"
            if init.startswith("builtin:"):
                fix = f"built-in models: {', '.join(BUILTIN_MODELS)}"
            yield f"{where}: no config.json and *.safetensors in {path}; {fix}"


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
            yield f"pipeline.stages[{index}].model (stage {stage.id})", stage.model


def _vocabulary_mismatches(config: RunConfig) -> Iterator[str]:
    from penstock.trainer.pipeline.builtin import pipeline_of
    from penstock.trainer.vocabulary_check import vocabulary_mismatches

    for policy, model in config.models.items():
        yield from vocabulary_mismatches(pipeline_of(config, policy), model.init)


def _missing_program(config: RunConfig) -> Iterator[str]:
    for workflow in (config.workflow, *(source.workflow for source in config.sources)):
        if isinstance(workflow, CommandWorkflow) and shutil.which(workflow.command[0]) is None:
            program = workflow.command[0]
            yield f"workflow.command: program {program!r} not found; install it or use a full path"


def _disk_problems(folder: Path) -> Iterator[str]:
    nearest = folder
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        yield f"output_dir: cannot write to {nearest}; set output_dir to a writable folder"
        return
    free = free_bytes(nearest)
    if free < MIN_FREE_BYTES:
        yield f"output_dir: only {free / 1e9:.1f} GB free in {nearest}; a run needs at least 1 GB"
