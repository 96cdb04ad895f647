# SPDX-License-Identifier: Apache-2.0
"""Checks that the other models of a policy use its tokens: by config.json and tokenizer.json.

Owns the comparison, before anything is loaded; imports no torch. A file that is missing, or lacks
the values, is not a reason to refuse."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from penstock.config.pipeline import PipelineStageConfig
from penstock.hub import TINY_QWEN3, find_folder, read_text_file
from penstock.trainer.model_folders import initial_folder


def vocabulary_mismatches(stages: Iterable[PipelineStageConfig], init: str) -> Iterator[str]:
    """Why models that stages of a policy name cannot score its tokens; the policy's own is `init`.
    Sizes may differ if the tokenizers are equal: some vendors pad larger models more."""
    for stage in stages:
        if stage.model is None or stage.is_service:
            continue
        own, other = _size(init), _size(stage.model)
        if own is None or other is None or own == other:
            continue
        if (tokens := _tokens(init)) is None or tokens != _tokens(stage.model):
            yield (
                f"stage {stage.id}: {stage.model} has a vocabulary of {other:,} tokens and the "
                f"policy, {init}, one of {own:,}, so that the same numbers are other tokens to it; "
                "name a model with the policy's tokenizer"
            )


def _size(init: str) -> int | None:
    config = _read(init, "config.json")
    return config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")


def _tokens(init: str) -> Any:
    """Every token with its number; None without a tokenizer."""
    tokenizer = _read(init, "tokenizer.json")
    added = [(token.get("id"), token.get("content")) for token in tokenizer.get("added_tokens", ())]
    vocab = (tokenizer.get("model") or {}).get("vocab")
    return None if vocab is None else (vocab, added)


def _read(init: str, name: str) -> dict[str, Any]:
    if init == TINY_QWEN3:
        with initial_folder(init, seed=0) as folder:
            return json.loads((folder / name).read_text())
    try:
        folder = find_folder(init, texts_only=True) or Path(init)
        return json.loads(read_text_file(folder / name))
    except (OSError, ValueError, RecursionError):  # loading the model reports what is wrong with it
        return {}
