# SPDX-License-Identifier: Apache-2.0
"""A Qwen3 small enough for tests, as a snapshot folder."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import Qwen3Config, Qwen3ForCausalLM

LETTERS = "abcdefghij>"
VOCAB_SIZE = 16
END_ID = 15
WINDOW = 512


def write_snapshot(
    folder: Path, *, seed: int, hidden_size: int = 32, is_tied: bool = False, end_id: int = END_ID
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=is_tied,
        max_position_embeddings=WINDOW,
        eos_token_id=end_id,
        initializer_range=0.3,  # far from uniform, so that a wrong position or mask shows
    )
    model = Qwen3ForCausalLM(config)
    config.save_pretrained(folder)
    tensors = {name: tensor.contiguous() for name, tensor in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder)
    return folder


def change_a_little(folder: Path, seed: int) -> None:
    """About 1 % of the elements of each tensor, and at least one."""
    path, draw = folder / "model.safetensors", torch.Generator().manual_seed(seed)
    tensors = load_file(path)
    for tensor in tensors.values():
        where = torch.rand(tensor.shape, generator=draw) < 0.01
        where.view(-1)[seed] = True
        tensor[where] = tensor[where] * 1.5 + 0.1
    save_file(tensors, path, metadata={"format": "pt"})


def _write_tokenizer(folder: Path) -> None:
    vocab = {letter: at for at, letter in enumerate(LETTERS)}
    vocab |= {f"<{at}>": at for at in range(len(LETTERS), END_ID)}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token=f"<{len(LETTERS)}>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<end>"])
    assert tokenizer.token_to_id("<end>") == END_ID
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
