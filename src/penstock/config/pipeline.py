# SPDX-License-Identifier: Apache-2.0
"""The pipeline: what a trainer does with a batch, as a graph of stages.

Owns the shape of `pipeline`. Edges follow from columns; order and placement are the planner's.
Plain data: whether a `module:function` is there and takes what the stage gives is asked by
`penstock check`."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    PositiveInt,
    ValidationInfo,
    field_validator,
    model_validator,
)

from penstock.config.base import (
    FUNCTION,
    NAME,
    Section,
    matching,
    non_empty,
    one_of,
    raise_contradictions,
)
from penstock.config.builtin_stages import builtin_stage_for, check_options
from penstock.config.pipeline_checks import pipeline_contradictions
from penstock.config.stages import Column, Columns, StageConfig

StageName = Annotated[
    str, AfterValidator(matching(NAME, "use up to 64 letters, digits, _ or -, no dots"))
]
Tag = Annotated[str, AfterValidator(matching(NAME, "a tag has up to 64 letters, digits, _ or -"))]
Tags = Annotated[tuple[Tag, ...], Field(strict=False), non_empty()]


class ParallelConfig(Section):
    """Over how many ranks a stage's model is spread."""

    dp: PositiveInt = 1
    """Data-parallel ranks; parameters and optimizer state are sharded over them."""
    tp: PositiveInt = 1
    """Tensor-parallel ranks that share each row."""

    @property
    def num_ranks(self) -> int:
        """Ranks in all."""
        return self.dp * self.tp


class HostConfig(Section):
    """Something to place stages on: one device, or one machine without any."""

    tags: Tags
    """What it can be asked by; trainers go where `train` stands."""
    memory_gb: float = Field(gt=0)
    """Memory for models, in GB (10^9 bytes)."""
    count: PositiveInt = 1
    """So many of the same kind."""


class PipelineStageConfig(Section):
    """One stage: a function over columns of the batch, or of rows when it is placed elsewhere."""

    id: StageName
    """Names the stage in plans, messages and metrics."""
    type: Annotated[Literal["infer", "compute", "train"], one_of("infer", "compute", "train")]
    """infer runs a model or a scorer, compute a pure function over whole groups, train updates a
    model."""
    role: StageName
    """Whose part it plays: actor, critic, reference, teacher, reward, advantage, or your own."""
    reads: Columns
    """Columns it needs: `turns` and `reward`, or what other stages write."""
    writes: Annotated[tuple[Column, ...], Field(strict=False)] = ()
    """Columns it adds, each once; a train stage adds none."""
    rename: Mapping[str, str] = Field(default_factory=dict[str, str])
    """Columns that fn takes under another name, like {shaped_reward: reward}."""
    after: Annotated[tuple[StageName, ...], Field(strict=False)] = ()
    """Stages to wait for although nothing flows from them."""
    fn: (
        Annotated[
            str, AfterValidator(matching(FUNCTION, "write module:function, like my_dag:shape"))
        ]
        | None
    ) = None
    """What it runs, as module:function; null: what is shipped for its type and role."""
    policy: StageName | None = None
    """Whose trainer runs it; null: every policy's."""
    place: Tags | None = None
    """Tags of the hosts where it runs as a service of its own; null: in the trainer's gang."""
    parallel: ParallelConfig = ParallelConfig()
    """Ranks of its model."""
    on: Annotated[Literal["delivered", "admitted"], one_of("delivered", "admitted")] = "delivered"
    """Rows that a service works on: all that were delivered, or only those of admitted groups."""
    options: Mapping[str, Any] = Field(default_factory=dict[str, Any], validate_default=True)
    """Keyword arguments of fn beside the columns."""
    model: str | None = None
    """Initial weights of its model (reference, critic, teacher, reward); null: the policy's."""

    @field_validator("options")
    @classmethod
    def _check_builtin_options(
        cls, options: Mapping[str, Any], info: ValidationInfo
    ) -> Mapping[str, Any]:
        """Options of what is ours; those of the user's function are in its signature."""
        written = info.data
        if not {"type", "role", "fn"} <= written.keys():
            return options  # one of them is wrong itself
        builtin = builtin_stage_for(written["type"], written["role"], written["fn"])
        if builtin is not None:
            check_options(builtin, options)
        return options

    @property
    def is_service(self) -> bool:
        """A consumer of the ledger, on hosts of its own."""
        return self.place is not None

    def to_stage_config(self) -> StageConfig:
        """What the dataflow knows of a stage that is placed elsewhere."""
        return StageConfig(name=self.id, reads=self.reads, writes=self.writes, on=self.on)


class PipelineConfig(Section):
    """Stages of training, and what there is to place them on."""

    stages: Annotated[tuple[PipelineStageConfig, ...], Field(strict=False)] = ()
    """The graph; empty: the algorithm's own."""
    hosts: Annotated[tuple[HostConfig, ...], Field(strict=False)] = ()
    """What stages are placed on; empty: no plan is refused for tags or memory."""

    @model_validator(mode="after")
    def _check_consistency(self) -> Self:
        raise_contradictions(pipeline_contradictions(self.stages))
        return self

    def of_policy(self, policy: str) -> tuple[PipelineStageConfig, ...]:
        """The stages that this policy's trainer knows of."""
        return tuple(stage for stage in self.stages if stage.policy in (None, policy))

    @property
    def services(self) -> Iterator[tuple[int, PipelineStageConfig]]:
        """Stages placed elsewhere, with where they stand in the list."""
        return ((i, stage) for i, stage in enumerate(self.stages) if stage.is_service)
