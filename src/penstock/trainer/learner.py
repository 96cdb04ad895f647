# SPDX-License-Identifier: Apache-2.0
"""The learner: parameters, optimizer, and one `step` per batch.

    batch ─► updates (minibatches × epochs, groups whole) ─► micro-batches ─► to device
          ─► forward ─► loss ─► backward ─► reduce ─► clip ─► AdamW

Owns everything a step changes, and its exact bits: the same batches in the same order give the same
parameters. Knows nothing of files, services or versions.

K = trained tokens, V = vocabulary.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.trainer.batches import Batch
from penstock.trainer.inputs import Inputs, Update, micro_batches, plan_updates
from penstock.trainer.losses import (
    LossSpec,
    behaviour_kl,
    clipped_loss,
    entropy,
    is_clipped,
    log_ratio,
    spec_log_softmax,
)


class SkipReason(StrEnum):
    NO_TOKENS = "no_tokens"
    """Not one token of this policy to train."""
    ZERO_ADVANTAGE = "zero_advantage"
    """The rewards of every group were equal, so there is nothing to compare."""
    NON_FINITE = "non_finite_gradient"
    """No update of the batch had a finite gradient."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSpec:
    """How a batch becomes optimizer updates."""

    learning_rate: float
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    minibatches: int = 1
    epochs: int = 1
    micro_batch_tokens: int = 4096
    """Most tokens, padding included, in one forward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What a step did."""

    skipped: SkipReason | None
    """Why the weights are unchanged; None when they are not."""
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Of one forward pass, by trained token."""

    logprobs_K: Tensor
    entropy_K: Tensor


class Learner:
    """Holds the model, and AdamW over its parameters."""

    def __init__(self, model: PreTrainedModel, loss: LossSpec, updates: UpdateSpec) -> None:
        self.model = model.eval()  # dropout would move the ratio away from 1 on unchanged weights
        self._loss = loss
        self._updates = updates
        self._parameters = dict(model.named_parameters())
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(),
            lr=updates.learning_rate,
            betas=(0.9, 0.999),
            eps=1e-8,
            weight_decay=updates.weight_decay,
            fused=True,
        )

    @property
    def vocab_size(self) -> int:
        embeddings = self.model.get_input_embeddings()
        assert isinstance(embeddings, torch.nn.Embedding)
        return embeddings.num_embeddings

    def step(self, batch: Batch) -> Stats:
        """Train on one batch."""
        started = time.perf_counter()
        plan = plan_updates(batch, self._updates.minibatches) * self._updates.epochs
        done = [self._update(update, batch) for update in plan]
        applied = [(sums, norm) for sums, norm in done if math.isfinite(norm)]
        values = _describe(batch) | _averages([sums for sums, _ in applied])
        values["grad_norm"] = math.fsum(norm for _, norm in applied) / max(len(applied), 1)
        values["updates"] = float(len(applied))
        values["updates/non_finite"] = float(len(done) - len(applied))
        values["seconds/train"] = time.perf_counter() - started
        return Stats(skipped=None if applied else _reason(batch, plan), values=values)

    def _update(self, update: Update, batch: Batch) -> tuple[Tensor, float]:
        """One optimizer call, or none when the gradient is not finite."""
        tallies: list[Tensor] = []
        for inputs in micro_batches(update, batch, self._updates.micro_batch_tokens):
            inputs = inputs.to(self.model.device)
            outputs = forward(self.model, inputs)
            loss, tally = sum_loss(outputs, inputs, self._loss)
            (loss / update.num_trained).backward()
            tallies.append(tally)
        sums = reduce_tallies(tallies)
        norm = clip(self._parameters.values(), self._updates.max_grad_norm)
        if math.isfinite(norm):
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return sums, norm

    def state_tensors(self) -> dict[str, Tensor]:
        """What the next step depends on besides the weights: AdamW's state, random generator."""
        state = self._optimizer.state
        tensors = {
            f"{name}.{key}": value
            for name, parameter in self._parameters.items()
            for key, value in state.get(parameter, {}).items()
        }
        return tensors | {_RANDOM: torch.get_rng_state()}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on bit for bit, given the same weights."""
        by_parameter: dict[int, dict[str, Tensor]] = {}
        for index, name in enumerate(self._parameters):
            keys = ("step", "exp_avg", "exp_avg_sq")
            if f"{name}.step" in tensors:
                by_parameter[index] = {key: tensors[f"{name}.{key}"] for key in keys}
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": by_parameter, "param_groups": groups})
        torch.set_rng_state(tensors[_RANDOM])


_RANDOM = "random_generator"


def forward(model: PreTrainedModel, inputs: Inputs) -> Outputs:
    """The recorded tokens' log-probs under their own specs.

    No attention mask: padding stands on the right, and a causal model never looks there.
    """
    logits = model(
        input_ids=inputs.ids_UL, use_cache=False, logits_to_keep=inputs.positions_C
    ).logits
    logits_KV = logits.flatten(0, 1)[inputs.picked_K]
    logprobs_KV = spec_log_softmax(logits_KV, inputs.targets_K, inputs.temperature_K, inputs.kept)
    return Outputs(
        logprobs_K=logprobs_KV.gather(1, inputs.targets_K[:, None]).squeeze(1),
        entropy_K=entropy(logprobs_KV),
    )


_TALLY = ("loss", "entropy", "clip_ratio/low", "clip_ratio/high", "kl", "mismatch")


def sum_loss(outputs: Outputs, inputs: Inputs, spec: LossSpec) -> tuple[Tensor, Tensor]:
    """The loss summed over tokens, and the sums that statistics are made of."""
    log_ratio_K = log_ratio(outputs.logprobs_K, inputs.logprobs_K)
    advantages_K = inputs.advantages_K.to(log_ratio_K.dtype)
    loss = clipped_loss(log_ratio_K, advantages_K, spec).sum()
    loss = loss - spec.entropy_coef * outputs.entropy_K.sum()
    with torch.no_grad():
        low_K, high_K = is_clipped(log_ratio_K, advantages_K, spec)
        sums = [
            loss,
            outputs.entropy_K.sum(),
            low_K.sum(),
            high_K.sum(),
            behaviour_kl(log_ratio_K).sum(),
            (log_ratio_K.abs() * inputs.is_fresh_K).sum(),
            inputs.is_fresh_K.sum(),
            torch.tensor(log_ratio_K.numel()),
        ]
        return loss, torch.stack([value.double() for value in sums])


def reduce_tallies(tallies: Sequence[Tensor]) -> Tensor:
    """Sums over micro-batches (and, in a gang, over ranks: the one place where they meet)."""
    return torch.stack(list(tallies)).sum(dim=0)


def clip(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> float:
    """Scale the gradient down to the norm allowed; returns the norm it had."""
    return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))


def _averages(tallies: Sequence[Tensor]) -> dict[str, float]:
    """Means over the trained tokens of all updates.

    `mismatch` is over those tokens of the first update that the version trained from has sampled:
    there alone trainer and engine hold the same weights.
    """
    if not tallies:
        return {}
    *sums, _, num_tokens = reduce_tallies(tallies).tolist()
    values = {name: value / num_tokens for name, value in zip(_TALLY, sums, strict=True)}
    values["clip_ratio"] = values["clip_ratio/low"] + values["clip_ratio/high"]
    *_, mismatch, num_fresh, _ = tallies[0].tolist()
    values["mismatch"] = mismatch / num_fresh if num_fresh else math.nan
    return {name: value for name, value in values.items() if not math.isnan(value)}


def _describe(batch: Batch) -> dict[str, float]:
    num_rows = max(batch.rewards_R.size, 1)
    values = {
        "reward/mean": float(batch.rewards_R.sum()) / num_rows,
        "completions/mean_length": batch.samples.num_trained / num_rows,
        "tokens/trained": float(batch.samples.num_trained),
        "advantage/zero_share": float((batch.advantages_R == 0).sum()) / num_rows,
    }
    if batch.staleness_R.size:
        values["staleness/mean"] = float(batch.staleness_R.mean())
        values["staleness/max"] = float(batch.staleness_R.max())
    return values


def _reason(batch: Batch, plan: Sequence[Update]) -> SkipReason:
    if plan:
        return SkipReason.NON_FINITE
    return SkipReason.ZERO_ADVANTAGE if batch.samples.num_trained else SkipReason.NO_TOKENS
