# SPDX-License-Identifier: Apache-2.0
"""`open_run` over real ledgers: everything delivered is there, what was freed says so, and memory
does not grow with the run."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
from blake3 import blake3
from tests.unit.audit.ledgers import Run as ServiceRun
from tests.unit.audit.ledgers import always_completed, small_config, some_failures
from tests.unit.audit.partitioned_ledgers import synced_run
from tests.unit.audit.tampering import one, partition_1
from tests.unit.gateway.chatml import ids_of, write_snapshot

from penstock.config import RunConfig, dump
from penstock.dataflow.ledger import segments
from penstock.dataflow.ledger.compaction import Compactor
from penstock.dataflow.ledger.store import Ledger
from penstock.dataflow.records import (
    FateRecord,
    FateState,
    GroupRecord,
    GroupState,
    MetaRecord,
    Record,
    RowRecord,
    gone_key,
)
from penstock.dataflow.service.trainers.messages import CheckpointsRequest
from penstock.errors import StoreError, WeightsError
from penstock.runs.history import open_run
from penstock.runs.recorded_trajectory import PayloadState
from penstock.types import (
    FinishReason,
    GroupId,
    NodeId,
    Outcome,
    OutcomeKind,
    PolicyName,
    RowId,
    RowSummary,
    SamplingSpec,
    Trajectory,
    Turn,
    VersionSpan,
    log_probs,
    token_ids,
)
from penstock.wire.codec import encode

POLICY = PolicyName("policy")


def keeping(keep: str) -> RunConfig:
    config = small_config()
    flow = config.dataflow.model_copy(update={"keep": keep})
    return config.model_copy(update={"dataflow": flow})


async def trained(folder: Path, config: RunConfig, num_steps: int = 6) -> ServiceRun:
    """A run whose trainer keeps only its newest checkpoints, compacted after each step."""
    run = ServiceRun(folder, config, choose=always_completed)
    await run.start()
    for seq in range(1, num_steps + 1):
        await run.step()
        body = CheckpointsRequest(incarnation=1, retained=((seq - 1, seq - 1), (seq, seq)))
        await run.service.trainers.checkpoints("policy", body)
        run.restart_service()
        await Compactor(run.service.process.ledger, bytes_per_s=1e12).sweep()
    return run


async def test_every_delivered_trajectory_is_read_from_a_live_run(tmp_path: Path) -> None:
    service = ServiceRun(tmp_path, small_config(), choose=some_failures)
    await service.start()
    for _ in range(3):
        await service.step()
    with open_run(tmp_path) as run:
        found = [*run.trajectories()]
        assert len(found) == run.num_trajectories() == one(tmp_path, "SELECT count(*) FROM rows")[0]
        assert {trajectory.state for trajectory in found} == {PayloadState.STORED}
        outcomes = Counter(trajectory.outcome.value for trajectory in found)
        assert outcomes["failed"] >= 3 and outcomes["cancelled"] == 1 and outcomes["truncated"]
        failed = [*run.trajectories(outcome="failed")]
        assert len(failed) == outcomes["failed"] and all(t.reward is None for t in failed)
        by_step = Counter(step for trajectory in found for step in trajectory.steps)
        assert by_step == {1: 12, 2: 12, 3: 12}
        first = next(t for t in found if t.steps == (1,) and t.slot == 2)
        assert first.versions == ("policy@1.0",) and first.reward == 0.5
        assert first.task is not None and first.task_payload == first.task.payload
        assert [*first.turns[0].sampled_ids] == [*token_ids([2, first.epoch, 7])]
        assert first.uses[0].fate == "sealed" and first.uses[0].batch == 1
        await service.step()  # the run goes on, and an open reader sees it
        assert run.num_trajectories() > len(found)
    service.close()


async def test_filters_and_orders(tmp_path: Path) -> None:
    service = ServiceRun(tmp_path, small_config(), choose=some_failures)
    await service.start()
    for skipped in ("", "no gradient", "", ""):
        await service.step(skipped=skipped)
    service.close()
    with open_run(tmp_path) as run:
        batches = [*run.batches()]
        assert [(batch.batch, batch.step) for batch in batches] == [
            (1, 1),
            (2, None),
            (3, 2),
            (4, 3),
        ]
        assert batches[1].skipped == "no gradient"
        wanted = [row_id for batch in batches[2:] for row_id in batch.row_ids]
        assert [one.row_id for one in run.trajectories(steps=(2, 3))] == wanted
        assert [one.row_id for one in run.trajectories(steps=(2, None))] == wanted
        assert [one.row_id for one in run.trajectories(steps=1)] == [*batches[0].row_ids]
        group = [one.row_id for one in run.trajectories(group="p0-1")]
        assert group and all(row_id.startswith("p0-1.") for row_id in group)
        oldest = [one.row_id for one in run.trajectories()]
        assert [one.row_id for one in run.trajectories(order="newest")] == oldest[::-1]
        for steps in (None, 2):
            best = [one.reward for one in run.trajectories(order="best", steps=steps)]
            worst = [one.reward for one in run.trajectories(order="worst", steps=steps)]
            scores = [reward for reward in worst if reward is not None]
            assert best == sorted(scores, reverse=True) and len(best) == len(worst) > 5
        assert [one.row_id for one in run.trajectories(policy="policy")] != []
        assert [str(version) for version in run.versions()] == [
            "policy@1.0",
            "policy@1.1",
            "policy@1.2",
            "policy@1.3",
        ]
        with pytest.raises(StoreError, match="no policy 'other'; it trains policy"):
            next(iter(run.batches(policy="other")))
        with pytest.raises(StoreError, match="no policy 'other'"):
            run.trajectories(policy="other")
        assert [*run.trajectories(steps=0)] == [], "steps begin with 1"


async def test_step_one_of_a_finished_run_is_kept_by_default(tmp_path: Path) -> None:
    service = await trained(tmp_path, small_config())
    assert one(tmp_path, "SELECT count(*) FROM freed")[0] >= 12
    service.close()
    with open_run(tmp_path) as run:
        assert run.trajectories().freed == 0
        first = [*run.trajectories(steps=1)]
        assert len(first) == 12 and all(trajectory.turns for trajectory in first)


async def test_what_was_freed_is_reported(tmp_path: Path) -> None:
    service = await trained(tmp_path, keeping("sample(1e-9)"))
    service.close()
    with open_run(tmp_path) as run:
        found = [*run.trajectories()]
        gone = [one for one in found if one.state is PayloadState.FREED]
        assert len(found) == run.num_trajectories() and len(gone) >= 36
        assert run.trajectories().freed >= len(gone)
        assert all(one.payload is None and one.turns == () and one.text == "" for one in gone)
        assert all(one.reward is not None and one.steps for one in gone), "the ledger knows them"
        assert any(one.turns for one in found), "the newest batches are there"


async def test_forgotten_and_damaged_trajectories_say_so(tmp_path: Path) -> None:
    service = await trained(tmp_path, small_config(), 2)
    rows = [*service.service.process.ledger.tables.read(RowRecord)]
    mark = MetaRecord(key=gone_key(rows[0].row_id), value="forgotten")
    await service.service.process.ledger.write([mark])
    service.close()
    path = segments.segment_path(tmp_path / "ledger" / "segments", rows[-1].segment)
    data = bytearray(path.read_bytes())
    data[rows[-1].offset + 20] ^= 1
    path.write_bytes(data)
    with open_run(tmp_path) as run:
        states = {one.row_id: (one.state, one.detail) for one in run.trajectories()}
    assert states[rows[0].row_id][0] is PayloadState.FORGOTTEN
    assert states[rows[-1].row_id][0] is PayloadState.UNREADABLE
    assert "damaged" in states[rows[-1].row_id][1]


async def test_compaction_under_an_open_reader_loses_nothing(tmp_path: Path) -> None:
    """The page is read, then its segments move, then its payload is asked for."""
    service = ServiceRun(tmp_path, keeping("sample(1e-9)"), choose=always_completed)
    await service.start()
    for seq in range(1, 7):
        await service.step()
        body = CheckpointsRequest(incarnation=1, retained=((seq, seq),))
        await service.service.trainers.checkpoints("policy", body)
    for _ in range(2):
        service.restart_service()  # so that the segment is closed
        for node in service.nodes:
            await node.join()
            await node.work(4)
    with open_run(tmp_path) as run:
        reading = iter(run.trajectories(order="newest"))
        next(reading)
        compactor = Compactor(service.service.process.ledger, bytes_per_s=1e12)
        await compactor.sweep()
        assert compactor.moved_bytes > 0
        states = Counter(one.state for one in reading)
        assert states[PayloadState.STORED] > 0 and not states[PayloadState.UNREADABLE]
    service.close()


async def test_a_killed_run_is_read(tmp_path: Path) -> None:
    """Its files at any moment, with the write-ahead log that a kill leaves behind."""
    service = ServiceRun(tmp_path / "run", small_config(), choose=always_completed)
    await service.start()
    await service.step()
    killed = Path(shutil.copytree(tmp_path / "run", tmp_path / "killed"))
    assert (killed / "ledger" / "ledger.db-wal").stat().st_size > 0
    with open_run(killed) as run:
        found = [*run.trajectories()]
        assert len(found) == run.num_trajectories() > 12 and all(one.turns for one in found)
        assert not run.is_running
    service.close()


async def test_partitions_are_read_together(tmp_path: Path) -> None:
    await synced_run(tmp_path)
    rows = [one(path, "SELECT count(*) FROM rows")[0] for path in (tmp_path, partition_1(tmp_path))]
    with open_run(tmp_path) as run:
        found = [*run.trajectories()]
        assert len(found) == sum(rows) and min(rows) > 0
        far = [trajectory for trajectory in found if trajectory.group_id.startswith("p1-")]
        assert len(far) == rows[1] and any(t.steps and t.turns for t in far)
        ats = [trajectory.delivered_at for trajectory in found]
        assert ats == sorted(ats)


def test_metrics_and_tables(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("pandas")

    async def made() -> None:
        service = ServiceRun(tmp_path, small_config(), choose=some_failures)
        await service.start()
        for _ in range(2):
            await service.step()
        service.close()

    asyncio.run(made())
    lines = [json.dumps({"step": 1, "reward": 0.5}), json.dumps({"step": 2, "reward": 1, "kl": 2})]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 3, "rew')
    with open_run(str(tmp_path)) as run:
        assert [record["step"] for record in run.metrics()] == [1, 2], "no half-written line"
        metrics = run.metrics().to_arrow()
        assert metrics.column_names == ["step", "reward", "kl"]
        assert metrics.to_pydict() == {"step": [1, 2], "reward": [0.5, 1.0], "kl": [None, 2]}
        table = run.trajectories().to_pandas()
        assert len(table) == run.num_trajectories()
        assert (
            table["reward"].isna().sum() == (table["outcome"].isin(["failed", "cancelled"])).sum()
        )
        assert sorted(table["step"].dropna().unique()) == [1, 2]
        assert len(run.batches().to_arrow()) >= 2 and len(run.versions().to_pandas()) == 3


def test_a_ledger_in_postgresql_and_a_folder_without_a_run_are_refused(tmp_path: Path) -> None:
    config = small_config()
    flow = config.dataflow.model_copy(update={"store": "postgresql://127.0.0.1/runs"})
    (tmp_path / "config.yaml").write_text(dump(config.model_copy(update={"dataflow": flow})))
    with pytest.raises(StoreError, match="PostgreSQL, and open_run reads ledgers in files only"):
        open_run(tmp_path)
    (tmp_path / "config.yaml").write_text(dump(config))
    with pytest.raises(StoreError, match="there is no ledger at"):
        open_run(tmp_path)


# --- ledgers written directly ------------------------------------------------------------------


def trajectory(number: int, text: str = "hello") -> Trajectory:
    turn = Turn(
        policy=POLICY,
        parent=-1,
        prompt_ids=token_ids(ids_of("say it>")),
        sampled_ids=token_ids(ids_of(text)),
        logprobs=log_probs([-0.5] * len(text)),
        spans=(VersionSpan(start=0, end=len(text), incarnation=1, number=0),),
        sampling=SamplingSpec(),
        finish=FinishReason.LENGTH,
    )
    group_id = GroupId(f"p0-{number}")
    return Trajectory(
        row_id=RowId(f"{group_id}.0.1"),
        group_id=group_id,
        slot=0,
        epoch=1,
        attempt=1,
        node_id=NodeId("node-0"),
        turns=(turn,),
        reward=1.0,
        outcome=Outcome(kind=OutcomeKind.COMPLETED),
    )


def records(ledger: Ledger, number: int) -> list[Record]:
    made = trajectory(number)
    payload = encode(made)
    at = ledger.place(payload)
    task = {"key": f"k{number}", "source": "s", "ordinal": number, "payload": {"q": number}}
    return [
        GroupRecord(
            group_id=made.group_id,
            partition=0,
            issue=number,
            source="s",
            ordinal=number,
            task_key=f"k{number}",
            task=json.dumps({**task, "workflow": "w", "seed": 1}),
            num_slots=1,
            due="{}",
            why="{}",
            state=GroupState.CLOSED,
            reason="",
            issued_at=0.0,
            ended_at=0.0,
        ),
        RowRecord(
            summary=RowSummary(
                row_id=made.row_id,
                digest=blake3(payload).hexdigest(),
                outcome=OutcomeKind.COMPLETED,
                reward=1.0,
                sampled={POLICY: 5},
                versions={POLICY: ((1, 0),)},
            ),
            group_id=made.group_id,
            slot=0,
            epoch=1,
            node_id=made.node_id,
            segment=at.segment,
            offset=at.offset,
            length=at.length,
            delivered_at=float(number),
            arrival=number,
        ),
        FateRecord(
            consumer=POLICY,
            group_id=made.group_id,
            task_key=f"k{number}",
            source="s",
            state=FateState.SEALED,
            seq=1 + number // 64,
        ),
    ]


async def write_ledger(folder: Path, num_rows: int) -> None:
    (folder / "config.yaml").write_text(dump(small_config()))
    ledger = Ledger(folder / "ledger")
    for start in range(1, num_rows + 1, 1000):
        numbers = range(start, min(start + 1000, num_rows + 1))
        await ledger.write([record for number in numbers for record in records(ledger, number)])
    ledger.close()


async def test_text_needs_the_tokenizer_of_the_run(tmp_path: Path) -> None:
    await write_ledger(tmp_path, 1)
    with open_run(tmp_path) as run:
        [found] = run.trajectories()
        with pytest.raises(WeightsError, match=r"no version in .*weights has a tokenizer\.json"):
            found.decode()
    model = write_snapshot(tmp_path / "model")
    config = small_config()
    models = {"policy": config.models["policy"].model_copy(update={"init": str(model)})}
    text = dump(config.model_copy(update={"models": models}))
    (tmp_path / "config.yaml").write_text(text)
    with open_run(tmp_path) as run:
        [found] = run.trajectories()
        [turn] = found.decode()
        assert (turn.prompt, turn.answer) == ("say it>", "hello")
        assert turn.versions == ("policy@1.0",) and turn.finish == "length"
        assert found.text == "say it>hello"


@pytest.mark.parametrize(
    "num_rows",
    [20_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
    ids=["20k", "100k"],
)
async def test_memory_does_not_grow_with_the_run(tmp_path: Path, num_rows: int) -> None:
    """Peaks of allocated blocks and of resident memory, against those of the first thousand."""
    await write_ledger(tmp_path, num_rows)

    first: list[tuple[int, int]] = []
    every: list[tuple[int, int]] = []
    with open_run(tmp_path) as run:
        next(iter(run.trajectories()))  # what is loaded once
        began = sys.getallocatedblocks()
        for number, found in enumerate(run.trajectories(), 1):
            assert found.turns and found.uses
            if number % 97 == 0:
                every.append((sys.getallocatedblocks() - began, resident_bytes()))
            if number == 1000:
                first = [*every]
    assert len(every) == num_rows // 97 and len(first) == 10
    assert max(blocks for blocks, _ in every) <= 1.2 * max(blocks for blocks, _ in first)
    assert max(size for _, size in every) <= 1.2 * max(size for _, size in first)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])
