# SPDX-License-Identifier: Apache-2.0
"""The README.md of a folder of trajectories: where they come from and what the columns are."""

from __future__ import annotations

from penstock.config import RunConfig
from penstock.runs.export.made_by import penstock_version

_TEXT = """---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*.parquet
tags:
- penstock
- reinforcement-learning
- agent-trajectories
---

# Trajectories of {name}

{num_rows:,} trajectories that penstock {version} recorded in the
run `{name}` (seed {seed}). The models were {models}; the tasks came from {sources}.

One row is one rollout. `turns` holds its model calls: `prompt_ids` (only what was added since the
turn `parent`), `sampled_ids` and `logprobs` exactly as the engine returned them, and in `spans` the
version of the weights that sampled each token. `prompt` and `answer` are the same as text. `reward`
is the score on delivery and `scored_reward` includes a later one. `steps` are the training steps
that used it. `task` and `tools` hold JSON.

`penstock.read_trajectories(folder)` reads the rows back, token for token.
"""


def dataset_card(config: RunConfig, *, num_rows: int) -> str:
    return _TEXT.format(
        name=config.name,
        num_rows=num_rows,
        version=penstock_version(),
        seed=config.seed,
        models=", ".join(f"`{name}`" for name in config.models),
        sources=", ".join(f"`{source.name}`" for source in config.sources) or "agents' sessions",
    )
