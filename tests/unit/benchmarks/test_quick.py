# SPDX-License-Identifier: Apache-2.0
"""`--quick` and `make setup` take the time they say and print no conflict."""

from __future__ import annotations

import re
from importlib.metadata import requires
from pathlib import Path

import pytest
from benchmarks import cache

ROOT = Path(__file__).parents[3]


def test_a_quick_run_does_not_build_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(cache, "CACHE", tmp_path)
    monkeypatch.setattr(cache, "set_up_engine", lambda: calls.append("made"))
    with pytest.raises(SystemExit, match="run `make setup-engine` first"):
        cache.smollm2(quick=True)
    assert calls == []
    cache.smollm2(quick=False)
    assert calls == ["made"]


def test_setup_asks_for_the_setuptools_that_torch_needs() -> None:
    """Else pip reports a conflict in red, which the next call mends."""
    [needed] = [text for text in requires("torch") or () if text.startswith("setuptools")]
    found = re.search(r'"(setuptools[^"]*)"', (ROOT / "Makefile").read_text())
    assert found is not None and found[1] == needed.split(";")[0].strip()
