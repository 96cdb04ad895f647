# SPDX-License-Identifier: Apache-2.0
"""`penstock fork`: create a new run from a checkpoint of another run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def fork(
    run: Path,
    /,
    *overrides: str,
    at: Annotated[int, Parameter(required=True)],
    name: str | None = None,
    why: str = "",
    json: bool = False,
) -> int:
    """Create a new run folder next to RUN that starts from step STEP of RUN.

    Model, optimizer and random state come from the checkpoint of that step. If RUN no longer has
    it, the weights come from the weight store and the optimizer starts fresh. The new run has its
    own ledger and starts with the first task of its data. RUN does not change. Start the new run
    with `penstock run`.

    Args:
        run: Run folder, or its config file; running or finished.
        overrides: Settings that differ in the new run, such as training.learning_rate=1e-4.
        at: Step to start from.
        name: Name of the new run; by default NAME-fork-STEP.
        why: Reason, for the log of operators' actions.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json, print_note, print_text
    from penstock.runs.fork import fork_run
    from penstock.runs.target import find_run_folder

    parent = find_run_folder(run)
    fork_folder, weights_only = fork_run(parent, overrides, at, name, why=why)
    for policy, damage in weights_only.items():
        why = f"checkpoint of step {at} is unusable: {damage}" if damage else "no checkpoint"
        print_note(f"{policy}: starting from weights only, with a fresh optimizer ({why})")
    print_text(
        f"created {fork_folder.path} from step {at} of {parent.path}; start it with: penstock run "
        f"{fork_folder.path}"
    )
    if json:
        facts = {"folder": str(fork_folder.path), "parent": str(parent.path), "step": at}
        print_json({**facts, "weights_only": list(weights_only)})
    return 0
