# SPDX-License-Identifier: Apache-2.0
"""Recorded tasks end with the record, which does not end a run."""

from __future__ import annotations

import pytest

from penstock.dataflow.core.rule_runner import RuleRunner, RuleSpec
from penstock.dataflow.records import CommandJournal
from penstock.dataflow.simulate.recorded_tasks import RecordedSource, RecordedSupply
from penstock.types import Task


def task(ordinal: int) -> Task:
    return Task(key=f"k{ordinal}", source="s", ordinal=ordinal, payload={}, workflow="", seed=0)


@pytest.mark.parametrize(("limit", "is_over"), [(None, False), (3, False), (2, True)])
def test_only_the_source_itself_can_be_exhausted(limit: int | None, is_over: bool) -> None:
    rules = RuleRunner(
        [
            RuleSpec(hook=hook, name=name, options={}, policy=None, position=0)
            for hook, name in (("mix", "weights"), ("curate", "all"))
        ],
        CommandJournal(),
        seed=0,
    )
    tasks = {("s", ordinal): task(ordinal) for ordinal in range(2)}
    source = RecordedSource(name="s", weight=1.0, make=lambda n, seed: {}, limit=2, tasks=tasks)
    supply = RecordedSupply([source], rules, CommandJournal(), workflow="", seed=0)
    supply.limit_to({"s": limit})
    given = [supply.next_task(0.0) for _ in range(3)]
    assert [one[0].key for one in given if one is not None] == ["k0", "k1"]
    assert supply.is_exhausted is is_over
