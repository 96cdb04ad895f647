# SPDX-License-Identifier: Apache-2.0
"""`penstock replay`: a step computed again from the record, and compared bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.cli.recomputing import Comparison

MAX_SHOWN = 10
"""Differences that people are told; --json has all."""


def replay(run: Path, step: int, /, *, policy: str | None = None, json: bool = False) -> int:
    """Compute a step again from its sealed batch and the checkpoint before it.

    Exit code 0 if and only if stats and weights come out bit for bit as they were published. Steps
    between that checkpoint and this one are computed again too. What a run keeps reaches back to
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
    from penstock.cli.output import print_json
    from penstock.cli.recomputing import compute_again
    from penstock.cli.target import find_folder

    found = compute_again(find_folder(run), step, policy)
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
