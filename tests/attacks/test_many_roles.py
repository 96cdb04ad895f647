# SPDX-License-Identifier: Apache-2.0
"""A node names a role per turn, and each has two statistics in the commit of its batch. A commit
that the dataflow refuses would end the trainer at every start."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.contract.dataflow_server import POLICY as SERVED
from tests.contract.dataflow_server import FakeTrainer, dataflow, small_config
from tests.contract.test_dataflow_http import SmallNode
from tests.unit.dataflow.service.test_validate import POLICY, is_published, trajectory, turn

from penstock.bounds import MAX_ROW_ROLES, MAX_SHOWN_ROLES, OTHER_ROLES
from penstock.dataflow.client.statistics import within_bounds
from penstock.dataflow.service.nodes.validate import summarise
from penstock.dataflow.service.trainers.messages import MAX_STATS, BatchRequest, CommitRequest
from penstock.trainer.batches import Roles
from penstock.trainer.learner import Stats
from penstock.trainer.signals.monitor import SignalMonitor, from_json, to_json
from penstock.types import GroupId, Manifest, OutcomeKind, RowId, RowSummary, SealedGroup
from penstock.wire.codec import MSGPACK, decode, encode
from penstock.wire.routes import DEFAULT_MAX_BODY_BYTES

WIDE = "\U0001d400"
"""Four bytes in UTF-8."""
BASIC = {"reward/mean": 0.25, "tokens/trained": 5.0}
FLOODS = {
    "many": {f"x{n}": 1.0 for n in range(2 * MAX_STATS)},
    "large": {f"{n:06}" + WIDE * 250: 1.0 for n in range(MAX_STATS // 2)},
    "long": {"x" * 257: 1.0},
}
"""What a loss of the user's own could return, or a trainer that counts something of rows."""


@pytest.mark.parametrize("num", [MAX_ROW_ROLES, MAX_ROW_ROLES + 1])
def test_a_row_has_few_roles(num: int) -> None:
    row = trajectory(turn(), turn(), *(turn(role=f"role {number}") for number in range(num)))
    found = summarise(row, "d", is_published)
    if num <= MAX_ROW_ROLES:
        assert isinstance(found, RowSummary)
    else:
        assert found == f"its turns have {num} roles; at most {MAX_ROW_ROLES}"


def test_the_statistics_of_a_batch_name_few_roles() -> None:
    """Of rows that were stored before the door counted roles, too."""
    num = 3 * MAX_SHOWN_ROLES
    largest, stranger = {"solver": 1000, OTHER_ROLES: 5}, {f"role {n}": n + 1 for n in range(num)}
    rows = [_row(0, largest, reward=1.0), _row(1, stranger, reward=0.0)]
    group = SealedGroup(group_id=GroupId("g"), task_key="", rows=tuple(rows))
    roles = Roles.of(Manifest(consumer=POLICY, seq=1, trains_from=0, groups=(group,)))
    found = roles.figures(np.array([1.0, 0.0]))
    assert len(found) == MAX_SHOWN_ROLES + 1
    assert found["solver"] == (1.0, 1000.0)
    shown = range(num - MAX_SHOWN_ROLES + 1, num)
    assert {name for name in found if name.startswith("role ")} == {f"role {n}" for n in shown}
    assert sum(tokens for _, tokens in found.values()) == 1005 + num * (num + 1) / 2
    num_others = 1 + num - len(shown)
    assert found[OTHER_ROLES][0] == pytest.approx(1 / num_others), "one of them earned 1"


def _stats(*roles: str) -> Stats:
    tokens = {f"tokens/role/{role}": 1.0 for role in roles}
    rewards = {f"{model}reward/role/{role}": 0.5 for role in roles for model in ("", "critic/")}
    return Stats(skipped=None, values=BASIC | tokens | rewards)


def test_the_statistics_of_a_run_name_few_roles() -> None:
    """New names in each batch were new curves for ever, in the run's file and at its trackers."""
    honest = ("solver", "judge", OTHER_ROLES)
    batches = [
        _stats(*honest, *(f"a/role {batch} {number}\n" for number in range(100)))
        for batch in range(5)
    ]
    monitor = SignalMonitor(lambda node: None, roles={"judge"})
    reported = [monitor.reported(stats) for stats in batches[:3]]
    saved = to_json(monitor.state)
    reported += [monitor.reported(stats) for stats in batches[3:]]
    names = {name for values in reported for name in values}
    assert names >= _stats(*honest).values.keys()
    assert len(names) == len(BASIC) + 3 * (MAX_SHOWN_ROLES + 2)
    resumed = SignalMonitor(lambda node: None, from_json(saved), roles={"judge"})
    assert [resumed.reported(stats) for stats in batches[3:]] == reported[3:], "trained again"


def test_roles_with_the_most_tokens_are_named_first() -> None:
    monitor = SignalMonitor(lambda node: None)
    stats = _stats("solver", *(f"{number}" for number in range(MAX_SHOWN_ROLES)))
    values = dict(stats.values) | {"tokens/role/solver": 5.0}
    assert "reward/role/solver" in monitor.reported(replace(stats, values=values))


def _row(slot: int, roles: dict[str, int], reward: float) -> RowSummary:
    return RowSummary(
        row_id=RowId(f"g.{slot}.1"),
        digest="d",
        reward=reward,
        outcome=OutcomeKind.COMPLETED,
        sampled={POLICY: sum(roles.values())},
        versions={POLICY: ((1, 0),)},
        roles={POLICY: roles},
    )


@pytest.mark.parametrize("name", FLOODS)
def test_statistics_fit_into_a_commit(name: str) -> None:
    stats = within_bounds(FLOODS[name] | BASIC)
    body = CommitRequest(incarnation=1, number=1, skipped="x" * 2000, stats=stats)
    payload = encode(body)
    assert len(payload) <= DEFAULT_MAX_BODY_BYTES
    assert decode(payload, CommitRequest, media_type=MSGPACK) == body
    assert stats.items() >= BASIC.items()
    assert within_bounds(stats) is stats
    assert len(stats) == {"many": MAX_STATS, "long": 2}.get(name, len(stats))


async def test_no_commit_is_refused_for_its_statistics(tmp_path: Path) -> None:
    with dataflow(tmp_path, small_config()) as running:
        trainer, node = await asyncio.to_thread(FakeTrainer, running), SmallNode(running)
        await node.join()
        await node.deliver(*(await node.client.lease(node.request())).grants)
        request = BatchRequest(consumer=SERVED, seq=1, incarnation=1)
        assert (await asyncio.to_thread(trainer.client.batch, request)).manifest
        stats = FLOODS["many"] | FLOODS["large"] | BASIC
        commit = CommitRequest(incarnation=1, number=1, stats=stats)
        await asyncio.to_thread(trainer.client.commit, SERVED, 1, commit)
        status = await asyncio.to_thread(running.reader().status)
        assert status.policies[0].number == 1
        assert status.policies[0].stats.items() >= BASIC.items()
        await node.client.close()
