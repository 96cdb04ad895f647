# SPDX-License-Identifier: Apache-2.0
"""Two policies in the same rows over real HTTP: each is judged by the reward of its own role, and
neither trains with a partner that has moved on too far."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from tests.contract.dataflow_server import RunningDataflow, dataflow
from tests.contract.test_route import (
    STUDENT,
    TEACHER,
    OneBatch,
    delivery,
    roll_out,
    turn,
    two_policies,
)

from penstock.audit import audit
from penstock.config import RunConfig, dump
from penstock.config.loader import parse
from penstock.dataflow.core.leasing import Grant
from penstock.dataflow.ledger.recorded import open_recorded_run
from penstock.dataflow.records import FateRecord
from penstock.dataflow.service.nodes.messages import Delivery
from penstock.dataflow.service.operators.messages import PolicyStatus
from penstock.dataflow.service.trainers.messages import (
    BatchRequest,
    CommitRequest,
    PublishRequest,
)
from penstock.types import Trajectory
from penstock.wire.auth import Role
from penstock.wire.codec import decode, encode


def configured(**more: object) -> RunConfig:
    config = two_policies("{route: by-policy}")
    overrides = [f"dataflow.{key}={value}" for key, value in more.items()]
    return parse(dump(config), origin="run.yaml", overrides=overrides)


def solved_and_judged(grant: Grant) -> Delivery:
    """In every row the student solves and earns 1, the teacher judges and earns its slot."""
    made = delivery(grant)
    record = replace(
        decode(bytes(made.payload), Trajectory),
        turns=(turn(STUDENT, 3, "solve"), turn(TEACHER, 5, "judge")),
        role_rewards={"solve": 1.0, "judge": float(grant.slot)},
    )
    return replace(made, payload=memoryview(encode(record)))


def started(running: RunningDataflow) -> tuple[OneBatch, OneBatch]:
    student, teacher = OneBatch(running, STUDENT), OneBatch(running, TEACHER)
    student.begin()
    teacher.begin()
    asyncio.run(roll_out(running, solved_and_judged))
    return student, teacher


def of_policy(running: RunningDataflow, policy: str) -> PolicyStatus:
    [found] = [one for one in running.reader().status().policies if one.policy == policy]
    return found


def test_one_roles_group_is_dropped_while_the_others_is_kept(tmp_path: Path) -> None:
    config = configured(rules="[{admit: reward-spread}]")
    with dataflow(tmp_path, config) as running:
        _, teacher = started(running)
        manifest, batch = teacher.take()
        assert {row.reward_for(TEACHER, None) for row in manifest.rows} == {0.0, 1.0}
        assert batch.roles.own is not None
        [solve] = of_policy(running, STUDENT).parts
        [judge] = of_policy(running, TEACHER).parts
        assert (solve.role, solve.reward_mean) == ("solve", 1.0)
        assert solve.dropped == {"uniform_reward": solve.groups} and solve.groups > 0
        assert (judge.role, judge.reward_mean, judge.dropped) == ("judge", 0.5, {})
        assert judge.tokens == judge.rows == 2 * judge.groups
    recorded = open_recorded_run(tmp_path / "ledger")
    fates = {(one.consumer, one.state) for one in recorded.coordinator.read(FateRecord)}
    recorded.close()
    assert {state for consumer, state in fates if consumer == STUDENT} == {"dropped"}
    assert {state for consumer, state in fates if consumer == TEACHER} <= {"admitted", "sealed"}
    (tmp_path / "config.yaml").write_text(dump(config))
    assert [check for check in audit(tmp_path).checks if not check.ok] == []


@pytest.mark.parametrize("bound", [None, 1, 0])
def test_no_one_trains_with_a_partner_beyond_its_lag(tmp_path: Path, bound: int | None) -> None:
    """The teacher publishes version 1 before the student's batch is sealed; its tokens are of
    version 0."""
    config = configured(max_partner_lag="null" if bound is None else bound)
    with dataflow(tmp_path, config) as running:
        student, teacher = started(running)
        teacher.take()
        teacher.client.commit(TEACHER, 1, CommitRequest(incarnation=1, number=1))
        digests = {"manifest_digest": "1" * 64, "weights_digest": "2.0"}
        teacher.client.publish(TEACHER, PublishRequest(incarnation=1, number=1, **digests))
        request = BatchRequest(consumer=STUDENT, seq=1, incarnation=1, wait_s=0.0)
        manifest = student.client.batch(request).manifest
        found = of_policy(running, STUDENT)
        dropped = sum(part.dropped.get("partner_lag", 0) for part in found.parts)
        if bound == 0:
            assert manifest is None and dropped > 0 and found.partner_lag == {}
            assert running.reader().status().wasted_tokens["partner_lag"] > 0
        else:
            assert manifest is not None and not dropped
            assert found.partner_lag == {TEACHER: {"1": len([*manifest.rows])}}
        headers = {"authorization": f"Bearer {running.token(Role.READER)}"}
        with urlopen(Request(f"{running.url}/metrics", headers=headers), timeout=60) as answer:
            text = answer.read().decode()
        assert ('reason="partner_lag",role="solve"' in text) == (bound == 0)
        assert ('partner="teacher",policy="student",versions="1"' in text) == (bound != 0)
