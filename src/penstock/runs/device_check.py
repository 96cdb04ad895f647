# SPDX-License-Identifier: Apache-2.0
"""Whether the devices of a run suffice: for its trainers, its engines, and what they hold.

Owns the part of `penstock check` about devices: the figures of `config.device_layout` against
this machine's. Deals nothing itself, and starts nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.config import RunConfig
from penstock.config.device_layout import HERE, DeviceLayout
from penstock.fleet.device_plan import layout_here, this_host
from penstock.runs.check_problem import CheckProblem
from penstock.trainer.pipeline.memory_estimate import count_parameters, size_text
from penstock.trainer.pipeline.plan import SMALLER, Plan

ENGINE_BYTES = 2
"""Of one parameter, in bfloat16."""
ENGINE_SHARE = 0.9
"""What vLLM takes of a device that it has to itself."""


def device_problems(config: RunConfig, plan: Plan, gpus: Sequence[int]) -> Iterator[CheckProblem]:
    """Everything about devices that does not fit. `gpus`: free bytes of each GPU here."""
    host = this_host(config.all_hosts)
    declared = config.all_hosts[host].devices if host is not None else 0
    if declared > len(gpus):
        yield CheckProblem(
            key="hosts",
            text=f"{host} has {declared} devices, and this machine has {len(gpus)} GPUs that "
            f"CUDA_VISIBLE_DEVICES shows: {declared - len(gpus)} short; correct devices, or run "
            "this on the machine that has them (`penstock doctor` lists them)",
        )
        return
    layout = layout_here(config, len(gpus))
    for problem in layout.problems:
        yield CheckProblem(key=problem.key, text=problem.text)
    yield from _trainer_memory(plan, layout, host or HERE, gpus)
    yield from _engine_memory(config, layout, gpus)


def device_notes(config: RunConfig, num_devices: int) -> Iterator[str]:
    """What `penstock run` does not do here, and what the hosts of a trainer must share."""
    host = this_host(config.all_hosts)
    here = host or HERE
    if config.hosts and host is None and len(config.all_hosts) > 1:
        yield "this machine is none of hosts: their devices were not compared with real ones"
    for policy, places in layout_here(config, num_devices).ranks.items():
        others = dict.fromkeys(place.host for place in places if place.host != here)
        if others and not config.for_policy(policy).training.external:
            yield (
                f"the trainer of {policy} has ranks on {', '.join(others)}; `penstock run` starts "
                "ranks on its own host only, and refuses this run there"
            )
        hosts = list(dict.fromkeys(place.host for place in places))
        if len(hosts) > 1:
            yield (
                f"the ranks of {policy} on {', '.join(hosts)} write their shares of versions and "
                "checkpoints into the run folder: put it on a file system that these hosts share"
            )


def _trainer_memory(
    plan: Plan, layout: DeviceLayout, here: str, gpus: Sequence[int]
) -> Iterator[CheckProblem]:
    for chain in plan.chains:
        own = [p.device for p in layout.ranks.get(chain.policy, ()) if p.host == here]
        rooms = [round(gpus[n] * (1 - layout.engine_shares.get(n, 0.0))) for n in own]
        if rooms and chain.memory.total_bytes > min(rooms):
            need = chain.memory.text
            shared = " beside its engines" if any(n in layout.engine_shares for n in own) else ""
            yield CheckProblem(
                key=f"models.{chain.policy}.init",
                text=f"training {chain.policy} needs {need} on each GPU, and a GPU here has "
                f"{size_text(min(rooms))}{shared}: "
                f"{size_text(chain.memory.total_bytes - min(rooms))} short; {SMALLER}, choose a "
                "smaller model, train an adapter (lora: {rank: 16}), or use larger GPUs",
            )


def _engine_memory(
    config: RunConfig, layout: DeviceLayout, gpus: Sequence[int]
) -> Iterator[CheckProblem]:
    """Engines whose weights alone do not fit; the cache needs memory too."""
    dealt = {device for devices in layout.engines.values() for device in devices}
    for policy, model in config.models.items():
        num_parameters = count_parameters(model.init)
        if not dealt or not model.devices_per_engine or model.engine_urls or not num_parameters:
            continue
        need = -(-num_parameters * ENGINE_BYTES // model.vllm.tensor_parallel)
        share = model.vllm.memory_share or ENGINE_SHARE
        room = round(min(gpus[device] for device in dealt) * share)
        if need > room:
            yield CheckProblem(
                key=f"models.{policy}.vllm.tensor_parallel",
                text=f"an engine of {policy} needs {size_text(need)} on each device for weights "
                f"alone, and its share of a GPU here is {size_text(room)}; raise tensor_parallel "
                "or memory_share, or choose a smaller model",
            )
