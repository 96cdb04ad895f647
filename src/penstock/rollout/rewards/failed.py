# SPDX-License-Identifier: Apache-2.0
"""A completion that could not be scored. It has a reason and no number."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.types import FailureKind


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    kind: FailureKind
    """`reward`, `reward_deadline` or `sandbox`."""
    detail: str
