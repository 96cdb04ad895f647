# SPDX-License-Identifier: Apache-2.0
"""The learner: parameters, optimizer, and one `step` per batch.

    batch ─► updates (minibatches × epochs, groups kept together) ─► micro-batches ─► to device
          ─► forward ─► loss ─► backward ─► reduce ─► clip ─► AdamW

Owns everything a step changes, and its exact bits: the same batches in the same order give the same
parameters. Does not know files, services or versions.

K = trained tokens, T = tokens of all samples.
"""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
import structlog
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.errors import ConfigError
from penstock.trainer.arrays import Bools, Floats
from penstock.trainer.attention import vocab_size
from penstock.trainer.batches import Batch
from penstock.trainer.forward_pass import ForwardPass, Scorer
from penstock.trainer.host_moments import MOMENTS, HostMoments
from penstock.trainer.inputs import Inputs, advantages_of
from penstock.trainer.losses.ratios import k3, log_ratio
from penstock.trainer.losses.tokens import BudgetedObjective, Objective, TokenLoss, Tokens
from penstock.trainer.ranks.group import RankReductions
from penstock.trainer.ranks.sharding import clip
from penstock.trainer.schedules import Schedule
from penstock.trainer.signals.first_update import first_update_stats
from penstock.trainer.signals.mismatch import Key, Mismatch
from penstock.trainer.state_shards import load_shard
from penstock.trainer.updates import Update, UpdateSpec, plan_groups, plan_updates

MetricSums = dict[str, Tensor]
"""Sums over trained tokens, by metric."""


class SkipReason(StrEnum):
    NO_TOKENS = "no_tokens"
    """The batch has no trained token of this policy."""
    ZERO_ADVANTAGE = "zero_advantage"
    """The rewards of every group were equal, so there are no advantages."""
    REJECTED = "rejected"
    """The mismatch correction rejected every token: the engine's log-probs are too far from the
    trainer's."""
    NON_FINITE = "non_finite_gradient"
    """No update of the batch had a finite gradient."""


NON_FINITE_GAP = 20.0
"""Log-ratio that a token without a finite loss counts for, against the node that sent it."""
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """AdamW, and the number of passes over a batch."""

    schedule: Schedule
    weight_decay: float = 0.01
    max_grad_norm: float = 1.0
    epochs: int = 1
    is_offloaded: bool = False
    """Whether its moments are in host memory between updates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The result of a step."""

    skipped: SkipReason | None
    """Why the weights are unchanged; None if they changed."""
    values: Mapping[str, float]
    mismatches: Mapping[Key, Mismatch] = field(default_factory=dict[Key, Mismatch])
    """Between the rows of each subject and this trainer, by staleness, on the tokens of the first
    update."""
    other_models_updated: bool = False
    """Whether another model than the actor's changed: a critic learns from equal rewards too."""


class Learner:
    """Holds a model, and AdamW over its parameters."""

    def __init__(
        self,
        scorer: Scorer,
        objective: Objective | BudgetedObjective,
        optimizer: Optimizer,
        *,
        update_spec: UpdateSpec,
        forward_pass: ForwardPass,
        bounds: tuple[float, float] | None = None,
    ) -> None:
        """bounds: how far below and above 1 a ratio may be; None for a model without ratios."""
        self._bounds = bounds
        self._scorer = scorer
        self._objective = objective
        self._spec = optimizer
        self._update_spec = update_spec
        self._forward_pass = forward_pass
        self._parameters = {name: p for name, p in scorer.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(
            decay_groups(self._parameters.values(), optimizer.weight_decay),
            lr=optimizer.schedule.peak,
            betas=(0.9, 0.999),
            eps=1e-8,
            fused=True,
        )
        self._host_moments = HostMoments(self._optimizer) if optimizer.is_offloaded else None

    @property
    def model(self) -> PreTrainedModel:
        return self._scorer.model

    @property
    def vocab_size(self) -> int:
        return vocab_size(self.model)

    def step(self, batch: Batch) -> Stats:
        """Train on one batch."""
        started = time.perf_counter()
        rate, ranks = self._set_rate(batch.trains_from), self._forward_pass.ranks
        plan = plan_updates(batch, self._update_spec, ranks) * self._spec.epochs
        seen_2T = not_seen(batch)
        done = [
            self._update(update, batch, seen_2T if index == 0 else None)
            for index, update in enumerate(plan)
        ]
        stats = self._describe_step(batch, plan, done, seen_2T)
        seconds = time.perf_counter() - started
        values = {**stats.values, "learning_rate": rate, "seconds/train": seconds}
        return replace(stats, values=values)

    def accumulate(
        self, part: Batch, seen_2T: Floats, num_sequences: int
    ) -> tuple[list[MetricSums], Bools]:
        """Add the gradient of these groups, one after another, to the gradient of a step in
        progress: (sums of the metrics by group, which tokens have a loss that is not finite).
        `num_sequences`: expected of the complete batch."""
        is_bad_T = np.zeros(part.samples.ids_T.shape, np.bool_)
        tallies: list[MetricSums] = []
        for share in plan_groups(part, self._update_spec, num_sequences):
            sums, is_bad_in_share_T = self._backward(share, part, seen_2T)
            tallies.append(sums)
            is_bad_T |= is_bad_in_share_T
        return tallies, is_bad_T

    def complete(
        self,
        batch: Batch,
        tallies: Sequence[MetricSums],
        is_bad_T: Bools,
        seen_2T: Floats,
        num_sequences: int,
    ) -> Stats:
        """End a step whose groups were all accumulated: the denominator as it came out, then one
        update; none if it has no learning signal."""
        rate, ranks = self._set_rate(batch.trains_from), self._forward_pass.ranks
        weights, plan = self._update_spec.weights, plan_updates(batch, self._update_spec, ranks)
        done: list[tuple[MetricSums, float]] = []
        for update in plan:
            factor = weights.rescale(weights.expected_counts(num_sequences), update.counts)
            sums = add_sums(tallies)
            if factor != 1.0:
                sums["loss"] = sums["loss"] * factor
                for parameter in self._parameters.values():
                    if parameter.grad is not None:
                        parameter.grad.mul_(factor)
            done.append(self._apply(update, batch, seen_2T, sums, is_bad_T))
        self.discard()
        stats = self._describe_step(batch, plan, done, seen_2T)
        return replace(stats, values={**stats.values, "learning_rate": rate})

    def discard(self) -> None:
        """Forget the gradient that was accumulated."""
        self._optimizer.zero_grad(set_to_none=True)

    def _describe_step(
        self,
        batch: Batch,
        plan: Sequence[Update],
        done: Sequence[tuple[MetricSums, float]],
        seen_2T: Floats,
    ) -> Stats:
        """Statistics of a step, given the metrics and gradient norm of each update."""
        ranks = self._forward_pass.ranks
        sums = reduce_sums([sums for sums, _ in done], ranks)
        norms = [norm for _, norm in done if math.isfinite(norm)]
        applied = [one for one, (_, norm) in zip(sums, done, strict=True) if math.isfinite(norm)]
        values = _describe(batch, ranks) | _averages(applied)
        values["grad_norm"] = math.fsum(norms) / max(len(norms), 1)
        values["updates"] = float(len(applied))
        values["updates/non_finite"] = float(len(done) - len(applied))
        peak_mb = peak_memory_mb(self.model.device)
        values["memory/peak_mb"] = float(ranks.max_over_ranks(math.ceil(peak_mb)))
        signals, mismatches = dict[str, float](), dict[Key, Mismatch]()
        if self._bounds is not None:
            signals, mismatches = first_update_stats(
                batch, seen_2T[0], seen_2T[1], self._bounds, ranks
            )
        skipped = None if applied else self._reason(values, plan)
        return Stats(skipped=skipped, values={**values, **signals}, mismatches=mismatches)

    def infer(self, batch: Batch) -> Floats:
        """The model's current output for each trained token, by token of the batch."""
        return self._forward_pass.infer(self._scorer, batch)

    def _reason(self, values: Mapping[str, float], plan: Sequence[Update]) -> SkipReason:
        if plan:
            return SkipReason.NON_FINITE
        if not values["tokens/trained"]:
            return SkipReason.NO_TOKENS
        has_credit = not self._update_spec.needs_advantage or values["advantage/zero_share"] < 1
        return SkipReason.REJECTED if has_credit else SkipReason.ZERO_ADVANTAGE

    def _set_rate(self, number: int) -> float:
        rate = self._spec.schedule.rate(number)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _update(
        self, update: Update, batch: Batch, seen_2T: Floats | None
    ) -> tuple[MetricSums, float]:
        """One optimizer call."""
        sums, is_bad_T = self._backward(update, batch, seen_2T)
        return self._apply(update, batch, seen_2T, sums, is_bad_T)

    def _apply(
        self,
        update: Update,
        batch: Batch,
        seen_2T: Floats | None,
        sums: MetricSums,
        is_bad_T: Bools,
    ) -> tuple[MetricSums, float]:
        """The optimizer call of an update whose gradient is accumulated; none if that is not
        finite. If it is not because of the loss of some rows, those are left out, and count against
        their nodes."""
        while True:
            norm = clip(self._parameters.values(), self._spec.max_grad_norm)
            if math.isfinite(norm):
                (self._host_moments or self._optimizer).step()
            self._optimizer.zero_grad(set_to_none=True)
            smaller = None if math.isfinite(norm) else self._without_bad(update, batch, is_bad_T)
            if smaller is None:
                return sums, norm
            if seen_2T is not None:
                seen_2T[0, is_bad_T] = batch.samples.logprobs_T[is_bad_T] - NON_FINITE_GAP
                seen_2T[1, is_bad_T] = 0.0
                seen_2T = None
            update = smaller
            sums, is_bad_T = self._backward(update, batch, seen_2T)

    def _backward(
        self, update: Update, batch: Batch, seen_2T: Floats | None
    ) -> tuple[MetricSums, Bools]:
        """(sums of the metrics, which tokens have a loss that is not finite). `seen_2T` receives
        the log-prob of each token, and the entropy of its distribution."""
        objective = self._resolve_objective(update, batch)
        tallies: list[MetricSums] = []
        is_bad_T = np.zeros(batch.samples.ids_T.shape, np.bool_)
        for inputs, tokens in self._forward(update, batch):
            loss = _by_token(objective(tokens), tokens)
            weighted_sum(loss, inputs).backward()
            tallies.append(
                sum_metrics(tokens, loss, inputs, has_ratios=self._scorer.gives_logprobs)
            )
            token_K = inputs.token_K.cpu().numpy()  # a tensor of one element would be a number
            is_bad_T[token_K] = ~torch.isfinite(loss.loss_K.detach()).cpu()
            if seen_2T is not None:
                seen_2K = torch.stack([tokens.logprobs_K.detach(), tokens.entropy_K.detach()])
                seen_2T[:, token_K] = seen_2K.double().cpu()
        return add_sums(tallies), is_bad_T

    def _without_bad(self, update: Update, batch: Batch, is_bad_T: Bools) -> Update | None:
        """The update without rows whose loss is not finite; None if all rows are finite, or none.
        All ranks decide alike."""
        bad_rows = np.unique(batch.rows_T[is_bad_T])
        is_bad_S = np.isin(batch.samples.rows_S[update.samples], bad_rows)
        own = np.array([is_bad_S.sum(), is_bad_S.size], np.float64)
        num_bad, num_samples = self._forward_pass.ranks.sum_over_ranks(own).tolist()
        if not 0 < num_bad < num_samples:
            return None
        _log.warning(
            "rows left out: their loss is not finite",
            seq=batch.seq,
            rows=bad_rows.tolist(),
            subjects=sorted({batch.subjects.get(int(row), "") for row in bad_rows}),
        )
        return replace(update, samples=update.samples[~is_bad_S])

    def _resolve_objective(self, update: Update, batch: Batch) -> Objective:
        """The objective of this update; a budget is settled by a pass over all of it first."""
        if not isinstance(self._objective, BudgetedObjective):
            return self._objective
        with torch.no_grad():
            terms = [
                self._objective.budget_terms(tokens) for _, tokens in self._forward(update, batch)
            ]
        return self._objective.with_budget(
            self._forward_pass.ranks.gather_over_ranks(torch.cat(terms))
        )

    def _forward(self, update: Update, batch: Batch) -> Iterator[tuple[Inputs, Tokens]]:
        return self._forward_pass.run(self._scorer, batch, update.samples, update.weights_T)

    def state_tensors(self) -> dict[str, Tensor]:
        """What the next step depends on in addition to the weights: AdamW's state and the random
        generator. With several ranks, this rank's shard."""
        state = self._optimizer.state
        tensors = {
            f"{name}.{key}": value
            for name, parameter in self._parameters.items()
            for key, value in state.get(parameter, {}).items()
        }
        return tensors | {_RANDOM: torch.get_rng_state()}

    def weight_tensors(self) -> dict[str, Tensor]:
        return {f"{_WEIGHTS}{name}": value.detach() for name, value in self._parameters.items()}

    def restore(self, tensors: Mapping[str, Tensor], *, with_weights: bool = False) -> None:
        """Continue bit for bit, given the same weights; or with the weights passed here."""
        self._optimizer.state.clear()
        for name, parameter in self._parameters.items():
            if f"{name}.step" in tensors:
                self._restore_moments(tensors, name, parameter)
            if with_weights:
                parameter.data.copy_(load_shard(tensors, f"{_WEIGHTS}{name}", parameter.data))
        torch.set_rng_state(tensors[_RANDOM])

    def _restore_moments(
        self, tensors: Mapping[str, Tensor], name: str, parameter: torch.nn.Parameter
    ) -> None:
        """The state of one parameter; with offloading, only of one at a time on the device."""
        self._optimizer.state[parameter] = {
            "step": tensors[f"{name}.step"].to(parameter.device, copy=True),
            **{key: load_shard(tensors, f"{name}.{key}", parameter.data) for key in MOMENTS},
        }
        if self._host_moments is not None:
            self._host_moments.store(parameter)


_RANDOM = "random_generator"
_WEIGHTS = "weights/"


def decay_groups(
    parameters: Iterable[torch.nn.Parameter], weight_decay: float
) -> list[dict[str, Any]]:
    """Matrices decay, norms and biases do not: a norm's scale near 0 would silence its layer.
    Checkpoints name moments by parameter, so they fit any grouping."""
    matrices, vectors = list[torch.nn.Parameter](), list[torch.nn.Parameter]()
    for parameter in parameters:
        (matrices if parameter.ndim >= 2 else vectors).append(parameter)
    groups = [(matrices, weight_decay), (vectors, 0.0)]
    return [{"params": params, "weight_decay": decay} for params, decay in groups if params]


def not_seen(batch: Batch) -> Floats:
    """Log-probs and entropies by token, before any is known."""
    return np.full((2, *batch.samples.ids_T.shape), np.nan)


def initial_state() -> dict[str, Tensor]:
    """The state of a learner before its first step."""
    return {_RANDOM: torch.get_rng_state()}


def _by_token(loss: TokenLoss, tokens: Tokens) -> TokenLoss:
    """Check a loss's result. A custom loss may return anything: a mean, multiplied by token
    weights, would count once per token."""
    if not isinstance(loss, TokenLoss):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(
            f"the loss returned a {type(loss).__name__}; return TokenLoss(loss_K=..., "
            "metrics={}) with one number per trained token"
        )
    expected = tokens.logprobs_K.shape
    for name, values_K in {"loss_K": loss.loss_K, **loss.metrics}.items():
        if values_K.shape != expected:
            raise ConfigError(
                f"the loss returned {name} of shape {tuple(values_K.shape)} instead of "
                f"{tuple(expected)}: one number per trained token, as in tokens.logprobs_K; do not "
                "average or sum over tokens: algorithm.aggregation does that"
            )
    return loss


def weighted_sum(loss: TokenLoss, inputs: Inputs) -> Tensor:
    return (loss.loss_K * inputs.weights_K.to(loss.loss_K.dtype)).sum()


@torch.no_grad()
def sum_metrics(tokens: Tokens, loss: TokenLoss, inputs: Inputs, *, has_ratios: bool) -> MetricSums:
    """The sums that a micro-batch adds to the statistics."""
    sums = {
        "tokens": torch.tensor(loss.loss_K.numel()),
        "loss": weighted_sum(loss, inputs),
        **(_ratio_sums(tokens) if has_ratios else {}),
        **{name: values.sum() for name, values in loss.metrics.items()},
    }
    return {name: value.double().cpu() for name, value in sums.items()}


def _ratio_sums(tokens: Tokens) -> dict[str, Tensor]:
    """For a model that returns log-probs. `mismatch` covers tokens sampled by the version trained
    from: only there do trainer and engine hold the same weights."""
    log_ratio_K = log_ratio(tokens.logprobs_K, tokens.sampling_K)
    is_fresh_K = tokens.staleness_K == 0
    return {
        "fresh": is_fresh_K.sum(),
        "entropy": tokens.entropy_K.sum(),
        "kl": k3(log_ratio_K).sum(),
        "mismatch": (log_ratio_K.abs() * is_fresh_K).sum(),
    }


def add_sums(tallies: Sequence[MetricSums]) -> MetricSums:
    return {name: torch.stack([one[name] for one in tallies]).sum() for name in tallies[0]}


def reduce_sums(tallies: Sequence[MetricSums], ranks: RankReductions) -> list[dict[str, float]]:
    """The sums of each update over all ranks: the only reduction of a step's metrics."""
    if not tallies:
        return []
    names = sorted(tallies[0])
    local = np.array([[float(one[name]) for name in names] for one in tallies])
    totals = ranks.sum_over_ranks(local)
    return [dict(zip(names, sums, strict=True)) for sums in totals.tolist()]


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory of this process, on the device it trains on."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def _averages(sums: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over the trained tokens of all updates, the loss over updates; the mismatch is measured
    before the first update."""
    if not sums:
        return {}
    num_tokens = math.fsum(one["tokens"] for one in sums)
    names = sums[0].keys() - {"tokens", "fresh", "mismatch", "loss"}
    values = {name: math.fsum(one[name] for one in sums) / num_tokens for name in sorted(names)}
    values["loss"] = math.fsum(one["loss"] for one in sums) / len(sums)
    if "clip_ratio/low" in values:
        values["clip_ratio"] = values["clip_ratio/low"] + values["clip_ratio/high"]
    if sums[0].get("fresh"):
        values["mismatch"] = sums[0]["mismatch"] / sums[0]["fresh"]
    return values


def _describe(batch: Batch, ranks: RankReductions) -> dict[str, float]:
    rewards_R = batch.row_columns["reward"]
    is_trained_T = batch.samples.mask_T
    credited = np.unique(batch.rows_T[is_trained_T & (advantages_of(batch) != 0)])
    own = np.array([batch.samples.num_trained, credited.size], np.float64)
    num_trained, num_credited = ranks.sum_over_ranks(own).tolist()
    num_rows = max(rewards_R.size, 1)
    values = {
        "reward/mean": float(rewards_R.sum()) / num_rows,
        "completions/mean_length": num_trained / num_rows,
        "tokens/trained": num_trained,
        "advantage/zero_share": 1 - num_credited / num_rows,
    }
    for name, (reward, tokens) in batch.roles.figures(rewards_R).items():
        values[f"reward/role/{name}"], values[f"tokens/role/{name}"] = reward, tokens
    if batch.staleness_R.size:
        values["staleness/mean"] = float(batch.staleness_R.mean())
        values["staleness/max"] = float(batch.staleness_R.max())
    return values
