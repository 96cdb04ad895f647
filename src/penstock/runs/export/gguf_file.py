# SPDX-License-Identifier: Apache-2.0
"""Writes a model folder as one GGUF file, for llama.cpp and what is built on it.

Llama and Qwen3 shapes, in float32 or bfloat16; llama.cpp's own tools quantise further. The `gguf`
package owns the format. Here are the settings of both families and the one change of layout:
llama.cpp rotates neighbouring rows of Llama's queries and keys, Hugging Face the two halves of a
head. A setting that would change the result and has no place in the file is refused. Tensors are
written one at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import ConfigError, WeightsError
from penstock.gateway.tokenizer_files import find_stop_ids, read_object
from penstock.runs.export.gguf_tokenizer import Vocabulary, read_vocabulary
from penstock.runs.export.merged_model import model_files
from penstock.runs.export.tensor_files import Array, Precision, StoredTensor, tensors_of

try:
    gguf: Any = import_module("gguf")
except ModuleNotFoundError:
    raise ConfigError(
        "GGUF needs the package gguf, which is not installed; pip install 'penstock-rl[export]'"
    ) from None

_FAMILIES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen3": gguf.MODEL_ARCH.QWEN3}
_HEAD = "lm_head.weight"
MAX_HEAD_SIZE = 1 << 16


def write_gguf(
    folder: Path, path: Path, *, name: str, precision: Precision | None, lineage: Mapping[str, str]
) -> None:
    """Write the model in `folder`; `lineage` is stored beside it, under `penstock.`."""
    config = read_object(folder / "config.json")
    _check_shape(config, folder)
    _check_sizes(config, folder)
    is_bf16 = precision == "bf16" or (precision is None and _dtype(config) == "bfloat16")
    family: str = config["model_type"]
    writer: Any = gguf.GGUFWriter(path, family)
    try:
        writer.add_name(name)
        for key, value in lineage.items():
            writer.add_string(f"penstock.{key}", value)
        kind = gguf.LlamaFileType.MOSTLY_BF16 if is_bf16 else gguf.LlamaFileType.ALL_F32
        writer.add_file_type(kind)
        _add_shape(writer, config)
        stop_ids = find_stop_ids(read_object(folder / "generation_config.json"), config)
        _add_vocabulary(writer, read_vocabulary(folder, config["vocab_size"]), stop_ids)
        _add_tensors(writer, folder, config, is_bf16=is_bf16)
    finally:
        writer.close()


# --- settings -------------------------------------------------------------------------------------


def _check_shape(config: Mapping[str, Any], folder: Path) -> None:
    if config.get("model_type") not in _FAMILIES:
        raise WeightsError(
            f"{folder}: {config.get('model_type')} models cannot be written as GGUF here, only "
            f"{' and '.join(_FAMILIES)}; export a Hugging Face folder and convert it with "
            "llama.cpp's own script"
        )
    unusual = {
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "use_sliding_window": bool(config.get("use_sliding_window")),
        "rope_type": _rope_type(config) not in ("default", "llama3"),
    }
    if wrong := [key for key, is_unusual in unusual.items() if is_unusual]:
        raise WeightsError(
            f"{folder}/config.json: {', '.join(wrong)} has a value that is not supported in a GGUF "
            "export; export a Hugging Face folder and convert it with llama.cpp's own script"
        )


def _check_sizes(config: Mapping[str, Any], folder: Path) -> None:
    """The package makes names for every layer that config.json claims, a megabyte for twenty."""
    num_tensors = sum(1 for path in model_files(folder) for _ in tensors_of(path))
    sizes = {
        "num_hidden_layers": (config["num_hidden_layers"], num_tensors),
        "head_dim": (_head_size(config), MAX_HEAD_SIZE),
    }
    for key, (size, most) in sizes.items():
        if not isinstance(size, int) or not 0 < size <= most:
            raise WeightsError(
                f"{folder}/config.json: {key} is {size!r}, and this model has 1 to {most}; correct "
                "it"
            )


def _dtype(config: Mapping[str, Any]) -> str:
    return str(config.get("dtype") or config.get("torch_dtype") or "float32")


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Both forms of config.json."""
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _rope_type(config: Mapping[str, Any]) -> str:
    rope = _rope(config)
    return rope.get("rope_type") or rope.get("type") or "default"


def _head_size(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _num_kv_heads(config: Mapping[str, Any]) -> int:
    return config.get("num_key_value_heads") or config["num_attention_heads"]


def _rope_base(config: Mapping[str, Any]) -> float:
    return float(_rope(config).get("rope_theta") or config.get("rope_theta") or 10_000.0)


def _add_shape(writer: Any, config: Mapping[str, Any]) -> None:
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(_num_kv_heads(config))
    writer.add_key_length(_head_size(config))
    writer.add_value_length(_head_size(config))
    writer.add_rope_dimension_count(_head_size(config))
    writer.add_rope_freq_base(_rope_base(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])


def _add_vocabulary(writer: Any, found: Vocabulary, stop_ids: frozenset[int]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(found.family)
    writer.add_token_list(found.tokens)
    writer.add_token_types(found.types)
    writer.add_token_merges(found.merges)
    special = dict(found.special)
    if stop_ids and special.get("eos") not in stop_ids:
        special["eos"] = min(stop_ids)
    for name, token in special.items():
        getattr(writer, f"add_{name}_token_id")(token)
    if others := stop_ids - {special.get("eos")}:
        writer.add_eot_token_id(min(others))
    writer.add_add_bos_token(False)  # the chat template writes it
    writer.add_chat_template(found.template)


# --- tensors --------------------------------------------------------------------------------------


def _add_tensors(writer: Any, folder: Path, config: Mapping[str, Any], *, is_bf16: bool) -> None:
    """Names and sizes of all first, then the data, one tensor at a time."""
    f32, bf16 = gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.BF16
    found = [*_named_tensors(folder, config)]
    factors = _frequency_factors(config)
    if factors is not None:
        writer.add_tensor_info("rope_freqs.weight", factors.shape, factors.dtype, factors.nbytes)
    for name, tensor in found:
        kind = bf16 if is_bf16 and len(tensor.shape) > 1 else f32
        size = math.prod(tensor.shape) * (2 if kind is bf16 else 4)
        writer.add_tensor_info(name, tensor.shape, np.dtype(np.float32), size, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    if factors is not None:
        writer.write_tensor_data(factors)
    for _, tensor in found:
        weight = _in_order(tensor, config)
        if is_bf16 and weight.ndim > 1:
            weight = gguf.quants.quantize(weight, bf16)
        writer.write_tensor_data(weight)


def _named_tensors(folder: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, StoredTensor]]:
    arch = _FAMILIES[config["model_type"]]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    for path in model_files(folder):
        for tensor in tensors_of(path):
            if tensor.name == _HEAD and config.get("tie_word_embeddings"):
                continue
            name = names.get_name(tensor.name, try_suffixes=(".weight", ".bias"))
            if name is None:
                raise WeightsError(
                    f"{path}: tensor {tensor.name} has no place in a GGUF file of a "
                    f"{config['model_type']} model; export a Hugging Face folder instead"
                )
            yield name, tensor


def _in_order(tensor: StoredTensor, config: Mapping[str, Any]) -> Array:
    """Queries and keys of Llama with the rows of each head as llama.cpp rotates them."""
    weight = tensor.read()
    heads = {
        "q_proj": config["num_attention_heads"],
        "k_proj": _num_kv_heads(config),
    }.get(tensor.name.split(".")[-2])
    if config["model_type"] != "llama" or heads is None:
        return weight
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weight.shape)


def _frequency_factors(config: Mapping[str, Any]) -> Array | None:
    """What Llama 3.1 divides its rotary frequencies by; None for others."""
    rope = _rope(config)
    if _rope_type(config) != "llama3":
        return None
    size, factor = _head_size(config), float(rope["factor"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    window = float(rope["original_max_position_embeddings"])
    exponents = np.arange(0, size, 2, dtype=np.float64) / size
    turns = window * _rope_base(config) ** -exponents / (2 * math.pi)
    """Of each frequency over the original window."""
    share = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1 / ((1 - share) / factor + share)).astype(np.float32)
