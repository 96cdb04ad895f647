# SPDX-License-Identifier: Apache-2.0
"""What a run can compute on: resources with capability tags, rates, cost and `train_priority`.

Pure data and arithmetic. Does not decide what runs where: that is `tag_plan`."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.config.hosts import TRAIN

ROLLOUT = "rollout"
"""The tag of resources that generate."""
DECODE_TOKENS = 32.0
"""Answers that an engine decodes at once: tokens per pass over the weights."""
TRAIN_TOKENS = 4096.0
"""Tokens of a micro-batch: per pass over the weights."""
TRAIN_COST = 3.0
"""Training a token takes a forward pass, and a backward pass that costs twice as much."""

__all__ = ["ROLLOUT", "TRAIN", "Peaks", "Resource", "train_priority"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """What a device can do at most, as its maker says or as measured."""

    flops_per_s: float
    bytes_per_s: float
    """Of its memory."""

    def attainable(self, tokens_per_pass: float) -> float:
        """The roofline: floating-point operations per second, if each pass over the weights serves
        this number of tokens. In 16 bits a weight is 2 bytes, and costs 2 operations per token."""
        return min(self.flops_per_s, tokens_per_pass * self.bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource:
    """A device or a host that works on one thing at a time."""

    name: str
    tags: frozenset[str]
    """What it is able to do (`rollout`, `train`), and what selectors ask for (`h100`, `eu`)."""
    service: str | None = None
    """What it works for now; None: it is idle."""
    is_alive: bool = True
    cost_per_hour: float = 0.0
    peaks: Peaks | None = None
    rollout_tokens_per_s: float | None = None
    """Measured; None: not yet."""
    train_tokens_per_s: float | None = None
    """Measured; None: not yet."""


def train_priority(resource: Resource) -> float:
    """Tokens that it trains in the time in which it would generate one: who has more trains first,
    and the others lose least by generating. Measured if possible, else by the roofline; 0 if
    neither is known. The roofline leaves out the cache of long answers, which slows decoding."""
    trained, generated = resource.train_tokens_per_s, resource.rollout_tokens_per_s
    if trained and generated:
        return trained / generated
    if resource.peaks is None:
        return 0.0
    decoding = resource.peaks.attainable(DECODE_TOKENS)
    return resource.peaks.attainable(TRAIN_TOKENS) / TRAIN_COST / decoding
