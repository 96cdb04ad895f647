# SPDX-License-Identifier: Apache-2.0
"""`penstock replay`: a step computed again from the record, and compared bit for bit."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.runs.replay import Comparison

MAX_SHOWN = 10
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
    from penstock.cli.service_process import leave
    from penstock.fleet.processes import exit_with_parent
    from penstock.runs.replay import compute_again, ranks_of
    from penstock.runs.target import find_folder
    from penstock.trainer.ranks.supervisor import membership

    folder = find_folder(run)
    member = membership(os.environ)
    num_ranks = ranks_of(folder, policy)
    if num_ranks == 1:
        return _tell(compute_again(folder, step, policy), json=json)
    if member is None:
        return _start_ranks(num_ranks)
    die_with_parent()
    leave(_tell(compute_again(folder, step, policy, member), json=json))


def _start_ranks(num_ranks: int) -> int:
    """This command once per rank; the first of them tells what it found."""
    from penstock.observe import logs
    from penstock.trainer.ranks.supervisor import run_ranks

    logs.configure("replay")  # on stderr; the last line of stdout is for programs
    again = [sys.executable, "-m", "penstock.cli.main", *sys.argv[1:]]
    whatever = range(1, 256)
    return run_ranks(
        again, num_ranks, env=os.environ, is_stopping=lambda: False, final_codes=whatever
    )


def _tell(found: Comparison | None, *, json: bool) -> int:
    """The exit code; None is for the first rank to tell."""
    from penstock.cli.output import print_json

    if found is None:
        return 0
    print("\n".join(_lines(found)))
    if json:
        print_json({"is_equal": found.is_equal, **_facts(found)})
    return 0 if found.is_equal else 1


def _lines(found: Comparison) -> Iterator[str]:
    done = found.done
    yield (
        f"{found.policy}: computed again from number {done.begun_at.number} to "
        f"{done.ended_at.number}, batches {done.begun_at.seq + 1} to {done.ended_at.seq}"
    )
    for difference in done.differences[:MAX_SHOWN]:
        yield f"  {difference}"
    if found.has_equal_weights:
        yield f"  weights {found.published[:16]} are equal bit for bit"
    else:
        yield f"  weights differ: published {found.published}, now {done.stored.weights_digest}"
        yield f"  first tensor that differs: {found.tensor}"


def _facts(found: Comparison) -> dict[str, object]:
    return {
        "policy": found.policy,
        "step": found.step,
        "begun_at": found.done.begun_at.number,
        "weights_digest": found.done.stored.weights_digest,
        "published": found.published,
        "first_tensor": found.tensor,
        "differences": [str(difference) for difference in found.done.differences],
    }
