# SPDX-License-Identifier: Apache-2.0
"""The templates of `penstock init`: complete, valid and small. `tests/e2e/test_templates.py` trains
each."""

from __future__ import annotations

import os
from pathlib import Path
from typing import get_args

import pytest

from penstock.cli.init import Template, init
from penstock.config import load
from penstock.dataflow.service.build_sources import build_source
from penstock.errors import ConfigError

TEMPLATES: tuple[Template, ...] = get_args(Template)
MAX_TOOL_LINES = 40


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_is_a_valid_run_with_a_page_that_explains_it(
    template: Template, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "my-run"
    assert init(folder, template=template) == 0
    printed = capsys.readouterr().out
    assert "next:" in printed and "penstock check" in printed
    assert load(folder / "run.yaml").name == "my-run"
    assert "outputs/my-run`" in (folder / "README.md").read_text()
    texts = [path.read_text() for path in folder.rglob("*") if path.is_file()]
    assert not any("SPDX" in text or "{{" in text for text in texts)
    with pytest.raises(ConfigError, match="already has"):
        init(folder, template=template)


def test_the_tool_template_is_short(tmp_path: Path) -> None:
    """Environment, reward and config together, without comments and empty lines."""
    init(tmp_path / "run", template="multi-turn-tool")
    files = [tmp_path / "run" / name for name in ("run.yaml", "task.py")]
    lines = [line.strip() for file in files for line in file.read_text().splitlines()]
    assert sum(bool(line) and not line.startswith("#") for line in lines) <= MAX_TOOL_LINES


def test_the_harbor_template_has_tasks_that_can_be_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    init(tmp_path / "run", template="harbor")
    monkeypatch.chdir(tmp_path / "run")
    config = load(Path("run.yaml"))
    task = build_source(config, config.sources[0]).task(0, seed=0, workflow="")
    assert task.payload["harbor"]["name"] == "write-a"
    assert os.access("tasks/write-a/tests/test.sh", os.X_OK)
