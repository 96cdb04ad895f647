# SPDX-License-Identifier: Apache-2.0
"""Bodies of the calls between home and its partitions. Owns shapes only."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.dataflow.core.messages import NumberedMessage
from penstock.dataflow.service.operators.messages import PartitionMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionBoot:
    """Which process speaks for a partition. A higher epoch replaces a lower one; of two with the
    same, the first that came stays."""

    epoch: int
    boot_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionJoin:
    """`PUT /v1/partitions/{index}`: a partition begins a life."""

    boot: PartitionBoot
    url: str
    """Where nodes and trainers reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPush:
    """`POST /v1/partitions/{index}/messages`: what home lacks, oldest first."""

    boot: PartitionBoot
    messages: tuple[NumberedMessage, ...]
    figures: PartitionMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPushAnswer:
    received: int
    """Home has made everything up to this number its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPull:
    """`POST /v1/partitions/{index}/orders`: what the partition lacks; held open when it lacks
    nothing."""

    boot: PartitionBoot
    received: int
    """The partition has made everything up to this number its own."""
    wait_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPullAnswer:
    messages: tuple[NumberedMessage, ...]
    finished: bool
    """The run is over."""
