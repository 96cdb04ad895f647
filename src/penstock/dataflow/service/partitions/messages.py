# SPDX-License-Identifier: Apache-2.0
"""Bodies of the calls between home and its partitions. Owns shapes only."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.dataflow.core.messages import Numbered
from penstock.dataflow.service.operators.messages import PartitionFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionLife:
    """Which process speaks for a partition. A higher epoch replaces a lower one; of two with the
    same, the first that came stays."""

    epoch: int
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionJoin:
    """`PUT /v1/partitions/{index}`: a partition begins a life."""

    life: PartitionLife
    url: str
    """Where nodes and trainers reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPush:
    """`POST /v1/partitions/{index}/messages`: what home lacks, oldest first."""

    life: PartitionLife
    messages: tuple[Numbered, ...]
    figures: PartitionFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPushed:
    received: int
    """Home has made everything up to this number its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPull:
    """`POST /v1/partitions/{index}/orders`: what the partition lacks; held open when it lacks
    nothing."""

    life: PartitionLife
    received: int
    """The partition has made everything up to this number its own."""
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPulled:
    messages: tuple[Numbered, ...]
    finished: bool
    """The run is over."""
