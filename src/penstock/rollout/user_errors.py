# SPDX-License-Identifier: Apache-2.0
"""Tracebacks of user functions, without penstock's own frames."""

from __future__ import annotations

import traceback
from pathlib import Path

from penstock.redaction import hide_secrets

MAX_DETAIL_CHARS = 2000
_OURS = (str(Path(__file__).parent), str(Path(__file__).parent.parent / "gateway"))


def user_traceback(error: BaseException) -> str:
    """The traceback with only the user's frames, at most 2,000 characters."""
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames if not frame.filename.startswith(_OURS)]
    lines = traceback.format_list(theirs[-8:])
    lines += traceback.format_exception_only(type(error), error)
    return shorten("".join(lines).strip())


def shorten(text: str) -> str:
    """Cut to 2,000 encodable characters without secrets: it is delivered, stored and shown. Keeps
    the end, where the error itself is."""
    text = hide_secrets(text.encode(errors="replace").decode())
    if len(text) <= MAX_DETAIL_CHARS:
        return text
    return text[:300] + " … " + text[-(MAX_DETAIL_CHARS - 303) :]
