# SPDX-License-Identifier: Apache-2.0
"""`penstock explain` as a shell sees it, over a ledger that a real service wrote."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path

import pytest
from tests.unit.audit.ledgers import eventful_run
from tests.unit.cli.test_commands import run_main


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    asyncio.run(eventful_run(folder))
    return folder


def test_the_answer_comes_first_then_what_led_to_it(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run_main(capsys, "explain", str(run_dir), "p0-2")
    assert code == 0
    written = out.splitlines()
    assert written[0] == "group p0-2 was dropped by policy: failed_slots, decided by closing"
    assert "+0.0 s  issued as group p0-2" in out and written[-1].startswith("see also: ")
    assert all(len(line) <= 80 for line in written)


def test_json_is_one_object_with_the_same_facts(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run_main(capsys, "explain", str(run_dir), "policy.4", "--json")
    answer = json.loads(out.splitlines()[-1])
    assert code == 0 and answer["kind"] == "batch" and answer["id"] == "policy.4"
    sealed = next(step for step in answer["steps"] if step["what"] == "sealed")
    assert len(sealed["facts"]["groups"]) == 3


def test_an_unknown_id_is_a_clear_error(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run_main(capsys, "explain", str(run_dir), "p0-999")
    assert code == 1
    assert "no such group in this ledger" in err and "groups were issued" in err


def test_nothing_in_the_run_folder_changes(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = _state(run_dir)
    run_main(capsys, "explain", str(run_dir), "p0-3")
    assert _state(run_dir) == before


def _state(folder: Path) -> dict[str, str]:
    return {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }
