# SPDX-License-Identifier: Apache-2.0
"""What an export says about the program that made it."""

from __future__ import annotations

from importlib.metadata import version

DISTRIBUTION = "penstock-rl"


def penstock_version() -> str:
    return version(DISTRIBUTION)
