# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from benchmarks.plot import Curve, Point, curves
from benchmarks.staleness_sweep import Setting, breaks_at, draw, half_width, new_learner, run
from benchmarks.virtual_lag import Sampler, Trainee, train

from penstock.trainer.batches import Batch
from penstock.trainer.models import TINY_QWEN3, init_model, load_model

TINY = Setting(steps=3, num_groups=2, minibatches=1, seeds=1)


def test_where_a_loss_breaks() -> None:
    assert breaks_at({0: [0.9, 0.9], 1: [0.7, 0.95], 4: [0.5, 0.6], 8: [0.1, 0.2]}) == 4
    assert breaks_at({0: [0.9]}) == -1
    assert half_width([0.5]) == 0.0
    assert half_width([0.4, 0.5, 0.6]) == pytest.approx(4.303 * 0.1 / 3**0.5)


def test_the_figure_is_well_formed_and_has_every_point() -> None:
    svg = draw({"ppo": {0: [0.9, 0.8], 16: [0.2, 0.1]}, "m2po": {0: [0.9, 0.9]}}, TINY)
    root = ElementTree.fromstring(svg)
    circles = [one for one in root.iter() if one.tag.endswith("circle")]
    assert len(circles) == 3 + 2  # points, and one per name
    assert "m2po" in svg
    line = Curve(label="a<b", points=[Point(x=0, y=0.5, half_width=0.1)])
    ElementTree.fromstring(curves("t", [line], unit="u", x_label="x"))


class Watching(Trainee):
    """Notes how old each batch is."""

    seen: list[int]

    def step(self, batch: Batch) -> None:
        self.seen.append(int(batch.staleness_R.max()))
        super().step(batch)


@pytest.mark.parametrize(("lag", "seen"), [(0, [0, 0, 0, 0]), (2, [0, 1, 2, 2])])
def test_every_batch_has_the_lag_named(lag: int, seen: list[int], tmp_path: Path) -> None:
    init_model(TINY_QWEN3, tmp_path / "model", 0)
    trainee = Watching(new_learner("ppo", tmp_path / "model", TINY))
    trainee.seen = []
    sampler = Sampler(load_model(tmp_path / "model"), tmp_path / "model" / "tokenizer.json", 0)
    rewards = train(trainee, sampler, lag=lag, steps=4, num_groups=1)
    assert trainee.seen == seen and len(rewards) == 4


@pytest.mark.parametrize("name", ["ppo", "ppo_critic", "decoupled", "m2po"])
def test_every_loss_runs(name: str, tmp_path: Path) -> None:
    assert 0 <= run(name, 1, 0, TINY, tmp_path) <= 1
