# SPDX-License-Identifier: Apache-2.0
"""What each engine of a node gets: the URL of a running server, or devices to start one on.

Owns the order, which is the launcher's: policies as the run lists them, one engine after
another. Builds no engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.dataflow.service.nodes.messages import EngineInfo, RunInfo
from penstock.errors import ConfigError
from penstock.types import PolicyName


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSeat:
    """The place of one engine."""

    url: str = ""
    """A running server; empty: the engine starts its own."""
    devices: tuple[str, ...] = ()
    """As in CUDA_VISIBLE_DEVICES; empty: what the node sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGroup:
    """The engines of a policy, or of several that are adapters of one model."""

    policies: tuple[PolicyName, ...]
    num_engines: int
    num_devices: int
    """Of each engine."""


def policy_groups(run_info: RunInfo, served: Sequence[PolicyName]) -> list[tuple[PolicyName, ...]]:
    """Policies that share engines, in the order of the first of each."""
    shared = [tuple(p for p in served if p in one.policies) for one in run_info.adapters]
    alone = [(policy,) for policy in served if not any(policy in one for one in shared)]
    return sorted(filter(None, (*shared, *alone)), key=lambda group: served.index(group[0]))


def engine_info(run_info: RunInfo, policy: PolicyName) -> EngineInfo:
    default = EngineInfo(kind=run_info.engine, options=run_info.engine_options)
    return run_info.engines.get(policy, default)


def seat_engines(
    groups: Sequence[EngineGroup], visible: Sequence[str], urls: Mapping[str, Sequence[str]]
) -> dict[PolicyName, list[EngineSeat]]:
    """The seats of all engines of a node, by policy. `visible`: its devices, in order; none on a
    machine without any. `urls`: running servers, by policy."""
    seats: dict[PolicyName, list[EngineSeat]] = {}
    dealt = 0
    for group in groups:
        given = urls.get(group.policies[0]) or ()
        own = [EngineSeat(url=url) for url in given]
        for _ in range(0 if given else group.num_engines):
            devices = tuple(visible[dealt : dealt + group.num_devices])
            dealt += group.num_devices
            own.append(EngineSeat(devices=devices))
        seats |= dict.fromkeys(group.policies, own)
    if visible and dealt > len(visible):
        raise ConfigError(
            f"the engines of this node need {dealt} GPUs, and it sees {len(visible)}: "
            f"{dealt - len(visible)} short; lower engines (--engines) or tensor_parallel, show "
            "more in CUDA_VISIBLE_DEVICES, or none (empty) to compute on the CPU"
        )
    return seats
