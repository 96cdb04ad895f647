# SPDX-License-Identifier: Apache-2.0
"""Why something was used or dropped, with what the model said: for people and their agents.

Reads the ledger and the stored text; prints nothing."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from penstock.dataflow.explain.explain import Explanation, explain
from penstock.dataflow.ledger.recorded import open_recorded_run
from penstock.runs.history import open_run
from penstock.runs.samples import Sample, of_group

if TYPE_CHECKING:
    from penstock.fleet.run_folder import RunFolder


def explain_with_text(folder: RunFolder, id: str) -> tuple[Explanation, list[Sample]]:
    """The explanation of a task, group, row, batch or version; for a row or a group also its
    trajectories whose text is still there."""
    with closing(open_recorded_run(folder.path / "ledger")) as recorded:
        explanation = explain(recorded, id)
    if explanation.kind not in ("row", "group"):
        return explanation, []
    with open_run(folder.path) as opened:
        found = of_group(opened, explanation.id.partition(".")[0])
    is_row = explanation.kind == "row"
    return explanation, [
        one for one in found if one.turns and (not is_row or one.row_id == explanation.id)
    ]
