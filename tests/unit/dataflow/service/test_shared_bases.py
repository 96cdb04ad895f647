# SPDX-License-Identifier: Apache-2.0
"""Which policies of a run share an engine, as its nodes are told."""

from __future__ import annotations

from pathlib import Path

from penstock.config import load
from penstock.dataflow.service.build import run_info
from penstock.dataflow.service.nodes.messages import RunInfo, SharedBaseModel
from penstock.types import PolicyName
from penstock.wire.codec import decode, encode

RUN = """\
name: pair
models:
  solver: {{init: builtin:tiny-qwen3, lora: {{rank: 4, alpha: 8}}}}
  whole: {{init: builtin:tiny-qwen3}}
  other: {{init: {folder}, lora: {{rank: 8}}}}
  judge: {{init: builtin:tiny-qwen3, lora: {{rank: 12, alpha: 8}}}}
sources:
  - {{name: train, task: penstock.tasks.reverse}}
reward: penstock.tasks.reverse:reward
training: {{groups_per_batch: 4, steps: 2}}
"""


def test_policies_with_adapters_of_one_init_share_an_engine(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN.format(folder=tmp_path))
    facts = run_info(load(path))
    solver, other, judge = map(PolicyName, ("solver", "other", "judge"))
    assert facts.adapters == (
        SharedBaseModel(policies=(solver, judge), rank=12),
        SharedBaseModel(policies=(other,), rank=8),
    )
    assert decode(encode(facts), RunInfo) == facts


def test_a_run_without_adapters_shares_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    lines = (line for line in RUN.format(folder=tmp_path).splitlines() if "lora" not in line)
    path.write_text("\n".join(lines))
    assert run_info(load(path)).adapters == ()
