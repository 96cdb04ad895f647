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
from collections.abc import Sequence
from functools import lru_cache
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
        longest_first = sorted(self._replacements, key=len, reverse=True)
        self._lookalikes = re.compile("|".join(map(re.escape, longest_first)))
        self._first_chars = tuple({token[:1] for token in self._replacements})
        self._token_prefixes = tuple({token[:2] for token in self._replacements})
        cuts = [(token, at) for token in tokens for at in range(1, len(token))]
        self._token_heads = tuple({token[:at] for token, at in cuts})
        self._token_tails = tuple({token[at:] for token, at in cuts})
        self._escape_short = lru_cache(maxsize=1024)(self.escape_untrusted)

    def escape_untrusted(self, text: str) -> str:
        """Escape untrusted text: no part of it can become a control token, whatever surrounds
        it."""
        escaped = text
        if self._may_have_tokens(text):
            escaped = self._lookalikes.sub(lambda found: self._replacements[found[0]], text)
        if escaped.endswith(self._token_heads):
            escaped += SEPARATOR
        return SEPARATOR + escaped if escaped.startswith(self._token_tails) else escaped

    def _may_have_tokens(self, text: str) -> bool:
        """Each step is far cheaper than the next one, and the regex comes last."""
        if not any(first in text for first in self._first_chars):
            return False
        return any(prefix in text for prefix in self._token_prefixes)

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


def escape_trusted(text: str) -> str:
    """Escape text whose control tokens are real."""
    return text.replace(ESCAPE, ESCAPE + ESCAPE)


def split_escaped(text: str) -> list[str]:
    """Split escaped text into alternating parts: text whose control tokens are real, then the
    content of an escape sequence (a number, "-" or empty)."""
    return _ESCAPED.split(text)
