# SPDX-License-Identifier: Apache-2.0
"""Rollouts of a run for tracers, from the ledger, in the order of their arrival.

Nodes have no part in it. A rollout whose payload the run no longer keeps has no trace. Changes
nothing."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.fleet.run_folder import RunFolder
from penstock.observe.tracking import Rollout
from penstock.runs.history import open_run
from penstock.runs.recorded_trajectory import RecordedTrajectory

PAGE = 64
"""Rollouts of each partition that are read at a time."""


def next_rollouts(
    folder: RunFolder, arrivals: Mapping[int, int]
) -> tuple[list[Rollout], dict[int, int]]:
    """The next rollouts after these arrivals, by partition, and the arrivals after them."""
    with open_run(folder.path) as run:
        while True:
            found, reached = run.reader.after(arrivals, PAGE)
            rollouts = [rollout for one in found if (rollout := _rollout(one)) is not None]
            if rollouts or not found:
                return rollouts, reached
            arrivals = reached


def _rollout(one: RecordedTrajectory) -> Rollout | None:
    if one.payload is None:
        return None
    return Rollout(
        trajectory=one.payload,
        workflow="" if one.task is None else one.task.workflow,
        source=one.source,
        task_key="" if one.task is None else one.task.key,
        reward=one.reward,
    )
