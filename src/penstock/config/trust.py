# SPDX-License-Identifier: Apache-2.0
"""Whom a run believes: where rewards are computed, and how the rows of strangers are checked.

Owns the shape of `reward` and `trust` in the run file. Imports no reward function."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from penstock.config.base import FunctionName, Section

SCORE_STAGE = "trusted-reward"
"""The built-in stage that computes rewards on the trusted side."""


class RewardConfig(Section):
    """What scores a trajectory, and where."""

    fn: FunctionName
    """The function, as module:function or as an installed package names it."""
    at: Literal["node", "stage"] = "node"
    """node: each node scores its own rollouts. stage: the built-in stage `trusted-reward`, next to
    the dataflow service, scores the text of the last answer; nodes deliver without a reward."""


def _kind(value: object) -> str:
    return "<mapping>" if isinstance(value, Mapping | RewardConfig) else "<word>"


AnyReward = Annotated[
    Annotated[FunctionName, Tag("<word>")] | Annotated[RewardConfig, Tag("<mapping>")],
    Discriminator(_kind),
]
"""A function, which nodes call, or a mapping that also says where it is called."""


class TrustConfig(Section):
    """Nodes of other people: `penstock token RUN --untrusted`. Their rewards are always computed by
    the stage `trusted-reward`, and a share of their rows is generated again."""

    accept_untrusted: bool = False
    """Let nodes with an untrusted token join; starts the stage `trusted-reward`."""
    regenerate_share: float = Field(default=0.05, ge=0, le=1)
    """Share of an untrusted node's rows that the stage generates again from the same seed. After a
    row that differs, every row of that credential, until it agrees again."""
    tolerated_share: float = Field(default=0.02, gt=0, lt=0.5)
    """Share of rows in which honest engines may differ by rounding. A credential is quarantined
    once its rows differ more often than that by chance less than once in a million."""
