# SPDX-License-Identifier: Apache-2.0
"""How far each node's rows are from the trainer, version by version, and which holder of a
credential differs from the others.

Owns the mismatch of a batch by subject and staleness, its moving average, and the judgement. The
averages are plain numbers and go into the checkpoint. The dataflow decides what happens to a node
that differs.

Two things are judged. *k3*: the log-probs that came with the tokens against the trainer's own.
*Surprise*: how unlikely the tokens are for the trainer, minus how unlikely tokens of its own would
be (the entropy); it shows tokens drawn from another distribution, with log-probs added later.

A token that claims an older version is compared with tokens of the same age: at staleness 0 the
mismatch is only the engine's, at a larger one it includes the change of the policy, for all nodes
alike. So a claim to be late hides nothing.

A subject is who a credential is for: all node names and restarts under it are judged together.

K = trained tokens of this rank, N = pairs of subject and staleness.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace

import numpy as np

from penstock.trainer.arrays import Floats, Ints
from penstock.trainer.signals.ratio_stats import log_ratios
from penstock.types import NodeId

DRIFT = 10.0
"""A subject drifts when its k3 is this many times the median of all subjects."""
MIN_MEDIAN_K3 = 1e-4
"""Smallest median assumed: if engines agree to the last bit, ordinary rounding must not count as
drift."""
K3_PER_VERSION = 0.1
"""k3 per version that a policy may move, where too few subjects have tokens of that age."""
SURPRISE_SIGMAS = 8.0
"""Standard errors between a subject's surprise and the median. Surprise has a long tail, so that
this is less certain than for a normal distribution."""
MIN_SURPRISE = 0.1
"""Smallest difference of surprise that counts, in nats per token: engines differ in precision."""
HALF_LIFE_TOKENS = 4096.0
"""Tokens of a subject and age after which earlier ones count half."""
MIN_TOKENS = 400.0
"""Tokens, older ones discounted, that a subject needs before it is judged."""
MIN_POOL = 3
"""Subjects that make a pool; of two, it is unknown which one is wrong."""
FORGET_AFTER = 200
"""Batches after which a subject that sends nothing leaves the pool."""

Key = tuple[str, int]
"""Subject and staleness."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Between the rows of one subject and the trainer, over tokens of one age in one batch."""

    num_tokens: int
    sum_abs: float
    sum_k3: float
    max_abs: float
    sum_surprise: float = 0.0
    sum_surprise2: float = 0.0

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
            self.sum_surprise + other.sum_surprise,
            self.sum_surprise2 + other.sum_surprise2,
        )


NO_GAP = Mismatch(0, 0.0, 0.0, 0.0)
_NUM_FIELDS = len(astuple(NO_GAP))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTokens:
    """Trained tokens as the trainer sees them before the weights move."""

    logprobs_K: Floats
    sampling_K: Floats
    """As the node reported them."""
    entropy_K: Floats
    staleness_K: Ints
    rows_K: Ints


def measure_mismatches(tokens: ScoredTokens, subjects: Mapping[int, str]) -> dict[Key, Mismatch]:
    """By subject and staleness; `subjects` maps rows of the manifest to subjects."""
    rows, row_K = np.unique(tokens.rows_K, return_inverse=True)
    names, name_R = np.unique([subjects[int(row)] for row in rows], return_inverse=True)
    pairs_K = np.stack([name_R[row_K], tokens.staleness_K], axis=1)
    pairs, key_K = np.unique(pairs_K, axis=0, return_inverse=True)
    key_K, num = key_K.reshape(-1), len(pairs)
    log_K = log_ratios(tokens.logprobs_K, tokens.sampling_K)
    surprise_K = -tokens.logprobs_K - tokens.entropy_K
    most_N = np.zeros(num)
    np.maximum.at(most_N, key_K, np.abs(log_K))
    nums_N = np.bincount(key_K, minlength=num)
    abs_N, k3_N, surprise_N, surprise2_N = (
        np.bincount(key_K, values_K, minlength=num)
        for values_K in (np.abs(log_K), np.expm1(log_K) - log_K, surprise_K, surprise_K**2)
    )
    columns = (nums_N, abs_N, k3_N, most_N, surprise_N, surprise2_N)
    sums = zip(*(column.tolist() for column in columns), strict=True)
    return {
        (str(names[name]), int(staleness)): Mismatch(*found)
        for (name, staleness), found in zip(pairs.tolist(), sums, strict=True)
    }


def pool_mismatch(mismatches: Mapping[Key, Mismatch]) -> Mismatch:
    """Of all subjects together, over the freshest tokens: there it is the engines' alone."""
    freshest = min((staleness for _, staleness in mismatches), default=0)
    found = (one for (_, staleness), one in mismatches.items() if staleness == freshest)
    return sum(found, start=NO_GAP)


def to_vector(mismatches: Mapping[Key, Mismatch]) -> Floats:
    """As numbers, because ranks exchange only numbers; see `from_vector`."""
    numbers: list[float] = []
    for (subject, staleness), mismatch in mismatches.items():
        name = subject.encode()
        numbers += [staleness, len(name), *name, *astuple(mismatch)]
    return np.array(numbers, np.float64)


def from_vector(numbers: Floats) -> dict[Key, Mismatch]:
    """Decode the mismatches of all ranks and sum them by subject and staleness."""
    found: dict[Key, Mismatch] = {}
    at = 0
    while at < numbers.size:
        end = at + 2 + int(numbers[at + 1])
        subject = bytes(int(byte) for byte in numbers[at + 2 : end]).decode()
        num_tokens, *sums = numbers[end : end + _NUM_FIELDS].tolist()
        key = (subject, int(numbers[at]))
        found[key] = found.get(key, NO_GAP) + Mismatch(int(num_tokens), *sums)
        at = end + _NUM_FIELDS
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MovingAverage:
    """Sums over the past tokens of one subject and age, recent ones counting more."""

    num_tokens: float = 0.0
    sum_k3: float = 0.0
    sum_abs: float = 0.0
    sum_surprise: float = 0.0
    sum_surprise2: float = 0.0
    last_seq: int = 0
    """The batch it was last seen in."""

    @property
    def k3(self) -> float:
        return self.sum_k3 / self.num_tokens if self.num_tokens else 0.0

    @property
    def mean_abs(self) -> float:
        return self.sum_abs / self.num_tokens if self.num_tokens else 0.0

    @property
    def surprise(self) -> float:
        return self.sum_surprise / self.num_tokens if self.num_tokens else 0.0

    @property
    def surprise_error(self) -> float:
        """Standard error of the mean surprise; too large rather than too small, since it ignores
        that discounted tokens still count."""
        if not self.num_tokens:
            return math.inf
        variance = self.sum_surprise2 / self.num_tokens - self.surprise**2
        return math.sqrt(max(variance, 0.0) / self.num_tokens)

    def updated(self, mismatch: Mismatch, seq: int) -> MovingAverage:
        keep = 0.5 ** (mismatch.num_tokens / HALF_LIFE_TOKENS)
        return MovingAverage(
            num_tokens=keep * self.num_tokens + mismatch.num_tokens,
            sum_k3=keep * self.sum_k3 + mismatch.sum_k3,
            sum_abs=keep * self.sum_abs + mismatch.sum_abs,
            sum_surprise=keep * self.sum_surprise + mismatch.sum_surprise,
            sum_surprise2=keep * self.sum_surprise2 + mismatch.sum_surprise2,
            last_seq=seq,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftingNode:
    """A subject that differs from the others."""

    subject: str
    why: str

    @property
    def node_id(self) -> NodeId:
        return NodeId(self.subject)

    def __str__(self) -> str:
        return (
            f"node {self.subject} disagrees with the trainer: {self.why}; its credential gets no "
            "more work; check its engine build, precision, loaded weights and sampling, then join "
            "with a new token"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Baseline:
    """What is usual for tokens of one age."""

    limit_k3: float
    surprise: float | None
    """Of the median subject; None where too few have tokens of this age."""
    surprise_error: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMismatches:
    """What a trainer knows of each subject; part of its checkpoint."""

    nodes: Mapping[str, Mapping[int, MovingAverage]] = field(
        default_factory=dict[str, Mapping[int, MovingAverage]]
    )
    """By subject and staleness."""
    reported: frozenset[str] = frozenset()
    """Subjects that were reported; their remaining rows are ignored."""

    def updated(self, observed: Mapping[Key, Mismatch], seq: int) -> NodeMismatches:
        """With the mismatches of batch `seq`; a subject not seen for long is dropped."""
        known = {
            subject: {age: one for age, one in ages.items() if seq - one.last_seq <= FORGET_AFTER}
            for subject, ages in self.nodes.items()
        }
        for (subject, age), mismatch in observed.items():
            if subject not in self.reported:
                ages = known.setdefault(subject, {})
                ages[age] = ages.get(age, MovingAverage()).updated(mismatch, seq)
        return replace(self, nodes={subject: ages for subject, ages in known.items() if ages})

    def without_reported(self, drifting: Sequence[DriftingNode]) -> NodeMismatches:
        gone = {node.subject for node in drifting}
        return NodeMismatches(
            nodes={subject: ages for subject, ages in self.nodes.items() if subject not in gone},
            reported=self.reported | gone,
        )

    def drifting(self) -> tuple[DriftingNode, ...]:
        """Subjects to be quarantined, by name."""
        num_judged = sum(_tokens(ages.values()) >= MIN_TOKENS for ages in self.nodes.values())
        if num_judged < MIN_POOL:
            return ()
        every_age = sorted({age for ages in self.nodes.values() for age in ages})
        usual = _baselines({age: self._of_age(age) for age in every_age})
        found = ((subject, _judge(ages, usual)) for subject, ages in sorted(self.nodes.items()))
        return tuple(DriftingNode(subject=subject, why=why) for subject, why in found if why)

    def _of_age(self, age: int) -> list[MovingAverage]:
        found = (ages.get(age, MovingAverage()) for ages in self.nodes.values())
        return [one for one in found if one.num_tokens >= MIN_TOKENS]


def _tokens(averages: Iterable[MovingAverage]) -> float:
    return sum(one.num_tokens for one in averages)


def _baselines(by_age: Mapping[int, Sequence[MovingAverage]]) -> dict[int, _Baseline]:
    """Of each age: from the subjects with tokens of this age, or else from the nearest age that has
    enough of them."""
    pooled = {
        age: _Baseline(
            limit_k3=DRIFT * max(statistics.median(one.k3 for one in averages), MIN_MEDIAN_K3),
            surprise=statistics.median(one.surprise for one in averages),
            surprise_error=statistics.median(one.surprise_error for one in averages),
        )
        for age, averages in by_age.items()
        if len(averages) >= MIN_POOL
    }
    return {age: pooled.get(age) or _estimated(age, pooled) for age in by_age}


def _estimated(age: int, pooled: Mapping[int, _Baseline]) -> _Baseline:
    """The limit of the next fresher age, plus what a policy may move in between; a token fresher
    than all others may differ as much as they do."""
    fresher = max((one for one in pooled if one < age), default=None)
    if fresher is not None:
        moved = K3_PER_VERSION * (age - fresher)
        return _Baseline(limit_k3=pooled[fresher].limit_k3 + moved, surprise=None)
    older = min((one for one in pooled if one > age), default=None)
    limit = K3_PER_VERSION * (age + 1) if older is None else pooled[older].limit_k3
    return _Baseline(limit_k3=limit, surprise=None)


def _judge(ages: Mapping[int, MovingAverage], usual: Mapping[int, _Baseline]) -> str:
    """Why this subject differs from the others; empty if it does not. Each age with enough tokens
    is judged, and all ages together, so that claiming many hides nothing."""
    for age, one in sorted(ages.items()):
        if one.num_tokens >= MIN_TOKENS and (why := _differs(one, usual[age])):
            return f"{why}, over tokens {age} versions old" if age else why
    num_tokens = _tokens(ages.values())
    if num_tokens < MIN_TOKENS:
        return ""
    k3 = sum(one.sum_k3 for one in ages.values()) / num_tokens
    limit = sum(one.num_tokens * usual[age].limit_k3 for age, one in ages.items()) / num_tokens
    return "" if k3 <= limit else f"k3 {k3:.2g} over tokens of all ages, above {limit:.2g}"


def _differs(one: MovingAverage, usual: _Baseline) -> str:
    if not one.k3 <= usual.limit_k3:  # NaN differs too
        return (
            f"k3 {one.k3:.2g}, above {usual.limit_k3:.2g} ({DRIFT:g} times the median; mean "
            f"|log ratio| {one.mean_abs:.2g})"
        )
    if usual.surprise is None:
        return ""
    off = one.surprise - usual.surprise
    error = math.hypot(one.surprise_error, usual.surprise_error)
    if abs(off) <= max(MIN_SURPRISE, SURPRISE_SIGMAS * error):
        return ""
    how = "less" if off > 0 else "more"
    return (
        f"its tokens are {how} likely than the tokens of others by {abs(off):.2g} nats each, "
        f"{abs(off) / max(error, 1e-12):.0f} standard errors: another model or other sampling drew "
        "them"
    )
