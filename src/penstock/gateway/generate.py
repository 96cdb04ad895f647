# SPDX-License-Identifier: Apache-2.0
"""What the gateway asks of an engine: token ids in, token ids out. Text is the renderer's
business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.types import (
    FinishReason,
    LogProbs,
    PolicyName,
    SamplingSpec,
    TokenIds,
    VersionSpan,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One answer, exactly as the engine sampled it."""

    sampled_ids: TokenIds
    """Includes the token that ended the answer, and all tokens of a stop string."""
    logprobs: LogProbs
    spans: tuple[VersionSpan, ...]
    """Cover `sampled_ids` without gap or overlap."""
    finish: FinishReason


class Generate(Protocol):
    async def __call__(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingSpec,
        *,
        policy: PolicyName,
        session: str,
    ) -> Completion:
        """Raises EngineError; cancelling the call gives the engine's place to somebody else."""
        ...
