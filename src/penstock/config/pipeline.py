# SPDX-License-Identifier: Apache-2.0
"""The pipeline: what a trainer does with a batch, as a graph of stages.

Owns the shape of `pipeline`; one stage is in `stages`. Edges follow from columns; order and
placement are up to the planner. Plain data: `penstock check` verifies that each `module:function`
exists and accepts what its stage passes."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from penstock.config.base import Section
from penstock.config.pipeline_checks import pipeline_contradictions
from penstock.config.stages import MAX_STAGES, ParallelConfig, PipelineStageConfig
from penstock.options import Contradiction, at_most

__all__ = ["ParallelConfig", "PipelineConfig", "PipelineStageConfig"]


class PipelineConfig(Section):
    """Stages of training."""

    stages: Annotated[
        tuple[PipelineStageConfig, ...], Field(strict=False), at_most(MAX_STAGES)
    ] = ()
    """The graph; empty: the algorithm's graph."""

    def _contradictions(self) -> Iterator[Contradiction]:
        return pipeline_contradictions(self.stages)

    def of_policy(self, policy: str) -> tuple[PipelineStageConfig, ...]:
        """The stages of this policy."""
        return tuple(stage for stage in self.stages if stage.policy in (None, policy))

    @property
    def services(self) -> Iterator[tuple[int, PipelineStageConfig]]:
        """Stages that run as services, with their positions in the list."""
        return ((i, stage) for i, stage in enumerate(self.stages) if stage.is_service)
