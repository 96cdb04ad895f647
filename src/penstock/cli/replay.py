# SPDX-License-Identifier: Apache-2.0
"""`penstock replay`: recompute a training step and compare it bit for bit."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.runs.replay import ReplayComparison

MAX_PRINTED = 10
"""Differences to print; --json has all."""


def replay(run: Path, step: int, /, *, policy: str | None = None, json: bool = False) -> int:
    """Recompute a training step from its sealed batch and the checkpoint before it.

    Exits with 0 only if statistics and weights match the published ones bit for bit. Steps between
    that checkpoint and this step are recomputed too, with the same number of ranks. Steps before
    the oldest checkpoint of the run cannot be recomputed.

    Args:
        run: Run folder, or its config file; running or finished.
        step: Step to recompute.
        policy: Policy to recompute; optional if the run has only one.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.service_options import exit_now
    from penstock.fleet.processes import exit_with_parent
    from penstock.runs.replay import num_trainer_ranks, replay_and_compare
    from penstock.runs.target import find_run_folder
    from penstock.trainer.ranks.supervisor import read_rank_env

    folder = find_run_folder(run)
    rank_env = read_rank_env(os.environ)
    num_ranks = num_trainer_ranks(folder, policy)
    if num_ranks == 1:
        return _print_result(replay_and_compare(folder, step, policy), json=json)
    if rank_env is None:
        return _start_ranks(num_ranks)
    exit_with_parent()
    exit_now(_print_result(replay_and_compare(folder, step, policy, rank_env), json=json))


def _start_ranks(num_ranks: int) -> int:
    """Run this command once per rank; rank 0 prints the result."""
    from penstock.cli.service_options import run_per_rank
    from penstock.observe import logs
    from penstock.trainer.ranks.supervisor import HostRanks

    logs.configure("replay")  # on stderr; the last line of stdout is for programs
    any_failure = range(1, 256)
    return run_per_rank(HostRanks.one_host(num_ranks), final_codes=any_failure)


def _print_result(found: ReplayComparison | None, *, json: bool) -> int:
    """Print the comparison; returns the exit code. Other ranks than 0 have None to print."""
    from penstock.cli.output import print_json, print_text

    if found is None:
        return 0
    print_text("\n".join(_lines(found)))
    if json:
        print_json(
            {
                "is_equal": found.is_equal,
                "policy": found.policy,
                "step": found.step,
                "begun_at": found.replayed.started_at.number,
                "weights_digest": found.replayed.stored.weights_digest,
                "published": found.published_digest,
                "first_tensor": found.first_differing_tensor,
                "differences": [str(difference) for difference in found.replayed.differences],
            }
        )
    return 0 if found.is_equal else 1


def _lines(found: ReplayComparison) -> Iterator[str]:
    replayed = found.replayed
    yield (
        f"{found.policy}: recomputed from step {replayed.started_at.number} to "
        f"{replayed.ended_at.number} (batches {replayed.started_at.seq + 1} to "
        f"{replayed.ended_at.seq})"
    )
    for difference in replayed.differences[:MAX_PRINTED]:
        yield f"  {difference}"
    if found.has_equal_weights:
        yield f"  weights {found.published_digest[:16]} match bit for bit"
    else:
        yield f"  weights differ: published {found.published_digest}"
        yield f"                 recomputed {replayed.stored.weights_digest}"
        yield f"  first tensor that differs: {found.first_differing_tensor}"
