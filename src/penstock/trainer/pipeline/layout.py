# SPDX-License-Identifier: Apache-2.0
"""Where things are in a batch: all that a compute stage sees beside its columns.

Owns no value: rewards, advantages and log-probs are columns. On a rank of a gang, rows are all of
the manifest and tokens the rank's own: what is summed over tokens goes through `sum_over_ranks`.

R = rows of the manifest, S = samples, T = tokens of all samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from penstock.trainer.batches import Batch

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Sum = Callable[[Floats], Floats]


def as_it_is(values: Floats) -> Floats:
    """The sum over one rank."""
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    groups_R: Ints
    """Which group of the manifest a row belongs to; never falls."""
    rows_S: Ints
    """The row each sample was cut from; never falls."""
    starts_S: Ints
    """First token of each sample."""
    ends_S: Ints
    rows_T: Ints
    """The row each token belongs to."""
    ids_T: npt.NDArray[np.int32]
    mask_T: Bools
    """True where the token was sampled and is to be trained."""
    turns_T: npt.NDArray[np.int32]
    """Index of the token's turn in its trajectory."""
    sum_over_ranks: Sum = as_it_is
    """Element by element; every rank of the gang asks, with as many numbers."""

    @classmethod
    def of(cls, batch: Batch, sum_over_ranks: Sum = as_it_is) -> Layout:
        """The layout of this batch; shares its arrays."""
        samples = batch.samples
        return cls(
            groups_R=batch.groups_R,
            rows_S=samples.rows_S,
            starts_S=samples.starts_S,
            ends_S=samples.ends_S,
            rows_T=batch.rows_T,
            ids_T=samples.ids_T,
            mask_T=samples.mask_T,
            turns_T=samples.turns_T,
            sum_over_ranks=sum_over_ranks,
        )

    def by_token(self, values_R: Floats) -> Floats:
        """Each trained token gets its row's value; all others 0."""
        values_T = np.zeros(self.mask_T.size)
        values_T[self.mask_T] = values_R[self.rows_T[self.mask_T]]
        return values_T
