# SPDX-License-Identifier: Apache-2.0
"""One row of a node jams nothing that is made of all rows: traces, which go on behind it, and
exports. What no calendar, index or collector can hold is refused at the door."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace.export import SpanExportResult
from tests.unit.dashboard.recorded_run import record_run

from penstock.dataflow.service.nodes.validate import summarise
from penstock.errors import BadRequest
from penstock.observe.tracking import Rollout, TrackedRun, load_tracker
from penstock.runs.export.atif_document import to_document
from penstock.runs.export.prompt_parts import PromptReader
from penstock.runs.history import open_run
from penstock.runs.recorded_trajectory import RecordedTrajectory
from penstock.types import ToolUse, Trajectory
from penstock.wire.codec import decode, encode

USE = ToolUse(turn=0, name="search", arguments="", result="")
LATEST = 1e10


def _timed(at: float) -> Callable[[Trajectory], Trajectory]:
    return lambda one: replace(one, started_at=at, ended_at=at)


def _turn_timed(at: float) -> Callable[[Trajectory], Trajectory]:
    return lambda one: replace(one, turns=(replace(one.turns[0], started_at=at, ended_at=at),))


def _used_after(turn: int) -> Callable[[Trajectory], Trajectory]:
    return lambda one: replace(one, tool_uses=(replace(USE, turn=turn),))


POISON = {
    **{f"time {at:g}": _timed(at) for at in (-1.0, 2 * LATEST, 1e300)},
    **{f"time of a turn {at:g}": _turn_timed(at) for at in (-1.0, 2 * LATEST, 1e300)},
    **{f"call after turn {turn}": _used_after(turn) for turn in (-2, 1, 1 << 62)},
}
HARMLESS: dict[str, Callable[[Trajectory], Trajectory]] = {
    "latest": lambda one: _turn_timed(LATEST)(_timed(LATEST)(one)),
    "long calls": lambda one: replace(one, tool_uses=(replace(USE, seconds=1e9),) * 4096),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RecordedTrajectory:
    with open_run(record_run(tmp_path_factory.mktemp("run") / "run")) as run:
        return next(
            one for one in run.trajectories() if one.payload and len(one.payload.turns) == 1
        )


def _delivered(one: Trajectory) -> Trajectory | str:
    """As the service has it, or why it refuses it."""
    try:
        found = decode(encode(one), Trajectory)
    except BadRequest as error:
        return str(error)
    judged = summarise(found, "0" * 64, lambda policy, incarnation, number: True)
    return judged if isinstance(judged, str) else found


def _tracer(folder: Path) -> Any:
    run = TrackedRun(id="r", name="r", run="r", policy="policy", folder=folder, config={})
    return load_tracker("opentelemetry")(run)


def _rollout(one: Trajectory) -> Rollout:
    return Rollout(trajectory=one, workflow="w", source="s", task_key="k", reward=0.5)


@pytest.mark.parametrize("name", POISON)
def test_a_row_that_would_jam_all_others_is_refused(
    recorded: RecordedTrajectory, name: str
) -> None:
    assert recorded.payload is not None
    assert not isinstance(_delivered(recorded.payload), str)
    assert isinstance(_delivered(POISON[name](recorded.payload)), str)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_delivered_can_be_exported_and_traced(
    recorded: RecordedTrajectory, tmp_path: Path, name: str
) -> None:
    assert recorded.payload is not None
    one = _delivered(HARMLESS[name](recorded.payload))
    assert not isinstance(one, str), one
    encode_spans([*_tracer(tmp_path)._spans(_rollout(one))])
    texts = PromptReader(recorded.decoder).read(one)
    assert to_document(replace(recorded, payload=one), texts).steps


def test_a_collector_gets_no_more_than_it_takes_at_a_time(
    recorded: RecordedTrajectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a page with such a row is refused again and again, and nothing after it is sent."""
    assert recorded.payload is not None
    one = replace(recorded.payload, tool_uses=(USE,) * 4096)
    tracer, sizes = _tracer(tmp_path), list[int]()

    def export(spans: Any) -> SpanExportResult:
        sizes.append(len(spans))
        return SpanExportResult.SUCCESS

    monkeypatch.setattr(tracer._exporter, "export", export)
    tracer.send([_rollout(one)] * 64)
    assert max(sizes) <= 1024 and sum(sizes) == 64 * (1 + 1 + 4096)
