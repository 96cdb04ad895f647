# SPDX-License-Identifier: Apache-2.0
"""Names of spaces and columns that the service itself uses, for servers and clients."""

from __future__ import annotations

from penstock.types import SANDBOX_MS

TRAIN = "train"
"""The space of the rollout rows; users read it but never write to it."""
TURNS = "turns"
REWARD = "reward"
ORIGIN = "origin"
"""Not stored: what a rollout row was made from, for stages that score or repeat it."""
ADMITTED = "admitted"
"""When a policy first admitted the row; written by the service."""
RESERVED = frozenset({TURNS, ADMITTED, SANDBOX_MS})
EVAL = "eval"
"""The space of rows of evaluations; no trainer, stage or reader gets them."""
NUM_TURNS = "turns"
NUM_TOKENS = "tokens"
"""Scalars of a row of an evaluation: how many of each it has."""
