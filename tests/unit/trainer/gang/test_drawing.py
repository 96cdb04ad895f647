# SPDX-License-Identifier: Apache-2.0
"""Who computes which rows of a sealed batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from penstock.trainer.gang.drawing import rows_of_parts
from penstock.trainer.updates import updates_of
from penstock.types import (
    GroupId,
    Manifest,
    OutcomeKind,
    PolicyName,
    RowId,
    RowSummary,
    SealedGroup,
)

POLICY = PolicyName("policy")


def sealed(groups: Sequence[Sequence[int]]) -> Manifest:
    """Groups of rows with so many tokens."""
    made = tuple(
        SealedGroup(
            group_id=GroupId(f"p0-{index}"),
            task_key="",
            rows=tuple(
                RowSummary(
                    row_id=RowId(f"p0-{index}.{slot}.1"),
                    digest="",
                    reward=0.0,
                    outcome=OutcomeKind.COMPLETED,
                    sampled={POLICY: tokens},
                    versions={},
                )
                for slot, tokens in enumerate(rows)
            ),
        )
        for index, rows in enumerate(groups)
    )
    return Manifest(consumer=POLICY, seq=1, trains_from=0, groups=made)


@pytest.mark.parametrize("minibatches", [1, 4])
@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_in_every_update_all_parts_train_about_as_many_tokens(
    num_parts: int, minibatches: int
) -> None:
    lengths = np.random.default_rng(3).lognormal(6, 1, (16, 8)).astype(int)
    parts = rows_of_parts(sealed(lengths.tolist()), num_parts, minibatches)
    assert sorted(row for part in parts for row in part) == list(range(128))
    assert all(part == sorted(part) for part in parts)
    updates_R = np.repeat(updates_of(16, minibatches), 8)
    for update in range(minibatches):
        tokens = [
            sum(int(lengths.flat[row]) for row in part if updates_R[row] == update)
            for part in parts
        ]
        every_nth = [
            lengths.flat[updates_R == update][part::num_parts].sum() for part in range(num_parts)
        ]
        longest = lengths.flat[updates_R == update].max()
        assert max(tokens) <= max(1.05 * sum(tokens) / num_parts, longest)
        assert max(tokens) <= max(every_nth)


def test_rows_without_tokens_of_this_policy_are_shared_out_too() -> None:
    assert [len(part) for part in rows_of_parts(sealed([[0] * 8]), 4, 1)] == [2, 2, 2, 2]


def test_more_updates_than_groups_and_an_empty_batch() -> None:
    assert rows_of_parts(sealed([[5, 5]]), 2, 4) == [[0], [1]]
    assert rows_of_parts(sealed([]), 2, 2) == [[], []]
