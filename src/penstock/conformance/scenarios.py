# SPDX-License-Identifier: Apache-2.0
"""The course of an examination: what happens to the party under test, when, and the report.

Every wait has a limit, so a party that is stuck costs time and not the answer.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from penstock.conformance.dataflow_double import Invitation, open_double
from penstock.conformance.rollout import DRAIN_S, LATEST_BEAT_S, RolloutWatch
from penstock.conformance.simulated_peers import StandInNode, StandInTrainer
from penstock.conformance.trainer import NUM_BATCHES, TrainerWatch
from penstock.conformance.verdicts import Finding, Verdict
from penstock.wire.auth import Role
from penstock.wire.codec import encode_json

Invite = Callable[[Invitation], object]
"""Told once, when the party may join."""
POLL_S = 0.02
FOREVER = float("inf")
"""The deadline of the whole examination is the limit."""
STEP_S = 10.0
"""Patience with one expected reaction; after that the examination goes on without it."""
QUIET_S = 15.0
"""A party that joined and then makes no call for so long is gone."""
NOT_LIVE_S = 0.4
LOADING_S = 1.0
"""From the last byte to live, for a party that checks too little."""
AFTERWARDS_S = 2.0
"""For calls that a party makes though it should not."""


class PartyGone(Exception):
    pass


# --- a rollout node ------------------------------------------------------------------------------


async def examine_rollout(
    *, host: str, port: int, invite: Invite, timeout_s: float = 60.0
) -> tuple[Finding, ...]:
    async with open_double(host, port) as double:
        watch = RolloutWatch(double)
        trainer = StandInTrainer(double.service, double.store, StandInNode(double.service))
        async with double.serve(watch):
            invite(double.invitation(Role.ROLLOUT))
            with suppress(TimeoutError, PartyGone):
                async with asyncio.timeout(timeout_s):
                    await _play_rollout(watch, trainer)
            watch.conclude()
    return watch.findings.all()


async def _play_rollout(watch: RolloutWatch, trainer: StandInTrainer) -> None:
    incarnation = await trainer.take_over()

    async def until(is_there: Callable[[], bool], limit_s: float) -> bool:
        return await _until(is_there, limit_s, trainer.skip_ready, lambda: watch.last_call_at)

    async def publish(mishap: str = "") -> None:
        stored = trainer.put(with_wrong_tensor=mishap == "wrong")
        watch.expect(incarnation, trainer.number, stored, mishap=mishap)
        await trainer.publish(stored)

    async def expect_samples(number: int) -> None:
        is_sampled = await until(lambda: number in watch.sampled_numbers, STEP_S)
        seen = f"no row of number {number} within {STEP_S:g} s"
        watch.findings.check("new-version-loaded", is_sampled, seen)

    await _until(lambda: watch.joined_at > 0, FOREVER, _nothing, time.monotonic)
    await until(lambda: watch.num_beats > 0, STEP_S)
    await asyncio.sleep(NOT_LIVE_S)
    await publish()
    await until(lambda: watch.num_stored > 0, FOREVER)
    await until(lambda: watch.has_met_all, STEP_S)
    await trainer.train()
    await publish("damaged")
    await expect_samples(1)
    await trainer.train()
    await publish("wrong")
    await until(lambda: watch.has_fetched_wrong, STEP_S)
    await asyncio.sleep(LOADING_S)
    await trainer.train()
    await publish()
    await expect_samples(3)
    if watch.has_fetched_wrong:
        watch.findings.kept("wrong-tensor-refused")
    await until(lambda: time.monotonic() - watch.joined_at > LATEST_BEAT_S + 1.0, STEP_S)
    watch.draining.set()
    await until(lambda: watch.left_at > 0, DRAIN_S + 1.0)
    await asyncio.sleep(NOT_LIVE_S)


# --- a trainer -----------------------------------------------------------------------------------


async def examine_trainer(
    *, host: str, port: int, invite: Invite, timeout_s: float = 60.0
) -> tuple[Finding, ...]:
    async with open_double(host, port) as double:
        watch = TrainerWatch(double)
        node = StandInNode(double.service)
        successor = StandInTrainer(double.service, double.store, node)
        async with double.serve(watch):
            invite(double.invitation(Role.TRAINER))
            with suppress(TimeoutError, PartyGone):
                async with asyncio.timeout(timeout_s):
                    await _play_trainer(watch, node, successor)
            watch.conclude()
    return watch.findings.all()


async def _play_trainer(watch: TrainerWatch, node: StandInNode, successor: StandInTrainer) -> None:
    async def until(is_there: Callable[[], bool], limit_s: float, feed: Work) -> bool:
        return await _until(is_there, limit_s, feed, lambda: watch.last_call_at)

    await _until(lambda: watch.num_asked > 0, FOREVER, _nothing, time.monotonic)
    await until(lambda: watch.last_asked > NUM_BATCHES, FOREVER, node.feed)
    await until(lambda: watch.is_settled, STEP_S / 2, _nothing)
    await successor.take_over()
    watch.succeeded.set()
    await until(lambda: watch.fenced_at > 0, 2 * STEP_S, _nothing)
    await asyncio.sleep(AFTERWARDS_S)


# --- waiting -------------------------------------------------------------------------------------

Work = Callable[[], Awaitable[None]]


async def _nothing() -> None:
    pass


async def _until(
    is_there: Callable[[], bool], limit_s: float, work: Work, last_call_at: Callable[[], float]
) -> bool:
    """Keep the run moving until the party did what is awaited, or its time is up."""
    give_up_at = time.monotonic() + limit_s
    while not is_there():
        now = time.monotonic()
        if now > give_up_at:
            return False
        if now - last_call_at() > QUIET_S:
            raise PartyGone
        await work()
        await asyncio.sleep(POLL_S)
    return True


# --- the report ----------------------------------------------------------------------------------

Out = Callable[[str], object]
"""Takes one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The last line for programs."""

    party: str
    passed: int
    failed: int
    unseen: int
    rules: tuple[Finding, ...]


async def conformance_rollout(
    *, host: str, port: int, out: Out, timeout_s: float = 60.0, json: bool = False
) -> bool:
    """Open a double, say how to join it, then one line per rule; True when all are kept."""

    def invite(invitation: Invitation) -> None:
        out(f"url    {invitation.url}")
        out(f"token  {invitation.token}")
        out("join it as a rollout node: penstock join URL, with PENSTOCK_TOKEN set to the token")

    findings = await examine_rollout(host=host, port=port, invite=invite, timeout_s=timeout_s)
    return _report("rollout", findings, out, json)


async def conformance_trainer(
    *, host: str, port: int, out: Out, timeout_s: float = 60.0, json: bool = False
) -> bool:
    """As `conformance_rollout`, for a trainer of policy `policy`."""

    def invite(invitation: Invitation) -> None:
        out(f"url    {invitation.url}")
        out(f"token  {invitation.token}")
        out(f"store  {invitation.store}")
        out("join it as the trainer of policy `policy`, putting versions into the store")

    findings = await examine_trainer(host=host, port=port, invite=invite, timeout_s=timeout_s)
    return _report("trainer", findings, out, json)


def _report(party: str, findings: Sequence[Finding], out: Out, json: bool) -> bool:
    count = Counter(finding.verdict for finding in findings)
    for finding in findings:
        out(str(finding))
    passed, failed, unseen = count[Verdict.OK], count[Verdict.FAIL], count[Verdict.UNSEEN]
    out(f"{passed} ok, {failed} failed, {unseen} never seen, of {len(findings)} rules")
    if json:
        report = Report(
            party=party, passed=passed, failed=failed, unseen=unseen, rules=tuple(findings)
        )
        out(encode_json(report).decode())
    return passed == len(findings)
