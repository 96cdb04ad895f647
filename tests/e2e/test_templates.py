# SPDX-License-Identifier: Apache-2.0
"""Each template of `penstock init`, from the command to a rising reward."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.e2e.system import System, assert_complete, penstock

RISE = {
    "single-turn": 2.0,
    "multi-turn-tool": 1.5,
    "external-agent": 2.0,
    "multi-policy": 2.0,
    "harbor": 2.0,
}
"""By how much the last steps of each policy are better than its first."""


@pytest.mark.slow
@pytest.mark.parametrize("template", RISE)
def test_a_template_learns(tmp_path: Path, template: str) -> None:
    done = penstock("init", str(tmp_path / "made"), "--template", template)
    assert done.returncode == 0, done.stderr
    tmp_path.chmod(0o755)  # as root, a sandbox has a user of its own
    system = System(tmp_path / "outputs" / "made")
    system.folder.path.parent.mkdir()
    try:
        system.run_file(tmp_path / "made" / "run.yaml", timeout_s=1500.0)
    finally:
        system.close()
    lines = [json.loads(line) for line in system.folder.metrics.read_text().splitlines()]
    by_policy = {
        policy: [line["reward/mean"] for line in lines if line["policy"] == policy]
        for policy in {line["policy"] for line in lines}
    }
    assert len(by_policy) == (2 if template == "multi-policy" else 1)
    for rewards in by_policy.values():
        first, last = sum(rewards[:4]) / 4, sum(rewards[-4:]) / 4
        assert last > RISE[template] * first, rewards
    assert_complete(system, steps=min(map(len, by_policy.values())))
