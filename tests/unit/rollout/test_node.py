# SPDX-License-Identifier: Apache-2.0
"""The node against a fake dataflow over real HTTP, with the scripted engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog
from tests.unit.rollout import user_workflows
from tests.unit.rollout.fake_dataflow import POLICY, FakeDataflow, facts, wanted
from tests.unit.rollout.polling import eventually

from penstock.dataflow.client.dataflow import NodeClient
from penstock.dataflow.core.leasing import NodeState
from penstock.dataflow.service.nodes.messages import NodeDirectives, RunInfo
from penstock.errors import Fenced, RewardError, WeightsError
from penstock.rollout.delivery_queue import AckLog
from penstock.rollout.engine import Engine
from penstock.rollout.engines.scripted import ScriptedEngine
from penstock.rollout.node import Node, NodeDeps, build
from penstock.types import (
    FailureKind,
    NodeId,
    OutcomeKind,
    PublishedVersion,
    RowId,
)

NODE = NodeId("node-1")
WORKFLOWS = "tests.unit.rollout.user_workflows"


class FolderFetch:
    """Every version is the same folder; damaged ones cannot be fetched."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged: set[int] = set()
        self.num_tries = 0

    async def __call__(self, weights_url: str, target: PublishedVersion) -> Path:
        self.num_tries += 1
        if target.number in self.damaged:
            raise WeightsError(f"number {target.number} is damaged")
        return self.folder

    def require_unchanged(self, folder: Path) -> None:
        return None

    def make_patch(self, base: Path, folder: Path) -> None:
        return None

    def prune_except(self, keep: Collection[str]) -> None:
        assert len(keep) <= 1

    async def close(self) -> None:
        return None


class Bench:
    """A running node, its fake dataflow and its files."""

    def __init__(self, dataflow: FakeDataflow, fetch: FolderFetch, node: Node, acks: Path) -> None:
        self.dataflow = dataflow
        self.fetch = fetch
        self.node = node
        self.acks = acks
        self.running = asyncio.create_task(node.run())

    def acknowledged(self) -> set[str]:
        return set(self.acks.read_text().splitlines())

    async def drain(self) -> None:
        await self.dataflow.order(NodeDirectives(wanted=self.dataflow.orders.wanted, drain=True))
        await asyncio.wait_for(self.running, 60)


@asynccontextmanager
async def bench(
    tmp_path: Path,
    snapshot: Path,
    *,
    num_slots: int = 0,
    capacity: int = 16,
    grace_s: float = 5.0,
    run_info: RunInfo | None = None,
    make_engine: Callable[[], Engine] = ScriptedEngine,
) -> AsyncGenerator[Bench]:
    dataflow = FakeDataflow(tmp_path / "keys", num_slots=num_slots, run_info=run_info)
    acks = tmp_path / "acks.txt"
    ack_log = AckLog(acks)
    fetch = FolderFetch(snapshot)
    async with dataflow.served():
        client = NodeClient(dataflow.url, dataflow.token)
        deps = NodeDeps(
            ack_log=ack_log,
            dataflow=client,
            make_fetcher=lambda facts: fetch,
            make_engine=lambda facts, policy, seat: make_engine(),
        )
        async with build(deps, node_id=NODE, capacity=capacity, grace_s=grace_s) as node:
            desk = Bench(dataflow, fetch, node, acks)
            try:
                yield desk
            finally:
                desk.running.cancel()
                await asyncio.gather(desk.running, return_exceptions=True)
        await client.close()
    ack_log.close()


# --- the flow -----------------------------------------------------------------------------------


async def test_every_slot_is_run_scored_delivered_and_acknowledged(
    tmp_path: Path, snapshot: Path
) -> None:
    async with bench(tmp_path, snapshot, num_slots=100) as desk:
        await asyncio.wait_for(desk.dataflow.until_stored(100), 60)
        await desk.drain()
        rows = desk.dataflow.trajectories()
        assert {row.row_id for row in rows} == desk.acknowledged()
        assert len(rows) == 100
        assert {row.boot_id for row in rows} == {desk.dataflow.boot_ids[NODE]}
        for row in rows:
            assert row.reward == 1.0  # the script answers backwards
            assert row.outcome.kind is OutcomeKind.TRUNCATED and row.outcome.reason == "length"
            assert row.row_id == f"{row.group_id}.{row.slot}.{row.epoch}"
            (turn,) = row.turns
            assert turn.policy == POLICY and len(turn.sampled_ids) == 12
            assert [(s.incarnation, s.number) for s in turn.spans] == [(1, 0)]
        assert desk.dataflow.left == [NODE]
        assert desk.dataflow.released == []


async def test_leases_ask_for_free_slots_only_and_not_one_by_one(
    tmp_path: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.rollout.slots.COALESCE_S", 10.0)
    staggered = facts(workflow=f"{WORKFLOWS}:staggered")
    async with bench(tmp_path, snapshot, num_slots=100, run_info=staggered) as desk:
        await asyncio.wait_for(desk.dataflow.until_stored(100), 60)
        asked = [lease.max_slots for lease in desk.dataflow.leases]
        assert asked[0] == 16 and min(asked) >= 4
        assert user_workflows.most_running == 16


async def test_a_free_slot_does_not_wait_for_long_answers_beside_it(
    tmp_path: Path, snapshot: Path
) -> None:
    """14 of 16 slots hang: less than a quarter is left, and all other work runs there."""
    mostly = facts(workflow=f"{WORKFLOWS}:hangs_at_first")
    async with bench(tmp_path, snapshot, num_slots=40, run_info=mostly, grace_s=0.1) as desk:
        await asyncio.wait_for(desk.dataflow.until_stored(26), 60)
        assert {lease.max_slots for lease in desk.dataflow.leases[1:]} <= {1, 2}


async def test_starting_until_a_version_is_live_then_live(tmp_path: Path, snapshot: Path) -> None:
    async with bench(tmp_path, snapshot, num_slots=4) as desk:
        await desk.dataflow.order(NodeDirectives(wanted=()))
        await eventually(lambda: desk.dataflow.beats)
        states = {beat.state for beat in desk.dataflow.beats}
        assert states <= {NodeState.STARTING, NodeState.LIVE}  # it may have seen number 0
        await desk.dataflow.order(NodeDirectives(wanted=(wanted(0),)))
        await asyncio.wait_for(desk.dataflow.until_stored(4), 60)
        assert all(lease.live[0].number == 0 for lease in desk.dataflow.leases)
        await eventually(lambda: desk.dataflow.beats[-1].state is NodeState.LIVE)


async def test_an_outage_in_mid_run_loses_nothing(tmp_path: Path, snapshot: Path) -> None:
    async with bench(tmp_path, snapshot, num_slots=400) as desk:
        await desk.dataflow.until_stored(40)
        await desk.dataflow.down()
        assert len(desk.dataflow.stored) < 400
        await asyncio.sleep(2)
        desk.dataflow.up()
        await asyncio.wait_for(desk.dataflow.until_stored(400), 60)
        await desk.drain()
        assert desk.acknowledged() == set(desk.dataflow.stored)
        assert len(desk.acknowledged()) == 400


async def test_a_lost_lease_answer_is_asked_for_again(tmp_path: Path, snapshot: Path) -> None:
    async with bench(tmp_path, snapshot, num_slots=8) as desk:
        desk.dataflow.lose_next_lease_answer = True
        await asyncio.wait_for(desk.dataflow.until_stored(8), 60)
        ids = [lease.request_id for lease in desk.dataflow.leases]
        assert ids[0] == ids[1] and len(set(ids)) < len(ids)


async def test_fenced_rows_are_not_acknowledged(tmp_path: Path, snapshot: Path) -> None:
    async with bench(tmp_path, snapshot, num_slots=8) as desk:
        taken = RowId("p0-0.1.1")
        desk.dataflow.fenced_rows.add(taken)
        await asyncio.wait_for(desk.dataflow.until_stored(7), 60)
        await desk.drain()
        assert taken not in desk.acknowledged()
        assert len(desk.acknowledged()) == 7


async def test_a_refused_row_is_an_error_in_the_log(tmp_path: Path, snapshot: Path) -> None:
    with structlog.testing.capture_logs() as lines:
        async with bench(tmp_path, snapshot) as desk:
            refused = RowId("p0-0.1.1")
            desk.dataflow.stored[refused] = b"somebody else's"
            desk.dataflow.waiting.extend((slot, 1) for slot in range(4))
            await eventually(lambda: len(desk.acknowledged()) == 3)
            assert refused not in desk.acknowledged()
    (line,) = [line for line in lines if line["event"] == "trajectory rejected"]
    assert (line["log_level"], line["row"]) == ("error", refused)


async def test_a_heartbeat_without_an_answer_is_sent_again_long_before_the_lease_ends(
    tmp_path: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.dataflow.client.dataflow.HEARTBEAT_TIMEOUT_S", 0.3)
    async with bench(tmp_path, snapshot) as desk:
        await eventually(lambda: desk.dataflow.beats)
        desk.dataflow.hang_next_beat_s = 4.0
        await eventually(lambda: not desk.dataflow.hang_next_beat_s)
        num_beats = len(desk.dataflow.beats)
        await eventually(lambda: len(desk.dataflow.beats) > num_beats, 3.0)


async def test_a_service_that_forgot_the_node_is_told_again(tmp_path: Path, snapshot: Path) -> None:
    async with bench(tmp_path, snapshot, num_slots=40) as desk:
        await desk.dataflow.until_stored(8)
        desk.dataflow.boot_ids.clear()
        await asyncio.wait_for(desk.dataflow.until_stored(40), 60)
        assert desk.dataflow.num_registered >= 2


async def test_a_node_whose_place_was_taken_stops_with_an_error(
    tmp_path: Path, snapshot: Path
) -> None:
    async with bench(tmp_path, snapshot) as desk:
        desk.dataflow.boot_ids[NODE] = "somebody newer"
        with pytest.raises(Fenced, match="node node-1 was registered by another process"):
            await asyncio.wait_for(desk.running, 60)


# --- versions -----------------------------------------------------------------------------------


async def test_a_damaged_version_leaves_the_old_one_live_until_it_is_mended(
    tmp_path: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.rollout.weight_loader.RETRY_S", 0.1)
    async with bench(tmp_path, snapshot, num_slots=4) as desk:
        await asyncio.wait_for(desk.dataflow.until_stored(4), 60)
        desk.fetch.damaged.add(1)
        await desk.dataflow.order(NodeDirectives(wanted=(wanted(1),)))
        await eventually(lambda: desk.fetch.num_tries >= 3)
        desk.dataflow.waiting.extend((slot, 1) for slot in range(4, 8))
        await asyncio.wait_for(desk.dataflow.until_stored(8), 60)
        assert desk.dataflow.beats[-1].live[0].number == 0
        desk.fetch.damaged.clear()
        await eventually(lambda: desk.dataflow.beats[-1].live[0].number == 1)
        desk.dataflow.waiting.extend((slot, 1) for slot in range(8, 12))
        await asyncio.wait_for(desk.dataflow.until_stored(12), 60)
        numbers = [row.turns[0].spans[0].number for row in desk.dataflow.trajectories()]
        assert numbers == [0] * 8 + [1] * 4


async def test_orders_that_overtook_each_other_never_bring_an_older_version_back(
    tmp_path: Path, snapshot: Path
) -> None:
    async with bench(tmp_path, snapshot) as desk:
        await desk.dataflow.order(NodeDirectives(wanted=(wanted(5),)))
        await eventually(lambda: desk.dataflow.beats and desk.dataflow.beats[-1].live)
        await eventually(lambda: desk.dataflow.beats[-1].live[0].number == 5)
        await desk.dataflow.order(NodeDirectives(wanted=(wanted(4),)))
        num_beats = len(desk.dataflow.beats)
        await eventually(lambda: len(desk.dataflow.beats) > num_beats + 3)
        assert desk.dataflow.beats[-1].live[0].number == 5
        await desk.dataflow.order(NodeDirectives(wanted=(wanted(3, incarnation=2),)))
        await eventually(lambda: desk.dataflow.beats[-1].live[0].incarnation == 2)


# --- leaving ------------------------------------------------------------------------------------


async def test_what_does_not_end_in_the_grace_period_is_handed_back(
    tmp_path: Path, snapshot: Path
) -> None:
    hanging = facts(workflow=f"{WORKFLOWS}:hangs")
    async with bench(tmp_path, snapshot, num_slots=5, grace_s=0.2, run_info=hanging) as desk:
        await eventually(lambda: not desk.dataflow.waiting)
        await eventually(lambda: desk.dataflow.beats[-1].num_held == 5)
        await desk.drain()
        assert len(desk.dataflow.released) == 5
        assert desk.dataflow.stored == {} and desk.acknowledged() == set()
        assert desk.dataflow.left == [NODE]


async def test_a_finished_run_ends_the_node(tmp_path: Path, snapshot: Path) -> None:
    async with bench(tmp_path, snapshot) as desk:
        await desk.dataflow.order(NodeDirectives(wanted=(wanted(0),), finished=True))
        await asyncio.wait_for(desk.running, 60)


# --- failures are records -----------------------------------------------------------------------


async def test_a_reward_that_cannot_be_imported_ends_the_node_aloud(
    tmp_path: Path, snapshot: Path
) -> None:
    lost = facts(reward="no_such_module_here:reward")
    async with bench(tmp_path, snapshot, num_slots=4, run_info=lost) as desk:
        with pytest.raises(RewardError, match="cannot import 'no_such_module_here'"):
            await asyncio.wait_for(desk.running, 60)
        assert desk.dataflow.stored == {}


async def test_failed_rollouts_are_delivered_without_a_reward(
    tmp_path: Path, snapshot: Path
) -> None:
    async with bench(tmp_path, snapshot, num_slots=4, run_info=facts(reward="")) as desk:
        await asyncio.wait_for(desk.dataflow.until_stored(4), 60)
        for row in desk.dataflow.trajectories():
            assert row.reward is None
            assert row.outcome.kind is OutcomeKind.FAILED
            assert row.outcome.reason == FailureKind.REWARD
            assert "ctx.reward()" in row.outcome.detail


# --- files --------------------------------------------------------------------------------------


def test_half_a_line_of_acknowledgements_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "acks.txt"
    path.write_text("p0-1.0.1\np0-1.1.1\np0-1.")
    ack_log = AckLog(path)
    ack_log.append([RowId("p0-2.0.1")])
    ack_log.close()
    assert path.read_text() == "p0-1.0.1\np0-1.1.1\np0-2.0.1\n"
    with contextlib.closing(AckLog(path)):
        assert path.read_text().endswith("p0-2.0.1\n")
