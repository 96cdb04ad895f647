# SPDX-License-Identifier: Apache-2.0
"""MLflow: the server or store that MLFLOW_TRACKING_URI names.

A run is found again by its tag. Stores of files take a value twice, so the first call after a start
asks which steps each metric has."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from penstock.observe.tracking import PROJECT, Point, TrackedRun
from penstock.plugins import load_module

TAG = "penstock.id"
MAX_METRICS, MAX_PARAMS, MAX_CHARS = 1000, 100, 500
"""Of one call, and of the text of a parameter."""
MAX_NAME_CHARS = 250
"""Of a metric."""
_REFUSED_CHARS = re.compile(r"[^\w.\- :/]")
_NO_PARTS = ("", ".", "..")
"""Of a path: a name is one."""


class MLflow:
    def __init__(self, run: TrackedRun) -> None:
        self._entities: Any = load_module("mlflow.entities")
        self._client: Any = load_module("mlflow").MlflowClient()
        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME") or PROJECT)
        found = self._client.search_runs([experiment], f"tags.`{TAG}` = '{run.id}'", max_results=1)
        self._id: str = found[0].info.run_id if found else self._new_run(experiment, run)
        self._may_have_points = bool(found)

    def send(self, points: Sequence[Point]) -> None:
        values = [with_accepted_names(point.values) for point in points]
        names = {name for found in values for name in found}
        stored = {name: self._steps(name) for name in names} if self._may_have_points else {}
        metrics = [
            self._entities.Metric(name, value, int(point.at * 1000), point.step)
            for point, found in zip(points, values, strict=True)
            for name, value in found.items()
            if point.step not in stored.get(name, ())
        ]
        for start in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[start : start + MAX_METRICS])
        self._may_have_points = False

    def close(self) -> None:
        pass

    def _steps(self, name: str) -> set[int]:
        return {found.step for found in self._client.get_metric_history(self._id, name)}

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        return self._client.create_experiment(name) if found is None else found.experiment_id

    def _new_run(self, experiment: str, run: TrackedRun) -> str:
        tags = {TAG: run.id, "penstock.run": run.run, "penstock.policy": run.policy}
        made = self._client.create_run(experiment, run_name=run.name, tags=tags)
        params = [
            self._entities.Param(name, text[:MAX_CHARS]) for name, text in _flat("", run.config)
        ]
        for start in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(made.info.run_id, params=params[start : start + MAX_PARAMS])
        return made.info.run_id


def with_accepted_names(values: Mapping[str, float]) -> dict[str, float]:
    """Under names that MLflow takes; of two that become the same, the first counts."""
    found: dict[str, float] = {}
    for name, value in values.items():
        found.setdefault(_accepted(name), value)
    return found


def _accepted(name: str) -> str:
    """Roles, which nodes name, may have any characters, and empty parts between slashes."""
    parts = _REFUSED_CHARS.sub("_", name).split("/")
    found = "/".join("_" * max(len(part), 1) if part in _NO_PARTS else part for part in parts)
    if found.startswith(".."):
        found = f"_{found[1:]}"
    return found if len(found) <= MAX_NAME_CHARS else found[:MAX_NAME_CHARS].rstrip("./")


def _flat(prefix: str, config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}{name}.", cast("Mapping[str, Any]", value))
        elif value is not None:
            yield f"{prefix}{name}", str(value)


TRACKER = MLflow
