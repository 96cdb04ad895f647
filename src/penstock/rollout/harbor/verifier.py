# SPDX-License-Identifier: Apache-2.0
"""Runs tests/test.sh of a Harbor task and reads the reward that it wrote.

Owns the environment of the verifier, into which nothing of the agent's reaches, and what counts as
a reward: reward.json, else reward.txt, a regular file with one finite number. Anything else is an
error, never a reward of 0."""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any, cast

from penstock.bounds import MAX_REWARD
from penstock.errors import RewardError, RewardTimeout
from penstock.rollout.harbor.boxes import TESTS, VERIFIER_LOGS
from penstock.rollout.sandbox.run import Finished, run
from penstock.rollout.sandbox.types import FileRefused, Sandbox
from penstock.rollout.user_errors import last_words
from penstock.tasks.harbor import HarborTask

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MAX_REWARD_BYTES = 1 << 16
_PYTEST_FILES = ("pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")
_SCRIPT = 'cd "$0" && "$1"'


async def verify(box: Sandbox, task: HarborTask) -> float:
    """The reward. Raises RewardError if the verifier gives none."""
    test = f"/{TESTS}/test.sh"
    await box.put(test[1:], task.tests["test.sh"].data, mode=0o755)
    done = await run(box, ["sh", "-c", _SCRIPT, task.workdir, test], env=_environment(task))
    if done.exit.limit == "wall_s":
        raise RewardTimeout(
            f"{_where(task)} exceeded {task.verifier_timeout_s:g} s and was killed: {_end(done)}; "
            "raise verifier.timeout_sec in its task.toml"
        )
    if done.exit.limit or done.exit.code < 0:
        why = f"its limit {done.exit.limit}" if done.exit.limit else f"signal {-done.exit.code}"
        raise RewardError(f"{_where(task)} was ended by {why}: {_end(done)}")
    for name in ("reward.json", "reward.txt"):
        text = await _read(box, task, name)
        if text is not None:
            return _number(text, name, task)
    raise RewardError(
        f"{_where(task)} wrote neither reward.txt nor reward.json to /logs/verifier (exit code "
        f"{done.exit.code}): {_end(done)}"
    )


def _environment(task: HarborTask) -> dict[str, str]:
    """The task's own, and a home folder without the agent's files: shells and Python read start-up
    files there."""
    fixed = {"HOME": "/tmp", "PYTHONNOUSERSITE": "1", "PYTEST_ADDOPTS": _pytest_options(task)}
    return {"PATH": PATH, **task.env, **fixed, **task.verifier_env}


def _pytest_options(task: HarborTask) -> str:
    """Where the task has no settings and no conftest.py, those that pytest finds are the agent's.
    What a root file system has, we do not know."""
    names = {PurePosixPath(path).name for path in (*task.tests, *task.files)}
    options = ["-p no:cacheprovider"]
    if not task.root and names.isdisjoint(_PYTEST_FILES):
        options.append("-c /dev/null --rootdir=/")
    if not task.root and "conftest.py" not in names:
        options.append("--noconftest")
    return " ".join(options)


async def _read(box: Sandbox, task: HarborTask, name: str) -> str | None:
    path = f"{VERIFIER_LOGS}/{name}"
    try:
        return (await box.get(path, max_bytes=MAX_REWARD_BYTES)).decode(errors="replace")
    except FileRefused as error:
        if "No such file" in str(error):
            return None
        raise RewardError(f"{_where(task)}: {error}") from None


def _number(text: str, name: str, task: HarborTask) -> float:
    value: Any = text.strip()
    try:
        value = json.loads(text) if name.endswith(".json") else float(text)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        rewards = cast(dict[str, Any], value)
        value = next(iter(rewards.values())) if len(rewards) == 1 else rewards.get("reward")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not abs(value) <= MAX_REWARD:
        raise RewardError(
            f"{_where(task)}: {name} has {text.strip()[:100]!r}; write one finite number, or JSON "
            'such as {"reward": 1.0}'
        )
    return float(value)


def _where(task: HarborTask) -> str:
    return f"the verifier of task {task.name}"


def _end(done: Finished) -> str:
    return last_words(done.stderr or done.stdout, 500) or "it printed nothing"
