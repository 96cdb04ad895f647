# SPDX-License-Identifier: Apache-2.0
"""Builds a policy's learners, frozen models and pipeline from a run's settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedModel

from penstock.config import PolicyConfig, RunConfig
from penstock.config.pipeline import PipelineStageConfig
from penstock.config.stages import ParallelConfig
from penstock.config.trainer import Recompute, TrainingConfig
from penstock.errors import ConfigError
from penstock.trainer.actor import Actor
from penstock.trainer.advantages.gae import ValueLoss
from penstock.trainer.batches import Batch
from penstock.trainer.build_objective import (
    NO_BOUNDS,
    bounds_of,
    correction_of,
    loss_weights_of,
    objective_of,
)
from penstock.trainer.compute import ComputeSpec
from penstock.trainer.critic import Critic
from penstock.trainer.device import CPU
from penstock.trainer.forward_pass import ForwardPass
from penstock.trainer.learner import Learner, Optimizer, Stats
from penstock.trainer.lora import adapter_disabled, attach_adapter
from penstock.trainer.losses.tokens import Objective
from penstock.trainer.model_folders import has_adapter, initial_folder, load_model
from penstock.trainer.models import Models, StreamSpec
from penstock.trainer.packing_check import require_packable
from penstock.trainer.pass_cost import TYPICAL, PassCost
from penstock.trainer.pipeline.builtin import chain_of
from penstock.trainer.pipeline.functions import find_function
from penstock.trainer.pipeline.memory_estimate import shape_of
from penstock.trainer.pipeline.run import ACTOR, Call, Pipeline, PlannedStage, bind, keep_rows
from penstock.trainer.ranks.batch_repartition import repartition_batch
from penstock.trainer.ranks.group import Ranks, SingleRank, StagedRanks
from penstock.trainer.ranks.sharding import shard
from penstock.trainer.ranks.weight_loading import (
    load_meta_model,
    load_weight_slices,
    make_meta_model,
)
from penstock.trainer.router_replay import RouterReplay, expert_shape
from penstock.trainer.samples import ExpertShape
from penstock.trainer.schedules import Schedule, Shape
from penstock.trainer.signals.alarms import EXCLUDED
from penstock.trainer.updates import UpdateSpec
from penstock.trainer.vocabulary_check import vocabulary_mismatches

CRITIC = "critic"
CRITIC_RATE = 5.0
"""A critic's learning rate over its actor's, unless its stage sets the option learning_rate."""
S = TypeVar("S", Actor, Critic)
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_models(
    config: RunConfig,
    policy: str,
    folder: Path,
    ranks: Ranks | None = None,
    device: torch.device = CPU,
    on_micro_batch: Callable[[], None] = lambda: None,
) -> Models:
    """One policy's learners, the actor with the weights of this folder, and their pipeline.

    on_micro_batch: called after each forward pass of a step."""
    settings = config.for_policy(policy)
    chain = chain_of(config, policy)
    if found := list(vocabulary_mismatches(chain.stages, str(folder))):
        raise ConfigError("; ".join(found))
    builder = _Builder(settings, config.seed, ranks or SingleRank(), device, on_micro_batch)
    learners = builder.learners(folder, chain.stages)
    actor = learners.get(ACTOR)
    return Models(
        learners,
        Pipeline(builder.bind_stages(chain.stages, learners)),
        ranks,
        vocab_size=actor.vocab_size if actor else _vocab_size(folder),
        experts=builder.replayed_experts(folder),
        minibatches=settings.training.minibatches,
        cost=TYPICAL if (shape := shape_of(str(folder))) is None else PassCost.of(shape),
        stream=_stream_spec(settings, builder, chain.stages, learners),
    )


def _stream_spec(
    settings: PolicyConfig,
    builder: _Builder,
    stages: tuple[PipelineStageConfig, ...],
    learners: dict[str, Learner],
) -> StreamSpec | None:
    if not settings.training.stream:
        return None
    before = tuple(stage for stage in stages if stage.type != "train")
    return StreamSpec(
        columns=Pipeline(builder.bind_stages(before, learners)),
        num_sequences=settings.training.groups_per_batch * settings.algorithm.num_generations,
    )


def load_policy(settings: PolicyConfig, folder: Path, *, is_rank0: bool = True) -> PreTrainedModel:
    """The model that makes versions, with its adapter if it trains one.

    is_rank0: the other ranks get a meta model."""
    lora = settings.model.lora
    if has_adapter(folder) is (lora is None):
        trained, held = ("all weights", "an") if lora is None else ("an adapter", "no")
        raise ConfigError(
            f"policy {settings.name} trains {trained}, and {folder} holds {held} adapter; set lora "
            "as it was when that was written, or start from another folder"
        )
    model = _load(folder, is_rank0)
    if lora is not None:
        attach_adapter(model, folder, lora)
    return model


def _load(folder: Path, is_rank0: bool, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The full model on rank 0, which also checks that it can be packed. dtype: that its weights
    are kept in; float32 if they are trained."""
    if not is_rank0:
        return load_meta_model(folder, dtype)
    model = load_model(folder, dtype)
    require_packable(model)
    return model


def compute_spec(training: TrainingConfig, device: torch.device) -> ComputeSpec:
    """How the models of a trainer on this device compute."""
    default: Recompute = "none" if device.type == "cpu" else "layer"
    return ComputeSpec(
        precision=PRECISIONS[training.precision], recompute=training.recompute or default
    )


def parallel_layouts(stages: Sequence[PipelineStageConfig]) -> list[ParallelConfig]:
    """How the models of these stages are sharded, in the order in which they run."""
    return [stage.parallel for stage in stages if _has_model(stage)]


def _has_model(stage: PipelineStageConfig) -> bool:
    return stage.type == "train" or (stage.type == "infer" and stage.fn is None)


def _vocab_size(folder: Path) -> int:
    """Of a model that this rank holds no shard of."""
    config: Any = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return config.get_text_config().vocab_size


def _stage(
    stages: tuple[PipelineStageConfig, ...], type: str, role: str
) -> PipelineStageConfig | None:
    return next((stage for stage in stages if (stage.type, stage.role) == (type, role)), None)


class _Builder:
    """Makes the models of one policy."""

    def __init__(
        self,
        settings: PolicyConfig,
        seed: int,
        ranks: Ranks,
        device: torch.device,
        on_micro_batch: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._on_micro_batch = on_micro_batch
        self._seed = seed
        self._ranks = ranks
        self._device = device
        self._compute = compute_spec(settings.training, device)

    def learners(self, folder: Path, stages: tuple[PipelineStageConfig, ...]) -> dict[str, Learner]:
        """The learners that this rank holds a shard of, the actor first."""
        found: dict[str, Learner] = {}
        actor, critic = (_stage(stages, "train", role) for role in (ACTOR, CRITIC))
        if (ranks := self._ranks_of(actor)) is not None:
            found[ACTOR] = self._actor(folder, actor, ranks)
        if critic and (ranks := self._ranks_of(critic)) is not None:
            found[CRITIC] = self._critic(critic, ranks)
        return found

    def bind_stages(
        self, stages: tuple[PipelineStageConfig, ...], learners: dict[str, Learner]
    ) -> list[PlannedStage]:
        """Bind every stage, with a repartition before it if its rows are on other ranks. Functions
        of columns use rows where they are."""
        if not isinstance(self._ranks, StagedRanks):
            total = self._ranks.sum_over_ranks
            return [bind(one, self._call(one, learners), sum_over_ranks=total) for one in stages]
        found: list[PlannedStage] = []
        here = self._ranks.position.parallel
        for stage in stages:
            there = stage.parallel if _has_model(stage) else here
            minibatches = self._settings.training.minibatches
            way = partial(repartition_batch, before=here, after=there, minibatches=minibatches)
            found.append(
                bind(
                    stage,
                    self._call(stage, learners),
                    sum_over_ranks=self._ranks.at_stage(there).sum_over_ranks,
                    move_rows=keep_rows if there == here else way,
                )
            )
            here = there
        return found

    def _ranks_of(self, stage: PipelineStageConfig | None) -> Ranks | None:
        """The ranks that its model is sharded over; None if this rank is idle there."""
        if stage is None or not isinstance(self._ranks, StagedRanks):
            return self._ranks
        return self._ranks.groups[stage.parallel]

    def replayed_experts(self, folder: Path) -> ExpertShape | None:
        """What the actor chooses for a token, also on a rank that holds no shard of it; None if
        choices are not replayed."""
        if not self._settings.training.router_replay:
            return None
        return expert_shape(make_meta_model(folder))

    def _forward_pass(self, ranks: Ranks) -> ForwardPass:
        tokens = self._settings.training.micro_batch_tokens
        return ForwardPass(
            ranks=ranks, micro_batch_tokens=tokens, on_micro_batch=self._on_micro_batch
        )

    def _actor(self, folder: Path, stage: PipelineStageConfig | None, ranks: Ranks) -> Learner:
        algorithm = self._settings.algorithm
        own = stage and _own_objective(stage)
        model = load_policy(self._settings, folder, is_rank0=self._ranks.position.is_rank0)
        replay = RouterReplay(model) if self._settings.training.router_replay else None
        if replay is not None and ranks.position.parallel.ranks_per_part > 1:
            raise ConfigError(
                f"router_replay with parallel {ranks.position.parallel.text}, whose ranks share "
                "the tokens of a sample, is not supported; set cp and tp to 1 and raise dp"
            )
        actor = Actor(model, learns_entropy=algorithm.entropy_coef > 0, replay=replay)
        return Learner(
            self._shard(actor, folder, ranks),
            own or objective_of(algorithm),
            self._optimizer(self._settings.training.learning_rate),
            update_spec=UpdateSpec(
                minibatches=self._settings.training.minibatches,
                weights=loss_weights_of(algorithm, self._settings.sampling.max_tokens),
                correction=None if own else correction_of(algorithm),
                needs_advantage=algorithm.declaration.needs_advantage,
            ),
            forward_pass=self._forward_pass(ranks),
            bounds=NO_BOUNDS if own else bounds_of(algorithm),
        )

    def _critic(self, stage: PipelineStageConfig, ranks: Ranks) -> Learner:
        rate = stage.options.get("learning_rate")
        if rate is None:
            rate = CRITIC_RATE * self._settings.training.learning_rate
        return Learner(
            self._initial(stage, ranks, Critic),
            _own_objective(stage) or ValueLoss(),
            self._optimizer(float(rate)),
            update_spec=UpdateSpec(
                minibatches=self._settings.training.minibatches, needs_advantage=False
            ),
            forward_pass=self._forward_pass(ranks),
        )

    def _call(self, stage: PipelineStageConfig, learners: dict[str, Learner]) -> Call | None:
        """The callable that runs the stage's model; None if the stage is a function of columns."""
        if not _has_model(stage):
            return None
        if (ranks := self._ranks_of(stage)) is None:
            return partial(_idle_result, stage)
        if stage.type == "train":
            return partial(_train, _learner_for(stage, learners))
        [column] = stage.writes
        if stage.role == CRITIC or stage.role in learners:
            return partial(_infer, column, _learner_for(stage, learners).infer)
        if self._settings.model.lora is not None and stage.model is None:
            return partial(_infer, column, partial(_infer_without_adapter, learners[ACTOR]))
        frozen = self._initial(stage, ranks, _frozen, dtype=self._compute.precision)
        return partial(_infer, column, partial(self._forward_pass(ranks).infer, frozen))

    def _initial(
        self,
        stage: PipelineStageConfig,
        ranks: Ranks,
        make: Callable[..., S],
        dtype: torch.dtype = torch.float32,
    ) -> S:
        """The model that the stage names, or the one its policy started from."""
        init = stage.model or self._settings.model.init
        with initial_folder(init, self._seed) as folder:
            scorer = make(_load(folder, self._ranks.position.is_rank0, dtype))
            return self._shard(scorer, folder, ranks)

    def _shard(self, scorer: S, folder: Path, ranks: Ranks) -> S:
        """Shard it; ranks other than 0 read their shards from the folder."""
        shard(scorer, scorer.model, ranks, self._device, self._compute)
        load_weight_slices(scorer, scorer.model, folder, ranks, self._device)
        return scorer

    def _optimizer(self, rate: float) -> Optimizer:
        training = self._settings.training
        return Optimizer(
            schedule=Schedule(
                peak=rate,
                shape=Shape(training.lr_scheduler_type),
                warmup_steps=training.warmup_steps,
                num_steps=training.steps,
            ),
            weight_decay=training.weight_decay,
            max_grad_norm=training.max_grad_norm,
            epochs=training.epochs,
            is_offloaded=training.offload == "optimizer",
        )


def _learner_for(stage: PipelineStageConfig, learners: dict[str, Learner]) -> Learner:
    if stage.role not in learners:
        raise ConfigError(
            f"stage {stage.id} needs the {stage.role}, and this trainer trains only "
            f"{' and '.join(learners)}; add a stage with type: train and role: {stage.role}"
        )
    return learners[stage.role]


def _frozen(model: PreTrainedModel) -> Actor:
    return Actor(model).requires_grad_(False)


def _idle_result(stage: PipelineStageConfig, batch: Batch) -> Stats | dict[str, Any]:
    """Result of an idle rank: empty stats, or zero columns."""
    if stage.type == "train":
        return Stats(skipped=None, values={})
    return {column: np.zeros(batch.samples.ids_T.shape) for column in stage.writes}


def _train(learner: Learner, batch: Batch) -> Stats:
    excluded_R = batch.row_columns.get("excluded")
    if excluded_R is None:
        return learner.step(batch)
    stats = learner.step(batch.without(excluded_R > 0))
    return replace(stats, values={**stats.values, EXCLUDED: float((excluded_R > 0).sum())})


def _infer(column: str, infer: Callable[[Batch], Any], batch: Batch) -> dict[str, Any]:
    return {column: infer(batch)}


def _infer_without_adapter(actor: Learner, batch: Batch) -> Any:
    """Output of the actor's model without its adapter: the initial policy, kept in memory only
    once."""
    with adapter_disabled(actor.model):
        return actor.infer(batch)


def _own_objective(stage: PipelineStageConfig) -> Objective | None:
    """A custom loss."""
    if stage.fn is None:
        return None
    function = find_function(stage)
    return partial(function, **stage.options) if function else None
