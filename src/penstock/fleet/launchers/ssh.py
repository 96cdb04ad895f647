# SPDX-License-Identifier: Apache-2.0
"""Starts services on the hosts of the run file by ssh, and as children on this machine.

Owns the connections: one for each service, whose output arrives in the log here. A host that cannot
be reached is lost; its services go to the next host with their tags."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from penstock.config import HostConfig
from penstock.config.hosts import TRAIN
from penstock.errors import LaunchError
from penstock.fleet.inventory import Peaks, Resource, train_priority
from penstock.fleet.launchers.starter import EXIT_HOST_LOST, LocalChild, LocalStarter
from penstock.fleet.services import ServiceSpec, remote_env

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
    ) -> None:
        """here: this machine's name under `hosts`."""
        self._hosts = hosts
        self._here = here
        self._work_dir = work_dir
        self._options = ["-F", config_file] if config_file else []
        self._local = LocalStarter(work_dir)
        self._next: dict[str, int] = {}
        """Of each service, which of its candidates is tried next."""
        self._has_peaks = any(_resource(name, one).peaks for name, one in hosts.items())
        self._num_started: Counter[str] = Counter()
        """Of services that may go elsewhere; with peaks, by what they do."""

    def start(self, service: ServiceSpec, log: Path) -> LocalChild | SshChild:
        fit = candidates(service, self._hosts, self._here)
        if not fit:
            raise LaunchError(
                f"no host has the tags of {service.name}: {', '.join(service.tags)}; add them to "
                "hosts in the run file"
            )
        if service.name not in self._next:
            tag = next(iter(service.tags), "")
            self._next[service.name] = self._num_started[tag if self._has_peaks else ""]
            self._num_started[tag if self._has_peaks else ""] += bool(service.tags)
        host = fit[self._next[service.name] % len(fit)]
        if host == self._here:
            return self._local.start(service, log)
        return SshChild(self._connect(service, host, log), lambda: self._move(service.name))

    def check(self) -> None:
        """Each connection notices by itself that it is lost."""

    def close(self) -> None:
        self._local.close()

    def _move(self, service: str) -> None:
        self._next[service] += 1

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
