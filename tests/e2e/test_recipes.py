# SPDX-License-Identifier: Apache-2.0
"""The one command of each recipe, as its README gives it: what each policy earns rises."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.e2e.system import System, assert_complete

RECIPES = Path(__file__).parents[2] / "recipes"
NAMES = (
    "math_solver_verifier",
    "code_solver_tester",
    "code_solver_selector",
    "router",
)
MARGIN = 0.2
"""By how much the mean reward of the last tenth of steps is above that of the first."""


def rewards(metrics: Path) -> dict[str, list[float]]:
    """Mean reward of each batch, by policy; of a batch that was trained again, the last."""
    found = defaultdict[str, dict[int, float]](dict)
    for line in map(json.loads, metrics.read_text().splitlines()):
        found[line["policy"]][line["seq"]] = line["reward/mean"]
    return {policy: [by_seq[seq] for seq in sorted(by_seq)] for policy, by_seq in found.items()}


def rise(values: Sequence[float]) -> float:
    tenth = max(1, len(values) // 10)
    return (sum(values[-tenth:]) - sum(values[:tenth])) / tenth


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_recipe_learns(name: str, tmp_path: Path) -> None:
    file = RECIPES / name / "run.yaml"
    config = yaml.safe_load(file.read_text())
    system = System(tmp_path / config["name"])
    try:
        system.run_file(file, timeout_s=1500.0)
    finally:
        system.close()
    assert_learned(system, config)


def assert_learned(system: System, config: dict[str, Any]) -> None:
    """Every trained policy earns more at the end, and the audit finds all of its steps."""
    steps = {
        policy: {**config, **model}["training"].get("steps", config["training"]["steps"])
        for policy, model in config["models"].items()
        if not model.get("frozen")
    }
    found = rewards(system.folder.metrics)
    assert found.keys() == steps.keys()
    assert [policy for policy, values in found.items() if rise(values) < MARGIN] == [], found
    assert_complete(system, steps=min(steps.values()))
