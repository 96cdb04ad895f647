# SPDX-License-Identifier: Apache-2.0
"""`penstock replay`: a step computed again from the record, and compared bit for bit."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.runs.replay import ReplayComparison

MAX_PRINTED = 10
"""Differences that people are told; --json has all."""


def replay(run: Path, step: int, /, *, policy: str | None = None, json: bool = False) -> int:
    """Compute a step again from its sealed batch and the checkpoint before it.

    Exit code 0 if and only if stats and weights come out bit for bit as they were published. Steps
    between that checkpoint and this one are computed again too, by as many ranks as trained them.
    What a run keeps reaches back to
    its oldest retained checkpoint.

    Parameters
    ----------
    run
        The run folder, or its config file; running or finished.
    step
        Number of the version to make again.
    policy
        Which policy; may be left out when the run has one.
    json
        Print one JSON object as the last line.
    """
    from penstock.cli.service_process import exit_now
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
    """This command once per rank; the first of them tells what it found."""
    from penstock.observe import logs
    from penstock.trainer.ranks.supervisor import run_ranks

    logs.configure("replay")  # on stderr; the last line of stdout is for programs
    command = [sys.executable, "-m", "penstock.cli.main", *sys.argv[1:]]
    any_failure = range(1, 256)
    return run_ranks(
        command, num_ranks, env=os.environ, is_stopping=lambda: False, final_codes=any_failure
    )


def _print_result(found: ReplayComparison | None, *, json: bool) -> int:
    """The exit code; None is for the first rank to tell."""
    from penstock.cli.output import print_json

    if found is None:
        return 0
    print("\n".join(_lines(found)))
    if json:
        print_json({"is_equal": found.is_equal, **_as_json(found)})
    return 0 if found.is_equal else 1


def _lines(found: ReplayComparison) -> Iterator[str]:
    replayed = found.replayed
    yield (
        f"{found.policy}: computed again from number {replayed.started_at.number} to "
        f"{replayed.ended_at.number}, batches {replayed.started_at.seq + 1} to "
        f"{replayed.ended_at.seq}"
    )
    for difference in replayed.differences[:MAX_PRINTED]:
        yield f"  {difference}"
    if found.has_equal_weights:
        yield f"  weights {found.published[:16]} are equal bit for bit"
    else:
        yield f"  weights differ: published {found.published}, now {replayed.stored.weights_digest}"
        yield f"  first tensor that differs: {found.tensor}"


def _as_json(found: ReplayComparison) -> dict[str, object]:
    return {
        "policy": found.policy,
        "step": found.step,
        "begun_at": found.replayed.started_at.number,
        "weights_digest": found.replayed.stored.weights_digest,
        "published": found.published,
        "first_tensor": found.tensor,
        "differences": [str(difference) for difference in found.replayed.differences],
    }
