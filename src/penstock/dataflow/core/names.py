# SPDX-License-Identifier: Apache-2.0
"""Names of spaces and columns that mean something to the service, for servers and clients alike."""

from __future__ import annotations

TRAIN = "train"
"""The space of the rollout rows; users read it and never put into it."""
TURNS = "turns"
REWARD = "reward"
ADMITTED = "admitted"
"""Written by the service when some policy admits a row: the time of it."""
RESERVED = frozenset({TURNS, ADMITTED})
