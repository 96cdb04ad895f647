# SPDX-License-Identifier: Apache-2.0
"""Text without accents and case, to compare what people write in several ways.

Owns how long that may take: Python sorts the marks on a letter by insertion, so that a long row of
them takes the square of its length."""

from __future__ import annotations

import unicodedata

_PIECE_CHARS = 256


def without_marks(text: str) -> str:
    """Compatibility forms written out, case folded, combining characters left out."""
    # Marks sort over the end of a piece only among themselves, and none of them stays.
    pieces = (text[at : at + _PIECE_CHARS] for at in range(0, len(text), _PIECE_CHARS))
    plain = "".join(unicodedata.normalize("NFKD", piece) for piece in pieces).casefold()
    return "".join(one for one in plain if not unicodedata.combining(one))
