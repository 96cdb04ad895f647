# SPDX-License-Identifier: Apache-2.0
"""What a server holds in memory of one model: its requests without a result, and the model itself.

Knows no journal and no file.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import msgspec

from penstock.config import LoraConfig
from penstock.tinker.journal import Request
from penstock.tinker.models import TrainedModel


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Of a model's adapter, and of saved weights."""

    rank: int
    targets: tuple[str, ...]
    folder: str
    """Of the adapter as it began, relative to the server's folder."""

    @property
    def lora(self) -> LoraConfig:
        return LoraConfig(rank=self.rank, targets=self.targets)


@dataclass(slots=True)
class Lane:
    """One model's requests."""

    id: str
    owner: str
    next: int
    waiting: dict[int, Request] = field(default_factory=dict[int, Request])
    model: TrainedModel | None = None
    config: ModelConfig | None = None
    asked_rank: int = 0
    num_arriving: int = 0
    """Requests that are counted and not yet durable."""
    num_since_snapshot: int = 0
    task: asyncio.Task[None] | None = None
    used_at: float = field(default_factory=time.monotonic)

    @property
    def is_idle(self) -> bool:
        return self.task is None or self.task.done()

    @property
    def is_in_use(self) -> bool:
        return self.model is not None or bool(self.waiting or self.num_arriving)

    @property
    def rank(self) -> int:
        return self.asked_rank if self.config is None else self.config.rank
