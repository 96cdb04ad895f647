# SPDX-License-Identifier: Apache-2.0
"""Makes what starts the services of a run: on this machine, on a Ray cluster, or by ssh."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from penstock.config import RunConfig
from penstock.devices import visible_devices
from penstock.errors import LaunchError
from penstock.fleet.device_plan import this_host
from penstock.fleet.fork_server import ForkServer
from penstock.fleet.launchers.starter import LocalStarter, Starter


def build_starter(
    config: RunConfig, work_dir: Path, log_dir: Path, notify: Callable[[str], None]
) -> tuple[Starter, int]:
    """The starter of this run file, and the number of devices that services may be given."""
    if config.launcher == "ray":
        from penstock.fleet.launchers.ray_cluster import RayStarter

        ray = RayStarter(
            config.ray.address, work_dir=work_dir, listens_on=config.network.host, notify=notify
        )
        require_place(config, *ray.tags())
        return ray, ray.num_devices
    num_devices = len(visible_devices())
    hosts = config.all_hosts
    here = this_host(hosts)
    if config.launcher == "ssh" and here is None:
        raise LaunchError(
            f"this machine is none of the hosts of run {config.name} ({', '.join(hosts)}); add it "
            "with its address: the dataflow service and the weight server run here"
        )
    known = {tag for host in hosts.values() for tag in host.tags}
    require_place(config, hosts[here].tags if here is not None else (), known)
    if config.launcher == "local":
        # With GPUs every service imports for itself: their driver does not survive a fork.
        forks = None if num_devices else ForkServer(log_dir / "fork-server.log")
        return LocalStarter(work_dir, fork_server=forks), num_devices
    from penstock.fleet.launchers.ssh import SshStarter

    assert here is not None
    ssh = SshStarter(hosts, here, work_dir=work_dir, config_file=config.ssh.config, notify=notify)
    return ssh, num_devices


def require_place(config: RunConfig, own: Collection[str], known: Collection[str]) -> None:
    """The ledger and the weights are files of this machine, so their services run here: it must
    have the tags that they ask for. A tag that no host has constrains nothing."""
    for section, place in (("dataflow", config.dataflow.place), ("weights", config.weights.place)):
        for tag in place or ():
            if tag in known and tag not in own:
                raise LaunchError(
                    f"{section}.place asks for a host with the tag {tag}, which this machine "
                    "lacks; start the run on one that has it"
                )
