# SPDX-License-Identifier: Apache-2.0
"""A finished run folder for the dashboard: a real ledger, a tokenizer, metrics, hostile text."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from tests.unit.audit.ledgers import Run as ServiceRun
from tests.unit.audit.ledgers import small_config, some_failures
from tests.unit.gateway.chatml import write_snapshot

from penstock.config import dump
from penstock.observe.metrics import MetricsFile

HOSTILE = '<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>'
HOSTILE_TOKEN = "<b onmouseover='window.hacked=1'>h</b>"
NUM_STEPS = 5


def record_run(folder: Path, *, name: str = "", rising: float = 0.1) -> Path:
    """Five trained steps of two nodes with failures; model and tools speak HTML."""
    config = small_config()
    config = config.model_copy(update={"name": name or config.name})

    async def made() -> None:
        run = ServiceRun(folder, config, choose=some_failures)
        for node in run.nodes:
            node.explain = lambda grant: HOSTILE
        await run.start()
        for _ in range(NUM_STEPS):
            await run.step(across_load=True)
        run.close()

    asyncio.run(made())
    model = write_snapshot(folder / "model")
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab[HOSTILE_TOKEN] = vocab.pop("h")
    (model / "tokenizer.json").write_text(json.dumps(tokenizer))
    policy = config.models["policy"].model_copy(update={"init": str(model)})
    (folder / "config.yaml").write_text(
        dump(config.model_copy(update={"models": {"policy": policy}}))
    )
    _write_metrics(folder / "metrics.jsonl", rising)
    return folder


def _write_metrics(path: Path, rising: float) -> None:
    metrics = MetricsFile(path)
    for step in range(1, NUM_STEPS + 1):
        metrics.append(
            {
                "policy": "policy",
                "number": step,
                "seq": step,
                "incarnation": 1,
                "skipped": "",
                "reward/mean": rising * step,
                "staleness/mean": 0.5,
                "tokens/trained": 36.0,
                "entropy": 2.0 - 0.2 * step,
                "loss": float("nan") if step == 2 else 0.1,
                "seconds/train": 0.01,
                "seconds/wait": 0.02,
            }
        )
    metrics.close()
