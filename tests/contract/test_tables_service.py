# SPDX-License-Identifier: Apache-2.0
"""The contracts of the ledger and of the service once more, on a real PostgreSQL server: the very
same test functions, with tables that lie elsewhere."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from pathlib import Path
from types import ModuleType

import pytest
from tests.contract import test_dataflow_http, test_dataflow_service, test_ledger

from penstock.dataflow.ledger import store as ledger
from penstock.dataflow.ledger.tables import Tables, open_tables

pytestmark = pytest.mark.postgres

LEFT_OUT = ("test_acknowledged_means_synced", "disk", "space", "reserve")
"""The first asks SQLite for its settings (`test_a_commit_waits_for_the_disk` asks PostgreSQL); the
others fill the disk under the payload, whose store is the same."""


@pytest.fixture(autouse=True)
def on_postgres(postgres_url: str, monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    opened: list[Path] = []

    def open_there(folder: Path, *_: object, **__: object) -> Tables:
        opened.append(folder)
        name = hashlib.sha256(str(folder).encode()).hexdigest()
        return open_tables(folder, postgres_url, name=name)

    monkeypatch.setattr(ledger, "open_tables", open_there)
    yield
    assert opened, "this test never came to PostgreSQL"
    assert not any((folder / "ledger.db").exists() for folder in opened)


def _tests(module: ModuleType) -> dict[str, object]:
    return {
        f"{name}__{module.__name__.removeprefix('tests.contract.test_')}": test
        for name, test in vars(module).items()
        if name.startswith("test_") and not any(part in name for part in LEFT_OUT)
    }


for _module in (test_ledger, test_dataflow_service, test_dataflow_http):
    globals().update(_tests(_module))
