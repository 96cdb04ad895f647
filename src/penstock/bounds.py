# SPDX-License-Identifier: Apache-2.0
"""Bounds of values that cross the wire, as types; msgspec checks them while it decodes.

A bound is declared once, on the field of a message. Repeated fields (rows, turns) have cheap ones,
of lengths and numbers; a pattern costs ten times as much, so only fields of a request have one.
"""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

MAX_INT = (1 << 63) - 1
"""Largest integer that a ledger can store."""
MAX_FINITE = 1e300
"""Of a number: sums of millions of these are finite, so a ledger can store them, too."""
MAX_REWARD = 1e9
MAX_TURNS = 4096
MAX_TOKENS = 4_000_000
"""Of a row, over all branches: the trainer's unfolded samples must stay in proportion to the
payload."""
MAX_BRANCH_TURNS = 1 << 17
"""Of a row, over all branches: the trainer joins the turns of each from its root on, whether they
have tokens or not."""
MAX_ROW_BYTES = 256 << 20
"""Of a row, encoded; 100,000 tokens are about 1 MB."""
MAX_SESSION_BYTES = MAX_ROW_BYTES // 2
"""Of the turns of a session, encoded: it takes no more calls then. The last one may be long, and a
row has more than turns."""
MAX_TEXT_CHARS = 2000
"""Maximum length of an error or a reason, for people."""
MAX_ROLE_CHARS = 64
"""Maximum length of a role name; the ledger stores it with the row."""
MAX_ROW_ROLES = 64
"""Roles that the turns of a row may name."""
MAX_SHOWN_ROLES = 256
"""Of a batch or a run: status, metrics and statistics add up further ones as OTHER_ROLES."""
OTHER_ROLES = "(others)"
MAX_TOOL_CHARS = 16 << 10
"""How much is kept of the arguments and of the result of a tool call."""
MAX_TOOL_USES = 4096
MAX_SANDBOX_MS = 31 * 86_400_000
MAX_AGENT_CHARS = 64
_NO_NUL = r"^[^\u0000]*$"

Count = Annotated[int, Meta(ge=0, le=MAX_INT)]
TokenCount = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
"""Tokens of a row: of millions of rows, the ledger can store the sum."""
TokenSquares = Annotated[int, Meta(ge=0, le=MAX_TOKENS**2)]
"""Sum of the squares of numbers that add up to a TokenCount."""
Int64 = Annotated[int, Meta(ge=-MAX_INT - 1, le=MAX_INT)]
Finite = Annotated[float, Meta(ge=-MAX_FINITE, le=MAX_FINITE)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Moment = Annotated[float, Meta(ge=0, le=1e10)]
"""Seconds since 1970, until 2286: calendars and traces have no other times."""
Reward = Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)]
Id = Annotated[str, Meta(max_length=128, pattern=_NO_NUL)]
"""An id of a request, a process or a worker, chosen by its caller."""
MAX_LABEL_CHARS = 256
Label = Annotated[str, Meta(max_length=MAX_LABEL_CHARS)]
"""A short text of a repeated field."""
Text = Annotated[str, Meta(max_length=MAX_TEXT_CHARS)]
"""An error or a reason. May have model output in it; the ledger replaces what it cannot store."""
Role = Annotated[str, Meta(max_length=MAX_ROLE_CHARS)]
"""Part that a policy plays in a workflow."""
SAFE = Meta(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$(?!\n)")
SafeName = Annotated[str, SAFE]
"""A name that may become part of a path: no separator, no leading dot."""
Digest = Annotated[str, Meta(max_length=64, pattern=r"^[0-9a-f]{64}$")]
"""BLAKE3 in hex; names blobs and manifests, so it becomes part of paths."""
_SAFE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


def is_safe_name(text: str) -> bool:
    """Whether a text is a SafeName."""
    return _SAFE_NAME.fullmatch(text) is not None


def is_digest(text: str) -> bool:
    """Whether a text is a Digest."""
    return _DIGEST.fullmatch(text) is not None
