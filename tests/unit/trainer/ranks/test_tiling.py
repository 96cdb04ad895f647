# SPDX-License-Identifier: Apache-2.0
"""At real size every element of every tensor has one rank that writes it: no gap and no overlap.

64 fake ranks, one after another, cut the shapes of an 8B, a 32B and a mixture of experts, without
content; all layers of a model have the same shapes, so one is enough.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from benchmarks.fake_ranks import fake_process_group
from benchmarks.real_shapes import QWEN3_8B, QWEN3_30B_A3B, QWEN3_32B, Shape, meta_model

from penstock.config.stages import ParallelConfig
from penstock.trainer.ranks.group import make_rank_group
from penstock.trainer.ranks.regions import TensorRegion, is_owner, region_of
from penstock.trainer.ranks.sharding import shard

NUM_RANKS = 64
FLAT, SQUARE = ParallelConfig(dp=64), ParallelConfig(dp=8, tp=8)
CONTEXT, HYBRID = ParallelConfig(dp=8, cp=8), ParallelConfig(dp=64, replicas=8)
ALL = ParallelConfig(dp=8, replicas=2, cp=2, tp=4)


def written_regions(shape: Shape, parallel: ParallelConfig) -> dict[str, list[TensorRegion]]:
    """What each of the ranks that hold a region writes, by tensor."""
    whole, found = meta_model(shape, 1), defaultdict[str, list[TensorRegion]](list)
    for rank in range(NUM_RANKS):
        with fake_process_group(NUM_RANKS, rank):
            ranks, model = make_rank_group(parallel), copy.deepcopy(whole)
            assert ranks is not None
            shard(model, model, ranks)
            for name, parameter in model.named_parameters():
                region = region_of(parameter)
                assert region is not None, f"{name} is on every rank in full"
                if is_owner(parameter):
                    found[name].append(region)
    assert found.keys() == dict(whole.named_parameters()).keys()
    return found


def times_written(regions: Sequence[TensorRegion]) -> set[int]:
    """How often the elements of a tensor are written; {1} is what must be."""
    full = TensorRegion.full(regions[0].full_shape)
    cuts = [
        sorted({0, size} | {edge for one in regions for edge in edges(one, dim)})
        for dim, size in enumerate(full.shape)
    ]
    cells = np.zeros([len(at) - 1 for at in cuts], np.int64)
    for region in regions:
        spans = (map(cuts[dim].index, edges(region, dim)) for dim in range(cells.ndim))
        cells[tuple(slice(*span) for span in spans)] += 1
    return set(cells.ravel().tolist())


def edges(region: TensorRegion, dim: int) -> tuple[int, int]:
    return region.offset[dim], region.offset[dim] + region.shape[dim]


@pytest.mark.parametrize(
    ("shape", "parallel"),
    [
        (QWEN3_30B_A3B, FLAT),
        (QWEN3_32B, SQUARE),
        pytest.param(QWEN3_30B_A3B, ParallelConfig(dp=64, ep=8), id="moe-dp64ep8"),
        pytest.param(QWEN3_8B, FLAT, marks=pytest.mark.slow),
        pytest.param(QWEN3_32B, FLAT, marks=pytest.mark.slow),
        pytest.param(QWEN3_8B, SQUARE, marks=pytest.mark.slow),
        (QWEN3_8B, ALL),
        pytest.param(QWEN3_32B, ALL, marks=pytest.mark.slow),
        *(
            pytest.param(shape, parallel, marks=pytest.mark.slow)
            for shape in (QWEN3_8B, QWEN3_32B, QWEN3_30B_A3B)
            for parallel in (CONTEXT, HYBRID)
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Shape) else value.text,
)
def test_every_element_is_written_by_one_rank(shape: Shape, parallel: ParallelConfig) -> None:
    for name, regions in written_regions(shape, parallel).items():
        assert times_written(regions) == {1}, name


def test_a_gap_and_an_overlap_are_seen() -> None:
    top = TensorRegion(offset=(0, 0), shape=(2, 4), full_shape=(4, 4))
    bottom = TensorRegion(offset=(2, 0), shape=(2, 4), full_shape=(4, 4))
    overlap = TensorRegion(offset=(1, 0), shape=(3, 4), full_shape=(4, 4))
    assert times_written([top, bottom]) == {1}
    assert times_written([top]) == {0, 1}
    assert times_written([top, overlap]) == {1, 2}
