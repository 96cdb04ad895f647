# SPDX-License-Identifier: Apache-2.0
"""Credit within a trajectory: which of its turns earned the outcome. Pure NumPy in float64.

An outcome belongs to a row, a process score to a turn. Either is turned into one number per turn,
compared in its group, and laid on the turn's tokens. Trajectories are compared, not turns: a long
one counts no more than a short one.

R = rows of the manifest, Q = turns of all rows, row after row, P = roles, T = tokens of all
samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from penstock.trainer.advantages.baselines import EPSILON, Credit, has_spread
from penstock.trainer.arrays import Bools, Floats, Ints


class Combine(StrEnum):
    """How a row's outcome O and its turns' scores q become one return per turn."""

    WEIGHTED = "weighted"
    """share · O + (1 - share) · q."""
    RETURN = "return"
    """Discounted scores from this turn on, + share · O."""
    SHAPING = "shaping"
    """O discounted to this turn, less the q of the turn before: what potential-based shaping leaves
    of the return. The potential is of the state that a turn finds, so it does not change which
    policy is best; a first turn finds 0."""
    MIN = "min"
    """The worst score of the row."""
    OUTCOME = "outcome"
    """O only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turns:
    """Where the turns of a batch are."""

    nums_R: Ints
    """How many turns each row has."""

    @property
    def rows_Q(self) -> Ints:
        return np.repeat(np.arange(self.nums_R.size), self.nums_R)

    @property
    def ends_R(self) -> Ints:
        return np.cumsum(self.nums_R)

    @property
    def starts_R(self) -> Ints:
        return self.ends_R - self.nums_R

    @property
    def depths_Q(self) -> Ints:
        """Index of each turn in its own row."""
        return np.arange(int(self.nums_R.sum())) - np.repeat(self.starts_R, self.nums_R)

    @property
    def is_last_Q(self) -> Bools:
        return self.depths_Q == self.nums_R[self.rows_Q] - 1


def last_turn(advantages_R: Floats, turns: Turns) -> Floats:
    """The last turn carries it, the others nothing."""
    return np.where(turns.is_last_Q, advantages_R[turns.rows_Q], 0.0)


def discounted(rewards_Q: Floats, turns: Turns, discount: float) -> Floats:
    """Each turn's reward and the discounted rewards of those after it in its row."""
    out_Q, ends_R = rewards_Q.copy(), turns.ends_R
    for back in range(2, int(turns.nums_R.max(initial=0)) + 1):
        turn = ends_R[turns.nums_R >= back] - back
        out_Q[turn] += discount * out_Q[turn + 1]
    return out_Q


def by_role(rewards_RP: Floats, groups_R: Ints, roles_Q: Ints, turns: Turns, fn: Credit) -> Floats:
    """Each role compared with itself over the group's trajectories; NaN where a role had no part.

    With the leave-one-out credit as `fn`, each role's baseline is the other trajectories' mean.
    """
    credits_RP = np.zeros_like(rewards_RP)
    for role, rewards_R in enumerate(rewards_RP.T):
        credits_RP[:, role] = fn(rewards_R, groups_R)
    return credits_RP[turns.rows_Q, roles_Q]


def combine_returns(
    outcomes_R: Floats,
    scores_Q: Floats,
    turns: Turns,
    how: Combine,
    *,
    share: float = 0.5,
    discount: float = 1.0,
) -> Floats:
    """Returns by turn. A turn without a score (NaN) counts as 0. A row without an outcome has no
    finite return."""
    outcomes_Q = outcomes_R[turns.rows_Q]
    scores_Q = np.nan_to_num(scores_Q, posinf=0, neginf=0)
    match how:
        case Combine.WEIGHTED:
            return share * outcomes_Q + (1 - share) * scores_Q
        case Combine.RETURN:
            return discounted(scores_Q, turns, discount) + share * outcomes_Q
        case Combine.SHAPING:
            return discounted(_shaped(outcomes_Q, scores_Q, turns, discount), turns, discount)
        case Combine.MIN:
            worst_R = np.full(outcomes_R.size, np.inf)
            np.minimum.at(worst_R, turns.rows_Q, scores_Q)
            return np.where(np.isfinite(outcomes_Q), worst_R[turns.rows_Q], np.nan)
        case Combine.OUTCOME:
            return outcomes_Q


def compare_turns(
    returns_Q: Floats, groups_R: Ints, turns: Turns, *, is_by_depth: bool = False
) -> Floats:
    """(return - mean) / (std + ε) over the turns of a group, or over those at equal depth.

    Each trajectory weighs 1, shared by its turns, so that equal returns within each give the GRPO
    advantages of the trajectories. A return that is not finite counts in nothing, and gets 0.
    """
    is_known_Q = np.isfinite(returns_Q)
    known_Q = np.where(is_known_Q, returns_Q, 0.0)
    set_Q, of_trajectory_Q = _sets(groups_R, turns, is_by_depth)
    weight_Q = is_known_Q / np.maximum(np.bincount(of_trajectory_Q, is_known_Q), 1)[of_trajectory_Q]
    weights = np.bincount(set_Q, weight_Q)
    means = np.bincount(set_Q, weight_Q * known_Q) / np.maximum(weights, 1)
    centred_Q = known_Q - means[set_Q]
    stds = np.sqrt(np.bincount(set_Q, weight_Q * centred_Q**2) / np.maximum(weights - 1, 1))
    counts_Q = is_known_Q & has_spread(returns_Q, set_Q)
    return np.where(counts_Q, centred_Q / (stds[set_Q] + EPSILON), 0.0)


def spread_to_tokens(
    credits_Q: Floats, turns: Turns, rows_T: Ints, turns_T: Ints, mask_T: Bools
) -> Floats:
    """Each trained token gets its turn's credit; all others 0."""
    out_T = np.zeros(mask_T.size)
    out_T[mask_T] = credits_Q[turns.starts_R[rows_T[mask_T]] + turns_T[mask_T]]
    return out_T


def _shaped(outcomes_Q: Floats, scores_Q: Floats, turns: Turns, discount: float) -> Floats:
    """discount · (potential after the turn) - (potential before it), and the outcome on the last
    turn. The score of a turn is the potential of the state that it leaves; the last leaves 0."""
    before_Q = np.where(turns.depths_Q == 0, 0.0, np.roll(scores_Q, 1))
    after_Q = np.where(turns.is_last_Q, 0.0, scores_Q)
    return discount * after_Q - before_Q + np.where(turns.is_last_Q, outcomes_Q, 0.0)


def _sets(groups_R: Ints, turns: Turns, is_by_depth: bool) -> tuple[Ints, Ints]:
    """(which turns are compared with each other, which belong to one trajectory among these)."""
    groups_Q, rows_Q = groups_R[turns.rows_Q], turns.rows_Q
    if not is_by_depth:
        return groups_Q, rows_Q
    depth = int(turns.nums_R.max(initial=1))
    return groups_Q * depth + turns.depths_Q, rows_Q * depth + turns.depths_Q
