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

from penstock.config import RunConfig
from penstock.config.store_password import PASSWORD_ENV, password_in
from penstock.config.trust import SCORE_STAGE
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
    server, node, trainer = ServiceKind.SERVER, ServiceKind.NODE, ServiceKind.TRAINER
    run_dir = ("--run-dir", str(folder.path))

    def env(
        role: Role | None = None, subject: str = "", *, threads: int = 1, with_store: bool = False
    ) -> Callable[[], Mapping[str, str]]:
        def build_env() -> Mapping[str, str]:
            found = {**_env(threads), **(_store_env(config) if with_store else {})}
            if role is not None:
                token = folder.token(config.name, role, ttl_s=TOKEN_TTL_S, subject=subject)
                found[TOKEN_ENV] = token
            return found

        return build_env

    services = [_service("dataflow", server, env(with_store=True), "dataflow", *run_dir)]
    for index in range(1, config.dataflow.partitions):
        args = ("dataflow", *run_dir, "--partition", str(index))
        build_env = env(Role.PARTITION, with_store=True)
        services.append(_service(f"partition-{index}", server, build_env, *args))
    services.append(_service("weights", server, env(), "weights", "serve", *run_dir))
    for _, stage in config.pipeline.services if config.pipeline else ():
        args = ("stage", str(folder.path), stage.id)
        services.append(_service(f"stage-{stage.id}", server, env(Role.STAGE, stage.id), *args))
    if config.has_score_stage:
        threads = next(iter(config.models.values())).torch_threads
        build_env = env(Role.STAGE, SCORE_STAGE, threads=threads)
        args = ("stage", str(folder.path), SCORE_STAGE)
        services.append(_service(f"stage-{SCORE_STAGE}", server, build_env, *args))
    for policy, model in config.models.items():
        args = ("trainer", *run_dir, "--policy", policy)
        build_env = env(Role.TRAINER, policy, threads=model.torch_threads)
        services.append(_service(f"trainer-{policy}", trainer, build_env, *args))
        prefix = "node" if len(config.models) == 1 else f"{policy}-node"
        for name in (f"{prefix}-{replica}" for replica in range(model.replicas)):
            build_env = env(Role.ROLLOUT, name, threads=model.torch_threads)
            args = ("rollout", *run_dir, "--name", name, "--policy", policy)
            services.append(_service(name, node, build_env, *args))
    return tuple(services)


def _service(
    name: str, kind: ServiceKind, build_env: Callable[[], Mapping[str, str]], *args: str
) -> ServiceSpec:
    command = (sys.executable, "-m", "penstock.cli.main", *args)
    return ServiceSpec(name=name, kind=kind, command=command, build_env=build_env)


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
