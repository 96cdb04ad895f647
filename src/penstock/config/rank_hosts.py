# SPDX-License-Identifier: Apache-2.0
"""Which host starts which ranks of a trainer that has several hosts: a pure function of the run
file.

Owns the order: host after host as `training.hosts` names them, as many ranks on each."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.config.hosts import names_of
from penstock.config.run_sections import RunSections
from penstock.options import Contradiction


def host_of_each_rank(config: RunSections, policy: str) -> tuple[str, ...]:
    """Empty for a trainer on one host."""
    names = _hosts_of(config, policy)
    if len(names) < 2:
        return ()
    each = config.num_ranks_of(policy) // len(names)
    return tuple(name for name in names for _ in range(each))


def rank_host_contradictions(config: RunSections) -> Iterator[Contradiction]:
    for policy, model in config.trained.items():
        names = _hosts_of(config, policy)
        if len(names) < 2 or any(name not in config.all_hosts for name in names):
            continue
        at = ("models", policy, "training") if model.training is not None else ("training",)
        num_ranks, training = config.num_ranks_of(policy), config.for_policy(policy).training
        num_devices = sum(config.all_hosts[name].devices for name in names)
        if not training.external and config.launcher == "local":
            text = f"the trainer of {policy} has {len(names)} hosts, and launcher local starts it "
            text += "on one; use launcher ray or ssh, or set external: true and start `penstock "
            text += "trainer --host NAME` on each"
            yield Contradiction(text=text, keys=((*at, "hosts"), at))
        elif training.devices is None and num_devices not in (0, num_ranks):
            text = f"the {len(names)} hosts of the trainer of {policy} have {num_devices} devices "
            text += f"for {num_ranks} ranks; name some, the same on each host, like devices: [0, 1]"
            yield Contradiction(text=text, keys=((*at, "hosts"), at))
        elif num_ranks % len(names):
            text = f"{num_ranks} ranks cannot be dealt evenly to {len(names)} hosts: "
            text += f"{num_ranks % len(names)} left over; change parallel, or name other hosts"
            yield Contradiction(text=text, keys=((*at, "hosts"), at))


def _hosts_of(config: RunSections, policy: str) -> tuple[str, ...]:
    return names_of(config.for_policy(policy).training.hosts or ())
