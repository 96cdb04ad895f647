# SPDX-License-Identifier: Apache-2.0
"""TRL in an environment of its own, built once from the pins in `constraints/envs/trl.txt`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT
from penstock.config import RunConfig
from penstock.tasks import reverse

PINS = ROOT / "constraints" / "envs" / "trl.txt"
TRAIN = ROOT / "benchmarks" / "trl_train.py"


def variables() -> dict[str, str]:
    """Of its processes. One thread: a second one shortens no run of so small a model, and costs
    processor time."""
    words = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return {**inherited, **words}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrlRun:
    """One run of `trl_train.py`."""

    folder: str
    """Where it writes."""
    model: str
    tasks: str
    """JSON lines with `prompt` and `answer`, in the order of training."""
    reward: str = str(ROOT / "src" / "penstock" / "tasks" / "reverse.py")
    """A Python file with the function `reward`."""
    seed: int
    steps: int
    groups: int
    group_size: int
    max_tokens: int
    loss: Mapping[str, float]
    """TRL's settings of loss and optimizer."""
    until: float = math.inf
    """Reward that ends the run."""
    save_every: int = 0
    """Steps between checkpoints; 0: none."""
    resume: bool = False


def make_run(folder: Path, config: RunConfig, model: Path, **options: Any) -> TrlRun:
    """The run of ours that this config describes, as TRL's settings."""
    folder.mkdir(parents=True, exist_ok=True)
    training, algorithm = config.training, config.algorithm
    tasks = folder / "tasks.jsonl"
    num_tasks = training.steps * training.groups_per_batch
    rows = (json.dumps(reverse.make_task(number, config.seed)) for number in range(num_tasks))
    tasks.write_text("\n".join(rows) + "\n")
    assert algorithm.delta is not None and algorithm.epsilon_high is not None
    return TrlRun(
        folder=str(folder),
        model=str(model),
        tasks=str(tasks),
        seed=config.seed,
        steps=training.steps,
        groups=training.groups_per_batch,
        group_size=algorithm.num_generations,
        max_tokens=config.sampling.max_tokens,
        loss={
            "learning_rate": training.learning_rate,
            "weight_decay": training.weight_decay,
            "max_grad_norm": training.max_grad_norm,
            "epsilon": algorithm.epsilon,
            "epsilon_high": algorithm.epsilon_high,
            "delta": algorithm.delta,
            "entropy_coef": algorithm.entropy_coef,
        },
        **options,
    )


def command(python: Path, runs: Sequence[TrlRun]) -> list[str]:
    """Trains these one after another, in one process."""
    path = Path(runs[0].folder) / ("resumed.json" if runs[0].resume else "runs.json")
    path.write_text(json.dumps([asdict(run) for run in runs]))
    return [str(python), "-P", str(TRAIN), str(path)]  # or `import trl` finds this file
