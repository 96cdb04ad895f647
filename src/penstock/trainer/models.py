# SPDX-License-Identifier: Apache-2.0
"""All models that one trainer trains, and its chain of stages.

Owns the models that change: the actor, whose training makes versions, and others trained with it (a
critic). Together they are one step for the loop, and one state for the checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.trainer.batches import Batch, assemble
from penstock.trainer.file_tensors import FileTensor, file_tensors
from penstock.trainer.learner import Learner, SkipReason, Stats
from penstock.trainer.lora import adapter_tensors
from penstock.trainer.pass_cost import TYPICAL, PassCost
from penstock.trainer.pipeline.run import ACTOR, Pipeline
from penstock.trainer.ranks.group import Ranks, SingleRank
from penstock.trainer.ranks.regions import Weights
from penstock.trainer.ranks.sharding import gather
from penstock.trainer.samples import ExpertShape
from penstock.trainer.snapshots import weights_of
from penstock.trainer.state_shards import ShardedState, with_prefix
from penstock.trainer.streaming import StreamedStep
from penstock.types import Manifest, PolicyName, RowPayload


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSpec:
    """How a step is streamed."""

    columns: Pipeline
    """The stages before the training, each of which needs one group at a time."""
    num_sequences: int
    """Expected of a complete batch."""


class Models:
    """One trainer's learners by role, bound into its pipeline."""

    def __init__(
        self,
        learners: Mapping[str, Learner],
        pipeline: Pipeline,
        ranks: Ranks | None = None,
        *,
        vocab_size: int,
        minibatches: int,
        cost: PassCost = TYPICAL,
        stream: StreamSpec | None = None,
        experts: ExpertShape | None = None,
    ) -> None:
        """learners: the models that this rank holds a shard of; rank 0 holds a shard of each.
        vocab_size: the actor's. minibatches: updates that a batch is cut into. cost: of the actor's
        passes. stream: how a step begins before its batch is complete; None if it does not.
        experts: of the actor, if it replays recorded choices."""
        self._ranks = ranks or SingleRank()
        self._actor = learners.get(ACTOR)
        self._others = {role: found for role, found in learners.items() if role != ACTOR}
        self._pipeline = pipeline
        self.vocab_size = vocab_size
        self._experts = experts
        self.minibatches = minibatches
        self.cost = cost
        self._stream = stream

    @property
    def model(self) -> PreTrainedModel:
        """The one whose versions are published."""
        assert self._actor is not None, "called only on ranks that hold a shard of it"
        return self._actor.model

    def assemble(self, manifest: Manifest, rows: Sequence[RowPayload], policy: PolicyName) -> Batch:
        """The batch of a manifest for the actor, from its rows as received."""
        return assemble(
            manifest,
            rows,
            policy,
            self.vocab_size,
            ranks=self._ranks,
            cost=self.cost,
            experts=self._experts,
        )

    def step(self, batch: Batch) -> Stats:
        """Train on one batch, through all stages; an empty one, whose groups were all lost, is
        skipped before any stage."""
        if self._stream is not None:
            step = self.begin_step()
            step.add(batch)
            return step.finish()
        if not batch.groups_R.size:
            values = {"tokens/trained": 0.0, "seconds/train": 0.0}
            return Stats(skipped=SkipReason.NO_TOKENS, values=values)
        return self._pipeline.run(batch)

    @property
    def is_streamed(self) -> bool:
        return self._stream is not None

    def begin_step(self) -> StreamedStep:
        """A step whose batch comes in instalments; the same bits as `step` of the complete one."""
        assert self._stream is not None, "called only where `is_streamed`"
        assert self._actor is not None, "a streamed trainer has one rank"
        return StreamedStep(
            self._actor, self._stream.columns, num_sequences=self._stream.num_sequences
        )

    @torch.no_grad()
    def weights(self) -> Weights:
        """The actor's tensors that change, by the names in its files: all, or the adapter's. With
        several ranks, what this rank holds of them, without communication.

        Of a model whose files hold tensors that are computed from the model's, all ranks call it
        together and rank 0 gets them complete."""
        if self._actor is None:
            return {}
        if adapter := adapter_tensors(self.model):
            return adapter
        if self._file_tensors is None:
            return self.gather_weights()
        state = self.model.state_dict(keep_vars=True)
        return {name: one.part_of(state[one.source]) for name, one in self._file_tensors.items()}

    def gather_weights(self) -> dict[str, Tensor]:
        """The same, complete and in rank 0's memory; all ranks call it together."""
        if self._actor is None:
            return {}
        if adapter := adapter_tensors(self.model):
            return gather(adapter, self._ranks)
        gathered = gather(self.model.state_dict(keep_vars=True), self._ranks)
        return weights_of(self.model, gathered) if gathered else {}

    @cached_property
    def _file_tensors(self) -> dict[str, FileTensor] | None:
        return file_tensors(self.model)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Of the actor's parameters that change, as this rank holds them."""
        changing = adapter_tensors(self.model).values() or self.model.parameters()
        return {parameter.dtype for parameter in changing}

    def state_tensors(self) -> dict[str, Tensor]:
        """What the next step depends on in addition to the actor's weights; with several ranks,
        this rank's shard, without communication."""
        tensors = self._actor.state_tensors() if self._actor else {}
        for role, learner in self._others.items():
            own = {**learner.weight_tensors(), **learner.state_tensors()}
            tensors |= {f"{role}/{name}": value for name, value in own.items()}
        return tensors

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Continue bit for bit, given the same weights of the actor; from files, each rank reads
        only its shard. A learner that is not in them starts fresh."""
        if isinstance(tensors, ShardedState):
            tensors = tensors.for_rank(self._ranks.position.rank)
        for role, learner in self._others.items():
            if own := with_prefix(tensors, f"{role}/"):
                learner.restore(own, with_weights=True)
        if self._actor is not None:
            self._actor.restore(tensors)
