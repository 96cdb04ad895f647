# SPDX-License-Identifier: Apache-2.0
"""How much of the machine's memory the work of all clients may take, and what fits in it."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config.trainer import Recompute
from penstock.rollout.decoding.continuous import MAX_ROWS
from penstock.trainer.pipeline.pass_memory import ModelShape, PassSpec, pass_memory

SHARE = 4
"""Answers together fill a quarter of the memory, however long they get. A pass may take as much by
the trainer's formulas, which on a CPU is up to 2.3 times that (measured on 2 and 4 layers)."""
MICRO_BATCH_TOKENS = 4096
"""Most tokens in one pass; a longer sequence is one by itself."""


def memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def max_answers(answer_bytes: int) -> int:
    """How many of at most this size may grow in memory at a time."""
    return max(1, min(MAX_ROWS, memory_bytes() // SHARE // answer_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLimit:
    """Of one backward pass."""

    max_tokens: int
    recompute: Recompute


def pass_limit(config: Mapping[str, Any], num_parameters: int, window: int) -> PassLimit:
    """What fits: everything is kept if that is possible for a sequence of the whole window."""
    shape = ModelShape.read(config)
    if shape is None:
        return PassLimit(max_tokens=MICRO_BATCH_TOKENS, recompute="layer")
    room, longest = memory_bytes() // SHARE, max(window, MICRO_BATCH_TOKENS)

    def most(recompute: Recompute) -> int:
        def needed(num_tokens: int) -> int:
            spec = PassSpec(num_tokens=num_tokens, recompute=recompute)
            return pass_memory(shape, num_parameters, spec).total_bytes

        return bisect_right(range(1, longest + 1), room, key=needed)

    if most("none") == longest:
        return PassLimit(max_tokens=longest, recompute="none")
    return PassLimit(max_tokens=most("layer"), recompute="layer")
