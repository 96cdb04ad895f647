# SPDX-License-Identifier: Apache-2.0
"""A write is durable when its future is done, in order, and storage errors are final."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from penstock.dataflow.ledger import Ledger
from penstock.dataflow.records import MetaRecord, SourceRecord
from penstock.errors import StoreError


def source(name: str, ordinal: int) -> SourceRecord:
    return SourceRecord(name=name, next_ordinal=ordinal)


async def test_the_last_write_of_a_key_stands(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    writes = [ledger.write([source("a", n), source("b", -n)]) for n in range(200)]
    await asyncio.gather(*writes)
    assert sorted(ledger.tables.read(SourceRecord), key=lambda r: r.name) == [
        source("a", 199),
        source("b", -199),
    ]
    ledger.close()


async def test_acknowledged_means_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The segment's fdatasync comes before the SQL commit, and both before the answer."""
    ledger = Ledger(tmp_path)
    assert ledger.tables.scalar("PRAGMA synchronous") == 2, "FULL"
    assert ledger.tables.scalar("PRAGMA journal_mode") == "wal"
    order: list[str] = []
    real_sync, real_commit = os.fdatasync, ledger.tables.commit

    def sync(descriptor: int) -> None:
        real_sync(descriptor)
        order.append("sync")

    def commit(records: list[MetaRecord]) -> None:
        real_commit(records)
        order.append("commit")

    monkeypatch.setattr(os, "fdatasync", sync)
    monkeypatch.setattr(ledger.tables, "commit", commit)
    ledger.place(b"payload")
    await ledger.write([source("a", 1)])
    order.append("answer")
    assert order == ["sync", "commit", "answer"]
    ledger.close()


async def test_a_failed_sync_is_final(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path)
    failures: list[StoreError] = []
    ledger.on_failure = failures.append

    def broken(descriptor: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", broken)
    ledger.place(b"payload")
    with pytest.raises(StoreError, match="Input/output error"):
        await ledger.write([source("a", 1)])
    assert failures and not ledger.tables.read(SourceRecord), "nothing was acknowledged or stored"
    later = ledger.write([source("b", 1)])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(later), 0.2)
    ledger.close()


async def test_one_process_writes_a_ledger(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    with pytest.raises(StoreError, match="only one may write"):
        Ledger(tmp_path)
    ledger.close()
    Ledger(tmp_path).close()


async def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    await ledger.write([MetaRecord(key="format", value="99")])
    ledger.close()
    with pytest.raises(StoreError, match="format 99"):
        Ledger(tmp_path)
