# SPDX-License-Identifier: Apache-2.0
"""A snapshot folder without weights: a small BPE tokenizer and a ChatML template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

START, END = "<|im_start|>", "<|im_end|>"
LETTERS = "abcdefghijklmnopqrstuvwxyz >!\n"
VOCAB = {letter: at for at, letter in enumerate(LETTERS)} | {"ab": len(LETTERS)}
"""`ab` merges, so the letters sampled one by one are other ids than the same text tokenised."""
AB = VOCAB["ab"]
END_ID = len(VOCAB) + 1
VOCAB_SIZE = len(VOCAB) + 2

TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- endif %}"""


def write_snapshot(folder: Path, *, template: str = TEMPLATE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer: Any = Tokenizer(BPE(vocab=VOCAB, merges=[("a", "b")]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([START, END])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 4096, "eos_token_id": END_ID}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    return folder


def ids_of(text: str) -> list[int]:
    """One id per letter, as an engine may sample them and a tokenizer would not."""
    return [VOCAB[letter] for letter in text]
