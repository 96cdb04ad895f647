# SPDX-License-Identifier: Apache-2.0
"""The structure of a batch: everything a compute stage sees in addition to its columns.

Holds no values but the rewards of roles and turns: the row's reward, advantages and log-probs are
columns. With several ranks, rows are all
rows of the manifest, but tokens only this rank's; sums over tokens go through `sum_over_ranks`.

R = rows of the manifest, S = samples, T = tokens of all samples, Q = turns, row after row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.config.builtin_stages import Axis
from penstock.trainer.advantages.baselines import Moments, moments, normalised
from penstock.trainer.advantages.credit import Turns, spread_to_tokens
from penstock.trainer.arrays import Bools, Floats, Ints

if TYPE_CHECKING:
    from penstock.trainer.batches import Batch, Roles

RowValues = Annotated[Floats, Axis.ROW]
"""A column that a stage function reads by row."""
TokenValues = Annotated[Floats, Axis.TOKEN]
"""A column that a stage function reads by token."""
Columns = Mapping[str, Floats]
"""What a stage function returns, by column name."""
Sum = Callable[[Floats], Floats]


@dataclass(frozen=True, slots=True)
class RowColumn:
    """A returned column with one number per row: for custom columns of undeclared functions."""

    values_R: Floats


@dataclass(frozen=True, slots=True)
class TokenColumn:
    """A returned column with one number per token: for custom columns of undeclared functions."""

    values_T: Floats


class Stage(Protocol):
    """A custom function in a training graph: it reads columns of a batch and writes others.

    A stage of type `compute` or `infer` names it as `fn: my_module:my_stage`. It is called once per
    batch, with the columns that the stage reads and its options by keyword, and returns exactly the
    columns that the stage writes:

        def short_first(layout: Layout, *, reward: Floats, bonus: float = 0.1) -> Mapping: ...

    A stage with `place` runs as a service and gets one `Trajectory` at a time instead of a layout.
    """

    def __call__(
        self, layout: Layout, /, *args: Any, **kwargs: Any
    ) -> Mapping[str, Floats | RowColumn | TokenColumn]:
        """The columns that this stage writes, by name."""
        ...


def no_reduction(values: Floats) -> Floats:
    """The sum over one rank."""
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The rows, samples and tokens of one batch."""

    groups_R: Ints
    """Which group of the manifest a row belongs to; never decreases."""
    longest_R: Ints
    """Sampled tokens of each row's longest turn."""
    roles: Roles
    """Which roles took part in which rows."""
    rows_S: Ints
    """The row each sample was cut from; never decreases."""
    starts_S: Ints
    """First token of each sample."""
    ends_S: Ints
    rows_T: Ints
    """The row each token belongs to."""
    ids_T: npt.NDArray[np.int32]
    mask_T: Bools
    """True for sampled tokens that are trained."""
    turns_T: npt.NDArray[np.int32]
    """Index of the token's turn in its trajectory."""
    roles_T: npt.NDArray[np.int32]
    """Number of the role of the token's turn; valid where trained."""
    rewards_T: Floats
    """The own reward of the token's turn, or NaN; valid where trained."""
    agents_T: npt.NDArray[np.int32]
    """Number of the sub-agent of the token's turn in its trajectory; 0 for the workflow itself."""
    spawners_T: npt.NDArray[np.int32]
    """Number of the agent that spawned this one."""
    sum_over_ranks: Sum = no_reduction
    """Element by element; every rank calls it, with arrays of the same size."""

    @classmethod
    def of(cls, batch: Batch, sum_over_ranks: Sum = no_reduction) -> Layout:
        """The layout of this batch, with the same arrays."""
        samples = batch.samples
        return cls(
            groups_R=batch.groups_R,
            longest_R=batch.longest_R,
            roles=batch.roles,
            rows_S=samples.rows_S,
            starts_S=samples.starts_S,
            ends_S=samples.ends_S,
            rows_T=batch.rows_T,
            ids_T=samples.ids_T,
            mask_T=samples.mask_T,
            turns_T=samples.turns_T,
            roles_T=samples.roles_T,
            rewards_T=samples.rewards_T,
            agents_T=samples.agents_T,
            spawners_T=samples.spawners_T,
            sum_over_ranks=sum_over_ranks,
        )

    def by_token(self, values_R: Floats) -> Floats:
        """Each trained token gets its row's value; all others 0."""
        values_T = np.zeros(self.mask_T.size)
        values_T[self.mask_T] = values_R[self.rows_T[self.mask_T]]
        return values_T


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTurns:
    """The turns with a trained token on this rank, in order: the steps that get credit. Turns of
    another policy between two of them are not steps; GAE skips them too."""

    turns: Turns
    last_Q: Ints
    """The last trained token of each."""
    depths_T: Ints
    """Index of the token's turn among the turns of its row; valid where trained."""

    @classmethod
    def of(cls, layout: Layout) -> TrainedTurns:
        tokens_K = np.flatnonzero(layout.mask_T)
        turns_K = layout.turns_T[tokens_K].astype(np.int64)
        width = int(turns_K.max(initial=0)) + 1
        found_Q, of_K = np.unique(layout.rows_T[tokens_K] * width + turns_K, return_inverse=True)
        turns = Turns(nums_R=np.bincount(found_Q // width, minlength=layout.groups_R.size))
        last_Q = np.zeros(found_Q.size, np.int64)
        np.maximum.at(last_Q, of_K, tokens_K)
        depths_T = np.zeros(layout.mask_T.size, np.int64)
        depths_T[tokens_K] = turns.depths_Q[of_K]
        return cls(turns=turns, last_Q=last_Q, depths_T=depths_T)

    def over_ranks(self, layout: Layout) -> Turns:
        """The turns of all ranks; every rank calls it."""
        nums_R = layout.sum_over_ranks(self.turns.nums_R.astype(np.float64))
        return Turns(nums_R=nums_R.astype(np.int64))

    def gather(self, layout: Layout, turns: Turns, values_XQ: Floats) -> Floats:
        """Values of this rank's turns as values of all ranks' `turns`; every rank calls it."""
        found_XQ = np.zeros((len(values_XQ), turns.rows_Q.size))
        place_Q = turns.starts_R[self.turns.rows_Q] + self.turns.depths_Q
        found_XQ[:, place_Q] = values_XQ
        return layout.sum_over_ranks(found_XQ)

    def by_token(self, layout: Layout, turns: Turns, credits_Q: Floats) -> Floats:
        """Credit of `turns`, of all ranks or of this one, on the trained tokens of this rank."""
        return spread_to_tokens(credits_Q, turns, layout.rows_T, self.depths_T, layout.mask_T)


def normalised_over_batch(layout: Layout, reward: Floats, advantages_T: Floats) -> Floats:
    """Zero mean and unit variance over the trained tokens of all ranks; tokens of rows without a
    reward are not counted and stay 0."""
    counts_T = layout.mask_T & np.isfinite(reward[layout.rows_T])
    own = moments(advantages_T, counts_T)
    sums = layout.sum_over_ranks(np.array([own.num_tokens, own.total, own.square], np.float64))
    return normalised(advantages_T, counts_T, Moments(*sums.tolist()))
