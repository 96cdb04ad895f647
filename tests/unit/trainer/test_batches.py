# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from msgspec import structs
from tests.unit.trainer.doubles import POLICY, VOCAB_SIZE, Sealed, credited, make_turn, seal

from penstock.errors import StoreError
from penstock.trainer.batches import Batch, assemble
from penstock.trainer.inputs import make_inputs
from penstock.types import Manifest


def uneven() -> Sealed:
    """Groups of three, four and one: no split in equal parts falls between them."""
    rewards = [[0.0, 0.5, 1.0], [0.0, 0.0, 1.0, 0.25], [1.0]]
    groups = [[(make_turn([3, 4], [5]), reward) for reward in group] for group in rewards]
    return seal(groups)


def by_hand(rewards: list[float]) -> list[float]:
    mean, std = np.mean(rewards), np.std(rewards, ddof=1)
    return [float((reward - mean) / (std + 1e-5)) for reward in rewards]


def credit_of(batch: Batch) -> npt.NDArray[np.float64]:
    """Each row has one trained token, which carries its credit."""
    return batch.token_columns["advantage"][batch.samples.mask_T]


def test_credit_compares_whole_groups() -> None:
    due = [*by_hand([0.0, 0.5, 1.0]), *by_hand([0.0, 0.0, 1.0, 0.25]), 0.0]
    np.testing.assert_allclose(credit_of(uneven().assembled()), due)


def test_a_row_that_is_gone_changes_nobody_elses_credit() -> None:
    sealed = uneven()
    rows = [replace(row, payload=None) if i == 2 else row for i, row in enumerate(sealed.rows)]
    batch = credited(assemble(sealed.manifest, rows, POLICY, VOCAB_SIZE))
    others = np.delete(credit_of(sealed.assembled()), 2)
    np.testing.assert_array_equal(credit_of(batch), others)
    assert 2 not in batch.samples.rows_S


def test_other_bytes_than_sealed_are_refused() -> None:
    sealed = uneven()
    other = replace(sealed.rows[0], payload=uneven().rows[1].payload)
    with pytest.raises(StoreError, match="the bytes received for"):
        assemble(sealed.manifest, [other, *sealed.rows[1:]], POLICY, VOCAB_SIZE)


def test_a_column_is_written_once() -> None:
    batch = uneven().assembled()
    for again in (
        {"row_columns": {"reward": np.zeros(8)}},
        {"token_columns": {"reward": np.zeros(24)}},
    ):
        with pytest.raises(ValueError, match=r"columns \['reward'\] exist already"):
            batch.with_columns(**again)
    both = {"row_columns": {"x": np.zeros(8)}, "token_columns": {"x": np.zeros(24)}}
    with pytest.raises(ValueError, match=r"columns \['x'\] exist already"):
        batch.with_columns(**both)
    values = batch.with_columns(token_columns={"values": np.zeros(24)}).token_columns["values"]
    assert values.size == 24


def test_as_many_tokens_as_rows_and_columns_keep_their_axis() -> None:
    turn, empty = make_turn([3], [5]), make_turn([3], [5], reached_agent=False)
    batch = seal([[(turn, 1.0), (empty, 0.0)], [(empty, 0.5), (turn, 0.0)]]).assembled()
    assert batch.samples.ends_S.tolist() == [2, 4], "as many tokens as rows"
    assert batch.row_columns["reward"].shape == batch.token_columns["advantage"].shape == (4,)
    assert not batch.row_columns.keys() & batch.token_columns.keys()
    assert batch.samples.ids_T.tolist() == [3, 5, 3, 5]
    assert batch.samples.mask_T.tolist() == [False, True, False, True]
    inputs = make_inputs(batch, np.arange(2))
    assert inputs.token_K.tolist() == [1, 3]
    assert inputs.extra_columns == {}, "no column by row passes for one by token"


def test_a_rank_trains_its_own_rows_with_the_credit_of_all() -> None:
    sealed = uneven()
    whole = sealed.assembled()
    for part in range(3):
        drawn = [
            row if index % 3 == part else replace(row, payload=None)
            for index, row in enumerate(sealed.rows)
        ]
        share = credited(assemble(sealed.manifest, drawn, POLICY, VOCAB_SIZE))
        assert share.samples.rows_S.tolist() == list(range(part, 8, 3))
        np.testing.assert_array_equal(credit_of(share), credit_of(whole)[part::3])


def _named(sealed: Sealed) -> Manifest:
    """The batch as sealed after a stage elsewhere has written a column for every row."""
    [group] = sealed.manifest.groups
    named = tuple(
        structs.replace(row, columns={"reference_logprobs": "digest"}) for row in group.rows
    )
    return replace(sealed.manifest, groups=(replace(group, rows=named),))


def test_columns_of_stages_elsewhere_stand_by_row_and_by_token() -> None:
    sealed = seal([[(make_turn([3, 4], [5, 6]), 0.0), (make_turn([3], [7]), 1.0)]])
    rows = [
        replace(row, columns={"reference_logprobs": np.array(values, "<f4").tobytes()})
        for row, values in zip(sealed.rows, ([-1.0, -2.0], [-3.0]), strict=True)
    ]
    batch = credited(assemble(_named(sealed), rows, POLICY, VOCAB_SIZE))
    assert batch.token_columns["reference_logprobs"].tolist() == [0, 0, -1, -2, 0, -3]
    assert batch.row_columns["length"].tolist() == [2, 1]


def test_a_rank_without_a_row_has_the_same_columns() -> None:
    sealed = seal([[(make_turn([3, 4], [5, 6]), 0.0), (make_turn([3], [7]), 1.0)]])
    elsewhere = [replace(row, payload=None) for row in sealed.rows]
    batch = assemble(_named(sealed), elsewhere, POLICY, VOCAB_SIZE)
    assert batch.token_columns["reference_logprobs"].shape == batch.samples.ids_T.shape == (0,)


@pytest.mark.parametrize("content", [b"", b"1234", b"123456789"])
def test_a_row_with_a_broken_column_is_left_out_and_the_others_are_trained(content: bytes) -> None:
    sealed = seal([[(make_turn([3, 4], [5, 6]), 0.0), (make_turn([3], [7]), 1.0)]])
    good = np.array([-3.0], "<f4").tobytes()
    rows = [
        replace(row, columns={"reference_logprobs": column})
        for row, column in zip(sealed.rows, (content, good), strict=True)
    ]
    batch = assemble(_named(sealed), rows, POLICY, VOCAB_SIZE)
    assert batch.samples.mask_T.tolist() == [False] * 5 + [True]
    assert batch.token_columns["reference_logprobs"].tolist() == [0, 0, 0, 0, 0, -3]


@pytest.mark.parametrize("is_here", [True, False])
def test_where_some_rows_have_one_number_the_column_is_by_token_and_those_are_left_out(
    is_here: bool,
) -> None:
    sealed = seal([[(make_turn([3, 4], [5, 6]), 0.0), (make_turn([3], [7]), 1.0)]])
    manifest = _named(sealed)
    [group] = manifest.groups
    number = structs.replace(group.rows[0], columns={}, values={"reference_logprobs": 0.0})
    manifest = replace(manifest, groups=(replace(group, rows=(number, group.rows[1])),))
    good = replace(sealed.rows[1], columns={"reference_logprobs": np.float32(-3.0).tobytes()})
    elsewhere = replace(sealed.rows[1], payload=None)
    rows = [sealed.rows[0], good if is_here else elsewhere]
    batch = assemble(manifest, rows, POLICY, VOCAB_SIZE)
    trained = [False] * 5 + [True] if is_here else [False] * 4
    assert batch.samples.mask_T.tolist() == trained
    assert batch.token_columns["reference_logprobs"].tolist() == [-3.0 * is_in for is_in in trained]


def test_rows_left_out_are_neither_trained_nor_counted() -> None:
    batch = uneven().assembled()
    left = batch.without(np.arange(8) == 1)
    assert left.samples.num_trained == batch.samples.num_trained - 1
    assert not left.samples.mask_T[left.rows_T == 1].any()
