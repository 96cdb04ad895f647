# SPDX-License-Identifier: Apache-2.0
"""Predicts the steps of a config from the rates that a run measured; prints nothing."""

from __future__ import annotations

from penstock.config import RunConfig
from penstock.dataflow.report.shape import BalanceReport
from penstock.errors import WireError
from penstock.fleet.prediction import MeasuredRates, Prediction, measured_rates, predict
from penstock.fleet.run_folder import RunFolder
from penstock.runs.control import read_report, read_stored_report


def predict_steps(
    config: RunConfig, measured: RunFolder, ranks: dict[str, int]
) -> list[tuple[MeasuredRates, Prediction]]:
    """For each trained policy that the run has measured. `ranks`: of each trainer, as planned.
    ConfigError if the run has no report."""
    was = measured.last_started_config() or measured.read_config()
    return [
        (rates, _predict(config, was, rates, ranks[rates.policy]))
        for rates in measured_rates(_read(measured))
        if rates.policy in ranks and rates.policy in was.models
    ]


def _read(folder: RunFolder) -> BalanceReport:
    if folder.launcher_pid() is not None:
        try:
            return read_report(folder)
        except WireError:
            pass  # it starts, or ends
    return read_stored_report(folder)


def _predict(config: RunConfig, was: RunConfig, rates: MeasuredRates, num_ranks: int) -> Prediction:
    now, then = config.for_policy(rates.policy), was.for_policy(rates.policy)
    rows, rows_then = (
        one.training.groups_per_batch * one.algorithm.num_generations for one in (now, then)
    )
    nodes, nodes_then = (sum(m.replicas for m in one.models.values()) for one in (config, was))
    gpus = max(1, round(rates.gpus * nodes / nodes_then)) if nodes_then else rates.gpus
    return predict(
        rates,
        rollout_gpus=gpus,
        train_gpus=num_ranks,
        work_ratio=rows / rows_then,
        overlaps=now.training.max_staleness > 0,
    )
