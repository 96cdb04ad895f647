# SPDX-License-Identifier: Apache-2.0
"""Reads tokenizer and chat-template settings from a snapshot folder in Hugging Face layout, and
makes a tokenizer for tiny models."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import cast

from msgspec import ValidationError, convert

from penstock.errors import WeightsError
from penstock.hub import read_text_file
from penstock.redaction import excerpt
from penstock.types import JsonObject

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
PLAIN_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""The chat template of tiny models: the contents of all messages."""


def read_object(path: Path) -> JsonObject:
    """The JSON object in a file; empty if the file does not exist."""
    if (content := _read(path)) is None:
        return {}
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{path} must contain a JSON object")
    return cast(JsonObject, value)


def _read(path: Path) -> bytes | None:
    """None if the file does not exist."""
    try:
        return read_text_file(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise WeightsError(
            f"{path} cannot be read: {error.strerror}; put the model's own file there"
        ) from None


def read_template(folder: Path, config: JsonObject) -> str:
    path = folder / "chat_template.jinja"
    if (content := _read(path)) is not None:
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise WeightsError(f"{path} is not UTF-8: {error}; write it so") from None
    template = config.get("chat_template")
    if isinstance(template, list):  # older snapshots list several; "default" is the chat one
        named = (
            cast(JsonObject, one) for one in cast(list[object], template) if isinstance(one, dict)
        )
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


def find_stop_ids(generation: JsonObject, config: JsonObject) -> frozenset[int]:
    """Ids that end an answer, from generation_config.json, else config.json."""
    for value in (generation.get("eos_token_id"), config.get("eos_token_id")):
        if value is None:
            continue
        try:
            return frozenset([value] if isinstance(value, int) else convert(value, list[int]))
        except ValidationError:
            raise WeightsError(
                f"eos_token_id is {excerpt(repr(value), 80)}, neither an id nor a list of ids; "
                "take generation_config.json and config.json from the model's own folder"
            ) from None
    return frozenset()


def find_window(config: JsonObject) -> int | None:
    text = config.get("text_config")  # where multimodal models keep it
    for part in (config, cast(JsonObject, text) if isinstance(text, dict) else {}):
        value = part.get("max_position_embeddings")
        if isinstance(value, int) and value > 0:
            return value
    return None


def character_tokenizer(vocabulary: Sequence[str], special: Collection[str]) -> JsonObject:
    """A tokenizer.json with one token per character; anything not in the vocabulary is `<unk>`."""
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, **plain, "special": True}
            for index, token in enumerate(vocabulary)
            if token in special
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": "[\\s\\S]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {token: index for index, token in enumerate(vocabulary)},
            "unk_token": "<unk>",
        },
    }
