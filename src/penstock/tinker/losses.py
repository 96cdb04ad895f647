# SPDX-License-Identifier: Apache-2.0
"""The losses that Tinker clients name, as objectives of the trainer.

Owns what each reads of a datum and the meaning of its settings. A loss is a sum over tokens, never
a mean: clients weigh it themselves.

K = tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from penstock.errors import BadRequest
from penstock.tinker.protocol import Datum, Floats
from penstock.trainer.algorithms.cispo import CispoLoss
from penstock.trainer.algorithms.gspo import GspoLoss
from penstock.trainer.losses.clipped import ClippedLoss
from penstock.trainer.losses.tokens import Objective, TokenLoss, Tokens

TARGETS, WEIGHTS, LOGPROBS, ADVANTAGES = "target_tokens", "weights", "logprobs", "advantages"


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy:
    """-Σ weight · log p. The SDK's custom losses are this one, with their gradient as weights."""

    def __call__(self, tokens: Tokens) -> TokenLoss:
        return TokenLoss(loss_K=-tokens.logprobs_K * tokens.advantages_K, metrics={})


@dataclass(frozen=True, slots=True, kw_only=True)
class DroLoss:
    """Direct reward optimisation: the advantage, less beta / 2 times the squared log-ratio."""

    beta: float

    def __call__(self, tokens: Tokens) -> TokenLoss:
        moved_K = tokens.logprobs_K - tokens.sampling_K
        loss_K = 0.5 * self.beta * moved_K**2 - tokens.logprobs_K * tokens.advantages_K
        return TokenLoss(loss_K=loss_K, metrics={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    objective: Objective
    inputs: frozenset[str]
    """What it reads of a datum, beside the target tokens."""

    def check(self, datum: Datum) -> None:
        """Raises BadRequest."""
        known = self.inputs | {TARGETS}
        missing = known - {WEIGHTS} - set(datum.inputs)
        if missing or set(datum.inputs) - known:
            raise BadRequest(
                f"loss_fn_inputs has {', '.join(sorted(datum.inputs))}; this loss reads "
                f"{', '.join(sorted(known))}"
            )
        if datum.inputs[TARGETS].dtype.kind != "i":
            raise BadRequest(f"loss_fn_inputs[{TARGETS!r}] must be integers")

    def advantages(self, datum: Datum) -> Floats:
        name = ADVANTAGES if ADVANTAGES in self.inputs else WEIGHTS
        found = datum.inputs.get(name)
        return np.ones(datum.tokens.size, np.float32) if found is None else _float32(found)

    def sampling(self, datum: Datum) -> Floats:
        found = datum.inputs.get(LOGPROBS)
        return np.zeros(datum.tokens.size, np.float32) if found is None else _float32(found)


def _float32(values: Floats) -> Floats:
    return values.astype(np.float32)


class _Bounds(NamedTuple):
    """Of a ratio, as distances from 1."""

    epsilon: float
    epsilon_high: float


def _bounds(settings: Mapping[str, float]) -> _Bounds:
    least = settings.get("clip_low_threshold", 0.8)
    most = settings.get("clip_high_threshold", 1.2)
    if not 0 <= least <= 1 <= most:
        raise BadRequest(
            f"clip thresholds {least:g} and {most:g}: the ratio is bounded from a number up to 1 "
            "to one from 1 on"
        )
    return _Bounds(1 - least, most - 1)


def _ppo(settings: Mapping[str, float]) -> Objective:
    epsilon, high = _bounds(settings)
    return ClippedLoss(epsilon=epsilon, epsilon_high=high)


def _cispo(settings: Mapping[str, float]) -> Objective:
    epsilon, high = _bounds(settings)
    return CispoLoss(epsilon=epsilon, epsilon_high=high)


def _gspo(settings: Mapping[str, float]) -> Objective:
    epsilon, high = _bounds(settings)
    return GspoLoss(epsilon=epsilon, epsilon_high=high)


_POLICY = frozenset({LOGPROBS, ADVANTAGES})
_CLIP = frozenset({"clip_low_threshold", "clip_high_threshold"})
_Make = Callable[[Mapping[str, float]], Objective]
_LOSSES: Mapping[str, tuple[frozenset[str], frozenset[str], _Make]] = {
    "cross_entropy": (frozenset({WEIGHTS}), frozenset(), lambda _: CrossEntropy()),
    "importance_sampling": (
        _POLICY,
        frozenset(),
        lambda _: ClippedLoss(epsilon=math.inf, epsilon_high=math.inf),
    ),
    "ppo": (_POLICY, _CLIP, _ppo),
    "cispo": (_POLICY, _CLIP, _cispo),
    "gspo": (_POLICY, _CLIP, _gspo),
    "dro": (_POLICY, frozenset({"beta"}), lambda found: DroLoss(beta=found.get("beta", 0.05))),
}
"""What each reads, its settings, and the objective made of them."""


def read_loss(name: str, settings: Mapping[str, float]) -> Loss:
    """Raises BadRequest."""
    if name not in _LOSSES:
        raise BadRequest(f"no loss {name!r} here; there are {', '.join(_LOSSES)}")
    inputs, known, make = _LOSSES[name]
    if unknown := sorted(set(settings) - known):
        raise BadRequest(
            f"loss {name!r} has no setting {', '.join(unknown)}; it has "
            f"{', '.join(sorted(known)) or 'none'}"
        )
    return Loss(objective=make(settings), inputs=inputs)
