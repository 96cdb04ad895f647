# SPDX-License-Identifier: Apache-2.0
"""Text in which control tokens and what merely looks like one are kept apart.

A tokenizer turns "<|im_start|>" into a control token wherever it finds it, so an agent could write
one into a user message. *Marked* text has such look-alikes replaced by marks, which the renderer
spells out in ordinary tokens. Owns the marks; knows nothing of templates or ids.

    ⌂3⌂    the fourth control token, as ordinary text
    ⌂-⌂    nothing; keeps apart two texts that would make a control token together
    ⌂⌂     the character ⌂ itself (U+FDD0, which Unicode keeps for such use)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

ESCAPE = "\ufdd0"
SEPARATOR = f"{ESCAPE}-{ESCAPE}"
_ESCAPED = re.compile(f"{ESCAPE}(-|[0-9]*){ESCAPE}")


class ControlTokenEscaper:
    """The control tokens of one tokenizer, as text."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        self._replacements = {word: f"{ESCAPE}{at}{ESCAPE}" for at, word in enumerate(words)}
        self._replacements[ESCAPE] = ESCAPE + ESCAPE
        longest_first = sorted(self._replacements, key=len, reverse=True)
        self._lookalikes = re.compile("|".join(map(re.escape, longest_first)))
        self._openings = tuple({word[:2] for word in self._replacements})
        cuts = [(word, at) for word in words for at in range(1, len(word))]
        self._heads = tuple({word[:at] for word, at in cuts})
        self._tails = tuple({word[at:] for word, at in cuts})
        self._escape_key = lru_cache(maxsize=1024)(self.escape_untrusted)

    def escape_untrusted(self, text: str) -> str:
        """Foreign text, marked: no part of it is a control token, whatever stands around it."""
        escaped = text
        if any(opening in text for opening in self._openings):  # else the search costs ten times
            escaped = self._lookalikes.sub(lambda found: self._replacements[found[0]], text)
        if escaped.endswith(self._heads):
            escaped += SEPARATOR
        return SEPARATOR + escaped if escaped.startswith(self._tails) else escaped

    def escape_untrusted_json(self, value: Any) -> Any:
        """Every string in a JSON value."""
        if isinstance(value, str):
            return self.escape_untrusted(value)
        if isinstance(value, dict):
            items = cast(dict[str, Any], value).items()
            return {self._escape_key(key): self.escape_untrusted_json(item) for key, item in items}
        if isinstance(value, list | tuple):
            return [self.escape_untrusted_json(item) for item in cast(Sequence[Any], value)]
        return value


def escape_trusted(text: str) -> str:
    """Text whose control tokens are meant, marked."""
    return text.replace(ESCAPE, ESCAPE + ESCAPE)


def split_escaped(text: str) -> list[str]:
    """Marked text in turns: text whose control tokens are meant, then what stood between two
    marks: a number, "-" or nothing."""
    return _ESCAPED.split(text)
