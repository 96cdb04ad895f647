# SPDX-License-Identifier: Apache-2.0
"""`penstock fork`: a new run that begins where another one stood."""

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
    json: bool = False,
) -> int:
    """Make a new run folder beside RUN whose number 0 is RUN's number STEP; `penstock run` starts
    it.

    Model, optimizer and random state come from the checkpoint of that step, if RUN still keeps it;
    else the weights come from its weight store and the optimizer begins anew. The new run has a
    ledger of its own: it begins with the first task of its data, and nothing in RUN changes.

    Parameters
    ----------
    run
        The run folder, or its config file; running or finished.
    overrides
        Settings of the new run that differ, like training.learning_rate=1e-4.
    at
        The step to begin from.
    name
        Name of the new run; by default NAME-fork-STEP.
    json
        Print one JSON object as the last line.
    """
    from penstock.cli.output import note, print_json
    from penstock.runs.fork import fork_run
    from penstock.runs.target import find_run_folder

    parent = find_run_folder(run)
    fork_folder, weights_only = fork_run(parent, overrides, at, name)
    for policy, damage in weights_only.items():
        because = f", because its checkpoint cannot be used: {damage}" if damage else ""
        note(f"{policy}: weights alone, from the weight store; its optimizer begins anew{because}")
    print(
        f"{fork_folder.path} begins at step {at} of {parent.path}; penstock run {fork_folder.path}"
    )
    if json:
        facts = {"folder": str(fork_folder.path), "parent": str(parent.path), "step": at}
        print_json({**facts, "weights_only": list(weights_only)})
    return 0
