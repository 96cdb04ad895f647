# SPDX-License-Identifier: Apache-2.0
"""The part of a trainer that one host starts.

Owns which ranks these are, which devices they see, and which network interface they talk through.
Starts nothing."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from penstock.config import RunConfig
from penstock.config.rank_hosts import host_of_each_rank
from penstock.devices import VISIBLE_ENV
from penstock.errors import ConfigError
from penstock.fleet.device_plan import this_host
from penstock.trainer.ranks.supervisor import HostRanks


def ranks_here(config: RunConfig, policy: str, host: str | None) -> HostRanks:
    """The ranks of this host. host: its name under `hosts`, if it is not this machine's name."""
    every = host_of_each_rank(config, policy)
    if not every:
        if host is not None:
            raise ConfigError(
                f"--host {host}: the trainer of {policy} has one host; name several as "
                "training.hosts, or leave --host out"
            )
        return HostRanks.one_host(config.num_ranks_of(policy))
    name = host or this_host(config.all_hosts)
    if name not in every:
        known = ", ".join(dict.fromkeys(every))
        said = f"--host {host}" if host else "this machine"
        raise ConfigError(
            f"{said} is none of the hosts of the trainer of {policy} ({known}); pass one of them "
            "as --host"
        )
    return HostRanks(
        num_ranks=len(every),
        num_local=every.count(name),
        first=every.index(name),
        address=_address(config, every[0]),
        port=config.for_policy(policy).training.port,
        interface=_interface(_address(config, name)),
    )


def visible_devices(config: RunConfig, policy: str) -> Mapping[str, str]:
    """The environment that shows the ranks of a host their devices; without names, all of them."""
    devices = config.for_policy(policy).training.devices
    if not host_of_each_rank(config, policy) or devices is None:
        return {}
    return {VISIBLE_ENV: ",".join(map(str, devices))}


def _address(config: RunConfig, host: str) -> str:
    written = config.all_hosts[host].address or host
    try:
        return str(socket.getaddrinfo(written, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"{written}, the address of host {host}, cannot be resolved here: {error}; write an "
            f"address as hosts.{host}.address"
        ) from error


def _interface(address: str) -> str:
    """The network interface of this machine that has this address."""
    import psutil  # only trainers over several hosts need it

    for name, found in psutil.net_if_addrs().items():
        if any(one.address == address for one in found):
            return name
    raise ConfigError(
        f"no network interface of this machine has the address {address}; correct hosts.address in "
        "the run file, or pass the right --host"
    )
