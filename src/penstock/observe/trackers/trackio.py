# SPDX-License-Identifier: Apache-2.0
"""trackio: its database on this machine, or the server that TRACKIO_SERVER_URL names.

`trackio.log` returns before anything is stored and drops what it cannot store. This writes through
trackio's storage instead, which answers, and ignores a point whose id it has."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from penstock.errors import ConfigError
from penstock.observe.tracking import PROJECT, Point, TrackedRun
from penstock.plugins import load_module


class Trackio:
    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._project = os.environ.get("TRACKIO_PROJECT") or PROJECT
        if os.environ.get("TRACKIO_SPACE_ID"):
            raise ConfigError(
                "trackio cannot confirm what a Space stored; unset TRACKIO_SPACE_ID, and run "
                f"`trackio sync --project {self._project}` when you want the curves there"
            )
        url = os.environ.get("TRACKIO_SERVER_URL", "")
        self._storage: Any = load_module("trackio.sqlite_storage").SQLiteStorage
        clients: Any = load_module("trackio.remote_client") if url else None
        token = os.environ.get("TRACKIO_WRITE_TOKEN")
        self._client: Any = clients.RemoteClient(url, write_token=token) if url else None
        self._config = {"_Group": run.run, **run.config}

    def send(self, points: Sequence[Point]) -> None:
        if self._client is None:
            self._storage.bulk_log(
                project=self._project,
                run=self._run.name,
                run_id=self._run.id,
                metrics_list=[dict(point.values) for point in points],
                steps=[point.step for point in points],
                timestamps=[datetime.fromtimestamp(point.at, UTC).isoformat() for point in points],
                config=self._config,
                log_ids=[self._id(point) for point in points],
            )
        else:
            entries = [self._entry(point) for point in points]
            self._client.predict(api_name="/bulk_log", logs=entries, hf_token=None)

    def close(self) -> None:
        pass

    def _entry(self, point: Point) -> dict[str, Any]:
        return {
            "project": self._project,
            "run": self._run.name,
            "run_id": self._run.id,
            "metrics": dict(point.values),
            "step": point.step,
            "config": self._config,
            "log_id": self._id(point),
        }

    def _id(self, point: Point) -> str:
        return f"{self._run.id}/{point.id}"


TRACKER = Trackio
