# SPDX-License-Identifier: Apache-2.0
"""Text to token ids: every call of a tokenizer that encodes passes here.

Owns what a tokenizer may be given, and what becomes of its errors. One that gives up panics, which
`except Exception` lets through and which would end the process; here it is a BadRequest.
"""

from __future__ import annotations

import json
import re
from asyncio import CancelledError
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

from tokenizers import Tokenizer

from penstock.errors import BadRequest
from penstock.gateway.control_tokens import any_of
from penstock.types import JsonObject

MAX_CHARS = 8 << 20
"""Of one text: more than a window of a million tokens holds. The usual patterns give up at 10
million spaces."""
MAX_SEPARATORS = 512
"""To find more added tokens in a text takes longer than to tokenize it."""
MAX_KEPT, MAX_KEPT_CHARS = 8192, 4096
"""Pieces, and the characters of one; longer ones rarely repeat."""
MAX_KEPT_IDS = 1 << 20
"""Of all pieces: 40 MB. A character may have four ids, each of them an object."""
LOOK_AT_PIECES = frozenset({"ByteLevel", "Digits", "Split"})
"""Pre-tokenizers that look at each piece alone; others may look at where a text begins."""


class PieceEncoder:
    """Tokenizes what stands between two added tokens once, such as a system prompt, where that
    gives the same ids as the whole text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = _separators(tokenizer)
        self._split = re.compile(f"({any_of(self._added)})").split  # as a tokenizer finds them
        self._known: dict[str, list[int]] = {}
        self._num_ids = 0
        """Of the known pieces."""

    def encode(self, text: str) -> list[int]:
        if not self._added:
            return self._encode_piece(text)
        ids: list[int] = []
        for at, piece in enumerate(self._split(text)):
            if at % 2:
                ids.append(self._added[piece])
            elif piece:
                ids += self._encode_piece(piece)
        return ids

    def _encode_piece(self, piece: str) -> list[int]:
        ids = self._known.get(piece)
        if ids is None:
            ids = encode(self._tokenizer, piece)
            if len(piece) <= MAX_KEPT_CHARS:
                if len(self._known) >= MAX_KEPT or self._num_ids + len(ids) > MAX_KEPT_IDS:
                    self._known.clear()
                    self._num_ids = 0
                self._known[piece] = ids
                self._num_ids += len(ids)
        return ids


def _separators(tokenizer: Any) -> dict[str, int]:
    """The added tokens, by their text; empty if ids may depend on more than what stands between two
    of them."""
    if tokenizer.truncation is not None or tokenizer.padding is not None:
        return {}
    if not _looks_at_pieces(tokenizer.pre_tokenizer):
        return {}
    added = [
        (token.content, token_id, token.lstrip or token.rstrip or token.single_word)
        for token_id, token in tokenizer.get_added_tokens_decoder().items()
        if not token.normalized
    ]
    if len(added) > MAX_SEPARATORS or any(takes_more for _, _, takes_more in added):
        return {}
    return {content: token_id for content, token_id, _ in added}


def _looks_at_pieces(pre_tokenizer: Any) -> bool:
    if pre_tokenizer is None:
        return True
    state: JsonObject = json.loads(pre_tokenizer.__getstate__())
    parts = cast(list[JsonObject], state.get("pretokenizers", [state]))
    return all(part["type"] in LOOK_AT_PIECES for part in parts)


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids, without added ones. By the batch call: it releases Python's lock while it works,
    and finds no offsets."""
    check_length(text)
    with _refusing():
        [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return encoding.ids


def check_length(text: str) -> None:
    if len(text) > MAX_CHARS:
        raise BadRequest(
            f"the prompt has {len(text):,} characters; at most {MAX_CHARS:,} are tokenized"
        )


@contextmanager
def _refusing() -> Generator[None]:
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit, CancelledError):
        raise
    except (TypeError, UnicodeEncodeError):
        raise BadRequest("the prompt contains characters that cannot be encoded as UTF-8") from None
    except BaseException as error:  # a panic, too, is none of the above
        raise BadRequest(
            f"the model's tokenizer gave up on the prompt: {str(error)[:200]}"
        ) from None
