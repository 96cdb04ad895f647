# SPDX-License-Identifier: Apache-2.0
"""Bodies of the calls between the coordinator and its partitions. Owns shapes only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from penstock.bounds import Count, Id, Seconds
from penstock.dataflow.core.messages import NumberedMessage
from penstock.dataflow.service.operators.messages import PartitionMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionBoot:
    """Identifies a partition's process. A higher epoch replaces a lower one; with equal epochs the
    first to register stays."""

    epoch: Count
    boot_id: Id


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionJoin:
    """`PUT /v1/partitions/{index}`: register a partition's process."""

    boot: PartitionBoot
    url: Annotated[str, Meta(max_length=2048, pattern=r"^https?://[!-~]+$(?!\n)")]
    """Where nodes and trainers reach it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPush:
    """`POST /v1/partitions/{index}/messages`: messages new to the coordinator, oldest first."""

    boot: PartitionBoot
    messages: Annotated[tuple[NumberedMessage, ...], Meta(max_length=10_000)]
    figures: PartitionMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPushAnswer:
    received: int
    """The coordinator has applied all messages up to this number."""
    pause_s: Seconds
    """Until the next call in this direction: messages in between share it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPull:
    """`POST /v1/partitions/{index}/orders`: orders new to the partition; held open when there
    are none."""

    boot: PartitionBoot
    received: Count
    """The partition has applied all orders up to this number."""
    wait_s: Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkPullAnswer:
    messages: tuple[NumberedMessage, ...]
    finished: bool
    """The run is over."""
    pause_s: Seconds
    """As in `LinkPushAnswer`."""
