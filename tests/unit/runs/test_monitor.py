# SPDX-License-Identifier: Apache-2.0
"""Watching a run: the polling thread, the reward curve, the newest error."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import uvicorn
from rich.console import Console
from tests.unit.cli.sample_statuses import policy_status, status, view

from penstock.cli.live_panel import draw
from penstock.dataflow.client.dataflow import StatusClient
from penstock.dataflow.service.operators.messages import EvaluationStatus, Status
from penstock.fleet.ports import LOOPBACK, free_port
from penstock.runs import monitor
from penstock.runs.monitor import ErrorTail, RewardCurve, StatusPoller, resume_note
from penstock.trainer.signals.alarms import ALARM_AFTER, Cause, NoSignalStreak
from penstock.types import PolicyName
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.routes import Call, Route
from penstock.wire.server import build_app
from penstock.wire.serving import server


def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up_at, "did not happen in time"
        time.sleep(0.02)


class FakeDataflow:
    """Answers `/v1/status` over HTTP with what the test put there."""

    def __init__(self, signer: Signer, port: int) -> None:
        self.status = status(policy_status(number=0, reward=None))
        route = Route(
            method="GET",
            path="/v1/status",
            handler=self.answer,
            roles=frozenset({Role.READER}),
            summary="Status.",
            response=Status,
        )
        app = build_app([route], signer.verifier(Audience.DATAFLOW), title="fake")
        self.server: uvicorn.Server = server(app, LOOPBACK, port)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        until(lambda: self.server.started)

    async def answer(self, call: Call) -> Status:
        return self.status

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(timeout=60.0)


@pytest.fixture
def signer(tmp_path: Path) -> Signer:
    return Signer.create(tmp_path / "keys", "reverse")


def test_the_poller_recovers_when_the_dataflow_restarts(
    signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(monitor, "POLL_INTERVAL_S", 0.05)
    port = free_port()

    def make_reader() -> StatusClient:
        token = signer.mint(Role.READER, [Audience.DATAFLOW], ttl_s=3600)
        return StatusClient(f"http://{LOOPBACK}:{port}", token, patience_s=0.1)

    with StatusPoller("reverse", make_reader) as watch:
        assert watch.view().status is None
        assert watch.progress() == 0
        first = FakeDataflow(signer, port)
        until(lambda: watch.view().status is not None)
        before = watch.progress()
        first.stop()
        until(lambda: watch.view().unreachable_s > 0.5)
        second = FakeDataflow(signer, port)
        assert not watch.is_evaluating()
        evaluation = EvaluationStatus(
            policy=PolicyName("policy"),
            last=0,
            scores={"held_out": 0.5},
            best=0,
            running=5,
            num_answered=2,
            num_questions=6,
        )
        ended = status(policy_status(number=5, reward=0.7))
        second.status = replace(ended, evaluation=evaluation)
        until(watch.is_evaluating)
        second.status = replace(ended, evaluation=replace(evaluation, running=None), finished=True)
        until(watch.is_finished)
        assert not watch.is_evaluating()
        assert watch.progress() == before + 5
        assert watch.view().curves == {"policy": [0.7]}
        until(lambda: watch.view().unreachable_s < 0.5)
        second.stop()


def test_the_curve_is_in_step_order_and_has_an_eta() -> None:
    curve = RewardCurve()
    assert curve.eta_s(10, now=0.0) is None
    for number in range(5):
        curve.add(policy_status(number=number, reward=number / 10), now=10.0 + 2.0 * number)
    assert curve.rewards == {0: 0.0, 1: 0.1, 2: 0.2, 3: 0.3, 4: 0.4}
    assert curve.eta_s(10, now=18.0) == pytest.approx(12.0)
    assert curve.eta_s(10, now=19.0) == pytest.approx(11.0)


def test_a_trainer_that_rewinds_resets_the_eta() -> None:
    curve = RewardCurve()
    curve.add(policy_status(number=30), now=0.0)
    curve.add(policy_status(number=31), now=1.0)
    curve.add(policy_status(number=20), now=5.0)
    assert curve.eta_s(40, now=5.0) is None
    for number in (21, 22, 23):
        curve.add(policy_status(number=number), now=number - 15.0)
    assert curve.eta_s(40, now=8.0) == pytest.approx(17.0)


def test_a_trainer_that_rewinds_takes_back_the_rewards_of_abandoned_steps() -> None:
    curve = RewardCurve()
    for number in (30, 31, 20):
        curve.add(policy_status(number=number, reward=number / 100), now=0.0)
    assert curve.rewards == {20: 0.2}


def test_the_eta_leaves_out_the_start_of_the_services() -> None:
    """The first step of a run waits for every service to load; the others do not."""
    curve = RewardCurve()
    curve.add(policy_status(number=0), now=11.0)
    curve.add(policy_status(number=1), now=44.0)
    assert curve.eta_s(130, now=44.0) is None, "one step says nothing about the next"
    curve.add(policy_status(number=2), now=45.0)
    curve.add(policy_status(number=3), now=46.0)
    assert curve.eta_s(130, now=46.0) == pytest.approx(127.0)


@pytest.mark.parametrize(
    ("resumed_at", "repeats_to", "text"),
    [
        (10, 19, "resumed from the checkpoint at step 10; steps 11–19 are repeated"),
        (18, 19, "resumed from the checkpoint at step 18; step 19 is repeated"),
        (19, 0, ""),
    ],
)
def test_a_step_that_goes_back_is_explained(resumed_at: int, repeats_to: int, text: str) -> None:
    now = replace(policy_status(), resumed_at=resumed_at, repeats_to=repeats_to)
    assert resume_note(now) == text


def test_a_failed_rollout_is_shown_with_the_last_line_of_its_detail(tmp_path: Path) -> None:
    log = tmp_path / "node-0.log"
    failure = {"reason": "reward", "detail": "Traceback …\nKeyError: 'boom'", "num_failed": 1}
    lines = [
        {**failure, "level": "warning", "msg": "rollout failed"},
        {"level": "warning", "msg": "slow", "detail": "no news"},
    ]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert (
        ErrorTail(lambda: {"node-0": log}).newest()
        == "node-0: rollout failed (reward): KeyError: 'boom'"
    )


def test_an_alarm_is_shown_with_its_cause_within_the_width(tmp_path: Path) -> None:
    log = tmp_path / "trainer-policy.log"
    idle = NoSignalStreak(counts={Cause.EQUAL_REWARDS: ALARM_AFTER})
    line = {"level": "error", "msg": "this run may learn nothing", "why": idle.alarm}
    log.write_text(json.dumps(line) + "\n")
    note = ErrorTail(lambda: {"trainer-policy": log}).newest()
    begins = (
        "trainer-policy: this run may learn nothing: 3 consecutive batches had no learning "
        "signal (3 equ"
    )
    assert note is not None and note.startswith(begins)
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(draw(view(status(), note=note), 100))
    assert begins in console.export_text()


def test_the_newest_error_of_all_logs_is_shown_once(tmp_path: Path) -> None:
    log = tmp_path / "node-0.log"
    tail = ErrorTail(lambda: {"node-0": log, "node-1": tmp_path / "absent.log"})
    assert tail.newest() is None
    log.write_text(json.dumps({"msg": "fine", "level": "info"}) + "\n")
    assert tail.newest() is None
    trace = "Traceback …\nValueError: no such file"
    with log.open("a") as out:
        out.write(json.dumps({"msg": "load failed", "level": "error", "exception": trace}) + "\n")
        out.write('{"msg": "half a li')
    assert tail.newest() == "node-0: load failed: ValueError: no such file"
    assert tail.newest() is None
    with log.open("a") as out:
        out.write('ne", "level": "error"}\n')
    assert tail.newest() == "node-0: half a line"
