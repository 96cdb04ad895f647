# SPDX-License-Identifier: Apache-2.0
"""When shared resources change over, and why."""

from __future__ import annotations

import pytest

from penstock.dataflow.core.multiplexing import (
    Multiplexer,
    Phase,
    SwitchTrigger,
    VisitSpec,
    batches_per_visit,
)

SPEC = VisitSpec(batches=2, timeout_s=30.0)


def decide(
    machine: Multiplexer, ready: int, now: float, *, left: int = 10, is_training: bool = False
) -> SwitchTrigger | None:
    switch = machine.decide(
        ready_batches=ready, batches_left=left, is_training=is_training, now=now
    )
    return None if switch is None else switch.trigger


def test_resources_train_when_enough_waits_and_return_when_nothing_does() -> None:
    machine = Multiplexer(SPEC, 0.0)
    assert decide(machine, 1, 1.0) is None and machine.phase is Phase.ROLLOUT
    assert decide(machine, 2, 2.0) is SwitchTrigger.SAMPLES and machine.phase is Phase.TRAIN
    assert decide(machine, 0, 3.0, is_training=True) is None
    assert decide(machine, 1, 4.0) is None, "what came meanwhile is trained in the same visit"
    assert decide(machine, 0, 5.0) is SwitchTrigger.TAG_RETURNED
    assert machine.phase is Phase.ROLLOUT and machine.since == 5.0


def test_a_batch_does_not_wait_for_another_one_for_ever() -> None:
    machine = Multiplexer(SPEC, 0.0)
    assert decide(machine, 1, 29.0) is None
    assert decide(machine, 0, 31.0) is None, "there is nothing to train"
    assert decide(machine, 1, 31.0) is SwitchTrigger.TIMEOUT


def test_the_last_batch_of_a_run_waits_for_no_other() -> None:
    machine = Multiplexer(SPEC, 0.0)
    assert decide(machine, 1, 1.0, left=1) is SwitchTrigger.SAMPLES


@pytest.mark.parametrize(
    ("switch_s", "switching", "max_staleness", "expected"),
    [(0.0, 1.0, 4, 1), (0.2, 1.0, 4, 2), (0.2, 0.5, 4, 1), (5.0, 1.0, 4, 4), (5.0, 1.0, 0, 1)],
)
def test_costly_changes_are_shared_by_more_batches(
    switch_s: float, switching: float, max_staleness: int, expected: int
) -> None:
    found = batches_per_visit(
        switch_s=switch_s, step_s=10.0, max_staleness=max_staleness, switching=switching
    )
    assert found == expected
