# SPDX-License-Identifier: Apache-2.0
"""`penstock scale`: the size of a run's rollout pool."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Iterator

    from penstock.dataflow.report.shape import BalanceReport
    from penstock.fleet.scaling_records import ScalingRecord

NUM_SHOWN = 8


def scale(
    run: Path,
    /,
    *,
    to: int | None = None,
    mode: Literal["act", "recommend"] | None = None,
    why: str = "",
    json: bool = False,
) -> int:
    """Grow or shrink the rollout pool of a running run, or let the autoscaler do it.

    Without options, show the pool, the recommendation and the last actions. A change is carried out
    by the run's launcher and lasts until the run is started again; with mode act, until the rule
    decides otherwise.

    Args:
        run: Run folder, or its config file.
        to: Wanted size in GPUs; a node counts as one unless it says more.
        mode: `act` lets the rule of `penstock report` change the pool; `recommend` leaves the pool
            to you.
        why: Reason, for the log of operators' actions.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json, print_note, print_text
    from penstock.fleet.autoscaler import ScaleMode
    from penstock.fleet.scaling_records import ScalingRecord
    from penstock.runs.control import read_report
    from penstock.runs.scaling import request_scale
    from penstock.runs.target import find_run_folder

    folder = find_run_folder(run)
    if to is not None or mode is not None:
        request_scale(folder, gpus=to, mode=None if mode is None else ScaleMode(mode), why=why)
        print_note(f"the launcher follows within seconds; `penstock scale {run}` shows it")
    record = folder.scaling() or ScalingRecord(mode=folder.read_config().autoscale.mode)
    report = read_report(folder)
    if json:
        asked = {"to": to, "asked_mode": mode}
        decision = report.decision
        print_json(
            {
                "run": str(folder.path),
                **asked,
                "mode": record.mode,
                "wanted_gpus": record.wanted_gpus,
                "missing_gpus": record.missing_gpus,
                "gpus": report.pool.total_gpus,
                "pending_gpus": report.pool.pending_gpus,
                "cost_per_hour": report.pool.cost_per_hour,
                "recommended_gpus": decision.target_gpus,
                "reason": decision.reason,
                "actions": record.actions,
            }
        )
    elif to is None and mode is None:
        print_text("\n".join(_lines(record, report)))
    return 0


def _lines(record: ScalingRecord, report: BalanceReport) -> Iterator[str]:
    from penstock.cli.output import format_moment, pluralise

    pool, decision = report.pool, report.decision
    wanted = "as started" if record.wanted_gpus is None else str(record.wanted_gpus)
    missing = f", {record.missing_gpus} missing" if record.missing_gpus else ""
    pending = f", {pool.pending_gpus} starting" if pool.pending_gpus else ""
    cost = f", {pool.cost_per_hour:g} per hour" if pool.cost_per_hour else ""
    yield f"pool: {pluralise(pool.total_gpus, 'GPU')}{pending}{cost}; wanted: {wanted}{missing}"
    yield f"mode: {record.mode}"
    yield f"rule: {decision.branch} to {decision.target_gpus}: {decision.reason}"
    for action in record.actions[-NUM_SHOWN:]:
        yield f"  {format_moment(action.at)}  {action.what}"
