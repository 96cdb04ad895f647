# SPDX-License-Identifier: Apache-2.0
"""What training two policies together costs: a solver and a verifier with long-tailed answers, in
three schedules on the same number of machines.

- synchronous: all machines generate a batch turn by turn, then train one policy, then the other;
- barrier: asynchronous, but no trainer goes on before all have published the same version, as
  AstraFlow's code has it;
- penstock: asynchronous, each trainer by itself.

The last two run through the real core of the dataflow in virtual time, with simulated answers.
Counted is the mean time between two versions of the solver, in the steady state: a step against a
full synchronous cycle, as AstraFlow counts its 212.64 s against 77.65 s."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness import log_line, result
from benchmarks.local_run import quiet
from benchmarks.multipolicy_workload import SOLVER, VERIFIER, Pair, pair
from benchmarks.virtual_run import Answer, VirtualRun
from penstock.dataflow.core.consumers import PolicySpec
from penstock.dataflow.core.coordinator import IssueSpec
from penstock.dataflow.core.groups import ClosingKind, ClosingPolicy, LeaseSpec
from penstock.dataflow.core.leasing import Grant
from penstock.dataflow.core.rule_runner import RuleSpec
from penstock.dataflow.ledger.assemble import CoreSpec
from penstock.dataflow.records import BatchRecord
from penstock.dataflow.sources import Source
from penstock.types import Manifest, PolicyName
from penstock.wire.codec import decode

SEED_SPEEDUP = 212.64 / 77.65
"""AstraFlow's figure."""
POLICIES = (SOLVER, VERIFIER)
SIGMAS = (0.0, 0.5, 1.0, 1.5)
RATIOS = {"4:1": 4.0, "2:1": 2.0, "1:1": 1.0}
"""Rollout to train, in machine seconds."""
HEADLINE = 1.0, "2:1"
SLOWNESS = (1.0, 1.25, 1.5, 2.0)
QUICK_STEPS, FULL_STEPS = 30, 150


class _Trainer:
    """Takes a batch as soon as it may, and trains it for as long as its tokens take."""

    def __init__(self, run: VirtualRun, policy: PolicyName, workload: Pair) -> None:
        self.partners: Sequence[_Trainer] = ()
        """Those whose version it waits for."""
        self.policy = policy
        self.commits_at: list[float] = []
        self._consumer = run.coordinator.consumers[policy]
        self._run = run
        self._workload = workload
        self._is_busy = False

    @property
    def number(self) -> int:
        return self._consumer.lineage.number

    def poll(self) -> None:
        run, consumer = self._run, self._consumer
        if self._is_busy or any(partner.number < self.number for partner in self.partners):
            return
        record = run.sealing.seal(consumer, consumer.last_sealed + 1, run.now)
        if record is None:
            return
        run.router.run(run.now)
        self._is_busy = True
        seconds = self._workload.train_s(self.policy, self._tokens(record))
        run.at(run.now + seconds, self._trained)

    def _tokens(self, record: BatchRecord) -> int:
        manifest = decode(record.manifest, Manifest)
        return sum(row.sampled[self.policy] for group in manifest.groups for row in group.rows)

    def _trained(self) -> None:
        self._run.commit(self._consumer)
        self._run.publish(self.policy)
        self._is_busy = False
        self.commits_at.append(self._run.now)


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Seconds between two versions, by policy, and the share of tokens that was never trained."""

    solver_s: float
    verifier_s: float
    lost: float


def run_pair(workload: Pair, *, has_barrier: bool) -> Steps:
    source = Source(name="train", weight=1.0, make=lambda n, seed: {"n": n}, limit=None)

    def answer(grant: Grant) -> Answer:
        draft, verdict = workload.tokens(int(grant.group_id.partition("-")[2]), grant.slot)
        own = {SOLVER: draft, VERIFIER: verdict}
        return Answer(tokens=draft + verdict, reward=float(grant.slot), tokens_of=own)

    run = VirtualRun(_terms(workload), [source], answer)
    trainers = [_Trainer(run, policy, workload) for policy in POLICIES]
    for policy in POLICIES:
        run.take_over(policy)
    drafts = workload.drafts
    for index in range(drafts.num_nodes):
        run.join(f"node-{index}", drafts.num_slots // drafts.num_nodes)
    for trainer in trainers:
        trainer.partners = [t for t in trainers if t is not trainer] if has_barrier else ()
        run.after_settle.append(trainer.poll)
    solver = trainers[0]
    run.run(lambda: solver.number >= drafts.steps)
    solver_s, verifier_s = (_step_s(t.commits_at, drafts.max_staleness + 1) for t in trainers)
    trained = sum(fate.tokens for fate in run.tally.fates.values() if fate.state == "sealed")
    return Steps(solver_s=solver_s, verifier_s=verifier_s, lost=1 - trained / run.generated)


def _step_s(commits_at: Sequence[float], edge: int) -> float:
    """In the steady state: without as many batches at either end as may be under way at once."""
    steady = commits_at[edge:-edge]
    return (steady[-1] - steady[0]) / (len(steady) - 1)


def _terms(workload: Pair) -> CoreSpec:
    drafts = workload.drafts
    policies = [
        PolicySpec(
            policy=policy,
            groups_per_batch=drafts.groups_per_batch,
            max_staleness=drafts.max_staleness,
            steps=10 * drafts.steps,  # the one that is ahead must not be the one that ends
        )
        for policy in POLICIES
    ]
    hooks = [(None, "mix", "weights"), (None, "curate", "all")]
    hooks += [
        (p, hook, name) for p in POLICIES for hook, name in (("admit", "all"), ("select", "edf"))
    ]
    return CoreSpec(
        policies=tuple(policies),
        rules=tuple(
            RuleSpec(hook=hook, name=name, options={}, policy=policy, position=0)
            for policy, hook, name in hooks
        ),
        issue=IssueSpec(num_slots=drafts.group_size),
        closing=ClosingPolicy(kind=ClosingKind.COMPLETE),
        lease=LeaseSpec(ttl_s=60.0, start_to_close_s=1e9, max_attempts=3),
        workflow="solver_verifier",
        seed=0,
    )


def curve(steps: int) -> dict[str, float]:
    """Over tail and rollout:train."""
    figures: dict[str, float] = {}
    for sigma in SIGMAS:
        for name, ratio in RATIOS.items():
            workload = pair(sigma=sigma, rollout_to_train=ratio, steps=steps)
            ours = run_pair(workload, has_barrier=False)
            barrier = run_pair(workload, has_barrier=True)
            cycle_s = workload.synchronous_s(is_by_turn=True)
            whole_s = workload.synchronous_s(is_by_turn=False)
            at = f"{sigma:g}_{name}"
            figures[f"speedup_{at}"] = cycle_s / ours.solver_s
            figures[f"speedup_without_turns_{at}"] = whole_s / ours.solver_s
            figures[f"barrier_cost_{at}"] = barrier.solver_s / ours.solver_s
            log_line(
                f"sigma {sigma:g}, rollout:train {name}: cycle {cycle_s:.1f} s ({whole_s:.1f} "
                f"without a barrier between turns), with version barrier {barrier.solver_s:.1f} s, "
                f"penstock {ours.solver_s:.1f} s; never trained {ours.lost:.1%}"
            )
    return figures


def uneven(steps: int) -> dict[str, float]:
    """The headline when one trainer has too few machines: what the barrier costs the other."""
    sigma, name = HEADLINE
    figures: dict[str, float] = {}
    for slowness in SLOWNESS[1:]:
        workload = pair(sigma=sigma, rollout_to_train=RATIOS[name], steps=steps, slowness=slowness)
        ours = run_pair(workload, has_barrier=False)
        barrier = run_pair(workload, has_barrier=True)
        figures[f"barrier_cost_slow_{slowness:g}"] = barrier.solver_s / ours.solver_s
        log_line(
            f"the verifier trains {slowness:g} times as long: solver's step {ours.solver_s:.1f} s, "
            f"with the barrier {barrier.solver_s:.1f} s; verifier's {ours.verifier_s:.1f} s"
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer batches")
    options = parser.parse_args()
    quiet()
    steps = QUICK_STEPS if options.quick else FULL_STEPS
    figures = curve(steps) | uneven(steps)
    sigma, name = HEADLINE
    result(
        speedup_over_sync=figures[f"speedup_{sigma:g}_{name}"],
        seed_speedup=SEED_SPEEDUP,
        ratio=figures[f"speedup_{sigma:g}_{name}"] / SEED_SPEEDUP,
        barrier_cost=figures[f"barrier_cost_{sigma:g}_{name}"],
        **figures,
        steps=steps,
    )


if __name__ == "__main__":
    main()
