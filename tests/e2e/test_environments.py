# SPDX-License-Identifier: Apache-2.0
"""A run against environments that fail in six ways: every failure is typed and tried again, the run
reaches its end, and nothing is trained as 0."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import tests.unit.rollout.environments.test_environments as unit
from tests.e2e.system import System, assert_complete

from penstock.runs.history import open_run
from penstock.types import OutcomeKind

STEPS = 2
RUN = f"""
name: worlds
models: {{policy: {{init: "builtin:tiny-qwen3", engine: hf, replicas: 1}}}}
algorithm: {{num_generations: 4}}
sampling: {{max_tokens: 3}}
workflow: "flows:play"
sandbox: {{backend: none}} # the fakes write down how often they started
dataflow: {{rules: [{{admit: all}}]}}
training: {{learning_rate: 1.0e-3, groups_per_batch: 6, steps: {STEPS}, max_staleness: 1}}
sources:
"""
FLOWS = """
async def play(task, ctx):
    seen = await ctx.env.reset()
    answer = await ctx.policy().chat([{"role": "user", "content": "abc"}])
    while not seen.done:
        seen = await ctx.env.step("down")
    return await ctx.env.score() + 0.1 * len(set(answer.text))
"""


def source(fault: str, folder: Path) -> str:
    """Its second bridge has the fault: the first is the check's."""
    short = "start_timeout_s" if fault == "half-open" else "step_timeout_s"
    limit = f", {short}: 15" if fault in ("half-open", "hang", "slow") else ""
    command = f"[{sys.executable}, {unit.FAKE}, {fault}, {folder / fault}, '2']"
    return f"  - {{name: {fault}, env: {{command: {command}{limit}}}}}\n"


@pytest.mark.slow
def test_six_faults_are_typed_tried_again_and_never_trained_as_zero(tmp_path: Path) -> None:
    sources = "".join(source(fault, tmp_path) for fault in unit.SIX_FAULTS)
    (tmp_path / "run.yaml").write_text(RUN + sources)
    (tmp_path / "flows.py").write_text(FLOWS)
    (tmp_path / "outputs").mkdir()
    system = System(tmp_path / "outputs" / "worlds")
    try:
        system.run_file(tmp_path / "run.yaml", timeout_s=500.0)
    finally:
        system.close()
    assert_complete(system, steps=STEPS)

    with open_run(system.folder.path) as run:
        rows = [*run.trajectories()]
    failed = [row for row in rows if row.outcome is OutcomeKind.FAILED]
    assert {row.source for row in failed} == {*unit.SIX_FAULTS}
    assert all(row.reward is None and not row.steps for row in failed)
    reasons = Counter(row.payload.outcome.reason for row in failed if row.payload is not None)
    assert reasons.keys() == {"environment"}
    trained = [row for row in rows if row.steps]
    assert all(row.reward is not None and row.reward >= 1.0 for row in trained)
    tried_again = {row.source for row in rows if row.epoch > 1 and row.reward is not None}
    assert tried_again == {*unit.SIX_FAULTS}
