# SPDX-License-Identifier: Apache-2.0
"""The answer that every audience shares."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """A call that has nothing to say but yes."""

    ok: bool = True
