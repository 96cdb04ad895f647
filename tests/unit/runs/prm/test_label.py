# SPDX-License-Identifier: Apache-2.0
"""Labels by programs and judges: malformed steps are shown to nobody, replies must hold one score,
and an interrupted command continues."""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from tests.contract.dataflow_server import serving

from penstock.errors import ConfigError, Unreachable
from penstock.runs.prm.judge import judge_rater, parse_score
from penstock.runs.prm.label import label_traces, program_rater
from penstock.trainer.prm.traces import LabelledTrace, Step, Trace, read_lines, write_lines

OWN = "tests.unit.runs.prm.test_label"


def trace(row: str, *steps: Step) -> Trace:
    return Trace(row=row, group="g", task={}, outcome="completed", reward=1.0, steps=steps)


GOOD = Step(prompt="task>", action="good")
BAD = Step(prompt="task>", action="bad")
MALFORMED = Step(prompt="task>", action="", malformed="empty")
OTHER = Step(prompt="task>", action="another policy", is_scored=False)


def by_word(text: str, *, trace: Trace, step: int) -> float:
    """A program that labels."""
    assert trace.steps[step].action, "malformed steps are not shown"
    return 1.0 if text.endswith("good") else 0.25


def broken(text: str, *, trace: Trace, step: int) -> float:
    raise RuntimeError("no idea")


def too_large(text: str, *, trace: Trace, step: int) -> float:
    return 7.0


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    path = tmp_path / "traces.jsonl"
    write_lines(path, [trace("r0", GOOD, MALFORMED, OTHER), trace("r1", BAD)])
    return path


def labels_of(path: Path) -> dict[str, tuple[float | None, ...]]:
    return {one.trace.row: one.labels for one in read_lines(path, LabelledTrace)}


async def test_labels_by_a_program(traces: Path, tmp_path: Path) -> None:
    out = tmp_path / "labels.jsonl"
    found = await label_traces(traces, out, program_rater(f"{OWN}:by_word"), "program:x")
    assert labels_of(out) == {"r0": (1.0, 0.0, None), "r1": (0.25,)}
    assert (found.num_steps, found.num_malformed, found.num_unlabelled) == (2, 1, 0)


async def test_an_interrupted_command_continues(traces: Path, tmp_path: Path) -> None:
    out = tmp_path / "labels.jsonl"
    rate = program_rater(f"{OWN}:by_word")
    await label_traces(traces, out, rate, "program:x")
    first, _ = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(first + b'{"trace": {"row"')
    found = await label_traces(traces, out, rate, "program:x")
    assert (found.num_known, found.num_traces) == (1, 1)
    assert set(labels_of(out)) == {"r0", "r1"}
    with pytest.raises(ConfigError, match="holds labels by program:x"):
        await label_traces(traces, out, rate, "judge:y")
    out.write_bytes(first.replace(b'"text_digest":"', b'"text_digest":"0'))
    with pytest.raises(ConfigError, match="step texts of another form"):
        await label_traces(traces, out, rate, "program:x")


@pytest.mark.parametrize(
    ("name", "why"),
    [("broken", "row r0, step 0: RuntimeError: no idea"), ("too_large", "returned 7.0; a label")],
)
async def test_a_program_that_fails_says_where(
    traces: Path, tmp_path: Path, name: str, why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        await label_traces(traces, tmp_path / "out", program_rater(f"{OWN}:{name}"), "program:x")


def nonce_of(asked: dict[str, Any]) -> str:
    return asked["messages"][1]["content"].split()[1]


@contextmanager
def judge(*replies: object) -> Generator[tuple[str, list[dict[str, Any]]]]:
    """An endpoint that gives these replies in turn, and what it was asked."""
    asked: list[dict[str, Any]] = []
    remaining = list(replies)

    async def complete(request: Request) -> JSONResponse:
        asked.append(await request.json())
        reply = remaining.pop(0)
        if isinstance(reply, int):
            return JSONResponse({"error": "no"}, status_code=reply)
        if isinstance(reply, str):
            reply = reply.replace("NONCE", nonce_of(asked[-1]))
        return JSONResponse({"choices": [{"message": {"content": reply}}]})

    with serving(
        Starlette(routes=[Route("/v1/chat/completions", complete, methods=["POST"])])
    ) as url:
        yield f"{url}/v1", asked


async def test_labels_by_a_judge(traces: Path, tmp_path: Path) -> None:
    out = tmp_path / "labels.jsonl"
    said = '{"id": "NONCE", "score": 0.75}'
    with judge(said, "I refuse", '{"score": 1}') as (url, asked):
        async with judge_rater(url, "m", "key") as rate:
            found = await label_traces(traces, out, rate, "judge:m", concurrency=1)
    assert labels_of(out) == {"r0": (0.75, 0.0, None), "r1": (None,)}
    assert found.num_unlabelled == 1 and len(asked) == 3, "a reply without a score is asked again"
    assert asked[0]["model"] == "m" and asked[0]["temperature"] == 0.0
    lines = asked[0]["messages"][1]["content"].splitlines()
    assert lines[-3:] == ["[step]", "good", lines[0]] and nonce_of(asked[0]) in lines[0]
    assert len({nonce_of(one) for one in asked}) == 3, "fresh for each question"
    assert "another policy" not in json.dumps(asked)


async def test_a_judge_that_refuses_requests_ends_the_command(traces: Path, tmp_path: Path) -> None:
    with judge(401) as (url, _):
        async with judge_rater(url, "m", "") as rate:
            with pytest.raises(ConfigError, match=r"refused a step: 401 .*OPENAI_API_KEY"):
                await label_traces(traces, tmp_path / "out", rate, "judge:m", concurrency=1)
    async with judge_rater(url, "m", "") as rate:
        with pytest.raises(Unreachable, match="cannot be reached"):
            await label_traces(traces, tmp_path / "out", rate, "judge:m", concurrency=1)


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ('{"id": "n", "score": 0.5}', 0.5),
        ('```json\n{"id": "n", "score": 1}\n```', 1.0),
        ('<think>{"score": 1}</think>{"id": "n", "score": 0}', 0.0),
        ("0.7", None),
        ('{"score": 0.5}', None),
        ('{"id": "m", "score": 0.5}', None),
        ('Here: {"id": "n", "score": 0.5}', None),
        ('{"id": "n", "score": "high"}', None),
        ('{"id": "n", "score": true}', None),
        ('{"id": "n", "score": 1.5}', None),
        ('{"id": "n", "score": NaN}', None),
        ('{"id": "n", "score": 0.1, "score": 0.9}', None),
        ('{"id": "n", "score": 0.1', None),
        ("[0.5]", None),
        ("", None),
    ],
)
def test_only_one_score_counts(reply: str, score: float | None) -> None:
    assert parse_score(reply, "n") == score
