# SPDX-License-Identifier: Apache-2.0
"""Which process of a run computes on which device: a pure function of the run file.

Owns the dealing, and the refusal of shortage, overlap and double use, each with its figure. First
come the devices that the file names, then trainers and engines without names take free ones in
order. The launcher applies the result; the planner knows what fits into memory. Starts nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.config.hosts import TRAIN, Place, names_of
from penstock.config.run_sections import RunSections
from penstock.config.stages import stage_subject
from penstock.config.trust import SCORE_STAGE

HERE = "this machine"
"""The only host of a run file without hosts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedNode:
    """A process with engines that the launcher starts on this machine."""

    name: str
    policy: str
    """Whose settings it uses."""
    served: tuple[str, ...]
    engines: int | None = None
    """Engines per policy; None: as many as the policy says."""
    evaluates_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutProblem:
    """Devices that are short, missing or used twice."""

    key: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLayout:
    """Every process with devices. Empty on machines without any."""

    ranks: Mapping[str, tuple[Place, ...]]
    """One place per rank, by policy."""
    engines: Mapping[str, tuple[int, ...]]
    """Devices of this machine, by node: of its engines, one engine after another."""
    engine_shares: Mapping[int, float]
    """Share of a device's memory that engines take, by device of this machine."""
    problems: tuple[LayoutProblem, ...]


@dataclass(slots=True, kw_only=True)
class _Claim:
    """A trainer, or all engines of one policy."""

    who: str
    key: str
    """Of the devices in the run file."""
    hosts: tuple[str, ...]
    devices: tuple[int, ...] | None
    """As written, on each of the hosts."""
    needed: int
    why: str
    """How `needed` came about."""
    share: float | None = None
    """Of each device's memory; None: all of it."""
    is_trainer: bool = False
    dealt: tuple[Place, ...] = ()

    @property
    def need(self) -> str:
        verb = "needs" if self.is_trainer else "need"
        return f"{self.who} {verb} {_count(self.needed, 'device')} ({self.why})"

    @property
    def count(self) -> str:
        """The keys that say how many."""
        return "training.parallel" if self.is_trainer else "engines or replicas"


@dataclass(slots=True)
class _Dealing:
    """The state of one dealing."""

    sizes: Mapping[str, int]
    """Devices of each host."""
    problems: list[LayoutProblem] = field(default_factory=list[LayoutProblem])

    def refuse(self, claim: _Claim, text: str) -> None:
        self.problems.append(LayoutProblem(key=claim.key, text=text))


def launched_nodes(config: RunSections) -> Iterator[LaunchedNode]:
    """The nodes that the launcher starts, in order."""
    for policy, model in config.models.items():
        prefix = "node" if len(config.models) == 1 else f"{policy}-node"
        served = config.served_with(policy) or tuple(config.models)
        for replica in range(model.replicas):
            yield LaunchedNode(name=f"{prefix}-{replica}", policy=policy, served=served)
    if config.eval is not None and config.evaluated is not None:
        served = config.served_with(config.evaluated) or tuple(config.models)
        for index in range(config.eval.nodes):
            yield LaunchedNode(
                name=f"eval-node-{index}",
                policy=config.evaluated,
                served=served,
                engines=1,
                evaluates_only=True,
            )


def lay_out(config: RunSections, *, host: str | None, num_devices: int) -> DeviceLayout:
    """Deal all devices. `host`: this machine's name under `hosts`, None if it is not there;
    `num_devices`: what it has, for a file without hosts."""
    hosts = config.all_hosts
    sizes = {name: one.devices for name, one in hosts.items()} if hosts else {HERE: num_devices}
    here = host if hosts else HERE
    dealing = _Dealing(sizes)
    claims = [*_trainers(config, here), *_engines(config, here)]
    for claim in claims:
        if claim.devices is not None:
            _deal_named(dealing, claim)
    taken = {place for claim in claims for place in claim.dealt}
    for claim in claims:
        if claim.devices is None and any(sizes.get(name) for name in claim.hosts):
            _deal_free(dealing, claim, taken)
    _refuse_double_use(dealing, claims)
    by_key = {claim.key: claim for claim in claims if not claim.is_trainer}
    return DeviceLayout(
        ranks={policy: claim.dealt for policy, claim in _by_policy(config, claims) if claim.dealt},
        engines=dict(_by_node(config, by_key)),
        engine_shares=_shares(claims, here),
        problems=tuple(dealing.problems),
    )


def _by_policy(config: RunSections, claims: Sequence[_Claim]) -> Iterator[tuple[str, _Claim]]:
    trainers = (claim for claim in claims if claim.is_trainer)
    return zip(config.trained, trainers, strict=True)


def _trainers(config: RunSections, here: str | None) -> Iterator[_Claim]:
    for policy, model in config.trained.items():
        training = config.for_policy(policy).training
        tagged = tuple(name for name, host in config.all_hosts.items() if TRAIN in host.tags)
        hosts = names_of(training.hosts) if training.hosts else tagged
        num_ranks = config.num_ranks_of(policy)
        own = model.training is not None
        yield _Claim(
            who=f"the trainer of {policy}",
            key=f"models.{policy}.training.devices" if own else "training.devices",
            hosts=hosts if config.hosts else (HERE,),
            devices=training.devices,
            needed=num_ranks,
            why=f"{_count(num_ranks, 'rank')}, one device each",
            is_trainer=True,
        )


def _engine_groups(config: RunSections, node: LaunchedNode) -> Iterator[tuple[str, int]]:
    """The policy that names the devices, and the number of engines, for each set of engines of a
    node. Policies that are adapters of one model share theirs; the first names them."""
    bases = set[str]()
    for policy in node.served:
        model = config.models[policy]
        if model.lora is not None:
            if model.init in bases:
                continue
            bases.add(model.init)
        if model.devices_per_engine and not model.engine_urls:
            yield policy, node.engines or model.engines


def _engine_nodes(config: RunSections) -> Iterator[LaunchedNode]:
    """All processes with engines on this machine."""
    yield from launched_nodes(config)
    if config.has_score_stage and config.trust.accept_untrusted:
        every = tuple(config.models)
        name = stage_subject(SCORE_STAGE)
        yield LaunchedNode(name=name, policy=every[0], served=every, engines=1)


def _engines(config: RunSections, here: str | None) -> Iterator[_Claim]:
    numbers: dict[str, int] = {}
    for node in _engine_nodes(config):
        for policy, num_engines in _engine_groups(config, node):
            numbers[policy] = numbers.get(policy, 0) + num_engines
    for policy, num_engines in numbers.items():
        vllm = config.models[policy].vllm
        yield _Claim(
            who=f"the engines of {policy}",
            key=_engine_key(policy),
            hosts=(here,) if here is not None else (),
            devices=vllm.devices,
            needed=num_engines * vllm.tensor_parallel,
            why=f"{_count(num_engines, 'engine')} × tensor_parallel {vllm.tensor_parallel}",
            share=vllm.memory_share,
        )


def _engine_key(policy: str) -> str:
    return f"models.{policy}.vllm.devices"


def _deal_named(dealing: _Dealing, claim: _Claim) -> None:
    assert claim.devices is not None
    if not claim.hosts:
        if claim.is_trainer:
            return  # no host has the tag; the planner says so
        why = "this machine is not one of hosts, so it has no devices to deal"
        fix = "add it there, or set replicas: 0 and start nodes with `penstock join` on the others"
        dealing.refuse(claim, f"{claim.need}, and {why}; {fix}")
        return
    places = [Place(host, device) for host in claim.hosts for device in claim.devices]
    for place in dict.fromkeys(places):
        if place.device >= dealing.sizes.get(place.host, 0):
            has = _count(dealing.sizes.get(place.host, 0), "device")
            text = f"device {place.device} of {place.host} does not exist: it has {has}, counted "
            dealing.refuse(claim, f"{text}from 0; name others, or none for the first free ones")
            return
    if len(set(places)) < len(places):
        twice = next(place for place in places if places.count(place) > 1)
        text = f"{claim.need}, and device {twice.device} of {twice.host} is named twice"
        dealing.refuse(claim, f"{text}; name each once")
        return
    if len(places) != claim.needed:
        _refuse_number(dealing, claim, len(places))
        return
    claim.dealt = tuple(places)


def _refuse_number(dealing: _Dealing, claim: _Claim, named: int) -> None:
    more = claim.needed - named
    what = f"{more} short" if more > 0 else f"{-more} would be idle"
    dealing.refuse(
        claim,
        f"{claim.need}, and {named} {'is' if named == 1 else 'are'} named: {what}; name "
        f"{claim.needed}, or change {claim.count}",
    )


def _deal_free(dealing: _Dealing, claim: _Claim, taken: set[Place]) -> None:
    places = [Place(host, n) for host in claim.hosts for n in range(dealing.sizes.get(host, 0))]
    free = [place for place in places if place not in taken]
    if len(free) < claim.needed:
        where = ", ".join(claim.hosts[:4]) + (", …" if len(claim.hosts) > 4 else "")
        dealing.refuse(
            claim,
            f"{claim.need}, and {len(free)} of the {len(places)} of {where} are free: "
            f"{claim.needed - len(free)} short; lower {claim.count}, let engines share devices "
            "(vllm: {devices: [0], memory_share: 0.4}), or hide all devices with an empty "
            "CUDA_VISIBLE_DEVICES to compute on the CPU",
        )
        return
    claim.dealt = tuple(free[: claim.needed])
    taken.update(claim.dealt)


def _refuse_double_use(dealing: _Dealing, claims: Sequence[_Claim]) -> None:
    users: dict[Place, list[_Claim]] = {}
    for claim in claims:
        for place in claim.dealt:
            users.setdefault(place, []).append(claim)
    refused = set[str]()
    for place, sharing in users.items():
        if len(sharing) == 1:
            continue
        both = " and ".join(claim.who for claim in sharing)
        if both in refused:  # once, not for each device
            continue
        if text := _double_use(sharing):
            refused.add(both)
            dealing.refuse(
                sharing[-1], f"{both} both use device {place.device} of {place.host}{text}"
            )


def _double_use(sharing: Sequence[_Claim]) -> str:
    """What is wrong with these on one device; empty if they share its memory by plan."""
    if sum(claim.is_trainer for claim in sharing) > 1:
        return "; give each policy its own training.devices"
    greedy = [claim for claim in sharing if not claim.is_trainer and claim.share is None]
    if greedy:
        policy_key = greedy[0].key.removesuffix("devices")
        return (
            f", and {greedy[0].who} take all of its memory; name other devices, or share it with "
            f"{policy_key}memory_share: 0.4"
        )
    total = sum(claim.share or 0.0 for claim in sharing)
    has_trainer = any(claim.is_trainer for claim in sharing)
    if total > 1 or (has_trainer and total >= 1):
        return f", with shares of {total:g} of its memory; lower memory_share to a sum below 1"
    return ""


def _by_node(
    config: RunSections, claims: Mapping[str, _Claim]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Cut what each policy was dealt into the parts of its nodes."""
    left = {key: [place.device for place in claim.dealt] for key, claim in claims.items()}
    for node in _engine_nodes(config):
        own: list[int] = []
        for policy, num_engines in _engine_groups(config, node):
            size = num_engines * config.models[policy].vllm.tensor_parallel
            queue = left[_engine_key(policy)]
            own += queue[:size]
            del queue[:size]
        if own:
            yield node.name, tuple(own)


def _shares(claims: Sequence[_Claim], here: str | None) -> dict[int, float]:
    shares: dict[int, float] = {}
    for claim in claims:
        for place in claim.dealt:
            if not claim.is_trainer and place.host == here:
                shares[place.device] = shares.get(place.device, 0.0) + (claim.share or 1.0)
    return shares


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
