# SPDX-License-Identifier: Apache-2.0
"""The run file of the design's section 14, in block form so that each key has a line."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from penstock.config import RunConfig, load

EXAMPLE = """\
name: reverse
output_dir: outputs
launcher: local
seed: 0
models:
  policy: {init: builtin:tiny-qwen3, engine: hf, replicas: 2}
sources:
  - {name: train, task: penstock.tasks.reverse, weight: 1.0}
workflow: single_turn
reward: penstock.tasks.reverse:reward
dataflow:
  store: sqlite
  lease: {ttl_s: 12}
  closing: complete
  rules: [{admit: reward-spread}, {select: edf}]
algorithm: {name: grpo, num_generations: 16, epsilon: 0.2, entropy_coef: 0.01, beta: 0.0}
training:
  learning_rate: 2.0e-3
  groups_per_batch: 64
  minibatches: 1
  epochs: 1
  steps: 80
  max_staleness: 1
  checkpoint_every: 20
pipeline: null
eval: null
report_to: []
"""

LoadText = Callable[..., RunConfig]
LoadStages = Callable[..., RunConfig]


@pytest.fixture
def example() -> str:
    """The text of the design's example."""
    return EXAMPLE


@pytest.fixture
def load_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadText:
    """Load a text as the file `run.yaml`."""
    monkeypatch.chdir(tmp_path)

    def load_run_yaml(text: str, overrides: Sequence[str] = ()) -> RunConfig:
        Path("run.yaml").write_text(text, encoding="utf-8")
        return load(Path("run.yaml"), overrides)

    return load_run_yaml


@pytest.fixture
def load_stages(example: str, load_text: LoadText) -> LoadStages:
    """Load the design's file with these stages; one line each, from line 27 on."""

    def load(*stages: str, overrides: tuple[str, ...] = ()) -> RunConfig:
        text = "pipeline:\n  stages:\n" + "".join(f"    - {stage}\n" for stage in stages)
        return load_text(example.replace("pipeline: null\n", text), overrides)

    return load
