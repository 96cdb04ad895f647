# SPDX-License-Identifier: Apache-2.0
"""What the escaper of control tokens writes, and keeps in memory."""

from __future__ import annotations

import gc
import random
import re
import tracemalloc

from penstock.gateway.control_tokens import (
    ESCAPE,
    MAX_KEPT_CHARS,
    SEPARATOR,
    ControlTokenEscaper,
    any_of,
)

TOKENS = ("<|im_start|>", "<|im_end|>")
KEPT_BYTES = 2 << 20


def test_long_keys_of_messages_are_not_kept() -> None:
    """A body of 4 MB can be one key; a thousand of them stayed in memory, and their escaped form
    with them."""
    escaper = ControlTokenEscaper(TOKENS)
    tracemalloc.start()
    for index in range(40):
        key = f"{index}<|im_end|>" + "a" * 500_000
        [(escaped, value)] = escaper.escape_untrusted_json({key: 1}).items()
        assert escaped == f"{index}\ufdd01\ufdd0" + "a" * 500_000 and value == 1
        del key, escaped
    gc.collect()
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < KEPT_BYTES


def test_short_keys_are_escaped_like_any_text() -> None:
    escaper = ControlTokenEscaper(TOKENS)
    for size in (1, MAX_KEPT_CHARS, MAX_KEPT_CHARS + 1):
        for text in ("a" * size, ("<|im_start|>" * size)[:size], "|>" + "b" * size):
            assert escaper.escape_untrusted_json({text: 0}) == {escaper.escape_untrusted(text): 0}


def escaped(text: str, tokens: tuple[str, ...]) -> str:
    """What `escape_untrusted` promises, in its simplest form."""
    numbers = {token: f"{ESCAPE}{at}{ESCAPE}" for at, token in enumerate(tokens)}
    numbers[ESCAPE] = ESCAPE + ESCAPE
    inner = re.sub(any_of(numbers), lambda found: numbers[found[0]], text)
    cuts = [(token[:at], token[at:]) for token in tokens for at in range(1, len(token))]
    before = any(inner.startswith(tail) for _, tail in cuts)
    after = any(inner.endswith(head) for head, _ in cuts)
    return before * SEPARATOR + inner + after * SEPARATOR


def test_what_is_skipped_for_speed_changes_no_text() -> None:
    draw = random.Random(0)
    for tokens in (TOKENS, ("<a>", "a<b", "bb"), ("b", "3b"), (f"<{ESCAPE}a", "b<"), ()):
        escaper = ControlTokenEscaper(tokens)
        letters = [*"<ab>3_|i", ESCAPE, *tokens]
        for _ in range(3_000):
            text = "".join(draw.choices(letters, k=draw.randrange(7)))
            assert escaper.escape_untrusted(text) == escaped(text, tokens), (text, tokens)
