# SPDX-License-Identifier: Apache-2.0
"""What would make a run fail for sure, found without importing torch or the user's code.

Owns the list of such facts about this machine: packages, programs, model files, a folder to write
into, disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from penstock.config import CommandWorkflow, RunConfig
from penstock.config.models import BUILTIN_MODELS
from penstock.fleet.run_folder import free_bytes
from penstock.runs.target import RunTarget

MIN_FREE_BYTES = 1 << 30
EXTRAS = {
    "train": ("torch", "transformers", "safetensors"),
    "tokens": ("tokenizers", "jinja2"),
}
"""Which packages each extra of penstock brings; every run that trains needs both."""


def problems(target: RunTarget) -> Iterator[str]:
    yield from _missing_extras()
    yield from _missing_models(target.config)
    yield from _vocabulary_mismatches(target.config)
    yield from _missing_program(target.config)
    yield from _missing_engines(target.config)
    yield from _disk_problems(target.folder.path)


def _missing_engines(config: RunConfig) -> Iterator[str]:
    from penstock.rollout.engines.vllm.server import default_environment

    for name, model in config.models.items():
        if model.engine != "vllm" or model.vllm.url or not model.replicas:
            continue
        own = model.vllm.environment
        program = (Path(own).expanduser() if own else default_environment()) / "bin" / "vllm"
        if not os.access(program, os.X_OK):
            yield (
                f"policy {name} has engine: vllm, and there is no {program}; `penstock doctor` "
                "tells how to get it"
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
            fix = f"`hf download {init} --local-dir DIR` makes such a folder"
            if init.startswith("builtin:"):
                fix = f"built in is {', '.join(BUILTIN_MODELS)}"
            yield f"{where}: no model with config.json and *.safetensors in {path}; {fix}"


def _configured_models(config: RunConfig) -> Iterator[tuple[str, str]]:
    """(which key, the model it names) of all that trainers load. Stages placed elsewhere have their
    models where they run, and beside own stages `algorithm.teacher` is not asked."""
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
    if not isinstance(config.workflow, CommandWorkflow):
        return
    program = config.workflow.command[0]
    if shutil.which(program) is None:
        yield f"workflow.command: no program {program!r} on this machine; give its full path"


def _disk_problems(folder: Path) -> Iterator[str]:
    nearest = folder
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        yield f"output_dir: cannot write into {nearest}; set output_dir to a folder of yours"
        return
    free = free_bytes(nearest)
    if free < MIN_FREE_BYTES:
        yield f"only {free / 1e9:.1f} GB free at {nearest}; a run needs at least 1 GB"
