# SPDX-License-Identifier: Apache-2.0
"""Token ids to text, with the same result as the tokenizer's decoder.

The text of a byte-level tokenizer is the concatenated bytes of its tokens, so a lookup table
replaces the tokenizer's decoder, which is several times slower. All other tokenizers use their own
decoder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenizers import Tokenizer, decoders

Decode = Callable[[Sequence[int]], str]


def make_decoder(tokenizer: Tokenizer) -> Decode:
    """A decoder that keeps special tokens."""
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        look_up = _TokenBytes(tokenizer).__getitem__
        return lambda ids: b"".join(map(look_up, ids)).decode("utf-8", "replace")
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


class _TokenBytes(dict[int, bytes]):
    """Bytes of each token id, filled lazily; empty for unknown ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id) or ""
        try:
            found = bytes(map(_BYTES.__getitem__, token))
        except KeyError:  # an added token with characters outside the byte alphabet
            found = token.encode()
        self[token_id] = found
        return found


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: a printable byte maps to itself, any other to the next code point
    above 255."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unseen = [byte for byte in range(256) if byte not in seen]
    letters = {chr(byte): byte for byte in seen}
    return letters | {chr(256 + at): byte for at, byte in enumerate(unseen)}


_BYTES = _byte_alphabet()
