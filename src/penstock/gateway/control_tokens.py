# SPDX-License-Identifier: Apache-2.0
"""Escaping that keeps real control tokens apart from text that only looks like one.

A tokenizer turns "<|im_start|>" into a control token wherever it occurs, so an agent could inject
one through a user message. *Escaped* text replaces such look-alikes with escape sequences, which
the renderer encodes as ordinary tokens. Owns the escape sequences; knows nothing of templates or
ids.

    ⌂3⌂    the fourth control token, as ordinary text
    ⌂-⌂    empty; separates two texts that would form a control token if joined
    ⌂⌂     the character ⌂ itself (U+FDD0, a Unicode noncharacter reserved for internal use)
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from itertools import groupby, takewhile
from typing import Any, cast

ESCAPE = "\ufdd0"
SEPARATOR = f"{ESCAPE}-{ESCAPE}"
MAX_KEPT_CHARS = 128
"""Longer keys of JSON are escaped each time: an agent chooses them, and the newest are kept."""
_ESCAPED = re.compile(f"{ESCAPE}(-|[0-9]*){ESCAPE}")


class ControlTokenEscaper:
    """The control tokens of one tokenizer, as text."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self.tokens = tuple(tokens)
        self._replacements = {token: f"{ESCAPE}{at}{ESCAPE}" for at, token in enumerate(tokens)}
        self._replacements[ESCAPE] = ESCAPE + ESCAPE
        self._lookalikes = re.compile(any_of(self._replacements))
        self._first_chars = tuple({token[:1] for token in self._replacements})
        self._token_prefixes = tuple({token[:2] for token in self._replacements})
        cuts = [(token, at) for token in tokens for at in range(1, len(token))]
        self._token_heads = frozenset(token[:at] for token, at in cuts)
        self._token_tails = frozenset(token[at:] for token, at in cuts)
        self._tail_starts = frozenset(tail[0] for tail in self._token_tails)
        self._longest = max(map(len, tokens), default=0)
        self._escape_short = lru_cache(maxsize=1024)(self.escape_untrusted)

    def escape_untrusted(self, text: str) -> str:
        """Escape untrusted text: no part of it can become a control token, whatever surrounds
        it."""
        escaped, is_tail, is_head = text, False, False
        # Each step is far cheaper than the next one: a body may have as many texts as characters.
        if any(first in text for first in self._first_chars):
            if any(prefix in text for prefix in self._token_prefixes):
                escaped = self._lookalikes.sub(lambda found: self._replacements[found[0]], text)
            is_head = any(escaped[-size:] in self._token_heads for size in self._sizes(escaped))
        if escaped[:1] in self._tail_starts:
            is_tail = any(escaped[:size] in self._token_tails for size in self._sizes(escaped))
        if is_tail or is_head:
            return is_tail * SEPARATOR + escaped + is_head * SEPARATOR
        return escaped

    def _sizes(self, text: str) -> range:
        """Of what it may begin or end with; there may be thousands of heads and tails."""
        return range(1, min(len(text), self._longest) + 1)

    def _escape_key(self, key: str) -> str:
        is_short = len(key) <= MAX_KEPT_CHARS
        return self._escape_short(key) if is_short else self.escape_untrusted(key)

    def escape_untrusted_json(self, value: Any) -> Any:
        """Escape every string in a JSON value."""
        if isinstance(value, str):
            return self.escape_untrusted(value)
        if isinstance(value, dict):
            items = cast(dict[str, Any], value).items()
            return {self._escape_key(key): self.escape_untrusted_json(item) for key, item in items}
        if isinstance(value, list | tuple):
            return [self.escape_untrusted_json(item) for item in cast(Sequence[Any], value)]
        return value


def any_of(texts: Collection[str]) -> str:
    """A pattern that finds the longest of these texts that is at a place. They share their
    beginnings in it: else each of hundreds would be tried wherever one seems to begin."""
    begins = [list(some) for _, some in groupby(sorted(filter(None, texts)), lambda one: one[0])]
    parts = [_with_rest(some) for some in begins]
    if "" in texts:
        return f"(?:{'|'.join(parts)})?" if parts else ""
    return f"(?:{'|'.join(parts) or '(?!)'})"


def _with_rest(texts: Sequence[str]) -> str:
    """For sorted texts that begin with the same character."""
    first, last = texts[0], texts[-1]
    same = sum(
        1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    )
    return re.escape(first[:same]) + any_of({text[same:] for text in texts})


def escape_trusted(text: str) -> str:
    """Escape text whose control tokens are real."""
    return text.replace(ESCAPE, ESCAPE + ESCAPE)


def split_escaped(text: str) -> list[str]:
    """Split escaped text into alternating parts: text whose control tokens are real, then the
    content of an escape sequence (a number, "-" or empty)."""
    return _ESCAPED.split(text)
