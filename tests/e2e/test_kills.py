# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of each process of a run, and of the launcher: the run completes, and nothing is lost."""

from __future__ import annotations

import json
import subprocess
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from tests.e2e.system import PENSTOCK, SMALL, System, assert_complete, penstock, until

from penstock.fleet.run_folder import RunFolder

EPISODES = """
name: episodes
models:
  policy: {init: "builtin:tiny-qwen3", capacity: 4}
sources:
  - {name: train, task: penstock.tasks.reverse}
workflow: episode:run
reward: null
algorithm: {name: grpo, num_generations: 2}
sampling: {max_tokens: 6}
training: {learning_rate: 1.0e-3, groups_per_batch: 2, steps: 2, max_staleness: 2}
"""
EPISODE = """
import asyncio, os, random, time

async def run(task, ctx):
    question = [{"role": "user", "content": task.payload["prompt"]}]
    messages = list(question)
    for turn in range(8):
        if turn == 3:
            await ask(ctx, question)
            await ask(ctx, question)
        answer = await ask(ctx, messages)
        messages += [{"role": "assistant", "content": answer.text}, *question]
        while turn == 6 and not os.path.exists("go") and "PENSTOCK_CHECK" not in os.environ:
            await asyncio.sleep(0.1)
    return random.random()

async def ask(ctx, messages):
    answer = await ctx.policy().chat(messages, seed=random.getrandbits(31))
    if "PENSTOCK_CHECK" not in os.environ:
        with open("answers.txt", "a") as file:
            file.write(f"{os.getpid()} {ctx.seed} {time.time()} {answer.text!r}\\n")
    return answer
"""
"""Ten calls, two of them alike; each draws a seed of its own, so an answer given twice was kept.
After the ninth it waits for a file, so a slow machine gives the same answers before the kill."""
NUM_BEFORE = 9
TOLD_WITHIN_S = 10.0
"""Turns are told five times a second and never waited for: the newest may die with their node."""


class Given(NamedTuple):
    at: float
    text: str


def answers(folder: Path) -> dict[str, dict[str, list[Given]]]:
    """By episode and process, in order."""
    found: dict[str, dict[str, list[Given]]] = defaultdict(lambda: defaultdict(list))
    path = folder / "answers.txt"
    for line in path.read_text().splitlines() if path.exists() else ():
        pid, episode, at, text = line.split(" ", 3)
        found[episode][pid].append(Given(float(at), text))
    return found


def test_a_killed_node_loses_no_finished_turn(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(EPISODES)
    (tmp_path / "episode.py").write_text(EPISODE)
    words = ("run", "run.yaml", f"output_dir={tmp_path}", "--headless")
    system = System(tmp_path / "episodes")
    with (tmp_path / "out.txt").open("wb") as out:
        system.launcher = subprocess.Popen([*PENSTOCK, *words], cwd=tmp_path, stdout=out, stderr=-2)
    try:

        def is_in_the_middle() -> bool:
            turns = [n for told in answers(tmp_path).values() for n in told.values()]
            told_at = time.time() - TOLD_WITHIN_S
            return any(len(n) == NUM_BEFORE and n[-1].at < told_at for n in turns)

        until(is_in_the_middle, timeout_s=300.0, what="an episode in its middle")
        killed_at = time.time()
        killed = str(system.kill("node-0"))
        (tmp_path / "go").touch()
        before = {name: told[killed] for name, told in answers(tmp_path).items() if killed in told}
        saved: list[int] = []

        def has_gone_on() -> bool:
            status = system.status()
            saved.append(0 if status is None else status.salvaged_tokens)
            is_over = system.launcher is not None and system.launcher.poll() is not None
            return saved[-1] > 0 or is_over  # a busy machine may miss the answers in between

        until(has_gone_on, timeout_s=300.0, what="turns are served again")
        assert system.wait() == 0, (tmp_path / "out.txt").read_text()
    finally:
        system.close()
    after = answers(tmp_path)
    told_of = {
        name: [turn.text for turn in told if turn.at < killed_at - TOLD_WITHIN_S]
        for name, told in before.items()
        if len(told) < 10
    }
    assert max(len(told) for told in told_of.values()) == NUM_BEFORE
    for name, told in told_of.items():
        [again] = [turns for pid, turns in after[name].items() if pid != killed]
        assert len(again) == 10
        assert [turn.text for turn in again[: len(told)]] == told
    assert_complete(system, steps=2)


def test_a_killed_trainer_comes_back_and_a_killed_launcher_is_started_again(
    system: System,
) -> None:
    system.start(*SMALL)
    system.until_step(5)
    trainer = system.kill("trainer-policy")
    system.until_back("trainer-policy", other_than=trainer)
    system.until_step(6)
    system.pids()
    assert system.launcher is not None
    system.launcher.kill()
    system.launcher.wait()
    system.until_nothing_is_left()
    system.start()
    assert system.wait() == 0, system.output()
    assert (system.folder.logs / "latest").resolve().name == "attempt_2"
    assert system.last_line()["finished"] is True
    assert_complete(system, steps=10)
    assert_repeats(system)
    assert_forks(system)


def assert_repeats(system: System) -> None:
    """The last step, computed again from the record of a run that was killed twice."""
    done = penstock("replay", str(system.folder.path), "10", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["weights_digest"] == told["published"] and told["begun_at"] == 8


def assert_forks(system: System) -> None:
    """A new lineage from the last checkpoint: its own number 0 is the other's number 10."""
    words = ("training.steps=1", "--at", "10", "--name", "forked", "--json")
    done = penstock("fork", str(system.folder.path), *words)
    assert done.returncode == 0, done.stderr
    forked = RunFolder(Path(json.loads(done.stdout.splitlines()[-1])["folder"]))
    first, last = forked.checkpoints / "step_0", system.folder.checkpoints / "step_10"
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (first / name).read_bytes() == (last / name).read_bytes()
    parent = forked.parent()
    assert parent is not None and (parent.run, parent.step) == (str(system.folder.path), 10)
    ended = penstock("run", str(forked.path), "--headless", "--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads(ended.stdout.splitlines()[-1])["steps"] == 1
    assert penstock("audit", str(forked.path)).returncode == 0
    refused = penstock("fork", str(system.folder.path), "--at", "99")
    assert refused.returncode == 1 and "checkpoints: 8, 10" in refused.stderr


@pytest.mark.slow
def test_a_killed_rank_brings_its_whole_gang_back(system: System) -> None:
    system.start(*SMALL, "training.parallel.dp=2")
    system.until_step(5)
    supervisor = psutil.Process(system.pids()["trainer-policy"])
    ranks = supervisor.children()
    assert len(ranks) == 2
    ranks[1].kill()
    known = {rank.pid for rank in ranks}
    until(
        lambda: len({rank.pid for rank in supervisor.children()} - known) == 2,
        timeout_s=300.0,
        what="both ranks start again",
    )
    assert system.wait() == 0, system.output()
    assert_complete(system, steps=10)
