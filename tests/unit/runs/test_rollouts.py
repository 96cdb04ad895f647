# SPDX-License-Identifier: Apache-2.0
"""Traces of rollouts, as a collector of ours receives them over OTLP: every delivered rollout once,
whatever was dead, with its model calls and tool calls inside, and without a word of what was said.
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from tests.unit.dashboard.recorded_run import HOSTILE, record_run

from penstock.errors import TrackerError
from penstock.fleet.run_folder import RunFolder
from penstock.observe.tracking import Rollout, TrackedRun, load_tracker
from penstock.runs import rollouts
from penstock.runs.history import open_run
from penstock.runs.tracking import catch_up
from penstock.types import ToolUse, view_ids

SECRET = "sk-live-never-in-a-trace"


class Collector(ThreadingHTTPServer):
    """Decodes what is posted to /v1/traces; refuses while it is dead."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.is_dead = False
        self.dies_after_storing = False
        self.bodies: list[bytes] = []
        self.spans: dict[str, list[Any]] = {}
        """By span id; a span that came twice is there twice."""

    def store(self, body: bytes) -> None:
        self.bodies.append(body)
        request = ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.setdefault(span.span_id.hex(), []).append(span)

    def named(self, prefix: str) -> list[Any]:
        found = (spans[0] for spans in self.spans.values())
        return [span for span in found if span.name.startswith(prefix)]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        collector = self.server
        assert isinstance(collector, Collector)
        body = self.rfile.read(int(self.headers["content-length"]))
        assert self.path == "/v1/traces"
        assert self.headers["content-type"] == "application/x-protobuf"
        status = 400 if collector.is_dead else 200
        if status == 200:
            collector.store(body)
        if collector.dies_after_storing:
            collector.dies_after_storing, status = False, 400
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Generator[Collector]:
    served = Collector()
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    endpoint = f"http://127.0.0.1:{served.server_address[1]}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
    yield served
    served.shutdown()
    served.server_close()
    thread.join(timeout=60)


def attributes(span: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in span.attributes:
        kind = pair.value.WhichOneof("value")
        value = getattr(pair.value, kind)
        found[pair.key] = [one.string_value for one in value.values] if "array" in kind else value
    return found


def test_every_rollout_has_one_trace_whoever_was_dead(
    collector: Collector, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollouts, "PAGE", 7)
    folder = RunFolder(record_run(tmp_path / "run"))
    config = folder.read_config()
    collector.is_dead = True
    with pytest.raises(TrackerError, match="did not take 7 rollouts"):
        catch_up(folder, config, "opentelemetry")
    collector.is_dead, collector.dies_after_storing = False, True
    with pytest.raises(TrackerError):
        catch_up(folder, config, "opentelemetry")
    with open_run(folder.path) as run:
        recorded = [*run.trajectories()]
    assert catch_up(folder, config, "opentelemetry") == len(recorded) > 50
    assert catch_up(folder, config, "opentelemetry") == 0
    roots = {attributes(span)["gen_ai.conversation.id"]: span for span in collector.named("invoke")}
    assert set(roots) == {one.row_id for one in recorded}
    again = [spans for spans in collector.spans.values() if len(spans) > 1]
    assert 7 <= len(again) <= 40, "only the page whose answer was lost came twice, under its ids"
    for one in recorded:
        assert one.payload is not None
        root = roots[one.row_id]
        calls = [span for span in collector.named("chat ") if span.trace_id == root.trace_id]
        assert len(calls) == len(one.payload.turns)
        assert all(span.parent_span_id == root.span_id for span in calls)
        told = attributes(root)
        assert told.get("penstock.reward") == one.reward
        is_failed = one.outcome == "failed"
        assert (root.status.code == Status.STATUS_CODE_ERROR) is is_failed is ("error.type" in told)
        sampled = [attributes(span)["gen_ai.usage.output_tokens"] for span in calls]
        assert sorted(sampled) == sorted(
            len(view_ids(turn.sampled_ids)) for turn in one.payload.turns
        )
    assert not any(HOSTILE.encode() in body for body in collector.bodies)


def test_spans_follow_the_conventions(collector: Collector, tmp_path: Path) -> None:
    folder = RunFolder(record_run(tmp_path / "run"))
    with open_run(folder.path) as run:
        one = next(one for one in run.trajectories() if one.payload and one.payload.turns)
    assert one.payload is not None
    first = replace(one.payload.turns[0], started_at=100.0, ended_at=104.0)
    second = replace(first, parent=0, started_at=107.0, ended_at=109.0)
    use = ToolUse(turn=0, name="search", arguments=SECRET, result=SECRET, seconds=1.0)
    uses = (use, replace(use, name="python", seconds=2.0, is_error=True))
    trajectory = replace(
        one.payload, turns=(first, second), tool_uses=uses, started_at=99.0, ended_at=110.0
    )
    tracked = TrackedRun(
        id="r1", name="run", run="run", policy="policy", folder=folder.path, config={}
    )
    tracer: Any = load_tracker("opentelemetry")(tracked)
    tracer.send(
        [Rollout(trajectory=trajectory, workflow="w", source="s", task_key="k", reward=0.5)]
    )
    tracer.close()
    [root], calls = collector.named("invoke_agent w"), collector.named("chat policy")
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (99 * 10**9, 110 * 10**9)
    told = [attributes(call) for call in calls]
    context = len(view_ids(first.prompt_ids))
    assert [one["gen_ai.usage.input_tokens"] for one in told] == [
        context,
        2 * context + len(view_ids(first.sampled_ids)),
    ]
    assert told[0]["gen_ai.operation.name"] == "chat"
    assert told[0]["gen_ai.request.model"] == "policy"
    assert told[0]["gen_ai.response.model"].startswith("policy@1.")
    assert told[0]["gen_ai.response.finish_reasons"] == [first.finish.value]
    [search], [python] = collector.named("execute_tool search"), collector.named("execute_tool p")
    assert search.start_time_unix_nano == 104 * 10**9
    assert (python.start_time_unix_nano, python.end_time_unix_nano) == (105 * 10**9, 107 * 10**9)
    assert python.status.code == Status.STATUS_CODE_ERROR
    assert SECRET.encode() not in b"".join(collector.bodies)
