# SPDX-License-Identifier: Apache-2.0
"""Losses and advantages once more: plain float64, one token at a time, sharing no code with src.

`held` stands for the values of `now` that a loss must not differentiate: differences are taken in
`now` with `held` fixed, so a stop-gradient in the wrong place shows.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Lengths = Sequence[int]


def spans(lengths: Lengths) -> list[range]:
    out: list[range] = []
    start = 0
    for length in lengths:
        out.append(range(start, start + length))
        start += length
    return out


def bounded_min(ratio: float, advantage: float, low: float, high: float) -> float:
    inside = min(max(ratio, 1 - low), 1 + high)
    return min(ratio * advantage, inside * advantage)


# ------------------------------------------------------------------------------------ policy losses


def clipped(
    now: Floats, old: Floats, advantages: Floats, low: float, high: float, dual: float = math.inf
) -> Floats:
    out: list[float] = []
    for lp, lo, advantage in zip(now, old, advantages, strict=True):
        value = bounded_min(math.exp(lp - lo), advantage, low, high)
        if advantage < 0 and math.isfinite(dual):
            value = max(value, dual * advantage)
        out.append(-value)
    return np.array(out)


def decoupled(
    now: Floats, proximal: Floats, sampling: Floats, advantages: Floats, clip: float, cap: float
) -> Floats:
    weights = np.array([min(math.exp(x), cap) for x in proximal - sampling])
    return weights * clipped(now, proximal, advantages, clip, clip)


def gspo_mean(
    now: Floats, old: Floats, by_sequence: Floats, lengths: Lengths, low: float, high: float
) -> float:
    """The sequence-level loss itself, to a single number."""
    total = 0.0
    for tokens, advantage in zip(spans(lengths), by_sequence, strict=True):
        ratio = math.exp(statistics.fmean(now[t] - old[t] for t in tokens))
        total -= bounded_min(ratio, advantage, low, high)
    return total / len(lengths)


def gspo_tokens(
    now: Floats,
    held: Floats,
    old: Floats,
    advantages: Floats,
    lengths: Lengths,
    low: float,
    high: float,
) -> Floats:
    out = np.zeros(now.size)
    for tokens in spans(lengths):
        ratio = math.exp(statistics.fmean(held[t] - old[t] for t in tokens))
        for t in tokens:
            out[t] = -bounded_min(ratio * math.exp(now[t] - held[t]), advantages[t], low, high)
    return out


def cispo(
    now: Floats, held: Floats, old: Floats, advantages: Floats, low: float, high: float
) -> Floats:
    weights = np.minimum(np.maximum(np.exp(held - old), 1 - low), 1 + high)
    return -weights * advantages * now


def sapo(now: Floats, old: Floats, advantages: Floats, good: float, bad: float) -> Floats:
    out: list[float] = []
    for lp, lo, advantage in zip(now, old, advantages, strict=True):
        tau = good if advantage > 0 else bad
        gate = 4 / tau / (1 + math.exp(-tau * (math.exp(lp - lo) - 1)))
        out.append(-gate * advantage)
    return np.array(out)


def m2po_kept(now: Floats, sampling: Floats, advantages: Floats, budget: float) -> list[bool]:
    """Brute force over how many of the largest are dropped."""
    logs = now - sampling
    harmful = [t for t in range(now.size) if advantages[t] * logs[t] > 0]
    squares = sorted((float(logs[t] ** 2) for t in harmful), reverse=True)
    for dropped in range(len(squares) + 1):
        rest = squares[dropped:]
        if not rest or math.fsum(rest) / len(rest) <= budget:
            break
    else:
        raise AssertionError("dropping all keeps every budget")
    bound = squares[dropped - 1] if dropped else math.inf
    return [not (t in harmful and float(logs[t] ** 2) >= bound) for t in range(now.size)]


def m2po(now: Floats, sampling: Floats, advantages: Floats, kept: Sequence[bool]) -> Floats:
    ratio = np.minimum(np.maximum(np.exp(now - sampling), 0.05), 20.0)
    return np.where(kept, -ratio * advantages, 0.0)


def kl(kind: str, now: Floats, reference: Floats) -> Floats:
    x = np.clip(reference - now, -20, 20)
    return {"k1": -x, "k2": x * x / 2, "k3": np.expm1(x) - x}[kind]


def value_loss(now: Floats, old: Floats, returns: Floats, clip: float) -> Floats:
    out: list[float] = []
    for v, v_old, target in zip(now, old, returns, strict=True):
        near = min(max(v, v_old - clip), v_old + clip)
        out.append(0.5 * max((v - target) ** 2, (near - target) ** 2))
    return np.array(out)


def differences(function: Callable[[Floats], float], at: Floats, step: float = 1e-6) -> Floats:
    """Central differences of a function of a few numbers."""
    out = np.zeros(at.size)
    for index in range(at.size):
        nudge = np.zeros(at.size)
        nudge[index] = step
        out[index] = (function(at + nudge) - function(at - nudge)) / (2 * step)
    return out


# -------------------------------------------------------------------------------------- aggregation


def aggregate(
    losses: Floats,
    lengths: Lengths,
    mode: str,
    *,
    kept: Sequence[bool] | None = None,
    is_surviving: bool = True,
    constant: int = 0,
) -> float:
    """One number of a whole update."""
    keep = [True] * losses.size if kept is None else list(kept)
    sequences = [list(tokens) for tokens in spans(lengths) if len(tokens)]

    def pluralise(original: int, surviving: int) -> float:
        return max(surviving, original / 2) if is_surviving else original

    sums = [math.fsum(losses[t] for t in tokens if keep[t]) for tokens in sequences]
    alive = [sum(keep[t] for t in tokens) for tokens in sequences]
    num_sequences = pluralise(len(sequences), sum(n > 0 for n in alive))
    if mode == "token-mean":
        return math.fsum(sums) / pluralise(losses.size, sum(keep))
    if mode == "seq-mean-token-mean":
        means = [
            total / pluralise(len(tokens), n)
            for total, tokens, n in zip(sums, sequences, alive, strict=True)
        ]
        return math.fsum(means) / num_sequences
    return math.fsum(sums) / num_sequences / (constant if mode == "fixed-constant" else 1)


# --------------------------------------------------------------------------------------- advantages


def known(rewards: Sequence[float]) -> list[float]:
    return [reward for reward in rewards if math.isfinite(reward)]


def has_spread(rewards: Sequence[float]) -> bool:
    values = known(rewards)
    return bool(values) and max(values) - min(values) > 1e-6


def centred(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    out: list[list[float]] = []
    for rewards in groups:
        mean = statistics.fmean(known(rewards)) if has_spread(rewards) else 0.0
        out.append([r - mean if math.isfinite(r) and has_spread(rewards) else 0.0 for r in rewards])
    return out


def grpo(groups: Sequence[Sequence[float]], ddof: int = 1) -> list[float]:
    out: list[float] = []
    for rewards, values in zip(groups, centred(groups), strict=True):
        if not has_spread(rewards):
            out += [0.0] * len(rewards)
            continue
        std = statistics.stdev(known(rewards)) if ddof else statistics.pstdev(known(rewards))
        out += [value / (std + 1e-5) for value in values]
    return out


def rloo(groups: Sequence[Sequence[float]]) -> list[float]:
    out: list[float] = []
    for rewards in groups:
        for index, reward in enumerate(rewards):
            others = known([r for j, r in enumerate(rewards) if j != index])
            if not (others and math.isfinite(reward) and has_spread(rewards)):
                out.append(0.0)
            else:
                out.append(reward - statistics.fmean(others))
    return out


def reinforce_baseline(groups: Sequence[Sequence[float]]) -> list[float]:
    """Two passes: the group's mean, then mean and std over the rows of the batch."""
    flat = [r for rewards in groups for r in rewards]
    values = [v for part in centred(groups) for v in part]
    pluralise = [v for v, r in zip(values, flat, strict=True) if math.isfinite(r)]
    mean, std = statistics.fmean(pluralise), statistics.stdev(pluralise)
    return [
        (v - mean) / (std + 1e-5) if math.isfinite(r) else 0.0
        for v, r in zip(values, flat, strict=True)
    ]


def gae(
    rewards: Sequence[float],
    values: Sequence[float],
    after: float,
    discount: float,
    lam: float,
) -> tuple[list[float], list[float]]:
    """Of one sample's trained tokens, by the explicit sum."""
    following = [*values[1:], after][: len(values)]
    errors = [r + discount * nxt - v for r, nxt, v in zip(rewards, following, values, strict=True)]
    advantages = [
        math.fsum((discount * lam) ** (s - t) * errors[s] for s in range(t, len(errors)))
        for t in range(len(errors))
    ]
    return advantages, [a + v for a, v in zip(advantages, values, strict=True)]
