# SPDX-License-Identifier: Apache-2.0
"""Which statistics of a batch its commit takes along: as many as the dataflow accepts. Pure."""

from __future__ import annotations

from itertools import accumulate, takewhile

import structlog

from penstock.bounds import MAX_LABEL_CHARS
from penstock.dataflow.service.trainers.messages import MAX_STATS
from penstock.observe.metric_names import STEP_METRICS

MAX_NAMES_BYTES = 512 << 10
"""Of all names together; with MAX_STATS numbers they are well below the bound of a body."""
_log = structlog.get_logger(__name__)


def within_bounds(stats: dict[str, float]) -> dict[str, float]:
    """All of them if the dataflow accepts them; or else what every run has, then the shortest
    names."""
    sizes = {name: len(name.encode()) for name in stats if len(name) <= MAX_LABEL_CHARS}
    names = sorted(sizes, key=lambda name: (name not in STEP_METRICS, sizes[name]))[:MAX_STATS]
    totals = accumulate(sizes[name] for name in names)
    num = sum(1 for _ in takewhile(lambda total: total <= MAX_NAMES_BYTES, totals))
    if num == len(stats):
        return stats
    _log.warning("statistics left out of a commit: they do not fit", num=len(stats) - num)
    kept = set(names[:num])
    return {name: value for name, value in stats.items() if name in kept}
