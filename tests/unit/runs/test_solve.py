# SPDX-License-Identifier: Apache-2.0
"""`penstock solve`: what a person sees while an agent works."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from tests.unit.cli.test_commands import run_main
from tests.unit.runs.broken_cases import edited
from tests.unit.runs.test_try_rollouts import TOOL, TextServer, text_server

from penstock.cli.solve_lines import EventWriter
from penstock.runs.solve import EventKind, SolveEvent

server = text_server

MODULE = """
def reward(completions, **columns):
    return [float(a == "ba") for a in columns["answer"]]

async def run(task, ctx):
    messages = [{"role": "user", "content": task.payload["prompt"]}]
    answer = await ctx.policy().chat(messages)
    messages.append(answer.message)
    messages.append({"role": "tool", "tool_call_id": "1", "content": "a" * 4})
    return (await ctx.policy().chat(messages)).text
"""


@pytest.fixture
def run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    module = f"solved_{abs(hash(request.node.name))}"
    (tmp_path / f"{module}.py").write_text(MODULE)
    path = tmp_path / "run.yaml"
    path.write_text(
        edited(
            f"reward: {module}:reward",
            f"workflow: {module}:run",
            "models:\n  policy: {init: builtin:tiny-qwen3, engine: scripted}",
        )
    )
    return path


def test_turns_and_results_of_tools_are_shown_once_and_in_order(
    capsys: pytest.CaptureFixture[str], run_file: Path
) -> None:
    words = ("solve", "ab", "--run", str(run_file), "--answer", "ba")
    code, out, err = run_main(capsys, *words)
    assert code == 0, out + err
    *shown, end = out.splitlines()
    assert [line[:11].strip() for line in shown] == ["user", "policy", "tool", "policy"]
    assert shown[0] == "user       ab"
    assert shown[2] == "tool       aaaa"
    assert "2 turns" in end
    assert end.endswith("reward 1")
    assert "loading builtin:tiny-qwen3" in err
    assert "\x1b" not in out, "no colours without a terminal"


def test_tool_calls_and_their_results_are_shown(
    capsys: pytest.CaptureFixture[str], run_file: Path, server: TextServer
) -> None:
    """The model calls a tool that does not exist, sees the error, and answers."""
    text = run_file.read_text()
    start = text.index("workflow:")
    run_file.write_text(text.replace(text[start:].splitlines()[0], "workflow: tool_loop"))
    server.answers = [
        {"role": "assistant", "content": None, "tool_calls": [TOOL]},
        {"role": "assistant", "content": "ba"},
    ]
    words = ("--run", str(run_file), "--base-url", server.url, "--answer", "ba")
    code, out, _ = run_main(capsys, "solve", "ab", *words)
    assert code == 0, out
    lines = out.splitlines()
    assert lines[:2] == ["user       ab", 'calls      add({"a": 1})']
    assert lines[2].startswith("tool       ")
    assert "add" in lines[2]
    assert lines[3] == "policy     ba"
    assert lines[-2].startswith("  add: failed, ")
    assert "2 turns, 1 tool call, " in lines[-1]
    assert lines[-1].endswith("reward 1")


def test_without_the_expected_answer_there_is_no_reward(
    capsys: pytest.CaptureFixture[str], run_file: Path
) -> None:
    code, out, _ = run_main(capsys, "solve", "ab", "--run", str(run_file))
    assert code == 0
    assert "no reward" in out
    assert "--answer" in out.splitlines()[-1]


def test_an_answer_that_was_cut_off_says_so_with_a_reward_and_without(
    capsys: pytest.CaptureFixture[str], run_file: Path
) -> None:
    run_file.write_text(run_file.read_text().replace("max_tokens: 3", "max_tokens: 1"))
    for words in ((), ("--answer", "ba")):
        code, out, _ = run_main(capsys, "solve", "ab", "--run", str(run_file), *words)
        assert code == 0, out
        assert "--- truncated (length): 2 turns" in out


def test_json_is_one_object(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    words = ("solve", "ab", "--run", str(run_file), "--answer", "no", "--json")
    code, out, _ = run_main(capsys, *words)
    report = json.loads(out)
    assert (code, report["reward"], report["turns"], report["version"]) == (0, 0.0, 2, "policy@0")


def test_a_workflow_that_raises_is_a_failure(
    capsys: pytest.CaptureFixture[str], run_file: Path
) -> None:
    [module] = run_file.parent.glob("solved_*.py")
    module.write_text(MODULE + "\nasync def run(task, ctx):\n    raise KeyError('lost')\n")
    code, out, _ = run_main(capsys, "solve", "ab", "--run", str(run_file))
    assert code == 1
    assert "--- failed (workflow)" in out
    assert "lost" in out


def test_a_reward_that_cannot_be_imported_ends_it(
    capsys: pytest.CaptureFixture[str], run_file: Path
) -> None:
    [module] = run_file.parent.glob("solved_*.py")
    module.write_text(MODULE.replace("def reward", "def other"))
    code, _, err = run_main(capsys, "solve", "ab", "--run", str(run_file))
    assert code == 1
    assert "'reward'" in err
    assert "define it there" in err


def test_an_unknown_source_is_named(capsys: pytest.CaptureFixture[str], run_file: Path) -> None:
    code, _, err = run_main(capsys, "solve", "ab", "--run", str(run_file), "--source", "x")
    assert code == 1
    assert "--source from: train" in err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_long_lines_break_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = Terminal()
    writer = EventWriter(out)
    for piece in ("one two ", "three four five six ", "seven eight\x1b[2Jnine\nten"):
        writer.write(SolveEvent(kind=EventKind.TEXT, who="policy", text=piece))
    writer.write(SolveEvent(kind=EventKind.END, who="policy"))
    writer.write(SolveEvent(kind=EventKind.MESSAGE, who="tool", text="42"))
    plain = out.getvalue()
    for code in ("\x1b[36m", "\x1b[2m", "\x1b[0m"):
        plain = plain.replace(code, "")
    assert "\x1b" not in plain, "the model does not steer the terminal"
    lines = [line.rstrip() for line in plain.splitlines()]
    assert lines[0] == "policy     one two three four five six"
    assert lines[1].startswith("           seven eight")
    assert lines[2:] == ["           ten", "tool       42"]
    assert max(map(len, lines)) <= 40
