# SPDX-License-Identifier: Apache-2.0
"""The devices of this machine for the processes of a run, as CUDA_VISIBLE_DEVICES.

Owns which of the run file's hosts this machine is, and what the launcher sets. The dealing itself
is `config.device_layout`; starts nothing.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress

from penstock.config import HostConfig, RunConfig
from penstock.config.device_layout import HERE, DeviceLayout, lay_out
from penstock.config.hosts import Place
from penstock.devices import VISIBLE_ENV
from penstock.errors import LaunchError


def this_host(hosts: Mapping[str, HostConfig]) -> str | None:
    """This machine's name under `hosts`: the only one, the one of this name, or the one at an
    address of this machine; None if it is none of them."""
    if len(hosts) <= 1:
        return next(iter(hosts), None)
    own = socket.gethostname()
    for name in (own, own.partition(".")[0]):
        if name in hosts:
            return name
    return next((name for name, host in hosts.items() if _is_own(host.address or name)), None)


def _is_own(address: str) -> bool:
    """Whether a socket can be bound to this numeric address. Names are not looked up: a resolver
    may take a minute for each."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):
            socket.inet_pton(family, address)
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind((address, 0))
                return True
    return False


def layout_here(config: RunConfig, num_devices: int) -> DeviceLayout:
    """All devices, dealt from this machine's point of view; `num_devices`: what it has."""
    return lay_out(config, host=this_host(config.all_hosts), num_devices=num_devices)


def deal_devices(
    config: RunConfig, num_devices: int, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of each process that computes on devices of this machine, by the name of
    its service; empty if no process does. LaunchError if they do not suffice.

    `environ`: of the launcher. Device 0 of the run file is the first that it may use itself."""
    layout = layout_here(config, num_devices)
    if layout.problems:
        listed = "\n".join(f"  - {one.key}: {one.text}" for one in layout.problems)
        raise LaunchError(f"the devices of run {config.name} do not fit:\n{listed}")
    here = this_host(config.all_hosts) or HERE
    visible = (os.environ if environ is None else environ).get(VISIBLE_ENV)
    names = visible.split(",") if visible else []
    devices = {name: list(dealt) for name, dealt in layout.engines.items()}
    for policy, places in layout.ranks.items():
        if config.for_policy(policy).training.external:
            continue
        if config.launcher == "local":
            _refuse_other_hosts(policy, places, here)
        hosts = list(dict.fromkeys(place.host for place in places))
        for host in hosts:
            name = f"trainer-{policy}@{host}" if len(hosts) > 1 else f"trainer-{policy}"
            devices[name] = [place.device for place in places if place.host == host]
    return {
        service: ",".join(names[n].strip() if n < len(names) else str(n) for n in dealt)
        for service, dealt in devices.items()
    }


def _refuse_other_hosts(policy: str, places: tuple[Place, ...], here: str) -> None:
    others = list(dict.fromkeys(place.host for place in places if place.host != here))
    if others:
        shown = ", ".join(others[:4]) + (", …" if len(others) > 4 else "")
        raise LaunchError(
            f"{len(others)} of the hosts of the trainer of {policy} are other machines ({shown}), "
            f"and the launcher starts ranks on its own only ({here}); set training.external: true "
            "and start `penstock trainer --host NAME` on each, or name it alone as training.hosts"
        )
