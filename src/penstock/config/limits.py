# SPDX-License-Identifier: Apache-2.0
"""When a run ends before its last step: it is stalled, or it has used what it may use."""

from typing import Literal

from pydantic import Field

from penstock.config.base import Section


class StallConfig(Section):
    """What happens when nothing in the run advances."""

    limit_s: float = Field(default=3600.0, gt=0)
    """Seconds without any progress, within steps and attempts too, until the run counts as
    stalled. A run with longer pauses gets three times its longest pause, and a process that has
    just started ten minutes."""
    action: Literal["restart", "stop"] = "restart"
    """restart: kill the process that the others wait for, and start it again; if the run stalls
    again without a result, stop. stop: end the run with exit code 5."""


class BudgetConfig(Section):
    """What a run may use, over all its starts; null: any amount."""

    tokens: int | None = Field(default=None, gt=0)
    """Sampled tokens of delivered trajectories, without evaluations and untrusted nodes. Then the
    run ends with a checkpoint and exit code 6."""
    node_hours: float | None = Field(default=None, gt=0)
    """Hours of live rollout nodes, added up, on all hosts; untrusted nodes do not count. Then the
    run ends with a checkpoint and exit code 6."""
