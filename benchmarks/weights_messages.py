# SPDX-License-Identifier: Apache-2.0
"""What the processes of a benchmark of weights tell each other, each a line of JSON on stdout."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass

import structlog

from penstock.types import PublishedVersion
from penstock.weights.pulling.links import Transfer


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    wanted: PublishedVersion
    transfer: Transfer
    num_ranges: int
    is_loaded: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    pull_s: float
    fetched_bytes: int
    """Of blobs, as they came over the link."""
    load_s: float
    downtime_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    manifest_digest: str
    wait_s: float
    """As long was the trainer held up."""
    store_s: float
    """As long would it have been, had it waited until the version was stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    copy_s: list[float]
    block_s: list[float]
    """What a hand-over took beyond its copy."""


def log_to_stderr() -> None:
    """And only what somebody should know: stdout is for answers."""
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
    )
