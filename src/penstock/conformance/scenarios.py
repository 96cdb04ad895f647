# SPDX-License-Identifier: Apache-2.0
"""The test scenarios: what happens to the peer under test and when, and the report.

Every wait has a limit, so a stuck peer delays the report but cannot prevent it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from penstock.conformance.dataflow_double import JoinInfo, open_double
from penstock.conformance.rollout import DRAIN_S, MAX_HEARTBEAT_GAP_S, RolloutExaminer
from penstock.conformance.simulated_peers import SimulatedNode, SimulatedTrainer
from penstock.conformance.trainer import NUM_BATCHES, TrainerExaminer
from penstock.conformance.verdicts import RuleVerdict, Verdict
from penstock.wire.auth import Role
from penstock.wire.codec import encode_json

OnReady = Callable[[JoinInfo], object]
"""Called once, when the peer may join."""
POLL_S = 0.02
NO_LIMIT = float("inf")
"""Only the timeout of the full test applies."""
REACTION_TIMEOUT_S = 20.0
"""How long to wait for one expected reaction before continuing without it."""
SILENCE_TIMEOUT_S = 15.0
"""A peer that joined and makes no call for this long is considered gone."""
SETTLE_S = 0.4
LOADING_S = 1.0
"""Time for a peer that checks too little to go live after the last byte."""
AFTER_FENCE_S = 2.0
"""Time to catch calls that a fenced peer should not make."""


class PeerGone(Exception):
    """The peer under test stopped calling."""


# --- a rollout node ------------------------------------------------------------------------------


async def examine_rollout(
    *, host: str, port: int, on_ready: OnReady, timeout_s: float = 60.0
) -> tuple[RuleVerdict, ...]:
    async with open_double(host, port) as double:
        examiner = RolloutExaminer(double)
        trainer = SimulatedTrainer(double.service, double.store, SimulatedNode(double.service))
        async with double.serve(examiner):
            on_ready(double.join_info(Role.ROLLOUT))
            with suppress(TimeoutError, PeerGone):
                async with asyncio.timeout(timeout_s):
                    await _rollout_scenario(examiner, trainer)
            examiner.finish()
    return examiner.verdicts.all()


async def _rollout_scenario(examiner: RolloutExaminer, trainer: SimulatedTrainer) -> None:
    incarnation = await trainer.claim_incarnation()

    async def until(condition: Callable[[], bool], limit_s: float) -> bool:
        return await _wait_until(
            condition, limit_s, trainer.skip_ready_batches, lambda: examiner.last_call_at
        )

    async def publish(fault: str = "") -> None:
        stored = trainer.store_version(with_wrong_tensor=fault == "wrong")
        examiner.expect(incarnation, trainer.number, stored, fault=fault)
        await trainer.publish(stored)

    async def expect_samples(number: int) -> None:
        is_sampled = await until(lambda: number in examiner.sampled_numbers, REACTION_TIMEOUT_S)
        detail = f"no row sampled by version {number} within {REACTION_TIMEOUT_S:g} s"
        examiner.verdicts.check("new-version-loaded", is_sampled, detail)

    await _wait_until(lambda: examiner.joined_at > 0, NO_LIMIT, _nothing, time.monotonic)
    await until(lambda: examiner.num_heartbeats > 0, REACTION_TIMEOUT_S)
    await asyncio.sleep(SETTLE_S)
    await publish()
    await until(lambda: examiner.num_stored > 0, NO_LIMIT)
    await until(lambda: examiner.has_seen_all_faults, REACTION_TIMEOUT_S)
    await trainer.train()
    await publish("damaged")
    await expect_samples(1)
    await trainer.train()
    await publish("wrong")
    await until(lambda: examiner.has_fetched_wrong_tensor, REACTION_TIMEOUT_S)
    await asyncio.sleep(LOADING_S)
    await trainer.train()
    await publish()
    await expect_samples(3)
    if examiner.has_fetched_wrong_tensor:
        examiner.verdicts.mark_kept("wrong-tensor-refused")
    await until(
        lambda: time.monotonic() - examiner.joined_at > MAX_HEARTBEAT_GAP_S + 1.0,
        REACTION_TIMEOUT_S,
    )
    examiner.draining.set()
    await until(lambda: examiner.left_at > 0, DRAIN_S + 1.0)
    await asyncio.sleep(SETTLE_S)


# --- a trainer -----------------------------------------------------------------------------------


async def examine_trainer(
    *, host: str, port: int, on_ready: OnReady, timeout_s: float = 60.0
) -> tuple[RuleVerdict, ...]:
    async with open_double(host, port) as double:
        examiner = TrainerExaminer(double)
        node = SimulatedNode(double.service)
        successor = SimulatedTrainer(double.service, double.store, node)
        async with double.serve(examiner):
            on_ready(double.join_info(Role.TRAINER))
            with suppress(TimeoutError, PeerGone):
                async with asyncio.timeout(timeout_s):
                    await _trainer_scenario(examiner, node, successor)
            examiner.finish()
    return examiner.verdicts.all()


async def _trainer_scenario(
    examiner: TrainerExaminer, node: SimulatedNode, successor: SimulatedTrainer
) -> None:
    async def until(condition: Callable[[], bool], limit_s: float, deliver_rows: Work) -> bool:
        return await _wait_until(condition, limit_s, deliver_rows, lambda: examiner.last_call_at)

    await _wait_until(lambda: examiner.num_batch_requests > 0, NO_LIMIT, _nothing, time.monotonic)
    await until(lambda: examiner.last_requested > NUM_BATCHES, NO_LIMIT, node.deliver_rows)
    await until(lambda: examiner.is_settled, REACTION_TIMEOUT_S / 2, _nothing)
    await successor.claim_incarnation()
    examiner.superseded.set()
    await until(lambda: examiner.fenced_at > 0, 2 * REACTION_TIMEOUT_S, _nothing)
    await asyncio.sleep(AFTER_FENCE_S)


# --- waiting -------------------------------------------------------------------------------------

Work = Callable[[], Awaitable[None]]


async def _nothing() -> None:
    pass


async def _wait_until(
    condition: Callable[[], bool], limit_s: float, work: Work, last_call_at: Callable[[], float]
) -> bool:
    """Keep the run going until the condition holds (True) or its time is up (False)."""
    give_up_at = time.monotonic() + limit_s
    while not condition():
        now = time.monotonic()
        if now > give_up_at:
            return False
        if now - last_call_at() > SILENCE_TIMEOUT_S:
            raise PeerGone
        await work()
        await asyncio.sleep(POLL_S)
    return True


# --- the report ----------------------------------------------------------------------------------

Out = Callable[[str], object]
"""Prints one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The machine-readable last line."""

    role: str
    passed: int
    failed: int
    untested: int
    rules: tuple[RuleVerdict, ...]


async def conformance_rollout(
    *, host: str, port: int, out: Out, timeout_s: float = 60.0, json: bool = False
) -> bool:
    """Test a rollout node: print how to join, then one line per rule. True if all are kept."""

    def on_ready(join_info: JoinInfo) -> None:
        _print_join_info(join_info, out)
        out(
            "now join as a rollout node: penstock join URL --token-file FILE, with this token in "
            "FILE"
        )

    verdicts = await examine_rollout(host=host, port=port, on_ready=on_ready, timeout_s=timeout_s)
    return _report("rollout", verdicts, out, json)


async def conformance_trainer(
    *, host: str, port: int, out: Out, timeout_s: float = 60.0, json: bool = False
) -> bool:
    """Like `conformance_rollout`, for a trainer of policy `policy`."""

    def on_ready(join_info: JoinInfo) -> None:
        _print_join_info(join_info, out)
        out(f"store  {join_info.store}")
        out("now join as the trainer of policy `policy`, and write its versions to the store")

    verdicts = await examine_trainer(host=host, port=port, on_ready=on_ready, timeout_s=timeout_s)
    return _report("trainer", verdicts, out, json)


def _print_join_info(join_info: JoinInfo, out: Out) -> None:
    out(f"url    {join_info.url}")
    out(f"token  {join_info.token}")


def _report(role: str, verdicts: Sequence[RuleVerdict], out: Out, json: bool) -> bool:
    count = Counter(rule_verdict.verdict for rule_verdict in verdicts)
    for rule_verdict in verdicts:
        out(str(rule_verdict))
    passed, failed, untested = count[Verdict.OK], count[Verdict.FAIL], count[Verdict.UNTESTED]
    out(f"{passed} ok, {failed} failed, {untested} not tested, of {len(verdicts)} rules")
    if json:
        report = Report(
            role=role, passed=passed, failed=failed, untested=untested, rules=tuple(verdicts)
        )
        out(encode_json(report).decode())
    return passed == len(verdicts)
