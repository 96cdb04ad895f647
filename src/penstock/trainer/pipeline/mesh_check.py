# SPDX-License-Identifier: Apache-2.0
"""Whether a model can be cut over a mesh: its heads, its vocabulary, its windows.

Owns the refusal, with the figure that does not divide. Imports no torch; the trainer refuses the
same models when it cuts them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from penstock.config.stages import ParallelConfig
from penstock.trainer.pipeline.pass_memory import ModelShape


def mesh_problems(shape: ModelShape, parallel: ParallelConfig) -> Iterator[str]:
    """What is wrong with this mesh for a model of this shape."""
    tp, cp, heads = parallel.tp, parallel.cp, shape.num_key_value_heads
    if tp > 1 and shape.num_experts:
        yield (
            f"tp {tp} cannot cut a layer with {shape.num_experts} experts; set tp to 1 and raise dp"
        )
        return
    sizes = {
        "attention heads": shape.num_heads,
        "key-value heads": heads,
        "tokens of the vocabulary": shape.vocab,
    }
    for what, size in sizes.items():
        if size % tp:
            yield (
                f"tp {tp} cannot cut {size} {what} evenly: {size % tp} left over; set tp to a "
                f"divisor of {math.gcd(*sizes.values())}"
            )
            return
    if shape.has_window and heads // tp % cp:
        yield (
            f"cp {cp} does not divide the {heads // tp} key-value heads of a rank, so keys would "
            "go round from rank to rank, which layers with a sliding window do not support; set cp "
            f"to a divisor of {heads // tp}"
        )
