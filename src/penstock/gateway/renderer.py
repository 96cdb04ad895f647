# SPDX-License-Identifier: Apache-2.0
"""Renders messages to tokens and decodes tokens to text; the only place that does either.

Owns the tokenizer and the chat template of one snapshot. A template that does more than put
messages together runs in a separate process, which starts with the first rendering: it can only
format messages. Refuses a snapshot that lacks
either. Never imports transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from json import loads
from pathlib import Path
from typing import Any, cast

from jinja2 import TemplateError
from tokenizers import Tokenizer

from penstock.errors import BadRequest, WeightsError
from penstock.gateway import tokenizing
from penstock.gateway.control_tokens import ESCAPE, ControlTokenEscaper, split_escaped
from penstock.gateway.detokenize import make_decoder
from penstock.gateway.parsing import END_THINK, STRUCTURAL_TAGS, tool_format
from penstock.gateway.plain_template import MAX_PROMPT_BYTES, plain_template
from penstock.gateway.template_process import shared_process
from penstock.gateway.tokenizer_files import (
    find_stop_ids,
    find_window,
    read_object,
    read_special_tokens,
    read_template,
)
from penstock.hub import read_text_file
from penstock.types import FinishReason, JsonObject
from penstock.wire.codec import encode_json
from penstock.wire.json_parts import require_few_parts

MAX_CACHED = 8192
MAX_CACHED_CHARS = 4096
"""Longer prompts rarely repeat; caching them is not worth the memory."""
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Template variables that switch thinking on or off."""
ANSWER_FIELDS = frozenset({"content", "reasoning_content", "reasoning", "tool_calls"})
"""Message fields that hold the parts of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerTexts:
    """One answer, decoded in the three forms that are needed."""

    escaped: str
    visible: str
    without_end: str
    """Escaped, without the end token."""


class Renderer:
    """Messages to escaped text (see `control_tokens`), escaped text to token ids, token ids to
    text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: str,
        *,
        stop_ids: frozenset[int] = frozenset(),
        special_tokens: dict[str, str] | None = None,
        window: int | None = None,
    ) -> None:
        self.stop_ids = stop_ids
        """Ids that end an answer, from the snapshot's generation config."""
        self.window = window
        """Context window in tokens, prompt plus answer; None if the model config does not give
        it."""
        self.tool_format = tool_format(template)
        self.has_thinking = END_THINK in template
        """The template supports reasoning."""
        self.num_ids = tokenizer.get_vocab_size()
        self.max_chars: int | None = None
        """No longer text fits the window, whatever its tokens; None without a window."""
        if window is not None:
            self.max_chars = window * max(map(len, tokenizer.get_vocab()), default=1)
        self._tokenizer = tokenizer
        self.decode = make_decoder(tokenizer)
        """Ids to text with special tokens, as in the model's context."""
        self._template = shared_process(template)
        self._special_tokens = special_tokens or {}
        self._render_here = plain_template(template, self._special_tokens)
        added = tokenizer.get_added_tokens_decoder()
        self._special = {i: token.content for i, token in added.items() if token.special}
        self._special_ids = frozenset(self._special)
        self._hidden = frozenset(
            i for i, token in self._special.items() if token not in STRUCTURAL_TAGS
        )
        self._escaper = ControlTokenEscaper(tuple(self._special.values()))
        self._literal_ids = _literal_token_ids(tokenizer, self._escaper.tokens)
        self._texts: dict[bytes, str] = {}
        self._encode_pieces = tokenizing.PieceEncoder(tokenizer).encode

    @classmethod
    def load(cls, folder: Path) -> Renderer:
        """From `tokenizer.json`, the chat template and the configs of a Hugging Face folder."""
        config = read_object(folder / "tokenizer_config.json")
        try:
            tokenizer = Tokenizer.from_buffer(read_text_file(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception
            raise WeightsError(
                f"no usable tokenizer.json in {folder}: {error}; "
                "publish the snapshot with its tokenizer"
            ) from None
        model = read_object(folder / "config.json")
        return cls(
            tokenizer,
            read_template(folder, config),
            stop_ids=find_stop_ids(read_object(folder / "generation_config.json"), model),
            special_tokens=read_special_tokens(config),
            window=find_window(model),
        )

    def render(
        self,
        messages: Sequence[JsonObject],
        *,
        tools: Sequence[JsonObject] = (),
        thinking: bool | None = None,
        answers: Mapping[int, str] | None = None,
    ) -> str:
        """The escaped prompt, up to the start of the model's answer. For a thread.

        `answers` holds, by message index, the escaped text of answers to keep as sampled: the
        template gets it as content, instead of the parts sent by the agent.
        """
        key = _cache_key(messages, tools, thinking, answers)
        text = self._texts.get(key)
        if text is None:
            with _refused_messages():
                values = self._values(messages, tools, thinking, answers or {})
                here = len(key) <= MAX_PROMPT_BYTES and self._render_here
                text = (here or self._template.render)(**values)
            self._keep(key, text)
        return text

    async def render_soon(
        self,
        messages: Sequence[JsonObject],
        *,
        tools: Sequence[JsonObject] = (),
        thinking: bool | None = None,
        answers: Mapping[int, str] | None = None,
        max_bytes: int,
        place: Callable[[], AbstractAsyncContextManager[None]],
    ) -> str | None:
        """`render` for an event loop, which goes on meanwhile: a prompt that takes the template's
        process waits for its place. None if it is new and has more than `max_bytes`."""
        key = _cache_key(messages, tools, thinking, answers)
        text = self._texts.get(key)
        if text is None and len(key) <= max_bytes:
            with _refused_messages():
                values = self._values(messages, tools, thinking, answers or {})
                if self._render_here is not None and len(key) <= MAX_PROMPT_BYTES:
                    text = self._render_here(**values)
                else:
                    async with place():
                        text = await self._template.render_soon(**values)
            self._keep(key, text)
        return text

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of escaped text; the template has already written all special tokens."""
        tokenizing.check_length(text)
        return self._encode(text, self._encode_pieces)

    def encode_large(self, text: str) -> tuple[int, ...]:
        """`encode` for a thread: lets the event loop run meanwhile, and keeps nothing."""
        tokenizing.check_length(text)
        return self._encode(text, partial(tokenizing.encode, self._tokenizer))

    def escape_untrusted(self, text: str) -> str:
        """Escape untrusted text."""
        return self._escaper.escape_untrusted(text)

    def decode_escaped(self, ids: Sequence[int]) -> str:
        """Escaped text: ordinary tokens that spell out a special token are not mistaken for it."""
        parts: list[str] = []
        start = 0
        for at in [at for at, token in enumerate(ids) if token in self._special]:
            if start < at:
                parts.append(self._escaper.escape_untrusted(self.decode(ids[start:at])))
            parts.append(self._special[ids[at]])
            start = at + 1
        if start < len(ids):
            parts.append(self._escaper.escape_untrusted(self.decode(ids[start:])))
        return "".join(parts)

    def decode_visible(self, ids: Sequence[int]) -> str:
        """Text as the agent sees it, without special tokens."""
        return self.decode(self.strip_hidden(ids))

    def decode_answer(self, ids: Sequence[int], finish: FinishReason) -> AnswerTexts:
        """All three forms of an answer, from as few decodings as its special tokens allow."""
        answer_ids, last = ids, ""
        if self.has_end_token(ids, finish):
            answer_ids, last = ids[:-1], self._special.get(ids[-1])
        is_plain = last is not None and (not last or ids[-1] in self._hidden)
        if is_plain and self._special_ids.isdisjoint(answer_ids):
            text = self.decode(answer_ids)
            escaped = self._escaper.escape_untrusted(text)
            return AnswerTexts(escaped=escaped + (last or ""), visible=text, without_end=escaped)
        without_end = self.decode_escaped(answer_ids)
        return AnswerTexts(
            escaped=self.decode_escaped(ids) if last is None else without_end + last,
            visible=self.decode_visible(ids),
            without_end=without_end,
        )

    def strip_hidden(self, ids: Sequence[int]) -> Sequence[int]:
        """The ids whose text the agent sees."""
        if self._hidden.isdisjoint(ids):
            return ids
        return [token for token in ids if token not in self._hidden]

    def has_end_token(self, ids: Sequence[int], finish: FinishReason) -> bool:
        """True if the last id is a pure end-of-answer token."""
        if not ids or finish is not FinishReason.STOP:
            return False
        return ids[-1] in (self.stop_ids or self._hidden)

    def _encode(self, text: str, encode: Callable[[str], list[int]]) -> tuple[int, ...]:
        """Text between escapes is tokenized, a literal control token has its ids."""
        ids: list[int] = []
        for at, part in enumerate(split_escaped(text)):
            if at % 2 == 0:
                ids += encode(part) if part else ()
            elif part.isdigit():
                ids += self._literal_ids[int(part)]
            elif not part:
                ids += encode(ESCAPE)
        return tuple(ids)

    def _values(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
        thinking: bool | None,
        answers: Mapping[int, str],
    ) -> dict[str, Any]:
        """What the template sees."""
        switches = {} if thinking is None else dict.fromkeys(THINKING_SWITCHES, thinking)
        return {
            "messages": [
                self._prepare_message(message, answers.get(at))
                for at, message in enumerate(messages)
            ],
            "tools": self._escaper.escape_untrusted_json(tools) or None,
            "add_generation_prompt": True,
            **switches,
            **self._special_tokens,
        }

    def _keep(self, key: bytes, text: str) -> None:
        if len(key) <= MAX_CACHED_CHARS and len(text) <= MAX_CACHED_CHARS:
            _cache_put(self._texts, key, text)

    def _prepare_message(self, message: JsonObject, answer: str | None) -> JsonObject:
        if answer is None:
            ready: JsonObject = self._escaper.escape_untrusted_json(_with_objects(message))
            return ready
        rest = {name: value for name, value in message.items() if name not in ANSWER_FIELDS}
        return {**self._escaper.escape_untrusted_json(rest), "content": answer}


def _literal_token_ids(tokenizer: Tokenizer, tokens: Sequence[str]) -> list[list[int]]:
    """Ordinary token ids that spell out each control token."""
    tokenizer.encode_special_tokens = True
    try:
        return [tokenizing.encode(tokenizer, token) for token in tokens]
    finally:
        tokenizer.encode_special_tokens = False


def _cache_key(
    messages: Sequence[JsonObject],
    tools: Sequence[JsonObject],
    thinking: bool | None,
    answers: Mapping[int, str] | None,
) -> bytes:
    try:
        return encode_json((messages, tools, thinking, sorted((answers or {}).items())))
    except (UnicodeEncodeError, TypeError, OverflowError) as error:
        raise BadRequest(f"the messages are not valid JSON: {error}") from None


@contextmanager
def _refused_messages() -> Generator[None]:
    try:
        yield
    except (TemplateError, TypeError, ValueError, KeyError, ArithmeticError) as error:
        raise BadRequest(
            f"the model's chat template cannot render these messages: {error}; "
            "check the roles and their order"
        ) from None


def _with_objects(message: JsonObject) -> JsonObject:
    """Decode tool-call arguments into objects, as templates expect."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [with_object(call) for call in cast(list[Any], calls)]}


def with_object(call: Any) -> Any:
    """The call with its arguments decoded; as it is if they are no JSON, or have too many parts."""
    try:
        function = call["function"]
        require_few_parts(function["arguments"].encode())
        arguments = loads(function["arguments"])
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError, BadRequest):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _cache_put(cache: dict[Any, Any], key: object, value: object) -> None:
    if len(cache) >= MAX_CACHED:
        cache.clear()
    cache[key] = value
