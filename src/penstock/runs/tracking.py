# SPDX-License-Identifier: Apache-2.0
"""The exporter: sends the points of a run to its trackers, each from its own cursor.

A tracker gets a point when its commit is durable; its cursor moves when it has the point. So a
tracker that was dead catches up, and restarts of the run, of the tracker or of this process change
no curve. Each tracker has its own thread: none waits for another, and the run waits for none.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import structlog

from penstock.config import RunConfig
from penstock.errors import ConfigError, StoreError, TrackerError, wrap_errors
from penstock.fleet.run_folder import RunFolder
from penstock.observe.tracking import OPENTELEMETRY, TrackedRun, load_tracker
from penstock.redaction import hide_secrets
from penstock.runs.points import next_points
from penstock.runs.rollouts import next_rollouts
from penstock.runs.tracker_cursor import CursorFile

POLL_S = 2.0
"""Between two looks into the ledger."""
FIRST_RETRY_S, LAST_RETRY_S = 2.0, 60.0
DRAIN_S = 6.0
"""At the end of a run, for the last points; `penstock track` sends what is left."""

_log = structlog.get_logger(__name__)


class Exporter:
    """Sends to one tracker. Close it."""

    def __init__(self, folder: RunFolder, config: RunConfig, tracker: str) -> None:
        self._folder = folder
        self._config = config
        self._name = tracker
        self._held = ExitStack()
        self._trackers: dict[str, Any] = {}
        self._file = CursorFile(folder.path, tracker)
        self._held.enter_context(self._file.locked())
        self._cursor = self._file.read()

    def send_page(self) -> int:
        """Send the next points of every policy, or the next rollouts, and remember that; how many
        were sent."""
        if self._name == OPENTELEMETRY:
            return self._send_rollouts()
        num_sent = 0
        for policy in self._config.trained:
            points, sent = next_points(self._folder, policy, self._cursor.of(policy))
            if points:
                with wrap_errors(TrackerError, f"{self._name} did not take {len(points)} points"):
                    self._tracker(policy).send(points)
            if sent != self._cursor.of(policy):
                self._cursor = self._cursor.after(policy, sent)
                self._file.write(self._cursor)
            num_sent += len(points)
        return num_sent

    def _send_rollouts(self) -> int:
        rollouts, arrivals = next_rollouts(self._folder, self._cursor.arrivals)
        if rollouts:
            with wrap_errors(TrackerError, f"{self._name} did not take {len(rollouts)} rollouts"):
                self._tracker(next(iter(self._config.trained))).send(rollouts)
        if arrivals != self._cursor.arrivals:
            self._cursor = replace(self._cursor, arrivals=arrivals)
            self._file.write(self._cursor)
        return len(rollouts)

    def send_all(self) -> int:
        total = 0
        while num_sent := self.send_page():
            total += num_sent
        return total

    def close(self) -> None:
        """Ends its trackers; raises TrackerError if one does not end well."""
        with self._held, wrap_errors(TrackerError, f"{self._name} did not close"):
            for tracker in self._trackers.values():
                tracker.close()

    def _tracker(self, policy: str) -> Any:
        if policy not in self._trackers:
            self._trackers[policy] = load_tracker(self._name)(self._tracked_run(policy))
        return self._trackers[policy]

    def _tracked_run(self, policy: str) -> TrackedRun:
        run = self._config.name
        names = list(self._config.models)
        return TrackedRun(
            id=f"{self._cursor.id}{names.index(policy)}",
            name=run if len(self._config.trained) == 1 else f"{run}-{policy}",
            run=run,
            policy=policy,
            folder=self._folder.path,
            config=plain_config(self._config),
        )


def plain_config(config: RunConfig) -> Mapping[str, Any]:
    """The config as numbers, text, lists and mappings, without secrets."""
    return json.loads(hide_secrets(json.dumps(config.model_dump(mode="json"))))


def catch_up(folder: RunFolder, config: RunConfig, tracker: str) -> int:
    """Send what a tracker lacks of a run; how many points that were."""
    exporter = Exporter(folder, config, tracker)
    try:
        return exporter.send_all()
    finally:
        exporter.close()


def follow(
    folder: RunFolder, config: RunConfig, trackers: Sequence[str], stop: threading.Event
) -> None:
    """Send every new point to all trackers until `stop` is set, then what is left within DRAIN_S.

    consumes: commits and evaluations in the ledger · produces: points in trackers
    waits for: POLL_S, or a tracker that does not answer · woken by: `stop`"""
    threads = [
        threading.Thread(
            target=_follow_one,
            args=(lambda name=name: Exporter(folder, config, name), name, stop),
            name=f"tracker {name}",
            daemon=True,  # a tracker that hangs does not keep the process
        )
        for name in trackers
    ]
    for thread in threads:
        thread.start()
    while not stop.wait(LAST_RETRY_S):
        pass
    give_up_at = time.monotonic() + DRAIN_S
    for thread in threads:
        thread.join(max(0.0, give_up_at - time.monotonic()))
        if thread.is_alive():
            _log.error(f"{thread.name} did not take the last points in {DRAIN_S:g} s", next=_LATER)


_LATER = "`penstock track RUN` sends them later"


def _follow_one(open_exporter: Callable[[], Exporter], name: str, stop: threading.Event) -> None:
    exporter: Exporter | None = None
    retry_s = FIRST_RETRY_S
    while True:
        is_last = stop.is_set()  # first: what is committed by then is sent
        try:
            exporter = exporter or open_exporter()
            exporter.send_all()
            if is_last:
                exporter.close()
                return
            retry_s = FIRST_RETRY_S
            stop.wait(POLL_S)
        except (TrackerError, ConfigError, StoreError, OSError) as error:
            say = _log.error if retry_s == FIRST_RETRY_S else _log.warning
            say("tracker failed; the run goes on, and it gets the points later", why=str(error))
            exporter = _discard(exporter)
            if is_last:
                return
            stop.wait(retry_s)
            retry_s = min(LAST_RETRY_S, retry_s * 2)


def _discard(exporter: Exporter | None) -> None:
    """A tracker that failed is made again."""
    try:
        if exporter is not None:
            exporter.close()
    except (TrackerError, OSError) as error:
        _log.warning("tracker closed with an error", why=str(error))
