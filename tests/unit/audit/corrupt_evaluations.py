# SPDX-License-Identifier: Apache-2.0
"""Evaluations that lack questions or answers. Each returns what the audit must name."""

from __future__ import annotations

from pathlib import Path

from tests.unit.audit.tampering import insert

GROUP = "p0-e1-0-0"
NAME = "policy@1.0"


def begin(run_dir: Path, *, state: str, num_groups: int) -> None:
    record = {
        "policy": "policy",
        "incarnation": 1,
        "number": 0,
        "pins": '{"policy":[1,0]}',
        "suites": '{"held_out":"digest"}',
        "num_groups": num_groups,
        "samples": 1,
        "temperature": 0.0,
        "state": state,
        "scores": "{}",
        "started_at": 0.0,
        "ended_at": 0.0,
    }
    insert(run_dir, "evaluations", record)


def answer(run_dir: Path, *, group_id: str = GROUP, failures: str = "{}") -> None:
    record = {
        "group_id": group_id,
        "policy": "policy",
        "incarnation": 1,
        "number": 0,
        "suite": "held_out",
        "ordinal": 0,
        "question": "0",
        "seed": 1,
        "num_slots": 1,
        "packed_rows": b"",
        "failures": failures,
        "at": 0.0,
    }
    insert(run_dir, "evaluated", record)


def end_without_a_question(run_dir: Path) -> str:
    begin(run_dir, state="done", num_groups=2)
    answer(run_dir, failures='{"0":"failed: engine"}')
    return NAME


def ask_a_question_twice(run_dir: Path) -> str:
    begin(run_dir, state="open", num_groups=2)
    for group_id in (GROUP, "p0-e1-0-1"):
        answer(run_dir, group_id=group_id, failures='{"0":"failed: engine"}')
    return NAME


def answer_without_evaluation(run_dir: Path) -> str:
    answer(run_dir, failures='{"0":"failed: engine"}')
    return GROUP


def lose_an_answer(run_dir: Path) -> str:
    begin(run_dir, state="done", num_groups=1)
    answer(run_dir)
    return GROUP
