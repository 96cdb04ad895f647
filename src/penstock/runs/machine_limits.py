# SPDX-License-Identifier: Apache-2.0
"""What this machine cannot do for a run: ranks, devices, memory, context window, disk.

Owns the comparison of what the config asks for with what is here, each with the figure that is
short; `device_check` compares devices. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from penstock.config import RunConfig
from penstock.devices import visible_devices
from penstock.errors import ConfigError
from penstock.fleet.device_plan import layout_here, this_host
from penstock.fleet.run_folder import free_bytes
from penstock.gateway.sampling import MAX_ANSWER_TOKENS
from penstock.gateway.tokenizer_files import find_window
from penstock.hub import read_text_file
from penstock.runs.check_problem import CheckProblem
from penstock.runs.device_check import device_problems
from penstock.trainer.model_folders import initial_folder
from penstock.trainer.pipeline.builtin import plan_of
from penstock.trainer.pipeline.memory_estimate import (
    WEIGHT_BYTES,
    count_adapter,
    count_parameters,
    size_text,
)
from penstock.trainer.pipeline.plan import Chain, Plan
from penstock.types import JsonObject

MIN_FREE_BYTES = 1 << 30
RANKS_PER_CORE = 2
"""Ranks wait for each other, so with more of them on a core a step takes hours instead of
minutes."""
DISK_BYTES_PER_PARAMETER = 2 * (12 + WEIGHT_BYTES)
"""Two checkpoints, with AdamW's state, and two versions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What there is for a run."""

    num_cores: int
    memory_bytes: int
    """Available to new processes."""
    gpus: tuple[int, ...]
    """Free bytes of each GPU."""


def this_machine() -> Machine:
    return Machine(
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=_available_memory(),
        gpus=tuple(device.free_bytes for device in visible_devices()),
    )


def _available_memory() -> int:
    """MemAvailable, or what the control group leaves if that is less."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    [available] = [line for line in lines if line.startswith("MemAvailable")]
    found = int(available.split()[1]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except (OSError, ValueError):
        return found
    return found if limit == "max" else min(found, int(limit) - used)


def machine_problems(config: RunConfig, folder: Path, machine: Machine) -> Iterator[CheckProblem]:
    """Everything that does not fit this machine."""
    yield from _token_limits(config)
    yield from _lora_problems(config)
    try:
        plan = plan_of(config, this_host(config.all_hosts), has_gpus=bool(machine.gpus))
    except ConfigError as error:
        yield CheckProblem(key="pipeline", text=str(error))
        return
    yield from device_problems(config, plan, machine.gpus)
    if not machine.gpus:
        yield from _cpu_problems(config, plan, machine)
    yield from _disk_problems(config, folder)


def _token_limits(config: RunConfig) -> Iterator[CheckProblem]:
    asked = config.sampling.max_tokens
    if asked > MAX_ANSWER_TOKENS:
        yield CheckProblem(
            key="sampling.max_tokens",
            text=f"{asked:,} tokens per answer, and the gateway accepts at most "
            f"{MAX_ANSWER_TOKENS:,}; lower max_tokens",
        )
        return
    for name, model in config.models.items():
        window = _window(model.init, config.seed)
        if window is not None and asked >= window:
            yield CheckProblem(
                key="sampling.max_tokens",
                text=f"{asked:,} tokens per answer leave no room for a prompt in the context "
                f"window of {window:,} tokens that {model.init} (policy {name}) has; lower "
                "max_tokens",
            )


def _window(init: str, seed: int) -> int | None:
    """Of the model's config.json; None if that is missing or does not say."""
    try:
        with initial_folder(init, seed) as folder:
            config: Any = json.loads(read_text_file(folder / "config.json"))
    except (ConfigError, OSError, ValueError, RecursionError):
        return None
    return find_window(cast(JsonObject, config)) if isinstance(config, dict) else None


def _lora_problems(config: RunConfig) -> Iterator[CheckProblem]:
    for name, model in config.models.items():
        if model.lora and model.lora.targets and count_adapter(model.init, model.lora) == 0:
            yield CheckProblem(
                key=f"models.{name}.lora.targets",
                text=f"{', '.join(model.lora.targets)}: no matrix of {model.init} has such a name; "
                "name linear layers like q_proj, or leave targets out for all of them",
            )


def _parallel_key(config: RunConfig, chain: Chain) -> str:
    for index, stage in enumerate(config.pipeline.stages if config.pipeline else ()):
        if stage.parallel.num_ranks == chain.num_ranks:
            return f"pipeline.stages[{index}].parallel"
    own = config.models[chain.policy].training
    is_own = own is not None and own.parallel != config.training.parallel
    return f"models.{chain.policy}.training.parallel" if is_own else "training.parallel"


def _cpu_problems(config: RunConfig, plan: Plan, machine: Machine) -> Iterator[CheckProblem]:
    """Ranks and memory of what computes on the CPU of this machine; trainers that have devices of
    other hosts do not."""
    elsewhere = layout_here(config, 0).ranks
    chains = [chain for chain in plan.chains if chain.policy not in elsewhere]
    for chain in chains:
        yield from _rank_problems(config, chain, machine)
    needs = {c.policy: c.memory.total_bytes * c.num_ranks for c in chains}
    total = sum(needs.values()) + _node_bytes(config)
    if chains and total > machine.memory_bytes:
        largest = max(chains, key=lambda chain: needs[chain.policy])
        free = f"the trainers and nodes together {size_text(total)}; this machine has"
        yield _short(
            largest, needs[largest.policy], f"{free} {size_text(machine.memory_bytes)} available"
        )


def _rank_problems(config: RunConfig, chain: Chain, machine: Machine) -> Iterator[CheckProblem]:
    most = RANKS_PER_CORE * machine.num_cores
    if chain.num_ranks > max(1, most):
        yield CheckProblem(
            key=_parallel_key(config, chain),
            text=f"the trainer of {chain.policy} has {chain.num_ranks} ranks and this machine "
            f"{machine.num_cores} cores and 0 GPUs, enough for at most {most} ranks; lower "
            f"dp × tp to {machine.num_cores}",
        )


def _short(chain: Chain, need: int, have: str) -> CheckProblem:
    return CheckProblem(
        key=f"models.{chain.policy}.init",
        text=f"training {chain.policy} needs {size_text(need)} of memory, each rank "
        f"{chain.memory.text}, and {have}; choose a smaller model, train an adapter "
        "(lora: {rank: 16}), set training.recompute: layer, lower training.micro_batch_tokens, or "
        "use a larger machine",
    )


def _node_bytes(config: RunConfig) -> int:
    """Weights in all `hf` engines that the launcher starts."""
    return sum(
        (count_parameters(model.init) or 0) * WEIGHT_BYTES * model.replicas * model.engines
        for model in config.models.values()
        if model.engine == "hf"
    )


def _disk_problems(config: RunConfig, folder: Path) -> Iterator[CheckProblem]:
    nearest = folder
    while not nearest.exists():
        nearest = nearest.parent
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        yield CheckProblem(
            key="output_dir",
            text=f"cannot write to {nearest}; set output_dir to a writable folder",
        )
        return
    trained = sum(
        (count_adapter(model.init, model.lora) if model.lora else count_parameters(model.init)) or 0
        for model in config.models.values()
    )
    need, free = MIN_FREE_BYTES + trained * DISK_BYTES_PER_PARAMETER, free_bytes(nearest)
    if free < need:
        yield CheckProblem(
            key="output_dir",
            text=f"only {size_text(free)} free in {nearest}, and a run needs at least "
            f"{size_text(need)} for two checkpoints, two versions and 1 GiB of data; free some "
            "space or set output_dir to another disk",
        )
