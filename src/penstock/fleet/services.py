# SPDX-License-Identifier: Apache-2.0
"""The processes of a run, as commands with their environment.

Owns the list and its names. A launcher starts them. A token is in a file that only the run's owner
can read: every user of the machine can read a command line, and a service's children can read its
environment.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from penstock.config import RunConfig
from penstock.config.device_layout import LaunchedNode, launched_nodes
from penstock.config.hosts import names_of
from penstock.config.stages import stage_subject
from penstock.config.store_password import PASSWORD_ENV, password_in
from penstock.config.trust import SCORE_STAGE
from penstock.devices import VISIBLE_ENV
from penstock.fleet.device_plan import this_host
from penstock.fleet.inventory import ROLLOUT, TRAIN
from penstock.fleet.run_folder import RunFolder
from penstock.fleet.service_tokens import TOKEN_FILE_ENV, write_token
from penstock.wire.auth import Role

THREAD_COUNT_ENVS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "RAYON_NUM_THREADS",
)
CLI = (sys.executable, "-m", "penstock.cli.main")
_NOT_INHERITED = (TOKEN_FILE_ENV, "PENSTOCK_TOKEN", PASSWORD_ENV)
"""The user's own tokens, which no service needs; and the ledger's password, which only those get
that open it: nodes and trainers run code of others."""
_SENT_ALONG = (
    *THREAD_COUNT_ENVS,
    *("TOKENIZERS_PARALLELISM", "PYTHONUNBUFFERED", "PYTHONPATH", "SSL_CERT_FILE"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE"),
    *(TOKEN_FILE_ENV, PASSWORD_ENV, VISIBLE_ENV),
)
"""What a service on another host gets from here, besides the environment of that host."""


_SERVICE_MODULES = (
    "uvloop",
    "penstock.cli.output",
    "penstock.cli.service_options",
    "penstock.observe.logs",
    "penstock.observe.stacks",
    "penstock.runs.service_process",
)
_MODEL_MODULES = ("transformers.generation.utils", "transformers.modeling_layers")
"""What every model of transformers imports."""
_DATAFLOW_MODULES = (
    *_SERVICE_MODULES,
    "penstock.cli.dataflow",
    "penstock.dataflow.service.server",
    "penstock.runs.evaluations",
)
_WEIGHTS_MODULES = (
    *_SERVICE_MODULES,
    "penstock.cli.weights",
    "penstock.weights.serving.origin",
    "penstock.weights.serving.server",
)
_NODE_MODULES = (
    *_SERVICE_MODULES,
    "penstock.cli.rollout",
    "penstock.rollout.node",
    "penstock.runs.join",
)
_HF_MODULES = (
    "penstock.rollout.decoding.hf_decoder",
    "penstock.rollout.engines.hf",
    *_MODEL_MODULES,
)
_TRAINER_MODULES = (
    *_SERVICE_MODULES,
    "penstock.cli.trainer",
    "penstock.trainer.service",
    *_MODEL_MODULES,
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
    renew_token: Callable[[], None] = lambda: None
    """Called at intervals while it runs."""
    preload: tuple[str, ...] = ()
    """Modules that it imports, of our own and of libraries; a fork server imports them before."""
    tags: tuple[str, ...] = ()
    """Where it may run, on a cluster: on hosts with these tags; empty: beside the launcher, with
    the ledger and the weights."""
    host: str | None = None
    """The one host that it may run on."""
    all_hosts: tuple[str, ...] = ()
    """Of a trainer on several hosts, of which this is the part on `host`."""
    threads: int = 1


def local_services(
    config: RunConfig, folder: RunFolder, devices: Mapping[str, str] | None = None
) -> tuple[ServiceSpec, ...]:
    """Every service of a run on this machine: dataflow and its partitions, weight server, the
    exporter to trackers, a worker for each pipeline stage outside the trainer, and per policy one
    trainer and `replicas` nodes. A frozen policy has, in place of a trainer, a process that
    publishes it and exits.

    `devices`: CUDA_VISIBLE_DEVICES by service; with any, services that are not listed see none."""
    server, node, trainer = ServiceKind.SERVER, ServiceKind.NODE, ServiceKind.TRAINER
    run_dir = ("--run-dir", str(folder.path))

    def service(
        name: str,
        kind: ServiceKind,
        *args: str,
        role: Role | None = None,
        threads: int = 1,
        with_store: bool = False,
        preload: tuple[str, ...] = (),
        tags: tuple[str, ...] = (),
        host: str | None = None,
    ) -> ServiceSpec:
        token_file = folder.service_tokens / name

        def renew_token() -> None:
            if role is not None:
                write_token(folder, token_file, config.name, role, subject=name.partition("@")[0])

        def build_env() -> Mapping[str, str]:
            renew_token()
            found = {**_env(threads), **(_store_env(config) if with_store else {})}
            if devices:
                found[VISIBLE_ENV] = devices.get(name, "")
            return found if role is None else {**found, TOKEN_FILE_ENV: str(token_file)}

        return ServiceSpec(
            name=name,
            kind=kind,
            command=(*CLI, *args),
            build_env=build_env,
            renew_token=renew_token,
            preload=preload,
            tags=tags,
            host=host,
            threads=threads,
        )

    dataflow = partial(service, with_store=True, preload=_DATAFLOW_MODULES)
    services = [dataflow("dataflow", server, "dataflow", *run_dir)]
    for index in range(1, config.dataflow.partitions):
        name, args = f"partition-{index}", ("dataflow", *run_dir, "--partition", str(index))
        services.append(dataflow(name, server, *args, role=Role.PARTITION))
    serve = ("weights", "serve", *run_dir)
    services.append(service("weights", server, *serve, preload=_WEIGHTS_MODULES))
    if config.report_to:
        names = (option for name in config.report_to for option in ("--to", name))
        args = ("track", str(folder.path), "--follow", *names)
        services.append(service("trackers", server, *args))
    for _, stage in config.pipeline.services if config.pipeline else ():
        args = ("stage", str(folder.path), stage.id)
        name, wanted = stage_subject(stage.id), stage.place or ()
        services.append(service(name, server, *args, role=Role.STAGE, tags=wanted))
    if config.has_score_stage:
        threads = next(iter(config.models.values())).torch_threads
        args, name = ("stage", str(folder.path), SCORE_STAGE), stage_subject(SCORE_STAGE)
        services.append(service(name, server, *args, role=Role.STAGE, threads=threads))
    nodes = tuple(launched_nodes(config))
    scaling = config.autoscale
    tags = scaling.node_types[scaling.launched_type].tags if scaling.launched_type else ()
    tags = (*tags, *_shared_tags(config))

    def node_service(one: LaunchedNode) -> ServiceSpec:
        args = ("rollout", *run_dir, "--name", one.name, "--policy", one.policy)
        args += ("--evaluates-only",) if one.evaluates_only else ()
        args += ("--tags", ",".join(tags)) if tags and not one.evaluates_only else ()
        model = config.models[one.policy]
        return service(
            one.name,
            node,
            *args,
            role=Role.ROLLOUT,
            threads=model.torch_threads,
            preload=(*_NODE_MODULES, *(_HF_MODULES if model.engine == "hf" else ())),
            tags=(ROLLOUT, *(model.place or ())),
        )

    def trainers(policy: str, name: str, threads: int) -> Iterator[ServiceSpec]:
        args = ("trainer", *run_dir, "--policy", policy)
        make = partial(service, role=Role.TRAINER, threads=threads, preload=_TRAINER_MODULES)
        training = config.for_policy(policy).training
        make = partial(make, tags=(TRAIN, *(training.place or ())))
        hosts = names_of(training.hosts or ())
        if config.models[policy].frozen or len(hosts) < 2:
            yield make(name, trainer, *args, host=hosts[0] if hosts else None)
            return
        for host in hosts:
            part = make(f"{name}@{host}", trainer, *args, "--host", host, host=host)
            yield replace(part, all_hosts=hosts)

    for policy, model in config.models.items():
        name = f"publisher-{policy}" if model.frozen else f"trainer-{policy}"
        if model.frozen or not config.for_policy(policy).training.external:
            services += trainers(policy, name, model.torch_threads)
        own = (one for one in nodes if one.policy == policy and not one.evaluates_only)
        services += map(node_service, own)
    services += (node_service(one) for one in nodes if one.evaluates_only)
    return tuple(services)


def with_train_tag(node: ServiceSpec) -> ServiceSpec:
    """The same node with the tag `train`: it takes turns with a trainer on its host. One that only
    evaluates never pauses."""
    before, option, after = node.command, "--tags", ()
    if node.kind is not ServiceKind.NODE or "--evaluates-only" in node.command:
        return node
    tags: tuple[str, ...] = ()
    if option in node.command:
        at = node.command.index(option)
        before, after = node.command[:at], node.command[at + 2 :]
        tags = tuple(node.command[at + 1].split(","))
    together = ",".join(dict.fromkeys((*tags, TRAIN)))
    return replace(node, command=(*before, option, together, *after))


def _shared_tags(config: RunConfig) -> tuple[str, ...]:
    """`train` for the nodes of a machine that is there for both; by ssh, `with_train_tag`."""
    if config.launcher == "ssh":
        return ()
    host = this_host(config.all_hosts)
    own = config.all_hosts[host].tags if host is not None else ()
    return (TRAIN,) if {ROLLOUT, TRAIN} <= {*own} else ()


def _store_env(config: RunConfig) -> Mapping[str, str]:
    """The store's password, which the config in the run folder does not contain."""
    password = password_in(config.dataflow.store) or os.environ.get(PASSWORD_ENV, "")
    return {PASSWORD_ENV: password} if password else {}


def inherited_env() -> dict[str, str]:
    """The launcher's environment as far as its children get it. A command that starts a node may
    pass all of it on to another machine."""
    return {name: os.environ[name] for name in os.environ if name not in _NOT_INHERITED}


def _env(num_threads: int) -> dict[str, str]:
    return {
        **inherited_env(),
        **dict.fromkeys(THREAD_COUNT_ENVS, str(num_threads)),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }


def remote_env(env: Mapping[str, str]) -> dict[str, str]:
    """The part of a service's environment that goes to another host; secrets of the user stay."""
    return {name: env[name] for name in _SENT_ALONG if name in env}
