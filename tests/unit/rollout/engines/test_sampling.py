# SPDX-License-Identifier: Apache-2.0
"""The batch sampler against plain arithmetic, row by row."""

from __future__ import annotations

import math

import numpy as np
import pytest

from penstock.errors import EngineError
from penstock.rollout.decoding.sampling import SpecColumns, sample, uniform
from penstock.seeds import GAMMA, MASK_64, derive, splitmix
from penstock.types import SamplingSpec

RANDOM = np.random.default_rng(0)


def distribution(logits: list[float], spec: SamplingSpec) -> dict[int, float]:
    """The definition, computed naively."""
    weights = {token: math.exp(value / spec.temperature) for token, value in enumerate(logits)}
    ranked = sorted(weights, key=lambda token: -weights[token])
    ranked = [token for token in ranked if weights[token] >= spec.min_p * weights[ranked[0]]]
    if spec.top_k:
        ranked = ranked[: spec.top_k]
    total = sum(weights[token] for token in ranked)
    kept: dict[int, float] = {}
    for token in ranked:
        if spec.top_p < 1 and sum(kept.values()) >= spec.top_p:
            break
        kept[token] = weights[token] / total
    total = sum(kept.values())
    return {token: mass / total for token, mass in kept.items()}


def draw(logits: list[float], spec: SamplingSpec, num_draws: int) -> tuple[list[int], list[float]]:
    rows = np.tile(np.array(logits, np.float32), (num_draws, 1))
    specs = SpecColumns.of([spec] * num_draws)
    tokens, logprobs = sample(rows, specs, np.arange(num_draws))
    return tokens.tolist(), logprobs.tolist()


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("top_p", [0.5, 0.9, 1.0])
@pytest.mark.parametrize(("top_k", "min_p"), [(0, 0.0), (1, 0.0), (3, 0.0), (100, 0.2), (0, 0.2)])
def test_frequencies_and_logprobs_follow_the_spec(
    temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    logits = [0.1, 1.5, -2.0, 0.7, 3.0, -9.0, 1.4]
    spec = SamplingSpec(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=7)
    expected = distribution(logits, spec)
    num_draws = 10_000
    tokens, logprobs = draw(logits, spec, num_draws)
    assert set(tokens) <= set(expected)
    assert max(logprobs) <= 0
    assert np.allclose(logprobs, [math.log(expected[token]) for token in tokens], atol=1e-5)
    for token, mass in expected.items():
        slack = 5 * math.sqrt(mass * (1 - mass) / num_draws) + 1e-3
        assert tokens.count(token) / num_draws == pytest.approx(mass, abs=slack)


def test_temperature_zero_is_greedy_with_the_plain_logprob() -> None:
    logits = [0.0, 2.0, 2.0, 1.0]
    tokens, logprobs = draw(logits, SamplingSpec(temperature=0, top_p=0.1, top_k=1), 50)
    assert set(tokens) == {1}
    expected = 2.0 - math.log(sum(math.exp(value) for value in logits))
    assert logprobs[0] == pytest.approx(expected, abs=1e-6)


def test_rows_do_not_see_one_another() -> None:
    logits = RANDOM.normal(size=(64, 11)).astype(np.float32)
    temperatures = RANDOM.choice([0.0, 0.5, 1.0], size=64).tolist()
    specs = [
        SamplingSpec(temperature=t, top_p=0.8 if row % 2 else 1.0, top_k=row % 5, seed=row)
        for row, t in enumerate(temperatures)
    ]
    positions = np.arange(64)
    tokens, logprobs = sample(logits, SpecColumns.of(specs), positions)
    for row, spec in enumerate(specs):
        one = slice(row, row + 1)
        token, logprob = sample(logits[one], SpecColumns.of([spec]), positions[one])
        assert token[0] == tokens[row]
        assert logprob[0] == pytest.approx(logprobs[row], abs=1e-6)


def test_blocks_of_a_large_vocabulary_are_joined_in_order() -> None:
    vocab_size = 1 << 20
    logits = np.zeros((5, vocab_size), np.float32)
    for row in range(5):
        logits[row, row] = 100.0
    tokens, _ = sample(logits, SpecColumns.of([SamplingSpec()] * 5), np.zeros(5, np.int64))
    assert tokens.tolist() == [0, 1, 2, 3, 4]


def test_uniform_is_splitmix_over_seed_and_position() -> None:
    for seed in (0, 1, -1, derive(3, 4), (1 << 63) - 1):
        for position in (0, 1, 1000):
            bits = splitmix(splitmix(seed & MASK_64) + (position + 1) * GAMMA & MASK_64) >> 12
            specs = SpecColumns.of([SamplingSpec(seed=seed)])
            assert uniform(specs.seed_B, np.array([position]))[0] == bits * 2.0**-52


def test_uniform_numbers_are_uniform() -> None:
    seeds = np.arange(200, dtype=np.uint64).repeat(100)
    numbers = uniform(seeds, np.tile(np.arange(100), 200))
    assert len(np.unique(numbers)) == 20_000
    assert 0 <= numbers.min() < 1e-3 and 0.999 < numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 0.01
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert ((counts - 1000) ** 2 / 1000).sum() < 50  # chi-square, 19 degrees of freedom


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_distribution_are_refused(bad: float) -> None:
    with pytest.raises(EngineError, match="NaN or infinite"):
        draw([0.0, bad, 1.0], SamplingSpec(), 1)


def test_impossible_tokens_are_never_drawn() -> None:
    tokens, logprobs = draw([-math.inf, 0.0, -math.inf, 0.0], SamplingSpec(top_p=0.99), 500)
    assert set(tokens) == {1, 3}
    assert logprobs[0] == pytest.approx(-math.log(2))
