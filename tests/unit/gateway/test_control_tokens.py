# SPDX-License-Identifier: Apache-2.0
"""What the escaper of control tokens keeps in memory."""

from __future__ import annotations

import gc
import tracemalloc

from penstock.gateway.control_tokens import MAX_KEPT_CHARS, ControlTokenEscaper

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
