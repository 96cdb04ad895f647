# SPDX-License-Identifier: Apache-2.0
"""The schema of stages: of the dataflow, which lease rows, and of pipelines, which read batches.

Owns which columns exist on delivery and in a batch. How stages fit together is checked in
`stage_graph`, `pipeline_checks` and `pipeline_cross_checks`."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveInt, ValidationInfo, field_validator

from penstock.config.base import COLUMN, Name, Section, check_function_name, matching
from penstock.config.builtin_stages import builtin_stage_for, check_options
from penstock.options import Contradiction, non_empty
from penstock.plugins import LOSS_GROUP, STAGE_GROUP

MAX_STAGES = 64
"""Of a pipeline, and of the dataflow beside the services of the pipeline."""
INITIAL_COLUMNS = ("turns", "reward")
"""Columns a row has when it is delivered; `reward` only while no stage writes it."""

Column = Annotated[
    str, AfterValidator(matching(COLUMN, "use up to 64 letters, digits, _ - . or @"))
]
Columns = Annotated[tuple[Column, ...], Field(strict=False), non_empty()]
Tags = Annotated[tuple[Name, ...], Field(strict=False), non_empty()]


def function_group(type: str) -> str:
    """Where installed packages offer functions for stages of this type."""
    return LOSS_GROUP if type == "train" else STAGE_GROUP


def stage_subject(name: str) -> str:
    """Whom the token of a stage is for: no other token acts for it."""
    return f"stage-{name}"


class StageConfig(Section):
    """One stage: what it reads, what it writes, and how long a row may wait for it."""

    name: Name
    """Names the consumer its workers lease rows for."""
    reads: Columns
    """Columns a row must have before the stage gets it."""
    writes: Columns
    """Columns it adds, each written once."""
    on: Literal["delivered", "admitted"] = "delivered"
    """Rows it works on: all delivered ones, or only rows of admitted groups."""
    deadline_s: float = Field(default=600.0, gt=0)
    """Seconds a row waits for its columns before they fail as overdue."""
    ttl_s: float = Field(default=12.0, gt=0)
    """Seconds a worker may hold a row without a heartbeat."""
    max_attempts: PositiveInt = 3
    """Attempts at one row before its columns fail."""
    required: bool = True
    """Trainers wait for its columns; false for a stage whose columns are for other readers."""

    @property
    def id(self) -> str:
        """Its name in the graph of stages."""
        return self.name

    @property
    def after(self) -> tuple[str, ...]:
        """Stages to wait for in addition to columns: none."""
        return ()


class ParallelConfig(Section):
    """How many ranks a stage's model is spread over."""

    dp: PositiveInt = 1
    """Data-parallel parts of each batch; parameters and optimizer state are sharded over them."""
    replicas: PositiveInt = 1
    """Copies of the sharded state: each is sharded over dp / replicas parts only, so that weights
    are gathered inside a host and only gradients cross the network. Each copy takes the memory
    of one."""
    cp: PositiveInt = 1
    """Context-parallel ranks that share the tokens of each sample: for long samples. Parameters are
    sharded over them too."""
    tp: PositiveInt = 1
    """Tensor-parallel ranks that share each layer, and the tokens between its products."""
    ep: PositiveInt = 1
    """Of the data-parallel ranks, those that share the experts of a mixture: each holds 1/ep of
    them, and tokens travel to them. Divides dp and the number of experts; without replicas, cp and
    tp."""

    @property
    def num_ranks(self) -> int:
        """Total number of ranks."""
        return self.dp * self.ranks_per_part

    @property
    def ranks_per_part(self) -> int:
        """Ranks that compute the same rows together."""
        return self.cp * self.tp

    @property
    def num_shards(self) -> int:
        """How many ways FSDP cuts what a tensor-parallel rank has of a parameter."""
        return self.dp * self.cp // self.replicas

    @property
    def text(self) -> str:
        """As in a config; what is 1 is left out, except dp."""
        sizes = {"replicas": self.replicas, "cp": self.cp, "tp": self.tp, "ep": self.ep}
        own = [f"{name}: {size}" for name, size in sizes.items() if size > 1]
        return f"{{{', '.join([f'dp: {self.dp}', *own])}}}"

    def _contradictions(self) -> Iterator[Contradiction]:
        if self.dp % self.replicas:
            yield Contradiction(
                text=f"{self.dp} data-parallel parts cannot be dealt evenly to {self.replicas} "
                f"replicas: {self.dp % self.replicas} left over; set replicas to a divisor of "
                f"{self.dp}",
                keys=(("replicas",),),
            )
        if self.dp % self.ep:
            yield Contradiction(
                text=f"ep {self.ep} does not divide dp {self.dp}; set ep to a divisor of {self.dp}",
                keys=(("ep",), ("dp",)),
            )
        for name, size in (("replicas", self.replicas), ("cp", self.cp), ("tp", self.tp)):
            if self.ep > 1 and size > 1:
                yield Contradiction(
                    text=f"ep {self.ep} with {name} {size} is not supported: tokens travel between "
                    "ranks that have whole samples, whole layers and one copy of the state; set "
                    f"{name}: 1 and raise dp",
                    keys=(("ep",), (name,)),
                )


class PipelineStageConfig(Section):
    """One stage: a function over columns of the batch, or of rows if it runs as a service."""

    id: Name
    """Names the stage in plans, messages and metrics."""
    type: Literal["infer", "compute", "train"]
    """infer runs a model or a scorer, compute a pure function over complete groups, train updates
    a model."""
    role: Name
    """Its role: actor, critic, reference, teacher, reward, advantage, or a custom one."""
    reads: Columns
    """Columns it needs: `turns`, `reward`, or columns that other stages write."""
    writes: Annotated[tuple[Column, ...], Field(strict=False)] = ()
    """Columns it adds, each once; a train stage adds none."""
    rename: Mapping[str, str] = Field(default_factory=dict[str, str])
    """Columns that fn receives under another name, like {shaped_reward: reward}."""
    after: Annotated[tuple[Name, ...], Field(strict=False)] = ()
    """Stages to wait for although no column flows from them."""
    fn: str | None = None
    """The function it runs, as module:function or as an installed package names it; null: the
    built-in for its type and role."""
    policy: Name | None = None
    """The policy whose trainer runs it; null: all policies."""
    place: Tags | None = None
    """Tags of the hosts where it runs as a separate service; null: in the trainer."""
    parallel: ParallelConfig = ParallelConfig()
    """Ranks of its model."""
    on: Literal["delivered", "admitted"] = "delivered"
    """Rows that a service works on: all delivered ones, or only rows of admitted groups."""
    options: Mapping[str, Any] = Field(default_factory=dict[str, Any], validate_default=True)
    """Keyword arguments of fn in addition to the columns."""
    model: str | None = None
    """Initial weights of its model (reference, critic, teacher), written as `init`; null: the
    policy's own. With place and role prm: the folder of `penstock prm train`; with role reward: a
    sequence classification model."""

    @field_validator("fn")
    @classmethod
    def _check_fn(cls, fn: str | None, info: ValidationInfo) -> str | None:
        return fn and check_function_name(fn, function_group(info.data.get("type", "")))

    @field_validator("options")
    @classmethod
    def _check_builtin_options(
        cls, options: Mapping[str, Any], info: ValidationInfo
    ) -> Mapping[str, Any]:
        """Check options of built-in stages; a custom function declares its own in its signature."""
        written = info.data
        if not {"type", "role", "fn"} <= written.keys():
            return options  # one of them is invalid
        builtin = builtin_stage_for(written["type"], written["role"], written["fn"])
        if builtin is not None:
            check_options(builtin, options)
        return options

    @property
    def is_service(self) -> bool:
        """Whether it is a separate service that consumes the ledger."""
        return self.place is not None

    def to_stage_config(self) -> StageConfig:
        """This service as a stage of the dataflow."""
        return StageConfig(name=self.id, reads=self.reads, writes=self.writes, on=self.on)
