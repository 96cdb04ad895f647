# SPDX-License-Identifier: Apache-2.0
"""Model folders: the initial one of a policy, and a module from any of them.

Owns what `builtin:` models are made of. A folder is an ordinary Hugging Face one; the tokenizer in
it is for gateways and engines: the trainer writes its text and never imports one. torch and
transformers load inside `load_model`, not when this module does.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, WeightsError
from penstock.gateway.tokenizer_files import PLAIN_TEMPLATE, character_tokenizer
from penstock.hub import (
    TINY_QWEN3,
    TINY_WINDOW,
    check_model_files,
    model_folder,
    other_files,
    parse_hub_model,
    read_text_file,
)
from penstock.weights.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

WEIGHTS = "model.safetensors"
"""The one weights file in every folder that the trainer writes; with an adapter, as it came."""
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt")

_SPECIAL = ("<pad>", "<eos>", "<unk>")
_RESERVED = ("<reserved_0>", "<reserved_1>")
_VOCABULARY = (*_SPECIAL, ">", *"abcdefghij", *_RESERVED)
_PAD, _EOS = 0, 1
_LAYERS, _HIDDEN, _INTERMEDIATE = 2, 64, 128
_HEADS, _KEY_VALUE_HEADS, _HEAD_DIM = 4, 2, 32  # vLLM on a CPU has no smaller heads
_INIT_STD = 0.02
"""A narrower model learns sooner, but on data one version old single batches throw it back."""
_ROPE_THETA = 100.0
"""Low, because positions are few: more of the 8 frequencies distinguish adjacent positions."""


def init_model(init: str, folder: Path, seed: int) -> None:
    """Write the initial model named by `models.<policy>.init` into a new folder."""
    source = None if init == TINY_QWEN3 else _source(init)
    folder.mkdir(parents=True)
    if source is None:
        _write_tiny_qwen3(folder, seed)
        return
    files = {path.name for path in source.iterdir() if path.is_file()}
    for name in files - (other_files(str(source), files) if parse_hub_model(init) else set()):
        shutil.copy2(source / name, folder / name)  # follows the links of the Hub's cache


@contextmanager
def initial_folder(init: str, seed: int) -> Generator[Path]:
    """The folder of the initial model: its own, without a copy, or a temporary one."""
    if init != TINY_QWEN3:
        yield _source(init)
        return
    with tempfile.TemporaryDirectory() as temporary:
        init_model(init, Path(temporary) / "model", seed)
        yield Path(temporary) / "model"


def _source(init: str) -> Path:
    source = model_folder(init)
    if not (source / "config.json").is_file() or not any(source.glob("*.safetensors")):
        raise ConfigError(
            f"init: {init} is not a Hugging Face model folder (config.json and *.safetensors); "
            "set it to such a folder, to a model of the Hub like Qwen/Qwen3-0.6B, or to "
            f"{TINY_QWEN3}"
        )
    check_model_files(source)
    return source


def set_config_dtype(folder: Path, name: str) -> None:
    """Record in config.json the precision in which this model's versions are written and loaded.

    It is the precision that the trainer computes in: an engine with weights rounded further would
    sample from another policy than the one that learns, and small steps would never reach it."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = name
    path.write_text(json.dumps(config, indent=2))


def static_files(folder: Path) -> list[Path]:
    """Files copied unchanged from the initial model into every snapshot: config, tokenizer, …"""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith(_WEIGHT_SUFFIXES)
    )


def weight_files(folder: Path) -> list[Path]:
    """The model's own weights as transformers finds them: one file, or an index and its parts."""
    index = folder / f"{WEIGHTS}.index.json"
    if (folder / WEIGHTS).is_file() or not index.is_file():
        return [folder / WEIGHTS]
    parts = {Path(part).name for part in json.loads(read_text_file(index))["weight_map"].values()}
    return [index, *(folder / part for part in sorted(parts))]


def has_adapter(folder: Path) -> bool:
    """Whether there is an adapter next to the model, whose own weights then never change."""
    return (folder / ADAPTER_CONFIG).is_file()


def link_or_copy(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)


@contextmanager
def _without_adapter(folder: Path) -> Generator[Path]:
    """Without this, transformers would load the adapter by itself if PEFT is installed."""
    if not has_adapter(folder):
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        for path in folder.iterdir():
            if path.name not in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
                (Path(temporary) / path.name).symlink_to(path.resolve())
        yield Path(temporary)


def load_model(folder: Path, dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The model in float32 or as `dtype` says, every weight read from the folder; an adapter there
    is ignored."""
    with _without_adapter(folder) as plain:
        return _load(plain, dtype)


def _load(folder: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype or torch.float32,
        attn_implementation="sdpa",
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,  # otherwise a terminal is asked, and may say yes
        output_loading_info=True,
    )
    model, report = loaded
    wrong = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if wrong:
        raise WeightsError(
            f"{folder}: {len(wrong)} tensors are missing or do not have the shape of config.json, "
            f"first {wrong[0]}; randomly initialized tensors must not be trained: repair the folder"
        )
    return model


def _write_tiny_qwen3(folder: Path, seed: int) -> None:
    from safetensors.numpy import save_file

    texts: dict[str, object] = {
        "config.json": tiny_config(),
        "generation_config.json": {"do_sample": True, "eos_token_id": _EOS, "pad_token_id": _PAD},
        "tokenizer.json": character_tokenizer(_VOCABULARY, (*_SPECIAL, *_RESERVED)),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 512,
            "pad_token": "<pad>",
            "eos_token": "<eos>",
            "unk_token": "<unk>",
        },
    }
    for name, value in texts.items():
        (folder / name).write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    (folder / "chat_template.jinja").write_text(PLAIN_TEMPLATE)
    save_file(_tiny_weights(seed), folder / WEIGHTS, metadata={"format": "pt"})


def tiny_shapes() -> dict[str, tuple[int, ...]]:
    """Of the built-in model's tensors."""
    return {name: weight.shape for name, weight in _tiny_weights(0).items()}


def _tiny_weights(seed: int) -> dict[str, npt.NDArray[np.float32]]:
    draw = np.random.Generator(np.random.PCG64(seed))

    def normal(*shape: int) -> npt.NDArray[np.float32]:
        return (draw.standard_normal(shape) * _INIT_STD).astype(np.float32)

    def ones(size: int) -> npt.NDArray[np.float32]:
        return np.ones(size, np.float32)

    weights = {"model.embed_tokens.weight": normal(len(_VOCABULARY), _HIDDEN)}
    for layer in range(_LAYERS):
        part = {
            "input_layernorm": ones(_HIDDEN),
            "self_attn.q_proj": normal(_HEADS * _HEAD_DIM, _HIDDEN),
            "self_attn.k_proj": normal(_KEY_VALUE_HEADS * _HEAD_DIM, _HIDDEN),
            "self_attn.v_proj": normal(_KEY_VALUE_HEADS * _HEAD_DIM, _HIDDEN),
            "self_attn.o_proj": normal(_HIDDEN, _HEADS * _HEAD_DIM),
            "self_attn.q_norm": ones(_HEAD_DIM),
            "self_attn.k_norm": ones(_HEAD_DIM),
            "post_attention_layernorm": ones(_HIDDEN),
            "mlp.gate_proj": normal(_INTERMEDIATE, _HIDDEN),
            "mlp.up_proj": normal(_INTERMEDIATE, _HIDDEN),
            "mlp.down_proj": normal(_HIDDEN, _INTERMEDIATE),
        }
        weights |= {f"model.layers.{layer}.{name}.weight": value for name, value in part.items()}
    weights["model.norm.weight"] = ones(_HIDDEN)
    weights["lm_head.weight"] = normal(len(_VOCABULARY), _HIDDEN)
    return weights


def tiny_config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float32",
        "vocab_size": len(_VOCABULARY),
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTERMEDIATE,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KEY_VALUE_HEADS,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": TINY_WINDOW,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": _ROPE_THETA},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": _INIT_STD,
        "tie_word_embeddings": False,
        "use_cache": True,
        "bos_token_id": None,
        "eos_token_id": _EOS,
        "pad_token_id": _PAD,
    }
