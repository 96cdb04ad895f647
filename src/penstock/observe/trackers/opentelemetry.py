# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry: a trace for each rollout, by the conventions for generative AI, over OTLP/HTTP.

Owns ids, names and attributes of spans. OTEL_EXPORTER_OTLP_ENDPOINT and its relatives say where the
collector is. Sends no prompt, no answer, no argument and no result of a tool."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from penstock.observe.tracking import Rollout, TrackedRun
from penstock.types import FinishReason, OutcomeKind, ToolUse, Trajectory, Turn

PROVIDER = "penstock"
TIMEOUT_S = 10.0
"""For one request; later its page of rollouts is sent again, with the same ids."""
MAX_SPANS = 1024
"""Of one request: a rollout of thousands of calls must not outgrow what a collector takes, which
then would get no later rollout either."""
MAX_NANOSECONDS = (1 << 63) - 1
ID_BYTES = 4
"""Of a token id in a record."""
Attributes = Mapping[str, str | bool | int | float | Sequence[str]]


class Spans:
    def __init__(self, run: TrackedRun) -> None:
        self._run_id = run.id
        self._resource = Resource.create(
            {"service.name": PROVIDER, "service.instance.id": run.id, "penstock.run": run.run}
        )
        self._exporter = OTLPSpanExporter(timeout=TIMEOUT_S)

    def send(self, rollouts: Sequence[Rollout]) -> None:
        spans = (span for rollout in rollouts for span in self._spans(rollout))
        while part := [*islice(spans, MAX_SPANS)]:
            if self._exporter.export(part) is not SpanExportResult.SUCCESS:
                raise ConnectionError(
                    "see OTEL_EXPORTER_OTLP_ENDPOINT for where the collector should be"
                )

    def close(self) -> None:
        self._exporter.shutdown()

    def _spans(self, rollout: Rollout) -> Iterator[ReadableSpan]:
        """The rollout, then its model calls and tool calls inside it."""
        one = rollout.trajectory
        is_failed = one.outcome.kind is OutcomeKind.FAILED
        yield self._span(
            rollout,
            0,
            f"invoke_agent {rollout.workflow}",
            (one.started_at, one.ended_at),
            _rollout_attributes(rollout),
            status=Status(StatusCode.ERROR, one.outcome.reason) if is_failed else Status(),
        )
        for index, turn in enumerate(one.turns, 1):
            span, model = (turn.started_at, turn.ended_at), _turn_attributes(one, turn)
            name, is_aborted = f"chat {turn.policy}", turn.finish is FinishReason.ABORT
            status = Status(StatusCode.ERROR, "aborted") if is_aborted else Status()
            yield self._span(rollout, index, name, span, model, status=status, kind=SpanKind.CLIENT)
        for index, (use, start) in enumerate(_tool_times(one), 1 + len(one.turns)):
            yield self._span(
                rollout,
                index,
                f"execute_tool {use.name}",
                (start, start + use.seconds),
                {
                    "gen_ai.operation.name": "execute_tool",
                    "gen_ai.tool.name": use.name,
                    "gen_ai.tool.type": "function",
                },
                status=Status(StatusCode.ERROR) if use.is_error else Status(),
            )

    def _span(
        self,
        rollout: Rollout,
        index: int,
        name: str,
        span: tuple[float, float],
        attributes: Attributes,
        *,
        status: Status,
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> ReadableSpan:
        begin, end = (_nanoseconds(at or rollout.trajectory.started_at) for at in span)
        return ReadableSpan(
            name,
            context=self._context(rollout, index),
            parent=self._context(rollout, 0) if index else None,
            resource=self._resource,
            attributes=attributes,
            kind=kind,
            status=status,
            start_time=begin,
            end_time=max(begin, end),
        )

    def _context(self, rollout: Rollout, index: int) -> SpanContext:
        """The same ids whenever it is sent, so that a collector can drop what it has."""
        row = f"{self._run_id} {rollout.trajectory.row_id}"
        trace = hashlib.sha256(row.encode()).digest()
        span = hashlib.sha256(f"{row} {index}".encode()).digest()
        return SpanContext(
            trace_id=int.from_bytes(trace[:16], "big"),
            span_id=int.from_bytes(span[:8], "big"),
            is_remote=False,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
        )


def _nanoseconds(at: float) -> int:
    """What a span can say; lengths of calls add up beyond it, by the word of a node."""
    return round(min(max(0.0, 1e9 * at), MAX_NANOSECONDS))


def _rollout_attributes(rollout: Rollout) -> Attributes:
    one = rollout.trajectory
    found: dict[str, str | bool | int | float | Sequence[str]] = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.agent.name": rollout.workflow,
        "gen_ai.conversation.id": one.row_id,
        "gen_ai.usage.output_tokens": sum(len(turn.sampled_ids) for turn in one.turns) // ID_BYTES,
        "penstock.group": one.group_id,
        "penstock.attempt": one.attempt,
        "penstock.node": one.node_id,
        "penstock.source": rollout.source,
        "penstock.task": rollout.task_key,
        "penstock.outcome": one.outcome.kind.value,
    }
    if rollout.reward is not None:
        found["penstock.reward"] = rollout.reward
    if one.outcome.kind is OutcomeKind.FAILED:
        found["error.type"] = one.outcome.reason
    return found


def _turn_attributes(one: Trajectory, turn: Turn) -> Attributes:
    sampling = turn.sampling
    version = max(((span.incarnation, span.number) for span in turn.spans), default=(0, 0))
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.conversation.id": one.row_id,
        "gen_ai.request.model": turn.policy,
        "gen_ai.response.model": f"{turn.policy}@{version[0]}.{version[1]}",
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.response.finish_reasons": [turn.finish.value],
        "gen_ai.usage.input_tokens": _context_tokens(one, turn),
        "gen_ai.usage.output_tokens": len(turn.sampled_ids) // ID_BYTES,
        "penstock.role": turn.role,
        "penstock.agent": turn.agent,
    }


def _context_tokens(one: Trajectory, turn: Turn) -> int:
    """Its whole prompt: the prompt of the turn that it extends, its answer, and what was added."""
    num_bytes, at = len(turn.prompt_ids), turn.parent
    while at >= 0:
        parent = one.turns[at]
        num_bytes += len(parent.prompt_ids) + len(parent.sampled_ids)
        at = parent.parent
    return num_bytes // ID_BYTES


def _tool_times(one: Trajectory) -> Iterator[tuple[ToolUse, float]]:
    """Each call of a tool with its start: a record has only its length, so calls after a turn
    follow each other from the end of the turn."""
    at: dict[int, float] = {}
    for use in one.tool_uses:
        ended = one.turns[use.turn].ended_at if use.turn >= 0 else one.started_at
        start = at.get(use.turn, ended or one.started_at)
        yield use, start
        at[use.turn] = start + use.seconds


TRACKER = Spans
