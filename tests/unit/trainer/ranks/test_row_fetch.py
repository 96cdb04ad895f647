# SPDX-License-Identifier: Apache-2.0
"""Who computes which rows of a sealed batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from msgspec import structs

from penstock.trainer.pass_cost import TYPICAL
from penstock.trainer.ranks.row_fetch import split_rows
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


Row = tuple[int, Sequence[int]]
"""Its sampled tokens, and the lengths of the samples it is cut into."""


def sealed(groups: Sequence[Sequence[Row]]) -> Manifest:
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
                    sampled={POLICY: sampled},
                    versions={},
                    compute_cost={POLICY: (sum(lengths), sum(length**2 for length in lengths))},
                )
                for slot, (sampled, lengths) in enumerate(rows)
            ),
        )
        for index, rows in enumerate(groups)
    )
    return Manifest(consumer=POLICY, seq=1, trains_from=0, groups=made)


def plain(groups: Sequence[Sequence[int]]) -> Manifest:
    """Rows that are one sample of so many tokens, half of them sampled."""
    return sealed([[(length // 2, (length,)) for length in rows] for rows in groups])


@pytest.mark.parametrize("minibatches", [1, 4])
@pytest.mark.parametrize("num_parts", [1, 2, 4])
def test_in_every_update_all_parts_have_about_as_much_to_compute(
    num_parts: int, minibatches: int
) -> None:
    lengths = np.random.default_rng(3).lognormal(8, 1, (16, 8)).astype(int)
    parts = split_rows(plain(lengths.tolist()), num_parts, minibatches)
    assert sorted(row for part in parts for row in part) == list(range(128))
    assert all(part == sorted(part) for part in parts)
    tokens_R = lengths.ravel().astype(float)
    costs_R = TYPICAL.rows(tokens_R, tokens_R**2, tokens_R)
    updates_R = np.repeat(updates_of(16, minibatches), 8)
    for update in range(minibatches):
        costs = [sum(costs_R[row] for row in part if updates_R[row] == update) for part in parts]
        rows = costs_R[updates_R == update]
        every_nth = [rows[part::num_parts].sum() for part in range(num_parts)]
        assert max(costs) <= max(1.05 * sum(costs) / num_parts, rows.max())
        assert max(costs) <= max(every_nth)


@pytest.mark.parametrize("minibatches", [1, 2])
def test_long_prompts_are_shared_out_too(minibatches: int) -> None:
    """Two groups of eight have prompts of 18,000 tokens, six have 100; answers are alike."""
    answers = np.random.default_rng(0).lognormal(5, 1, (8, 8)).astype(int)
    prompts = np.where(np.arange(8) % 4 == 0, 18_000, 100)
    tokens = answers + prompts[:, None]
    groups = [
        [(int(answer), (int(length),)) for answer, length in zip(*group, strict=True)]
        for group in zip(answers, tokens, strict=True)
    ]
    parts = split_rows(sealed(groups), 4, minibatches)
    updates_R = np.repeat(updates_of(8, minibatches), 8)
    for update in range(minibatches):
        rows_of = [[row for row in part if updates_R[row] == update] for part in parts]
        compute_cost = [tokens.flat[rows].sum() for rows in rows_of]
        assert max(compute_cost) <= 1.1 * np.mean(compute_cost)


def test_attention_is_that_of_samples_and_not_of_whole_rows() -> None:
    """A row of ten contexts costs what ten rows of one do."""
    parts = split_rows(sealed([[(10, [8000] * 10), *[(1, [8000])] * 10]]), 2, 1)
    assert sorted(map(len, parts)) == [1, 10]


def test_turns_of_several_policies_are_computed_by_who_sees_them() -> None:
    other = PolicyName("other")
    [row] = sealed([[(3, (10,))]]).rows
    row = structs.replace(
        row,
        sampled={POLICY: 3, other: 4},
        compute_cost={POLICY: (10, 100), other: (20, 400)},
        roles={other: {"teach": 4}},
    )
    assert row.compute_cost_for(POLICY, None) == (10, 100)
    assert row.compute_cost_for(POLICY, [(other, "teach")]) == (20, 400)
    assert row.compute_cost_for(POLICY, [(POLICY, ""), (other, "teach")]) == (30, 500)
    assert row.compute_cost_for(POLICY, [(other, "")]) == (0, 0)


def test_a_row_that_does_not_say_counts_with_its_sampled_tokens() -> None:
    [row] = sealed([[(3, (10,))]]).rows
    assert structs.replace(row, compute_cost={}).compute_cost_for(POLICY, None) == (3, 9)


def test_rows_without_tokens_of_this_policy_are_shared_out_too() -> None:
    assert [len(part) for part in split_rows(plain([[0] * 8]), 4, 1)] == [2, 2, 2, 2]


def test_more_updates_than_groups_and_an_empty_batch() -> None:
    assert split_rows(plain([[5, 5]]), 2, 4) == [[0], [1]]
    assert split_rows(sealed([]), 2, 2) == [[], []]


def test_a_rank_alone_has_all_rows_in_order() -> None:
    assert split_rows(plain([[5, 3], [9], [1, 1, 1]]), 1, 2) == [[0, 1, 2, 3, 4, 5]]
    assert split_rows(sealed([]), 1, 2) == [[]]
