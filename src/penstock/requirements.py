# SPDX-License-Identifier: Apache-2.0
"""What `penstock doctor` finds: a component of this machine, and how to add it if it is missing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Requirement:
    name: str
    is_present: bool
    detail: str
    needed_for: str
    fix: tuple[str, ...] = ()
