# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from benchmarks import staleness_sweep
from benchmarks.lagged_training import NUM_GENERATIONS, ActorCritic, Sampler, train
from benchmarks.plot import Curve, Point, curves
from benchmarks.staleness_sweep import (
    POINTS,
    Setting,
    breaks_at,
    draw,
    figures,
    half_width,
    new_learner,
    run,
    sweep,
)

from penstock.trainer.batches import Batch
from penstock.trainer.learner import Learner
from penstock.trainer.model_folders import TINY_QWEN3, init_model, load_model

TINY = Setting(steps=3, num_groups=2, minibatches=1, learning_rate=1e-2, seeds=1)


def test_where_a_loss_breaks() -> None:
    assert breaks_at({0: [0.9, 0.9], 1: [0.7, 0.95], 4: [0.5, 0.6], 8: [0.1, 0.2]}) == 4
    assert breaks_at({0: [0.5], 1: [0.41], 4: [0.39]}) == 4  # a share of its own, not of 1
    assert breaks_at({0: [0.9]}) == -1
    assert half_width([0.5]) == 0.0
    assert half_width([0.4, 0.5, 0.6]) == pytest.approx(4.303 * 0.1 / 3**0.5)


def test_the_figure_is_well_formed_and_has_every_point() -> None:
    svg = draw({"ppo": {0: [0.9, 0.8], 16: [0.2, 0.1]}, "m2po": {0: [0.9, 0.9]}}, TINY)
    root = ElementTree.fromstring(svg)
    marks = [one for one in root.iter() if one.get("class") == "mark"]
    assert len(marks) == 3 + 2  # points, and one per name
    assert len({one.get("d") for one in marks}) == len({one.get("fill") for one in marks}) == 2
    assert "m2po" in svg
    line = Curve(label="a<b", points=[Point(x=0, y=0.5, half_width=0.1)])
    ElementTree.fromstring(curves("t", [line], unit="u", x_label="x"))


class Watching(ActorCritic):
    """Notes how old each batch says it is, and which version's log-probs it carries."""

    def __init__(self, actor: Learner, other: Learner) -> None:
        super().__init__(actor)
        self._other = other
        self._versions: list[dict[str, torch.Tensor]] = []
        self.said: list[int] = []
        self.sampled_by: list[list[int]] = []

    def step(self, batch: Batch) -> None:
        state = self.actor.model.state_dict()
        self._versions.append({name: value.clone() for name, value in state.items()})
        self.said.append(int(batch.staleness_R.max()))
        fits = [number for number in range(len(self._versions)) if self._fits(number, batch)]
        self.sampled_by.append(fits)
        super().step(batch)

    def _fits(self, number: int, batch: Batch) -> bool:
        self._other.model.load_state_dict(self._versions[number])
        mask_T = batch.samples.mask_T
        gap_K = self._other.infer(batch)[mask_T] - batch.samples.logprobs_T[mask_T]
        return bool(np.abs(gap_K).max() < 1e-4)


@pytest.mark.parametrize(
    ("lag", "said", "sampled_by"),
    [(0, [0, 0, 0, 0], [[0], [1], [2], [3]]), (2, [0, 1, 2, 2], [[0], [0], [0], [1]])],
)
def test_every_batch_is_sampled_by_the_version_named(
    lag: int, said: list[int], sampled_by: list[list[int]], tmp_path: Path
) -> None:
    coordinator = tmp_path / "model"
    init_model(TINY_QWEN3, coordinator, 0)
    trainee = Watching(new_learner("ppo", coordinator, TINY), new_learner("ppo", coordinator, TINY))
    sampler = Sampler(load_model(coordinator), coordinator / "tokenizer.json", 0)
    train(trainee, sampler, lag=lag, steps=4, num_groups=8)
    assert trainee.said == said
    assert trainee.sampled_by == sampled_by


def test_an_answer_ends_with_its_end_token(tmp_path: Path) -> None:
    coordinator = tmp_path / "model"
    init_model(TINY_QWEN3, coordinator, 0)
    sampler = Sampler(load_model(coordinator), coordinator / "tokenizer.json", 0)
    batch = sampler.batch(16, number=3, trains_from=5)
    samples = batch.samples
    assert batch.num_groups == 16 and samples.rows_S.size == 16 * NUM_GENERATIONS
    ids = np.split(samples.ids_T, samples.ends_S[:-1])
    masks = np.split(samples.mask_T, samples.ends_S[:-1])
    for one, mask in zip(ids, masks, strict=True):
        assert mask[:4].sum() == 0 and mask[4:].all()
        assert one.size == 7 or one[-1] == 1
        assert 1 not in one[4:-1]
    assert {one.size for one in ids} == {5, 6, 7}
    assert set(samples.versions_T[samples.mask_T]) == {3}


@pytest.mark.parametrize("name", ["ppo", "ppo_critic", "decoupled", "m2po"])
def test_every_loss_runs(name: str, tmp_path: Path) -> None:
    assert 0 <= run(name, 1, 0, TINY, tmp_path) <= 1


def test_finished_runs_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str, int, int]] = []

    def fake(name: str, lag: int, seed: int, *_: object) -> float:
        if len(ran) == 20:
            raise InterruptedError
        ran.append((name, lag, seed))
        return 1 / (1 + lag + seed)

    monkeypatch.setattr(staleness_sweep, "run", fake)
    setting = Setting(seeds=2)
    with pytest.raises(InterruptedError):
        sweep(setting, tmp_path, tmp_path / "runs.jsonl")
    first, ran = ran, []
    found = sweep(setting, tmp_path, tmp_path / "runs.jsonl")
    assert list(found) == ["ppo", "ppo_critic", "decoupled", "m2po"]
    assert sorted(first + ran) == sorted((*point, seed) for point in POINTS for seed in (0, 1))
    assert found["ppo"][4] == [1 / 5, 1 / 6]
    assert figures(found)["ratio"] == 1.0 and figures(found)["ppo_breaks_at"] == 1
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == 36
    ran = []
    sweep(Setting(seeds=1, steps=setting.steps + 1), tmp_path, tmp_path / "runs.jsonl")
    assert len(ran) == len(POINTS), "runs of another length count as other runs"


def _by_lag(_name: str, lag: int, *_: object) -> float:
    return 1 / (1 + lag)


def test_the_quick_sweep_has_the_lags_of_its_ratio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staleness_sweep, "run", _by_lag)
    found = sweep(staleness_sweep.QUICK, tmp_path, tmp_path / "runs.jsonl")
    assert {tuple(rewards) for rewards in found.values()} == {(0, 4)}
    assert figures(found)["ratio"] == 1.0
