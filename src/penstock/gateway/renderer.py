# SPDX-License-Identifier: Apache-2.0
"""The one place where messages become tokens, and tokens text.

Owns the tokenizer and the chat template of one snapshot. The template runs in an immutable
sandbox: it may format messages and nothing else. Refuses a snapshot without either;
transformers is never imported.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, cast

from jinja2 import Template, TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from penstock.errors import BadRequest, WeightsError
from penstock.types import JsonObject
from penstock.wire.codec import encode_json

MAX_CACHED = 8192
MAX_CACHED_CHARS = 4096
"""Longer prompts are rarely repeated, and a cache of them would cost more memory than time."""
SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class Renderer:
    """Messages to text, text to token ids, token ids to text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        *,
        stop_ids: frozenset[int] = frozenset(),
        special_tokens: dict[str, str] | None = None,
    ) -> None:
        self.stop_ids = stop_ids
        """Ids that end an answer, from the snapshot's generation config."""
        self._tokenizer = tokenizer
        self._template = _compile(template)
        self._special_tokens = special_tokens or {}
        added = tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._texts: dict[bytes, str] = {}
        self._ids: dict[str, tuple[int, ...]] = {}

    @classmethod
    def load(cls, folder: Path) -> Renderer:
        """From `tokenizer.json`, the chat template and the configs of a Hugging Face folder."""
        config = _read_object(folder / "tokenizer_config.json")
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception
            raise WeightsError(
                f"no usable tokenizer.json in {folder}: {error}; "
                "publish the snapshot with its tokenizer"
            ) from None
        return cls(
            tokenizer,
            _read_template(folder, config),
            stop_ids=_read_stop_ids(folder),
            special_tokens=_read_special_tokens(config),
        )

    def render(self, messages: Sequence[JsonObject]) -> str:
        """The prompt text up to the point where the model's answer begins."""
        key = encode_json(messages)
        text = self._texts.get(key)
        if text is None:
            text = self._render(messages)
            if len(key) <= MAX_CACHED_CHARS:
                _remember(self._texts, key, text)
        return text

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of rendered text; the template has already written every special token."""
        ids = self._ids.get(text)
        if ids is None:
            ids = tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)
            if len(text) <= MAX_CACHED_CHARS:
                _remember(self._ids, text, ids)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text with its special tokens, as it stands in the model's context."""
        return self._tokenizer.decode(ids, skip_special_tokens=False)

    def decode_visible(self, ids: Sequence[int]) -> str:
        """Text as an agent sees it: without special tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def has_special(self, ids: Sequence[int]) -> bool:
        return not self._special_ids.isdisjoint(ids)

    def _render(self, messages: Sequence[JsonObject]) -> str:
        try:
            return self._template.render(
                messages=messages, tools=None, add_generation_prompt=True, **self._special_tokens
            )
        except (TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
            raise BadRequest(
                f"the model's chat template cannot render these messages: {error}; "
                "check roles and their order"
            ) from None


def _remember(cache: dict[Any, Any], key: object, value: object) -> None:
    if len(cache) >= MAX_CACHED:
        cache.clear()
    cache[key] = value


def _compile(template: str) -> Template:
    def raise_exception(message: str) -> NoReturn:
        raise TemplateError(message)

    def strftime_now(pattern: str) -> str:
        return datetime.datetime.now().strftime(pattern)

    def tojson(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = tojson  # Jinja's own escapes HTML, which no prompt wants
    functions = cast(dict[str, object], environment.globals)
    functions.update(raise_exception=raise_exception, strftime_now=strftime_now)
    try:
        return environment.from_string(template)
    except TemplateError as error:
        raise WeightsError(f"the snapshot's chat template does not compile: {error}") from None


# --- reading a snapshot -------------------------------------------------------------------------


def _read_object(path: Path) -> JsonObject:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise WeightsError(f"{path} is no valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise WeightsError(f"{path} holds no JSON object")
    return cast(JsonObject, value)


def _read_template(folder: Path, config: JsonObject) -> str:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):  # older snapshots name several; the one for chat is "default"
        named = cast(list[JsonObject], template)
        template = next((t.get("template") for t in named if t.get("name") == "default"), None)
    if not isinstance(template, str):
        raise WeightsError(
            f"no chat template in {folder}; add chat_template.jinja, or chat_template in "
            "tokenizer_config.json, to the model the run starts from"
        )
    return template


def _read_special_tokens(config: JsonObject) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in SPECIAL_TOKENS:
        value = config.get(name)
        if isinstance(value, dict):
            value = cast(JsonObject, value).get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def _read_stop_ids(folder: Path) -> frozenset[int]:
    for name in ("generation_config.json", "config.json"):
        value = _read_object(folder / name).get("eos_token_id")
        if isinstance(value, int):
            return frozenset({value})
        if isinstance(value, list):
            return frozenset(int(item) for item in cast(list[Any], value))
    return frozenset()
