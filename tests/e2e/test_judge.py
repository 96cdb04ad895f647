# SPDX-License-Identifier: Apache-2.0
"""A judge behind an endpoint, from a reward in its sandbox to what is trained and evaluated: its
verdicts are the rewards, and where it fails, the attempt failed."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.system import System, assert_complete

from penstock.runs.history import open_run
from penstock.scorers import judge

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ADDRESS = "127.0.0.2"
"""Not 127.0.0.1, which is the sandbox's own inside of it."""
FAIL_EVERY = 9
RUN = """
name: judged
models:
  policy: {{init: "builtin:tiny-qwen3", capacity: 8}}
sources:
  - {{name: train, data: {{path: train.jsonl}}}}
reward: penstock.scorers.judge:reward
algorithm: {{name: grpo, num_generations: 4}}
sampling: {{max_tokens: 4}}
training: {{learning_rate: 1.0e-2, groups_per_batch: 4, steps: 3}}
sandbox:
  reward:
    env: [PENSTOCK_JUDGE_URL, PENSTOCK_JUDGE_MODEL, PENSTOCK_JUDGE_API_KEY]
    hosts: ["{host}"]
eval:
  every: 3
  samples: 2
  suites: [{{name: held_out, file: held_out.jsonl, scorer: judge}}]
"""


def is_right(answer: str) -> bool:
    return answer.strip()[:1] in tuple("abcdefgh")


class Judge(ThreadingHTTPServer):
    """Says right to answers that begin with one of a few letters; every ninth call fails."""

    def __init__(self) -> None:
        super().__init__((ADDRESS, 0), _Handler)
        self.lock = threading.Lock()
        self.verdicts: list[str] = []
        self.num_failed = 0
        self.keys: set[str | None] = set()

    def reply(self, message: str, key: str | None) -> tuple[int, str]:
        nonce = message.rpartition('{"id": "')[2].partition('"')[0]
        fence = f"=== {nonce} ==="
        answer = message.rpartition(f"\n{fence}\n")[0].rpartition(f"{fence}\n")[2]
        with self.lock:
            self.keys.add(key)
            if (len(self.verdicts) + self.num_failed) % FAIL_EVERY == FAIL_EVERY - 1:
                self.num_failed += 1
                return 500, "overloaded"
            verdict = judge.RIGHT if is_right(answer) else judge.WRONG
            self.verdicts.append(verdict)
        return 200, json.dumps({"id": nonce, "verdict": verdict})


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Judge)
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        [message] = request["messages"]
        status, text = self.server.reply(message["content"], self.headers["Authorization"])
        body = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def serving() -> Generator[Judge]:
    server = Judge()
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def write_questions(path: Path, length: int) -> None:
    """A prompt for each word of this length."""
    words = ["".join(word) for word in itertools.product("abcd", repeat=length)]
    rows = [{"prompt": f"{word}>", "answer": "any letter"} for word in words]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_verdicts_are_rewards_and_failures_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)  # as root, a sandbox has a user of its own
    write_questions(tmp_path / "train.jsonl", 3)
    write_questions(tmp_path / "held_out.jsonl", 2)
    system = System(tmp_path / "judged")
    with serving() as server:
        host = f"{ADDRESS}:{server.server_port}"
        monkeypatch.setenv(judge.URL, f"http://{host}/v1")
        monkeypatch.setenv(judge.MODEL, "a-judge")
        monkeypatch.setenv(judge.KEY, "of-the-judge")
        (tmp_path / "run.yaml").write_text(RUN.format(host=host))
        try:
            system.run_file(tmp_path / "run.yaml", timeout_s=1200.0)
        finally:
            system.close()
    assert server.keys == {"Bearer of-the-judge"}
    assert server.num_failed and {judge.RIGHT, judge.WRONG} == set(server.verdicts)
    with open_run(tmp_path / "judged") as run:
        rows = [*run.trajectories()]
    scored = [row for row in rows if row.reward is not None]
    assert {row.reward for row in scored} == {0.0, 1.0}
    for row in scored:
        _, _, answer = row.text.partition(">")  # the end of the prompt
        assert row.reward == float(is_right(answer)), row.text
    assert [row for row in rows if row.reward is None], "no call failed in a rollout"
    for path in (tmp_path / "judged/evaluations").glob("policy@*.json"):
        [suite] = json.loads(path.read_bytes())["suites"]
        assert suite["scorer"] == "judge" and len(suite["answers"]) == 32
        assert {answer["score"] for answer in suite["answers"]} <= {0.0, 1.0, None}
    assert_complete(system, steps=3)
