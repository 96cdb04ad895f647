# SPDX-License-Identifier: Apache-2.0
"""Reads tokenizer and chat-template settings from a snapshot folder in Hugging Face layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from penstock.errors import WeightsError
from penstock.types import JsonObject

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def read_object(path: Path) -> JsonObject:
    """The JSON object in a file; empty if the file does not exist."""
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise WeightsError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{path} must contain a JSON object")
    return cast(JsonObject, value)


def read_template(folder: Path, config: JsonObject) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # older snapshots list several; "default" is the chat one
        named = cast(list[JsonObject], template)
        template = next((t.get("template") for t in named if t.get("name") == "default"), None)
    if not isinstance(template, str):
        raise WeightsError(
            f"no chat template in {folder}; add chat_template.jinja, or chat_template in "
            "tokenizer_config.json, to the model the run starts from"
        )
    return template


def read_special_tokens(config: JsonObject) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = cast(JsonObject, value).get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def read_stop_ids(folder: Path) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        value = read_object(folder / name).get("eos_token_id")
        if isinstance(value, int):
            return frozenset({value})
        if isinstance(value, list):
            return frozenset(int(item) for item in cast(list[Any], value))
    return frozenset()


def read_window(folder: Path) -> int | None:
    config = read_object(folder / "config.json")
    text = config.get("text_config")  # where multimodal models keep it
    for part in (config, cast(JsonObject, text) if isinstance(text, dict) else {}):
        value = part.get("max_position_embeddings")
        if isinstance(value, int) and value > 0:
            return value
    return None
