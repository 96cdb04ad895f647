# SPDX-License-Identifier: Apache-2.0
"""Trains a process reward model: a regression of labels on the texts of steps.

Owns the split by trajectory, the loss (mean squared error) and the report on held-out steps. Steps
of one trajectory share most of their text, so none of them is on both sides. Malformed steps are
never shown to the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from blake3 import blake3

from penstock.errors import ConfigError
from penstock.trainer.model_folders import initial_folder
from penstock.trainer.prm.head import Regressor, passes
from penstock.trainer.prm.report import compare_with_labels
from penstock.trainer.prm.step_text import require_digest, scored_texts, text_digest
from penstock.trainer.prm.traces import LabelledTrace, read_lines
from penstock.trainer.prm.versions import Card, ModelVersion, new_version, open_version, write_card
from penstock.trainer.prm.versions import numbers as version_numbers

RIDGE = 1e-4
"""Weight of the penalty on the head's weights, per step, where only the head is trained."""
MAX_GRAD_NORM = 1.0
WARM_UP = 0.1
"""Share of the updates over which the learning rate rises; then it falls to 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSpec:
    model: str
    """Folder, model of the Hub, or `builtin:tiny-qwen3`."""
    epochs: int = 3
    learning_rate: float = 2e-5
    batch_steps: int = 16
    max_tokens: int = 1024
    held_out: float = 0.1
    """Share of trajectories that the model is not trained on."""
    is_head_only: bool = False
    """Leave the language model as it is, and solve for the head."""
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One labelled step."""

    row: str
    text: str
    label: float


OnEpoch = Callable[[int, float], None]
"""Called with the number of the epoch and its mean loss."""


def train_version(
    labels: Path, out: Path, spec: TrainingSpec, on_epoch: OnEpoch | None = None
) -> ModelVersion:
    """Train the next version in `out` on a file of labelled traces."""
    traces = read_labels(labels)
    examples = [example for trace in traces for example in examples_of(trace)]
    known, held_out = split(examples, spec.held_out)
    if not known or not held_out:
        raise ConfigError(
            f"{labels}: {len(known)} labelled steps to train on and {len(held_out)} held out; both "
            "are needed: label more trajectories, or change --held-out"
        )
    with initial_folder(spec.model, spec.seed) as base, new_version(out) as folder:
        regressor = Regressor.load(base, max_tokens=spec.max_tokens)
        fit(regressor, known, spec, on_epoch or _ignore)
        regressor.save(folder, base)
        scores_N = np.array(regressor.score([one.text for one in held_out]))
        agreement = compare_with_labels(
            scores_N,
            np.array([one.label for one in held_out]),
            num_trajectories=len({one.row for one in held_out}),
            constant=math.fsum(one.label for one in known) / len(known),
        )
        card = Card(
            text_digest=text_digest(),
            base=spec.model,
            labellers=tuple(sorted({trace.labeller for trace in traces})),
            labels_digest=blake3(labels.read_bytes()).hexdigest(),
            max_tokens=regressor.max_tokens,
            offset=regressor.offset,
            num_steps=len(known),
            agreement=agreement,
        )
        write_card(folder, card)
    return open_version(out, version_numbers(out)[-1])


def read_labels(path: Path) -> list[LabelledTrace]:
    """ConfigError if any was labelled with other texts."""
    traces = list(read_lines(path, LabelledTrace))
    for trace in traces:
        require_digest(trace.text_digest, f"{path}, row {trace.trace.row}", "label it again")
    return traces


def examples_of(labelled: LabelledTrace) -> Iterator[Example]:
    """Labelled steps that the model may see."""
    for index, text in scored_texts(labelled.trace.steps).items():
        label = labelled.labels[index]
        if label is not None:
            yield Example(row=labelled.trace.row, text=text, label=label)


def split(examples: Sequence[Example], held_out: float) -> tuple[list[Example], list[Example]]:
    """(to train on, held out), by trajectory: the share with the smallest hashes, so that a row
    stays on its side when others are added."""
    is_out = {row: _place(row) < held_out for row in {one.row for one in examples}}
    known = [one for one in examples if not is_out[one.row]]
    return known, [one for one in examples if is_out[one.row]]


def _place(row: str) -> float:
    """Of a row, evenly between 0 and 1."""
    return int.from_bytes(blake3(row.encode()).digest()[:6]) / (1 << 48)


def fit(
    regressor: Regressor, examples: Sequence[Example], spec: TrainingSpec, on_epoch: OnEpoch
) -> None:
    ids = [regressor.tokenize(one.text) for one in examples]
    labels_N = torch.tensor([one.label for one in examples], dtype=torch.float32)
    if spec.is_head_only:
        _solve_head(regressor, ids, labels_N)
        return
    regressor.offset = float(labels_N.mean())
    rounds = list(_rounds(len(ids), spec))
    optimizer = torch.optim.AdamW(regressor.parameters(), lr=spec.learning_rate, weight_decay=0.0)
    num_updates, num_done = sum(map(len, rounds)), 0
    for epoch, batches in enumerate(rounds, 1):
        losses: list[float] = []
        for batch in batches:
            rate = _rate(num_done / max(num_updates, 1))
            for group in optimizer.param_groups:
                group["lr"] = spec.learning_rate * rate
            losses.append(_update(regressor, optimizer, [ids[i] for i in batch], labels_N[batch]))
            num_done += 1
        on_epoch(epoch, math.fsum(losses) / len(losses))


def _update(
    regressor: Regressor,
    optimizer: torch.optim.Optimizer,
    ids: Sequence[Sequence[int]],
    labels_N: torch.Tensor,
) -> float:
    """One optimizer call on the mean squared error of these texts."""
    optimizer.zero_grad()
    total = 0.0
    for part in passes(ids):
        wanted_N = labels_N[part].to(regressor.head.weight.device)
        errors_N = regressor([ids[index] for index in part]) - wanted_N
        loss = errors_N.square().sum() / len(ids)
        loss.backward()
        total += float(loss.detach())
    torch.nn.utils.clip_grad_norm_(regressor.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    return total


@torch.no_grad()
def _solve_head(regressor: Regressor, ids: Sequence[Sequence[int]], labels_N: torch.Tensor) -> None:
    """Ridge regression of the labels on the hidden states, in float64."""
    rows: list[torch.Tensor] = [torch.empty(0)] * len(ids)
    for part in passes(ids):
        found = regressor.features([ids[index] for index in part]).double().cpu()
        for index, feature in zip(part, found, strict=True):
            rows[index] = feature
    features_ND, labels_N = torch.stack(rows), labels_N.double()
    mean_D, mean = features_ND.mean(0), labels_N.mean()
    centred_ND = features_ND - mean_D
    penalty = RIDGE * len(ids) * torch.eye(mean_D.numel(), dtype=torch.float64)
    weights_D = torch.linalg.solve(
        centred_ND.T @ centred_ND + penalty, centred_ND.T @ (labels_N - mean)
    )
    regressor.head.weight.copy_(weights_D[None].to(regressor.head.weight.dtype))
    regressor.offset = float(mean - mean_D @ weights_D)


def _rounds(num_examples: int, spec: TrainingSpec) -> Iterator[list[list[int]]]:
    """Batches of each epoch, in an order that the seed decides."""
    draw = np.random.default_rng(spec.seed)
    for _ in range(spec.epochs):
        order = draw.permutation(num_examples).tolist()
        yield [order[n : n + spec.batch_steps] for n in range(0, num_examples, spec.batch_steps)]


def _rate(done: float) -> float:
    """Of the peak learning rate, at this share of the updates."""
    return min((done + 1e-3) / WARM_UP, (1 - done) / (1 - WARM_UP))


def _ignore(epoch: int, loss: float) -> None: ...
