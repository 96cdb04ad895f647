# SPDX-License-Identifier: Apache-2.0
"""The pipeline: what a trainer does with a batch, as a graph of stages.

Owns the shape of `pipeline`; one stage is in `stages`. Edges follow from columns; order and
placement are up to the planner. Plain data: `penstock check` verifies that each `module:function`
exists and accepts what its stage passes."""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field, PositiveInt

from penstock.config.base import Section
from penstock.config.pipeline_checks import pipeline_contradictions
from penstock.config.stages import ParallelConfig, PipelineStageConfig, Tags
from penstock.options import Contradiction

__all__ = ["HostConfig", "ParallelConfig", "PipelineConfig", "PipelineStageConfig"]


class HostConfig(Section):
    """A place for stages: one device, or one machine without devices."""

    tags: Tags
    """Tags that stages can request; trainers go to hosts with `train`."""
    memory_gb: float = Field(gt=0)
    """Memory for models, in GB (10^9 bytes)."""
    count: PositiveInt = 1
    """Number of identical hosts."""


class PipelineConfig(Section):
    """Stages of training, and the hosts to place them on."""

    stages: Annotated[tuple[PipelineStageConfig, ...], Field(strict=False)] = ()
    """The graph; empty: the algorithm's graph."""
    hosts: Annotated[tuple[HostConfig, ...], Field(strict=False)] = ()
    """Hosts for stages; empty: plans are not checked for tags and memory."""

    def _contradictions(self) -> Iterator[Contradiction]:
        return pipeline_contradictions(self.stages)

    def of_policy(self, policy: str) -> tuple[PipelineStageConfig, ...]:
        """The stages of this policy."""
        return tuple(stage for stage in self.stages if stage.policy in (None, policy))

    @property
    def services(self) -> Iterator[tuple[int, PipelineStageConfig]]:
        """Stages that run as services, with their positions in the list."""
        return ((i, stage) for i, stage in enumerate(self.stages) if stage.is_service)
