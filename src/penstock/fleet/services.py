# SPDX-License-Identifier: Apache-2.0
"""The processes of a run, as commands with their environment.

Owns the list and its names. A launcher starts them. Tokens and passwords go into the environment,
never into a command line, which every user of the machine can read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from penstock.config import PipelineStageConfig, RunConfig
from penstock.config.store_password import PASSWORD_ENV, password_in
from penstock.fleet.run_folder import RunFolder
from penstock.wire.auth import Role

TOKEN_ENV = "PENSTOCK_TOKEN"
TOKEN_TTL_S = 7 * 24 * 3600.0
"""A service whose token expires is rejected, exits, and is restarted with a new one."""
THREAD_COUNT_ENVS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "RAYON_NUM_THREADS",
)


class ServiceKind(StrEnum):
    SERVER = "server"
    """Runs until it is stopped; stopped last, in reverse order."""
    NODE = "node"
    """Drains on SIGTERM; exits with 0 when the run ends."""
    TRAINER = "trainer"
    """Exits with 0 when its policy is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """One process to keep running."""

    name: str
    kind: ServiceKind
    command: tuple[str, ...]
    build_env: Callable[[], Mapping[str, str]]
    """Called at each start, so that a restarted service gets a fresh token."""


def local_services(config: RunConfig, folder: RunFolder) -> tuple[ServiceSpec, ...]:
    """Every service of a run on this machine: dataflow and its partitions, weight server, a worker
    for each pipeline stage outside the trainer, and per policy one trainer and `replicas` nodes."""
    run_dir_args = ("--run-dir", str(folder.path))
    services = [
        ServiceSpec(
            name="dataflow",
            kind=ServiceKind.SERVER,
            command=_command("dataflow", *run_dir_args),
            build_env=lambda: {**_env(1), **_store_env(config)},
        ),
        *(_partition(config, folder, index) for index in range(1, config.dataflow.partitions)),
        ServiceSpec(
            name="weights",
            kind=ServiceKind.SERVER,
            command=_command("weights", "serve", *run_dir_args),
            build_env=lambda: _env(1),
        ),
        *(_stage(config, folder, stage.id) for stage in _service_stages(config)),
    ]
    for policy, model in config.models.items():
        services.append(
            ServiceSpec(
                name=f"trainer-{policy}",
                kind=ServiceKind.TRAINER,
                command=_command("trainer", *run_dir_args, "--policy", policy),
                build_env=_token_env(config, folder, Role.TRAINER, policy),
            )
        )
        prefix = "node" if len(config.models) == 1 else f"{policy}-node"
        for replica in range(model.replicas):
            name = f"{prefix}-{replica}"
            services.append(
                ServiceSpec(
                    name=name,
                    kind=ServiceKind.NODE,
                    command=_command("rollout", *run_dir_args, "--name", name, "--policy", policy),
                    build_env=_token_env(config, folder, Role.ROLLOUT, policy),
                )
            )
    return tuple(services)


def _partition(config: RunConfig, folder: RunFolder, index: int) -> ServiceSpec:
    args = ("dataflow", "--run-dir", str(folder.path), "--partition", str(index))

    def build_env() -> Mapping[str, str]:
        token = folder.token(config.name, Role.PARTITION, ttl_s=TOKEN_TTL_S)
        return {**_env(1), **_store_env(config), TOKEN_ENV: token}

    return ServiceSpec(
        name=f"partition-{index}",
        kind=ServiceKind.SERVER,
        command=_command(*args),
        build_env=build_env,
    )


def _service_stages(config: RunConfig) -> list[PipelineStageConfig]:
    return [stage for _, stage in config.pipeline.services] if config.pipeline else []


def _stage(config: RunConfig, folder: RunFolder, stage: str) -> ServiceSpec:
    def build_env() -> Mapping[str, str]:
        token = folder.token(config.name, Role.STAGE, ttl_s=TOKEN_TTL_S, subject=stage)
        return {**_env(1), TOKEN_ENV: token}

    return ServiceSpec(
        name=f"stage-{stage}",
        kind=ServiceKind.SERVER,
        command=_command("stage", str(folder.path), stage),
        build_env=build_env,
    )


def _command(*args: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "penstock.cli.main", *args)


def _token_env(
    config: RunConfig, folder: RunFolder, role: Role, policy: str
) -> Callable[[], Mapping[str, str]]:
    def build_env() -> Mapping[str, str]:
        token = folder.token(config.name, role, ttl_s=TOKEN_TTL_S, subject=policy)
        return {**_env(config.models[policy].torch_threads), TOKEN_ENV: token}

    return build_env


def _store_env(config: RunConfig) -> Mapping[str, str]:
    """The store's password, which the config in the run folder does not contain."""
    password = password_in(config.dataflow.store)
    return {PASSWORD_ENV: password} if password else {}


def _env(num_threads: int) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != TOKEN_ENV}
    return {
        **inherited,
        **dict.fromkeys(THREAD_COUNT_ENVS, str(num_threads)),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
