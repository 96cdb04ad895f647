# SPDX-License-Identifier: Apache-2.0
"""Starts services on the hosts of the run file by ssh, and as children on this machine.

Owns the connections: one for each service, whose output arrives in the log here. A host that cannot
be reached is lost; its services go to other hosts with their tags. The planner chooses the host of
a trainer; nodes that roll out there are started again, to take turns with it."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from penstock.config import HostConfig
from penstock.config.hosts import TRAIN
from penstock.errors import LaunchError
from penstock.fleet.inventory import ROLLOUT, Peaks, Resource, train_priority
from penstock.fleet.launchers.starter import EXIT_HOST_LOST, Child, LocalChild, LocalStarter
from penstock.fleet.services import ServiceKind, ServiceSpec, remote_env, with_train_tag
from penstock.fleet.tag_plan import ServiceNeed, plan_tags

OPTIONS = (
    "BatchMode=yes",
    "ConnectTimeout=15",
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    *("ForwardAgent=no", "ForwardX11=no"),
)
"""Whatever `~/.ssh/config` says: services run code of others, which may use no key and no
screen of this machine."""
SSH_FAILED = 255
"""The exit code of the client when the connection fails; no service uses it."""
LOST_S = 60.0
"""A host whose connection failed gets nothing for this long, if there is another."""


def candidates(service: ServiceSpec, hosts: Mapping[str, HostConfig], here: str) -> tuple[str, ...]:
    """The hosts that a service may run on: for a trainer the best trainer first, for others last.
    A tag that no host has constrains nothing."""
    if not service.tags:
        return (here,)
    if service.host is not None:
        return (service.host,)
    known = {tag for host in hosts.values() for tag in host.tags}
    wanted = {tag for tag in service.tags if tag in known}
    fit = [name for name, host in hosts.items() if wanted <= set(host.tags)]
    sign = -1.0 if TRAIN in service.tags else 1.0
    return tuple(sorted(fit, key=lambda name: sign * train_priority(_resource(name, hosts[name]))))


def _resource(name: str, host: HostConfig) -> Resource:
    """With the peaks that the run file gives."""
    peaks = None
    if host.tflops is not None and host.memory_gb_per_s is not None:
        peaks = Peaks(flops_per_s=1e12 * host.tflops, bytes_per_s=1e9 * host.memory_gb_per_s)
    return Resource(name=name, tags=frozenset(host.tags), peaks=peaks)


class SshStarter:
    def __init__(
        self,
        hosts: Mapping[str, HostConfig],
        here: str,
        *,
        work_dir: Path,
        config_file: str | None,
        notify: Callable[[str], None],
    ) -> None:
        """here: this machine's name under `hosts`."""
        self._hosts = hosts
        self._here = here
        self._work_dir = work_dir
        self._notify = notify
        self._options = ["-F", config_file] if config_file else []
        self._local = LocalStarter(work_dir)
        self._turn: dict[str, int] = {}
        """Of each node or stage, its turn among the hosts that it may run on."""
        self._has_peaks = any(_resource(name, one).peaks for name, one in hosts.items())
        self._num_started: Counter[str] = Counter()
        """Of services that may go elsewhere; with peaks, by what they do."""
        self._placed: dict[str, tuple[str, Child, ServiceSpec]] = {}
        """Of each service that was started, its last host and its process."""
        self._lost_at: dict[str, float] = {}

    def start(self, service: ServiceSpec, log: Path) -> LocalChild | SshChild:
        host = self._choose(service)
        trains = TRAIN in service.tags
        if not trains and host in self._trainer_hosts().values():
            service = with_train_tag(service)
        child = self._start_on(host, service, log)
        if trains:
            self._preempt(host)
        self._placed[service.name] = (host, child, service)
        return child

    def check(self) -> None:
        """Each connection notices by itself that it is lost."""

    def close(self) -> None:
        self._local.close()

    # --- placement --------------------------------------------------------------------------------

    def _choose(self, service: ServiceSpec) -> str:
        fit = candidates(service, self._hosts, self._here)
        if not fit:
            raise LaunchError(
                f"no host has the tags of {service.name}: {', '.join(service.tags)}; add them to "
                "hosts in the run file"
            )
        if service.host is not None or not service.tags:
            return fit[0]
        alive = [host for host in fit if not self._is_lost(host)] or fit
        if TRAIN in service.tags:
            return self._plan(service, alive)
        if service.name not in self._turn:
            tag = service.tags[0] if self._has_peaks else ""
            self._turn[service.name] = self._num_started[tag]
            self._num_started[tag] += 1
        return alive[self._turn[service.name] % len(alive)]

    def _plan(self, service: ServiceSpec, alive: Sequence[str]) -> str:
        """The host of a trainer: its own, or in place of one that is lost the best trainer that is
        idle or only rolls out. More trainers than hosts share the best."""
        trainers = {host: name for name, host in self._trainer_hosts().items()}
        rolling = {host for host, _, one in self._placed.values() if ROLLOUT in one.tags}
        resources = [
            replace(
                _resource(name, one),
                tags=frozenset({*one.tags, TRAIN} if name in alive else {*one.tags} - {TRAIN}),
                service=trainers.get(name, ROLLOUT if name in rolling else None),
                is_alive=not self._is_lost(name),
            )
            for name, one in self._hosts.items()
            if trainers.get(name, service.name) == service.name
        ]
        needs = [ServiceNeed(service=service.name, tag=TRAIN, count=1)]
        plan = plan_tags(resources, [*needs, ServiceNeed(service=ROLLOUT, tag=ROLLOUT)])
        for change in plan.changes:
            if change.after == service.name:
                self._notify(f"{service.name} goes to {change.resource}: {change.cause}")
        return next(iter(plan.of(service.name)), alive[0])

    def _trainer_hosts(self) -> dict[str, str]:
        """By trainer."""
        return {name: host for name, (host, _, one) in self._placed.items() if TRAIN in one.tags}

    def _preempt(self, host: str) -> None:
        """Nodes of a host that trains now hand back their work and start again: elsewhere, or here
        with the tag `train`."""
        for at, child, service in self._placed.values():
            is_shared = service == with_train_tag(service)
            if at == host and service.kind is ServiceKind.NODE and not is_shared:
                child.terminate()

    def _is_lost(self, host: str) -> bool:
        return time.monotonic() - self._lost_at.get(host, float("-inf")) < LOST_S

    # --- processes --------------------------------------------------------------------------------

    def _start_on(self, host: str, service: ServiceSpec, log: Path) -> LocalChild | SshChild:
        if host == self._here:
            return self._local.start(service, log)

        def lost() -> None:
            self._lost_at[host] = time.monotonic()

        return SshChild(self._connect(service, host, log), lost)

    def _connect(self, service: ServiceSpec, host: str, log: Path) -> subprocess.Popen[bytes]:
        """The same Python, run folder and working directory as here."""
        env = remote_env(service.build_env())
        order = {"command": service.command, "env": env, "work_dir": str(self._work_dir)}
        path = [f"PYTHONPATH={env['PYTHONPATH']}"] if "PYTHONPATH" in env else []
        keeper = ["env", *path, service.command[0], "-m", "penstock.fleet.launchers.ssh_keeper"]
        options = [word for option in OPTIONS for word in ("-o", option)]
        address = self._hosts[host].address or host
        command = ["ssh", *self._options, *options, address, shlex.join(keeper)]
        try:
            with log.open("ab") as out:
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
        except OSError as error:
            raise LaunchError(f"cannot start {service.name} with ssh: {error}") from error
        _write(child, json.dumps(order))
        return child


class SshChild:
    """A service on another host, and the connection that it lives and dies with."""

    def __init__(
        self, connection: subprocess.Popen[bytes], on_host_lost: Callable[[], None]
    ) -> None:
        self._connection = connection
        self._on_host_lost = on_host_lost
        self._code: int | None = None

    @property
    def pid(self) -> None:
        return None

    def exit_code(self) -> int | None:
        if self._code is None and (code := self._connection.poll()) is not None:
            self._code = EXIT_HOST_LOST if code in (SSH_FAILED, -signal.SIGKILL) else code
            assert self._connection.stdin is not None
            self._connection.stdin.close()
            if self._code == EXIT_HOST_LOST:
                self._on_host_lost()
        return self._code

    def terminate(self) -> None:
        _write(self._connection, "TERM")

    def kill(self) -> None:
        """The end of the connection would do, too, but here is known when nothing is left."""
        _write(self._connection, "KILL")


def _write(connection: subprocess.Popen[bytes], line: str) -> None:
    assert connection.stdin is not None
    with suppress(BrokenPipeError, ValueError):  # it is lost, and `exit_code` says so
        connection.stdin.write(f"{line}\n".encode())
        connection.stdin.flush()
