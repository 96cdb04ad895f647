# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.unit.trainer.doubles import POLICY, VOCAB_SIZE, Sealed, make_turn, seal

from penstock.errors import StoreError
from penstock.trainer.batches import assemble


def uneven() -> Sealed:
    """Groups of three, four and one: no split in equal parts falls between them."""
    rewards = [[0.0, 0.5, 1.0], [0.0, 0.0, 1.0, 0.25], [1.0]]
    groups = [[(make_turn([3, 4], [5]), reward) for reward in group] for group in rewards]
    return seal(groups)


def by_hand(rewards: list[float]) -> list[float]:
    mean, std = np.mean(rewards), np.std(rewards, ddof=1)
    return [float((reward - mean) / (std + 1e-5)) for reward in rewards]


def test_credit_compares_whole_groups() -> None:
    due = [*by_hand([0.0, 0.5, 1.0]), *by_hand([0.0, 0.0, 1.0, 0.25]), 0.0]
    np.testing.assert_allclose(uneven().assembled().advantages_R, due)


def test_a_row_that_is_gone_changes_nobody_elses_credit() -> None:
    sealed = uneven()
    rows = [replace(row, payload=None) if i == 2 else row for i, row in enumerate(sealed.rows)]
    batch = assemble(sealed.manifest, rows, POLICY, VOCAB_SIZE)
    np.testing.assert_array_equal(batch.advantages_R, sealed.assembled().advantages_R)
    assert 2 not in batch.samples.rows_S


def test_other_bytes_than_sealed_are_refused() -> None:
    sealed = uneven()
    other = replace(sealed.rows[0], payload=uneven().rows[1].payload)
    with pytest.raises(StoreError, match="other bytes than those"):
        assemble(sealed.manifest, [other, *sealed.rows[1:]], POLICY, VOCAB_SIZE)
