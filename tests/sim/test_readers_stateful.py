# SPDX-License-Identifier: Apache-2.0
"""Readers against a dictionary: whatever the order of calls, crashes and clock, a column is
written once, a lease is held by one, and no row is lost.

The dictionary knows no windows, pages, queues or cursors; the machine runs with tiny ones.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.sim.reader_world import ReaderWorld, no_blobs

from penstock.dataflow.column_records import BundleRecord, ColumnRecord, RowLeaseRecord
from penstock.dataflow.columns import pages, row_window
from penstock.dataflow.columns.bundles import Bundle, drafts
from penstock.dataflow.columns.cells import number_cell
from penstock.dataflow.columns.row_leases import (
    Claim,
    LeasedRow,
    LeaseOutcome,
    ReaderSpec,
    RowTrigger,
)
from penstock.dataflow.core.leasing import DeliveryStatus
from penstock.dataflow.ledger.tables import open_memory_tables
from penstock.types import RowId

WINDOW = 2
TABLES = open_memory_tables()
TERMS = {
    terms.name: terms
    for terms in (
        ReaderSpec(
            name="score", reads=("turns",), writes=("score",), deadline_s=50, max_attempts=2
        ),
        ReaderSpec(name="refer", reads=("turns", "score"), writes=("ref", "kl"), deadline_s=90),
        ReaderSpec(
            name="prm", reads=("turns",), writes=("prm",), on=RowTrigger.ADMITTED, deadline_s=50
        ),
        ReaderSpec(name="export", reads=("turns",), max_attempts=2),
        ReaderSpec(name="judge", reads=("text",), writes=("mark",), space="eval", deadline_s=200),
    )
}
TTL_S = 12.0
Key = tuple[str, RowId]
"""Reader and row."""


@dataclass
class Oracle:
    """What must be true, as plain dictionaries."""

    rows: dict[RowId, tuple[str, int, float]] = field(
        default_factory=dict[RowId, tuple[str, int, float]]
    )
    """Space, arrival and time of each row that is not gone."""
    columns: dict[tuple[RowId, str], tuple[str, str]] = field(
        default_factory=dict[tuple[RowId, str], tuple[str, str]]
    )
    """Failure and digest."""
    leases: dict[Key, tuple[Claim, float]] = field(default_factory=dict[Key, tuple[Claim, float]])
    attempts: dict[Key, int] = field(default_factory=dict[Key, int])
    epochs: dict[Key, int] = field(default_factory=dict[Key, int])
    over: set[Key] = field(default_factory=set[Key])
    admitted: dict[RowId, float] = field(default_factory=dict[RowId, float])

    def of(self, terms: ReaderSpec) -> list[RowId]:
        rows = [(at[1], row_id) for row_id, at in self.rows.items() if at[0] == terms.space]
        return [row_id for _, row_id in sorted(rows)]

    def has(self, row_id: RowId, name: str) -> bool:
        return (row_id, name) in self.columns

    def is_complete(self, terms: ReaderSpec, row_id: RowId) -> bool:
        return bool(terms.writes) and all(self.has(row_id, name) for name in terms.writes)

    def is_over(self, terms: ReaderSpec, row_id: RowId) -> bool:
        is_held = (terms.name, row_id) in self.leases
        complete = self.is_complete(terms, row_id) and not is_held
        return (terms.name, row_id) in self.over or complete

    def is_ready(self, terms: ReaderSpec, row_id: RowId) -> bool:
        found = [self.columns.get((row_id, name)) for name in terms.inputs]
        return all(column is not None and not column[0] for column in found)

    def due(self, terms: ReaderSpec, row_id: RowId) -> float:
        since = (
            self.rows[row_id][2] if terms.on is RowTrigger.DELIVERED else self.admitted.get(row_id)
        )
        if since is None or not terms.deadline_s:
            return float("inf")
        return since + terms.deadline_s

    def forget(self, row_id: RowId) -> None:
        del self.rows[row_id]
        for name in TERMS:
            self.leases.pop((name, row_id), None)


def columns_of(records: Iterable[object]) -> Iterator[ColumnRecord]:
    """Those of their own records and those of rows that came together."""
    for record in records:
        if isinstance(record, ColumnRecord):
            yield record
        elif isinstance(record, BundleRecord):
            bundle = Bundle(record)
            for position in range(len(bundle.keys)):
                found = (bundle.column(position, name) for name in bundle.names)
                yield from (column for column in found if column is not None)


class ReadersMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = ReaderWorld(window=WINDOW, tables=TABLES)
        self.truth = Oracle()
        self.durable = copy.deepcopy(self.truth)
        self.claims: list[tuple[str, Claim]] = []
        self.requests: list[tuple[str, str]] = []
        self.grace_until = 0.0
        self.seen = 0
        self.num_rows = 0
        self.num_requests = 0

    @initialize()
    def declare(self) -> None:
        for terms in TERMS.values():
            self.world.readers.declare(terms, self.world.now)
        self.flush()

    # --- what the core said, checked and believed ---------------------------------------------

    def observe(self, written: set[tuple[RowId, str]] | None = None) -> None:
        """Every column the core journaled is the first of its place and has a reason."""
        journaled = self.world.journaled[self.seen :]
        self.seen = len(self.world.journaled)
        completed: list[tuple[RowId, str]] = []
        takes = [record for record in journaled if isinstance(record, RowLeaseRecord)]
        for record in columns_of(journaled):
            key = (record.row_id, record.name)
            assert key not in self.truth.columns, f"{key} is written twice"
            self.truth.columns[key] = (record.failed, record.digest)
            if record.failed:
                self._check_failure(record)
            else:
                assert key in (written or ()), f"nobody wrote {key}"
            if record.space == "train" and record.name != "admitted":
                completed.append(key)
        for row_lease in takes:
            if row_lease.state in ("done", "dead"):
                self.truth.over.add((row_lease.reader, row_lease.row_id))
                self.truth.leases.pop((row_lease.reader, row_lease.row_id), None)
        drained = [(event.row_id, event.name) for event in self.world.row_window.pop_completed()]
        assert sorted(drained) == sorted(completed), "every terminal column is told once"

    def _check_failure(self, record: ColumnRecord) -> None:
        terms = next(terms for terms in TERMS.values() if record.name in terms.writes)
        key = (terms.name, record.row_id)
        now = self.world.now
        if record.failed == "overdue":
            assert self.truth.due(terms, record.row_id) <= now
            assert now >= self.grace_until, "workers had no time to come back"
        elif record.failed == "attempts":
            assert self.truth.attempts[key] >= terms.max_attempts
        else:
            assert record.failed == "input"
            failed = [self.truth.columns.get((record.row_id, name)) for name in terms.inputs]
            assert any(column is not None and column[0] for column in failed)

    # --- rows ---------------------------------------------------------------------------------

    @rule(num=st.integers(1, 4))
    def arrive(self, num: int) -> None:
        for _ in range(num):
            self.num_rows += 1
            row_id = RowId(f"p0-{self.num_rows}.0.1")
            arrival = self.world.arrive(row_id)
            self.truth.rows[row_id] = ("train", arrival, self.world.now)
            self.truth.columns[row_id, "turns"] = ("", "")
            self.observe()

    @rule(
        keys=st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=3, unique=True),
        name=st.sampled_from(["text", "note"]),
    )
    def put(self, keys: list[str], name: str) -> None:
        value = float(len(name))
        known = [key for key in keys if self.truth.has(RowId(key), name)]
        rows = [*drafts([(RowId(key), {name: value}) for key in keys], no_blobs)]
        first = self.world.row_window.last_arrival + 1
        refused = self.world.spaces.put("eval", rows, "user", self.world.now)
        assert [result.key for result in refused] == known
        assert all(result.status is DeliveryStatus.DUPLICATE for result in refused)
        new = [RowId(key) for key in keys if RowId(key) not in self.truth.rows]
        for arrival, row_id in enumerate(new, first):
            self.truth.rows[row_id] = ("eval", arrival, self.world.now)
        self.observe({(RowId(key), name) for key in keys})

    @rule(data=st.data())
    def admit(self, data: st.DataObject) -> None:
        rows = [row_id for row_id, at in self.truth.rows.items() if at[0] == "train"]
        if rows:
            chosen = data.draw(st.lists(st.sampled_from(rows), min_size=1, max_size=3, unique=True))
            self._admit(chosen)

    def _admit(self, row_ids: list[RowId]) -> None:
        self.world.row_window.admitted(row_ids, self.world.now)
        for row_id in row_ids:
            self.truth.admitted.setdefault(row_id, self.world.now)
        self.observe({(row_id, "admitted") for row_id in row_ids})

    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """Readers still get the rows of a group that was trained and freed."""
        rows = [row_id for row_id in self.truth.rows if row_id in self.truth.admitted]
        if rows:
            for row_id in data.draw(st.lists(st.sampled_from(rows), max_size=3, unique=True)):
                self.world.free(row_id)
                self.observe()

    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        rows = [row_id for row_id, at in self.truth.rows.items() if at[0] == "train"]
        if rows:
            for row_id in data.draw(st.lists(st.sampled_from(rows), max_size=3, unique=True)):
                self.world.forget(row_id)
                self.truth.forget(row_id)
                self.observe()

    @precondition(lambda self: any(at[0] == "eval" for at in self.truth.rows.values()))
    @rule()
    def clear(self) -> None:
        self.world.spaces.clear("eval")
        for row_id in [r for r, at in self.truth.rows.items() if at[0] == "eval"]:
            self.truth.forget(row_id)
            self.truth.over -= {(name, row_id) for name in TERMS}
            for key in [key for key in self.truth.columns if key[0] == row_id]:
                del self.truth.columns[key]
            for name in TERMS:
                self.truth.attempts.pop((name, row_id), None)
                self.truth.epochs.pop((name, row_id), None)
        self.observe()
        self.flush()  # the service puts nothing into a space before its clearing is durable

    # --- workers ------------------------------------------------------------------------------

    @rule(name=st.sampled_from(sorted(TERMS)), num=st.integers(1, 3))
    def lease_some(self, name: str, num: int) -> None:
        self.lease(name, num)

    def lease(self, name: str, num: int) -> int:
        self.num_requests += 1
        request_id = f"r{self.num_requests}"
        grants = self.world.readers.lease(name, "w", request_id, num, self.world.now)
        self.observe()
        assert len(grants) <= num
        for grant in grants:
            self._granted(name, grant)
        if grants:
            self.requests.append((name, request_id))
        return len(grants)

    def _granted(self, name: str, grant: LeasedRow) -> None:
        terms, key = TERMS[name], (name, grant.claim.row_id)
        assert key not in self.truth.leases, "one lease per row and reader"
        assert not self.truth.is_over(terms, grant.claim.row_id), "finished rows stay finished"
        assert self.truth.is_ready(terms, grant.claim.row_id), "it lacks a column"
        assert grant.claim.epoch > self.truth.epochs.get(key, 0), "epochs only grow"
        assert grant.attempt == self.truth.attempts.get(key, 0) + 1
        self.truth.epochs[key] = grant.claim.epoch
        claim = grant.claim
        self.truth.leases[key] = (claim, self.world.now + TTL_S)
        self.claims.append((name, claim))

    @rule(data=st.data())
    def lease_again(self, data: st.DataObject) -> None:
        """A repeated request gets what it still holds and nothing else."""
        if self.requests:
            name, request_id = data.draw(st.sampled_from(self.requests))
            again = self.world.readers.lease(name, "w", request_id, 3, self.world.now)
            for grant in again:
                claim = grant.claim
                assert self.truth.leases[name, grant.claim.row_id][0] == claim

    def _any_claim(self, data: st.DataObject) -> Iterator[tuple[str, Claim, bool]]:
        """One that somebody holds, or held once."""
        if self.claims:
            name, claim = data.draw(st.sampled_from(self.claims))
            held = self.truth.leases.get((name, claim.row_id))
            yield name, claim, held is not None and held[0] == claim

    @rule(data=st.data(), value=st.sampled_from([0.25, 0.5]))
    def write(self, data: st.DataObject, value: float) -> None:
        for name, claim, is_held in self._any_claim(data):
            names = TERMS[name].writes
            if not names:
                return
            column = data.draw(st.sampled_from(names))
            cell = number_cell(column, value)
            existing = self.truth.columns.get((claim.row_id, column))
            if existing is not None:
                is_same = existing == ("", cell.digest)
                expected = DeliveryStatus.DUPLICATE if is_same else DeliveryStatus.CONFLICT
            else:
                expected = DeliveryStatus.STORED if is_held else DeliveryStatus.FENCED
            found = self.world.readers.write(name, claim, [cell], "w", self.world.now)
            assert found[0][0] is expected
            self.observe({(claim.row_id, column)})
            if expected is DeliveryStatus.STORED:
                other = [cell, number_cell(column, value + 1)]
                again = self.world.readers.write(name, claim, other, "w", self.world.now)
                assert [status for status, _ in again] == ["duplicate", "conflict"]
                self.observe()

    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        for name, claim, is_held in self._any_claim(data):
            pending_outputs = [n for n in TERMS[name].writes if not self.truth.has(claim.row_id, n)]
            expected = DeliveryStatus.INVALID if pending_outputs else DeliveryStatus.STORED
            found = self.world.readers.end(name, claim, LeaseOutcome.DONE, self.world.now)
            assert found[0] is (expected if is_held else DeliveryStatus.FENCED)
            self.observe()

    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        for name, claim, is_held in self._any_claim(data):
            if is_held:
                self._lose(name, claim)
            found = self.world.readers.end(name, claim, LeaseOutcome.FAILED, self.world.now, "boom")
            assert found[0] is (DeliveryStatus.STORED if is_held else DeliveryStatus.FENCED)
            self.observe()

    def _lose(self, name: str, claim: Claim) -> None:
        key = (name, claim.row_id)
        self.truth.attempts[key] = self.truth.attempts.get(key, 0) + 1
        del self.truth.leases[key]

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        for name, claim, is_held in self._any_claim(data):
            found = self.world.readers.end(name, claim, LeaseOutcome.RELEASED, self.world.now)
            assert found[0] is (DeliveryStatus.STORED if is_held else DeliveryStatus.FENCED)
            if is_held:
                del self.truth.leases[name, claim.row_id]
            self.observe()

    @precondition(lambda self: self.truth.leases)
    @rule(data=st.data())
    def let_anew(self, data: st.DataObject) -> None:
        """A row changes hands; its first worker can do nothing to it any more."""
        name, row_id = data.draw(st.sampled_from(sorted(self.truth.leases)))
        old = self.truth.leases[name, row_id][0]
        assert (
            self.world.readers.end(name, old, LeaseOutcome.RELEASED, self.world.now)[0] == "stored"
        )
        del self.truth.leases[name, row_id]
        self.observe()
        self.lease(name, 1)
        for outcome in (LeaseOutcome.DONE, LeaseOutcome.RELEASED, LeaseOutcome.FAILED):
            status, _ = self.world.readers.end(name, old, outcome, self.world.now, "late")
            assert status is DeliveryStatus.FENCED
        assert self.world.readers.extend(name, [old], self.world.now) == [row_id]
        self.observe()

    @precondition(lambda self: self.truth.leases)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """As a worker does it when nothing goes wrong."""
        name, row_id = data.draw(st.sampled_from(sorted(self.truth.leases)))
        claim = self.truth.leases[name, row_id][0]
        cells = [number_cell(column, 0.5) for column in TERMS[name].writes]
        self.world.readers.write(name, claim, cells, "w", self.world.now)
        self.observe({(row_id, cell.name) for cell in cells})
        assert self.world.readers.end(name, claim, LeaseOutcome.DONE, self.world.now)[0] == "stored"
        self.observe()

    @rule(data=st.data())
    def extend(self, data: st.DataObject) -> None:
        for name, claim, is_held in self._any_claim(data):
            lost = self.world.readers.extend(name, [claim], self.world.now)
            assert lost == ([] if is_held else [claim.row_id])
            if is_held:
                self.truth.leases[name, claim.row_id] = (claim, self.world.now + TTL_S)

    # --- time and crashes ---------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, 5.0, 13.0, 60.0]))
    def tick(self, seconds: float) -> None:
        now = self.world.now + seconds
        for (name, _), (claim, expires_at) in [*self.truth.leases.items()]:
            is_late = self.truth.due(TERMS[name], claim.row_id) <= now >= self.grace_until
            if expires_at < now:
                self._lose(name, claim)
            elif is_late:
                del self.truth.leases[name, claim.row_id]
        self.world.tick(seconds)
        self.observe()

    @rule()
    def settle(self) -> None:
        self.world.settle()
        self.seen = 0
        self.durable = copy.deepcopy(self.truth)

    @rule()
    def flush(self) -> None:
        self.world.flush()
        self.seen = 0
        self.durable = copy.deepcopy(self.truth)

    @rule()
    def crash(self) -> None:
        self.world.crash()
        self.seen = 0
        self.truth = copy.deepcopy(self.durable)
        self.claims = [
            (name, claim)
            for name, claim in self.claims
            if self.truth.epochs.get((name, claim.row_id), 0) >= claim.epoch
        ]
        self.requests = []
        self.grace_until = self.world.now + 2 * TTL_S
        full = self.world.now + TTL_S
        for key, (claim, _) in [*self.truth.leases.items()]:
            self.truth.leases[key] = (claim, full)
            if self.truth.is_complete(TERMS[key[0]], claim.row_id):  # nothing is left to do
                del self.truth.leases[key]
        self.observe()

    # --- what must hold after every step ------------------------------------------------------

    @invariant()
    def leases_agree(self) -> None:
        for name, reader in self.world.row_window.readers.items():
            held = {
                row_id: row_lease.holder.epoch
                for row_id, row_lease in reader.leased.items()
                if row_lease.holder is not None
            }
            expected = {
                key[1]: c.epoch for key, (c, _) in self.truth.leases.items() if key[0] == name
            }
            assert held == expected, f"leases of {name}"

    @invariant()
    def windows_are_bounded(self) -> None:
        for reader in self.world.row_window.readers.values():
            assert len(reader.window) <= WINDOW + row_window.PAGE_ROWS
            assert len(reader.by_arrival) <= 3 * len(reader.window) + 65

    def teardown(self) -> None:
        """Once faults stop, every row is finished for every reader, and every cursor is at the
        end."""
        if not self.world.row_window.readers:
            return
        self.flush()
        for _ in range(2 * self.num_rows + 40):
            # A row whose input nobody writes holds its place until its deadline.
            is_idle = not self._work_on_all()
            self.tick(1000.0 if is_idle else 0.1)
            self.world.flush()
            self.seen = 0
            if is_idle and all(
                self.truth.is_over(terms, row_id)
                for terms in TERMS.values()
                for row_id in self.truth.of(terms)
            ):
                break
        self.world.tick()
        self.world.flush()
        for terms in TERMS.values():
            for row_id in self.truth.of(terms):
                assert self.truth.is_over(terms, row_id), f"{row_id} is lost for {terms.name}"
        self._check_tables()

    def _work_on_all(self) -> int:
        rows = [row_id for row_id, at in self.truth.rows.items() if at[0] == "train"]
        self._admit(rows)
        num_granted = 0
        for name, terms in TERMS.items():
            num_granted += self.lease(name, 9)
            for key in [key for key in self.truth.leases if key[0] == name]:
                claim = self.truth.leases[key][0]
                cells = [number_cell(column, 0.5) for column in terms.writes]
                self.world.readers.write(name, claim, cells, "w", self.world.now)
                self.observe({(claim.row_id, cell.name) for cell in cells})
                assert (
                    self.world.readers.end(name, claim, LeaseOutcome.DONE, self.world.now)[0]
                    == "stored"
                )
                self.observe()
        return num_granted

    def _check_tables(self) -> None:
        for reader in self.world.row_window.readers.values():
            assert reader.cursor == reader.loaded_through and not reader.window
        assert self.world.tables.scalar("SELECT count(*) FROM row_leases") == 0
        tables = self.world.tables
        found = columns_of([*tables.read(ColumnRecord), *tables.read(BundleRecord)])
        stored = [(c.row_id, c.name, c.failed, c.digest) for c in found]
        known = self.truth.columns.items()
        expected = {(r, name, *column) for (r, name), column in known if name != "turns"}
        assert set(stored) == expected


@pytest.fixture(autouse=True)
def tiny_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_window, "PAGE_ROWS", 2)
    monkeypatch.setattr(pages, "SCAN_ROWS", 3)
    monkeypatch.setattr(row_window, "REFILL_BELOW", 1)


class TestReaders(ReadersMachine.TestCase):
    settings = settings(
        max_examples=60,
        stateful_step_count=50,
        deadline=None,
        phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow],
    )
