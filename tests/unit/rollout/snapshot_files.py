# SPDX-License-Identifier: Apache-2.0
"""The smallest snapshot a node can serve: a token per letter, a template that adds nothing."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

ALPHABET = "abcdefghij>"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def write_snapshot(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    vocab = {letter: index for index, letter in enumerate(ALPHABET)}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token=">"))
    tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
    tokenizer.decoder = Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "config.json").write_text(json.dumps({"vocab_size": len(ALPHABET)}))
    return folder
