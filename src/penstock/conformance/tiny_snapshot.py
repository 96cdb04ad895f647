# SPDX-License-Identifier: Apache-2.0
"""Writes a tiny but complete Hugging Face folder that any engine can load.

Owns its few tensors and its vocabulary. Needs no tensor library.
"""

from __future__ import annotations

import json
import math
import random
import struct
from array import array
from pathlib import Path
from typing import Any

from penstock.gateway.tokenizer_files import PLAIN_TEMPLATE, character_tokenizer

SPECIAL = ("<pad>", "<eos>", "<unk>")
VOCABULARY = (*SPECIAL, ">", *"abcdefghij")
HIDDEN, INTERMEDIATE, HEAD_DIM = 8, 16, 4
SHAPES: dict[str, tuple[int, ...]] = {
    "model.embed_tokens.weight": (len(VOCABULARY), HIDDEN),
    "model.layers.0.input_layernorm.weight": (HIDDEN,),
    "model.layers.0.self_attn.q_proj.weight": (2 * HEAD_DIM, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (HEAD_DIM, HIDDEN),
    "model.layers.0.self_attn.v_proj.weight": (HEAD_DIM, HIDDEN),
    "model.layers.0.self_attn.o_proj.weight": (HIDDEN, 2 * HEAD_DIM),
    "model.layers.0.self_attn.q_norm.weight": (HEAD_DIM,),
    "model.layers.0.self_attn.k_norm.weight": (HEAD_DIM,),
    "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "model.layers.0.mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
    "model.layers.0.mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
    "model.layers.0.mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    "model.norm.weight": (HIDDEN,),
    "lm_head.weight": (len(VOCABULARY), HIDDEN),
}
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "float32",
    "vocab_size": len(VOCABULARY),
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": VOCABULARY.index("<eos>"),
    "pad_token_id": VOCABULARY.index("<pad>"),
}


def write_snapshot(folder: Path, rng: random.Random) -> None:
    """Random weights at every call; the other files never change."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = character_tokenizer(VOCABULARY, SPECIAL)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "chat_template.jinja").write_text(PLAIN_TEMPLATE)
    (folder / "model.safetensors").write_bytes(_weights(rng))


def _weights(rng: random.Random) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, shape in SHAPES.items():
        values = array("f", [rng.gauss(0.0, 0.05) for _ in range(math.prod(shape))]).tobytes()
        offsets = [len(data), len(data) + len(values)]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        data += values
    encoded = json.dumps(header).encode()
    return struct.pack("<Q", len(encoded)) + encoded + data
