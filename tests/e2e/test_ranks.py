# SPDX-License-Identifier: Apache-2.0
"""A run that goes on with other ranks than it began with learns what a run learns that never had
but one: the state of its optimizer is cut anew."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.system import System, assert_complete, beside_a_straight_one, penstock

SMALL = (
    "training.groups_per_batch=4",
    "training.minibatches=2",
    "training.checkpoint_every=2",
    "algorithm.num_generations=4",
    "deterministic=true",
)
COMPARED = ("reward/mean", "loss", "grad_norm")
TOLERANCE = 1e-5


@pytest.fixture
def systems(tmp_path: Path) -> Iterator[tuple[System, System]]:
    with beside_a_straight_one(tmp_path, "changed") as made:
        yield made


def curve(system: System) -> list[list[float]]:
    lines = [json.loads(line) for line in system.folder.metrics.read_text().splitlines()]
    return [[line["number"], *(line.get(name, 0.0) for name in COMPARED)] for line in lines]


def assert_repeats(folder: str, step: int) -> None:
    """By as many ranks as trained it."""
    done = penstock("replay", folder, str(step), "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["is_equal"] is True


@pytest.mark.slow
def test_the_number_of_ranks_may_change(systems: tuple[System, System]) -> None:
    straight, changed = systems
    straight.start(*SMALL, "training.steps=9")
    assert straight.wait(300.0) == 0, straight.output()
    changed.start(*SMALL, "training.steps=3")
    assert changed.wait(300.0) == 0, changed.output()
    folder = str(changed.folder.path)
    for steps, dp, tp in ((6, 2, 1), (9, 1, 2)):
        spread = (f"training.parallel.dp={dp}", f"training.parallel.tp={tp}")
        words = ("run", folder, f"training.steps={steps}", *spread, "--headless", "--json")
        refused = penstock(*words)
        assert refused.returncode == 1 and "parallel" in refused.stderr, refused.stderr
        ended = penstock(*words, "--accept-changes")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert_repeats(folder, steps)
    assert_complete(changed, steps=9)
    for now, then in zip(curve(changed), curve(straight), strict=True):
        assert now == pytest.approx(then, abs=TOLERANCE)
