# SPDX-License-Identifier: Apache-2.0
"""`penstock eval`: a run, a folder and a server, on a file of questions."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from tests.unit.cli.test_commands import run_main
from tests.unit.runs.broken_cases import edited

from penstock.runs.result_files import read_results, run_results
from penstock.trainer.model_folders import init_model

REWARD = """
def reward(completions, **columns):
    return [float(c == a) for c, a in zip(completions, columns["answer"])]

"""
QUESTIONS = [{"question": f"q{i}", "prompt": f"say {i}", "answer": str(i)} for i in range(4)]


@dataclass
class EchoServer:
    """An OpenAI-compatible server that repeats the last word, except after `fails`."""

    url: str
    fails: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


@pytest.fixture
def server() -> Iterator[EchoServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            found.bodies.append(body)
            prompt = body["messages"][-1]["content"]
            choice = {"message": {"role": "assistant", "content": prompt.split()[-1]}}
            usage = {"prompt_tokens": 3, "completion_tokens": 7}
            reply = json.dumps({"choices": [choice], "usage": usage}).encode()
            self.send_response(500 if prompt == found.fails else 200)
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *args: Any) -> None: ...

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = EchoServer(url=f"http://127.0.0.1:{listener.server_address[1]}/v1")
    Thread(target=listener.serve_forever, daemon=True).start()
    yield found
    listener.shutdown()
    listener.server_close()


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The user's module, in an empty working directory with a file of questions."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    name = f"evaluated_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(REWARD)
    Path("mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in QUESTIONS))
    return name


def evaluate(
    capsys: pytest.CaptureFixture[str], target: str, module: str, *words: str
) -> tuple[int, dict[str, Any], str]:
    suite = ("--suite", "mine.jsonl", "--reward", f"{module}:reward")
    code, out, err = run_main(capsys, "eval", target, *suite, *words, "--json")
    return code, json.loads(out.splitlines()[-1]), err


def test_a_server_is_evaluated_and_only_asked_once(
    capsys: pytest.CaptureFixture[str], server: EchoServer, module: str
) -> None:
    server.fails = "say 2"
    words = ("--model", "small", "--samples", "2", "--temperature", "0.3")
    code, report, _ = evaluate(capsys, server.url, module, *words)
    found = report["suites"]["mine"]
    assert (code, found["avg"], found["failed"], found["questions"]) == (0, 0.75, 2, 4)
    assert found["pass_at"] == {"1": 0.75, "2": 0.75}
    assert (found["mean_turns"], found["mean_tokens"]) == (0.75, 5.25)
    assert len(server.bodies) == 8
    assert {body["temperature"] for body in server.bodies} == {0.3}
    stored = read_results(Path(report["results"]))
    [result] = stored.suites
    assert [a.failure for a in result.answers] == ["", "", "", "", "engine", "engine", "", ""]
    assert len({answer.seed for answer in result.answers}) == 8

    server.fails = ""
    code, report, _ = evaluate(capsys, server.url, module, *words)
    assert len(server.bodies) == 10, "only what the server failed at is asked again"
    assert report["suites"]["mine"]["avg"] == 1.0
    again = read_results(Path(report["results"])).suites[0]
    assert [a.seed for a in again.answers] == [a.seed for a in result.answers]


def test_other_settings_do_not_mix_with_stored_answers(
    capsys: pytest.CaptureFixture[str], server: EchoServer, module: str
) -> None:
    evaluate(capsys, server.url, module, "--model", "small", "--samples", "1")
    code, report, _ = evaluate(capsys, server.url, module, "--model", "small", "--samples", "2")
    assert code == 1
    assert "samples (1)" in report["error"]
    assert "--out" in report["error"]
    words = ("--model", "small", "--samples", "2", "--out", "other.json")
    assert evaluate(capsys, server.url, module, *words)[0] == 0


def test_a_run_is_evaluated_through_its_own_workflow(
    capsys: pytest.CaptureFixture[str], server: EchoServer, module: str
) -> None:
    """Its workflow answers itself after one call; the results are in the run folder."""
    Path(f"{module}.py").write_text(
        REWARD + "async def run(task, ctx):\n"
        "    await ctx.policy().chat([{'role': 'user', 'content': 'abc>'}])\n"
        "    return task.payload['prompt'].split()[-1]\n"
    )
    text = edited(
        f"workflow: {module}:run",
        "models:\n  policy: {init: builtin:tiny-qwen3, engine: scripted}",
        "name: small",
    )
    folder = Path("outputs/small")
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(text)
    for step in (2, 10):
        init_model("builtin:tiny-qwen3", folder / f"checkpoints/step_{step}", seed=step)
    code, report, err = evaluate(capsys, str(folder), module, "--samples", "1", "--limit", "3")
    assert code == 0, report
    assert (report["model"], report["step"]) == ("small", 10)
    assert "step_10" in err
    assert report["suites"]["mine"]["avg"] == 1.0
    assert report["suites"]["mine"]["questions"] == 3
    assert report["suites"]["mine"]["mean_turns"] == 1.0
    assert report["suites"]["mine"]["mean_tokens"] > 0
    code, report, _ = evaluate(capsys, str(folder), module, "--version", "2", "--samples", "1")
    assert [evaluation.step for evaluation in run_results(folder)] == [10, 2]
    code, report, _ = evaluate(capsys, str(folder), module, "--version", "7")
    assert code == 1
    assert "policy@7" in report["error"]
    assert "0, 2, 10" in report["error"]


def test_a_model_folder_answers_with_one_turn(
    capsys: pytest.CaptureFixture[str], module: str
) -> None:
    init_model("builtin:tiny-qwen3", Path("model"), seed=1)
    rows = [{"question": f"q{i}", "prompt": "abc>", "answer": "cba"} for i in range(2)]
    Path("mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("--samples", "2", "--max-tokens", "4")
    code, report, _ = evaluate(capsys, "model", module, *words)
    assert code == 0, report
    [result] = read_results(Path(report["results"])).suites
    assert [(a.question, a.sample) for a in result.answers] == [
        ("q0", 0),
        ("q0", 1),
        ("q1", 0),
        ("q1", 1),
    ]
    assert all(a.score is not None and a.turns == 1 and 1 <= a.tokens <= 4 for a in result.answers)


def test_figures_and_failures_are_printed(
    capsys: pytest.CaptureFixture[str], server: EchoServer, module: str
) -> None:
    server.fails = "say 0"
    suite = ("--suite", "mine.jsonl", "--reward", f"{module}:reward", "--samples", "1")
    code, out, err = run_main(capsys, "eval", server.url, *suite, "--model", "m")
    assert code == 0
    head, line, *rest = out.splitlines()
    assert head.split() == [
        "suite",
        "questions",
        "score",
        "95",
        "%",
        "interval",
        "pass@k",
        "failed",
        "turns",
        "tokens",
    ]
    assert line.split()[:6] == ["mine", "4", "x", "1", "75.0", "%"]
    assert rest[1] == "mine: 1 attempt failed and count as wrong: 1 engine"
    assert rest[2] == "  q0, sample 0: engine"
    assert "results in evaluations/m.json" in err


def test_wrong_usage_says_what_to_do(capsys: pytest.CaptureFixture[str], module: str) -> None:
    for words, says in (
        ((".",), "--suite"),
        (("http://127.0.0.1:9/v1", "--suite", "mine.jsonl"), "--model"),
        (("m", "--suite", "mine.jsonl", "--version", "3"), "is not a run"),
        (("m", "--suite", "mine.jsonl", "--model", "x"), "URL"),
    ):
        code, _, err = run_main(capsys, "eval", *words)
        assert code == 1
        assert says in err


def test_a_damaged_file_of_results_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{}")
    with pytest.raises(Exception, match="holds no results"):
        read_results(path)
