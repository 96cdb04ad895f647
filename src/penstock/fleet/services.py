# SPDX-License-Identifier: Apache-2.0
"""Which processes a run consists of, as commands with their environment.

Owns the list and its names. Starts nothing; a launcher does. A token never stands in a command,
where every user of the machine could read it, only in an environment; nor does a password.
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

TOKEN = "PENSTOCK_TOKEN"
TOKEN_TTL_S = 7 * 24 * 3600.0
"""A service that outlives its token is refused, ends, and is restarted with a new one."""
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


class Kind(StrEnum):
    SERVER = "server"
    """Never ends by itself; stopped last, in reverse order of the plan."""
    NODE = "node"
    """Drains on SIGTERM; exit code 0 after the end of the run."""
    TRAINER = "trainer"
    """Exit code 0: its policy is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One process to keep running."""

    name: str
    kind: Kind
    command: tuple[str, ...]
    make_env: Callable[[], Mapping[str, str]]
    """Called at each start, so that a restarted service gets a fresh token."""


def local_services(config: RunConfig, folder: RunFolder) -> tuple[Service, ...]:
    """Dataflow with its partitions, weights front, a worker of every pipeline stage that is placed
    elsewhere, `replicas` nodes and one trainer per policy, all on this machine."""
    at = ("--run-dir", str(folder.path))
    services = [
        Service(
            name="dataflow",
            kind=Kind.SERVER,
            command=_penstock("dataflow", *at),
            make_env=lambda: {**_env(1), **_store_env(config)},
        ),
        *(_partition(config, folder, index) for index in range(1, config.dataflow.partitions)),
        Service(
            name="weights",
            kind=Kind.SERVER,
            command=_penstock("weights", "serve", *at),
            make_env=lambda: _env(1),
        ),
        *(_stage(config, folder, stage.id) for stage in _placed_stages(config)),
    ]
    for policy, model in config.models.items():
        services.append(
            Service(
                name=f"trainer-{policy}",
                kind=Kind.TRAINER,
                command=_penstock("trainer", *at, "--policy", policy),
                make_env=_with_token(config, folder, Role.TRAINER, policy),
            )
        )
        prefix = "node" if len(config.models) == 1 else f"{policy}-node"
        for replica in range(model.replicas):
            name = f"{prefix}-{replica}"
            services.append(
                Service(
                    name=name,
                    kind=Kind.NODE,
                    command=_penstock("rollout", *at, "--name", name, "--policy", policy),
                    make_env=_with_token(config, folder, Role.ROLLOUT, policy),
                )
            )
    return tuple(services)


def _partition(config: RunConfig, folder: RunFolder, index: int) -> Service:
    words = ("dataflow", "--run-dir", str(folder.path), "--partition", str(index))

    def make_env() -> Mapping[str, str]:
        token = folder.token(config.name, Role.PARTITION, ttl_s=TOKEN_TTL_S)
        return {**_env(1), **_store_env(config), TOKEN: token}

    return Service(
        name=f"partition-{index}", kind=Kind.SERVER, command=_penstock(*words), make_env=make_env
    )


def _placed_stages(config: RunConfig) -> list[PipelineStageConfig]:
    return [stage for _, stage in config.pipeline.services] if config.pipeline else []


def _stage(config: RunConfig, folder: RunFolder, stage: str) -> Service:
    def make_env() -> Mapping[str, str]:
        token = folder.token(config.name, Role.STAGE, ttl_s=TOKEN_TTL_S, subject=stage)
        return {**_env(1), TOKEN: token}

    return Service(
        name=f"stage-{stage}",
        kind=Kind.SERVER,
        command=_penstock("stage", str(folder.path), stage),
        make_env=make_env,
    )


def _penstock(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "penstock.cli.main", *words)


def _with_token(
    config: RunConfig, folder: RunFolder, role: Role, policy: str
) -> Callable[[], Mapping[str, str]]:
    def make_env() -> Mapping[str, str]:
        token = folder.token(config.name, role, ttl_s=TOKEN_TTL_S, subject=policy)
        return {**_env(config.models[policy].torch_threads), TOKEN: token}

    return make_env


def _store_env(config: RunConfig) -> Mapping[str, str]:
    """The password of the store, which the config in the run's folder does not have."""
    password = password_in(config.dataflow.store)
    return {PASSWORD_ENV: password} if password else {}


def _env(num_threads: int) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != TOKEN}
    return {
        **inherited,
        **dict.fromkeys(THREADS, str(num_threads)),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
