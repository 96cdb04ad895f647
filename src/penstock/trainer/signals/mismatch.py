# SPDX-License-Identifier: Apache-2.0
"""How far each node's engine is from the trainer on the same weights, and which node drifts.

Owns the mismatch of a batch by node, its moving average, and the judgement that a node differs from
its pool. The averages are plain numbers and go into the checkpoint. The dataflow decides what
happens to a drifting node.

A node here is one of its processes, NODE/BOOT: mismatch before a restart does not count against the
new process, and rows of the old process may arrive long after.

Fresh tokens are those with the smallest staleness of their batch: at staleness 0 the mismatch is
only the engine's, at a larger one it includes the change of the policy, for all nodes alike.

K = trained tokens of this rank, N = nodes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace

import numpy as np

from penstock.trainer.arrays import Floats, Ints
from penstock.trainer.signals.ratio_stats import log_ratios
from penstock.types import NodeId

DRIFT = 10.0
"""A node drifts when its k3 is this many times its pool's median."""
MIN_MEDIAN_K3 = 1e-4
"""Smallest median assumed: if engines agree to the last bit, ordinary rounding must not count as
drift."""
HALF_LIFE_TOKENS = 4096.0
"""Fresh tokens of a node after which earlier ones count half."""
MIN_EVIDENCE = 0.1
"""Weight that an average needs before a node is judged by it: some 600 tokens."""
MIN_POOL = 3
"""Nodes that make a pool, however often they restart; of two, it is unknown which one is wrong."""
FORGET_AFTER = 200
"""Batches after which a node that sends nothing leaves the pool."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Between one node's engine and the trainer, over fresh tokens of one batch."""

    num_tokens: int
    sum_abs: float
    sum_k3: float
    max_abs: float

    @property
    def mean_abs(self) -> float:
        return self.sum_abs / max(self.num_tokens, 1)

    @property
    def k3(self) -> float:
        """Mean of rho - 1 - log rho: 0 if both agree, never below."""
        return self.sum_k3 / max(self.num_tokens, 1)

    def __add__(self, other: Mismatch) -> Mismatch:
        return Mismatch(
            self.num_tokens + other.num_tokens,
            self.sum_abs + other.sum_abs,
            self.sum_k3 + other.sum_k3,
            max(self.max_abs, other.max_abs),
        )


NO_GAP = Mismatch(0, 0.0, 0.0, 0.0)


def mismatch_by_node(
    logprobs_K: Floats,
    sampling_K: Floats,
    staleness_K: Ints,
    rows_K: Ints,
    nodes: Mapping[int, str],
    *,
    staleness: int,
) -> dict[str, Mismatch]:
    """Over tokens of this staleness; `nodes` maps rows of the manifest to nodes."""
    is_fresh_K = staleness_K == staleness
    log_K, fresh_rows_K = log_ratios(logprobs_K, sampling_K)[is_fresh_K], rows_K[is_fresh_K]
    rows, row_K = np.unique(fresh_rows_K, return_inverse=True)
    names, node_R = np.unique([nodes[int(row)] for row in rows], return_inverse=True)
    node_K, size_K = node_R[row_K], np.abs(log_K)
    most_N = np.zeros(names.size)
    np.maximum.at(most_N, node_K, size_K)
    nums_N = np.bincount(node_K, minlength=names.size)
    abs_N = np.bincount(node_K, size_K, minlength=names.size)
    k3_N = np.bincount(node_K, np.expm1(log_K) - log_K, minlength=names.size)
    sums = zip(nums_N.tolist(), abs_N.tolist(), k3_N.tolist(), most_N.tolist(), strict=True)
    return {str(name): Mismatch(*found) for name, found in zip(names, sums, strict=True)}


def pool_mismatch(mismatches: Mapping[str, Mismatch]) -> Mismatch:
    """Of all nodes together."""
    return sum(mismatches.values(), start=NO_GAP)


def to_vector(mismatches: Mapping[str, Mismatch]) -> Floats:
    """As numbers, because ranks exchange only numbers; see `from_vector`."""
    numbers: list[float] = []
    for node, mismatch in mismatches.items():
        name = node.encode()
        numbers += [len(name), *name, *astuple(mismatch)]
    return np.array(numbers, np.float64)


def from_vector(numbers: Floats) -> dict[str, Mismatch]:
    """Decode the mismatches of all ranks and sum them by node."""
    found: dict[str, Mismatch] = {}
    at = 0
    while at < numbers.size:
        end = at + 1 + int(numbers[at])
        node = bytes(int(byte) for byte in numbers[at + 1 : end]).decode()
        num_tokens, *sums = numbers[end : end + 4].tolist()
        found[node] = found.get(node, NO_GAP) + Mismatch(int(num_tokens), *sums)
        at = end + 4
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MovingAverage:
    """Of one node over its past batches, recent tokens counting more."""

    sum_k3: float
    sum_abs: float
    weight: float
    """0 without any token, 1 after many."""
    last_seq: int
    """The batch it was last seen in."""

    @property
    def k3(self) -> float:
        return self.sum_k3 / self.weight if self.weight else 0.0

    @property
    def mean_abs(self) -> float:
        return self.sum_abs / self.weight if self.weight else 0.0

    def updated(self, mismatch: Mismatch, seq: int) -> MovingAverage:
        keep = 0.5 ** (mismatch.num_tokens / HALF_LIFE_TOKENS)
        return MovingAverage(
            sum_k3=keep * self.sum_k3 + (1 - keep) * mismatch.k3,
            sum_abs=keep * self.sum_abs + (1 - keep) * mismatch.mean_abs,
            weight=keep * self.weight + (1 - keep),
            last_seq=seq,
        )


_NEW = MovingAverage(sum_k3=0.0, sum_abs=0.0, weight=0.0, last_seq=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftingNode:
    """A node that differs from its pool."""

    boot: str
    """NODE/BOOT."""
    k3: float
    mean_abs: float
    median_k3: float

    @property
    def node_id(self) -> NodeId:
        return _node(self.boot)

    @property
    def boot_id(self) -> str:
        """Empty if its rows do not carry it."""
        return self.boot.partition("/")[2]

    def __str__(self) -> str:
        return (
            f"node {self.node_id} disagrees with the trainer on the same weights: k3 "
            f"{self.k3:.2g}, more than {DRIFT:g} times the pool's median {self.median_k3:.2g} "
            f"(mean |log ratio| {self.mean_abs:.2g}); it gets no more work; check "
            "its engine build, precision and loaded weights, then restart it"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMismatches:
    """What a trainer knows of each node; part of its checkpoint."""

    nodes: Mapping[str, MovingAverage] = field(default_factory=dict[str, MovingAverage])
    reported: frozenset[str] = frozenset()
    """Drifting nodes that were reported; their remaining rows are ignored."""

    def updated(self, observed: Mapping[str, Mismatch], seq: int) -> NodeMismatches:
        """With the mismatches of batch `seq`; a node not seen for long is dropped."""
        known = {n: a for n, a in self.nodes.items() if seq - a.last_seq <= FORGET_AFTER}
        for node, mismatch in observed.items():
            if node not in self.reported:
                known[node] = known.get(node, _NEW).updated(mismatch, seq)
        return replace(self, nodes=known)

    def without_reported(self, drifting: Sequence[DriftingNode]) -> NodeMismatches:
        """A quarantined node is judged again when it returns: with a new boot id, or immediately if
        its rows carry none."""
        gone = {node.boot for node in drifting}
        return NodeMismatches(
            nodes={n: a for n, a in self.nodes.items() if n not in gone},
            reported=self.reported | {node.boot for node in drifting if node.boot_id},
        )

    def drifting(self) -> tuple[DriftingNode, ...]:
        """Nodes to be quarantined, by name."""
        judged = {n: a for n, a in self.nodes.items() if a.weight >= MIN_EVIDENCE}
        pool = _newest_boots(judged)
        if len(pool) < MIN_POOL:
            return ()
        median_k3 = statistics.median(average.k3 for average in pool.values())
        limit = DRIFT * max(median_k3, MIN_MEDIAN_K3)
        return tuple(
            DriftingNode(boot=n, k3=a.k3, mean_abs=a.mean_abs, median_k3=median_k3)
            for n, a in sorted(judged.items())
            if a.k3 > limit
        )


def _newest_boots(averages: Mapping[str, MovingAverage]) -> dict[NodeId, MovingAverage]:
    """One value per node: the many processes of one that restarts often must not outvote the
    others."""
    by_age = sorted(averages.items(), key=lambda one: (one[1].last_seq, one[1].weight, one[0]))
    return {_node(boot): average for boot, average in by_age}


def _node(boot: str) -> NodeId:
    return NodeId(boot.partition("/")[0])
