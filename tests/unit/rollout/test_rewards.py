# SPDX-License-Identifier: Apache-2.0
"""Reward functions that hang, raise, abort and print: typed failures, only for the culprits."""

from __future__ import annotations

import asyncio
import signal
import tempfile
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from tests.unit.rollout.fake_dataflow import task
from tests.unit.rollout.polling import eventually_dead, kill, running, start_python

from penstock.errors import RewardError
from penstock.rollout.isolation import Isolation
from penstock.rollout.rewards.scorer import NO_REWARD, Failed, Scorer, SourceScorers
from penstock.rollout.rewards.worker import columns_of
from penstock.rollout.sandbox.bubblewrap import BubblewrapBackend
from penstock.types import FailureKind

FUNCTIONS = "tests.unit.rollout.reward_functions"


@asynccontextmanager
async def scorer(
    name: str, *, num_workers: int = 1, deadline_s: float = 20.0
) -> AsyncGenerator[Scorer]:
    scores = Scorer(f"{FUNCTIONS}:{name}", num_workers=num_workers, deadline_s=deadline_s)
    running = asyncio.create_task(scores.run())
    try:
        yield scores
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def score_all(scores: Scorer, completions: list[str]) -> list[float | Failed]:
    async with asyncio.timeout(100):
        return list(
            await asyncio.gather(
                *(scores.score(text, task(index)) for index, text in enumerate(completions))
            )
        )


def children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def workers(parent: int | None = None) -> list[psutil.Process]:
    return running("penstock.rollout.rewards.worker", parent)


async def test_a_batch_is_scored_in_order() -> None:
    async with scorer("mixed") as scores:
        results = await score_all(scores, ["a", "bb", "ccc"] * 30)
        assert results == [float(n) for n in (1, 2, 3)] * 30


async def test_each_source_is_scored_by_its_own_function() -> None:
    functions = {"train": f"{FUNCTIONS}:mixed", "plain": f"{FUNCTIONS}:mixed", "own": ""}
    scores = SourceScorers("penstock.tasks.reverse:reward", functions, Isolation())
    running = asyncio.create_task(scores.run())
    try:
        async with asyncio.timeout(60):
            sources = ["train", "plain", "own", "other"]
            found = [await scores.score("aa", replace(task(), source=name)) for name in sources]
        assert found == [2.0, 2.0, NO_REWARD, 0.0]
        assert len(workers()) == 2, "one worker for each function"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def test_a_run_may_have_no_reward_function() -> None:
    assert not SourceScorers("", {"own": ""}, Isolation())


async def test_async_functions_and_functions_that_name_their_columns() -> None:
    async with scorer("awaited") as scores:
        right = task(0).payload["answer"]
        assert await score_all(scores, [right, "no"]) == [1.0, 0.0]
        assert await scores.score(right, task(0)) == 1.0


async def test_trls_names_are_understood() -> None:
    async with scorer("trl") as scores:
        assert await score_all(scores, ["a", "b"]) == [4.0] * 2


def test_a_column_has_a_place_for_every_payload() -> None:
    assert columns_of([{"a": 1}, {"b": 2, "completions": 0}]) == {"a": [1, None], "b": [None, 2]}


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ("raise", "the grader is out of ink"),
        ("abort", "signal 6"),
        ("exit", "SystemExit"),
        ("none", "returned None"),
        ("nan", "'nan' (float)"),
        ("text", "'0.5' (str)"),
    ],
)
async def test_only_the_culprit_fails_and_is_named(bad: str, says: str) -> None:
    async with scorer("mixed") as scores:
        results = await score_all(scores, ["a", bad, "ccc"])
        assert results[0] == 1.0 and results[2] == 3.0
        culprit = results[1]
        assert isinstance(culprit, Failed) and culprit.kind is FailureKind.REWARD
        assert says in culprit.detail
        assert f"{FUNCTIONS}:mixed" in culprit.detail and "task-1" in culprit.detail
        assert len(culprit.detail) <= 2000
        assert "worker.py" not in culprit.detail  # the user's frames, not ours


@pytest.mark.parametrize(
    ("name", "says"), [("too_few", "returned 0 values for 1"), ("no_list", "instead of a list")]
)
async def test_a_result_of_the_wrong_shape_is_no_reward(name: str, says: str) -> None:
    async with scorer(name) as scores:
        for result in await score_all(scores, ["a", "b"]):
            assert isinstance(result, Failed) and result.kind is FailureKind.REWARD
            assert says in result.detail


async def test_printing_and_reading_do_not_touch_the_channel() -> None:
    async with scorer("mixed") as scores:
        results = await score_all(scores, ["print", "a", "read"])
        assert results == [5.0, 1.0, 0.0]


async def test_the_deadline_kills_the_whole_group() -> None:
    child: psutil.Process | None = None
    async with scorer("leaves_a_child", deadline_s=2.0) as scores:
        while child is None:  # on a slow machine the deadline may come before the child
            scored = asyncio.create_task(scores.score("hang", task()))
            while child is None and not scored.done():
                child = next(iter(running("300")), None)
                await asyncio.sleep(0.01)
            result = await scored
            assert isinstance(result, Failed) and result.kind is FailureKind.REWARD_DEADLINE
            assert "exceeded its deadline of 2 s" in result.detail
        await eventually_dead(child.pid)


async def test_p11_every_kind_of_misbehaviour_at_once() -> None:
    """64 completions, 4 workers, deadline 10 s: only culprits fail, the loop stays awake, no
    zombie."""
    culprits = {7: "hang", 19: "raise", 33: "abort", 47: "print", 60: "hang"}
    completions = [culprits.get(index, "fine") for index in range(64)]
    lags_s: list[float] = []
    before = children()  # other tests keep a database server, and processes of chat templates

    async def feel_lag() -> None:
        while True:
            asleep_at = time.monotonic()
            await asyncio.sleep(0.005)
            lags_s.append(time.monotonic() - asleep_at - 0.005)

    async with scorer("mixed", num_workers=4, deadline_s=10.0) as scores:
        assert await scores.score("warm", task()) == 4.0
        lag = asyncio.create_task(feel_lag())
        results = await score_all(scores, completions)
        lag.cancel()
        kinds = {i: r.kind for i, r in enumerate(results) if isinstance(r, Failed)}
        assert kinds == {
            7: FailureKind.REWARD_DEADLINE,
            19: FailureKind.REWARD,
            33: FailureKind.REWARD,
            60: FailureKind.REWARD_DEADLINE,
        }
        assert sorted(lags_s)[int(len(lags_s) * 0.99)] < 0.5
        assert await scores.score("fine", task()) == 4.0
        assert not [one for one in children() if one.status() == psutil.STATUS_ZOMBIE]
    assert children() <= before


async def test_a_worker_killed_while_idle_is_replaced() -> None:
    async with scorer("mixed") as scores:
        await scores.score("a", task())
        (worker,) = workers()
        worker.send_signal(signal.SIGKILL)
        await asyncio.sleep(0.1)
        assert await score_all(scores, ["a", "bb"]) == [1.0, 2.0]


async def test_a_function_that_cannot_be_found_is_refused_at_the_start() -> None:
    scores = Scorer("penstock.tasks.reverse:rewrad")
    with pytest.raises(ExceptionGroup) as caught:
        await asyncio.wait_for(scores.run(), 60)
    (error,) = caught.value.exceptions
    assert isinstance(error, RewardError) and "has no function 'rewrad'" in str(error)


async def test_a_worker_dies_with_its_node() -> None:
    program = (
        "import asyncio, sys\n"
        "from penstock.rollout.rewards.process import WorkerProcess\n"
        "async def main():\n"
        "    worker = WorkerProcess('penstock.tasks.reverse:reward')\n"
        "    await worker.start()\n"
        "    print('started', flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    node = start_python(program)
    assert node.stdout is not None
    assert node.stdout.readline() == b"started\n"
    [worker] = workers(node.pid)
    kill(node)
    await eventually_dead(worker.pid)


async def test_a_sandbox_that_fails_is_no_reward_of_anybody() -> None:
    """An infrastructure failure is typed: neither a reward of 0 nor the fault of the function."""
    with tempfile.TemporaryDirectory() as folder:
        broken, program = Path(folder) / "broken", Path(folder) / "bwrap"
        program.write_text(f'#!/bin/sh\n[ -e {broken} ] && exit 1\nexec bwrap "$@"\n')
        for path, mode in ((Path(folder), 0o711), (program, 0o755)):
            path.chmod(mode)
        isolation = Isolation(_found=BubblewrapBackend(program=str(program)))
        scores = Scorer(f"{FUNCTIONS}:mixed", isolation)
        serving = asyncio.create_task(scores.run())
        try:
            assert await scores.score("a", task()) == 1.0
            broken.touch()
            assert isinstance(died := await scores.score("abort", task()), Failed)
            assert died.kind is FailureKind.REWARD
            failed = await score_all(scores, ["a", "bb"])
            assert [one.kind for one in failed if isinstance(one, Failed)] == [
                FailureKind.SANDBOX
            ] * 2
            broken.unlink()
            assert await scores.score("a", task()) == 1.0
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


def test_a_worker_starts_fast_and_without_heavy_libraries() -> None:
    code = (
        "import sys; import penstock.rollout.rewards.worker\n"
        "heavy = {'torch', 'transformers', 'numpy', 'httpx2', 'pydantic', 'asyncio'}\n"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    said = start_python(code).communicate()[0]
    assert said.strip() == b"[]"
