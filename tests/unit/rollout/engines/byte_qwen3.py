# SPDX-License-Identifier: Apache-2.0
"""A random Qwen3 that vLLM serves on a CPU: heads of 32, a tied output head, a token per byte."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

END = "<end>"
VOCAB_SIZE = 320
"""A multiple of 64, as vLLM pads it."""


def write_snapshot(folder: Path, *, seed: int) -> Path:
    vocab = {
        sign: at for at, sign in enumerate([END, *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],  # without it vLLM takes it for an embedding model
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        eos_token_id=0,
        initializer_range=0.15,  # far from uniform, so that wrong weights show
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    config.save_pretrained(folder)
    tensors = {name: tensor.contiguous() for name, tensor in model.named_parameters()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
