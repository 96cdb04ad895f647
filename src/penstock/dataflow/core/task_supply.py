# SPDX-License-Identifier: Apache-2.0
"""The next task: which source it comes from, and whether it is worth rolling out. Pure, except for
user-defined sources."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from penstock.dataflow.core.rule_runner import RuleRunner
from penstock.dataflow.records import Journal, SourceRecord
from penstock.dataflow.sources import Source
from penstock.types import SourceShare, Task

MAX_SKIPS = 256
"""After this many consecutive refusals, the next task runs whatever the rules decide."""


class TaskSupply:
    def __init__(
        self,
        sources: Sequence[Source],
        rules: RuleRunner,
        journal: Journal,
        *,
        workflow: str,
        seed: int,
    ) -> None:
        self._sources = {source.name: source for source in sources}
        self._served = dict.fromkeys(self._sources, 0)
        self._skipped = dict.fromkeys(self._sources, 0)
        """Tasks that rules found not worth rolling out."""
        self._rules = rules
        self._journal = journal
        self._workflow = workflow
        self._seed = seed

    @property
    def sources(self) -> Set[str]:
        """Names of all sources."""
        return self._sources.keys()

    @property
    def num_skipped(self) -> int:
        return sum(self._skipped.values())

    def has_ended(self, source: str) -> bool:
        """Were all tasks of this source issued?"""
        limit = self._sources[source].limit
        return limit is not None and self._served[source] >= limit

    @property
    def is_exhausted(self) -> bool:
        return all(map(self.has_ended, self._sources))

    def shares(self) -> list[SourceShare]:
        """Sources that still have tasks."""
        return [
            SourceShare(name=name, weight=source.weight, served=self._served[name])
            for name, source in self._sources.items()
            if source.limit is None or self._served[name] < source.limit
        ]

    def next_task(
        self, now: float, full: Set[str] = frozenset()
    ) -> tuple[Task, dict[str, object]] | None:
        """The next task that the rules accept, and how it was chosen; None: no tasks left. Skips
        the sources in `full`."""
        num_skipped = 0
        while left := [share for share in self.shares() if share.name not in full]:
            name, mix = self._rules.pick(left, now)
            ordinal = self._served[name]
            task = self._sources[name].task(ordinal, seed=self._seed, workflow=self._workflow)
            is_wanted, refused_by = self._rules.wants(task, now)
            runs = is_wanted or num_skipped == MAX_SKIPS
            self._served[name] += 1
            self._skipped[name] += not runs
            self._journal(
                SourceRecord(
                    name=name, next_ordinal=self._served[name], skipped=self._skipped[name]
                )
            )
            if runs:
                self._rules.save_state()
                return task, {"mix": mix, "skipped": num_skipped, "forced_over": refused_by}
            num_skipped += 1
        self._rules.save_state()
        return None

    def restore(self, records: Iterable[SourceRecord]) -> None:
        for record in records:
            if record.name in self._sources:
                self._served[record.name] = record.next_ordinal
                self._skipped[record.name] = record.skipped
