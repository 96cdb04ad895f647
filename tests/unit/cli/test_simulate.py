# SPDX-License-Identifier: Apache-2.0
"""`penstock simulate` as a shell sees it, over a ledger that a real service wrote."""

from __future__ import annotations

import asyncio
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


def rules_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "new.yaml"
    path.write_text(text)
    return str(path)


def test_the_rules_of_the_record_change_nothing(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Over a rewind, a skipped batch, failed slots and groups that went stale."""
    rules = rules_file(tmp_path, "rules: [{admit: all}, {select: edf}]")
    code, out, _ = run_main(capsys, "simulate", str(run_dir), "--rules", rules, "--json")
    answer = json.loads(out.splitlines()[-1])
    assert code == 0 and answer["unfilled"] == 0
    assert answer["simulated"] == answer["recorded"]
    assert answer["recorded"]["policies"]["policy"]["wasted"]["failed_slots"]["groups"] == 1


def test_other_rules_are_compared_with_the_record(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = rules_file(tmp_path, "- {admit: reward-range, low: 0.5, high: 1.0}")
    code, out, _ = run_main(capsys, "simulate", str(run_dir), "--rules", rules)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == ["recorded", "with", "new.yaml"]
    [refused] = [line for line in lines if "reward_range" in line]
    assert refused.split()[1] == "0" and int(refused.split()[6]) > 0
    assert "recorded batches are missing" in out


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("- {admit: reward-sprad}", 'did you mean "reward-spread"?'),
        ("- {replay: newest, ratoi: 0.3}", 'did you mean "ratio"?'),
        ("rule: []", "expected a single key `rules`"),
        ("3", "expected a list of rules"),
        ("[{", "not valid YAML"),
    ],
)
def test_a_bad_rules_file_is_named_with_its_fix(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, complaint: str
) -> None:
    rules = rules_file(tmp_path, text)
    code, _, err = run_main(capsys, "simulate", str(run_dir), "--rules", rules)
    assert code == 1
    assert rules in err and complaint in err


def test_a_missing_rules_file_is_an_error(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run_main(capsys, "simulate", str(run_dir), "--rules", str(tmp_path / "none"))
    assert code == 1 and "cannot read the rules file" in err
