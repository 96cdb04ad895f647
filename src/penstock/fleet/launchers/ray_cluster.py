# SPDX-License-Identifier: Apache-2.0
"""Starts services on a Ray cluster: one actor each, placed by tags and resources.

Ray places and notices lost hosts; the supervisor restarts. No state of the run is in an actor or in
Ray's object store, and Ray may leave a second copy of a service alive on a host that it believes
lost: the dataflow service fences it by its epoch.

Owns the connection to the cluster. Imports ray when it is built.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from penstock.addresses import is_loopback
from penstock.devices import VISIBLE_ENV
from penstock.errors import LaunchError
from penstock.fleet.launchers.ray_keeper import ServiceKeeper
from penstock.fleet.launchers.starter import EXIT_HOST_LOST
from penstock.fleet.process_state import pid_space
from penstock.fleet.services import ServiceSpec, remote_env

AUTH_MODE_ENV, AUTH_TOKEN_ENV, ADDRESS_ENV = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_ADDRESS"
NEW_CLUSTER = "local"
"""Ray's word for an address: a cluster of this process."""
HOST_LABEL = "host"
"""The label of a Ray node whose value is its name under `hosts`."""
TAG_VALUE = "true"
"""A node has the tag `train` if its label `train` has this value."""
STORE_CHECK_S = 1.0
STORE_LOST_S = 20.0
"""Ray silently ends its clients after 60 s without the control store."""
PLACE_S = 30.0
"""A service that waits longer for a place is reported, once."""
SHUTDOWN_S = 20.0
RESULT_S = 10.0
"""For results that have arrived already."""


def selector(
    tags: Sequence[str], host: str | None, labels: Iterable[Mapping[str, str]]
) -> dict[str, str]:
    """The labels that a service needs of its Ray node. A tag that no node of the cluster has, or
    had, constrains nothing: a cluster without labels runs everything anywhere."""
    if host is not None:
        return {HOST_LABEL: host}
    known = tags_in(labels)
    return {tag: TAG_VALUE for tag in tags if tag in known}


def tags_in(labels: Iterable[Mapping[str, str]]) -> set[str]:
    return {name for one in labels for name, value in one.items() if value == TAG_VALUE}


def connect(address: str | None) -> Any:
    """Connect this process to a cluster; returns the module `ray`. Token authentication is always
    on: without it, every host that reaches the cluster can run programs there."""
    if os.environ.setdefault(AUTH_MODE_ENV, "token").lower() != "token":
        raise LaunchError(
            f"{AUTH_MODE_ENV}={os.environ[AUTH_MODE_ENV]} lets everybody who reaches the cluster "
            f"run programs on it; set {AUTH_MODE_ENV}=token here and where the cluster is started"
        )
    where = address or os.environ.get(ADDRESS_ENV) or NEW_CLUSTER
    is_new = where == NEW_CLUSTER
    if is_new:
        os.environ.setdefault(AUTH_TOKEN_ENV, secrets.token_hex(32))
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray  # reads the environment now
    except ImportError:
        raise LaunchError(
            "launcher ray needs the library ray; install it with pip install 'penstock-rl[ray]'"
        ) from None
    handlers = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)}
    try:
        ray.init(
            address=where,
            include_dashboard=False if is_new else None,
            configure_logging=False,
            log_to_driver=False,
            namespace="penstock",
        )
    except Exception as error:  # Ray has no common class for what may go wrong here
        raise LaunchError(
            f"cannot connect to the Ray cluster at {where}: {error}; start one with `ray start "
            "--head`, and set RAY_AUTH_TOKEN or ~/.ray/auth_token to its token"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():  # Ray replaces them
                signal.signal(number, handler)
    return ray


class RayStarter:
    """Services as children of Ray workers."""

    def __init__(
        self,
        address: str | None,
        *,
        work_dir: Path,
        listens_on: str,
        notify: Callable[[str], None],
    ) -> None:
        """listens_on: the address of the dataflow service, `network.host`."""
        self._ray = connect(address)
        self._keeper = self._ray.remote(ServiceKeeper)
        self._work_dir = work_dir
        context = self._ray.get_runtime_context()
        self._own_node: str = context.get_node_id()
        self._store: str = context.gcs_address
        self._store_seen_at = self._check_store_at = time.monotonic()
        self._notify = notify
        self._groups: dict[str, Any] = {}
        self._unplaced: dict[str, _Unplaced] = {}
        nodes = self._nodes(alive=True)
        others = {one["NodeManagerAddress"] for one in nodes} - {self._address_of(self._own_node)}
        self._reserves = len(nodes) > 1
        """On one host a reservation would only keep services waiting for each other."""
        if others and is_loopback(listens_on):
            raise LaunchError(
                f"the Ray cluster has hosts at {', '.join(sorted(others)[:4])}, which cannot reach "
                f"the services of this run at {listens_on}: set network.host, advertise and tls; "
                "`penstock tls init` makes the certificates"
            )

    @property
    def num_devices(self) -> int:
        """GPUs of the cluster."""
        return int(self._ray.cluster_resources().get("GPU", 0))

    def tags(self) -> tuple[set[str], set[str]]:
        """Of this host, and of all."""
        nodes = self._nodes(alive=False)
        own = [one["Labels"] for one in nodes if one["NodeID"] == self._own_node]
        return tags_in(own), tags_in(one["Labels"] for one in nodes)

    def start(self, service: ServiceSpec, log: Path) -> RayChild | NotStarted:
        if not _answers(self._store):
            return NotStarted()  # Ray would wait for it; `check` decides
        env = remote_env(service.build_env())
        devices = env.pop(VISIBLE_ENV, "")  # Ray chooses which
        needs = {
            "num_cpus": service.threads if service.tags and self._reserves else 0,
            "num_gpus": len(devices.split(",")) if devices else 0,
        }
        options = {**needs, **self._place(service, needs)}
        keeper = self._keeper.options(max_restarts=0, **options).remote()
        command = service.command[1:]  # with the worker's own Python
        started = keeper.start.remote(command, env, str(self._work_dir), str(log))
        child = RayChild(self._ray, service.name, keeper, started)
        wanted = options.get("label_selector") or service.all_hosts or "any label"
        needs_text = f"{needs['num_cpus']} CPUs, {needs['num_gpus']} GPUs and {wanted}"
        self._unplaced[service.name] = _Unplaced(child, needs_text, time.monotonic())
        return child

    def check(self) -> None:
        now = time.monotonic()
        if now < self._check_store_at:
            return
        self._check_store_at = now + STORE_CHECK_S
        self._tell_who_waits(now)
        if _answers(self._store):
            self._store_seen_at = time.monotonic()
        elif now - self._store_seen_at > STORE_LOST_S:
            raise LaunchError(
                f"Ray's control store at {self._store} has not answered for {STORE_LOST_S:.0f} s, "
                "and without it nothing can be started. No data is lost: start the cluster again, "
                "then resume with `penstock run RUN_FOLDER`"
            )

    def _tell_who_waits(self, now: float) -> None:
        for name, one in [*self._unplaced.items()]:
            if one.child.is_placed:
                del self._unplaced[name]
            elif now - one.since > PLACE_S:
                del self._unplaced[name]
                self._notify(f"{name} waits for a Ray node with {one.needs}; see `ray status`")

    def close(self) -> None:
        """Without the control store, Ray would wait for it."""
        ending = threading.Thread(target=self._ray.shutdown, daemon=True)
        ending.start()
        ending.join(timeout=SHUTDOWN_S)

    # --- placement --------------------------------------------------------------------------------

    def _place(self, service: ServiceSpec, needs: Mapping[str, int]) -> dict[str, Any]:
        """The ledger and the weights are files of this machine, so their services stay here."""
        from ray.util import scheduling_strategies as strategies

        if not service.tags:
            strategy = strategies.NodeAffinitySchedulingStrategy(self._own_node, soft=False)
            return {"scheduling_strategy": strategy}
        labels = [one["Labels"] for one in self._nodes(alive=False)]
        if not service.all_hosts:
            wanted = selector(service.tags, service.host, labels)
            return {"label_selector": wanted, "scheduling_strategy": "SPREAD"}
        assert service.host is not None
        strategy = strategies.PlacementGroupSchedulingStrategy(
            self._group(service, needs),
            placement_group_bundle_index=service.all_hosts.index(service.host),
        )
        return {"scheduling_strategy": strategy}

    def _group(self, service: ServiceSpec, needs: Mapping[str, int]) -> Any:
        """The placement group of a trainer on several hosts: all of them at once, or none. Ray
        places the part of a lost host again."""
        trainer = service.name.partition("@")[0]
        if trainer not in self._groups:
            bundle = {"CPU": float(needs["num_cpus"]), "GPU": float(needs["num_gpus"])}
            bundle = {name: number for name, number in bundle.items() if number}
            self._groups[trainer] = self._ray.util.placement_group(
                [bundle] * len(service.all_hosts),
                strategy="STRICT_SPREAD",
                bundle_label_selector=[{HOST_LABEL: host} for host in service.all_hosts],
            )
        return self._groups[trainer]

    def _nodes(self, *, alive: bool) -> list[dict[str, Any]]:
        """The nodes of the cluster; with `alive=False` also those that it has lost."""
        return [one for one in self._ray.nodes() if one["Alive"] or not alive]

    def _address_of(self, node: str) -> str:
        return next(n["NodeManagerAddress"] for n in self._nodes(alive=True) if n["NodeID"] == node)


class _Unplaced(NamedTuple):
    child: RayChild
    needs: str
    since: float


class RayChild:
    """A service in a Ray worker, or one that waits for a place."""

    def __init__(self, ray: Any, name: str, keeper: Any, started: Any) -> None:
        self._ray = ray
        self._name = name
        self._keeper = keeper
        self._started = started
        self._ended = keeper.wait.remote()
        self._space: str | None = None
        self._pid: int | None = None
        self._code: int | None = None

    @property
    def is_placed(self) -> bool:
        """It has a worker, or had one."""
        return self._code is not None or not self._is_connected or self._is_ready(self._started)

    @property
    def pid(self) -> int | None:
        """Known once it has a place here; the number of a process elsewhere means another one."""
        return self._pid

    def exit_code(self) -> int | None:
        if self._code is None:
            self._code = self._ask() if self._is_connected else EXIT_HOST_LOST
        if self._code is not None:
            self._keeper = None  # without handles Ray ends the worker, which frees its place
        return self._code

    def _ask(self) -> int | None:
        """Does not wait."""
        if self._space is None and self._is_ready(self._started):
            started = self._get(self._started)
            if started is None:
                return EXIT_HOST_LOST
            self._space, pid = started
            self._pid = pid if self._space == pid_space() else None
        if not self._is_ready(self._ended):
            return None
        code = self._get(self._ended)
        return EXIT_HOST_LOST if code is None else code

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """One that has no place yet is given up: should it get one, it is killed there."""
        self._send(signal.SIGKILL)
        if not self.is_placed:
            self._code = EXIT_HOST_LOST

    def _send(self, number: signal.Signals) -> None:
        if self._is_connected and self._keeper is not None:
            self._keeper.send.remote(int(number))

    def _get(self, reference: Any) -> Any:
        """A result that has arrived; None if the host was lost first."""
        try:
            return self._ray.get(reference, timeout=RESULT_S)
        except self._ray.exceptions.RayError as error:
            is_ours = isinstance(error, self._ray.exceptions.RayTaskError)
            if not is_ours and not getattr(error, "actor_init_failed", False):
                return None
            raise LaunchError(
                f"cannot start {self._name} on a host of the Ray cluster: "
                f"{getattr(error, 'cause', None) or error}; each host needs this run folder on a "
                "shared disk, and the same penstock"
            ) from error

    def _is_ready(self, reference: Any) -> bool:
        return bool(self._ray.wait([reference], timeout=0)[0])

    @property
    def _is_connected(self) -> bool:
        """Calls after the end would start another cluster."""
        return self._ray.is_initialized()


class NotStarted:
    """A service that cannot be started now."""

    pid = None

    def exit_code(self) -> int:
        return EXIT_HOST_LOST

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=STORE_CHECK_S):
            return True
    except OSError:
        return False
