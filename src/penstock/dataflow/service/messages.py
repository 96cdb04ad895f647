# SPDX-License-Identifier: Apache-2.0
"""The response that all audiences share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """Empty success response."""

    ok: bool = True
