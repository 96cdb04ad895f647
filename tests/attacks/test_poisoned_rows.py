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

from penstock import bounds
from penstock.dataflow.service.nodes.validate import summarise
from penstock.errors import BadRequest
from penstock.observe.tracking import Rollout, TrackedRun, load_tracker
from penstock.runs.export.atif_document import num_prompt_tokens, to_document
from penstock.runs.export.prompt_parts import PromptReader
from penstock.runs.export.trajectories import export_trajectories
from penstock.runs.history import open_run
from penstock.runs.recorded_trajectory import RecordedTrajectory
from penstock.trainer import samples
from penstock.types import ToolUse, Trajectory
from penstock.wire.codec import decode, encode

USE = ToolUse(turn=0, name="search", arguments="", result="")
LATEST = 1e10


def _tree(depth: int, branches: int) -> Callable[[Trajectory], Trajectory]:
    """So many turns without tokens one after another, and then so many of a token each."""

    def grow(one: Trajectory) -> Trajectory:
        first = one.turns[0]
        empty = replace(first, prompt_ids=b"", sampled_ids=b"", logprobs=b"", spans=())
        span = replace(first.spans[0], start=0, end=1)
        leaf = replace(
            first, sampled_ids=bytes(4), logprobs=bytes(4), spans=(span,), parent=depth - 1
        )
        stem = [replace(empty, parent=at - 1) for at in range(depth)]
        return replace(one, turns=(*stem, *[leaf] * branches))

    return grow


def _timed(at: float) -> Callable[[Trajectory], Trajectory]:
    return lambda one: replace(one, started_at=at, ended_at=at)


def _turn_timed(at: float) -> Callable[[Trajectory], Trajectory]:
    return lambda one: replace(one, turns=(replace(one.turns[0], started_at=at, ended_at=at),))


def _used_after(turn: int) -> Callable[[Trajectory], Trajectory]:
    return lambda one: replace(one, tool_uses=(replace(USE, turn=turn),))


POISON = {
    **{f"time {at:g}": _timed(at) for at in (-1.0, 2 * LATEST, 1e300)},
    **{f"time of a turn {at:g}": _turn_timed(at) for at in (-1.0, 2 * LATEST, 1e300)},
    "2048 branches of 2048 turns": _tree(2048, 2048),
    **{f"call after turn {turn}": _used_after(turn) for turn in (-2, 1, 1 << 62)},
}
HARMLESS: dict[str, Callable[[Trajectory], Trajectory]] = {
    "latest": lambda one: _turn_timed(LATEST)(_timed(LATEST)(one)),
    "many branches": _tree(30, 4000),
    "many turns": _tree(4094, 2),
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


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_delivered_is_trained_at_a_cost_in_proportion(
    recorded: RecordedTrajectory, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A row of 1.2 MB whose branches shared 2,048 turns took a trainer 17 s and 1.9 GB, though it
    has 4,096 tokens: a batch of four was sealed, and ended the trainer at every start."""
    assert recorded.payload is not None
    one = HARMLESS[name](recorded.payload)
    kept: list[int] = []
    builder: Any = vars(samples)["_SampleBuilder"]
    add: Any = builder._add

    def counted(*args: Any, **named: Any) -> Any:
        kept.append(1)
        return add(*args, **named)

    monkeypatch.setattr(builder, "_add", counted)
    samples.make_samples([(0, one)], one.turns[0].policy)
    assert len(kept) <= 2 * bounds.MAX_BRANCH_TURNS


def test_a_document_does_not_repeat_a_prompt_without_end(
    recorded: RecordedTrajectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,000 turns that extend a prompt of 28,000 tokens by nothing are a row of 1.4 MB, and took an
    export 2.9 GB."""
    assert recorded.payload is not None
    long = replace(recorded.payload.turns[0], prompt_ids=bytes(4 * 1000))
    turns = (long, *[replace(long, prompt_ids=b"", parent=0) for _ in range(10)])
    assert (
        num_prompt_tokens(replace(recorded.payload, turns=turns))
        == 11_000 + 10 * len(long.sampled_ids) // 4
    )
    monkeypatch.setattr("penstock.runs.export.atif_document.MAX_PROMPT_TOKENS", 0)
    folder = record_run(tmp_path / "run")
    with open_run(folder) as run:
        number = sum(one.payload is not None for one in run.trajectories())
    done = export_trajectories(folder, tmp_path / "all.jsonl")
    assert done.num_written == 0 and 0 < done.num_too_long == number
    assert export_trajectories(folder, tmp_path / "all.parquet").num_written == number


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
