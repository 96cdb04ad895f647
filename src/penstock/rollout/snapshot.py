# SPDX-License-Identifier: Apache-2.0
"""Reads the metadata of a snapshot folder that every engine needs, without torch.

Rejects a folder with truncated tensor files or an unreadable config. Tensor contents were verified
by digest before.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from penstock.errors import EngineError
from penstock.gateway.tokenizer_files import find_stop_ids
from penstock.hub import read_text_file
from penstock.rollout.adapter_info import AdapterInfo, read_adapter_info, tensor_files
from penstock.types import JsonObject
from penstock.weights.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS

MAX_HEADER_BYTES = 100 << 20
DEFAULT_WINDOW = 4096
DEFAULT_VOCAB = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    stop_ids: frozenset[int]
    window: int
    """Context length: most tokens of prompt and answer together."""
    vocab_size: int
    tensors: tuple[str, ...]
    """Names of all tensors of the model, sorted, without the adapter's."""
    adapter: AdapterInfo | None = None
    """The adapter of this version, if its policy trains one."""
    num_experts: int = 0
    """Experts per layer of a mixture; 0 for another model."""


def read_snapshot(folder: Path) -> Snapshot:
    config = _read_object(folder / "config.json")
    path = folder / "generation_config.json"
    generation = _read_object(path) if path.exists() else {}
    shapes: dict[str, tuple[int, ...]] = {}
    for path in tensor_files(folder):
        shapes.update(_read_shapes(path))
    return Snapshot(
        stop_ids=find_stop_ids(generation, config),
        window=_positive(config, "max_position_embeddings", DEFAULT_WINDOW),
        vocab_size=_positive(config, "vocab_size", DEFAULT_VOCAB),
        tensors=tuple(sorted(shapes)),
        adapter=_read_adapter(folder, shapes),
        num_experts=_num_experts(config),
    )


def _num_experts(config: JsonObject) -> int:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return next((_positive(config, name, 1) for name in names if config.get(name)), 0)


def prompt_problem(prompt_ids: Sequence[int], snapshot: Snapshot) -> str | None:
    """Why the model cannot answer this prompt; None if it can."""
    if not 0 < len(prompt_ids) < snapshot.window:
        return (
            f"prompt has {len(prompt_ids)} tokens; the model accepts 1 to {snapshot.window - 1}, "
            "which leaves room for an answer. Shorten the context"
        )
    if min(prompt_ids) < 0 or max(prompt_ids) >= snapshot.vocab_size:
        return (
            f"prompt has ids outside the model's vocabulary of {snapshot.vocab_size}; "
            "tokenizer and model of this snapshot do not match"
        )
    return None


def _read_adapter(folder: Path, base: dict[str, tuple[int, ...]]) -> AdapterInfo | None:
    config, weights = folder / ADAPTER_CONFIG, folder / ADAPTER_WEIGHTS
    if not config.exists() and not weights.exists():
        return None
    return read_adapter_info(_read_object(config), _read_shapes(weights), base, config)


def _read_object(path: Path) -> JsonObject:
    try:
        value = json.loads(read_text_file(path))
    except (OSError, ValueError, RecursionError) as error:
        raise EngineError(f"cannot read {path}: {error}; fetch the snapshot again") from None
    if not isinstance(value, dict):
        raise EngineError(f"{path} is not a JSON object; fetch the snapshot again")
    return cast(JsonObject, value)


def _read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Tensor shapes from a safetensors header; checks that the file has the declared size."""
    try:
        with path.open("rb") as file:
            (header_bytes,) = struct.unpack("<Q", file.read(8))
            if header_bytes > MAX_HEADER_BYTES:
                raise ValueError(f"header of {header_bytes} bytes")
            header: dict[str, JsonObject] = json.loads(file.read(header_bytes))
        header.pop("__metadata__", None)
        shapes = {name: tuple(map(int, entry["shape"])) for name, entry in header.items()}
        ends = [int(entry["data_offsets"][1]) for entry in header.values()]
        expected = 8 + header_bytes + max(ends, default=0)
        found = path.stat().st_size
        if found != expected:
            raise ValueError(f"{found} bytes, but its header declares {expected}")
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        struct.error,
        RecursionError,
    ) as error:
        raise EngineError(f"{path} is damaged: {error}; fetch the snapshot again") from None
    return shapes


def _positive(config: JsonObject, name: str, default: int) -> int:
    value = config.get(name, default)
    if not isinstance(value, int) or value < 1:
        raise EngineError(f"config.json: {name} must be a positive integer, got {value!r}")
    return value
