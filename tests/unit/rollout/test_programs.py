# SPDX-License-Identifier: Apache-2.0
"""Programs as workflows: they find their session in the environment, and never outlive it."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest
from tests.unit.rollout.fake_dataflow import POLICY, task
from tests.unit.rollout.polling import eventually, eventually_dead, kill, running, start_python
from tests.unit.rollout.test_attempt import DirectScorer, attempt

from penstock.errors import WorkflowError
from penstock.rollout.isolation import Isolation, Use
from penstock.rollout.programs import run_program
from penstock.rollout.sandbox.types import Limits
from penstock.rollout.visible_folders import program_folders, python_folders
from penstock.types import FailureKind, OutcomeKind

AGENT = """
import json, os, sys, urllib.request
task = json.loads(os.environ["PENSTOCK_TASK"])
assert json.load(sys.stdin) == task
assert not os.environ.get("PENSTOCK_TOKEN")
body = {"model": "policy", "messages": [{"role": "user", "content": task["prompt"]}]}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    data=json.dumps(body).encode(),
    headers={
        "authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
        "content-type": "application/json",
    },
)
answer = json.load(urllib.request.urlopen(request))
text = answer["choices"][0]["message"]["content"]
print("thinking aloud")
if "quiet" not in sys.argv:
    print(text)
"""


ANTHROPIC_AGENT = """
import json, os, urllib.request
assert "ANTHROPIC_AUTH_TOKEN" not in os.environ
task = json.loads(os.environ["PENSTOCK_TASK"])
messages = [{"role": "user", "content": task["prompt"]}]
request = urllib.request.Request(
    os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages",
    data=json.dumps({"model": "policy", "messages": messages, "max_tokens": 3}).encode(),
    headers={"x-api-key": os.environ["ANTHROPIC_API_KEY"], "content-type": "application/json"},
)
print(json.load(urllib.request.urlopen(request))["content"][0]["text"])
"""


async def run(*argv: str, timeout_s: float | None = None) -> str:
    """In a sandbox, as a workflow's program."""
    folders = (*program_folders(argv), *python_folders())
    sandbox = await Isolation().open(Use.WORKFLOW, folders=folders)
    return await run_program(sandbox, argv, timeout_s=timeout_s)


def agent(folder: Path, *words: str, text: str = AGENT) -> str:
    folder.chmod(0o755)  # as root, a sandbox has a user of its own
    path = folder / "agent.py"
    path.write_text(text)
    return json.dumps([sys.executable, str(path), *words])


async def test_an_unchanged_agent_is_recorded_over_http(
    tmp_path: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TOKEN", "secret of the node")
    scorer = DirectScorer()
    row = await attempt(snapshot, agent(tmp_path), scorer=scorer)
    assert row.outcome.kind is OutcomeKind.TRUNCATED, row.outcome.detail
    assert row.reward == 1.0 and len(row.turns) == 1
    assert scorer.seen == [task().payload["answer"]]


SEES_KEY = AGENT.replace("print(text)", "print('answer' in task or 'answer' in os.environ)")


@pytest.mark.parametrize(
    ("reward", "sees"), [("penstock.scorers.exact:reward", "False"), ("own:reward", "True")]
)
async def test_an_agent_does_not_get_what_only_a_built_in_scorer_reads(
    tmp_path: Path, snapshot: Path, reward: str, sees: str
) -> None:
    """A model that runs commands there would read the right answer."""
    scorer = DirectScorer()
    row = await attempt(snapshot, agent(tmp_path, text=SEES_KEY), scorer=scorer, reward=reward)
    assert scorer.seen == [sees], row.outcome.detail


async def test_an_agent_of_the_other_kind_finds_its_session_too(
    tmp_path: Path, snapshot: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_AUTH_TOKEN", "of a provider; clients prefer it to a key")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "http://127.0.0.1:9/provider")
    scorer = DirectScorer()
    row = await attempt(snapshot, agent(tmp_path, text=ANTHROPIC_AGENT), scorer=scorer)
    assert row.reward == 1.0 and len(row.turns) == 1, row.outcome.detail
    assert scorer.seen == [task().payload["answer"]]


async def test_a_program_that_fails_is_a_failed_workflow(tmp_path: Path, snapshot: Path) -> None:
    words = json.dumps(
        [sys.executable, "-c", "import sys; print('why', file=sys.stderr); sys.exit(3)"]
    )
    row = await attempt(snapshot, words, scorer=DirectScorer())
    assert row.outcome.reason == FailureKind.WORKFLOW
    assert "exited with code 3: why" in row.outcome.detail


async def test_output_is_what_it_printed_and_a_lingering_child_holds_nobody_up() -> None:
    async with asyncio.timeout(60):
        printed = await run("sh", "-c", "sleep 3001 & echo first; echo last")
    assert printed.splitlines() == ["first", "last"]
    assert running("3001") == []


async def test_ten_megabytes_of_output_are_cut_not_kept() -> None:
    printed = await run(sys.executable, "-c", "print('x' * (10 << 20)); print('end')")
    assert printed.endswith("end") and len(printed) <= 1 << 20


async def test_a_program_that_cannot_start_says_so() -> None:
    with pytest.raises(WorkflowError, match="cannot start 'no-such-program'"):
        await run("no-such-program")


async def test_a_program_past_its_time_is_killed_with_its_children() -> None:
    with pytest.raises(WorkflowError, match=r"killed after 0\.5 s"):
        await run("sh", "-c", "sleep 3002 & wait", timeout_s=0.5)
    assert running("3002") == []


async def test_cancelling_kills_the_program_with_its_children() -> None:
    program = asyncio.create_task(run("sh", "-c", "sleep 3003 & wait"))
    await eventually(lambda: running("3003"))
    program.cancel()
    with pytest.raises(asyncio.CancelledError):
        await program
    assert running("3003") == []


async def test_the_deadline_of_an_attempt_kills_its_program(snapshot: Path) -> None:
    words = json.dumps(["sleep", "3004"])
    row = await attempt(snapshot, words, start_to_close_s=1.0)
    assert row.outcome.reason == FailureKind.DEADLINE
    assert running("3004") == []


async def test_a_program_dies_with_its_node() -> None:
    program = (
        "import asyncio\n"
        "from tests.unit.rollout.test_programs import run\n"
        "asyncio.run(run('sleep', '3005'))\n"
    )
    node = start_python(program)
    await eventually(lambda: running("3005", node.pid))
    pids = [process.pid for process in running("3005", node.pid)]
    kill(node)
    for pid in pids:
        await eventually_dead(pid)


async def test_a_limit_ends_a_program_and_is_named() -> None:
    limits = Limits(wall_s=60, memory_mb=64)
    sandbox = await Isolation().open(Use.WORKFLOW, folders=python_folders(), limits=limits)
    with pytest.raises(WorkflowError, match=r"limit memory_mb \(sandbox\.workflow\.limits"):
        await run_program(sandbox, ["python3", "-c", "bytearray(200 << 20)"])


async def test_a_program_gets_ordinary_signals() -> None:
    """Python ignores SIGPIPE, and exec would inherit that: `yes | head` must still end."""
    printed = await run("grep", "SigIgn", "/proc/self/status")
    ignored = int(printed.split()[1], 16)
    assert ignored & (1 << (signal.SIGPIPE - 1)) == 0


async def test_a_program_finds_its_roles_in_the_environment(snapshot: Path) -> None:
    """A sub-agent with a role calls as that role, whatever model it names; others by their URL."""
    row = await attempt(
        snapshot,
        "tests.unit.rollout.agent_workflows:starts_a_program",
        scorer=DirectScorer(),
        roles={"solver": POLICY, "verifier": POLICY},
    )
    assert row.outcome.has_reward, row.outcome
    assert [(turn.agent, turn.role) for turn in row.turns] == [("0", "solver"), ("0", "verifier")]
