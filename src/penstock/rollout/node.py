# SPDX-License-Identifier: Apache-2.0
"""A rollout node: lease → run workflow → score → deliver, hundreds at a time in one process.

    dataflow ──orders──► NodeOrders ──targets──► Loader ──live──► Membership ──heartbeat──► dataflow
    dataflow ──grants──► SlotRunner ──► AttemptRunner (workflow ► gateway ► engine, Scorer)
        ──trajectories──► DeliveryQueue ──► dataflow

Owns the wiring, the signals and the shutdown order. The response to its registration contains all
settings of the run, so a URL and a token are enough to join.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import signal
import zlib
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, Required, TypedDict, Unpack, cast

import structlog

from penstock.dataflow.client.partitioned import PartitionedNodeClient
from penstock.dataflow.service.nodes.messages import RunInfo
from penstock.devices import visible_devices
from penstock.errors import ConfigError
from penstock.gateway.gateway import MAX_RUNNING, Gateway
from penstock.plugins import unknown
from penstock.rollout.attempt import AttemptRunner
from penstock.rollout.delivery_queue import AckLog, DeliveryApi, DeliveryQueue
from penstock.rollout.endpoint import Endpoint
from penstock.rollout.engine import Engine, EngineSettings
from penstock.rollout.engine_pool import MAX_PAUSED, EnginePools
from penstock.rollout.engine_seats import (
    EngineGroup,
    EngineSeat,
    engine_info,
    policy_groups,
    seat_engines,
)
from penstock.rollout.engines import find_engine
from penstock.rollout.group_attempt import GroupRunner
from penstock.rollout.isolation import Isolation, IsolationSettings, Use
from penstock.rollout.membership import Membership, MembershipApi, NodeOrders
from penstock.rollout.peer_relay import PeerRelayConfig, PeerRelayFetcher
from penstock.rollout.pinned_engines import Attempts, AttemptsByKind, PinnedEngines
from penstock.rollout.priority import give_way
from penstock.rollout.recorder import Recorder, TurnApi
from penstock.rollout.rewards.scorer import SourceScorers
from penstock.rollout.slots import LeaseApi, SlotRunner
from penstock.rollout.tools.servers import open_tools
from penstock.rollout.weight_loader import Loader, WeightFetcher, WeightServerFetcher
from penstock.types import EVALUATION_TAG, NodeId, PolicyName
from penstock.wire.held_token import Token

log = structlog.get_logger(__name__)

CAPACITY = 256
GRACE_S = 1.0
"""A machine that is taken away may give two seconds: what is not finished by then is handed back,
and the next node reuses its finished turns."""


@dataclass(slots=True, kw_only=True)
class Node:
    orders: NodeOrders
    membership: Membership
    loader: Loader
    endpoints: Sequence[Endpoint]
    recorder: Recorder
    scorer: SourceScorers | None
    slots: SlotRunner
    delivery_queue: DeliveryQueue
    heartbeat_s: float
    grace_s: float = GRACE_S

    async def run(self) -> None:
        """Run until drained. An error in any loop ends the node and is raised here."""
        try:
            async with asyncio.TaskGroup() as tasks:
                leasing = tasks.create_task(self.slots.lease(tasks), name="lease")
                serving = self._serve(tasks)
                await self.orders.drained.wait()
                leasing.cancel()
                # A finished run does not accept late results.
                await self.slots.finish(0.0 if self.orders.is_finished else self.grace_s)
                await self.delivery_queue.flush()
                for loop in serving:
                    loop.cancel()
        except BaseExceptionGroup as group:
            raise _root_cause(group) from None
        await self.membership.leave()

    def _serve(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        heartbeats = self.membership.heartbeat_loop(self.heartbeat_s, self.slots.num_held)
        loops = {
            "heartbeat": heartbeats,
            "load": self.loader.run(),
            "deliver": self.delivery_queue.deliver(),
            "record": self.recorder.run(),
        }
        for index, endpoint in enumerate(self.endpoints):
            loops[f"gateway {index}"] = endpoint.run()
        if self.scorer is not None:
            loops["score"] = self.scorer.run()
        return [tasks.create_task(loop, name=name) for name, loop in loops.items()]


def _root_cause(error: BaseException) -> BaseException:
    """The first error inside nested groups; the others are its consequences."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    group = cast("BaseExceptionGroup[BaseException]", error)
    return _root_cause(group.exceptions[0])


class DataflowApi(MembershipApi, LeaseApi, DeliveryApi, TurnApi, Protocol):
    """All calls that a node makes to the dataflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDeps:
    """External dependencies of a node; tests pass fakes."""

    dataflow: DataflowApi
    ack_log: AckLog
    make_fetcher: Callable[[RunInfo], WeightFetcher]
    make_engine: Callable[[RunInfo, PolicyName, EngineSeat], Engine]
    num_engines: int | None = None
    """Engines per policy; None: as many as the run says."""
    max_paused: float = MAX_PAUSED
    policies: tuple[PolicyName, ...] = ()
    """Policies that the node serves; empty: all of the run."""
    isolation: IsolationSettings = field(default_factory=IsolationSettings)
    evaluates_only: bool = False
    """The node does nothing but evaluate."""
    tags: tuple[str, ...] = ()
    """What it says about itself, such as gpus=8."""
    visible: Sequence[str] = ()
    """Devices that the node may use, as in CUDA_VISIBLE_DEVICES."""
    engine_urls: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """Running servers of its engines, by policy."""
    on_first_pinned: Callable[[], None] | None = None
    """Called once, when the node is ready for its first evaluation."""
    can_pin: bool = True
    """Engines for evaluations can be made; not if a server of the user holds the only copy."""

    def engines(
        self,
        run_info: RunInfo,
        policies: Sequence[PolicyName] = (),
        num_engines: int | None = None,
    ) -> EnginePools:
        """Engines of the policies that this node serves, or of these; adapters of one model share
        theirs."""
        served = tuple(policies) or require_known(self.policies, run_info.policies)
        seats = self._seats(run_info)
        pools = EnginePools((), _no_engine)
        for policies in policy_groups(run_info, served):
            pools.add(
                EnginePools(
                    policies,
                    self._maker(run_info, policies[0], seats.get(policies[0], ())),
                    num_engines=num_engines or self._num_engines(run_info, policies[0]),
                    max_paused=self.max_paused,
                    sharing=[policies],
                )
            )
        return pools

    def _maker(
        self, run_info: RunInfo, policy: PolicyName, seats: Sequence[EngineSeat]
    ) -> Callable[[], Engine]:
        """Makes one engine after another, each in its seat. An engine without weights may be made
        once more for each policy that shares it, and needs no seat."""
        left = itertools.chain(seats, itertools.repeat(EngineSeat()))
        return lambda: self.make_engine(run_info, policy, next(left))

    def _num_engines(self, run_info: RunInfo, policy: PolicyName) -> int:
        if self.evaluates_only:
            return 1
        return self.num_engines or engine_info(run_info, policy).num_engines

    def _seats(self, run_info: RunInfo) -> dict[PolicyName, list[EngineSeat]]:
        """What each engine of this node gets, whichever of them are built now."""
        served = require_known(self.policies, run_info.policies)
        groups = [
            EngineGroup(
                policies=policies,
                num_engines=self._num_engines(run_info, policies[0]),
                num_devices=engine_info(run_info, policies[0]).num_devices,
            )
            for policies in policy_groups(run_info, served)
        ]
        return seat_engines(groups, self.visible, self.engine_urls)


def require_known(
    asked: Sequence[PolicyName], policies: tuple[PolicyName, ...]
) -> tuple[PolicyName, ...]:
    """The policies to serve, by the order of the run; ConfigError if the run lacks one."""
    if not asked:
        return policies
    for policy in asked:
        if policy not in policies:
            raise ConfigError(f"--policies: {unknown('policy', policy, policies)}")
    return tuple(policy for policy in policies if policy in asked)


def engine_maker(
    node_id: NodeId, **options: Unpack[NodeOptions]
) -> Callable[[RunInfo, PolicyName, EngineSeat], Engine]:
    """A factory for engines, each with a different seed."""
    seeds = itertools.count(zlib.crc32(node_id.encode()))

    def make(run_info: RunInfo, policy: PolicyName, seat: EngineSeat) -> Engine:
        info, servers = engine_info(run_info, policy), options.get("engine_servers", {})
        _, environment = servers.get(policy, ((), options.get("environment", "")))
        settings = EngineSettings(
            seed=next(seeds),
            torch_threads=run_info.torch_threads,
            is_deterministic=run_info.is_deterministic,
            url=seat.url,
            environment=environment,
            options=info.options,
            devices=seat.devices,
            keeps_kv=info.keeps_kv,
            state_dir=options["state_dir"],
            num_policies=max((len(s.policies) for s in run_info.adapters), default=1),
            adapter_rank=max((s.rank for s in run_info.adapters), default=1),
            records_experts=info.records_experts,
        )
        return find_engine(info.kind).build(settings)

    return make


@asynccontextmanager
async def build(
    deps: NodeDeps, *, node_id: NodeId, capacity: int = CAPACITY, grace_s: float = GRACE_S
) -> AsyncGenerator[Node]:
    """Register, and build the node from the run's settings."""
    orders = NodeOrders()
    membership = Membership(
        deps.dataflow,
        orders,
        node_id=node_id,
        capacity=capacity,
        policies=deps.policies,
        tags=(*deps.tags, EVALUATION_TAG) if deps.evaluates_only else deps.tags,
    )
    registered = await membership.join()
    run_info = registered.facts
    fetch = deps.make_fetcher(run_info)
    engines = EnginePools((), _no_engine) if deps.evaluates_only else deps.engines(run_info)
    num_engines = max((pool.num_engines for pool in engines.stats().values()), default=1)
    max_running = max(MAX_RUNNING * num_engines, capacity)
    gateway = Gateway(engines, max_running=max_running)
    pinned = _pinned_engines(deps, run_info, max_running)
    rewards = {source.name: source.reward for source in run_info.sources}
    isolation = Isolation(deps.isolation)
    await _require_isolation(isolation, run_info)
    scorer = SourceScorers(run_info.reward, rewards, isolation) or None
    recorder = Recorder(deps.dataflow, node_id)
    tools = await open_tools(run_info, isolation)

    def attempts(gateway: Gateway, run_info: RunInfo) -> tuple[Endpoint, GroupRunner]:
        endpoint = Endpoint(gateway)
        runner = AttemptRunner(
            gateway,
            endpoint,
            recorder,
            scorer,
            run_info,
            node_id,
            isolation,
            tools,
            activities=membership.activities,
            boot_id=membership.boot_id,
        )
        return endpoint, GroupRunner(runner, gateway, scorer, run_info)

    runners = [attempts(gateway, run_info)]
    if pinned is not None:  # nodes score the answers, even if a stage scores training
        runners.append(attempts(pinned.gateway, replace(run_info, is_scored=True)))
    if deps.evaluates_only:
        membership.ready.set()  # it has no newest version to wait for
    delivery_queue = DeliveryQueue(deps.dataflow, membership, deps.ack_log)
    try:
        yield Node(
            orders=orders,
            membership=membership,
            loader=Loader(
                orders,
                membership,
                engines,
                gateway,
                fetch,
                pinned,
                deps.on_first_pinned,
                activities=membership.activities,
            ),
            endpoints=[endpoint for endpoint, _ in runners],
            recorder=recorder,
            scorer=scorer,
            slots=SlotRunner(
                deps.dataflow,
                membership,
                orders,
                _by_kind([runner for _, runner in runners], pinned, run_info),
                delivery_queue,
                capacity,
            ),
            delivery_queue=delivery_queue,
            heartbeat_s=registered.heartbeat_s,
            grace_s=grace_s,
        )
    finally:
        await tools.close()
        for _, runner in runners:
            await runner.close()
        if pinned is not None:
            await pinned.free()
        await engines.close()
        await fetch.close()


def _no_engine() -> Engine:
    raise AssertionError("a node that only evaluates has no engine of a newest version")


def _pinned_engines(deps: NodeDeps, run_info: RunInfo, max_running: int) -> PinnedEngines | None:
    """Engines for evaluations; None if the run has none, or this node cannot have any."""
    if not any(source.is_evaluation for source in run_info.sources):
        return None
    if not (deps.can_pin or deps.evaluates_only):
        log.warning("this node does not evaluate: its engine server holds one version only")
        return None
    return PinnedEngines(
        lambda policies: deps.engines(run_info, policies, num_engines=1), max_running=max_running
    )


def _by_kind(
    runners: Sequence[GroupRunner], pinned: PinnedEngines | None, run_info: RunInfo
) -> Attempts:
    if pinned is None:
        return runners[0]
    return AttemptsByKind(
        training=runners[0],
        evaluation=runners[1],
        pinned=pinned,
        sources=frozenset(s.name for s in run_info.sources if s.is_evaluation),
    )


async def _require_isolation(isolation: Isolation, run_info: RunInfo) -> None:
    """Raise SandboxError at the start of the node, not in its first attempt."""
    infos = (run_info, *run_info.sources)
    if any(info.workflow.startswith(("[", "{")) for info in infos):
        await isolation.backend(Use.WORKFLOW)
    if any(source.env for source in run_info.sources):
        await isolation.backend(Use.ENVIRONMENT)
    if any(info.reward for info in infos):
        await isolation.backend(Use.REWARD)


class NodeOptions(TypedDict, total=False):
    """Keyword arguments of `run_node` and `run_online`; see `connect`."""

    state_dir: Required[Path]
    acks: Path
    engine_servers: Mapping[str, tuple[Sequence[str], str]]
    environment: str
    num_engines: int | None
    max_paused: float
    policies: tuple[PolicyName, ...]
    isolation: IsolationSettings
    evaluates_only: bool
    tags: tuple[str, ...]


@asynccontextmanager
async def connect(
    url: str,
    token: Token,
    make_fetcher: Callable[[RunInfo], WeightFetcher],
    *,
    node_id: NodeId,
    **options: Unpack[NodeOptions],
) -> AsyncGenerator[NodeDeps]:
    """Clients and factories of a node of the run at `url`.

    - `acks`: file for acknowledged row ids; default `state_dir/acks.txt`.
    - `engine_servers`: URLs of the servers of its engines, and the environment to start others, by
      policy.
    - `environment`: the environment to start engines of policies without an entry there.
    - `num_engines`: engines per policy, if not as many as the run says; at most the share
      `max_paused` of them swaps weights at the same time.
    - `policies`: those that it serves, and is leased work of; default: all of the run.
    - `evaluates_only`: it gets nothing but questions of evaluations.
    - `tags`: what it says about itself, such as gpus=8 and cost=12.5 (per hour).
    - `isolation`: where code of others runs; by default in bubblewrap, without grants.
    """
    client = PartitionedNodeClient(url, token)
    ack_log = AckLog(options.get("acks") or options["state_dir"] / "acks.txt")
    servers = options.get("engine_servers", {})
    urls = {policy: own for policy, (own, _) in servers.items() if own}
    try:
        yield NodeDeps(
            dataflow=client,
            ack_log=ack_log,
            make_fetcher=make_fetcher,
            make_engine=engine_maker(node_id, **options),
            num_engines=options.get("num_engines"),
            max_paused=options.get("max_paused", MAX_PAUSED),
            policies=options.get("policies", ()),
            isolation=options.get("isolation", IsolationSettings()),
            evaluates_only=options.get("evaluates_only", False),
            tags=options.get("tags", ()),
            visible=[device.id for device in await asyncio.to_thread(visible_devices)],
            engine_urls=urls,
            # Once it is ready, training on the same machine comes first.
            on_first_pinned=give_way if options.get("evaluates_only") else None,
            can_pin=not urls,
        )
    finally:
        ack_log.close()
        await client.close()


async def run_node(
    url: str,
    token: Token,
    *,
    node_id: NodeId,
    capacity: int | None = None,
    relay: tuple[str, Token] | None = None,
    sharing: PeerRelayConfig | None = None,
    store_root: Path | None = None,
    **options: Unpack[NodeOptions],
) -> bool:
    """Join the run at `url` and work until the run ends, the node is drained, or SIGTERM or SIGINT
    arrives. `options` as in `connect`.

    - `relay`: URL and token of a relay to try before the run's weight server.
    - `sharing`: makes this node a relay for others.
    - `store_root`: the run's weight store on this machine, whose files are linked. It is not used
      with a relay, with `sharing`, or if the run names a kind of transfer.

    Returns after a graceful leave: whether an operator drained the node. Otherwise raises the error
    that ended the node.
    """

    state_dir = options["state_dir"]

    def fetch(run_info: RunInfo) -> WeightFetcher:
        transfer = run_info.transfer
        if sharing is not None:
            return PeerRelayFetcher(token, state_dir, sharing, relay=relay, transfer=transfer)
        can_link = relay is None and transfer == "auto"
        return WeightServerFetcher(
            token,
            state_dir / "weights",
            relay=relay,
            transfer=transfer,
            store_root=store_root if can_link else None,
        )

    # Hundreds of attempts hold their objects for some steps of the model: the young ones must be
    # more than all attempts hold, or a quarter of the time goes into looking at them again.
    gc.set_threshold(200_000, 20, 100)
    async with (
        connect(url, token, fetch, node_id=node_id, **options) as deps,
        build(deps, node_id=node_id, capacity=capacity or CAPACITY) as node,
    ):
        with on_stop_signals(node.orders.drain):
            await node.run()
        return node.orders.is_ordered_to_leave


@contextmanager
def on_stop_signals(drain: Callable[[], None]) -> Generator[None]:
    """The first SIGTERM or SIGINT drains; a second one reaches the default handler and kills."""
    loop = asyncio.get_running_loop()
    kinds = (signal.SIGTERM, signal.SIGINT)

    def handle_signal() -> None:
        for kind in kinds:
            loop.remove_signal_handler(kind)
        drain()

    for kind in kinds:
        loop.add_signal_handler(kind, handle_signal)
    try:
        yield
    finally:
        for kind in kinds:
            loop.remove_signal_handler(kind)
