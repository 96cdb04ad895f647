# SPDX-License-Identifier: Apache-2.0
"""`penstock simulate`: a recorded run under different data rules."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter


def simulate(
    run: Path, /, *, rules: Annotated[Path, Parameter(required=True)], json: bool = False
) -> int:
    """Simulate a recorded run under different data rules: what would be trained, skipped, wasted.

    Uses the recorded rollouts instead of nodes and trainers. Tasks that were never rolled out count
    as unknown.

    Args:
        run: Run folder, or its config file; running or finished.
        rules: YAML file with a list of rules as under `dataflow.rules`, or with that list under the
            key `rules`. Rules of a single policy stay in effect.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json, print_text
    from penstock.dataflow.simulate.text import lines
    from penstock.runs.simulate import simulate_run, with_rules
    from penstock.runs.target import find_run_folder

    folder = find_run_folder(run)
    found = simulate_run(folder, with_rules(folder.read_config(), rules))
    if json:
        print_json(
            {
                "recorded": found.recorded,
                "simulated": found.simulated,
                "unfilled": found.num_unfilled_batches,
            }
        )
    else:
        text = lines(found.recorded, found.simulated, rules.name, found.num_unfilled_batches)
        print_text("\n".join(text))
    return 0
