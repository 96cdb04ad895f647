# SPDX-License-Identifier: Apache-2.0
"""The user's modules: found without running them, digested, compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.config import demo_config
from penstock.errors import ConfigError
from penstock.fleet.run_folder import RunFolder
from penstock.runs.target import read_target
from penstock.runs.user_code import (
    code_digests,
    describe_changes,
    find_file,
    named_modules,
    record_code,
)

OVERRIDES = [
    "reward=judge:score",
    "workflow=agents.tools:solve",
    "sources=[{name: a, task: mine.task}, {name: b, task: rows.jsonl}]",
    "dataflow.rules=[{admit: 'keep:Fresh'}, {select: edf}]",
]


def test_the_config_names_modules_of_every_kind() -> None:
    config = demo_config(0, OVERRIDES)
    assert named_modules(config) == ("agents.tools", "judge", "keep", "mine.task")
    assert named_modules(demo_config(0)) == ()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "agents").mkdir()
    (tmp_path / "agents" / "__init__.py").write_text("raise RuntimeError('not to be run')\n")
    (tmp_path / "agents" / "tools.py").write_text("import json\nfrom . import sandbox\n")
    (tmp_path / "agents" / "sandbox.py").write_text("LIMIT = 1\n")
    (tmp_path / "judge.py").write_text("import numpy\n")
    (tmp_path / "unused.py").write_text("")
    return tmp_path


def test_digests_cover_what_is_named_and_what_it_imports_and_run_nothing(project: Path) -> None:
    found = code_digests(["agents.tools", "judge"], [str(project)])
    assert list(found) == ["agents", "agents.sandbox", "agents.tools", "judge"]
    (project / "agents" / "sandbox.py").write_text("LIMIT = 2\n")
    changed = code_digests(["agents.tools", "judge"], [str(project)])
    assert describe_changes(found, changed) == "agents.sandbox (edited)"
    assert describe_changes(found, found) == ""


def test_new_and_unused_modules_are_changes() -> None:
    assert describe_changes({"a": "1", "b": "2"}, {"b": "2", "c": "3"}) == (
        "a (no longer used), c (new)"
    )


def test_a_module_that_is_installed_is_found_and_one_that_is_missing_is_not(project: Path) -> None:
    assert find_file("judge", [str(project)]) == project / "judge.py"
    assert find_file("numpy.linalg", [str(project)]) is not None
    assert find_file("no_such_module", [str(project)]) is None
    assert code_digests(["no_such_module"], [str(project)]) == {}


def test_a_module_with_a_syntax_error_still_has_a_digest(project: Path) -> None:
    (project / "judge.py").write_text("def (:\n")
    assert list(code_digests(["judge"], [str(project)])) == ["judge"]


def test_an_edit_between_two_starts_is_noted_with_its_step(project: Path, tmp_path: Path) -> None:
    config, folder = demo_config(0, ["reward=judge:score"]), RunFolder(tmp_path / "r")
    folder.write_config(config)
    path = (str(project),)
    assert record_code(config, folder, path) == ""
    assert record_code(config, folder, path) == "" and not folder.notes.exists()
    (project / "judge.py").write_text("import numpy as np\n")
    folder.metrics.write_text('{"number": 117, "reward/mean": 0.5}\n{"numb')
    note = record_code(config, folder, path)
    assert note == (
        "your code changed since the last start: judge (edited); it applies after step 117"
    )
    kept = json.loads(folder.notes.read_text())
    assert (kept["step"], kept["note"]) == (117, note)
    assert record_code(config, folder, path) == ""


def test_a_run_whose_modules_are_gone_says_where_they_were(project: Path, tmp_path: Path) -> None:
    config, folder = demo_config(0, ["reward=judge:score"]), RunFolder(tmp_path / "runs" / "r")
    folder.write_config(config)
    lost = tmp_path / "lost"
    folder.allocate_endpoints(tmp_path, (str(lost),))
    with pytest.raises(
        ConfigError, match=f"modules judge of run .* were in {lost}, .*--python-path"
    ):
        read_target(folder.path)
    found = read_target(folder.path, python_path=[project])
    assert found.python_path == (str(project),)
