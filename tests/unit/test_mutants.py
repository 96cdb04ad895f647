# SPDX-License-Identifier: Apache-2.0
"""Planted bugs stay where the code is: one that no longer applies proves nothing."""

from __future__ import annotations

import pytest
from scripts.mutants import ROOT, Mutant, read_table

MUTANTS = read_table()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_still_applies(mutant: Mutant) -> None:
    assert (ROOT / "src" / "penstock" / mutant.file).read_text().count(mutant.old) == 1
    assert all((ROOT / named.partition("::")[0]).exists() for named in mutant.tests)
