# SPDX-License-Identifier: Apache-2.0
"""Text to token ids: every call of a tokenizer that encodes passes here.

Owns what a tokenizer may be given, and what becomes of its errors. One that gives up panics, which
`except Exception` lets through and which would end the process; here it is a BadRequest.
"""

from __future__ import annotations

from asyncio import CancelledError
from collections.abc import Generator
from contextlib import contextmanager

from tokenizers import Tokenizer

from penstock.errors import BadRequest

MAX_CHARS = 8 << 20
"""Of one text: more than a window of a million tokens holds. The usual patterns give up at 10
million spaces."""


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
