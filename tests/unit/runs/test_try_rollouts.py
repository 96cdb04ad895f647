# SPDX-License-Identifier: Apache-2.0
"""`penstock try`: rollouts without training, from an engine or from a server of text."""

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
from tests.unit.runs.broken_cases import GOOD_MODULE, edited

from penstock.cli.main import main
from penstock.runs.target import read_target
from penstock.trainer.model_folders import init_model

TOOL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TWO_TURNS = """
async def run(task, ctx):
    messages = [{"role": "user", "content": task.payload["prompt"]}]
    answer = await ctx.policy().chat(messages, tools=[], temperature=0.5)
    messages.append({"role": "assistant", "content": answer.text})
    messages.append({"role": "user", "content": "once more"})
    await ctx.policy().chat(messages)
"""


@dataclass
class TextServer:
    """An OpenAI-compatible server with fixed answers."""

    url: str
    answers: list[dict[str, Any]]
    status: int = 200
    requests: list[tuple[str, str, dict[str, Any]]] = field(
        default_factory=list[tuple[str, str, dict[str, Any]]]
    )
    """(path, authorization, body)."""


@pytest.fixture(name="server")
def text_server() -> Iterator[TextServer]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            found.requests.append((self.path, self.headers["authorization"] or "", body))
            message = found.answers[(len(found.requests) - 1) % len(found.answers)]
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            reply = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 3}}).encode()
            self.send_response(found.status)
            self.send_header("content-length", str(len(reply)))
            self.end_headers()
            self.wfile.write(reply)

        def log_message(self, format: str, *args: Any) -> None: ...

    listener = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    url = f"http://127.0.0.1:{listener.server_address[1]}/v1"
    found = TextServer(url=url, answers=[{"role": "assistant", "content": "ba"}])
    Thread(target=listener.serve_forever, daemon=True).start()
    yield found
    listener.shutdown()
    listener.server_close()


@pytest.fixture
def run_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Path:
    """A run with a module of its own name, since modules stay imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr("sys.path", [str(tmp_path), *sys.path])
    module = f"tried_{abs(hash(request.node.name))}"
    (tmp_path / f"{module}.py").write_text(GOOD_MODULE)
    path = tmp_path / "run.yaml"
    path.write_text(
        edited(
            f"sources:\n  - {{name: train, task: {module}}}",
            f"reward: {module}:reward",
            f"workflow: {module}:run",
            "models:\n  policy: {init: builtin:tiny-qwen3, engine: scripted}",
        )
    )
    return path


def module_of(run_file: Path) -> Path:
    [module] = run_file.parent.glob("tried_*.py")
    return module


def try_it(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["try", *words])
    captured = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, captured.out, captured.err


def test_the_engine_of_the_config_answers(
    capsys: pytest.CaptureFixture[str], run_file: Path
) -> None:
    code, out, _ = try_it(capsys, str(run_file), "-n", "2")
    assert code == 0
    assert "--- 1. task 0 of train: reward 0, " in out
    assert "       user  ab>\n  assistant  " in out
    assert "--- 2. task 1 of train" in out
    assert out.endswith("2 of 2 rollouts scored, mean reward 0\n")
    assert not (run_file.parent / "outputs").exists(), "there is no run folder"


def test_a_server_answers_and_its_answers_are_scored(
    capsys: pytest.CaptureFixture[str],
    run_file: Path,
    server: TextServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    words = ("-n", "1", "--base-url", server.url, "--model", "small", "--json")
    code, out, _ = try_it(capsys, str(run_file), *words)
    assert code == 0
    report = json.loads(out.splitlines()[-1])
    assert (report["scored"], report["reward"]) == (1, 1.0)
    [rollout] = report["rollouts"]
    assert [message["content"] for message in rollout["messages"]] == ["ab>", "ba"]
    [(path, key, body)] = server.requests
    assert (path, key, body["model"]) == ("/v1/chat/completions", "Bearer sk-mine", "small")
    assert (body["max_tokens"], body["temperature"]) == (3, 1.0)


def test_turns_and_tool_calls_are_shown_once(
    capsys: pytest.CaptureFixture[str], run_file: Path, server: TextServer
) -> None:
    module = module_of(run_file)
    module.write_text(GOOD_MODULE + TWO_TURNS)
    server.answers = [
        {"role": "assistant", "content": "hm"},
        {"role": "assistant", "content": None, "tool_calls": [TOOL]},
    ]
    code, out, _ = try_it(capsys, str(run_file), "-n", "1", "--base-url", server.url)
    assert code == 0
    shown = [line for line in out.splitlines() if line.startswith("  ")]
    assert shown == [
        "       user  ab>",
        "  assistant  hm",
        "       user  once more",
        '  assistant  add({"a": 1})',
    ]
    assert server.requests[0][2]["temperature"] == 0.5


def test_a_program_is_recorded_through_the_gateway(
    capsys: pytest.CaptureFixture[str], run_file: Path, server: TextServer
) -> None:
    run_file.parent.chmod(0o755)  # as root, a sandbox has its own user
    program = run_file.parent / "agent.py"
    program.write_text(
        "import json, os, urllib.request\n"
        "body = {'model': 'policy', 'messages': [{'role': 'user', 'content': 'ab>'}]}\n"
        "request = urllib.request.Request(\n"
        "    os.environ['OPENAI_BASE_URL'] + '/chat/completions', json.dumps(body).encode(),\n"
        "    {'authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']})\n"
        "urllib.request.urlopen(request).read()\n"
    )
    words = (f"workflow={{command: [python3, {program}]}}", "-n", "1", "--base-url", server.url)
    code, out, _ = try_it(capsys, str(run_file), *words)
    assert code == 0, out
    assert "reward 1, completed\n       user  ab>\n  assistant  ba" in out


@pytest.mark.parametrize(
    ("status", "cause"),
    [(401, "answered 401"), (404, "check --model")],
)
def test_failed_rollouts_show_their_cause(
    capsys: pytest.CaptureFixture[str],
    run_file: Path,
    server: TextServer,
    status: int,
    cause: str,
) -> None:
    server.status = status
    code, out, _ = try_it(capsys, str(run_file), "-n", "2", "--base-url", server.url)
    assert code == 1
    assert "no reward, failed (engine)" in out
    assert cause in out
    assert out.endswith("0 of 2 rollouts scored\n")


def test_a_reward_that_cannot_be_imported_is_an_error(
    capsys: pytest.CaptureFixture[str], run_file: Path, server: TextServer
) -> None:
    words = ("reward=no_such_module:reward", "--base-url", server.url)
    code, _, err = try_it(capsys, str(run_file), *words)
    assert code == 1
    assert "cannot import 'no_such_module'" in err


def test_a_run_folder_is_tried_with_its_newest_checkpoint(
    capsys: pytest.CaptureFixture[str], run_file: Path
) -> None:
    target = read_target(run_file)
    target.folder.write_config(target.config)
    target.folder.allocate_endpoints(run_file.parent, target.python_path)
    for step in (0, 9, 10):
        folder = target.folder.path / "checkpoints" / f"step_{step}"
        init_model("builtin:tiny-qwen3", folder, seed=step)
        (folder / "optimizer.safetensors").write_bytes(b"not of the model")
    code, out, err = try_it(capsys, str(target.folder.path), "-n", "1")
    assert code == 0, err
    assert err.startswith(f"loading {target.folder.path}/checkpoints/step_10")
    assert "1 of 1 rollout scored" in out


def test_a_model_without_a_server_is_refused(
    capsys: pytest.CaptureFixture[str], run_file: Path
) -> None:
    code, _, err = try_it(capsys, str(run_file), "--model", "small")
    assert code == 1
    assert "give --base-url too" in err
