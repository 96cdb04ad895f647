# SPDX-License-Identifier: Apache-2.0
"""A language model with a regression head: texts in, one score per text out.

Owns how a text becomes tokens, and which of them the head reads: the last. The files are an
ordinary sequence classification model with one label; the score is its logit and an offset,
between 0 and 1. Trains nothing: `training` does.

N = texts, L = tokens of the longest, D = hidden size."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from penstock.errors import ConfigError, WeightsError
from penstock.gateway import tokenizing
from penstock.hub import check_model_files, read_text_file
from penstock.trainer.model_folders import static_files

TOKENS_PER_PASS = 16_384
"""Tokens of one forward pass, padding included."""


class Regressor(nn.Module):
    def __init__(self, model: Any, tokenizer: Tokenizer, *, max_tokens: int, offset: float) -> None:
        super().__init__()
        self.model = model.eval()
        self._tokenizer = tokenizer
        window = getattr(model.config, "max_position_embeddings", None)
        self.max_tokens = min(max_tokens, window) if window else max_tokens
        self.offset = offset

    @classmethod
    def load(cls, folder: Path, *, max_tokens: int, offset: float = 0.0) -> Regressor:
        """From a folder with a language model, which gets a head of zeros, or with a model that has
        such a head."""
        model = _load_with_head(folder)
        return cls(model, load_tokenizer(folder), max_tokens=max_tokens, offset=offset)

    @property
    def head(self) -> nn.Linear:
        return self.model.score

    def forward(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Scores of tokenized texts, not yet bounded."""
        return self.head(self.features(ids)).squeeze(1) + self.offset

    def features(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """The hidden state at the last token of each text."""
        lengths_N = torch.tensor([len(one) for one in ids])
        inputs_NL = torch.zeros((len(ids), int(lengths_N.max())), dtype=torch.long)
        for index, one in enumerate(ids):
            inputs_NL[index, : len(one)] = torch.tensor(one)
        mask_NL = torch.arange(inputs_NL.shape[1]) < lengths_N[:, None]
        device = self.head.weight.device
        hidden_NLD = self.model.base_model(
            input_ids=inputs_NL.to(device), attention_mask=mask_NL.to(device), use_cache=False
        ).last_hidden_state
        return hidden_NLD[torch.arange(len(ids)), lengths_N - 1]

    def tokenize(self, text: str) -> list[int]:
        """Its last `max_tokens` tokens: the step is at the end."""
        return tokenize(self._tokenizer, text, self.max_tokens)

    @torch.no_grad()
    def score(self, texts: Sequence[str]) -> list[float]:
        """A number from 0 to 1 for each text."""
        ids = [self.tokenize(text) for text in texts]
        scores = [0.0] * len(ids)
        for part in passes(ids):
            found_N = self([ids[index] for index in part]).clamp(0.0, 1.0)
            for index, value in zip(part, found_N.tolist(), strict=True):
                scores[index] = value
        return scores

    def save(self, folder: Path, source: Path) -> None:
        """Write model and tokenizer; `source` is the folder whose tokenizer this is."""
        self.model.save_pretrained(folder)
        for path in static_files(source):
            if not (folder / path.name).exists():
                shutil.copyfile(path, folder / path.name)


def passes(ids: Sequence[Sequence[int]]) -> list[list[int]]:
    """Indices of texts that are computed together, alike in length."""
    order = sorted(range(len(ids)), key=lambda index: (len(ids[index]), index))
    parts: list[list[int]] = []
    for index in order:
        if not parts or (len(parts[-1]) + 1) * len(ids[index]) > TOKENS_PER_PASS:
            parts.append([])
        parts[-1].append(index)
    return parts


def load_tokenizer(folder: Path) -> Tokenizer:
    try:
        return Tokenizer.from_buffer(read_text_file(folder / "tokenizer.json"))
    except Exception as error:  # tokenizers raises bare Exception
        raise WeightsError(
            f"no usable tokenizer.json in {folder}: {error}; name a model with a fast tokenizer"
        ) from None


def tokenize(tokenizer: Tokenizer, text: str, max_tokens: int) -> list[int]:
    """The last `max_tokens` tokens, without added ones; a text without any gives token 0."""
    ids = tokenizing.encode(tokenizer, text[-tokenizing.MAX_CHARS :])
    return ids[-max_tokens:] or [0]


def _load_with_head(folder: Path) -> Any:
    model, missing = load_classifier(folder, num_labels=1)
    body = f"{model.base_model_prefix}."
    if wrong := sorted(name for name in missing if name.startswith(body)):
        raise WeightsError(
            f"{folder}: {len(wrong)} tensors of the language model are missing, first {wrong[0]}; "
            "repair the folder"
        )
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        raise ConfigError(
            f"{folder}: models of type {model.config.model_type} have no linear head `score`; "
            "use a decoder such as Qwen/Qwen3-0.6B"
        )
    if missing:
        nn.init.zeros_(head.weight)
    return model


def load_classifier(folder: Path, **options: Any) -> tuple[Any, set[str]]:
    """A sequence classification model in float32, and the tensors that its files lack."""
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    check_model_files(folder)
    logging.disable_progress_bar()
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # it reports a head that is new
    try:
        loaded: Any = AutoModelForSequenceClassification.from_pretrained(
            folder,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,  # otherwise a terminal is asked, and may say yes
            output_loading_info=True,
            **options,
        )
    except ValueError as error:
        raise ConfigError(
            f"{folder} holds no model that can classify sequences ({error}); use a decoder such as "
            "Qwen/Qwen3-0.6B"
        ) from None
    finally:
        logging.set_verbosity(level)
    model, report = loaded
    return model, {*map(str, report["missing_keys"])}
