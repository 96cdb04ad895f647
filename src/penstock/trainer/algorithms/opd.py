# SPDX-License-Identifier: Apache-2.0
"""On-policy distillation: a teacher gives the credit, no reward is needed."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from penstock.config.algorithms import (
    CLIPPED_LOSS_KEYS,
    Algorithm,
    StageEntry,
    advantage_entry,
    stage_entry,
    train_entry,
)
from penstock.trainer.losses.clipped import clipped_loss
from penstock.trainer.losses.ratios import log_ratio
from penstock.trainer.losses.tokens import Objective, TokenLoss, Tokens

if TYPE_CHECKING:
    from penstock.config import AlgorithmConfig

TEACHER = "teacher_logprobs"


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationLoss:
    """The advantage of a token is how much likelier the teacher finds it than the policy does now,
    so the policy loss descends the reverse KL to the teacher. Advantages of the batch are ignored.

    K = trained tokens of a micro-batch."""

    inner: Objective
    """Takes the advantages: its ratio corrects for tokens sampled by older weights."""

    def __call__(self, tokens: Tokens) -> TokenLoss:
        teacher_K = (tokens.extra_columns or {}).get(TEACHER)
        if teacher_K is None:
            raise ValueError(
                f"distillation reads the token column {TEACHER}, and no stage has written it; "
                "add an infer stage of the teacher before this one"
            )
        gap_K = log_ratio(tokens.logprobs_K.detach(), teacher_K)
        out = self.inner(replace(tokens, advantages_K=-gap_K))
        return TokenLoss(loss_K=out.loss_K, metrics={**out.metrics, "teacher_kl": gap_K})


def _loss(config: AlgorithmConfig) -> DistillationLoss:
    return DistillationLoss(inner=clipped_loss(config))


def _stages(config: AlgorithmConfig, max_tokens: int) -> list[StageEntry]:
    return [
        stage_entry("teacher", "infer", "teacher", ["turns"], [TEACHER], model=config.teacher),
        advantage_entry("no_advantage", reads="turns"),
        train_entry(TEACHER),
    ]


ALGORITHM = Algorithm(
    loss=_loss,
    stages=_stages,
    keys=CLIPPED_LOSS_KEYS | {"teacher"},
    required=("teacher",),
    is_group_relative=False,
    needs_advantage=False,
    loss_reads=(TEACHER,),
)
