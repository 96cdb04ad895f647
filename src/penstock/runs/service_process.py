# SPDX-License-Identifier: Apache-2.0
"""How a service process of a run starts: die with the launcher, log in one format, import the
user's modules, find its policy, stage and token."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from penstock.config import RunConfig, StageConfig
from penstock.config.pipeline import PipelineStageConfig
from penstock.errors import ConfigError
from penstock.fleet.processes import exit_with_parent
from penstock.fleet.run_folder import Endpoints, RunFolder
from penstock.fleet.service_tokens import TOKEN_FILE_ENV, TOKEN_TTL_S
from penstock.plugins import did_you_mean
from penstock.wire.auth import Role
from penstock.wire.held_token import HeldToken


def enter_run(run_dir: Path, service: str) -> tuple[RunFolder, RunConfig, Endpoints]:
    """Make this process a service of the run: its logs, its modules, its working directory."""
    exit_with_parent()
    os.umask(0o077)  # the ledger, logs and keys are for the owner of the run alone
    from penstock.observe import logs
    from penstock.observe.stacks import write_stacks_on_signal

    logs.configure(service)
    write_stacks_on_signal()
    folder = RunFolder.open_existing(run_dir)
    endpoints = folder.trusted_endpoints()
    add_import_paths(endpoints.python_path)
    if named := os.environ.get(TOKEN_FILE_ENV):
        os.environ[TOKEN_FILE_ENV] = os.path.abspath(named)
    if Path(endpoints.work_dir).is_dir():
        os.chdir(endpoints.work_dir)
    return folder, folder.read_config(), endpoints


def add_import_paths(folders: tuple[str, ...]) -> None:
    """Make the user's modules importable here and in every child process."""
    for folder in reversed(folders):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    inherited = os.environ.get("PYTHONPATH", "")
    paths = [*folders, *(inherited.split(os.pathsep) if inherited else ())]
    if paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))


def pop_token_file() -> Path | None:
    """The file that PENSTOCK_TOKEN_FILE names; no child inherits the variable."""
    named = os.environ.pop(TOKEN_FILE_ENV, "")
    return Path(named) if named else None


def service_token(folder: RunFolder, run: str, role: Role, *, subject: str) -> HeldToken:
    """The launcher's token, or new ones where the signing key is readable."""
    if (path := pop_token_file()) is not None:
        return HeldToken.from_file(path)
    return HeldToken(lambda: folder.token(run, role, ttl_s=TOKEN_TTL_S, subject=subject))


def relay_token(folder: RunFolder, run: str, role: Role, *, subject: str) -> HeldToken:
    """Tokens for relays, of a service beside the run folder."""
    return HeldToken(lambda: folder.relay_token(run, role, ttl_s=TOKEN_TTL_S, subject=subject))


def resolve_policy(config: RunConfig, policy: str | None) -> str:
    """The named policy, or the only one."""
    if policy is None:
        if len(config.models) > 1:
            raise ConfigError(
                f"run {config.name} has several policies ({', '.join(config.models)}); specify one "
                "(--policy)"
            )
        return next(iter(config.models))
    return config.for_policy(policy).name


def find_service_stage(config: RunConfig, id: str) -> tuple[PipelineStageConfig, StageConfig]:
    """A pipeline stage that runs outside the trainer, and its terms in the ledger."""
    services = {stage.id: stage for _, stage in config.pipeline.services} if config.pipeline else {}
    if id not in services:
        near = did_you_mean(id, tuple(services))
        known = ", ".join(services) or "none (set `place` on a stage in the config)"
        fix = f'did you mean "{near}"?' if near else f"available: {known}"
        raise ConfigError(f"stage {id!r} does not run outside the trainer; {fix}")
    terms = next(stage for stage in config.dataflow.stages if stage.name == id)
    return services[id], terms
