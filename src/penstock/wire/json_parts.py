# SPDX-License-Identifier: Apache-2.0
"""How many parts a JSON text of others has, found before any of them is built.

While a text is decoded nothing else runs, and a part of two bytes takes up to a hundred in memory:
4 MB of empty lists are most of a second and 90 MB. Owns the limits; knows no message.
"""

from __future__ import annotations

from penstock.errors import BadRequest

MAX_CONTAINERS = 1 << 14
"""Lists and objects. A conversation has up to 2,048 messages, of some parts each."""
MAX_STRINGS = 1 << 17
"""Keys too."""
MAX_COMMAS = 1 << 19
"""A prompt of token ids has one for each."""


def require_few_parts(text: bytes) -> None:
    """Raise BadRequest for more. What stands inside of strings does not count: only a text that has
    many such characters is cut at its quotes."""
    if _is_few(text):
        return
    plain = text.replace(rb"\\", b"").replace(rb"\"", b"")
    if plain.count(b'"') <= 2 * MAX_STRINGS and _is_few(b"".join(plain.split(b'"')[::2])):
        return
    raise BadRequest(
        f"JSON with more than {MAX_CONTAINERS:,} lists and objects, {MAX_STRINGS:,} strings or "
        f"{MAX_COMMAS:,} values; send less at a time"
    )


def _is_few(text: bytes) -> bool:
    return (
        text.count(b"[") + text.count(b"{") <= MAX_CONTAINERS
        and text.count(b'"') <= 2 * MAX_STRINGS
        and text.count(b",") <= MAX_COMMAS
    )
