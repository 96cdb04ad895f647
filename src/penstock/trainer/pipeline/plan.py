# SPDX-License-Identifier: Apache-2.0
"""From a graph to a plan: a serial chain of stages per trainer, services for placed stages.

The stages of a trainer run one after another with all its models in memory, so the need for memory
is known in advance. Owns placement and its refusal, with the number that is short. Starts nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.config import LoraConfig
from penstock.config.hosts import TRAIN, HostConfig, Place
from penstock.config.pipeline import ParallelConfig, PipelineStageConfig
from penstock.errors import ConfigError
from penstock.trainer.pipeline.graph import topological_order
from penstock.trainer.pipeline.memory_estimate import (
    MemoryEstimate,
    count_adapter,
    count_parameters,
    estimate,
    estimate_pass,
    shape_of,
    size_text,
)
from penstock.trainer.pipeline.mesh_check import mesh_problems
from penstock.trainer.pipeline.pass_memory import PassSpec

ACTOR = "actor"
SMALLER = (
    "raise training.parallel.dp, or cp for long samples, set training.recompute: layer or "
    "training.offload: optimizer, lower training.micro_batch_tokens"
)
"""What makes a rank need less memory."""
GB = 10**9

Stages = Sequence[PipelineStageConfig]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The stages that one policy's trainer runs on every batch, in this order."""

    policy: str
    stages: tuple[PipelineStageConfig, ...]
    num_ranks: int
    memory: MemoryEstimate
    """Of the rank that holds the most, at its peak."""
    hosts: tuple[str, ...]
    """One per rank, like gpu0:3 for a device; empty if the plan has no hosts."""
    unknown_models: tuple[str, ...]
    """Models of unknown size, which are not in `memory`."""
    unknown_passes: tuple[str, ...] = ()
    """Trained models of unknown shape, whose passes are not in `memory`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """A stage that is a consumer of the ledger, on separate hosts."""

    stage: PipelineStageConfig
    memory: MemoryEstimate
    """Of one rank."""
    hosts: tuple[str, ...]
    unknown_models: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    chains: tuple[Chain, ...]
    services: tuple[Service, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyToPlan:
    """One policy to plan for."""

    init: str
    """Its initial weights."""
    stages: Stages
    lora: LoraConfig | None = None
    """The adapter that learns instead of them."""
    places: tuple[str, ...] = ()
    """The device, or the machine without devices, of each rank; empty: any with the tag `train`."""
    passes: PassSpec = field(default_factory=PassSpec)
    """How its passes are made; each stage has its own `parallel`."""


@dataclass(slots=True)
class _Room:
    """One device, or one machine without devices."""

    label: str
    tags: frozenset[str]
    free_bytes: int


@dataclass(slots=True)
class _HostPool:
    """Free memory of each place during placement: first fit, in the order of the file."""

    rooms: list[_Room] = field(default_factory=list[_Room])

    def allocate(
        self,
        who: str,
        tags: Sequence[str],
        num_ranks: int,
        each_bytes: int,
        places: Sequence[str] = (),
    ) -> list[str]:
        """`places`: where each rank goes, whatever the tags; empty: where the tags are."""
        if not self.rooms:
            return []
        if places:
            return self._take(who, each_bytes, places)
        fitting = [room for room in self.rooms if set(tags) <= room.tags]
        need = f"{who} needs {_places(num_ranks)} tagged {', '.join(tags)}"
        if len(fitting) < num_ranks:
            short = num_ranks - len(fitting)
            raise ConfigError(
                f"{need}, a device or a machine without devices each, and {len(fitting)} of the "
                f"{_places(len(self.rooms))} under hosts have these tags: {short} short; tag more "
                "hosts, or lower parallel"
            )
        roomy = [room for room in fitting if room.free_bytes >= each_bytes][:num_ranks]
        if len(roomy) < num_ranks:
            most = sorted((room.free_bytes for room in fitting), reverse=True)[num_ranks - 1]
            needed, short = size_text(each_bytes), size_text(each_bytes - most)
            raise ConfigError(
                f"{need} with {needed} free on each for its models and their passes, and the last "
                f"of these has {size_text(most)}: {short} short; {SMALLER}, place a stage "
                "elsewhere, or use larger hosts"
            )
        for room in roomy:
            room.free_bytes -= each_bytes
        return [room.label for room in roomy]

    def _take(self, who: str, each_bytes: int, places: Sequence[str]) -> list[str]:
        """Room on each of these; a machine without devices may hold several ranks."""
        num_ranks = Counter(places)
        for room in self.rooms:
            needed = each_bytes * num_ranks[room.label]
            if needed > room.free_bytes:
                short = size_text(needed - room.free_bytes)
                raise ConfigError(
                    f"{who} needs {size_text(needed)} on {room.label} for its models, and "
                    f"{size_text(room.free_bytes)} are free: {short} short; raise parallel.dp, "
                    "place a stage elsewhere, or use larger hosts"
                )
            room.free_bytes -= needed
        return list(places)


def make_plan(
    policies: Mapping[str, PolicyToPlan],
    hosts: Mapping[str, HostConfig] | None = None,
    *,
    engine_shares: Mapping[Place, float] | None = None,
    count: Callable[[str], int | None] = count_parameters,
) -> Plan:
    """The plan of a run; ConfigError if it does not fit. `engine_shares`: of the memory of devices
    that engines use."""
    room = _HostPool(_rooms(hosts or {}, engine_shares or {}))
    chains: list[Chain] = []
    services: dict[str, Service] = {}
    for policy, trained in policies.items():
        order = topological_order(trained.stages)
        inside = tuple(stage for stage in order if not stage.is_service)
        chains.append(_chain(policy, trained, inside, room, count))
        for stage in order:
            if stage.is_service and stage.id not in services:
                services[stage.id] = _service(stage, room, count)
    return Plan(chains=tuple(chains), services=tuple(services.values()))


def _chain(
    policy: str,
    trained: PolicyToPlan,
    stages: tuple[PipelineStageConfig, ...],
    room: _HostPool,
    count: Callable[[str], int | None],
) -> Chain:
    """Count each model once: a role has the same model in all stages, and it is trained if any
    stage trains it. With an adapter, roles that stay as initialized use the policy's base model."""
    learning = {stage.role: stage for stage in stages if stage.type == "train"}
    models: dict[tuple[str, str], ParallelConfig] = {}
    for stage in stages:
        if stage.type != "compute" and (stage.fn is None or stage.type == "train" or stage.model):
            is_bare = trained.lora and not stage.model and stage.role not in learning
            role = ACTOR if is_bare else stage.role
            trains = learning.get(role)
            _check_same_parallel(stage, trains)
            key = (role, stage.model or (trains and trains.model) or trained.init)
            known = models.setdefault(key, stage.parallel)
            models[key] = max(known, stage.parallel, key=lambda each: each.num_ranks)
    memory, unknown_models = MemoryEstimate(), list[str]()
    largest, unknown_passes = MemoryEstimate(), list[str]()
    for (role, model), parallel in models.items():
        _check_mesh(policy, model, parallel)
        _check_experts(model, parallel)
        if (num_parameters := count(model)) is None:
            unknown_models.append(model)
            continue
        is_adapted = trained.lora is not None and role == ACTOR
        is_trained, passes = role in learning, replace(trained.passes, parallel=parallel)
        own = replace(passes, precision="float32") if is_adapted else passes
        found = estimate(num_parameters, is_trained=is_trained and not is_adapted, passes=own)
        if trained.lora and is_adapted:
            adapter = count_adapter(model, trained.lora) or 0
            found += estimate(adapter, is_trained=True, passes=passes)
        memory += found.per_rank(parallel.num_shards * parallel.tp)
        if is_trained and (one := estimate_pass(model, num_parameters, passes)) is not None:
            largest = max(largest, one, key=lambda each: each.total_bytes)
        elif is_trained:
            unknown_passes.append(model)
    memory += largest  # stages run one after another: only one pass at a time
    num_ranks = max((stage.parallel.num_ranks for stage in stages), default=1)
    who = f"the trainer for policy {policy}"
    return Chain(
        policy=policy,
        stages=stages,
        num_ranks=num_ranks,
        memory=memory,
        hosts=tuple(room.allocate(who, [TRAIN], num_ranks, memory.total_bytes, trained.places)),
        unknown_models=tuple(dict.fromkeys(unknown_models)),
        unknown_passes=tuple(dict.fromkeys(unknown_passes)),
    )


def _check_mesh(policy: str, model: str, parallel: ParallelConfig) -> None:
    shape = shape_of(model) if parallel.ranks_per_part > 1 else None
    for problem in mesh_problems(shape, parallel) if shape else ():
        raise ConfigError(f"policy {policy}, {model}: {problem}")


def _check_same_parallel(stage: PipelineStageConfig, trains: PipelineStageConfig | None) -> None:
    """A trained model is sharded the same way in every stage that runs it."""
    if trains is None or stage.fn is not None or stage.parallel == trains.parallel:
        return
    own, other = (one.parallel.text for one in (stage, trains))
    raise ConfigError(
        f"stage {stage.id} has parallel {own} and runs the model that stage {trains.id} trains "
        f"with {other}; give both the same"
    )


def _check_experts(model: str, parallel: ParallelConfig) -> None:
    """Of a model whose config.json is on this machine; else its trainer finds out."""
    shape = shape_of(model) if parallel.ep > 1 else None
    if shape is None or (shape.num_experts and shape.num_experts % parallel.ep == 0):
        return
    if not shape.num_experts:
        raise ConfigError(f"{model} has no experts to spread over ep {parallel.ep}; set ep to 1")
    raise ConfigError(
        f"ep {parallel.ep} cannot share the {shape.num_experts} experts of {model} evenly; set ep "
        f"to a divisor of {shape.num_experts}"
    )


def _service(
    stage: PipelineStageConfig, room: _HostPool, count: Callable[[str], int | None]
) -> Service:
    num_ranks = stage.parallel.num_ranks
    num_parameters = count(stage.model) if stage.model else 0
    memory = estimate(num_parameters or 0, is_trained=False).per_rank(num_ranks)
    hosts = room.allocate(f"service {stage.id}", stage.place or (), num_ranks, memory.total_bytes)
    unknown = (stage.model,) if stage.model and num_parameters is None else ()
    return Service(stage=stage, memory=memory, hosts=tuple(hosts), unknown_models=unknown)


def _rooms(hosts: Mapping[str, HostConfig], shares: Mapping[Place, float]) -> list[_Room]:
    """One per device, or one per machine without devices."""
    rooms: list[_Room] = []
    for name, host in hosts.items():
        tags, size = frozenset(host.tags), round(host.memory_gb * GB)
        if not host.devices:
            rooms.append(_Room(name, tags, size))
        for place in (Place(name, device) for device in range(host.devices)):
            left = max(0.0, 1.0 - shares.get(place, 0.0))
            rooms.append(_Room(str(place), tags, round(size * left)))
    return rooms


def _places(count: int) -> str:
    return f"{count} place{'' if count == 1 else 's'}"
