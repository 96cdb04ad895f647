# SPDX-License-Identifier: Apache-2.0
"""Errors of user code: tracebacks without penstock's own frames, and the last words of programs."""

from __future__ import annotations

import traceback
from pathlib import Path

from penstock.redaction import excerpt, hide_secrets

MAX_DETAIL_CHARS = 2000
MAX_LAST_WORDS_CHARS = 1500
KEPT_ERROR_BYTES = 16 << 10
"""More than is shown, so that no secret is cut in two before it is hidden."""
_OURS = (str(Path(__file__).parent), str(Path(__file__).parent.parent / "gateway"))


def user_traceback(error: BaseException) -> str:
    """The traceback with only the user's frames, at most 2,000 characters."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    lines = traceback.format_list(theirs[-8:])
    lines += traceback.format_exception_only(type(error), error)
    return shorten("".join(lines).strip())


def last_words(printed: bytes | bytearray, max_chars: int = MAX_LAST_WORDS_CHARS) -> str:
    """The end of what a program printed, without secrets."""
    kept = printed[-KEPT_ERROR_BYTES:].decode(errors="replace").strip()
    return hide_secrets(kept)[-max_chars:]


def shorten(text: str) -> str:
    """Cut to 2,000 encodable characters without secrets: it is delivered, stored and shown. Keeps
    the end, where the error itself is."""
    return excerpt(text.encode(errors="replace").decode(), 300, MAX_DETAIL_CHARS - 303)
