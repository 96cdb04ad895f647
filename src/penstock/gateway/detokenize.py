# SPDX-License-Identifier: Apache-2.0
"""Token ids to text, as the tokenizer's own decoder does it.

A byte-level tokenizer's text is the bytes of its tokens in a row, so a table replaces the walk
through the tokenizer, which costs several times as much. Every other kind is left to the
tokenizer itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenizers import Tokenizer, decoders

Decode = Callable[[Sequence[int]], str]


def make_decoder(tokenizer: Tokenizer) -> Decode:
    """Keeps special tokens."""
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        look_up = _TokenBytes(tokenizer).__getitem__
        return lambda ids: b"".join(map(look_up, ids)).decode("utf-8", "replace")
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


class _TokenBytes(dict[int, bytes]):
    """By id, filled as ids are met; nothing for an id that no token has."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        word = self._tokenizer.id_to_token(token_id) or ""
        try:
            found = bytes(map(_BYTES.__getitem__, word))
        except KeyError:  # an added token in letters that stand for no byte
            found = word.encode()
        self[token_id] = found
        return found


def _byte_alphabet() -> dict[str, int]:
    """The letter that stands for each byte: itself where it can be seen, else the next free one
    above the bytes."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    letters = {chr(byte): byte for byte in seen}
    return letters | {chr(256 + at): byte for at, byte in enumerate(unseen)}


_BYTES = _byte_alphabet()
