# SPDX-License-Identifier: Apache-2.0
"""A run that the dashboard shows: its ledger, opened for reading, and what is read again and again.

Owns the caches: the state of the run, its metrics and its evaluations are read when they changed,
and a ledger is opened again when a service started or ended. Changes nothing in the run.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar

from penstock.config import RunConfig
from penstock.dataflow.ledger.recorded import RecordedRun, open_recorded_run
from penstock.errors import StoreError
from penstock.evals.figures import figures
from penstock.evals.recording import FOLDER
from penstock.fleet.run_folder import RunFolder
from penstock.runs.curves import IDENTITY, MetricsRecord, metric_names, read_records
from penstock.runs.history import Run
from penstock.runs.result_files import run_results
from penstock.runs.state import RunSummary, read_summary

LIVE_S = 1.0
"""How long the answer of a running service is good for."""
MAX_OPENED = 4
"""Ledgers of one run, which is opened again when its file changes: the last ones may still be read
by other threads."""
T = TypeVar("T")


class ShownRun:
    """Any thread may call it."""

    def __init__(self, folder: RunFolder, key: str) -> None:
        self._path = folder.path
        self.key = key
        """How addresses in the browser name it."""
        self._lock = threading.Lock()
        self._known: dict[str, tuple[Hashable, Any]] = {}
        self._opening = threading.Lock()
        self._opened: deque[Run] = deque()

    @property
    def folder(self) -> RunFolder:
        """What is at its path now: a run may be deleted and started again."""
        return RunFolder(self._path)

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def config(self) -> RunConfig:
        """As of the last start: a resumed run may have more steps."""
        return self._reread("config", _mark(self.folder.config_file), self.folder.read_config)

    def close(self) -> None:
        for run in self._opened:
            run.close()

    # --- the ledger ---------------------------------------------------------------------------

    def open(self) -> Run:
        """The records of the run. StoreError if it never started, or uses PostgreSQL."""
        with self._opening:
            return self._reread("run", self._ledger_mark(), self._open)

    @property
    def recorded(self) -> RecordedRun:
        return self.open().recorded

    def _open(self) -> Run:
        if self.config.dataflow.store != "sqlite":
            raise StoreError(
                f"{self.name} keeps its ledger in PostgreSQL; the dashboard reads ledgers in files "
                "only. `penstock report` and `penstock status` answer from the service"
            )
        opened = Run(self.folder, self.config, open_recorded_run(self.folder.path / "ledger"))
        self._opened.append(opened)
        if len(self._opened) > MAX_OPENED:
            self._opened.popleft().close()
        return opened

    def _ledger_mark(self) -> Hashable:
        """Changes when a service starts or ends: a ledger without a writer is opened
        otherwise than one in use."""
        path = self.folder.path / "ledger" / "ledger.db"
        is_written = path.with_name(path.name + "-wal").exists()
        return is_written, path.exists() if is_written else _mark(path)

    # --- what changes while the run is running ------------------------------------------------

    def summary(self) -> RunSummary:
        """Its state; a running service is asked at most once in LIVE_S."""
        is_running = self.folder.launcher_pid() is not None
        mark: Hashable = int(time.monotonic() / LIVE_S) if is_running else self._rest_mark()
        return self._reread(
            "summary", (is_running, mark), lambda: read_summary(self.folder, self.config)
        )

    def _rest_mark(self) -> Hashable:
        """Of a run without a launcher. Services may have been started one by one; asking costs a
        refused connection."""
        ledger = self.folder.path / "ledger"
        is_written = (ledger / "ledger.db-wal").exists()
        return (
            int(time.monotonic() / LIVE_S) if is_written else 0,
            _mark(ledger / "ledger.db"),
            _mark(self.folder.metrics),
        )

    def records(self) -> list[MetricsRecord]:
        """Every metric of every step, each step as it was last trained."""
        path = self.folder.metrics

        def read() -> list[MetricsRecord]:
            return read_records(path, metric_names(path) - IDENTITY)

        return self._reread("metrics", _mark(path), read)

    def evaluations(self) -> list[dict[str, Any]]:
        """Mean score by suite of each evaluated version, in order of the steps."""
        folder = self.folder.path / FOLDER
        files = sorted(folder.glob("*.json")) if folder.is_dir() else []
        marks = tuple((path.name, _mark(path)) for path in files)

        def read() -> list[dict[str, Any]]:
            found = [suite for one in run_results(self.folder.path) for suite in one.suites]
            points = [
                {
                    "suite": one.suite,
                    "policy": one.policy,
                    "step": one.version,
                    "score": figures(one).avg,
                    "interval": figures(one).interval,
                }
                for one in found
                if one.answers
            ]
            return sorted(points, key=lambda point: (point["suite"], point["step"]))

        return self._reread("evaluations", marks, read)

    def _reread(self, what: str, mark: Hashable, read: Callable[[], T]) -> T:
        """What was read under this mark, or what `read` finds now."""
        with self._lock:
            known = self._known.get(what)
        if known is not None and known[0] == mark:
            return known[1]
        value = read()
        with self._lock:
            self._known[what] = (mark, value)
        return value


def _mark(path: Path) -> Hashable:
    """Differs once a file was written."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def name_runs(folders: list[RunFolder]) -> list[ShownRun]:
    """Each under its own name; of runs with one name, the later ones get a number."""
    shown: list[ShownRun] = []
    for folder in folders:
        name = folder.read_config().name
        taken = {one.key for one in shown}
        key = next(
            key
            for key in (name, *(f"{name}-{number}" for number in range(2, len(folders) + 2)))
            if key not in taken
        )
        shown.append(ShownRun(folder, key))
    return shown
