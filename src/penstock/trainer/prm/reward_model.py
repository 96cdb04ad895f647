# SPDX-License-Identifier: Apache-2.0
"""Reward models of the usual kind: a sequence classification model reads a conversation and gives
one number.

The conversation is the text of the last step with its context, as the policy's chat template wrote
it. A model with one label gives its logit, one with two the probability of the second."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from penstock.errors import ConfigError, WeightsError
from penstock.trainer.prm.head import load_classifier, load_tokenizer, tokenize
from penstock.trainer.prm.traces import Step


class RewardModel:
    def __init__(self, folder: Path, *, max_tokens: int) -> None:
        self._model, missing = load_classifier(folder)
        if missing:
            raise WeightsError(
                f"{folder} is not a reward model: {len(missing)} tensors are missing, first "
                f"{sorted(missing)[0]}; name a sequence classification model, or train one first"
            )
        self._num_labels: int = self._model.config.num_labels
        if self._num_labels > 2:
            raise ConfigError(
                f"{folder} has {self._num_labels} labels; a reward model has one, or two of which "
                "the second is good"
            )
        self._model.eval()
        self._tokenizer = load_tokenizer(folder)
        window = getattr(self._model.config, "max_position_embeddings", None)
        self._max_tokens = min(max_tokens, window) if window else max_tokens

    @torch.no_grad()
    def score(self, text: str) -> float:
        ids = torch.tensor([tokenize(self._tokenizer, text, self._max_tokens)])
        logits = self._model(input_ids=ids.to(self._model.device)).logits[0].float()
        return float(logits[0] if self._num_labels == 1 else logits.softmax(0)[1])


def conversation(steps: Sequence[Step]) -> str:
    """The text of the last scored step, with its context; ValueError if no step is scored."""
    index = max((n for n, step in enumerate(steps) if step.is_scored), default=-1)
    if index < 0:
        raise ValueError("no turn of a trained policy reached the workflow")
    text = ""
    while index >= 0:
        text = steps[index].prompt + steps[index].action + text
        index = steps[index].parent
    return text
