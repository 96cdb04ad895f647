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

MARK = "\ufdd0"
APART = f"{MARK}-{MARK}"
_MARKED = re.compile(f"{MARK}(-|[0-9]*){MARK}")


class Marks:
    """The control tokens of one tokenizer, as text."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(words)
        self._places = {word: f"{MARK}{at}{MARK}" for at, word in enumerate(words)}
        self._places[MARK] = MARK + MARK
        longest_first = sorted(self._places, key=len, reverse=True)
        self._looks_alike = re.compile("|".join(map(re.escape, longest_first)))
        self._openings = tuple({word[:2] for word in self._places})
        cuts = [(word, at) for word in words for at in range(1, len(word))]
        self._heads = tuple({word[:at] for word, at in cuts})
        self._tails = tuple({word[at:] for word, at in cuts})
        self._guard_name = lru_cache(maxsize=1024)(self.guard)

    def guard(self, text: str) -> str:
        """Foreign text, marked: no part of it is a control token, whatever stands around it."""
        marked = text
        if any(opening in text for opening in self._openings):  # else the search costs ten times
            marked = self._looks_alike.sub(lambda found: self._places[found[0]], text)
        if marked.endswith(self._heads):
            marked += APART
        return APART + marked if marked.startswith(self._tails) else marked

    def guard_all(self, value: Any) -> Any:
        """Every string in a JSON value."""
        if isinstance(value, str):
            return self.guard(value)
        if isinstance(value, dict):
            items = cast(dict[str, Any], value).items()
            return {self._guard_name(key): self.guard_all(item) for key, item in items}
        if isinstance(value, list | tuple):
            return [self.guard_all(item) for item in cast(Sequence[Any], value)]
        return value


def escape(text: str) -> str:
    """Text whose control tokens are meant, marked."""
    return text.replace(MARK, MARK + MARK)


def split(text: str) -> list[str]:
    """Marked text in turns: text whose control tokens are meant, then what stood between two
    marks: a number, "-" or nothing."""
    return _MARKED.split(text)
