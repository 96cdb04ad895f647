# SPDX-License-Identifier: Apache-2.0
"""The Tinker server and the unmodified `tinker` SDK, in its own environment (`make setup-envs`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.tinker.tinker_harness import TINY

from penstock.rollout.environments.environments import environment_python

SCRIPTS = Path(__file__).parent / "tinker_scripts"
PACKAGES = Path(torch.__file__).parents[1]
"""Has the torch that a client's own loss needs; the SDK's environment has none."""
TOLERANCE = 5e-5
"""As the engine's own tests have it (tests/unit/rollout/engines/test_hf_lora.py)."""
NUM_STEPS = 150
pytestmark = pytest.mark.envs


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Address and key."""
    folder = tmp_path / "server"
    argv = [sys.executable, "-m", "penstock.cli.main", "tinker", "serve", str(folder)]
    process = subprocess.Popen(
        [*argv, "--model", TINY, "--json"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        yield url, penstock("token", str(folder), "--name", "alice").strip()
    finally:
        process.terminate()
        assert process.wait(timeout=300) in (0, -signal.SIGTERM)
        if process.stdout is not None:
            process.stdout.close()


def penstock(*words: str) -> str:
    argv = [sys.executable, "-m", "penstock.cli.main", "tinker", *words]
    return subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, timeout=300).stdout


def sdk(script: str, server: tuple[str, str], *words: str) -> list[Any]:
    """What a script of the SDK prints."""
    done = subprocess.run(
        [environment_python("tinker"), SCRIPTS / script, *server, TINY, *words],
        env={**os.environ, "TINKER_TELEMETRY": "0"},
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_verb_of_the_sdk(server: tuple[str, str]) -> None:
    (said,) = sdk("verbs.py", server, str(PACKAGES))
    assert said["rank"] == 4
    assert said["loss"] == pytest.approx(said["sum"], rel=1e-5)
    assert said["step"]["grad_norm"] > 0 and said["moved"] > 0.1
    assert said["importance_sampling"] == said["ppo"] == pytest.approx(-18.0)  # 3 data, 6 tokens
    assert said["cispo"] == pytest.approx(said["dro"]) and said["cispo"] > 0
    assert said["copied"] is True and said["same"] == [True] * 3
    assert all(1 <= length <= 5 for one in said["sampled"] for length in one)
    assert said["worst"] < TOLERANCE
    assert "this loss reads advantages, logprobs" in said["refused"]
    assert said["own"]["loss:sum"] == pytest.approx(said["own"]["squares"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_sdks_own_loop_learns_the_demo_task(server: tuple[str, str]) -> None:
    *steps, last = sdk("learn.py", server, str(NUM_STEPS))
    print([step["reward"] for step in steps[:: NUM_STEPS // 10]], last)
    assert steps[0]["reward"] < 0.2
    assert last["final"] >= 0.8
