# SPDX-License-Identifier: Apache-2.0
"""Stages for tests, in few words."""

from __future__ import annotations

from typing import Any

from penstock.config import AlgorithmConfig, PipelineStageConfig
from penstock.trainer.model_folders import TINY_QWEN3
from penstock.trainer.pipeline.builtin import builtin

OWN = "tests.unit.trainer.own_stages"


def stage(id: str, reads: str, writes: str = "", **more: Any) -> PipelineStageConfig:
    """A compute stage that runs a user's function, unless told otherwise."""
    values: dict[str, Any] = {
        "id": id,
        "type": "compute",
        "role": "own",
        "fn": f"{OWN}:shape",
        "reads": reads.split(),
        "writes": writes.split(),
    }
    return PipelineStageConfig.model_validate(values | more)


def train(reads: str = "turns advantage", **more: Any) -> PipelineStageConfig:
    options: dict[str, Any] = {"fn": None, **more}
    return stage("train", reads, type="train", role="actor", **options)


def of(name: str, **more: Any) -> tuple[PipelineStageConfig, ...]:
    """The built-in graph of this name."""
    teacher = {"teacher": TINY_QWEN3} if name == "opd" else {}
    algorithm = AlgorithmConfig.model_validate({"name": name, **teacher, **more})
    return builtin(algorithm, max_tokens=1024)
