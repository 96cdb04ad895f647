# SPDX-License-Identifier: Apache-2.0
"""How long a trainer is idle on a long-tailed load, and how long its steps take, when it trains on
complete batches and when batches are streamed into its steps (`training.stream`): the same answers,
the same work, in turns.

The curve is the real core of the dataflow in virtual time; one point runs on the clock, with the
real service in its own process and real nodes with `simulated` engines. Training a group takes as
long as it has tokens, and the optimizer a fixed share, after the last group in both arms. Idle is
the trainer's wait for a batch or an instalment."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from benchmarks.client import POLICY, Service
from benchmarks.harness import log_line, result, scratch
from benchmarks.local_run import quiet
from benchmarks.overlap_real import commit_and_publish, running_nodes, running_service
from benchmarks.overlap_virtual import OverlapResult, flow
from benchmarks.overlap_workload import Workload
from benchmarks.virtual_run import VirtualRun
from penstock.dataflow.records import BatchRecord, InstalmentRecord
from penstock.dataflow.service.trainers.messages import BatchAnswer, BatchRequest
from penstock.types import Manifest
from penstock.wire.codec import decode

OPTIMIZER_SHARE = 0.1
"""Of a step's work: it needs the complete gradient."""
SIGMAS = (0.0, 1.0, 1.5)
STALENESSES = (0, 1)
RATIOS = (4.0, 2.0, 1.0)
"""Rollout to train."""
HEADLINE = (1.0, 1, 1.0)
"""sigma, max_staleness, rollout to train."""
WARM_UP = 1


def work_s(manifest: Manifest, workload: Workload, train_s: float) -> float:
    """What these groups train for, without the optimizer."""
    tokens = sum(manifest.tokens(row) for row in manifest.rows)
    expected = workload.rows_per_batch * workload.expected_tokens
    return (1 - OPTIMIZER_SHARE) * train_s * tokens / expected


class _Trainer:
    """Asks for the next batch or instalment as soon as it is free."""

    def __init__(self, workload: Workload, streams: bool, run: VirtualRun, train_s: float) -> None:
        self.consumer = run.coordinator.consumers[POLICY]
        self.wait_s = 0.0
        self.commits_at: list[float] = []
        self._workload = workload
        self._streams = streams
        self._run = run
        self._train_s = train_s
        self._free_since: float | None = run.now

    def poll(self) -> None:
        run, consumer = self._run, self.consumer
        if self._free_since is None:
            return
        seal = run.sealing.seal_instalment if self._streams else run.sealing.seal
        record = seal(consumer, consumer.last_sealed + 1, run.now)
        if record is None:
            return
        run.router.run(run.now)
        self.wait_s += run.now - self._free_since
        self._free_since = None
        is_last = isinstance(record, BatchRecord) or record.is_last
        run.at(run.now + self._seconds(record) + run.call_s, partial(self._computed, is_last))

    def _seconds(self, record: BatchRecord | InstalmentRecord) -> float:
        return work_s(decode(record.manifest, Manifest), self._workload, self._train_s)

    def _computed(self, is_last: bool) -> None:
        if is_last:
            self._run.at(self._run.now + OPTIMIZER_SHARE * self._train_s, self._trained)
        else:
            self._free_since = self._run.now
            self.poll()

    def _trained(self) -> None:
        self._run.commit(self.consumer)
        self._run.publish(self.consumer.terms.policy)
        self._free_since = self._run.now
        self.commits_at.append(self._run.now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A trainer on one kind of batch."""

    idle_share: float
    step_s: float

    @classmethod
    def of(cls, found: OverlapResult) -> Arm:
        return cls(
            idle_share=found.wait_s / found.seconds, step_s=found.seconds / len(found.commits_at)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    complete: Arm
    streamed: Arm

    @property
    def speedup(self) -> float:
        return self.complete.step_s / self.streamed.step_s

    @property
    def idle_ratio(self) -> float:
        """What is left of the idle time of a step."""
        before = self.complete.idle_share * self.complete.step_s
        return self.streamed.idle_share * self.streamed.step_s / before if before else 1.0

    def __str__(self) -> str:
        return (
            f"idle {self.complete.idle_share:.1%} -> {self.streamed.idle_share:.1%}, "
            f"step {self.speedup:.3f} x as fast, idle time x {self.idle_ratio:.2f}"
        )


def measure(workload: Workload, *, call_s: float = 0.0) -> Pair:
    """Both arms in virtual time."""
    arms = [
        Arm.of(flow(workload, call_s=call_s, make_trainer=partial(_Trainer, workload, streams)))
        for streams in (False, True)
    ]
    return Pair(complete=arms[0], streamed=arms[1])


# --- on the clock ---------------------------------------------------------------------------------


async def _next(trainer: Service, seq: int, instalment: int) -> BatchAnswer:
    body = BatchRequest(
        consumer=POLICY, seq=seq, incarnation=trainer.incarnation, instalment=instalment
    )
    while True:
        answer = await trainer.call("POST", "/v1/batches", body, BatchAnswer)
        if answer.manifest is not None:
            return answer


async def _step(
    trainer: Service, seq: int, workload: Workload, train_s: float, *, streams: bool
) -> float:
    """Train one batch; the seconds that it waited."""
    wait_s, instalment, is_last = 0.0, 0, False
    while not is_last:
        instalment += streams
        asked_at = time.monotonic()
        answer = await _next(trainer, seq, instalment)
        wait_s += time.monotonic() - asked_at
        assert answer.manifest is not None
        await asyncio.sleep(work_s(answer.manifest, workload, train_s))
        is_last = answer.is_last
    await asyncio.sleep(OPTIMIZER_SHARE * train_s)
    trainer.seq = seq
    await commit_and_publish(trainer, seq)
    return wait_s


async def _train(folder: Path, workload: Workload, token_s: float, *, streams: bool) -> Arm:
    with running_service(folder, workload, *["--stream"] * streams) as (server, signer):
        async with running_nodes(server, signer, folder, workload, token_s) as (trainer, _):
            train_s = workload.train_s_at(token_s)
            waits: list[float] = []
            began_at = time.monotonic()
            for seq in range(1, workload.steps + 1):
                waits.append(await _step(trainer, seq, workload, train_s, streams=streams))
                if seq == WARM_UP:
                    began_at = time.monotonic()
            seconds = time.monotonic() - began_at
    steps = workload.steps - WARM_UP
    return Arm(idle_share=sum(waits[WARM_UP:]) / seconds, step_s=seconds / steps)


def measure_on_the_clock(folder: Path, workload: Workload, *, token_s: float) -> Pair:
    complete, streamed = (
        asyncio.run(_train(folder / name, workload, token_s, streams=name == "streamed"))
        for name in ("complete", "streamed")
    )
    return Pair(complete=complete, streamed=streamed)


def curve(workload: Workload, sigmas: Sequence[float]) -> Mapping[tuple[float, int, float], Pair]:
    found: dict[tuple[float, int, float], Pair] = {}
    for sigma in sigmas:
        for staleness in STALENESSES:
            for ratio in RATIOS:
                here = replace(
                    workload, sigma=sigma, max_staleness=staleness, rollout_to_train=ratio
                )
                found[sigma, staleness, ratio] = pair = measure(here)
                log_line(
                    f"sigma {sigma:g}, max_staleness {staleness}, rollout:train {ratio:g}:1: {pair}"
                )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer points and steps")
    parser.add_argument("--folder", type=Path, help="where the service on the clock writes")
    options = parser.parse_args()
    quiet()
    workload = Workload(steps=15 if options.quick else 60)
    pairs = curve(workload, (1.0,) if options.quick else SIGMAS)
    sigma, staleness, ratio = HEADLINE
    small = replace(
        workload,
        steps=6 if options.quick else 24,
        groups_per_batch=8,
        group_size=4,
        num_slots=32,
        sigma=sigma,
        max_staleness=staleness,
        rollout_to_train=ratio,
    )
    with scratch(options.folder) as folder:
        on_the_clock = measure_on_the_clock(folder, small, token_s=2e-3)
    log_line(f"on the clock: {on_the_clock}")
    head = pairs[HEADLINE]
    figures: dict[str, float] = {
        "idle_share": head.streamed.idle_share,
        "baseline_idle_share": head.complete.idle_share,
        "ratio": head.idle_ratio,
        "step_speedup": head.speedup,
        "idle_share_clock": on_the_clock.streamed.idle_share,
        "baseline_idle_share_clock": on_the_clock.complete.idle_share,
        "ratio_clock": on_the_clock.idle_ratio,
        "step_speedup_clock": on_the_clock.speedup,
        "worst_step_speedup": min(pair.speedup for pair in pairs.values()),
    }
    for (spread, bound, share), pair in pairs.items():
        figures[f"step_speedup_{spread:g}_{bound}_{share:g}"] = pair.speedup
        figures[f"ratio_{spread:g}_{bound}_{share:g}"] = pair.idle_ratio
    result(**figures)


if __name__ == "__main__":
    main()
