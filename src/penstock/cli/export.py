# SPDX-License-Identifier: Apache-2.0
"""`penstock export`: take trajectories and models away from a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter


def trajectories(
    run: Path,
    /,
    *,
    to: Annotated[Path, Parameter(required=True)],
    format: Literal["parquet", "dataset", "atif"] | None = None,
    policy: str | None = None,
    step: str = "",
    outcome: Literal["completed", "truncated", "failed", "cancelled"] | None = None,
    json: bool = False,
) -> int:
    """Write trajectories with token ids, log-probs, versions, rewards and text.

    Args:
        run: Run folder, or its config file; running or finished.
        to: A new .parquet file, a new .jsonl file (ATIF), or a new folder (for `datasets`).
        format: With a folder: dataset, or atif for one document per file.
        policy: Only those with tokens of this policy.
        step: Only what step N trained, or the steps N:M.
        outcome: Only those that ended so.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import pluralise, print_json, print_note
    from penstock.cli.samples import parse_steps
    from penstock.runs.export.trajectories import export_trajectories

    done = export_trajectories(
        run, to, format=format, policy=policy, steps=parse_steps(step), outcome=outcome
    )
    written = pluralise(done.num_written, "trajectory", "trajectories")
    print_note(f"wrote {written} to {done.path} ({done.format.value})")
    if done.num_without_tokens:
        print_note(
            f"left out {done.num_without_tokens:,} that have no tokens any more; to keep more, set "
            "dataflow.keep=all and a larger dataflow.keep_mb before the run starts or resumes"
        )
    if json:
        print_json(
            {
                "path": str(done.path),
                "format": done.format.value,
                "written": done.num_written,
                "without_tokens": done.num_without_tokens,
            }
        )
    return 0
