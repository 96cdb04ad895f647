# SPDX-License-Identifier: Apache-2.0
"""Blocks that a short test can use as they stand: parts of a run file, and a tool agent."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from tests.e2e.document_blocks import ROOT, Block, all_blocks, blocks_of
from tests.unit.gateway.gateway_harness import POLICY, FakeEngine, write_snapshot

from penstock.config import RunConfig, demo_config
from penstock.gateway.gateway import Gateway
from penstock.gateway.renderer import Renderer
from penstock.rollout.context import Context
from penstock.types import SamplingSpec, Task

NOT_RUN_FILES = frozenset({"prometheus.yml", "new.yaml"})
PARTS = [
    block
    for block in all_blocks()
    if block.language == "yaml" and not block.reason and block.file not in NOT_RUN_FILES
]
CALL = '<tool_call>{"name": "open_box", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("block", PARTS, ids=[block.where for block in PARTS])
def test_a_part_of_a_run_file_is_valid(block: Block) -> None:
    """Put over the demo's config, or alone if it is a complete one."""
    written = cast(dict[str, Any], yaml.safe_load(block.text))
    base = demo_config(0).model_dump(mode="json", exclude_unset=True)
    if "pipeline" in written:
        base.pop("algorithm")
    RunConfig.model_validate(written if "name" in written else merged(base, written))


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` wins; sections are joined, but not models and lists."""
    joined = dict(base)
    for key, value in over.items():
        before = joined.get(key)
        if isinstance(value, dict) and isinstance(before, dict) and key != "models":
            joined[key] = merged(cast(dict[str, Any], before), cast(dict[str, Any], value))
        else:
            joined[key] = value
    return joined


async def test_the_tool_agent_calls_its_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workflow of the tutorial with the tools of a real template, over a scripted engine."""
    page = ROOT / "docs" / "tutorials" / "tool-agent.md"
    code = next(block.text for block in blocks_of(page) if block.file == "tool_agent.py")
    (tmp_path / "tool_agent.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    run = importlib.import_module("tool_agent").run
    engine = FakeEngine()
    engine.lines = [CALL, "d"]
    gateway = Gateway(engine)
    gateway.set_renderer(POLICY, Renderer.load(write_snapshot(tmp_path)))
    session = gateway.open(policies=[POLICY], sampling=SamplingSpec(max_tokens=512), seed=0)
    task = Task(key="k", source="s", ordinal=0, payload={"hidden": "d"}, workflow="", seed=0)
    context = Context(session, cast(Any, None), seed=0)
    assert await run(task, context) == 1.0
    assert engine.num_started == 2
    assert '"letter": "d"' in gateway.renderer(POLICY).decode(engine.prompts[1])
    assert engine.prompts[1][: len(engine.prompts[0])] == engine.prompts[0], "it continues"
