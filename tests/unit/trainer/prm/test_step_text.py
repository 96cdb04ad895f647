# SPDX-License-Identifier: Apache-2.0
"""The scored text: what led to a step and the step, never what came of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.errors import ConfigError
from penstock.trainer.prm import step_text as step_text_module
from penstock.trainer.prm.step_text import (
    MAX_CONTEXT_CHARS,
    require_digest,
    scored_texts,
    step_text,
    text_digest,
)
from penstock.trainer.prm.traces import (
    Step,
    Trace,
    append_line,
    cut_torn_line,
    read_lines,
    write_lines,
)

STEPS = (
    Step(prompt="task: find x\n", action="search(x)"),
    Step(prompt="\nfound: secret 42\n", action="answer(42)", parent=0),
)


def test_a_step_is_rated_without_its_result() -> None:
    assert "secret" not in step_text(STEPS, 0)
    changed = (STEPS[0], replace(STEPS[1], prompt="\nnothing\n", action="give up"))
    assert step_text(changed, 0) == step_text(STEPS, 0)
    assert step_text(changed, 1) != step_text(STEPS, 1), "earlier results are context"


def test_the_context_is_the_chain_of_parents() -> None:
    other = Step(prompt="another session\n", action="noise")
    text = step_text((STEPS[0], other, replace(STEPS[1], parent=0)), 2)
    assert "another session" not in text
    assert text.index("task: find x") < text.index("search(x)") < text.index("secret 42")
    assert text.endswith("answer(42)")


def test_a_long_context_keeps_the_task_and_the_state() -> None:
    prompt = "TASK" + "x" * 3 * MAX_CONTEXT_CHARS + "STATE"
    text = step_text((Step(prompt=prompt, action="go"),), 0)
    assert "TASK" in text and "STATE" in text and len(text) < MAX_CONTEXT_CHARS + 100


def test_malformed_steps_and_turns_of_others_have_no_text() -> None:
    steps = (replace(STEPS[0], malformed="empty"), replace(STEPS[1], is_scored=False))
    assert scored_texts(steps) == {}
    assert [*scored_texts(STEPS)] == [0, 1]


def test_the_digest_follows_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    before = text_digest()
    require_digest(before, "the model", "train it again")
    monkeypatch.setattr(step_text_module, "STEP_MARK", "\n[action]\n")
    text_digest.cache_clear()
    try:
        assert text_digest() != before
        with pytest.raises(ConfigError, match=r"the model was made .* train it again"):
            require_digest(before, "the model", "train it again")
    finally:
        text_digest.cache_clear()


def test_lines_come_back_and_a_torn_one_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "new" / "traces.jsonl"
    trace = Trace(row="p0-0.0.1", group="p0-0", task={}, outcome="completed", reward=1, steps=STEPS)
    assert write_lines(path, [trace]) == 1
    append_line(path, trace)
    path.write_bytes(path.read_bytes() + b'{"row": "p0')
    with pytest.raises(ConfigError, match="line 3: not a line"):
        list(read_lines(path, Trace))
    cut_torn_line(path)
    assert list(read_lines(path, Trace)) == [trace, trace]
